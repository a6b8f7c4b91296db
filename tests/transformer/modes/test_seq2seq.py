"""Sequence to sequence through the real program: train, score and translate on a 2x2 mesh."""

from __future__ import annotations

import pathlib
import random
import sys
import types

import gin
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import gin_config, utils

WORDS = dict(
  zip(
    "one two three four red blue green dog cat bird runs sleeps".split(),
    "un deux trois quatre rouge bleu vert chien chat oiseau court dort".split(),
  )
)
SMALL = [
  "num_layers = 1",
  "d_model = 64",
  "d_ff = 128",
  "num_heads = 2",
  "d_kv = 32",
  "dropout_rate = 0.0",
  "decoder/Unitransformer.label_smoothing = 0.0",
  "run.sequence_length = {'inputs': 32, 'targets': 32}",
  "Unitransformer.max_length = 32",
  "run.batch_size = ('sequences_per_batch', 16)",
  "run.iterations_per_loop = 25",
  "run.report_every = 100",
  "learning_rate_schedules.linear_warmup_decay.peak = 0.01",
  "learning_rate_schedules.linear_warmup_decay.warmup = 10",
]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  """Word-by-word translations: parallel files, and the same in two columns."""
  rng = random.Random(0)
  for split, count in (("train", 2000), ("val", 40)):
    lines = [rng.choices(list(WORDS), k=rng.randint(2, 5)) for _ in range(count)]
    pairs = [(" ".join(x), " ".join(WORDS[w] for w in x)) for x in lines]
    for side, suffix in enumerate(("en", "fr")):
      (tmp_path / f"{split}.{suffix}").write_text("".join(p[side] + "\n" for p in pairs))
    (tmp_path / f"{split}.tsv").write_text("".join("\t".join(p) + "\n" for p in pairs))
  return tmp_path


def bindings(folder: pathlib.Path, *more: str) -> list[str]:
  return [
    f"data_dir = '{folder}'",
    f"vocabulary_file = '{folder}/pieces.model'",
    "get_subword_vocabulary.vocab_size = 45",
    "train_inputs = 'train.en'",
    "train_targets = 'train.fr'",
    "files = {'train': (%train_inputs, %train_targets), 'validation': ('val.en', 'val.fr')}",
    *SMALL,
    *more,
  ]


def run(folder: pathlib.Path, *more: str):
  """`utils.run` on one device, in this process."""
  gin.clear_config()
  gin_config.parse_gin(["problems/multi30k.gin"], bindings(folder, *more))
  return utils.run(None, None, None, None, str(folder / "model"))


@pytest.mark.long
@pytest.mark.subprocess
def test_train_score_and_translate_as_a_program(folder, run_forked):
  """The commands of gin/problems/multi30k.gin, on a 2x2 mesh, with a small model."""
  pytest.importorskip("sentencepiece")
  pytest.importorskip("sacrebleu")
  common = ["-m", "mesh_tensorflow.transformer.main", f"--model_dir={folder}/model"]
  common += ["--gin_file=problems/multi30k.gin", "--gin_file=layouts/cpu_2x2.gin"]

  def program(*more: str) -> str:
    params = [f"--gin_param={b}" for b in bindings(folder, *more)]
    done = run_forked([*common, *params], timeout=280)
    assert "Traceback" not in done.stderr
    return done.stdout

  printed = program("run.train_steps = 300")
  assert "training a subword vocabulary of 45 pieces" in printed
  assert "heads        split over model" in printed and "batch        split over batch" in printed
  assert "step     300/300  loss" in printed

  printed = program("run.mode = 'eval'", "run.dataset_split = 'validation'")
  (line,) = [x for x in printed.splitlines() if x.startswith("step 300  validation: bleu ")]
  assert "(40 texts decoded in" in line
  assert 80 < float(line.split()[4]) <= 100
  written = folder / "model" / "validation_eval"
  assert (written / "validation_targets").read_text() == (folder / "val.fr").read_text()
  records = b"".join(
    r.numpy() for f in written.glob("events*") for r in tf.data.TFRecordDataset(str(f))
  )
  assert b"eval/validation/bleu" in records

  output = f"{folder}/translated"
  printed = program(
    "run.mode = 'infer'",
    f"decode_from_file.input_filename = '{folder}/val.en'",
    f"decode_from_file.output_filename = '{output}'",
  )
  assert "40 lines decoded" in printed
  # The same model and search make the same translations.
  predictions = (written / "validation_300_predictions").read_text()
  assert pathlib.Path(f"{output}-300").read_text() == predictions


def test_columns_bytes_and_perplexity(folder):
  """Without any extra package: bytes for vocabulary, one file of two columns."""
  plain = [
    "files = {'train': 'train.tsv', 'validation': 'val.tsv'}",
    "run.vocabulary = @vocabulary.get_byte_vocabulary()",
    "run.sequence_length = {'inputs': 64, 'targets': 64}",
    "Unitransformer.max_length = 64",
    "dataset.parallel_text_eval_datasets.metric_fns = []",
  ]
  losses = run(folder, *plain, "run.train_steps = 25", "run.save_checkpoints_steps = 25")
  assert len(losses) == 25 and losses[-1] < 0.8 * losses[0]
  for mode in ("perplexity_eval", "eval"):
    metrics = run(folder, *plain, f"run.mode = '{mode}'", "run.dataset_split = 'validation'")
    assert 0 < metrics["validation"]["loss"] < losses[0]
    targets = (folder / "val.fr").read_text()
    # All bytes of the lines are scored, and EOS in place of the line's end.
    assert metrics["validation"]["num_eval_tokens"] == len(targets)


@pytest.mark.parametrize(
  ("more", "error", "text"),
  [
    (["train_inputs = 'nowhere.en'"], errors.DataError, "there is no file .*nowhere.en"),
    (["files = {'train': ('train.en', 'val.fr')}"], errors.DataError, "equally many lines"),
    (["files = {'train': 'train.en'}"], errors.DataError, "line 1: 1 column"),
    (["run.sequence_length = {'inputs': 2, 'targets': 2}"], errors.DataError, "all 2000 pairs"),
    (["run.mode = 'eval'", "run.dataset_split = 'test'"], errors.ConfigError,
     "no files for split 'test', only for .*'train', 'validation'"),
    (["run.mode = 'eval'", "run.dataset_split = 'validation'"], errors.ConfigError,
     "no checkpoint in .*train first"),
    (["run.mode = 'infer'", "decode_from_file.input_filename = 'x'",
      "decode_from_file.output_filename = 'y'"], errors.ConfigError, "no checkpoint in"),
    (["run.model_type = 'lm'"], errors.DataError, "takes 'targets' only"),
  ],
)  # fmt: skip
def test_wrong_input_is_one_clear_error(folder, more, error, text):
  pytest.importorskip("sentencepiece")
  with pytest.raises(error, match=f"(?s){text}"):
    run(folder, "run.train_steps = 5", *more)


# ------------------------------------------------------------------- WMT problems, in miniature

TINY = [
  "num_layers = 1",
  "d_model = 16",
  "d_ff = 16",
  "num_heads = 2",
  "d_kv = 8",
  "run.sequence_length = {'inputs': 32, 'targets': 32}",
  "Unitransformer.max_length = 32",
  "run.batch_size = ('sequences_per_batch', 2)",
  "run.train_steps = 2",
]


def run_problem(problem: str, folder: pathlib.Path, *more: str):
  gin.clear_config()
  files = [f"problems/{problem}.gin", "models/aiayn_base.gin", "layouts/single.gin"]
  gin_config.parse_gin(files, [*TINY, *more])
  return utils.run(None, None, None, None, str(folder / problem))


@pytest.mark.slow
def test_t2t_records_and_vocabulary(tmp_path):
  subtokens = ["<pad>_", "<EOS>_", *"\\u;0123456789_abc", "a_", "bc_"]
  name = "vocab.translate_ende_wmt32k.32768.subwords"
  (tmp_path / name).write_text("".join(f"'{s}'\n" for s in subtokens))
  with tf.io.TFRecordWriter(str(tmp_path / "translate_ende_wmt32k-train-00000-of-00001")) as w:
    for ids in ([18, 19, 1], [19, 1], [16, 17, 14, 1]):
      value = tf.train.Feature(int64_list=tf.train.Int64List(value=ids))
      features = tf.train.Features(feature={"inputs": value, "targets": value})
      w.write(tf.train.Example(features=features).SerializeToString())
  folders = [f"{x}.data_dir = '{tmp_path}'" for x in ("pretokenized_t2t_dataset",
                                                      "get_t2t_vocabulary")]  # fmt: skip
  losses = run_problem("t2t_ende", tmp_path, *folders)
  assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)


@pytest.mark.slow
def test_tfds_translation_with_a_vocabulary_of_its_own(tmp_path, monkeypatch):
  pytest.importorskip("sentencepiece")
  pytest.importorskip("sacrebleu")
  texts = [{"de": "ein Hund", "en": "a dog"}, {"de": "eine Katze", "en": "a cat"}] * 4
  loaded = []

  def load(name, split, as_supervised, data_dir, shuffle_files, read_config=None):
    loaded.append((name, split, data_dir))
    columns = {k: [t[k] for t in texts] for k in ("de", "en")}
    return tf.data.Dataset.from_tensor_slices(columns)

  fake = types.SimpleNamespace(load=load, ReadConfig=types.SimpleNamespace)
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", fake)
  more = [
    f"vocabulary_file = '{tmp_path}/pieces.model'",
    "get_subword_vocabulary.vocab_size = 300",
    "get_subword_vocabulary.model_type = 'bpe'",
    "tfds_data_dir = 'there'",
  ]
  losses = run_problem("wmt14_ende", tmp_path, *more)
  assert len(losses) == 2
  assert set(loaded) == {("wmt14_translate/de-en", "train", "there")}
  evaluation = ["run.mode = 'eval'", "run.dataset_split = 'test'"]
  metrics = run_problem("wmt14_ende", tmp_path, *more, *evaluation)
  assert 0 <= metrics["test"]["bleu"] <= 100
  folder = tmp_path / "wmt14_ende" / "test_eval"
  assert (folder / "test_inputs").read_text() == "a dog\na cat\n" * 4
  assert (folder / "test_targets").read_text() == "ein Hund\neine Katze\n" * 4
