"""Placement of one tensor under a layout, and the matches of one of its rules."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class RuleMatch:
  """Dimensions, variables and tensors that a layout rule matched.

  Attributes:
    tensor_dimension: name of the tensor dimension.
    mesh_dimension: name of the mesh dimension.
    mesh_size: size of the mesh dimension, None if the mesh has none of that name.
    sizes: sizes of the tensor dimensions of that name.
    variables: number of variables that it splits.
    tensors: number of other tensors that it splits.
    problem: why it has no effect, or "".
  """

  tensor_dimension: str
  mesh_dimension: str
  mesh_size: int | None
  sizes: list[int]
  variables: int
  tensors: int
  problem: str


@dataclasses.dataclass(frozen=True)
class Placement:
  """Placement of a tensor or variable on the mesh.

  Attributes:
    name: of the tensor, or full name of the variable.
    shape: (dimension name, size) pairs.
    split: for each dimension the name of the mesh dimension that splits it, or None.
    dtype: name of the dtype of the slices.
    bytes: size of the whole.
    bytes_per_device: size of a slice.
    copies: number of devices that hold the same slice.
    trainable: of a variable; None for tensors.
  """

  name: str
  shape: list[tuple[str, int]]
  split: list[str | None]
  dtype: str
  bytes: int
  bytes_per_device: int
  copies: int
  trainable: bool | None = None

  @property
  def is_replicated(self) -> bool:
    """True if every device holds the whole tensor."""
    return all(m is None for m in self.split)


def placement_dict(p: Placement) -> dict[str, Any]:
  """A placement as numbers, texts, lists and dicts."""
  result = dataclasses.asdict(p)
  result["shape"] = [list(d) for d in p.shape]
  return result
