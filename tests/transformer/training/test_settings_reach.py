"""Each setting that changes the training step does so, wherever it is given."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random

import pytest

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow.transformer.modes import job as job_lib
from mesh_tensorflow.transformer.modes import mode
from mesh_tensorflow.transformer.training.trainer import Trainer
from tests.training import test_own_program as own
from tests.transformer import small_lm
from tests.transformer import training_program as program

# Values that make another program than the defaults.
OF_THE_STEP = {
  "nonfinite": "skip",
  "loss_scale": 8.0,
  "jit_compile": True,
  "gradient_dtype": "bfloat16",
  "max_grad_norm": 0.5,
  "ema_decay": 0.9,
  "state_dtype": "int8",
  "stochastic_rounding": True,
  "gradient_accumulation_steps": 2,
}
# These are of the loop around it, of its checkpoints, evaluations and reports.
OF_THE_LOOP = set(
  "owner iterations_per_loop save_checkpoints_steps keep_checkpoint_max init_checkpoint seed seeds "
  "report_every norms_every peak_flops profile_steps use_ema average_checkpoints eval_every_steps "
  "eval_steps best_metric best_metric_mode keep_best early_stopping_patience "
  "early_stopping_min_delta allow_config_change".split()
)
OPTIMIZER = mtf.optimize.AdamWOptimizer
_OPTIMIZERS = []  # Those that have updated variables.


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
  apply_grads = OPTIMIZER.apply_grads

  def applied(self, *args):
    _OPTIMIZERS.append(self)
    return apply_grads(self, *args)

  monkeypatch.setattr(OPTIMIZER, "apply_grads", applied)
  monkeypatch.setattr(program, "BINDINGS", program.WITHOUT_ATTENTION)


def seen(step):
  """What a training step is made of: its operations, its optimizer, and whether XLA compiles it."""
  operations = step.build_graph()[0].operations
  kinds = ((type(op).__name__, *(x.dtype.name for x in op.outputs)) for op in operations)
  # Few bits are for large variables only, and stochastic rounding for weights in bfloat16.
  optimizer = _OPTIMIZERS.pop()
  of_optimizer = optimizer._state_dtype, optimizer._rounds_stochastically
  return collections.Counter(kinds), of_optimizer, step._jit_compile


def of_trainer(trainer):
  """The step of the loop; that of the programs is the same, and XLA compiles decoding with it."""
  trainer.loop.compile_steps(["targets"])
  found = seen(trainer.loop._step_fn)
  assert seen(trainer.steps.train_step(["targets"], OPTIMIZER)) == found
  assert trainer.steps.sample_step(program.LENGTH, 2)._jit_compile == found[-1]
  return found


def lm(given=None, of_steps=None, **fields):
  """The step of a language model whose trainer and programs are given settings."""
  made = program.make_trainer(dropout=False)
  steps = made.steps.with_settings(TrainerSettings(**of_steps or {}))
  settings = None if given is None else TrainerSettings(**given)
  found = of_trainer(
    Trainer(steps, None, None, OPTIMIZER, 0.01, settings=settings, quiet=True, **fields)
  )
  assert steps.settings == TrainerSettings(**of_steps or {})
  return found


@functools.cache
def without():
  return lm()


def test_all_settings_are_here():
  assert {f.name for f in dataclasses.fields(TrainerSettings)} == OF_THE_LOOP | set(OF_THE_STEP)


@pytest.mark.parametrize("name", OF_THE_STEP)
def test_a_setting(name):
  with_it = {name: OF_THE_STEP[name]}
  as_field = lm(**with_it)
  assert as_field != without()
  assert as_field == lm(of_steps=with_it) == lm(with_it)


def test_drawn_settings():
  """The fields win over the settings, and these over those of the programs."""
  rng = random.Random(0)
  default = dataclasses.asdict(TrainerSettings())

  def drawn():
    return {n: x if rng.random() < 0.5 else default[n] for n, x in OF_THE_STEP.items()}

  for _ in range(3):
    of_steps, given, wanted = drawn(), drawn(), drawn()
    fields = dict(rng.sample(sorted(wanted.items(), key=str), 5))
    assert lm(given, of_steps, **fields) == lm({**given, **fields})
    assert lm(None, of_steps, **fields) == lm({**of_steps, **fields})


def seeds_of(trainer):
  store = trainer.state.store
  return store.seed, store.noise_seed, trainer.state.data_seed


def test_seeds(cpu_devices):
  """Those of the settings, or of single fields; without any those of the variable store."""
  steps, others = program.make_trainer().steps, {"weights": 7, "dropout": 8, "data": 9}
  for given, expected in [
    ({}, (1, 2, 1)),
    ({"max_grad_norm": 1.0}, (1, 2, 1)),
    ({"seed": 4}, (4, 4, 4)),
    ({"seeds": others}, (7, 8, 9)),
    ({"settings": TrainerSettings(seed=4, seeds={"data": 9})}, (4, 4, 9)),
    ({"settings": TrainerSettings(seed=4), "seed": 5}, (5, 5, 5)),
  ]:
    store = mtf.VariableStore(seed=1, noise_seed=2)
    impl = mtf.PlacementMeshImpl("", "", cpu_devices[:1], variable_store=store)
    assert seeds_of(Trainer(steps.on_mesh(impl), None, None, OPTIMIZER, **given)) == expected
    own_impl = impl.with_store(mtf.VariableStore(seed=1, noise_seed=2))
    of_own = mtf.Trainer(own.model_fn, own_impl, own.FEATURES, optimizer=OPTIMIZER, **given)
    assert seeds_of(of_own) == expected


@pytest.fixture
def seen_as_a_mode():
  @mode("seen")
  def run_seen(job):
    return of_trainer(job.make_estimator())

  yield
  del job_lib._MODES["seen"]
  job_lib.MODES[:] = job_lib.mode_names()


def test_by_gin(tmp_path, seen_as_a_mode):
  def by_gin(*bindings):
    bound = ["run.mode = 'seen'", small_lm.WITHOUT_ATTENTION, *bindings]
    bound.append(f"run.optimizer = @optimize.{OPTIMIZER.__name__}")
    return small_lm.run(tmp_path, *bound, text=small_lm.TEXT)

  plain = by_gin()
  for name, value in OF_THE_STEP.items():
    assert by_gin(f"run.{name} = {value!r}") != plain, name


@pytest.mark.parametrize("name", OF_THE_STEP)
def test_of_a_program_of_ones_own(name, cpu_devices):
  def found(**fields):
    trainer = own.make_trainer(cpu_devices, **fields)
    trainer.loop.compile_steps(list(own.FEATURES))
    return seen(trainer.loop._step_fn)

  with_it = {name: OF_THE_STEP[name]}
  assert found(**with_it) != found()
  assert found(settings=TrainerSettings(**with_it)) == found(**with_it)
