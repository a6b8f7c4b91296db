"""Decoding and scoring of texts, with an estimator that copies its inputs; BLEU."""

from __future__ import annotations

import logging
import sys
import types

import gin
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import (
  bleu,
  dataset,
)
from mesh_tensorflow.transformer.generation import seq2seq
from mesh_tensorflow.transformer.model import bitransformer
from mesh_tensorflow.transformer.modes import eval as eval_mode
from mesh_tensorflow.transformer.modes import infer
from mesh_tensorflow.transformer.vocabulary import CharacterVocabulary
from tests.transformer import small_checkpoints

LETTERS = CharacterVocabulary("abcdefghij ")
LENGTH = {"inputs": 16, "targets": 12}


class Copier:
  """Stands for a `Trainer` whose model's output is its input, followed by rubbish."""

  def __init__(self, model_dir, checkpoints=(5,)):
    self.steps = types.SimpleNamespace(model=self, batch_size=4)
    self.model_dir = str(model_dir)
    self.mesh_impl = types.SimpleNamespace(variable_store=types.SimpleNamespace(noise_seed=0))
    self.calls = []
    self.global_step = 0
    for step in checkpoints:
      small_checkpoints.write(model_dir, step)

  def decode(self, inputs, max_decode_length=None):
    raise AssertionError("only its signature is looked at")

  def sample(self, rows, length, batch_size=None, **options):
    self.calls.append((list(map(len, rows)), length, batch_size, options))
    result = np.full([len(rows), options.get("max_decode_length", length)], 9)
    for i, row in enumerate(rows):
      ids = row[: result.shape[1]]
      result[i, : len(ids)] = ids
    return result.tolist()

  def restore_for_inference(self, path):
    self.global_step = int(path.split("-")[-1])


def encoded(*texts):
  return [[*LETTERS.encode(t), 1] for t in texts]


def test_generate_sorts_by_length_and_gives_back_in_order(tmp_path):
  copier = Copier(tmp_path)
  rows = encoded("abc", "a", "abcdefgh", "", "ab")
  outputs = seq2seq.generate(copier, rows, LENGTH, batch_size=2)
  assert [LETTERS.decode(ids) for ids in outputs] == ["abc", "a", "abcdefgh", "", "ab"]
  # Batches of similar lengths; lengths are rounded up, and end at that of the model.
  options = {"max_decode_length": 12}
  assert copier.calls == [([9, 4], 12, 2, options), ([3, 2, 1], 8, 2, options)]
  seq2seq.generate(copier, encoded("abc"), LENGTH)
  assert copier.calls[2][1] == 8
  seq2seq.generate(copier, encoded("a" * 11), {"inputs": 12, "targets": 12})
  assert copier.calls[3][1] == 12


def test_a_bound_decode_length_stays(tmp_path):
  assert bitransformer.Bitransformer.decode  # Registers the name that is bound.
  gin.bind_parameter("Bitransformer.decode.max_decode_length", 30)
  copier = Copier(tmp_path)
  seq2seq.generate(copier, encoded("abc"), LENGTH)
  assert copier.calls[0][3] == {}


def test_encode_lines_cuts_and_tells(caplog):
  with caplog.at_level(logging.WARNING):
    rows = seq2seq.encode_lines(["ab ", "a" * 9, "a" * 4], LETTERS, 5)
  assert rows == [*encoded("ab", "aaaa", "aaaa")]
  assert "1 of 3 inputs are cut" in caplog.text and "line 2" in caplog.text


def test_decode_from_file(tmp_path, capsys):
  copier = Copier(tmp_path)
  copier.global_step = 7
  (tmp_path / "in").write_text("abc\n\nfed\n")
  kwargs = dict(
    vocabulary=LETTERS, model_type="bitransformer", batch_size=4, sequence_length=LENGTH,
    output_filename=str(tmp_path / "new" / "out"),
  )  # fmt: skip
  lines = infer.decode_from_file(copier, input_filename=str(tmp_path / "in"), repeats=2, **kwargs)
  assert lines == ["abc", "abc", "", "", "fed", "fed"]
  assert (tmp_path / "new" / "out-7").read_text() == "abc\nabc\n\n\nfed\nfed\n"
  assert "6 lines decoded" in capsys.readouterr().out
  (tmp_path / "empty").write_text("")
  with pytest.raises(errors.DataError, match="empty.* is empty"):
    infer.decode_from_file(copier, input_filename=str(tmp_path / "empty"), **kwargs)
  with pytest.raises(errors.DataError, match="nowhere.* cannot be read"):
    infer.decode_from_file(copier, input_filename=str(tmp_path / "nowhere"), **kwargs)


def eval_datasets(folder, metric_fns):
  def make(sequence_length, vocabulary, dataset_split):
    return dataset.parallel_text_eval_datasets(
      sequence_length, vocabulary, dataset_split, {"test": "pairs.tsv"}, str(folder),
      name="pairs", metric_fns=metric_fns,
    )  # fmt: skip

  return make


def evaluate(copier, folder, make, **kwargs):
  arguments = dict(eval_summary_dir=None, eval_checkpoint_step=None)
  arguments.update(kwargs)
  return eval_mode.eval_model(copier, LETTERS, LENGTH, 2, "test", str(folder), make, **arguments)


def exact(targets, predictions):
  return {"exact": 100 * np.mean([t == p for t, p in zip(targets, predictions)])}


def count(targets, predictions):
  return {"count": len(predictions) + len(targets)}


def test_eval_model_writes_and_prints(tmp_path, capsys):
  (tmp_path / "pairs.tsv").write_text("abc\tabc\nfed\tabc\nab ab\tab ab\nhij\thij\n")
  copier = Copier(tmp_path, checkpoints=(5, 9))
  results = evaluate(
    copier, tmp_path, eval_datasets(tmp_path, [exact, count]), eval_checkpoint_step="all",
    eval_dir_suffix="more",
  )  # fmt: skip
  assert results == {"pairs": {"exact": 75.0, "count": 8.0}}
  printed = capsys.readouterr().out.splitlines()
  assert printed[0].startswith("step 5  pairs: exact 75.00  count 8.00  (4 texts decoded in ")
  assert printed[1].startswith("step 9  pairs: exact 75.00")
  folder = tmp_path / "test_eval_more"
  assert (folder / "pairs_inputs").read_text() == "abc\nfed\nab ab\nhij\n"
  assert (folder / "pairs_targets").read_text() == "abc\nabc\nab ab\nhij\n"
  for step in (5, 9):
    assert (folder / f"pairs_{step}_predictions").read_text() == "abc\nfed\nab ab\nhij\n"
  records = b"".join(
    r.numpy() for f in folder.glob("events*") for r in tf.data.TFRecordDataset(str(f))
  )
  assert records.count(b"eval/pairs/exact") == 2


def test_eval_model_without_files_and_without_metrics(tmp_path):
  (tmp_path / "pairs.tsv").write_text("abc\tabc\n")
  copier = Copier(tmp_path)
  out = str(tmp_path / "elsewhere")
  make = eval_datasets(tmp_path, [exact])
  result = evaluate(copier, tmp_path, make, eval_summary_dir=out, output_eval_examples=False)
  assert result == {"pairs": {"exact": 100.0}}
  assert [p.name[:6] for p in (tmp_path / "elsewhere").iterdir()] == ["events"]
  assert evaluate(copier, tmp_path, eval_datasets(tmp_path, [])) == {}


def test_eval_model_decodes_targets_that_have_no_text(tmp_path):
  packed = {"inputs": [5, 6, 1, 0], "targets": [5, 7, 1, 0]}

  def make(**kwargs):
    def dataset_fn(sequence_length=None):
      return tf.data.Dataset.from_tensors(packed)

    def postprocess(text, example=None, is_target=False):
      return text.upper() if is_target else text

    return [dataset.EvalDataset("ids", dataset_fn, postprocess, [lambda t, p: {"n": t == ["CE"]}])]

  packed["targets"] = [*LETTERS.encode("ce"), 1, 0]
  assert evaluate(Copier(tmp_path), tmp_path, make) == {"ids": {"n": 1.0}}
  packed["inputs_segmentation"] = [1, 1, 1, 0]
  with pytest.raises(errors.DataError, match=r"single \(not packed\) examples"):
    evaluate(Copier(tmp_path), tmp_path, make)
  del packed["inputs"], packed["inputs_segmentation"]
  with pytest.raises(errors.DataError, match="'ids' has features.*must yield"):
    evaluate(Copier(tmp_path), tmp_path, make)


def test_eval_model_tells_of_inputs_that_are_cut(tmp_path, caplog):
  (tmp_path / "pairs.tsv").write_text(f"{'a' * 15}\tb\n{'a' * 16}\tb\n")
  with caplog.at_level(logging.WARNING):
    evaluate(Copier(tmp_path), tmp_path, eval_datasets(tmp_path, [count]))
  assert "data set pairs: 1 of 2 inputs are cut to 16 tokens" in caplog.text


def test_no_checkpoint_is_an_error(tmp_path):
  (tmp_path / "pairs.tsv").write_text("abc\tabc\n")
  with pytest.raises(errors.ConfigError, match="there is no checkpoint in .*; train first"):
    evaluate(Copier(tmp_path, ()), tmp_path, eval_datasets(tmp_path, [exact]))


# --------------------------------------------------------------------------------- BLEU


def test_bleu_of_a_hand_counted_text():
  pytest.importorskip("sacrebleu")
  # 5 words; 4 of 5, 3 of 4, 2 of 3 and 1 of 2 n-grams are right; the lengths are equal.
  score = bleu.bleu(["the cat sat on mats"], ["the cat sat on rugs"])["bleu"]
  assert score == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
  # A prediction of 4 words for 5: all n-grams are right, and the brevity penalty counts.
  score = bleu.bleu(["the cat sat on mats"], ["the cat sat on"])["bleu"]
  assert score == pytest.approx(100 * np.exp(1 - 5 / 4))
  assert bleu.bleu(["The cat sat on mats"], ["the cat sat on mats"])["bleu"] < 100
  assert bleu.bleu(["The Cat sat on mats"], ["the cat sat on mats"], lowercase=True) == {
    "bleu": pytest.approx(100)
  }
  two = [["a b c d", "e f g h"], ["a b c d", "i j k l"]]
  assert bleu.bleu(two, ["e f g h", "i j k l"])["bleu"] == pytest.approx(100)


def test_scores_have_signatures():
  sacrebleu = pytest.importorskip("sacrebleu")
  score = bleu.bleu(["the cat sat on mats"], ["the cat sat on rugs"], lowercase=True)["bleu"]
  version = sacrebleu.__version__
  assert score.signature == f"nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:{version}"


def test_bleu_of_moses_tokens():
  """Beside sacrebleu's of texts that are tokenized by hand, as Moses does."""
  sacrebleu = pytest.importorskip("sacrebleu")
  sacremoses = pytest.importorskip("sacremoses")
  targets = ["L’homme qu'on voit n’est pas M. Dupont, aujourd'hui.", "Deux chiens jouent (dehors)."]
  predictions = ["l'homme qu'on voit est M. Dupont, aujourd'hui.", "Deux chiens jouent dehors ."]
  tokens = [
    "l' homme qu' on voit n' est pas m. dupont , aujourd' hui .",
    "deux chiens jouent ( dehors ) .",
  ]
  of_predictions = [
    "l' homme qu' on voit est m. dupont , aujourd' hui .",
    "deux chiens jouent dehors .",
  ]
  want = sacrebleu.corpus_bleu(of_predictions, [tokens], tokenize="none", force=True).score
  score = bleu.moses_bleu(targets, predictions, "fr")["moses_bleu"]
  assert score == pytest.approx(want) and 20 < want < 90
  assert f"case:lc|eff:no|tok:moses-fr-sacremoses-{sacremoses.__version__}|" in score.signature
  assert bleu.moses_bleu(targets, predictions, "fr", lowercase=False)["moses_bleu"] < score


def test_bleu_wrong_input(monkeypatch):
  pytest.importorskip("sacrebleu")
  for targets, predictions in ((["a"], []), ([["a"], ["b", "c"]], ["a", "b"]), ([], [])):
    with pytest.raises(errors.DataError, match=f"bleu: {len(predictions)} predictions"):
      bleu.bleu(targets, predictions)
  monkeypatch.setitem(sys.modules, "sacrebleu", None)
  with pytest.raises(errors.ConfigError, match="pip install sacrebleu"):
    bleu.bleu(["a"], ["a"])
