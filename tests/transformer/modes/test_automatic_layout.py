"""`run.layout_rules = "auto"` and `run.mesh_shape = "auto"`; the modes "plan" and "search"."""

from __future__ import annotations

import dataclasses
import json
import re

import gin
import pytest

import mesh_tensorflow as mtf
from mesh_settings.run import RunSettings
from mesh_tensorflow.errors import ConfigError, LayoutError, OutOfMemoryError
from mesh_tensorflow.planning.auto_layout import LayoutChoice
from mesh_tensorflow.transformer import gin_config, utils
from mesh_tensorflow.transformer.modes import automatic_layout, variants
from mesh_tensorflow.transformer.modes.variants import Variant
from tests.transformer.worker_processes import losses

TEXT = "the quick brown fox jumps over the lazy dog\n" * 40
BINDINGS = """
  import mesh_tensorflow.optimize
  import mesh_tensorflow.transformer.dataset
  import mesh_tensorflow.transformer.vocabulary
  run.vocabulary = @vocabulary.get_byte_vocabulary()
  run.train_dataset_fn = @dataset.text_lm_dataset
  dataset.text_lm_dataset.train_files = %files
  run.optimizer = @optimize.AdafactorOptimizer
  num_layers = 1
  d_model = 8
  d_ff = 32
  num_heads = 2
  d_kv = 4
  dropout_rate = 0.0
  run.model_type = 'lm'
  run.sequence_length = {'inputs': 16, 'targets': 16}
  Unitransformer.max_length = 16
  run.batch_size = 8
  run.train_steps = 1
  run.iterations_per_loop = 1
  run.learning_rate_schedule = 0.01
  get_variable_dtype.master_dtype = 'float32'
  get_variable_dtype.activation_dtype = 'float32'
"""
# A device that holds little: something must be split.
SMALL = "choose_layout.machine = 'tpu-v3'"


def run(folder, *more):
  gin.clear_config()
  (folder / "text.txt").write_text(TEXT)
  lines = [*map(str.strip, BINDINGS.strip().splitlines()), f"files = '{folder}/text.txt'", *more]
  lines = list({line.split(" = ")[0]: line for line in lines}.values())
  gin_config.parse_gin([], lines)
  gin_config.check_run()
  return utils.run(None, None, None, None, str(folder / "model"))


@pytest.fixture
def three_layouts(monkeypatch):
  """In place of the search, the best of three layouts: tests/planning tests the search itself."""

  def search(program, devices=None, mesh_shape=None, machine=None, memory_limit=None, **others):
    shape = mtf.convert_to_shape(mesh_shape or f"mesh_0:{devices}")
    limit = memory_limit or machine.device.memory
    choices = []
    for name in ("batch", "d_ff", "d_kv"):
      rules = mtf.convert_to_layout_rules(f"{name}:{shape[0].name}")
      told = mtf.describe(program, rules, shape, machine=machine)
      memory = int(told.memory.total)
      choices.append(LayoutChoice(shape, rules, told.seconds, memory, True, (), machine, limit, 0))
    if all(c.memory > limit for c in choices):
      raise OutOfMemoryError("no layout fits. Nearest is another one")
    first, *rest = sorted(choices, key=lambda c: c.seconds)
    return dataclasses.replace(first, alternatives=tuple(rest[: others["alternatives"]]))

  monkeypatch.setattr(mtf, "auto_layout", search)


def operative(folder):
  text = (folder / "model" / "operative_config.gin").read_text()
  return dict(re.findall(r"^run\.(\w+) = (.*?)  #", text, re.MULTILINE))


@pytest.mark.slow
def test_a_training_with_a_found_layout_and_its_resume(tmp_path, capsys, cpu_devices):
  mesh, rules = "run.mesh_shape = 'rows:2,columns:2'", "run.layout_rules = 'auto'"
  # On CPUs that share a host nothing is gained by splitting so small a model.
  fixed = ("choose_layout.fixed = 'batch:rows'", SMALL)
  run(tmp_path, mesh, rules, *fixed)
  out = capsys.readouterr().out
  found = re.search(r"layout (\S+) on mesh rows:2,columns:2 \(.* predicted for (.*?),", out)
  assert "batch:rows" in found[1] and "TPU v3" in found[2]
  assert "batch        split over rows" in out
  assert operative(tmp_path)["layout_rules"] == repr(found[1])
  (record,) = (tmp_path / "model").glob("*config*.json")
  assert json.loads(record.read_text())["found"] == {
    "layout_rules": found[1],
    "mesh_shape": "rows:2,columns:2",
  }
  other = json.loads(record.read_text())["other"]
  assert other["mesh_tensorflow.transformer.utils.run.layout_rules"] == found[1]

  # Another machine would find another layout; what was found stays.
  run(tmp_path, mesh, rules, "choose_layout.fixed = 'batch:columns'", "run.train_steps = 2")
  out = capsys.readouterr().out
  assert f"layout {found[1]} on mesh rows:2,columns:2 (kept from" in out
  assert operative(tmp_path)["layout_rules"] == repr(found[1])

  # Bound rules are those that are used, and what an earlier run has found is forgotten.
  run(tmp_path, mesh, "run.layout_rules = 'd_ff:rows'", "run.train_steps = 3")
  assert "d_ff         split over rows" in capsys.readouterr().out
  assert operative(tmp_path)["layout_rules"] == "'d_ff:rows'"
  (record,) = (tmp_path / "model").glob("model.ckpt-3.*config*.json")
  assert json.loads(record.read_text())["found"] == {}


@pytest.mark.long
def test_a_mesh_for_given_rules(tmp_path, capsys, cpu_devices):
  rules = "run.layout_rules = 'batch:batch,d_ff:model,heads:model'"
  auto = ("run.mesh_shape = 'auto'", "run.num_devices = 4", "run.train_steps = 1", SMALL)
  run(tmp_path, rules, *auto)
  mesh = re.search(r"on mesh (\S+) \(", capsys.readouterr().out)[1]
  shape = mtf.convert_to_shape(mesh)
  assert shape.size == 4 and shape.dimension_names == ["batch", "model"]
  assert operative(tmp_path)["mesh_shape"] == repr(mesh)

  def predicted(mesh):
    plan = ("run.mode = 'plan'", "print_best_layouts.search = False")
    return run(tmp_path, rules, f"run.mesh_shape = '{mesh}'", *plan).timed(
      mtf.planning.Machine.load("tpu-v3")
    )

  # heads are 2: what cannot be split so is no candidate.
  others = [predicted(m).seconds for m in ("batch:4,model:1", "batch:2,model:2")]
  assert predicted(mesh).seconds == min(others)


@pytest.mark.slow
def test_plan_shows_the_best_beside_the_bound_one(tmp_path, capsys, three_layouts):
  bound = ("run.mesh_shape = 'rows:2'", "run.layout_rules = 'd_model:rows'")
  report = run(tmp_path, *bound, "run.mode = 'plan'", "choose_layout.alternatives = 1", SMALL)
  out = capsys.readouterr().out
  assert isinstance(report, mtf.Report)
  table = out[out.index("Layouts for TPU v3") :]
  layouts = re.findall(r"^  mesh_0:2 .*  (\S+):mesh_0$", table, re.MULTILINE)
  assert len(layouts) == 2 and set(layouts) < {"batch", "d_ff", "d_kv"}
  times = re.search(r"d_model:rows on rows:2, takes .* \((\S+) times the best\)", out)[1]
  assert float(times) > 1.0
  best = ("run.mesh_shape = 'mesh_0:2'", f"run.layout_rules = '{layouts[0]}:mesh_0'")
  run(tmp_path, *best, "run.mode = 'plan'", SMALL)
  assert f"{layouts[0]}:mesh_0 on mesh_0:2, is the best one" in capsys.readouterr().out


@pytest.mark.long
def test_plan_of_auto_and_what_does_not_fit(tmp_path, capsys, three_layouts):
  auto = ("run.mesh_shape = 'rows:2'", "run.layout_rules = 'auto'", "run.mode = 'plan'")
  report = run(tmp_path, *auto)
  assert str(report.mesh_shape) == "Shape[rows=2]" and len(report.layout.pairs) == 1
  with pytest.raises(OutOfMemoryError, match="no layout fits. Nearest is"):
    run(tmp_path, *auto, "choose_layout.memory_limit = 1000.0")
  capsys.readouterr()
  bound = ("run.mesh_shape = 'rows:2'", "run.layout_rules = ''", "run.mode = 'plan'")
  report = run(tmp_path, *bound, "choose_layout.memory_limit = 1000.0")
  assert report.layout.pairs == [] and "no layout fits" in capsys.readouterr().out


@pytest.mark.slow
def test_search_writes_a_file_that_trains(tmp_path, capsys, monkeypatch, three_layouts):
  monkeypatch.chdir(tmp_path)
  auto = ("run.mesh_shape = 'rows:2'", "run.layout_rules = 'auto'", "run.mode = 'search'")
  choice = run(tmp_path, *auto, SMALL)
  path = re.search(r"written: (\S+)", capsys.readouterr().out)[1]
  assert path == "layouts/auto_TPU_v3_core_2.gin"
  gin.clear_config()
  gin_config.parse_gin([path], [])
  assert gin.query_parameter("utils.run.mesh_shape") == "rows:2"
  rules = gin.query_parameter("utils.run.layout_rules")
  assert mtf.convert_to_layout_rules(rules) == choice.layout
  run(tmp_path, *auto, SMALL)  # Its own file it writes again.
  (tmp_path / "mine.gin").write_text("x = 1\n")
  with pytest.raises(ConfigError, match="mine.gin is there, and no search has written it"):
    run(tmp_path, *auto, SMALL, "write_layout.path = 'mine.gin'")
  assert (tmp_path / "mine.gin").read_text() == "x = 1\n"


def test_a_model_that_needs_more_as_built_for_its_layout(tmp_path, monkeypatch):
  """As microbatches may: what is searched is built for another layout."""

  def search(program, machine, **others):
    shape, rules = mtf.convert_to_shape("rows:2"), mtf.convert_to_layout_rules("batch:rows")
    return LayoutChoice(shape, rules, 1.0, 900, True, (), machine, 1000.0, 0.0)

  monkeypatch.setattr(mtf, "auto_layout", search)
  auto = ("run.mesh_shape = 'rows:2'", "run.layout_rules = 'auto'", "run.mode = 'search'")
  with pytest.raises(
    OutOfMemoryError, match="batch:rows on the mesh rows:2 was found, but a model"
  ):
    run(tmp_path, *auto, "write_layout.path = 'x.gin'")


# Both of two layers: what one keeps for its backward pass the other need not.
CHOICES = ("choose_layout.choices = ('microbatches', 'recompute')", "num_layers = 2")
FIXED = "choose_layout.fixed = 'batch:rows'"


def needs(choice):
  """The least that each way to build the step needs."""
  found = {}
  for c in (choice, *choice.alternatives):
    found[c.settings] = min(c.memory, found.get(c.settings, c.memory))
  return found


@pytest.mark.long
def test_what_does_not_fit_is_trained_in_microbatches_or_with_recomputation(
  tmp_path, capsys, cpu_devices, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  auto = ("run.mesh_shape = 'rows:2'", "run.layout_rules = 'auto'", FIXED, SMALL, *CHOICES)
  free = run(tmp_path, *auto, "run.mode = 'search'", "choose_layout.alternatives = 99")
  assert free.settings == ""
  # Everything fits: what only saves memory is not looked at.
  assert set(needs(free)) == {"", "microbatches=2", "microbatches=4"}
  most = max(c.memory for c in (free, *free.alternatives))
  less = f"choose_layout.memory_limit = {most - 1}.0"
  found = run(tmp_path, *auto, less, "run.mode = 'search'", "choose_layout.alternatives = 99")
  # As given nothing fits: of the ways without recomputation the first search tells.
  needed = needs(free) | needs(found)
  assert set(needed) == {
    f"{m}{r}".strip(", ")
    for m in ("", "microbatches=2", "microbatches=4")
    for r in ("", ", recompute", ", recompute=SelfAttention", ", recompute=DenseReluDense")
  }
  assert needed["microbatches=4, recompute"] < needed["microbatches=4"] < needed[""]
  for kind in ("SelfAttention", "DenseReluDense"):
    assert needed["recompute"] < needed[f"recompute={kind}"] < needed[""]
  limit = f"choose_layout.memory_limit = {needed['microbatches=4']}.0"

  choice = run(tmp_path, *auto, limit, "run.mode = 'search'")
  assert choice.settings.startswith("microbatches=4")
  text = (tmp_path / "layouts" / "auto_TPU_v3_core_2.gin").read_text()
  assert "utils.run.gradient_accumulation_steps = 4" in text
  report = run(tmp_path, *auto, limit, "run.mode = 'plan'")
  assert report.memory.total == choice.memory
  capsys.readouterr()

  run(tmp_path, *auto, limit)
  assert f"built with {choice.settings} (" in capsys.readouterr().out
  assert operative(tmp_path)["gradient_accumulation_steps"] == "4"
  (record,) = (tmp_path / "model").glob("*config*.json")
  assert json.loads(record.read_text())["found"]["gradient_accumulation_steps"] == 4
  # A resume keeps it, and needs no choices for that.
  run(tmp_path, *auto[:2], SMALL, CHOICES[1], "run.train_steps = 2")
  assert f"built with {choice.settings} (kept from" in capsys.readouterr().out

  with pytest.raises(
    OutOfMemoryError, match="of 12 ways to build .* Nearest is microbatches=4, rec"
  ):
    run(tmp_path, *auto, "choose_layout.memory_limit = 1000.0", "run.mode = 'search'")


@pytest.mark.long  # Choices that are trained with: test_what_does_not_fit_is_trained_in_shards.
def test_layers_of_one_class_are_computed_again_where_that_is_enough(tmp_path, capsys, cpu_devices):
  mesh = ("run.mesh_shape = 'rows:2'", CHOICES[1], "run.train_steps = 2")
  auto = ("run.layout_rules = 'auto'", FIXED, SMALL, "choose_layout.choices = ('recompute',)")
  folders = [tmp_path / name for name in ("whole", "short")]
  for folder in folders:
    folder.mkdir()
  # All that one device keeps.
  whole = run(folders[0], *mesh, "run.layout_rules = 'batch:rows'", "run.mode = 'plan'")
  limit = f"choose_layout.memory_limit = {whole.memory.total - 1}.0"
  capsys.readouterr()
  report = run(folders[1], *mesh, *auto, limit, "run.mode = 'plan'")
  assert report.memory.total < whole.memory.total
  assert re.search(
    r"pass: 2 of 4 layers \(2 (SelfAttention|DenseReluDense)\)", capsys.readouterr().out
  )

  run(folders[0], *mesh, "run.layout_rules = 'batch:rows'")
  run(folders[1], *mesh, *auto, limit)
  assert re.search("built with recompute=(SelfAttention|Dense)", capsys.readouterr().out)
  expected, actual = (losses(folder / "model") for folder in folders)
  assert len(actual) == 2 and actual == pytest.approx(expected, rel=1e-5)


LARGE = ("d_model = 256", "d_ff = 1024")
IN_SHARDS = "choose_layout.choices = ('shard_state',)"


def test_what_does_not_fit_is_trained_in_shards(tmp_path, capsys, cpu_devices, monkeypatch):
  monkeypatch.chdir(tmp_path)
  auto = ("run.mesh_shape = 'rows:2'", "run.layout_rules = 'auto'", FIXED, *LARGE)
  choices = IN_SHARDS
  free = run(tmp_path, *auto, choices, "run.mode = 'search'", "choose_layout.alternatives = 0")
  assert not free.shard_state
  limit = f"choose_layout.memory_limit = {0.85 * free.memory}"
  with pytest.raises(OutOfMemoryError, match="or state in shards need less"):
    run(tmp_path, *auto, limit, "run.mode = 'search'", "write_layout.path = 'x.gin'")
  choice = run(
    tmp_path, *auto, limit, choices, "run.mode = 'search'", "write_layout.path = 'y.gin'"
  )
  assert choice.shard_state == ("rows",) and choice.memory <= 0.85 * free.memory
  assert "utils.run.shard_state = 'rows'" in (tmp_path / "y.gin").read_text()
  report = run(tmp_path, *auto, limit, choices, "run.mode = 'plan'")
  assert (report.memory.total, report.shard_state) == (choice.memory, ["rows"])
  capsys.readouterr()
  run(tmp_path, *auto, limit, choices)
  assert "built with shard_state=rows" in capsys.readouterr().out
  assert operative(tmp_path)["shard_state"] == "'rows'"
  # A resume keeps it, and needs neither limit nor choices for that.
  run(tmp_path, *auto[:2], *auto[3:], "run.train_steps = 2")
  assert "built with shard_state=rows" in capsys.readouterr().out


@pytest.mark.long
def test_a_mesh_for_given_rules_in_shards(tmp_path, cpu_devices, monkeypatch):
  """The rules are bound, the sizes of the mesh are not."""
  monkeypatch.chdir(tmp_path)
  rules, search = "run.layout_rules = 'batch:rows'", ("run.mode = 'search'", *LARGE)
  whole = run(tmp_path, "run.mesh_shape = 'rows:2'", rules, "run.mode = 'plan'", *LARGE)
  mesh = ("run.mesh_shape = 'auto'", "run.num_devices = 2")
  limit = 0.85 * whole.memory.total
  choice = run(tmp_path, *mesh, rules, *search, IN_SHARDS, f"choose_layout.memory_limit = {limit}")
  assert choice.shard_state == ("rows",) and choice.memory <= limit


# What every run is given.
GIVEN = dict(
  tpu_job_name=None,
  tpu=None,
  gcp_project=None,
  tpu_zone=None,
  model_dir="",
  mesh_shape="",
  layout_rules="",
)


def test_ways_to_build_a_step():
  settings = RunSettings(**GIVEN, max_grad_norm=1.0)
  both = variants.variants(("microbatches", "recompute"), settings, 24, {"targets": 16})
  # 24 is no multiple of 16; one microbatch is what is bound.
  assert [v.name for v in both] == [
    f"{m}{r}".strip(", ")
    for m in ("", "microbatches=2", "microbatches=4", "microbatches=8")
    for r in ("", ", recompute")
  ]
  assert [variants.named(v.name) for v in both] == both
  assert both[0] == variants.AS_BOUND and both[0].settings == {}
  kinds = ["SelfAttention", "DenseReluDense"]
  some = variants.variants(("recompute",), settings, 24, {"targets": 16}, kinds)
  assert [v.recompute for v in some] == [False, *[(kind,) for kind in kinds], True]
  assert [variants.named(v.name) for v in some] == some
  assert variants.gin_lines(some[1]) == [
    "transformer.LayerStack.recompute_grads = ('SelfAttention',)"
  ]
  assert variants.kept({"recompute_grads": kinds[:1]}, settings) == some[1]
  # With stages all numbers are told, those next to a few.
  staged = variants.variants(("stages",), settings, 24, {"targets": 16})
  assert [v.microbatches for v in staged] == [1, 8, 24]
  assert variants.gin_lines(Variant(4, True)) == [
    "utils.run.gradient_accumulation_steps = 4",
    "transformer.LayerStack.recompute_grads = True",
  ]
  assert Variant(4).applied(settings).gradient_accumulation_steps == 4
  assert Variant(4).applied(settings).max_grad_norm == 1.0
  assert variants.AS_BOUND.applied(settings).gradient_accumulation_steps is None
  found = {"gradient_accumulation_steps": 4, "recompute_grads": True}
  assert variants.kept(found, settings) == Variant(4, True)
  bound = dataclasses.replace(settings, gradient_accumulation_steps=2)
  assert variants.kept(found, bound) == Variant(None, True)
  assert variants.kept({}, settings) == variants.AS_BOUND
  shards = Variant(shard_state=("a", "b"), reshard_after_forward=False)
  assert variants.named(Variant(2, True, *dataclasses.astuple(shards)[2:]).name) == Variant(
    2, True, ("a", "b"), False
  )
  assert variants.gin_lines(shards) == [
    "utils.run.shard_state = 'a,b'",
    "utils.run.reshard_after_forward = False",
  ]
  assert shards.applied(settings).shard_state == "a,b"
  found = {"shard_state": "a,b", "reshard_after_forward": False}
  assert variants.kept(found, settings) == shards
  assert not variants.kept(found, dataclasses.replace(settings, shard_state="a")).shard_state


def test_microbatches_that_are_bound_can_be_taken_back():
  gin.clear_config()
  gin_config.parse_gin(
    [], ["utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = 32"]
  )
  settings = RunSettings(**GIVEN)
  found = variants.variants(["microbatches"], settings, 8, {"targets": 16})
  assert [v.microbatches for v in found] == [None, 1, 2, 8]


AUTO = {"run.mesh_shape = 'auto'", "run.layout_rules = 'auto'"}
FOUR = "run.num_devices = 4"


@pytest.mark.parametrize(
  ("bindings", "error", "text"),
  [
    (AUTO, ConfigError, "say for how many devices, such as run.num_devices = 8"),
    (
      {*AUTO, FOUR, "run.batch_size = ('tokens_per_replica', 64)"},
      ConfigError,
      r"depends on the layout, which is 'auto'.*'tokens_per_batch', 512",
    ),
    (
      {"run.mesh_shape = 'a:2'", "run.layout_rules = 'auto'", FOUR},
      ConfigError,
      "run.num_devices is 4, but run.mesh_shape 'a:2' has 2 processors",
    ),
    (
      {*AUTO, FOUR, "choose_layout.choices = ('sharded_optimizer',)"},
      ConfigError,
      "'sharded_optimizer' is none of 'microbatches', .*'shard_state'; 'shard_state' splits an opt",
    ),
    (
      {*AUTO, FOUR, CHOICES[0], "run.gradient_accumulation_steps = 2"},
      ConfigError,
      "run.gradient_accumulation_steps is 2, but choose_layout.choices has 'microbatches'",
    ),
    (
      {*AUTO, FOUR, "choose_layout.choices = ('shard_state',)", "run.shard_state = 'mesh_0'"},
      ConfigError,
      "run.shard_state is 'mesh_0', but choose_layout.choices has 'shard_state'",
    ),
    (
      {*AUTO, FOUR, "run.shard_state = 'batch'"},
      ConfigError,
      "run.shard_state names 'batch', but run.mesh_shape is 'auto'",
    ),
    ({*AUTO, "run.num_devices = 0"}, ConfigError, "run.num_devices is 0; it must be at least 1"),
    ({*AUTO, FOUR, "choose_layout.machine = 'tpu-v9'"}, ConfigError, "tpu-v9"),
    ({*AUTO, FOUR, "choose_layout.fixed = 'bach:rows'"}, LayoutError, "did you mean 'batch'"),
    ({*AUTO, FOUR, "run.optimizer = None"}, ConfigError, "run.optimizer is not bound"),
    (
      {"run.mesh_shape = 'auto'", "run.layout_rules = 'd_kv:rows'", "run.num_devices = 3"},
      LayoutError,
      "no mesh of 3 devices suits the rules d_kv:rows",
    ),
  ],
)
def test_errors(bindings, error, text, tmp_path):
  with pytest.raises(error, match=text):
    run(tmp_path, *sorted(bindings), "run.mode = 'search'")


def test_what_is_predicted_for_if_nobody_says():
  assert automatic_layout.usual_machine(4) == "cpu"
  assert automatic_layout.usual_machine(512) == "tpu-v3"
  assert automatic_layout.usual_machine(4, on_tpu=True) == "tpu-v3"


def test_a_layout_for_several_workers_is_predicted_with_their_link(monkeypatch):
  class Make:
    batch_size = 1

    def __call__(self, *_):
      return mtf.function(mtf.MeshImpl("", ""), input_signature=[])(lambda: None)

    def check_shards(self, mesh_dims):
      pass

    def variants(self, choices):
      return [variants.AS_BOUND]

  asked = []

  def search(program, machine=None, **others):
    asked.append(machine.name)
    raise LayoutError("none")

  config = {"cluster": {"worker": ["one:1", "one:2"]}, "task": {"type": "worker", "index": 0}}
  monkeypatch.setenv("TF_CONFIG", json.dumps(config))
  monkeypatch.setattr(mtf, "auto_layout", search)
  for devices in (4, 3):
    with pytest.raises(LayoutError):
      automatic_layout.choose_layout(Make(), None, devices, None, "cpu")
  assert asked == ["CPU host, 2 workers", "CPU host"]  # Three devices cannot be theirs.
