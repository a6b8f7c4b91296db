"""The modes that score and export, through the real program; SavedModels without this package."""

from __future__ import annotations

import json
import pathlib

import gin
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import dataset, gin_config, utils
from mesh_tensorflow.transformer.training.trainer import Trainer
from mesh_tensorflow.transformer.vocabulary import ByteVocabulary
from tests.kinds import kept

PAIRS = ["one two\tun deux", "three\ttrois", "dog\tchien", "red cat\tchat rouge", "blue\tbleu"]
BINDINGS = """
  run.vocabulary = @vocabulary.get_byte_vocabulary()
  run.train_dataset_fn = @dataset.parallel_text_dataset
  dataset.parallel_text_dataset.files = %files
  run.eval_dataset_fn = @dataset.parallel_text_eval_datasets
  dataset.parallel_text_eval_datasets.files = %files
  dataset.parallel_text_eval_datasets.metric_fns = []
  num_layers = 1
  d_model = 32
  d_ff = 32
  num_heads = 2
  d_kv = 16
  dropout_rate = 0.0
  run.model_type = 'bitransformer'
  run.sequence_length = {'inputs': 16, 'targets': 20}
  Unitransformer.max_length = 40
  run.batch_size = 4
  run.train_steps = 30
  run.iterations_per_loop = 30
  run.learning_rate_schedule = 0.01
  run.mesh_shape = ''
  run.layout_rules = ''
  get_variable_dtype.master_dtype = 'float32'
  get_variable_dtype.activation_dtype = 'float32'
  score_from_strings.score_postprocess_fn = @save_scores
  score_from_dataset.score_postprocess_fn = @save_scores
  score_from_dataset.score_dataset_fn = @dataset.parallel_text_eval_datasets
"""
MODULES = [
  "optimize",
  "transformer.dataset",
  "transformer.vocabulary",
  "transformer.data.text_readers",
]
INPUTS, TARGETS = zip(*(p.split("\t") for p in PAIRS))


def bindings(folder: pathlib.Path, *more: str) -> list[str]:
  files = f"files = {{'train': '{folder}/pairs.tsv', 'validation': '{folder}/pairs.tsv'}}"
  lines = [f"import mesh_tensorflow.{m}" for m in MODULES] + BINDINGS.strip().splitlines()
  return [*map(str.strip, lines), files, *more]


def run(folder: pathlib.Path, *more: str):
  """`utils.run` in this process."""
  gin.clear_config()
  gin_config.parse_gin([], bindings(folder, *more))
  return utils.run(None, None, None, None, str(folder / "model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
  """A folder with data and a trained model."""
  path = tmp_path_factory.mktemp("modes")
  (path / "pairs.tsv").write_text("".join(p + "\n" for p in PAIRS))
  (path / "inputs.txt").write_text("".join(p + "\n" for p in INPUTS))
  (path / "targets.txt").write_text("".join(p + "\n" for p in TARGETS))
  run(path)
  yield path
  gin.clear_config()


def of_strings(folder, *more):
  names = [f"score_from_strings.{k} = '{folder}/{k}.txt'" for k in ("inputs", "targets")]
  return "run.mode = 'score_from_strings'", *names, *more


@pytest.fixture(scope="module")
def scores(folder):
  values, texts = run(folder, *of_strings(folder))
  assert texts == list(TARGETS)
  return values


@pytest.mark.long
@pytest.mark.subprocess
def test_score_and_export_as_a_program(folder, scores, run_forked, run_subprocess):
  """The real binary, on a 2x2 mesh; then the SavedModel in a process without this package."""
  config = folder / "config.gin"
  config.write_text("\n".join(bindings(folder)))
  mesh = ("run.mesh_shape = 'batch:2,model:2'", "run.layout_rules = 'batch:batch,d_ff:model'")
  common = ["-m", "mesh_tensorflow.transformer.main", f"--model_dir={folder}/model"]
  common.append(f"--gin_file={config}")

  def program(*more: str) -> str:
    done = run_forked([*common, *(f"--gin_param={b}" for b in [*mesh, *more])], timeout=120)
    assert "Traceback" not in done.stderr
    return done.stdout

  program(*of_strings(folder, f"save_scores.scores_filename = '{folder}/out'"))
  written = [float(x) for x in (folder / "out.scores").read_text().split()]
  np.testing.assert_allclose(written, scores, rtol=1e-4)
  assert (folder / "out.targets").read_text() == (folder / "targets.txt").read_text()
  lengths = [str(len(t) + 1) for t in TARGETS]  # Bytes, and the end of sequence.
  assert (folder / "out.lengths").read_text().split() == lengths

  printed = program("run.mode = 'export_score'", f"run.export_path = '{folder}/exported'")
  (path,) = (folder / "exported").iterdir()
  assert f"step 30 exported: {path}" in printed
  infer = run(folder, "run.mode = 'export_infer'", f"run.export_path = '{folder}/infer'")
  loaded = run_subprocess(LOADER.format(folder=folder, infer=infer, score=path), timeout=120)
  result = json.loads(loaded.stdout.splitlines()[-1])
  assert result["modules"] == []
  np.testing.assert_allclose(result["scores"], scores, rtol=1e-4)
  assert result["targets"] == list(TARGETS)
  # The same as the trainer makes of the file, with rows at a time that divide their number or not.
  assert result["outputs"] == decoded(folder)
  assert result["inputs"] == list(INPUTS)
  assert result["nothing"] == [0, 20] and result["cut"] == "abcdefghijklmno"


@pytest.mark.subprocess
def test_what_is_refused_leaves_nothing(folder, run_forked):
  """No note of a command that did nothing; one of a command that did something."""
  config = folder / "config.gin"
  config.write_text("\n".join(bindings(folder)))
  common = ["-m", "mesh_tensorflow.transformer.main", f"--model_dir={folder}/model"]
  before = sorted(p.name for p in (folder / "model").iterdir())

  def program(*more: str, code: int) -> list[str]:
    words = [*common, f"--gin_file={config}", *(f"--gin_param={b}" for b in more)]
    assert run_forked(words, timeout=120, check=False).returncode == code
    return sorted(p.name for p in (folder / "model").iterdir())

  assert program("run.mode = 'export_infer'", code=2) == before
  (folder / "file").write_text("")
  assert (
    program("run.mode = 'export_infer'", f"run.export_path = '{folder}/file/x'", code=4) == before
  )
  after = program(*of_strings(folder, f"save_scores.scores_filename = '{folder}/noted'"), code=0)
  assert [n for n in after if n not in before] == ["command"]


LOADER = """
import json, sys
import tensorflow as tf
inputs, targets = (open(f"{folder}/{{n}}.txt").read().splitlines() for n in ("inputs", "targets"))
inputs, targets = tf.constant(inputs), tf.constant(targets)
text = lambda x: [s.decode() for s in x.numpy()]
score = tf.saved_model.load("{score}").signatures["serving_default"]
infer = tf.saved_model.load("{infer}").signatures["serving_default"]
scored = score(inputs=inputs, targets=targets)
made = infer(inputs=inputs)
print(json.dumps(dict(
  modules=[m for m in sys.modules if m.startswith("mesh_tensorflow")],
  scores=scored["scores"].numpy().tolist(),
  targets=text(scored["targets"]),
  outputs=text(made["outputs"]),
  inputs=text(made["inputs"]),
  nothing=infer(inputs=tf.constant([], tf.string))["outputs_ids"].shape.as_list(),
  cut=text(infer(inputs=tf.constant(["abcdefghijklmnopqrstuvwxyz"]))["inputs"])[0],
)))
"""


def decoded(folder) -> list[str]:
  names = [f"decode_from_file.input_filename = '{folder}/inputs.txt'"]
  names.append(f"decode_from_file.output_filename = '{folder}/decoded'")
  run(folder, "run.mode = 'infer'", *names)
  return (folder / "decoded-30").read_text().splitlines()


@pytest.mark.slow
def test_score_from_dataset_and_tfrecords(folder, scores):
  mode = ("run.mode = 'score_from_dataset'", "run.dataset_split = 'validation'")
  values, texts = run(folder, *mode)
  np.testing.assert_allclose(values, scores, rtol=1e-4)
  assert texts == list(TARGETS)
  run(
    folder, *mode,
    "score_from_dataset.score_with_estimator_fn = @score_with_estimator_lazy",
    "score_from_dataset.score_postprocess_fn = @save_scores_to_tfrecords",
    "score_with_estimator_lazy.num_examples_per_shard = 3",
    f"save_scores_to_tfrecords.scores_filename = '{folder}/shards'",
  )  # fmt: skip
  read = []
  for shard, count in ((0, 3), (1, 2)):
    records = list(tf.data.TFRecordDataset(f"{folder}/shards_{shard}.tfrecord"))
    assert len(records) == count
    read += [tf.train.Example.FromString(r.numpy()).features.feature for r in records]
  np.testing.assert_allclose([f["score"].float_list.value[0] for f in read], scores, rtol=1e-4)
  assert [f["target"].bytes_list.value[0].decode() for f in read] == list(TARGETS)


@gin.configurable(module="test_modes")
def mean_score(targets, scores):
  assert targets == list(TARGETS)
  return {"mean": np.mean(scores)}


@gin.configurable(module="test_modes")
def text_metric(targets, predictions):
  """It would take scores without an error."""
  return {"count": len(list(zip(targets, predictions)))}


@pytest.mark.slow
@pytest.mark.parametrize("length", ["{'inputs': 16, 'targets': 20}", "None"])
def test_score_eval(folder, scores, capsys, length):
  """Without a sequence length it is that of the longest examples, and the scores are the same."""
  results = run(
    folder, "run.mode = 'score_eval'", "run.dataset_split = 'validation'",
    "dataset.parallel_text_eval_datasets.metric_fns = [@test_modes.mean_score]",
    f"run.sequence_length = {length}", "run.eval_dir_suffix = 'scores'",
  )  # fmt: skip
  assert results == {"validation": {"mean": pytest.approx(np.mean(scores), rel=1e-4)}}
  assert "(5 texts scored in" in capsys.readouterr().out
  written = folder / "model" / "validation_eval_scores"
  lines = (written / "validation_30_predictions").read_text().split()
  np.testing.assert_allclose([float(x) for x in lines], scores, rtol=1e-4)
  assert (written / "validation_targets").read_text() == (folder / "targets.txt").read_text()


@pytest.mark.slow
def test_score_eval_with_a_metric_of_texts(folder, scores, caplog):
  """Its signature says that it takes texts: it is left out by name, and the mean is given."""
  results = run(
    folder, "run.mode = 'score_eval'", "run.dataset_split = 'validation'",
    "import mesh_tensorflow.transformer.bleu",
    "dataset.parallel_text_eval_datasets.metric_fns = [@bleu.bleu, @test_modes.text_metric]",
  )  # fmt: skip
  mean = pytest.approx(np.mean(scores), rel=1e-4)
  assert results == {"validation": {"mean_score": mean}}
  assert "metric bleu, text_metric is left out" in caplog.text and "mode 'eval'" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strings", "dataset"])
def test_scores_without_a_file_are_shown(folder, scores, mode, capsys, tmp_path):
  if mode == "strings":
    more = of_strings(folder)
  else:
    more = ("run.mode = 'score_from_dataset'", "run.dataset_split = 'validation'")
  run(folder, *more)
  shown = capsys.readouterr().out
  assert f"5 scores (log-likelihoods in nats), mean {np.mean(scores):g}" in shown
  assert (
    "--output=PREFIX of the command score (save_scores.scores_filename)" in shown
    and repr(TARGETS[0]) in shown
  )
  run(folder, *more, f"save_scores.scores_filename = '{tmp_path}/out'")
  assert "save_scores.scores_filename" not in capsys.readouterr().out


@pytest.mark.slow
def test_perplexity_eval(folder, scores):
  mode = ("run.mode = 'perplexity_eval'", "run.dataset_split = 'validation'")
  results = run(folder, *mode, "run.perplexity_eval_steps = 9", "run.eval_dir_suffix = 'x'")
  metrics = results["validation"]
  assert metrics["total_nats"] == pytest.approx(-sum(scores), rel=1e-4)
  ids = [i for t in TARGETS for i in [*ByteVocabulary().encode(t), 1]]
  assert metrics["num_eval_tokens"] == len(ids)
  assert metrics["mean_label"] == pytest.approx(np.mean(ids))
  assert metrics["max_targets_length"] == max(map(len, TARGETS)) + 1
  assert list((folder / "model" / "eval_validation_validation_36_x").glob("events*"))


@pytest.mark.parametrize("mode", ["eval", "perplexity_eval"])
def test_a_split_that_is_not_there_is_told_first(folder, mode, monkeypatch):
  monkeypatch.setattr(Trainer, "restore_for_inference", lambda *_: pytest.fail("restored"))
  for more in ([], ["run.eval_dataset_fn = None"]):
    with pytest.raises(errors.ConfigError, match="no files for split 'tset', only for .*'train'"):
      run(folder, f"run.mode = '{mode}'", "run.dataset_split = 'tset'", *more)


@pytest.mark.slow
@pytest.mark.parametrize(
  "mode",
  kept(
    ["eval", "perplexity_eval", "score_eval", "score_from_dataset"], ["eval", "score_from_dataset"]
  ),
)
def test_a_score_of_the_training_split_is_told(folder, mode, capsys):
  for split, told in (("train", 1), ("validation", 0)):
    run(
      folder,
      f"run.mode = '{mode}'",
      f"run.dataset_split = '{split}'",
      "run.perplexity_eval_steps = 1",
    )
    shown = capsys.readouterr().out
    assert shown.count("evaluates the split 'train', which the model is trained on") == told


@pytest.mark.slow
def test_decode_from_dataset(folder, tmp_path):
  """Its examples come from a data set of pairs; the language model is an untrained one."""
  model = tmp_path / "pairs.tsv"
  model.write_text((folder / "pairs.tsv").read_text())
  lm = [
    "run.model_type = 'lm'",
    "run.train_dataset_fn = @dataset.text_lm_dataset",
    f"dataset.text_lm_dataset.train_files = '{model}'",
    "dataset.text_lm_dataset.mode = 'stream'",
    "run.train_steps = 1",
  ]
  run(tmp_path, *lm)
  names = [
    "run.mode = 'infer'",
    "infer_model.decode_fn = @decode_from_dataset",
    "decode_from_dataset.infer_dataset_fn = @dataset.parallel_text_eval_datasets",
    f"decode_from_dataset.decode_output_dir = '{tmp_path}/out'",
  ]
  run(tmp_path, *lm, *names)
  out = tmp_path / "out"
  assert (out / "validation_inputs").read_text() == (folder / "inputs.txt").read_text()
  assert (out / "validation_targets").read_text() == (folder / "targets.txt").read_text()
  assert (out / "validation_1_predictions").read_text().count("\n") == len(PAIRS)
  # An encoder-decoder makes of them what mode "infer" makes of the lines of a file.
  run(folder, *names)
  made = (out / "validation_30_predictions").read_text().splitlines()
  assert made == decoded(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("more", "error", "text"),
  [
    (["run.mode = 'export'"], errors.ConfigError, "export_path is not bound"),
    (["run.mode = 'export'", "run.export_path = '{folder}/pairs.tsv'"], errors.StorageError,
     "cannot write a SavedModel in the folder .*pairs.tsv .*another run.export_path"),
    (["run.mode = 'score_from_dataset'", "score_from_dataset.score_postprocess_fn = None"],
     errors.ConfigError, "score_postprocess_fn is None; bind .*@save_scores"),
    (["run.mode = 'score'"], errors.ConfigError, "'score'.*score_from_strings"),
    (["run.mode = 'score_from_dataset'", "score_from_dataset.score_dataset_fn = None"],
     errors.ConfigError, "score_dataset_fn is not bound"),
    (["run.mode = 'score_from_strings'", "score_from_strings.inputs = 'no.txt'",
      "score_from_strings.targets = ['a']"], errors.DataError, "no.txt.* cannot be read"),
    (["run.mode = 'score_from_strings'", "score_from_strings.inputs = ['a', 'b', 'c']",
      "score_from_strings.targets = ['a', 'b']"], errors.DataError, "3 inputs, but 2 targets"),
    (["run.mode = 'score_eval'", "run.eval_dataset_fn = None"], errors.ConfigError,
     "eval_dataset_fn is not bound"),
    (["run.mode = 'score_eval'", "run.sequence_length = None",
      "run.batch_size = ('tokens_per_batch', 64)"], errors.ConfigError, "must be a number"),
    (["run.mode = 'infer'", "run.sequence_length = None"], errors.ConfigError,
     "sequence_length is not bound"),
    (["run.skip_seen_data = True", "run.checkpoint_input_pipeline = True"], errors.ConfigError,
     "bind one of them"),
  ],
)  # fmt: skip
def test_wrong_settings_are_one_clear_error(folder, more, error, text):
  with pytest.raises(error, match=f"(?s){text}"):
    run(folder, *(m.replace("{folder}", str(folder)) for m in more))


@pytest.mark.slow
def test_no_checkpoint_to_export(tmp_path, folder):
  (tmp_path / "pairs.tsv").write_text((folder / "pairs.tsv").read_text())
  with pytest.raises(errors.ConfigError, match="no checkpoint in .*; train first"):
    run(tmp_path, "run.mode = 'export'", f"run.export_path = '{tmp_path}/out'")


class PythonVocabulary(ByteVocabulary):
  """Encodes in Python, and has no `decode_tf`."""

  def encode_tf(self, s):
    return tf.numpy_function(
      lambda s: np.array(self.encode(s.decode()), np.int32), [s], tf.int32, stateful=False
    )

  def decode_tf(self, ids):
    raise NotImplementedError


@pytest.mark.slow
def test_a_vocabulary_in_python_is_exported_with_ids(folder, caplog):
  gin.clear_config()
  gin_config.parse_gin([], bindings(folder))
  vocabulary = PythonVocabulary()
  lengths = {"inputs": 16, "targets": 20}
  estimator = utils.get_estimator(
    "bitransformer", vocabulary, "", "", str(folder / "model"), 4, lengths, True, None, None, 100,
    None, None, None, None, None, None, 10, None, init_checkpoint=None,
  )  # fmt: skip
  path = estimator.export_saved_model(str(folder / "python"), batch_size=2)
  assert "takes ids" in caplog.text
  serve = tf.saved_model.load(path).signatures["serving_default"]
  ids = [[*vocabulary.encode(t), 1] for t in INPUTS]
  ids = np.array([row + [0] * (16 - len(row)) for row in ids], np.int32)
  exported = serve(inputs=tf.constant(ids))
  expected = list(
    estimator.predict(lambda: tf.data.Dataset.from_tensor_slices({"inputs": ids}).batch(4))
  )
  for name in ("inputs", "outputs"):
    np.testing.assert_array_equal(exported[name], [r[name] for r in expected])
  np.testing.assert_array_equal(exported["inputs"], ids)
  # What code for an Estimator asks for.
  assert estimator.latest_checkpoint().endswith("model.ckpt-30")
  name = "shared/embedding"
  assert name in estimator.get_variable_names()
  assert estimator.get_variable_value(name).shape == (384, 32)
  with pytest.raises(errors.VariableError, match="there is no variable 'nothing'"):
    estimator.get_variable_value("nothing")
  with pytest.raises(errors.ConfigError, match="serving_input_receiver_fn"):
    estimator.export_saved_model(str(folder), lambda: None)
  with pytest.raises(errors.ConfigError, match="model_type is lm, but"):
    utils.export_model(estimator, str(folder), vocabulary, lengths, "lm")
  assert dataset.EvalDataset  # Imported for gin.
