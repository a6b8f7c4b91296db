"""Functions under tf.custom_gradient: several results, captured tensors, loops, nesting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mesh_tensorflow as mtf
from tests.importing import comparing

RNG = np.random.default_rng(3)
X = RNG.normal(size=(4, 8)).astype(np.float32)
W = RNG.normal(size=(8,)).astype(np.float32)
SCALE = tf.Variable(W, name="scale")


@tf.custom_gradient
def _two(x: Any) -> Any:
  """The second result is the argument itself, as that of a sum over replicas may be."""
  return (x * 2.0, x), lambda a, b: a * 3.0 + b * 5.0


@tf.custom_gradient
def _of_variable(x: Any) -> Any:
  def grad(dy: Any, variables: Any = None) -> Any:
    return dy * 7.0, [tf.reduce_sum(dy * x, 0) * 3.0 for _ in variables]

  return x * SCALE, grad


@tf.custom_gradient
def _inner(x: Any) -> Any:
  return tf.exp(x * 0.1), lambda dy: dy * tf.cos(x)


@tf.custom_gradient
def _outer(x: Any) -> Any:
  y = _inner(x) * x
  return (y, tf.reduce_sum(x, 0)), lambda a, b: a * _inner(x) + b


@tf.custom_gradient
def _product(x: Any, w: Any) -> Any:
  return x * w, lambda dy: (dy * w * 2.0, tf.reduce_sum(dy * x, 0) * 3.0)


def _repeated(fn: Callable[[Any], Any], x: Any, times: int = 3) -> Any:
  return tf.while_loop(lambda i, _: i < times, lambda i, u: (i + 1, fn(u)), [0, x])[1]


def both_results(x: Any) -> Any:
  a, b = _two(x)
  return a + b * tf.sin(b)


def sum_over_replicas(x: Any) -> Any:
  return tf.distribute.get_replica_context().all_reduce("sum", x)


def sums_over_replicas(x: Any, w: Any) -> Any:
  a, b = tf.distribute.get_replica_context().all_reduce("sum", [x, w])
  return a * 2.0, b * b


def of_each_other(x: Any) -> Any:
  """One argument is computed from the other."""
  y = tf.sin(x)
  return _product(y, tf.reduce_sum(x * y, 0))


def captured(x: Any, w: Any) -> Any:
  """Tensors of outside, one of which only the gradient uses, in a loop."""
  z, q = tf.exp(w * 0.1), tf.sin(w)

  @tf.custom_gradient
  def own(u: Any) -> Any:
    return u * z, lambda dy: dy * z * q

  return _repeated(own, x)


@tf.function
def _called(x: Any, w: Any) -> Any:
  return captured(_inner(x), w) + _outer(x)[0]


def _loop_in_loop(x: Any) -> Any:
  return _repeated(lambda v: _repeated(lambda u: _inner(u) + v * 0.1, v, 2), x, 2)


def _condition(x: Any) -> Any:
  return tf.cond(tf.reduce_sum(x) > 0, lambda: _inner(x), lambda: _inner(x) * 2.0)


def _tape(x: Any) -> Any:
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.reduce_sum(_outer(x)[0] ** 2)
  return tape.gradient(y, x)


def _gradient_of_gradient(x: Any) -> Any:
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.reduce_sum(tf.sin(_outer(x)[0]))
  return tf.reduce_sum(tape.gradient(y, x) ** 2)


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
  "two results": (both_results, [X]),
  "sum over replicas": (sum_over_replicas, [X]),
  "sums over replicas": (sums_over_replicas, [X, W]),
  "a variable": (lambda x: _of_variable(x), [X]),
  "nested": (lambda x: _outer(x), [X]),
  "arguments of each other": (of_each_other, [X]),
  "a loop": (lambda x: _repeated(lambda u: _inner(u) + u, x), [X]),
  "a variable in a loop": (lambda x: _repeated(lambda u: _of_variable(u) + u, x), [X]),
  "an argument of a loop": (lambda x, w: _repeated(lambda u: _product(u, w), x), [X, W]),
  "captured in a loop": (captured, [X, W]),
  "a loop in a loop": (_loop_in_loop, [X]),
  "a called function": (lambda x, w: _called(x, w) * 2.0, [X, W]),
  "a branch": (_condition, [X]),
  "map_fn": (lambda x: tf.map_fn(_inner, x), [X]),
  "a gradient": (_tape, [X]),
  "a gradient's gradient": (_gradient_of_gradient, [X]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_own_gradients(name: str, cpu_devices: list[str]) -> None:
  fn, args = FUNCTIONS[name]
  imported = comparing.imported_of(fn, args)
  simd = "loop" in name
  layout = [
    (n, a) for n, a in zip(imported.dimensions, "rc") if imported.dimensions[n].size % 2 == 0
  ]
  both = comparing.compare(fn, args, layout, cpu_devices[:4], imported=imported, simd=simd)
  assert both.difference < 1e-5


@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_norm(synchronized: bool, cpu_devices: list[str]) -> None:
  layer = layers.BatchNormalization(synchronized=synchronized)
  layer.build((4, 8))
  both = comparing.compare(
    lambda x: layer(x, training=True), [X], "x.0:r,batch_normalization.features:c", cpu_devices[:4]
  )
  assert both.difference < 1e-5


def test_recomputation_around_a_gradient_of_its_own(cpu_devices: list[str]) -> None:
  imported = comparing.imported_of(lambda x: _outer(x), [X])
  found = []
  for recomputed in (False, True):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    x = mtf.import_tf_tensor(mesh, X, [("a", 4), ("b", 8)])
    fn = lambda x: tuple(imported(x))  # noqa: E731
    ys = mtf.recompute_grad(fn, [x]) if recomputed else fn(x)
    (dx,) = mtf.gradients([mtf.reduce_sum(mtf.square(y)) for y in ys], [x])
    impl = mtf.PlacementMeshImpl("r:2", "x.0:r", cpu_devices[:2])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    found.append(lowering.export_to_tf_tensor(dx).numpy())
  np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def test_what_cannot_be_differentiated_is_told_when_it_is() -> None:
  @tf.custom_gradient
  def broken(x: Any) -> Any:
    def grad(dy: Any) -> Any:
      raise NotImplementedError("nobody has derived this one")

    return tf.sin(x), grad

  imported = comparing.imported_of(lambda x: broken(x), [X])
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.import_tf_tensor(mesh, X, [("a", 4), ("b", 8)])
  y = imported(x)
  with pytest.raises(mtf.GradientError) as e:
    mtf.gradients([y], [x])
  assert "nobody has derived this one" in str(e.value.__cause__)
