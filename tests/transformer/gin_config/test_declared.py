"""What arguments affect and take is declared where they are; names alone say nothing."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import gin
import pytest

import mesh_tensorflow
import mesh_tensorflow.transformer
from mesh_settings import rules
from mesh_tensorflow import errors
from mesh_tensorflow.arguments import declared
from mesh_tensorflow.transformer import gin_config, transformer_layers
from mesh_tensorflow.transformer.gin_config import bindings as gin_names
from mesh_tensorflow.transformer.gin_config import checks, model_config
from mesh_tensorflow.transformer.model.context import TransformerLayer
from tests.kinds import kept
from tests.transformer.small_lm import EVAL, TEXT, run

LAYERS = "mesh_tensorflow.transformer.transformer_layers"


@gin.configurable(module="tests.gates")
class MyGate(TransformerLayer):
  """A layer of a user, whose arguments have names that elsewhere are those of training."""

  def __init__(
    self,
    init_gain: float = 1.0,
    dropout_floor: float = 0.0,
    alpha: float = -2.0,
    epsilon: float = -1.0,
    gate_loss: float = 0.5,
    steps_train: int = -3,
    num_heads: int = 0,
  ):
    self.init_gain, self.alpha = init_gain, alpha

  def call(self, context, x, losses=None):
    return x * self.init_gain


# As docs and CONTRIBUTING.md have it: in the package's own module, to gin.
@gin.configurable(module=LAYERS)
class MyOtherGate(MyGate):
  def __init__(self, init_gain: float = 1.0, **kwargs):
    super().__init__(init_gain, **kwargs)


@gin.configurable(module="tests.gates")
class MyAttention(transformer_layers.SelfAttention):
  """It inherits its constructor."""


@gin.configurable(module="tests.gates")
class MyDense(transformer_layers.DenseReluDense):
  def __init__(self, dropout_style: str = "none", **kwargs):
    super().__init__(**kwargs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp("gates")
  run(folder, LAYERS_BOUND, text=TEXT)
  yield folder
  gin.clear_config()


LAYERS_BOUND = "make_layer_stack.layers = [@SelfAttention, @tests.gates.MyGate, @MyOtherGate]"
OWN = ["init_gain", "dropout_floor", "alpha", "epsilon", "gate_loss", "steps_train", "num_heads"]


@pytest.mark.parametrize("argument", kept(OWN, OWN[::2]))
def test_every_argument_of_a_users_class_decides_the_model(argument, trained):
  """And none has a range: any number is legal."""
  binding = f"tests.gates.MyGate.{argument} = -7"
  with pytest.raises(errors.ConfigError, match=rf"MyGate.{argument} was .*, now -7"):
    run(trained, *EVAL, LAYERS_BOUND, binding)


def test_a_users_class_in_a_module_of_the_package_is_a_users(trained):
  with pytest.raises(errors.ConfigError, match="MyOtherGate.init_gain was 1.0, now 3.0"):
    run(trained, *EVAL, LAYERS_BOUND, "MyOtherGate.init_gain = 3.0")
  with pytest.raises(errors.ConfigError, match="MyOtherGate.alpha was .*, now -7"):
    run(trained, *EVAL, LAYERS_BOUND, "MyOtherGate.alpha = -7")


def test_arguments_beside_a_class_count_as_bound_ones(tmp_path):
  layers = "make_layer_stack.layers = [[@SelfAttention, {}], [@tests.gates.MyGate, {}]]"
  known = layers.format("{'dropout_rate': 0.1}", "{'init_gain': 1.0}")
  run(tmp_path, known, text=TEXT)
  run(tmp_path, *EVAL, layers.format("{'dropout_rate': 0.3}", "{'init_gain': 1.0}"))
  with pytest.raises(errors.ConfigError, match="make_layer_stack.layers was"):
    run(tmp_path, *EVAL, layers.format("{'dropout_rate': 0.1}", "{'init_gain': 3.0}"))


def test_a_record_of_an_older_version_has_it_elsewhere(trained):
  """There `init_gain` stood among what only training sees."""
  now = model_config.ModelConfig(
    {"model": {"MyGate.init_gain": 3.0}, "vocabulary": []},
    {"MyGate.init_gain": ("", "tests.gates.MyGate", "init_gain")},
  )
  parts = {"model": {}, "training": {"MyGate.init_gain": 1.0}, "other": {}, "precision": {}}
  (difference,) = model_config._differences({**parts, "vocabulary": []}, now)
  assert "MyGate.init_gain was 1.0, now 3.0" in difference


def test_inherited_arguments_are_what_their_class_says():
  kinds = {
    ("tests.gates.MyAttention", "dropout_rate"): "training",
    ("tests.gates.MyAttention", "num_heads"): "model",
    ("tests.gates.MyDense", "dropout_rate"): "training",
    ("tests.gates.MyDense", "dropout_style"): "model",
    (f"{LAYERS}.EncDecAttention", "dropout_rate"): "training",
    ("mesh_tensorflow.optimize.AdamWOptimizer", "epsilon"): "training",
    ("Bitransformer.decode", "alpha"): "report",
  }
  assert {k: checks.effect_of(*k) for k in kinds} == kinds
  assert checks.declared_values("tests.gates.MyAttention", "num_heads") is declared.COUNT
  assert checks.declared_values("tests.gates.MyGate", "num_heads") is None


def test_ranges_of_a_users_subclass_hold_for_what_it_inherits():
  with pytest.raises(errors.ConfigError, match="num_heads = 0: it must be a whole number"):
    gin_config.parse_gin([], [f"{LAYERS}.SelfAttention.num_heads = 0"])
    gin_config.check_run()


def test_what_is_declared_is_an_argument():
  """In all of the package: no name is written wrong, and each rule allows the default."""
  for target in _declared_of_package():
    own = declared.declaration(target)
    parameters = inspect.signature(target).parameters
    assert {*own.arguments, *own.values} <= set(parameters), target
    for name, rule in own.values.items():
      p = parameters[name]
      found = rules.rule_for(p.annotation, p.default, rule)
      legal = p.default in (inspect.Parameter.empty, gin.REQUIRED) or found.is_legal(p.default)
      assert legal, (target, name)


# Names that say that an argument may be one that only training sees.
_OF_TRAINING = re.compile(r"dropout|label_smoothing|z_loss|_loss$|_train$|jitter|init_|_init|^init")


def test_what_may_be_of_training_is_declared_or_known():
  """Whoever adds such an argument decides: declare it, or name it here."""
  known = {"sublayers_initial", "fold_scaling_into_initializer"}
  found = set()
  for selector in _configurables():
    if checks.whole_effect(selector) != "model":
      continue
    names = inspect.signature(gin_names.configurable_of(selector)).parameters
    found |= {
      f"{selector}.{n}"
      for n in names
      if _OF_TRAINING.search(n) and checks.effect_of(selector, n) == "model" and n not in known
    }
  assert found == set()


def test_wrong_declarations_are_refused():
  told = "affects: modle: it must be one of model, precision"
  with pytest.raises(errors.ArgumentError, match=told):
    declared.affects("modle")


def _configurables() -> list[str]:
  for package in (mesh_tensorflow, mesh_tensorflow.transformer):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
      if not module.name.endswith((".main", "__main__")):
        importlib.import_module(module.name)
  wholes = {w for n in gin_names._registered_names() for w in gin_names.whole_selectors(n)}
  return sorted(w for w in wholes if checks.is_of_package(w))


def _declared_of_package() -> list[object]:
  return [
    c
    for c in map(gin_names.configurable_of, _configurables())
    if declared.declaration(c) != declared.Declaration()
  ]
