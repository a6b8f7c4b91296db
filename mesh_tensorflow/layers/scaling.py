"""The unit-scaling convention: weights of variance one, scaled where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin

from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.program.argument_kinds import NumberTensor
from mesh_tensorflow.program.dimensions import list_product
from mesh_tensorflow.program.graph import Tensor

__all__ = ["unit_scaling_convention", "us_einsum"]


@gin.configurable(module="mesh_tensorflow.layers")
def unit_scaling_convention(value: bool = False) -> bool:
  """True if weights are initialized with variance one and `us_einsum` scales its result.

  Args:
    value: bind it in gin: `mesh_tensorflow.layers.unit_scaling_convention.value = True`.

  Returns:
    `value`.
  """
  return value


def us_einsum(xs: Sequence[NumberTensor], *args: Any, **kwargs: Any) -> Tensor:
  """`mtf.einsum`, scaled if the unit-scaling convention is on.

  The factor is n ** -0.5, where n is the product of the sizes of the summed
  dimensions, each counted once.

  Args:
    xs: a list of `Tensor`s.
    *args: as `mtf.einsum`.
    **kwargs: as `mtf.einsum`.

  Returns:
    A `Tensor`.
  """
  y = einsum(xs, *args, **kwargs)
  if not unit_scaling_convention():
    return y
  contracted = {d for x in xs for d in x.shape if d not in y.shape}
  # A sum of n independent terms of variance 1 has the variance n.
  scale: float = list_product(d.size for d in contracted) ** -0.5
  return y * scale
