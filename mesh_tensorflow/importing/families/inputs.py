"""Inputs that must be known while tracing, and the axis order of images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.nodes import Node, Wire
from mesh_tensorflow.importing.rules import Label
from mesh_tensorflow.importing.value import Value


def static_input(node: Node, index: int, what: str) -> npt.NDArray[np.generic]:
  """The values of an input.

  Args:
    node: an operation.
    index: number of the input.
    what: what it is, for the message.

  Raises:
    UnsupportedError: they are known only when the program runs.
  """
  value = node.static(index)
  if value is None:
    raise UnsupportedError(
      f"from_tensorflow: {node}: its {what} must be known while tracing, but {node.inputs[index]} "
      "is computed"
    )
  return value


_T = TypeVar("_T")


def text(value: Any) -> str:
  """An attribute that is a string."""
  return value.decode() if isinstance(value, bytes) else str(value)


@dataclasses.dataclass(frozen=True)
class Layout:
  """Positions of the axes of an image.

  Attributes:
    rank: number of spatial axes.
    channel_axis: 1, or the last.
  """

  rank: int
  channel_axis: int

  @property
  def _space(self) -> list[int]:
    return [i for i in range(1, self.rank + 2) if i != self.channel_axis]

  def spatial(self, entries: Sequence[_T]) -> list[_T]:
    """Of what has an entry for each axis those of the spatial ones."""
    return [entries[i] for i in self._space]

  def sizes(self, image: Wire) -> list[int]:
    """The spatial sizes of an image."""
    return self.spatial(image.shape)

  def channels(self, image: Wire) -> int:
    """The number of channels of an image."""
    return image.shape[self.channel_axis]

  def ordered(self, batch: Label, space: Sequence[Label], channels: Label) -> tuple[Label, ...]:
    """The labels of all axes in the order of the axes."""
    rest = [batch, *space]
    rest.insert(self.channel_axis, channels)
    return tuple(rest)

  def channels_last(self, image: Value) -> Value:
    """The image with its channels behind its space; nothing is computed."""
    return image.transposed([0, *self._space, self.channel_axis])

  def as_node_has(self, image: Value) -> Value:
    """The reverse of `channels_last`."""
    order = [0, *self._space, self.channel_axis]
    return image.transposed([order.index(i) for i in range(self.rank + 2)])


def layout_of(node: Node) -> Layout:
  """Axis order of an operation on images, by its `data_format` and the rank of its output."""
  rank = node.outputs[0].rank - 2
  data_format = text(node.attributes.get("data_format", "NHWC"))
  return Layout(rank, 1 if data_format.startswith("NC") else rank + 1)
