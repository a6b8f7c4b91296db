"""Keras' maps of variables' layouts as layout rules, and programs that are written with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.keras.layouts import VariableAxes, rules_of
from tests.keras.models import X, Y, assert_same_history, assert_same_variables, compiled

FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
MESH = mtf.Shape([("batch", 2), ("model", 2)])


def device_mesh(shape: tuple[int, ...] = (2, 2)) -> Any:
  names = ("batch", "model")[: len(shape)]
  devices = keras.distribution.list_devices("cpu")[: int(np.prod(shape))]
  return keras.distribution.DeviceMesh(shape, names, devices)


def layout_map(**layouts: tuple[str | None, ...]) -> Any:
  made = keras.distribution.LayoutMap(device_mesh())
  for path, axes in layouts.items():
    made[path] = axes
  return made


def axes(path: str, sizes: list[int], *dims: str | None) -> VariableAxes:
  return VariableAxes(path, keras.Variable(np.zeros(sizes, np.float32), name=path), dims)


class TestRules:
  # The features are in a tensor with the examples, and with the hidden units.
  CONFLICTS = frozenset(
    [frozenset(["examples", "d"]), frozenset(["examples", "h"]), frozenset(["d", "h"])]
  )

  def _rules(self, made: Any, *variables: VariableAxes) -> Any:
    return rules_of(made, variables, MESH, ["examples"], lambda: self.CONFLICTS)

  def test_what_all_variables_agree_on_is_a_rule(self) -> None:
    up, down = axes("up", [8, 4], "d", "h"), axes("down", [4, 8], "h", "d")
    found = self._rules(layout_map(up=(None, "model"), down=("model", None)), up, down)
    assert found.rules.pairs == [("examples", "batch"), ("h", "model")]
    assert not found.stored

  def test_what_would_split_a_tensor_twice_is_stored_under_a_name_of_its_own(self) -> None:
    up, norm = axes("up", [8, 4], "d", "h"), axes("norm", [8], "d")
    found = self._rules(layout_map(up=("batch", "model")), up, norm)
    assert found.rules.pairs == [("d_over_batch", "batch"), ("examples", "batch"), ("h", "model")]
    assert found.stored == {"up": ("d_over_batch", "h")}

  def test_variables_that_the_map_does_not_split_are_whole(self) -> None:
    up, bias = axes("up", [8, 4], "d", "h"), axes("bias", [4], "h")
    found = self._rules(layout_map(up=(None, "model")), up, bias)
    assert found.stored == {"bias": ("h_whole",)}
    assert found.asked == {"up": (None, "model"), "bias": (None,)}

  def test_the_larger_variables_decide(self) -> None:
    large, small = axes("large", [8, 8], "d", "h"), axes("small", [8], "h")
    found = self._rules(layout_map(large=("model", None), small=("model",)), large, small)
    assert ("d", "model") in found.rules.pairs
    assert found.stored == {"small": ("h_over_model",)}

  def test_axes_of_size_one_are_not_split(self) -> None:
    found = self._rules(layout_map(key=("model", None)), axes("key", [1, 8], None, "d"))
    assert found.asked == {"key": (None, None)}

  @pytest.mark.parametrize(
    ("layouts", "message"),
    [
      ({"up": ("model",)}, r"\('model',\) of variable up \[8, 6\], which has 2 axes"),
      ({"up": ("model", "model")}, "model can split one of its axes, not two"),
      ({".*p": (None, "model"), "u.*": ("model", None)}, "variable up: .*multiple"),
    ],
  )
  def test_errors(self, layouts: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
      self._rules(layout_map(**layouts), axes("up", [8, 6], "d", "h"))

  def test_indivisible(self) -> None:
    with pytest.raises(LayoutError, match=r"variable up \[8, 7\], and model:2 does not divide 7"):
      self._rules(layout_map(up=(None, "model")), axes("up", [8, 7], "d", "h"))

  def test_a_mesh_without_the_axis(self) -> None:
    up = axes("up", [8, 4], "d", "h")
    with pytest.raises(LayoutError, match="the mesh .* has no"):
      rules_of(layout_map(up=("model", None)), [up], mtf.Shape([("batch", 2)]), [], list)


class TestPrograms:
  def test_model_parallel(self) -> None:
    theirs, ours = compiled(), compiled()
    made = layout_map(**{"net/up/kernel": ("batch", "model"), ".*down/kernel": ("model", None)})
    distribution = keras.distribution.ModelParallel(layout_map=made, batch_dim_name="batch")
    parallel = mtf.keras.parallelize(ours, distribution)
    assert_same_history(parallel.fit(X[:16], Y[:16], **FIT), theirs.fit(X[:16], Y[:16], **FIT))
    assert_same_variables(ours, theirs)
    store = parallel.mesh_impl.variable_store
    slices = {n: store[n].slice_shape for n in store.names if n.startswith("net/")}
    assert slices == {
      "net/up/kernel": (4, 8),
      "net/up/bias": (16,),
      "net/down/kernel": (8, 4),
      "net/down/bias": (4,),
    }
    moments = [n for n in store.names if n.endswith("up_kernel_momentum")]
    assert [store[n].slice_shape for n in moments] == [(4, 8)]
    row = next(r for r in parallel.placement().splitlines() if "net/up/kernel" in r)
    assert "8/batch x 16/model" in row
    assert row.endswith("batch, model")

  @pytest.mark.long
  def test_data_parallel_that_is_set(self) -> None:
    theirs, ours = compiled(), compiled()
    distribution = keras.distribution.DataParallel(device_mesh((4,)))
    with distribution.scope():
      parallel = mtf.keras.parallelize(ours)
    assert_same_history(parallel.fit(X[:16], Y[:16], **FIT), theirs.fit(X[:16], Y[:16], **FIT))
    assert parallel.layout.pairs == [("batch", "batch")]

  @pytest.mark.long
  # Not Adam for Llama: see `test_repeated_ids_of_an_embedding` in test_optimizers.py.
  @pytest.mark.parametrize(
    ("family", "optimizer"),
    [("Gemma", lambda: keras.optimizers.Adam(0.01)), ("Llama", lambda: keras.optimizers.SGD(0.5))],
  )
  def test_maps_of_keras_hub(self, family: str, optimizer: Callable[[], Any]) -> None:
    models = pytest.importorskip("keras_hub").models
    sizes = {"vocabulary_size": 32, "num_layers": 2, "num_query_heads": 2, "hidden_dim": 8}
    sizes |= {"num_key_value_heads": 1, "intermediate_dim": 16}
    sizes |= {"head_dim": 4} if family == "Gemma" else {}
    kind = getattr(models, f"{family}Backbone")

    def make() -> keras.Model:
      keras.utils.set_random_seed(2)
      backbone = kind(**sizes)
      return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))

    theirs, ours = (compiled(optimizer, make=make, metrics=None) for _ in range(2))
    made = kind.get_layout_map(device_mesh())
    parallel = mtf.keras.parallelize(ours, device_mesh(), made)
    ids = np.random.default_rng(0).integers(0, 32, [8, 6])
    x = {"token_ids": ids, "padding_mask": np.ones([8, 6], np.int32)}
    y = np.roll(ids, -1, 1)
    assert_same_history(parallel.fit(x, y, **FIT), theirs.fit(x, y, **FIT))
    store = parallel.mesh_impl.variable_store
    for v in ours.variables:
      layout = made[v.path]
      asked = (None,) * len(v.shape) if layout is None else layout.axes
      parts = tuple(n // 2 if a and n > 1 else n for a, n in zip(asked, v.shape))
      assert store[v.path].slice_shape == parts, v.path
