"""`run.pipeline_cut`: layers cut into stages by predicted time; and the search over stages."""

from __future__ import annotations

import dataclasses

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer import gin_config
from mesh_tensorflow.transformer.model import stages
from mesh_tensorflow.transformer.modes import layer_cut, variants
from mesh_tensorflow.transformer.modes.planned_steps import make_steps
from tests.transformer import small_lm
from tests.transformer import worker_processes as program

TWO = "run.pipeline_stages = 2"
SETTINGS = [
  "num_layers = 3",
  "dropout_rate = 0.1",
  "run.gradient_accumulation_steps = 4",
  "run.report_every = 1",
  "run.train_steps = 3",
  "run.batch_size = ('sequences_per_batch', 8)",
]


def steps(*bindings, layers=6, count=2, model_type="lm", vocab=60000):
  """A small model in stages, on meshes without devices; logits take as much time as layers."""
  gin.clear_config()
  lines = [f"num_layers = {layers}", "d_model = 64", "d_ff = 64", "num_heads = 2", "d_kv = 32"]
  lines += ["text_file = 'none.txt'", "dropout_rate = 0.0", "Unitransformer.max_length = 64"]
  gin_config.parse_gin(["problems/tinyshakespeare.gin"], [*lines, *bindings])
  made = make_steps(
    model_type,
    mtf.convert_to_shape("batch:2"),
    mtf.convert_to_layout_rules("batch:batch"),
    16,
    {"inputs": 64, "targets": 64},
    vocab_size=vocab,
  )
  impl = made.mesh_impl
  others = [impl.with_layout(impl.layout_rules) for _ in range(count - 1)]
  made.mesh_impl = impl.with_stages(others) if others else impl
  return made


def cut_of(made, cut="auto"):
  layer_cut.set_cut(made, mtf.optimize.AdamWOptimizer, cut)
  return made.model.pipeline_cut


def predicted(made):
  step = made.train_step(made.required_features, mtf.optimize.AdamWOptimizer)
  return mtf.describe(step, machine="a100")


@pytest.fixture(autouse=True)
def nothing_bound():
  yield
  gin.clear_config()


MACHINE = "choose_layout.machine = 'a100'"


def test_a_large_vocabulary_leaves_few_layers_to_the_last_stage():
  equal, balanced = steps(MACHINE), steps(MACHINE)
  assert cut_of(equal, "equal") == (6, 6)
  cut = cut_of(balanced)
  assert sum(cut) == 12 and cut[0] > cut[1]
  # Of all cuts none is predicted to be faster, by more than the transfers that differ.
  of = predicted(balanced).pipeline
  assert of.seconds < predicted(equal).pipeline.seconds
  for first in (cut[0] - 1, cut[0] + 1):
    if 0 < first < 12:
      other = steps(MACHINE)
      cut_of(other, (first, 12 - first))
      assert of.seconds <= predicted(other).pipeline.seconds * 1.01
  # The report is of the cut.
  start = f"2 stages of {cut[0]}, {cut[1]} layers, balanced: the longest stage takes"
  assert stages.described(balanced.model, 2).startswith(start)


def test_the_cut_is_the_same_each_time():
  cuts = {cut_of(steps(MACHINE, count=n)) for n in (3, 3, 3)}
  assert len(cuts) == 1


def test_equal_layers_without_a_large_vocabulary_are_cut_equally():
  assert cut_of(steps(MACHINE, vocab=128, layers=4)) == (4, 4)


def test_one_microbatch_is_cut_equally():
  made = steps(MACHINE)
  made.settings = dataclasses.replace(made.settings, gradient_accumulation_steps=1)
  assert cut_of(made) == (6, 6)
  assert "one microbatch" in stages.described(made.model, 2)


def test_several_runs_of_layers_on_a_stage():
  """Narayanan et al., 2021: of v runs the idle time is the v-th part of (S - 1) / M."""
  made, plain = steps(vocab=64), steps(vocab=64)
  layer_cut.set_cut(made, mtf.optimize.AdamWOptimizer, "equal", chunks=2)
  cut_of(plain, "equal")
  assert stages.described(made.model, 2) == (
    "2 stages of 2 runs each, 3, 3, 3, 3 layers, of equal numbers"
  )
  one, two = (
    mtf.describe(m.train_step(m.required_features, mtf.optimize.AdamWOptimizer)).pipeline
    for m in (plain, made)
  )
  assert one.microbatches == two.microbatches == 8
  assert one.bubble == pytest.approx(1 / (8 + 1))
  assert two.bubble == pytest.approx(1 / (2 * 8 + 1))
  assert [s.under_way for s in one.stages] == [2, 1]
  assert two.stages[0].under_way == (2 * 1 + 1 * 2 + 1) / 2
  # As Narayanan et al. draw it: forward in turns, then one forward, one back.
  assert (
    two.drawn(102)
    .splitlines()[0]
    .endswith(
      "|0011001122..aaaa33bbbb22aaaa33bbbb44cccc55dddd44cccc55dddd66eeee77ffff66eeee77ffff..gggg..hhhh"
      "gggghhhh|"
    )
  )
  # Activations go there, back, and there again.
  assert sum(s.sent for s in two.stages) > 2 * sum(s.sent for s in one.stages)
  assert sum(s.variables for s in two.stages) == sum(s.variables for s in one.stages)


def test_a_plan_has_the_runs(tmp_path, capsys):
  plan = ("run.mode = 'plan'", "print_best_layouts.search = False", "run.pipeline_chunks = 3")
  small_lm.run(tmp_path, *SETTINGS, TWO, *plan, text=small_lm.TEXT)
  text = capsys.readouterr().out
  assert "2 stages of 3 runs each, 1, 1, 1, 1, 1, 1 layers" in text
  assert "Pipeline of 2 stages, 4 microbatches, schedule 1f1b" in text


def test_runs_are_balanced():
  """Logits take as long as some layers: the last of the four runs has fewer of them."""
  made = steps()
  layer_cut.set_cut(made, mtf.optimize.AdamWOptimizer, "auto", chunks=2)
  cut = made.model.pipeline_cut
  assert sum(cut) == 12
  assert cut[3] < min(cut[:3])


@pytest.mark.parametrize(
  "cut,message",
  [
    ((3, 3), r"is \(3, 3\): 2 stages with 6 layers in all, .* the model has 12 layers"),
    ((4, 4, 4), r"3 stages with 12 layers in all, but run.pipeline_stages is 2"),
  ],
)
def test_wrong_cuts(cut, message):
  with pytest.raises(ConfigError, match=message):
    cut_of(steps(), cut)


def test_a_wrong_cut_of_runs():
  with pytest.raises(
    ConfigError, match=r"3 runs .*_stages is 2, run.pipeline_chunks 2 and .* \(3, 3, 3"
  ):
    layer_cut.set_cut(steps(), mtf.optimize.AdamWOptimizer, (4, 4, 4), chunks=2)


def test_a_cut_without_stages():
  with pytest.raises(ConfigError, match="run.pipeline_stages is 1"):
    cut_of(steps(count=1), (6, 6))
  made = steps(count=1)
  assert cut_of(made) is None
  assert cut_of(made, (12,)) is None  # One stage has all layers.


@pytest.mark.parametrize("value", ["'best'", "(0, 4)", "()", "2", "(1.5, 2)"])
def test_wrong_values(value, tmp_path):
  with pytest.raises(ConfigError, match="pipeline_cut"):
    small_lm.run(tmp_path, TWO, f"run.pipeline_cut = {value}", text=small_lm.TEXT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The folder of a training on one device."""
  folder = tmp_path_factory.mktemp("whole")
  small_lm.run(folder, *SETTINGS, text=small_lm.TEXT)
  return folder


@pytest.mark.parametrize("cut", ["(1, 5)", "(4, 1, 1)"])
def test_losses_do_not_depend_on_the_cut(cut, whole, tmp_path, capsys):
  count = cut.count(",") + 1
  bindings = (f"run.pipeline_stages = {count}", f"run.pipeline_cut = {cut}")
  small_lm.run(tmp_path, *SETTINGS, *bindings, text=small_lm.TEXT)
  losses = program.losses(whole / "model")
  found = program.losses(tmp_path / "model")
  np.testing.assert_allclose(list(found.values()), list(losses.values()), rtol=2e-5)
  words = cut.strip("()")
  assert f"{count} stages of {words} layers, as run.pipeline_cut says" in capsys.readouterr().out
  paths = [str(folder / "model" / "model.ckpt-3") for folder in (whole, tmp_path)]
  assert sorted(checkpoint.describe(paths[0])) == sorted(checkpoint.describe(paths[1]))


def test_texts_do_not_depend_on_the_cut(whole):
  plain = small_lm.infer(whole, ["To be", "or"], *SETTINGS, step=3)
  cut = (TWO, "run.pipeline_cut = (5, 1)")
  assert plain == small_lm.infer(whole, ["To be", "or"], *SETTINGS, *cut, step=3)


# ----------------------------------------------------------------------------- search

SEARCH = (
  "run.mode = 'search'",
  "run.mesh_shape = 'auto'",
  "run.layout_rules = 'auto'",
  "run.num_devices = 4",
  "choose_layout.choices = ('stages',)",
  "choose_layout.time_limit = 10.0",
  "choose_layout.machine = '{machine}'",
)


def searched(tmp_path, machine, *more):
  bindings = [line.format(machine=machine) for line in SEARCH]
  path = tmp_path / "found.gin"
  return small_lm.run(
    tmp_path, *bindings, f"write_layout.path = '{path}'", *more, text=small_lm.TEXT
  ), path


def slow_machine(tmp_path):
  """A machine whose devices are joined by very slow links."""
  machine = mtf.planning.Machine.load("tpu-v3")
  link = dataclasses.replace(machine.links[-1], bandwidth=1e6, latency=1e-6, devices=None)
  path = str(tmp_path / "slow.json")
  dataclasses.replace(machine, links=(link,)).save(path)
  return path


def test_a_pipeline_is_found_bound_and_trained(tmp_path, capsys):
  batch = "run.batch_size = ('sequences_per_batch', 8)"
  # Whole on each device it does not fit, and exchanges of layers are slow.
  more = [
    *("num_layers = 2", "d_model = 64", "d_ff = 1024", "run.num_devices = 2"),
    *("run.sequence_length = {'inputs': 8, 'targets': 8}", "choose_layout.memory_limit = 4e6"),
    "run.optimizer = @optimize.AdamWOptimizer",
    # The gradient of a shared table goes from stage to stage.
    "Unitransformer.shared_embedding_and_softmax_weights = False",
  ]
  choice, path = searched(tmp_path, slow_machine(tmp_path), batch, *more)
  assert choice.stages > 1 and choice.mesh_shape.size * choice.stages == 2
  text = path.read_text()
  assert f"run.pipeline_stages = {choice.stages}\n" in text
  assert "gradient_accumulation_steps" in text
  plain = [c for c in choice.alternatives if c.stages == 1]
  assert all(c.seconds >= choice.seconds for c in plain)


def test_no_pipeline_where_devices_share_a_host(tmp_path):
  wide = ("d_model = 256", "d_ff = 1024", "run.sequence_length = {'inputs': 64, 'targets': 64}")
  choice, path = searched(tmp_path, "cpu", *wide, "Unitransformer.max_length = 64")
  assert choice.stages == 1
  assert "pipeline_stages" not in path.read_text()


@pytest.mark.parametrize(
  "more,message",
  [
    (["run.pipeline_chunks = 2"], "pipeline_chunks is 2, but choose_layout.choices has 'stages'"),
    ([TWO], "pipeline_stages is 2, but choose_layout.choices has 'stages'"),
    (["run.pipeline_cut = (1, 1)"], "pipeline_cut is .* choose_layout.choices has 'stages'"),
    (["run.mesh_shape = 'batch:4'", "run.num_devices = None"], "bind run.mesh_shape = 'auto'"),
    (["run.layout_rules = 'batch:batch'"], "bind run.mesh_shape = 'auto'"),
  ],
)
def test_what_contradicts_a_search_over_stages(more, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    searched(tmp_path, "cpu", *more)


def test_a_bound_number_of_stages_must_divide_the_devices(tmp_path):
  with pytest.raises(ConfigError, match="pipeline_stages is 3, which does not divide the 4"):
    searched(tmp_path, "cpu", "run.pipeline_stages = 3", "choose_layout.choices = ()")


def test_variants_with_stages():
  found = variants.Variant(microbatches=8, stages=4)
  assert found.name == "stages=4, microbatches=8"
  assert variants.named(found.name) == found
  assert variants.gin_lines(found) == [
    "utils.run.gradient_accumulation_steps = 8",
    "utils.run.pipeline_stages = 4",
  ]
