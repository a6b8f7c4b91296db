"""Convolution layers: whole images, images cut into blocks, separable ones; pooling layers."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from tests.conformance.framework import T, op
from tests.operations.numpy_convolution import (
  avg_pool,
  conv,
  conv_transpose,
  cut,
  join,
  max_pool,
)

OUT = mtf.Dimension("o", 4)
FILTER = ("fd", "fh", "fw")
# Of an image in blocks the positions in a block, too.
SPACE = ("d", "h", "w", *FILTER)
HB, WB, DB = mtf.Dimension("hb", 4), mtf.Dimension("wb", 2), mtf.Dimension("db", 2)
KERNEL2, KERNEL3 = "fh:{} fw:{} i:2 o:4", "fd:{} fh:{} fw:{} i:2 o:4"
BLOCKS = "b:2 hb:4 wb:2 h:2 w:3 i:2"


def _layer(name, layer, reference, x, kernel, unsplit=FILTER, illegal=None, **kwargs):
  """A layer with a kernel only; kwargs with which it is called."""
  return op(
    name,
    lambda x: layer(x, OUT, name="c", **kwargs),
    reference,
    x,
    variables={"c/kernel": kernel},
    unsplit=[n for n in unsplit if f"{n}:" in f"{x} {kernel}"],
    illegal=illegal,
  )


def _h(fn):
  """A function of whole images [b, H, w, i], for [b, hb, h, w, i]."""
  return lambda x, w: cut(fn(join(x, 1, 2), w), 1, x.shape[1], 1)


def _hw(fn):
  """For [b, hb, wb, h, w, i]."""

  def blocked(x, w):
    _, hb, wb, *_ = x.shape
    y = fn(join(join(x, 1, 3), 1, 3), w)
    return cut(cut(y, 2, wb, 1), 2, hb, 1)

  return blocked


def _w(fn):
  """For [b, wb, h, w, i]."""
  return lambda x, w: cut(fn(join(x, 1, 3), w), 2, x.shape[1], 1)


def _strided(*strides):
  return lambda x, w: conv(x, w, list(strides))


def _up(*strides):
  return lambda x, w: conv_transpose(x, w, list(strides))


def _blocks(name, layer, wrap, fn, x, kernel, **kwargs):
  # What is in blocks is split by these; what is not, as other images are.
  in_blocks = [d for d in "dhw" if f"{d}b:" in x]
  return _layer(name, layer, wrap(fn), x, kernel, (*in_blocks, *FILTER), **kwargs)


def separable(x, kernels, pointwise, first, biases=(0.0, 0.0)):
  length, y = x.shape[1], 0.0
  for r, w in enumerate(kernels, start=first):
    moved = np.zeros_like(x)
    for t in range(max(0, -r), min(length, length - r)):
      moved[:, t] = x[:, t + r]
    y = y + moved * w
  return (y + biases[0]) @ pointwise + biases[1]


def _depthwise(n, dims="i:4"):
  return {f"s/depthwise_conv_hack/depthwise_dense_{i}/kernel": dims for i in range(n)}


_FIRST_BIAS = "s/depthwise_conv_hack/depthwise_dense_0/bias"
_WITH_BIAS = {
  "s/depthwise_conv_hack/depthwise_dense_0/kernel": "i:4",
  _FIRST_BIAS: "i:4",
  "s/depthwise_conv_hack/depthwise_dense_1/kernel": "i:4",
  "s/depthwise_conv_hack/depthwise_dense_2/kernel": "i:4",
  "s/pointwise_dense/kernel": "i:4 o:4",
  "s/pointwise_dense/bias": "o:4",
}


def _pool(name, layer, fn, x, ksize):
  dims = mtf.convert_to_shape(x)[-len(ksize) - 1 : -1]

  def illegal(layout):
    split = [(d, k) for d, k in zip(dims, ksize) if layout.splits(d.name)]
    return any(d.size % (layout.axis(d.name).size * k) for d, k in split)

  return op(name, lambda x: layer(x, ksize), lambda x: fn(x, ksize), x, illegal=illegal)


DESCRIPTORS = [
  _layer(
    "layer_conv1d",
    layers.conv1d,
    lambda x, w: conv(x[:, None], w)[:, 0],
    "b:4 w:5 i:2",
    KERNEL2.format(1, 3),
  ),
  op(
    "layer_conv1d_strided_valid",
    lambda x: layers.conv1d(x, OUT, 3, 2, padding="VALID", name="c"),
    lambda x, w: conv(x[:, :, None], w, [1, 2], "VALID")[:, :, 0],
    "b:4 c:2 w:6 i:2",
    variables={"c/kernel": KERNEL2.format(1, 3)},
    unsplit=FILTER,
  ),
  _layer("layer_conv2d", layers.conv2d, conv, "b:4 h:4 w:3 i:2", KERNEL2.format(3, 3)),
  _layer(
    "layer_conv2d_strided",
    layers.conv2d,
    _strided(2, 3),
    "b:4 h:5 w:4 i:2",
    KERNEL2.format(2, 3),
    filter_size=(2, 3),
    strides=(2, 3),
  ),
  _layer("layer_conv3d", layers.conv3d, conv, "b:4 d:2 h:3 w:2 i:2", KERNEL3.format(3, 3, 3)),
  _layer(
    "layer_conv2d_transpose",
    layers.conv2d_transpose,
    _up(2, 2),
    "b:4 h:2 w:3 i:2",
    "fh:2 fw:2 o:4 i:2",
  ),
  _layer(
    "layer_conv3d_transpose",
    layers.conv3d_transpose,
    _up(2, 2, 2),
    "b:4 d:2 h:1 w:2 i:2",
    "fd:2 fh:2 fw:2 o:4 i:2",
  ),
  # Images in blocks. The halo is 0, 1, 2 and 4; the blocks are of 2 and 3.
  _blocks(
    "blocks_1x1",
    layers.conv2d_with_blocks,
    _hw,
    conv,
    BLOCKS,
    KERNEL2.format(1, 1),
    filter_size=(1, 1),
    h_blocks_dim=HB,
    w_blocks_dim=WB,
  ),
  _blocks(
    "blocks_3x3",
    layers.conv2d_with_blocks,
    _hw,
    conv,
    BLOCKS,
    KERNEL2.format(3, 3),
    h_blocks_dim=HB,
    w_blocks_dim=WB,
  ),
  _blocks(
    "blocks_5x3",
    layers.conv2d_with_blocks,
    _hw,
    conv,
    BLOCKS,
    KERNEL2.format(5, 3),
    filter_size=(5, 3),
    h_blocks_dim=HB,
    w_blocks_dim=WB,
  ),
  _blocks(
    "blocks_9x5",
    layers.conv2d_with_blocks,
    _hw,
    conv,
    BLOCKS,
    KERNEL2.format(9, 5),
    filter_size=(9, 5),
    h_blocks_dim=HB,
    w_blocks_dim=WB,
  ),
  _blocks(
    "blocks_h_only",
    layers.conv2d_with_blocks,
    _h,
    conv,
    "b:4 hb:4 h:2 w:3 i:2",
    KERNEL2.format(3, 5),
    filter_size=(3, 5),
    h_blocks_dim=HB,
  ),
  _blocks(
    "blocks_w_only",
    layers.conv2d_with_blocks,
    _w,
    conv,
    "b:4 wb:2 h:3 w:2 i:2",
    KERNEL2.format(3, 5),
    filter_size=(3, 5),
    w_blocks_dim=WB,
  ),
  _blocks(
    "blocks_strided",
    layers.conv2d_with_blocks,
    _hw,
    _strided(2, 3),
    "b:2 hb:4 wb:2 h:4 w:3 i:2",
    KERNEL2.format(3, 5),
    filter_size=(3, 5),
    strides=(2, 3),
    h_blocks_dim=HB,
    w_blocks_dim=WB,
  ),
  _blocks(
    "blocks_strided_h_only",
    layers.conv2d_with_blocks,
    _h,
    _strided(2, 2),
    "b:4 hb:4 h:2 w:5 i:2",
    KERNEL2.format(5, 3),
    filter_size=(5, 3),
    strides=(2, 2),
    h_blocks_dim=HB,
  ),
  _layer(
    "blocks_none",
    layers.conv2d_with_blocks,
    lambda x, w: conv(x, w, None, "VALID"),
    "b:4 h:3 w:4 i:2",
    KERNEL2.format(2, 3),
    filter_size=(2, 3),
    padding="VALID",
  ),
  _blocks(
    "blocks_3d",
    layers.conv3d_with_blocks,
    _hw,
    lambda x, w: conv(x, w),
    "b:2 db:2 hb:4 d:2 h:1 w:3 i:2",
    KERNEL3.format(3, 3, 3),
    d_blocks_dim=DB,
    h_blocks_dim=HB,
  ),
  _blocks(
    "blocks_3d_d_only",
    layers.conv3d_with_blocks,
    _h,
    conv,
    "b:4 db:2 d:2 h:2 w:2 i:2",
    KERNEL3.format(5, 1, 3),
    filter_size=(5, 1, 3),
    d_blocks_dim=DB,
    illegal=lambda layout: layout.splits("w"),  # It is padded, as the blocks' dimension is.
  ),
  _blocks(
    "blocks_transpose_2x2",
    layers.conv2d_transpose_with_blocks,
    _hw,
    _up(2, 2),
    BLOCKS,
    "fh:2 fw:2 o:4 i:2",
    h_blocks_dim=HB,
    w_blocks_dim=WB,
  ),
  _blocks(
    "blocks_transpose_4x4",
    layers.conv2d_transpose_with_blocks,
    _hw,
    _up(2, 2),
    BLOCKS,
    "fh:4 fw:4 o:4 i:2",
    filter_size=(4, 4),
    h_blocks_dim=HB,
    w_blocks_dim=WB,
  ),
  _blocks(
    "blocks_transpose_6x2",
    layers.conv2d_transpose_with_blocks,
    _h,
    _up(2, 3),
    "b:4 hb:4 h:1 w:2 i:2",
    "fh:6 fw:2 o:4 i:2",
    filter_size=(6, 2),
    strides=(2, 3),
    h_blocks_dim=HB,
  ),
  _blocks(
    "blocks_transpose_overlap",
    layers.conv2d_transpose_with_blocks,
    _w,
    _up(1, 3),
    "b:4 wb:2 h:2 w:2 i:2",
    "fh:2 fw:8 o:4 i:2",
    filter_size=(2, 8),
    strides=(1, 3),
    w_blocks_dim=WB,
  ),
  _blocks(
    "blocks_transpose_3d",
    layers.conv3d_transpose_with_blocks,
    _hw,
    _up(2, 2, 2),
    "b:2 db:2 hb:4 d:1 h:2 w:2 i:2",
    "fd:4 fh:2 fw:2 o:4 i:2",
    filter_size=(4, 2, 2),
    d_blocks_dim=DB,
    h_blocks_dim=HB,
  ),
  op(
    "separable_conv1d",
    lambda x: layers.separable_conv1d(x, OUT, name="s"),
    lambda x, a, c, b, d, p, q: separable(x, [a, b, d], p, -1, (c, q)),
    "b:4 l:8 i:4",
    variables=_WITH_BIAS,
    together=("b:4 l:8 i:4 o:4",),
  ),
  op(
    "separable_conv1d_to_the_left",
    lambda x: layers.separable_conv1d(x, OUT, -4, -1, name="s", use_bias=False),
    lambda x, a, b, c, d, p: separable(x, [a, b, c, d], p, -4),
    "b:4 l:8 i:4",
    variables={**_depthwise(4), "s/pointwise_dense/kernel": "i:4 o:4"},
    together=("b:4 l:8 i:4 o:4",),
  ),
  op(
    "separable_conv1d_given_kernels",
    lambda x, a, b: layers.separable_conv1d(x, OUT, 0, 1, name="s", kernel_depth_weights=[a, b]),
    lambda x, a, b, c, p, q: separable(x, [a, b], p, 0, (c, q)),
    "b:4 l:8 i:4",
    "i:4",
    "i:4",
    variables={
      _FIRST_BIAS: "i:4",
      "s/pointwise_dense/kernel": "i:4 o:4",
      "s/pointwise_dense/bias": "o:4",
    },
    together=("b:4 l:8 i:4 o:4",),
  ),
  _pool("layer_max_pool2d", layers.max_pool2d, max_pool, "b:4 h:8 w:4 c:4", (2, 2)),
  _pool("layer_max_pool3d", layers.max_pool3d, max_pool, "b:4 d:2 h:4 w:3 c:4", (2, 1, 3)),
  _pool("layer_avg_pool2d", layers.avg_pool2d, avg_pool, "b:4 h:8 w:4 c:4", (4, 2)),
  _pool("layer_avg_pool3d", layers.avg_pool3d, avg_pool, "b:4 d:2 h:4 w:4 c:4", (2, 2, 1)),
  op(
    "conv_net_of_blocks_bfloat16",
    lambda x: layers.max_pool2d(
      layers.conv2d_with_blocks(x, OUT, h_blocks_dim=HB, w_blocks_dim=WB, name="c"), (2, 2)
    ),
    lambda x, w: max_pool(_hw(conv)(x, w), (2, 2)),
    T("b:2 hb:4 wb:2 h:4 w:2 i:2", dtype="bfloat16"),
    variables={"c/kernel": KERNEL2.format(3, 3)},
    unsplit=SPACE,
    differentiable=False,
    tolerance=2e-2,
  ),
]
