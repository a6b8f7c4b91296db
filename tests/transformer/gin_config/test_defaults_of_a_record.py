"""How a record of a model's configuration names the functions that are defaults."""

from __future__ import annotations

from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.gin_config import model_config
from mesh_tensorflow.transformer.gin_config.bindings import Reference
from mesh_tensorflow.transformer.model import sublayers

SELECTOR = "mesh_tensorflow.transformer.transformer.sublayer_residual"


def test_a_configurable_has_its_selector():
  bound = model_config._as_bound([transformer.sublayer_residual, 3, None])
  assert bound == [Reference("sublayer_residual", False, "", SELECTOR), 3, None]


def test_what_a_configurable_wraps_is_the_same():
  inside = sublayers.sublayer_residual.__wrapped__
  assert model_config._as_bound(inside) == Reference("sublayer_residual", False, "", SELECTOR)


def test_another_function_of_that_name_is_another():
  def sublayer_residual(x):
    return x

  bound = model_config._as_bound(sublayer_residual)
  assert bound == Reference("sublayer_residual", False, "", f"{__name__}.sublayer_residual")


def test_a_function_that_gin_does_not_know_has_the_name_of_its_module():
  name = test_a_configurable_has_its_selector.__name__
  bound = model_config._as_bound(test_a_configurable_has_its_selector)
  assert bound == Reference(name, False, "", f"{__name__}.{name}")
