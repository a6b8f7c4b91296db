"""`--set NAME=VALUE`: what short names stand for, and what becomes of words."""

from __future__ import annotations

import gin
import pytest

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer import gin_config, utils  # noqa: F401 - registers the names.
from mesh_tensorflow.transformer.gin_config import assignments, reader
from mesh_tensorflow.transformer.gin_config.bindings import Macro, Reference
from mesh_tensorflow.transformer.gin_config.reader import gin_dir
from tests.conftest import ROOT

PROBLEM = "problems/stdlib_lm.gin"
SHAKESPEARE = "problems/tinyshakespeare.gin"


@pytest.fixture(autouse=True)
def nothing_bound():
  gin.clear_config()
  yield
  gin.clear_config()


def bound(*texts: str, file: str = PROBLEM) -> dict[str, object]:
  """What assignments bind, by the names as they are written, after a problem file."""
  r = reader.Reader(["", gin_dir()])
  r.read_file("defaults.gin")
  r.read_file(file)
  assignments.add(r, texts)
  return {s.name: s.value for s in r.settings.all if s.place.source == reader.SET}


def named(value: object) -> object:
  """A reference as it is written."""
  return repr(value) if isinstance(value, (Reference, Macro)) else value


@pytest.mark.parametrize(
  ("text", "name", "value"),
  [
    # A macro of the files; a parameter of run; a whole name; one in a scope.
    ("d_model=512", "d_model", 512),
    ("dropout_rate=.5", "dropout_rate", 0.5),
    ("train_steps=7", "run.train_steps", 7),
    ("Unitransformer.max_length=9", "Unitransformer.max_length", 9),
    ("decoder/SelfAttention.num_heads=4", "decoder/SelfAttention.num_heads", 4),
    # Short names.
    ("steps = 7", "run.train_steps", 7),
    ("batch=3", "run.batch_size", 3),
    ("layers=2", "num_layers", 2),
    ("heads=2", "num_heads", 2),
    ("dropout=0.1", "dropout_rate", 0.1),
    ("model=lm", "run.model_type", "lm"),
    ("mesh=batch:2,model:2", "run.mesh_shape", "batch:2,model:2"),
    ("mesh=", "run.mesh_shape", ""),
    ("layout=batch:batch", "run.layout_rules", "batch:batch"),
    ("checkpoint=all", "run.eval_checkpoint_step", "all"),
    ("temperature=0.8", "sample.temperature", 0.8),
    ("top_k=4", "sample.top_k", 4),
    # Words where a text is taken, numbers where a number is.
    ("run.init_checkpoint=some/model.ckpt-7", "run.init_checkpoint", "some/model.ckpt-7"),
    ("run.init_checkpoint=7", "run.init_checkpoint", "7"),
    ("run.init_checkpoint=none", "run.init_checkpoint", None),
    ("run.nonfinite=skip", "run.nonfinite", "skip"),
    ("run.export_path=it's here", "run.export_path", "it's here"),
    ("run.export_path='quoted'", "run.export_path", "quoted"),
    ("run.export_path=a#b", "run.export_path", "a#b"),
    ("run.total_run_steps=none", "run.total_run_steps", None),
    ("run.skip_seen_data=yes", "run.skip_seen_data", True),
    ("run.skip_seen_data=false", "run.skip_seen_data", False),
    ("run.batch_size=('tokens_per_batch', 64)", "run.batch_size", ("tokens_per_batch", 64)),
    ("prompt=To be", "sample.prompt", "To be"),
    ("prompt=7", "sample.prompt", 7),  # `sample` says what it takes.
    # Names where a function or class is taken; and where a text may be its name.
    ("optimizer=AdamW", "run.optimizer", "@AdamWOptimizer"),
    ("optimizer=adafactor", "run.optimizer", "@AdafactorOptimizer"),
    ("optimizer=AdafactorOptimizer", "run.optimizer", "@AdafactorOptimizer"),
    ("optimizer=@optimize.LionOptimizer", "run.optimizer", "@optimize.LionOptimizer"),
    ("train_dataset_fn=text_lm_dataset", "run.train_dataset_fn", "@text_lm_dataset"),
    ("infer_model.decode_fn=decode_from_dataset", "infer_model.decode_fn", "@decode_from_dataset"),
    ("DenseReluDense.activation=gelu", "DenseReluDense.activation", "gelu"),
    ("vocabulary=sentencepiece:80", "run.vocabulary", "sentencepiece:80"),
    ("vocabulary=@get_byte_vocabulary()", "run.vocabulary", "@get_byte_vocabulary()"),
  ],
)  # fmt: skip
def test_an_assignment(text, name, value):
  found = {n: named(v) for n, v in bound(text).items()}
  assert found == {name: value} and type(found[name]) is type(value)


def test_length_is_that_of_sequences_and_of_positions():
  assert bound("length=32") == {"run.sequence_length": 32, "Unitransformer.max_length": 32}


@pytest.mark.parametrize("name", ["lr", "learning_rate"])
def test_learning_rate_keeps_the_schedule(name):
  (value,) = bound(f"{name}=0.5").values()
  warmup, decay = "@learning_rate_schedules.linear_warmup", "@learning_rate_schedules.linear_decay"
  assert [named(v) for v in value] == [warmup, decay, 0.5]
  found = bound("run.learning_rate_schedule=@cosine_decay", f"{name}=0.5")
  assert [v for n, v in found.items() if n.endswith("cosine_decay.peak")] == [0.5]
  found = bound("run.learning_rate_schedule=0.25", f"{name}=0.5")
  assert found == {"run.learning_rate_schedule": 0.5}


def test_schedule_keeps_the_learning_rate():
  """The number of the list before, 0.03."""
  found = {n: named(v) for n, v in bound("schedule=cosine").items()}
  assert found == {"run.learning_rate_schedule": "@cosine_decay", "cosine_decay.peak": 0.03}
  (value,) = bound("schedule=truncated_rsqrt").values()
  assert [named(v) for v in value] == ["@truncated_rsqrt", 0.03]


# As a file of `mesh-transformer init` has it.
COSINE = "run.learning_rate_schedule = @cosine_decay\ncosine_decay.peak = %rate\nrate = 0.002\n"


@pytest.mark.parametrize(
  ("schedule", "also", "expected"),
  [
    ("linear_warmup_decay", "", {"peak": "%rate", "warmup": 150}),
    ("inverse", "", {"peak": "%rate", "warmup": 150}),
    ("slanted", "", {"max_learning_rate": "%rate"}),
    ("constant_learning_rate", "", {"learning_rate": "%rate"}),
    # What is bound for the new one stays.
    ("inverse", "inverse_square_root.peak = 0.5\n", {"warmup": 150}),
  ],
)
def test_the_peak_of_a_schedule_stays_in_another_one(schedule, also, expected, tmp_path, caplog):
  file = tmp_path / "train.gin"
  file.write_text(f"{COSINE}cosine_decay.warmup = 150\n{also}")
  found = {
    n.rpartition(".")[2]: str(v) for n, v in bound(f"schedule={schedule}", file=str(file)).items()
  }
  found.pop("learning_rate_schedule")
  assert found == {n: str(v) for n, v in expected.items()}
  told = next(r.getMessage() for r in caplog.records if "--set schedule" in r.getMessage())
  assert all(f"{n} = {v}" in told for n, v in expected.items())


def test_a_factor_in_place_of_a_schedule_with_a_peak_is_multiplied_by_it(tmp_path):
  file = tmp_path / "train.gin"
  file.write_text(COSINE)
  (value,) = bound("schedule=linear_decay", file=str(file)).values()
  assert [named(v) for v in value] == ["@linear_decay", "%rate"]


def test_a_default_rate_is_told(caplog):
  found = bound("run.learning_rate_schedule=@truncated_rsqrt", "schedule=cosine")
  assert [v for n, v in found.items() if n.endswith("peak")] == [1.0]
  assert "cosine_decay.peak = 1.0" in caplog.text


def test_data_of_one_s_own():
  assert bound("data=my.txt", file=SHAKESPEARE) == {"text_file": "my.txt"}
  found = {n: named(v) for n, v in bound("data=7.txt").items()}
  assert found == {"run.train_dataset_fn": "@dataset.own_text", "dataset.own_text.path": "7.txt"}


def test_a_macro_of_a_file_goes_before_a_short_name(tmp_path):
  file = tmp_path / "mine.gin"
  file.write_text("steps = 5\nrun.train_steps = %steps\n")
  assert bound("steps=6", file=str(file)) == {"steps": 6}


def test_a_macro_takes_values_as_its_parameter_does(tmp_path):
  file = tmp_path / "mine.gin"
  file.write_text("place = 'a'\nrun.export_path = %place\nwidth = 3\nrun.train_steps = %width\n")
  assert bound("place=7", "width=8", file=str(file)) == {"place": "7", "width": 8}


def test_later_ones_win_and_override_everything():
  gin_config.parse_gin(
    [PROBLEM], ["run.train_steps = 3"], assignments=["steps=4", "steps=5", "lr=0.5"]
  )
  assert gin.query_parameter("run.train_steps") == 5
  assert gin.query_parameter("run.learning_rate_schedule")[-1] == 0.5
  lines = gin_config.operative_config_str().splitlines()
  (line,) = (x for x in lines if "train_steps = 5" in x)
  assert line.endswith("# --set, overrides --set, --gin_param, problems/stdlib_lm.gin:29")


@pytest.mark.parametrize(
  ("text", "says"),
  [
    ("d_modell=5", "nothing is called 'd_modell'; did you mean d_model"),
    ("stepz=5", "nothing is called 'stepz'; did you mean steps"),
    ("qqq=5", "it is a short name (docs/commands.md lists them), a macro of the gin files"),
    ("d_model", "write --set NAME=VALUE, such as --set d_model=512"),
    ("=3", "write --set NAME=VALUE"),
    ("run.train_stepz=5", "run has no parameter 'train_stepz'; did you mean train_steps"),
    ("Unitransfomer.max_length=5", "did you mean Unitransformer"),
    ("optimizer=AdamX", "there is no optimizer 'AdamX'; did you mean AdamW"),
    ("schedule=cosinus", "there is no schedule 'cosinus'; there are constant, "),
    ("lr=fast", "'fast' is no number; --set schedule=NAME"),
    ("train_dataset_fn=text_lm_datset", "did you mean @text_lm_dataset"),
    ("steps=many", "run.train_steps = 'many': it must be a whole number of at least 0"),
    ("run.nonfinite=skp", "must be one of 'stop', 'skip'; did you mean skip?"),
    ("batch=0", "run.batch_size = 0: it must be"),
  ],
)
def test_wrong_ones(text, says):
  with pytest.raises(ConfigError) as error:
    gin_config.parse_gin([PROBLEM], [], assignments=[text])
    gin_config.check_run()
  assert says in str(error.value) and f"--set {text!r}" in str(error.value)
  assert len(str(error.value).splitlines()) == 1


def test_every_short_name_is_in_the_docs():
  """With its meaning; and every name that it stands for exists."""
  page = (ROOT / "docs" / "commands.md").read_text()
  for name, short in assignments.SHORT.items():
    assert f"`{name}`" in page and short.meaning in page, name
    for whole in short.names:
      assert bound(f"{name}=1").keys() == {whole}
