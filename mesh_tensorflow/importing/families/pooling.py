"""Maximum and mean of the windows of an image, of any strides, with TensorFlow's gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.families.inputs import layout_of, text
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import Label, Labels, Slicewise, rule


@rule("AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D", "MaxPoolV2")
class Pooling(Slicewise):
  """Windows of the spatial axes; batch and channels may be split, and axes without windows."""

  def labels(self, node: Node) -> Labels:
    layout = layout_of(node)
    window, strides = _numbers(node)
    given: list[Label] = [f"space{i}" for i in range(layout.rank)]
    made: list[Label] = []
    whole: list[Label] = []
    before, after = layout.sizes(node.inputs[0]), layout.sizes(node.outputs[0])
    for label, n, m, k, s in zip(given, before, after, window, strides):
      made.append(label if n == m else f"new_{label}")
      if (k, s) != (1, 1) or n != m:
        whole += [label, made[-1]]
    others: list[Any] = [None] * (len(node.inputs) - 1)
    return Labels(
      [layout.ordered("batch", given, "channels"), *others],
      [layout.ordered("batch", made, "channels")],
      whole,
    )

  def run(self, node: Node) -> Callable[..., Any]:
    layout = layout_of(node)
    window, strides = _numbers(node)
    padding: Any = text(node.attributes["padding"])
    if padding == "EXPLICIT":
      ends = node.attributes["explicit_paddings"]
      padding = layout.spatial(list(zip(ends[::2], ends[1::2])))
    # TensorFlow's kernels for CPUs take channels behind the space only.
    first = [0, *layout.spatial(range(layout.rank + 2)), layout.channel_axis]
    back = [first.index(i) for i in range(layout.rank + 2)]

    def pool(x: tf.Tensor) -> tf.Tensor:
      if first == back == sorted(first):
        return pooled(x, node.type[:3], window, strides, padding)
      y = pooled(tf.transpose(x, first), node.type[:3], window, strides, padding)
      return tf.transpose(y, back)

    return pool


def _numbers(node: Node) -> tuple[list[int], list[int]]:
  """The sizes of the windows, and their strides, along the spatial axes."""
  numbers = []
  for place, name in enumerate(("ksize", "strides"), 1):
    given = node.attributes.get(name)
    if given is None:
      given = node.static(place)
      if given is None:
        raise UnsupportedError(f"from_tensorflow: {node}: its {name} is not known while tracing")
    layout = layout_of(node)
    if any(int(given[i]) != 1 for i in (0, layout.channel_axis)):
      raise UnsupportedError(
        f"from_tensorflow: {node}: windows over batch or channels ({name} {list(given)})"
      )
    numbers.append([int(n) for n in layout.spatial(list(given))])
  return numbers[0], numbers[1]


def pooled(
  x: tf.Tensor,
  kind: str,
  window: Sequence[int],
  strides: Sequence[int],
  padding: str | Sequence[tuple[int, int]],
) -> tf.Tensor:
  """Pools [batch, space..., channels].

  Args:
    x: an image.
    kind: "Max" or "Avg".
    window: window sizes along the spatial axes.
    strides: strides along the spatial axes.
    padding: "SAME", "VALID", or (before, after) for each spatial axis, of a maximum.
  """
  if not isinstance(padding, str):
    lowest = tf.constant(x.dtype.min, x.dtype)
    x, padding = tf.pad(x, [(0, 0), *padding, (0, 0)], constant_values=lowest), "VALID"
  kwargs = {"ksize": [1, *window, 1], "strides": [1, *strides, 1], "padding": padding}
  if len(window) == 2:
    if kind == "Max":
      return tf.raw_ops.MaxPool(input=x, **kwargs)
    return tf.raw_ops.AvgPool(value=x, **kwargs)
  return (tf.raw_ops.MaxPool3D if kind == "Max" else tf.raw_ops.AvgPool3D)(input=x, **kwargs)
