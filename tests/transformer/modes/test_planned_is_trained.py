"""What a search and a plan look at is the program that is trained, whatever its data brings."""

from __future__ import annotations

import random

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import DataError, LayoutError
from mesh_tensorflow.planning.auto_layout import LayoutChoice
from mesh_tensorflow.transformer import gin_config, utils
from mesh_tensorflow.transformer.modes import automatic_layout
from mesh_tensorflow.transformer.modes.planned_steps import StepMaker
from mesh_tensorflow.transformer.modes.variants import AS_BOUND
from tests.kinds import kept

BINDINGS = """
  import mesh_tensorflow.optimize
  import mesh_tensorflow.transformer.dataset
  import mesh_tensorflow.transformer.vocabulary
  run.vocabulary = @vocabulary.get_byte_vocabulary()
  run.optimizer = @optimize.AdafactorOptimizer
  num_layers = 1
  d_model = 8
  d_ff = 32
  num_heads = 2
  d_kv = 4
  dropout_rate = 0.0
  run.sequence_length = {'inputs': 32, 'targets': 32}
  Unitransformer.max_length = 32
  run.batch_size = 8
  run.train_steps = 1
  run.learning_rate_schedule = 0.01
  get_variable_dtype.master_dtype = 'float32'
  get_variable_dtype.activation_dtype = 'float32'
  choose_layout.machine = 'tpu-v3'
  choose_layout.time_limit = 2.0
"""
LM = ("run.model_type = 'lm'", "run.train_dataset_fn = @dataset.text_lm_dataset")
PAIRS = "run.train_dataset_fn = @dataset.parallel_text_dataset"
DATA = {
  "packed": (*LM, "text_lm_dataset.mode = 'documents'"),
  "stream": (*LM, "text_lm_dataset.mode = 'stream'"),
  "packed pairs": ("run.model_type = 'bitransformer'", PAIRS, "parallel_text_dataset.pack = True"),
  "pairs": ("run.model_type = 'bitransformer'", PAIRS, "parallel_text_dataset.pack = False"),
  "joined": ("run.model_type = 'delimited_lm'", PAIRS, "parallel_text_dataset.pack = True"),
}
STEP = {
  "as given": (),
  "microbatches": ("run.gradient_accumulation_steps = 2",),
  "recompute": ("transformer.LayerStack.recompute_grads = True",),
  "part": ("run.variable_filter = 'encoder|layer'",),
  "outer batch": ("tpu_estimator_model_fn.outer_batch_size = 2",),
}
# A layout that data without positions of its own would allow beside it: max_length:rows.
FIXED = {"free": (), "batch": ("choose_layout.fixed = 'batch:rows'",)}


def run(folder, *more, **arguments):
  lines = [f"the {a} {b} sees the {c}" for a in ("red", "big") for b in "ab" for c in "xyz"] * 8
  (folder / "text.txt").write_text("\n".join(lines))
  (folder / "pairs.tsv").write_text("".join(f"{x}\t{x[::-1]}\n" for x in lines))
  gin.clear_config()
  given = [
    *map(str.strip, BINDINGS.strip().splitlines()),
    f"text_lm_dataset.train_files = '{folder}/text.txt'",
    f"parallel_text_dataset.files = {{'train': '{folder}/pairs.tsv'}}",
    *more,
  ]
  gin_config.parse_gin([], given)
  return utils.run(None, None, None, None, None, **arguments)


def operations(graph):
  return [
    (type(op).__name__, [(str(x.shape), x.dtype) for x in op.outputs]) for op in graph.operations
  ]


def drawn(seed):
  draw = random.Random(seed)
  return tuple(draw.choice(list(kinds)) for kinds in (DATA, STEP, FIXED))


def check_trained(folder, monkeypatch, data, step, fixed):
  """Trains a step with the layout that is found, and compares its graph with the planned one."""
  makers, trained = [], []

  class Maker(StepMaker):
    def __init__(self, *args, **kwargs):
      super().__init__(*args, **kwargs)
      makers.append(self)

  def train(trainer, vocabulary, lengths, batch_size, dataset_fn, steps, *_, **__):
    losses = trainer.train(dataset_fn, steps, on_ready=trained.append)
    return losses, trainer.mesh_impl

  monkeypatch.setattr(automatic_layout, "StepMaker", Maker)
  auto = ("run.mesh_shape = 'rows:2'", "run.layout_rules = 'auto'")
  bindings = (*auto, *DATA[data], *STEP[step], *FIXED[fixed])
  (loss,), impl = run(folder, *bindings, train_model_fn=train)
  assert np.isfinite(loss)
  planned, _, _ = makers[0](impl.shape, impl.layout_rules, AS_BOUND).build_graph()
  assert operations(planned) == operations(trained[0])


# The dimensions that a search may split.
SPLIT = ("batch", "d_ff", "d_kv", "length", "max_length", "vocab")


@pytest.fixture
def quick_search(request, monkeypatch):
  """In place of the search: adds rules, in a drawn order, as long as the program allows them."""
  order = random.Random(request.node.name).sample(SPLIT, len(SPLIT))

  def search(program, mesh_shape=None, machine=None, fixed="", **others):
    rules, told = [fixed] if fixed else [], None
    for name in order:
      more = [*rules, f"{name}:rows"]
      try:
        told = mtf.describe(program, ",".join(more), mesh_shape, machine=machine)
      except LayoutError:
        continue
      rules = more
    layout = mtf.convert_to_layout_rules(",".join(rules))
    return LayoutChoice(
      mesh_shape, layout, told.seconds, told.memory.total, True, (), machine, 1e12, 0.0
    )

  monkeypatch.setattr(mtf, "auto_layout", search)


CASES = [("packed", "microbatches", "batch"), *map(drawn, range(12))]


@pytest.mark.parametrize(
  ("data", "step", "fixed"), kept(CASES, [CASES[0], ("packed pairs", "microbatches", "batch")])
)
def test_layouts_that_a_program_allows(
  data, step, fixed, tmp_path, monkeypatch, cpu_devices, quick_search
):
  check_trained(tmp_path, monkeypatch, data, step, fixed)


@pytest.mark.long
@pytest.mark.parametrize(("data", "step", "fixed"), CASES)
def test_layouts_of_the_search(data, step, fixed, tmp_path, monkeypatch, cpu_devices):
  check_trained(tmp_path, monkeypatch, data, step, fixed)


PLAN = (
  *("run.mode = 'plan'", "print_best_layouts.search = False"),
  *("run.mesh_shape = 'rows:2'", "run.layout_rules = 'batch:rows'"),
)


def test_a_plan_without_its_data(tmp_path, capsys):
  there = run(tmp_path, *PLAN, *DATA["packed"])
  stream = run(tmp_path, *PLAN, *DATA["stream"])
  # Two more features of 4 x 32 numbers of 4 bytes.
  assert there.memory.inputs - stream.memory.inputs >= 2 * 4 * 32 * 4
  gone = f"text_lm_dataset.train_files = '{tmp_path}/gone.txt'"
  assert "cannot be opened" not in capsys.readouterr().out
  assert run(tmp_path, *PLAN, *DATA["packed"], gone).memory == there.memory
  assert "cannot be opened here, and is taken for packed (" in capsys.readouterr().out
  with pytest.raises(DataError, match="gone.txt"):
    run(tmp_path, *PLAN[2:], *DATA["packed"], gone, "run.layout_rules = 'auto'")
