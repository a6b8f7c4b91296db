"""An imported function beside the original: results, all gradients, and variables afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.planning import Machine
from tests.planning.test_machine import fields

SHAPES = {1: "r:1,c:1", 4: "r:2,c:2", 8: "r:2,c:4"}


@dataclasses.dataclass
class Both:
  """What the original and the imported function gave.

  Attributes:
    imported: the imported function.
    expected: what TensorFlow computes: results, then gradients.
    given: what the mesh computes.
  """

  imported: mtf.Imported
  expected: list[np.ndarray]
  given: list[np.ndarray]

  @property
  def difference(self) -> float:
    """The largest one, in units of the largest value of its tensor, but at least of 1."""
    assert [a.shape for a in self.given] == [b.shape for b in self.expected]
    return max(
      (
        float(np.max(np.abs(a - b), initial=0) / max(1.0, np.max(np.abs(b), initial=0)))
        for a, b in zip(_numbers(self.given), _numbers(self.expected), strict=True)
      ),
      default=0.0,
    )

  def own_difference(self, least: float) -> float:
    """The largest one, in units of the largest value of its own tensor.

    Args:
      least: a tensor that is smaller than this part of the largest of all is measured by that: it
        is made of the rounding of larger ones.
    """
    expected = [b for b in _numbers(self.expected) if b.size]
    smallest = least * max((float(np.max(np.abs(b))) for b in expected), default=1.0)
    return max(
      (
        float(np.max(np.abs(a - b)) / max(smallest, np.max(np.abs(b))))
        for a, b in zip(_numbers(self.given), _numbers(self.expected), strict=True)
        if b.size
      ),
      default=0.0,
    )


def _numbers(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
  """As numbers that have differences; shapes must be equal, too."""
  return [a.astype(np.float64) for a in arrays]


def imported_of(
  fn: Callable[..., Any],
  args: Sequence[np.ndarray],
  dims: Mapping[str, Sequence[str | None]] | None = None,
  **kwargs: Any,
) -> mtf.Imported:
  """The function, imported for arguments of these shapes."""
  specs = [tf.TensorSpec(a.shape, a.dtype) for a in args]
  return mtf.from_tensorflow(fn, specs, dims=dims, **kwargs)


def original(
  fn: Callable[..., Any], args: Sequence[np.ndarray], variables: Sequence[tf.Variable]
) -> list[np.ndarray]:
  """Results, and gradients of the sum of squares of the floating ones, by TensorFlow."""
  xs = [tf.constant(a) for a in args]
  floating = [x for x in xs if x.dtype.is_floating]
  with tf.GradientTape() as tape:
    tape.watch([*floating, *variables])  # Untrainable ones, too.
    ys = [y for y in tf.nest.flatten(fn(*xs)) if y is not None]
    losses = [tf.reduce_sum(y * y) for y in ys if y.dtype.is_floating]
  sources = [*floating, *variables]
  grads = tape.gradient(losses, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
  return [np.asarray(tf.convert_to_tensor(v)) for v in (*ys, *grads)]


def on_mesh(
  imported: mtf.Imported, args: Sequence[np.ndarray], mesh_impl: Any, *, traced: bool
) -> list[np.ndarray]:
  """The same, on a mesh.

  Args:
    imported: the imported function.
    args: its arguments.
    mesh_impl: the mesh.
    traced: whether in an `mtf.function`; else each operation runs at once, on placement only.
  """
  shapes = _shapes(args)
  if traced:
    specs = [mtf.TensorSpec(s, tf.as_dtype(a.dtype)) for s, a in zip(shapes, args)]
    run = mtf.function(mesh_impl, input_signature=specs)(lambda *xs: _program(imported, xs))
    return [np.asarray(v) for v in run(*args)]
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  xs = [mtf.import_tf_tensor(mesh, tf.constant(a), s) for a, s in zip(args, shapes)]
  ys = _program(imported, xs)
  lowering = mtf.Lowering(graph, {mesh: mesh_impl})
  return [np.asarray(lowering.export_to_tf_tensor(y)) for y in ys]


def _program(imported: mtf.Imported, xs: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
  ys = [y for y in tf.nest.flatten(imported(*xs)) if isinstance(y, mtf.Tensor)]
  losses = [mtf.reduce_sum(mtf.square(y)) for y in ys if y.dtype.is_floating]
  floating = [x for x in xs if x.dtype.is_floating]
  variables = [
    t
    for t, v in zip(imported.variable_tensors(xs[0].mesh), imported.variables)
    if v.variable.dtype.is_floating
  ]
  sources = [*floating, *variables]
  grads = mtf.gradients(losses, sources) if losses else [None] * len(sources)
  return [*ys, *(mtf.zeros_like(x) if g is None else g for x, g in zip(sources, grads))]


# Set by the fixture of conftest.py for tests that run a second time.
_searched: list[bool] = []


def searched() -> bool:
  """Whether layouts are searched, in place of those that tests give."""
  return bool(_searched)


@contextlib.contextmanager
def search() -> Iterator[None]:
  """Has layouts searched, in place of those that tests give."""
  _searched.append(True)
  try:
    yield
  finally:
    _searched.pop()


def automatic(
  imported: mtf.Imported, args: Sequence[np.ndarray], mesh_impl: Any, time_limit: float = 10
) -> mtf.LayoutRules:
  """The layout that `mtf.auto_layout` finds for the function with all its gradients.

  On a machine whose devices compute so slowly that splitting pays even for programs of tests.

  Args:
    imported: the function.
    args: its arguments.
    mesh_impl: the mesh.
    time_limit: of the search, in seconds.
  """
  specs = [mtf.TensorSpec(s, tf.as_dtype(a.dtype)) for s, a in zip(_shapes(args), args)]
  run = mtf.function(mesh_impl, input_signature=specs)(lambda *xs: _program(imported, xs))
  choice = mtf.auto_layout(
    run, mesh_shape=mesh_impl.shape, machine=slow_machine(), alternatives=0, time_limit=time_limit
  )
  return choice.layout


@functools.cache
def slow_machine() -> Machine:
  """A machine on which exchanges cost nothing beside what they save."""
  exchanges = {"links__1__bandwidth": 1e15, "links__1__latency": 1e-12}
  return Machine.from_dict(fields(**exchanges))


def _shapes(args: Sequence[np.ndarray]) -> list[mtf.Shape]:
  return [
    mtf.Shape([mtf.Dimension(f"argument_{k}.{i}", n) for i, n in enumerate(a.shape)])
    for k, a in enumerate(args)
  ]


def compare(
  fn: Callable[..., Any],
  args: Sequence[np.ndarray],
  layout: str | list[tuple[str, str]],
  devices: Sequence[str],
  *,
  simd: bool = False,
  traced: bool = False,
  dims: Mapping[str, Sequence[str | None]] | None = None,
  imported: mtf.Imported | None = None,
) -> Both:
  """Runs a function by TensorFlow on one device and, imported, on a mesh.

  Args:
    fn: the function.
    args: its arguments.
    layout: the layout.
    devices: 1, 4 or 8 of them: see `SHAPES`.
    simd: on `SimdMeshImpl`, traced; else on placement.
    traced: whether in an `mtf.function`.
    dims: see `mtf.from_tensorflow`.
    imported: if it was imported before.
  """
  imported = imported or imported_of(fn, args, dims)
  variables = [v.variable for v in imported.variables if v.variable.dtype.is_floating]
  kind = mtf.SimdMeshImpl if simd else mtf.PlacementMeshImpl
  mesh_impl = kind(SHAPES[len(devices)], "" if searched() else layout, list(devices))
  if searched() and len(devices) > 1:
    mesh_impl = mesh_impl.with_layout(automatic(imported, args, mesh_impl))
  given = on_mesh(imported, args, mesh_impl, traced=traced or simd)
  return Both(imported, original(fn, args, variables), given)
