"""Programs that bring a tensor from mesh to mesh for each pair of drawn layouts, and back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from docs.tools.resharding import SHAPE, UNEVEN, layouts


@dataclasses.dataclass(frozen=True)
class Drawn:
  """Tensors and the layouts of two meshes: what a tensor's dimensions are called is its layout.

  Attributes:
    shapes: of the tensors.
    source: layout rules of the mesh "a", which has them.
    target: those of the mesh "b".
  """

  shapes: list[mtf.Shape]
  source: str
  target: str

  @property
  def elements(self) -> int:
    """Elements of all tensors."""
    return sum(shape.size for shape in self.shapes)

  def values(self) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.uniform(-1, 1, s.to_integer_list).astype(np.float32) for s in self.shapes]

  def function(self, impls: dict[str, mtf.MeshImpl]) -> Callable[..., Any]:
    """Squares of the tensors, brought to the mesh "b"; gradients of the sum of their squares."""

    @mtf.function(impls, [mtf.TensorSpec(shape) for shape in self.shapes])
    def there_and_back(*xs: mtf.Tensor) -> Any:
      ys = [mtf.reshard(mtf.square(x), "b") for x in xs]
      loss = mtf.add_n([mtf.reduce_sum(y * y) for y in ys])
      return ys, mtf.gradients([loss], list(xs))

    return there_and_back

  def check(self, impls: dict[str, mtf.MeshImpl]) -> int:
    """Compares values and gradients with NumPy; returns the number of tensors.

    Args:
      impls: the meshes.

    Raises:
      AssertionError: they differ.
    """
    values = self.values()
    ys, gradients = self.function(impls)(*map(tf.constant, values))
    for v, y, g in zip(values, ys, gradients, strict=True):
      np.testing.assert_allclose(y, v**2, rtol=1e-5)
      np.testing.assert_allclose(g, 4 * v**3, rtol=1e-4, atol=1e-6)
    return len(values)


def drawn(source: str, target: str, every: bool) -> Drawn:
  """A tensor for each pair of twelve drawn layouts; every other one has sizes that do not divide.

  Args:
    source: shape of the mesh "a".
    target: shape of the mesh "b".
    every: whether all 144 pairs, or twelve that have each layout once.
  """
  both = layouts(source, "from"), layouts(target, "to")
  shapes: list[mtf.Shape] = []
  rules: tuple[list[str], list[str]] = ([], [])
  for n, pair in enumerate(itertools.product(*both) if every else zip(*both)):
    shape = (SHAPE, UNEVEN)[n % 2]
    shapes.append(mtf.Shape([mtf.Dimension(f"{d.name}{n}", d.size) for d in shape]))
    for of, layout in zip(rules, pair):
      splits = [rule.split(":") for rule in layout.split(",") if rule]
      of.extend(f"{name}{n}:{axis}" for name, axis in splits)
  return Drawn(shapes, *map(",".join, rules))
