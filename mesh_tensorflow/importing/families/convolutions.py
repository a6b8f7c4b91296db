"""Convolutions in two and three dimensions: transposed, depthwise, with groups, dilations, strides.

Batch, channels, and spatial axes of which the convolution keeps the size may be split; then
processors exchange what the windows reach. Spatial axes that change their size are computed whole:
the names of both sizes may be laid out in ways that no exchange of the convolution serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.families.inputs import Layout, layout_of, text
from mesh_tensorflow.importing.nodes import Node, Wire
from mesh_tensorflow.importing.replicating import Replicated
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labelled,
  Labels,
  label_dims,
  rule,
)
from mesh_tensorflow.importing.value import AxisDims, Value
from mesh_tensorflow.operations.convolution import FEATURES, FILTER, IMAGE, ConvolutionOperation
from mesh_tensorflow.operations.convolution_slices import Window
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor


class _Convolution(Labelled):
  """Base class of convolutions: the space of image and features, batch, window."""

  # Number of the input that is the image, or the features if those are given.
  _given = 0

  def _space(self, node: Node) -> tuple[list[Label], list[Label], list[Label]]:
    """Labels of the space of what is given and of what is made; those that are needed whole."""
    layout = layout_of(node)
    before = layout.sizes(node.inputs[self._given])
    after = layout.sizes(node.outputs[0])
    given: list[Label] = [f"space{i}" for i in range(layout.rank)]
    made: list[Label] = [g if n == m else f"new_{g}" for g, n, m in zip(given, before, after)]
    whole = [label for pair in zip(given, made) if pair[0] != pair[1] for label in pair]
    return given, made, whole

  def _window(self, node: Node, grouped: bool) -> Window:
    layout = layout_of(node)
    strides = [1, *layout.spatial(node.attributes["strides"]), 1]
    dilations = layout.spatial(node.attributes.get("dilations", [1] * (layout.rank + 2)))
    padding: Any = text(node.attributes["padding"])
    if padding == "EXPLICIT":
      ends = node.attributes["explicit_paddings"]
      padding = layout.spatial(list(zip(ends[::2], ends[1::2])))
    return Window(node.name, layout.rank, strides, padding, dilations, grouped)


def _window_labels(rank: int) -> list[Label]:
  return [f"window{i}" for i in range(rank)]


def _axes(wire: Wire, labels: Sequence[Label], dims: Mapping[Label, Dims]) -> AxisDims:
  return tuple(dims[label] if n != 1 else () for n, label in zip(wire.shape, labels))


def _one(label: Label, dims: Mapping[Label, Dims], size: int) -> Dimension:
  """A single dimension for a label, also where it has none or several."""
  own = dims[label]
  return own[0] if len(own) == 1 else Dimension(f"_conv_{label}", size)


@rule("Conv2D", "Conv3D")
class Forward(_Convolution):
  """Features of an image; with groups if the filter has fewer channels than the image."""

  def labels(self, node: Node) -> Labels:
    layout = layout_of(node)
    given, made, whole = self._space(node)
    window = _window_labels(layout.rank)
    groups = _groups(node, node.inputs[0])
    in_label, kernel_in, out = "in", "in", "out"
    if groups > 1:
      kernel_in = "group_in"
      whole = [*whole, kernel_in]
      if _is_channelwise(node, node.inputs[0]):
        out = in_label
      else:
        whole += [in_label, out]
    return Labels(
      [layout.ordered("batch", given, in_label), (*window, kernel_in, out)],
      [layout.ordered("batch", made, out)],
      [*window, *whole],
    )

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    labels, layout = self.labels(node), layout_of(node)
    x_wire, kernel_wire = node.inputs
    x = Value(xs[0], _axes(x_wire, labels.inputs[0] or (), dims))
    kernel = Value(xs[1], _axes(kernel_wire, labels.inputs[1] or (), dims))
    return [_convolved(node, x, kernel, dims, labels, layout, self)]


def _convolved(
  node: Node,
  x: Value,
  kernel: Value,
  dims: Mapping[Label, Dims],
  labels: Labels,
  layout: Layout,
  rule_of: _Convolution,
) -> Tensor:
  """Makes the convolution; converts operands and result from and to the node's axis order."""
  groups, rank = _groups(node, node.inputs[0]), layout.rank
  batch = dims["batch"]
  given, made, _ = rule_of._space(node)
  out_wire = node.outputs[0]
  before = [_one(g, dims, n) for g, n in zip(given, layout.sizes(node.inputs[0]))]
  after = [_one(m, dims, n) for m, n in zip(made, layout.sizes(out_wire))]
  window = [_one(w, dims, n) for w, n in zip(_window_labels(rank), node.inputs[1].shape)]
  c_in, c_out = node.inputs[1].shape[rank:]
  part_in = Dimension("_conv_part_in", c_in) if groups > 1 else _one("in", dims, c_in)
  if groups == 1:
    out = _one("out", dims, c_out)
    inner, kernel_axes, made_axes = [part_in], [*window, part_in, out], [out]
  elif _is_channelwise(node, node.inputs[0]):
    # Each channel by itself: the dimension of the channels is that of the groups.
    group, one = _one("in", dims, groups), Dimension("_conv_part_out", 1)
    inner, kernel_axes, made_axes = [group, part_in], [*window, part_in, group, one], [group, one]
  else:
    group = Dimension("_conv_groups", groups)
    out = Dimension("_conv_part_out", c_out // groups)
    inner, kernel_axes, made_axes = [group, part_in], [*window, part_in, group, out], [group, out]
  image = layout.channels_last(x).with_axes([batch, *([d] for d in before), inner]).ordered()
  taps = kernel.with_axes([*([d] for d in kernel_axes[: rank + 1]), kernel_axes[rank + 1 :]])
  order = kernel_axes
  if groups > 1:
    order = [*window, kernel_axes[rank + 1], part_in, kernel_axes[rank + 2]]
  operation = ConvolutionOperation(
    (IMAGE, FILTER, FEATURES),
    [image, Value(taps.tensor, tuple((d,) for d in order)).ordered()],
    Shape([*batch, *after, *made_axes]),
    rule_of._window(node, groups > 1),
    name=node.type,
  )
  y = Value(operation.outputs[0], (batch, *((d,) for d in after), tuple(made_axes)))
  return layout.as_node_has(y).with_axes(_axes(out_wire, labels.outputs[0], dims)).tensor


def _groups(node: Node, image: Wire) -> int:
  return int(layout_of(node).channels(image) // node.inputs[1].shape[-2])


def _is_channelwise(node: Node, image: Wire) -> bool:
  """True if the convolution is depthwise with one filter per channel."""
  kernel = node.inputs[1]
  return kernel.shape[-2] == 1 and kernel.shape[-1] == layout_of(node).channels(image)


@rule("DepthwiseConv2dNative")
class Depthwise(_Convolution):
  """Each channel with filters of its own; those of one channel stand together in the result."""

  def labels(self, node: Node) -> Labels:
    layout = layout_of(node)
    if layout.channel_axis != layout.rank + 1:
      raise UnsupportedError(f"from_tensorflow: {node}: a depthwise convolution needs NHWC")
    given, made, whole = self._space(node)
    window = _window_labels(layout.rank)
    # The last axis of the output is the product of two: `relate` and `build` know of it.
    return Labels(
      [("batch", *given, "in"), (*window, "in", "multiplier")],
      [("batch", *made)],
      [*window, *whole],
    )

  def relate(self, node: Node, axes: Axes) -> None:
    super().relate(node, axes)
    kernel, y = node.inputs[1], node.outputs[0]
    axes.relate([(kernel, 2), (kernel, 3)], [(y, 3)])

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    labels, layout = self.labels(node), layout_of(node)
    dims = label_dims(node, labels, make)
    given, made, _ = self._space(node)
    x_wire, kernel_wire = node.inputs
    y_wire = node.outputs[0]
    window = [_one(w, dims, n) for w, n in zip(_window_labels(2), kernel_wire.shape)]
    before = [_one(g, dims, n) for g, n in zip(given, layout.sizes(x_wire))]
    after = [_one(m, dims, n) for m, n in zip(made, layout.sizes(y_wire))]
    group, out = (
      _one(label, dims, n) for label, n in zip(("in", "multiplier"), kernel_wire.shape[2:])
    )
    one, batch = Dimension("_conv_part_in", 1), dims["batch"]
    x = make.value(x_wire, _axes(x_wire, ("batch", *given, "in"), dims))
    kernel = make.value(
      kernel_wire, _axes(kernel_wire, (*_window_labels(2), "in", "multiplier"), dims)
    )
    operation = ConvolutionOperation(
      (IMAGE, FILTER, FEATURES),
      [
        x.with_axes([batch, *([d] for d in before), [group, one]]).ordered(),
        kernel.with_axes([*([d] for d in window), [group, one], [out]]).ordered(),
      ],
      Shape([*batch, *after, group, out]),
      self._window(node, grouped=True),
      name=node.type,
    )
    return [Value(operation.outputs[0], (batch, *((d,) for d in after), (group, out)))]


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2")
class Transposed(_Convolution):
  """The image of features: a transposed convolution, or the gradient of a convolution."""

  _given = 2

  def labels(self, node: Node) -> Labels:
    layout = layout_of(node)
    given, made, whole = self._space(node)
    window = _window_labels(layout.rank)
    out, kernel_out = "out", "out"
    if _groups(node, node.outputs[0]) > 1:
      kernel_out = "group_out"
      whole = [*whole, kernel_out]
      if _is_channelwise(node, node.outputs[0]):
        out = "in"
      else:
        whole += ["in", out]
    return Labels(
      [None, (*window, kernel_out, "in"), layout.ordered("batch", given, "in")],
      [layout.ordered("batch", made, out)],
      [*window, *whole],
    )

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    labels, layout = self.labels(node), layout_of(node)
    given, made, _ = self._space(node)
    _, kernel_wire, y_wire = node.inputs
    (out_wire,) = node.outputs
    batch = dims["batch"]
    window = [_one(w, dims, n) for w, n in zip(_window_labels(layout.rank), kernel_wire.shape)]
    before = [_one(g, dims, n) for g, n in zip(given, layout.sizes(y_wire))]
    after = [_one(m, dims, n) for m, n in zip(made, layout.sizes(out_wire))]
    group, out, taken = self._channels(node, dims)
    y = layout.channels_last(Value(xs[2], _axes(y_wire, labels.inputs[2] or (), dims)))
    kernel = Value(xs[1], _axes(kernel_wire, labels.inputs[1] or (), dims))
    taps = kernel.with_axes([*([d] for d in window), [out], [*group, taken]])
    operation = ConvolutionOperation(
      (FEATURES, FILTER, IMAGE),
      [
        y.with_axes([batch, *([d] for d in before), [*group, taken]]).ordered(),
        Value(taps.tensor, tuple((d,) for d in (*window, *group, out, taken))).ordered(),
      ],
      Shape([*batch, *after, *group, out]),
      self._window(node, grouped=bool(group)),
      name=node.type,
    )
    made_value = Value(operation.outputs[0], (batch, *((d,) for d in after), (*group, out)))
    named = layout.as_node_has(made_value).with_axes(_axes(out_wire, labels.outputs[0], dims))
    return [named.tensor]

  def _channels(
    self, node: Node, dims: Mapping[Label, Dims]
  ) -> tuple[list[Dimension], Dimension, Dimension]:
    """The groups, none or one; the channels of the image and of the features, of each group."""
    groups = _groups(node, node.outputs[0])
    c_out, c_in = node.inputs[1].shape[-2:]
    if groups == 1:
      return [], _one("out", dims, c_out), _one("in", dims, c_in)
    out, taken = Dimension("_conv_part_out", c_out), Dimension("_conv_part_in", c_in // groups)
    if _is_channelwise(node, node.outputs[0]):
      return [_one("in", dims, groups)], out, taken
    return [Dimension("_conv_groups", groups)], out, taken


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")
class FilterGradient(_Convolution):
  """Gradient of the filter, from image and features; replicated on each device with groups."""

  def labels(self, node: Node) -> Labels:
    if _is_grouped(node):
      return _REPLICATED.labels(node)
    layout = layout_of(node)
    image, _, features = node.inputs
    before, after = layout.sizes(image), layout.sizes(features)
    given: list[Label] = [f"space{i}" for i in range(layout.rank)]
    made: list[Label] = [g if n == m else f"new_{g}" for g, n, m in zip(given, before, after)]
    whole = [label for pair in zip(given, made) if pair[0] != pair[1] for label in pair]
    window = _window_labels(layout.rank)
    return Labels(
      [layout.ordered("batch", given, "in"), None, layout.ordered("batch", made, "out")],
      [(*window, "in", "out")],
      [*window, *whole],
    )

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    if _is_grouped(node):
      return _REPLICATED.compute(node, xs, dims, make)
    layout, labels = layout_of(node), self.labels(node)
    operands = []
    for i in (0, 2):
      wire, names = node.inputs[i], labels.inputs[i] or ()
      axes = tuple(dims[n] if size != 1 else () for n, size in zip(names, wire.shape))
      image = layout.channels_last(Value(xs[i], axes))
      space = [(_one(n, dims, m),) for n, m in zip(layout.spatial(names), layout.sizes(wire))]
      channels = _one(names[layout.channel_axis], dims, layout.channels(wire))
      operands.append(image.with_axes([dims["batch"], *space, (channels,)]).ordered())
    out = node.outputs[0]
    made = [_one(n, dims, size) for n, size in zip(labels.outputs[0], out.shape)]
    window = self._window(node, grouped=False)
    operation = ConvolutionOperation(
      (IMAGE, FEATURES, FILTER), operands, Shape(made), window, name=node.type
    )
    wanted = [dims[n] if size != 1 else () for n, size in zip(labels.outputs[0], out.shape)]
    return [Value(operation.outputs[0], tuple((d,) for d in made)).with_axes(wanted).tensor]


_REPLICATED = Replicated()


def _is_grouped(node: Node) -> bool:
  return layout_of(node).channels(node.inputs[0]) != node.outputs[0].shape[-2]
