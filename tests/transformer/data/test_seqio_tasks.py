"""Gin files of T5 with tasks of seqio, without the package t5."""

from __future__ import annotations

import re
import sys

import gin
import numpy as np
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import gin_config, utils, vocabulary
from mesh_tensorflow.transformer.data import seqio_tasks
from mesh_tensorflow.transformer.gin_config import model_config
from tests.transformer.data import fake_seqio

# The lines of T5's files, with their names and order.
DATASET = """
import t5.models.mesh_transformer
MIXTURE_NAME = 'glue_v002_proportional'
mesh_train_dataset_fn.use_cached = False
utils.run.train_dataset_fn = @t5.models.mesh_transformer.mesh_train_dataset_fn
mesh_train_dataset_fn.mixture_or_task_name = %MIXTURE_NAME
mesh_transformer.get_vocabulary.mixture_or_task_name = %MIXTURE_NAME
utils.run.vocabulary = @mesh_transformer.get_vocabulary()
"""
EVAL = """
import t5.models.mesh_transformer
eval_checkpoint_step = "all"
mesh_eval_dataset_fn.mixture_or_task_name = %MIXTURE_NAME
utils.run.eval_dataset_fn = @t5.models.mesh_transformer.mesh_eval_dataset_fn
utils.run.mode = "eval"
Bitransformer.decode.max_decode_length = 4
utils.run.eval_checkpoint_step = %eval_checkpoint_step
"""
INFER_FROM_TASK = """
infer_checkpoint_step = "all"
output_filename = "/path/to/outputs"
utils.run.mode = "infer"
utils.run.eval_checkpoint_step = %infer_checkpoint_step
infer_model.decode_fn = @decode_from_dataset
decode_from_dataset.decode_output_dir = %output_filename
decode_from_dataset.dataset_split = "train"
decode_from_dataset.infer_dataset_fn = @t5.models.mesh_transformer.mesh_inference_dataset_fn
mesh_inference_dataset_fn.mixture_or_task_name = %MIXTURE_NAME
mesh_inference_dataset_fn.priming_sequence_length=4
"""
SCORE = """
import t5.models.mesh_transformer
scores_filename = "/path/to/scores"
utils.run.mode = "score_from_dataset"
score_from_dataset.score_dataset_fn = @t5.models.mesh_transformer.mesh_eval_dataset_fn
score_from_dataset.score_postprocess_fn = @save_scores
save_scores.scores_filename = %scores_filename
mesh_eval_dataset_fn.mixture_or_task_name = %MIXTURE_NAME
"""
SPAN = """
preprocessors.unsupervised.preprocessors = [
@preprocessors.select_random_chunk,
@preprocessors.denoise,
]
preprocessors.select_random_chunk.max_length = 65536
noise_density = 0.15
preprocessors.denoise.noise_density = %noise_density
preprocessors.denoise.inputs_fn = @noise_token_to_sentinel
preprocessors.random_spans_helper.inputs_length = 512
targets_length = @preprocessors.random_spans_targets_length()
utils.run.sequence_length = {"inputs": 512, "targets": 192}
vocabularies.Vocabulary.extra_ids = 100
sentencepiece_vocabulary.SentencePieceVocabulary.extra_ids = 100
d_ff = 48
"""
SMALL = [
  *("num_layers = 1", "d_model = 16", "d_ff = 16", "num_heads = 2", "d_kv = 8"),
  *("run.sequence_length = {'inputs': 12, 'targets': 12}", "Unitransformer.max_length = 12"),
  *("run.batch_size = 4", "run.mesh_shape = ''", "run.layout_rules = ''"),
  "get_variable_dtype.activation_dtype = 'float32'",
  "MIXTURE_NAME = 'pairs'",
]
PAIRS = [{"inputs": f"say {w}", "targets": w} for w in ("ab", "CD", "ef", "gh", "ij")]


def accuracy(targets, predictions):
  return {"accuracy": float(np.mean([t == p for t, p in zip(targets, predictions)]))}


def mean_score(targets, scores):
  assert targets == ["ab", "cd", "ef", "gh", "ij"]
  return {"mean": float(np.mean(scores))}


@pytest.fixture
def tasks(monkeypatch):
  """The module seqio, with a task of pairs and one of a language model."""
  one = fake_seqio.ByteVocabulary
  pairs = fake_seqio.Task(
    "pairs", PAIRS, {"inputs": one(), "targets": one()}, [accuracy, mean_score]
  )
  texts = fake_seqio.Task("texts", [{"targets": "to be or not"}], {"targets": one()})
  other = fake_seqio.Task("other", PAIRS, {"inputs": one(3), "targets": one()})
  monkeypatch.setitem(sys.modules, "seqio", fake_seqio.module(pairs, texts, other))
  monkeypatch.setitem(sys.modules, "t5", None)
  return {t.name: t for t in (pairs, texts, other)}


def parse(folder, *texts, bindings=(), **options) -> None:
  names = []
  for i, text in enumerate(texts):
    (folder / f"{i}.gin").write_text(text)
    names.append(str(folder / f"{i}.gin"))
  gin.clear_config()
  gin_config.parse_gin(["models/bi_base.gin", *names], [*SMALL, *bindings], **options)


@pytest.mark.slow
def test_files_of_t5_train_evaluate_score_and_decode(tasks, tmp_path, capsys):
  """One after the other, as T5's README has them; the pair of equal vocabularies is one."""
  model = str(tmp_path / "m")
  parse(tmp_path, DATASET, bindings=["run.train_steps = 2"])
  losses = utils.run(None, None, None, None, model)
  assert len(losses) == 2 and np.all(np.isfinite(losses))
  assert tasks["pairs"].asked[0] == dict(
    length={"inputs": 12, "targets": 12}, split="train", cached=False, shuffle=True, seed=None
  )
  split = "utils.run.dataset_split = 'validation'"
  parse(tmp_path, DATASET, EVAL, bindings=[split])
  results = utils.run(None, None, None, None, model)
  assert set(results["pairs"]) == {"accuracy"}
  parse(tmp_path, DATASET, EVAL, bindings=[split, "run.mode = 'score_eval'"])
  scored = utils.run(None, None, None, None, model)
  assert set(scored["pairs"]) == {"mean"} and scored["pairs"]["mean"] < 0
  out = tmp_path / "scores"
  parse(tmp_path, DATASET, SCORE, bindings=[split, f"scores_filename = '{out}'"])
  scores, _ = utils.run(None, None, None, None, model)
  assert np.mean(scores) == pytest.approx(scored["pairs"]["mean"], rel=1e-4)
  parse(tmp_path, DATASET, INFER_FROM_TASK, bindings=[f"output_filename = '{tmp_path}/out'"])
  (tmp_path / "out").mkdir()
  utils.run(None, None, None, None, model)
  assert len((tmp_path / "out" / "pairs_2_predictions").read_text().splitlines()) == 5
  # What the training wrote is read, too: it has the names, and no import of T5.
  gin.clear_config()
  gin_config.parse_gin([f"{model}/operative_config.gin"], [])
  assert "t5.models" not in (tmp_path / "m" / "operative_config.gin").read_text().split("#")[0]


def test_a_pair_of_equal_vocabularies_is_one(tasks):
  gin.clear_config()
  with gin.unlock_config():
    gin.bind_parameter("get_vocabulary.mixture_or_task_name", "pairs")
  assert isinstance(seqio_tasks.get_vocabulary(), fake_seqio.ByteVocabulary)
  assert isinstance(seqio_tasks.get_vocabulary("texts"), fake_seqio.ByteVocabulary)
  inputs, targets = seqio_tasks.get_vocabulary("other")
  assert inputs.vocab_size == targets.vocab_size + 3


@pytest.mark.parametrize(
  ("then", "now", "told"),
  [
    ("ab", "a", "vocabulary of targets was B"),
    ("aa", "a", None), ("a", "aa", None), ("aa", "aa", None), ("a", "a", None),
    ("a", "ab", "vocabulary of targets was A of 5 ids.*now B"), ("ba", "a", "of inputs was B"),
    ("a", "b", "the vocabulary was A"), ("", "a", None),
  ],
)  # fmt: skip
def test_vocabularies_of_a_checkpoint_and_of_a_model(then, now, told):
  """Also of a checkpoint that kept a pair of equal ones, as the TF1 library's users have them."""
  described = {k: {"class": k.upper(), "size": 5 if k == "a" else 6, "digest": k * 8} for k in "ab"}
  found = model_config._vocabulary_differences(
    [described[k] for k in then], [described[k] for k in now]
  )
  if told is None:
    assert found == []
  else:
    assert len(found) == 1
    assert re.search(told, found[0])


def test_objectives_of_t5_are_left_out_with_a_line(tasks, tmp_path, caplog):
  parse(tmp_path, DATASET, SPAN)
  told = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
  assert len(told) == 1 and "1.gin:2: preprocessors.unsupervised.preprocessors" in told[0]
  assert gin.query_parameter("d_ff/macro.value") == 16
  with pytest.raises(errors.ConfigError, match="no macro 'targets_length' is bound"):
    parse(
      tmp_path, SPAN, bindings=["run.sequence_length = {'inputs': 8, 'targets': %targets_length}"]
    )


@pytest.mark.parametrize(
  "line", ["preprocessors.denoize.noise_density = 0.1", "mesh_trian_dataset_fn.seed = 1",
           "mesh_train_dataset_fn.sed = 1", "my.Vocabulary.extra_ids = 1"]
)  # fmt: skip
def test_a_name_that_is_not_t5s_is_an_error(tasks, tmp_path, line):
  with pytest.raises(errors.ConfigError, match="0.gin:1"):
    parse(tmp_path, line)


@pytest.mark.parametrize("names", ["t5.data.preprocessors", "t5.data", "t5.seqio"])
def test_other_modules_of_t5_are_left_out_with_a_line(tasks, tmp_path, caplog, names):
  parse(tmp_path, f"import {names}\nd_ff = 48\n")
  assert f"import of {names} is left out: the package t5 is not installed" in caplog.text


def test_a_module_that_fails_to_import_is_typed(tmp_path, monkeypatch):
  """T5 0.9.4 raises an AttributeError: gin.tf needs tf.estimator."""
  (tmp_path / "fails_at_import.py").write_text("import tensorflow as tf\ntf.estimator.x\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(errors.ConfigError, match=r"import of fails_at_import failed: AttributeError"):
    parse(tmp_path, "import fails_at_import\n")


def test_without_seqio(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "seqio", None)
  parse(tmp_path, DATASET)
  with pytest.raises(errors.ConfigError, match="pip install seqio"):
    utils.run(None, None, None, None, str(tmp_path / "m"))


@pytest.mark.parametrize(
  ("arguments", "told"),
  [
    (dict(mixture_or_task_name="pears"), "no task or mixture 'pears' \\(it has other, pairs,"),
    (dict(dataset_split="test"), "pairs has no split 'test'; it has train, validation"),
    (dict(use_cached=True), "pairs, split 'train': 'pairs' does not exist in any of the"),
    (dict(vocabulary=vocabulary.CharacterVocabulary("ab")), "run.vocabulary has 4; bind"),
  ],
)  # fmt: skip
def test_what_seqio_does_not_know_is_told(tasks, arguments, told):
  given = {"mixture_or_task_name": "pairs", "sequence_length": 12, **arguments}
  with pytest.raises(errors.ConfigError, match=told):
    seqio_tasks.mesh_train_dataset_fn(**given)


@pytest.mark.parametrize("pack", [True, False])
def test_rows_of_training(tasks, pack):
  rows = seqio_tasks.mesh_train_dataset_fn(
    "pairs", {"inputs": 24, "targets": 12}, tasks["pairs"].output_features["targets"].vocabulary,
    shuffle=False, pack=pack,
  )  # fmt: skip
  rows = list(rows.as_numpy_iterator())
  assert all(r["inputs"].shape == (24,) and r["targets"].shape == (12,) for r in rows)
  assert ("inputs_segmentation" in rows[0]) == pack and len(rows) == (2 if pack else 5)
  assert sum(np.sum(r["targets"] == 1) for r in rows) == 5


def test_a_language_model_goes_on_from_its_targets(tasks):
  (made,) = seqio_tasks.mesh_inference_dataset_fn(
    "texts", {"targets": 20}, "train", priming_sequence_length=5
  )
  (example,) = made.dataset_fn().as_numpy_iterator()
  assert example["inputs"].tolist() == example["targets"][:5].tolist()
  (made,) = seqio_tasks.mesh_inference_dataset_fn("texts", {"targets": 20}, "train")
  with pytest.raises(errors.DataError, match="bind mesh_inference_dataset_fn.priming_sequence"):
    made.dataset_fn()


@pytest.mark.parametrize("count", [None, 2])
def test_examples_of_an_evaluation(tasks, count):
  (made,) = seqio_tasks.mesh_eval_dataset_fn("pairs", 12, num_eval_examples=count)
  examples = list(made.dataset_fn().as_numpy_iterator())
  assert len(examples) == (count or 5) and examples[0]["targets_pretokenized"] == b"ab"
  (made,) = seqio_tasks.mesh_eval_dataset_fn("pairs", 12, pack=True)
  assert "targets_position" in made.dataset_fn().element_spec


def test_tsv_needs_no_seqio(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "seqio", None)
  (tmp_path / "a.tsv").write_text('say "hi"\thi\nsay a long, long thing\tlong\n')
  bound = [
    "utils.run.train_dataset_fn = @t5.models.mesh_transformer.tsv_dataset_fn",
    f"tsv_dataset_fn.filename = '{tmp_path}/*.tsv'",
  ]
  parse(tmp_path, "", bindings=bound)
  known = vocabulary.ByteVocabulary()
  rows = seqio_tasks.tsv_dataset_fn(sequence_length={"inputs": 12, "targets": 12}, vocabulary=known)
  rows = list(rows.as_numpy_iterator())
  texts = {known.decode(np.trim_zeros(r["inputs"])[:-1]) for r in rows}
  assert texts == {'say "hi"', "say a long,"}
  with pytest.raises(errors.ConfigError, match="there is no such file"):
    seqio_tasks.tsv_dataset_fn("none.tsv", 12, vocabulary=known)
