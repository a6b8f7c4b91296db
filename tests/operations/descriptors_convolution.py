"""Convolutions and transposed ones, their gradients and the gradients of those."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op
from tests.operations.numpy_convolution import conv, conv_transpose

X2, W2 = "b:4 h:4 w:3 i:4", "fh:3 fw:2 i:4 o:6"
X3, W3 = "b:4 d:3 h:2 w:4 i:2", "fd:2 fh:2 fw:3 i:2 o:4"
SPACE2 = ("fh", "fw")
SPACE3 = ("fd", *SPACE2)


def _apply(operation, strides=None, padding="SAME"):
  whole = None if strides is None else [1, *strides, 1]
  return lambda x, w: operation(x, w, whole, padding).outputs[0]


def _conv(name, x, w, strides=None, padding="SAME", **kwargs):
  rank = len(mtf.convert_to_shape(w)) - 2 if isinstance(w, str) else w.shape.ndims - 2
  operation = mtf.Conv2dOperation if rank == 2 else mtf.Conv3dOperation
  kwargs.setdefault("unsplit", SPACE2 if rank == 2 else SPACE3)
  return op(
    name,
    _apply(operation, strides, padding),
    lambda x, w: conv(x, w, strides, padding),
    x,
    w,
    **kwargs,
  )


def _transposed(name, x, w, strides, padding="SAME", **kwargs):
  rank = len(mtf.convert_to_shape(w)) - 2 if isinstance(w, str) else w.shape.ndims - 2
  operation = mtf.Conv2dTransposeOperation if rank == 2 else mtf.Conv3dTransposeOperation
  return op(
    name,
    _apply(operation, strides, padding),
    lambda x, w: conv_transpose(x, w, strides, padding),
    x,
    w,
    unsplit=SPACE2 if rank == 2 else SPACE3,
    **kwargs,
  )


def _dilated(w, distance):
  """A filter of one spatial dimension with zeros between its positions."""
  wide = np.zeros([(w.shape[0] - 1) * distance + 1, *w.shape[1:]], w.dtype)
  wide[::distance] = w
  return wide


def _adjoint(fn, index, other, dy, shape):
  """Gradient of a bilinear function with respect to one argument, basis vector by vector."""
  grad = np.zeros(shape)
  for position in np.ndindex(*shape):
    e = np.zeros(shape)
    e[position] = 1.0
    grad[position] = np.sum(dy * (fn(e, other) if index == 0 else fn(other, e)))
  return grad


def _backprop_input(name, function, x, w, dy, forward, strides=None, padding="SAME", **kwargs):
  shape = mtf.convert_to_shape(x)
  whole = None if strides is None else [1, *strides, 1]
  return op(
    name,
    lambda w, dy: function(shape, w, dy, whole, padding),
    lambda w, dy: _adjoint(forward, 0, w, dy, shape.to_integer_list),
    w,
    dy,
    **kwargs,
  )


def _backprop_filter(name, function, x, w, dy, forward, strides=None, padding="SAME", **kwargs):
  shape = mtf.convert_to_shape(w)
  whole = None if strides is None else [1, *strides, 1]
  return op(
    name,
    lambda x, dy: function(x, shape, dy, whole, padding),
    lambda x, dy: _adjoint(forward, 1, x, dy, shape.to_integer_list),
    x,
    dy,
    **kwargs,
  )


# Small, since the references of these compute whole convolutions for each element.
x2, w2, y2 = "b:4 h:2 w:3 i:2", "fh:2 fw:2 i:2 o:2", "b:4 h:2 w:3 o:2"
t2, u2 = "fh:2 fw:2 o:2 i:2", "b:4 h:4 w:6 o:2"
x3, w3, y3 = "b:2 d:2 h:1 w:2 i:2", "fd:2 fh:1 fw:1 i:2 o:2", "b:2 d:2 h:1 w:2 o:2"
t3, u3 = "fd:2 fh:1 fw:1 o:2 i:2", "b:2 d:4 h:1 w:2 o:2"

DESCRIPTORS = [
  _conv("conv2d", X2, W2),
  _conv("conv2d_valid", X2, W2, padding="VALID"),
  _conv("conv2d_strides", X2, "fh:3 fw:3 i:4 o:6", [2, 2]),
  _conv("conv2d_strides_differ", "b:4 h:5 w:7 i:2", "fh:2 fw:3 i:2 o:4", [2, 3]),
  _conv("conv2d_strides_valid", "b:4 h:5 w:6 i:2", "fh:2 fw:3 i:2 o:4", [2, 2], "VALID"),
  _conv("conv2d_stride_larger", "b:4 h:5 w:6 i:2", "fh:1 fw:2 i:2 o:4", [2, 3]),
  _conv("conv2d_two_batch_dims", "b:4 c:2 h:3 w:2 i:2", "fh:3 fw:3 i:2 o:4"),
  _conv("conv2d_three_batch_dims", "b:2 c:2 e:3 h:2 w:2 i:2", "fh:1 fw:2 i:2 o:4"),
  _conv("conv2d_no_batch", "h:3 w:4 i:4", W2),
  _conv(
    "conv2d_bfloat16",
    T(X2, dtype="bfloat16"),
    T(W2, -0.5, 0.5, "bfloat16"),
    tolerance=2e-2,
  ),
  _conv("conv2d_float16", T(X2, dtype="float16"), T(W2, -0.5, 0.5, "float16"), tolerance=4e-3),
  _conv("conv2d_float64", T(X2, dtype="float64"), T(W2, dtype="float64"), tolerance=1e-7),
  _conv("conv3d", X3, W3),
  _conv("conv3d_valid", X3, W3, padding="VALID"),
  _conv("conv3d_strides", X3, W3, [2, 1, 3]),
  _conv("conv3d_two_batch_dims", "b:2 c:4 d:2 h:2 w:2 i:2", "fd:2 fh:1 fw:2 i:2 o:4"),
  _conv(
    "conv3d_bfloat16",
    T(X3, dtype="bfloat16"),
    T(W3, -0.5, 0.5, "bfloat16"),
    tolerance=2e-2,
  ),
  _transposed("conv2d_transpose", "b:4 h:2 w:3 i:4", "fh:2 fw:2 o:6 i:4", [2, 2]),
  _transposed("conv2d_transpose_overlap", "b:4 h:2 w:3 i:4", "fh:4 fw:3 o:6 i:4", [2, 2]),
  _transposed("conv2d_transpose_valid", "b:4 h:2 w:3 i:4", "fh:2 fw:1 o:6 i:4", [2, 2], "VALID"),
  _transposed(
    "conv2d_transpose_valid_overlap", "b:4 h:2 w:3 i:2", "fh:4 fw:3 o:6 i:2", [2, 1], "VALID"
  ),
  _transposed(
    "conv2d_transpose_two_batch_dims", "b:4 c:2 h:2 w:2 i:2", "fh:2 fw:3 o:4 i:2", [1, 2]
  ),
  _transposed("conv3d_transpose", "b:4 d:2 h:1 w:2 i:4", "fd:2 fh:2 fw:2 o:6 i:4", [2, 2, 2]),
  _transposed(
    "conv3d_transpose_valid", "b:4 d:2 h:1 w:2 i:2", "fd:3 fh:1 fw:2 o:4 i:2", [2, 2, 1], "VALID"
  ),
  _backprop_input(
    "conv2d_backprop_input", mtf.conv2d_backprop_input, x2, w2, y2, conv, unsplit=SPACE2
  ),
  _backprop_filter(
    "conv2d_backprop_filter", mtf.conv2d_backprop_filter, x2, w2, y2, conv, unsplit=SPACE2
  ),
  _backprop_input(
    "conv2d_transpose_backprop_input",
    mtf.conv2d_transpose_backprop_input,
    x2,
    t2,
    u2,
    lambda x, w: conv_transpose(x, w, [2, 2]),
    [2, 2],
    unsplit=SPACE2,
  ),
  _backprop_filter(
    "conv2d_transpose_backprop_filter",
    mtf.conv2d_transpose_backprop_filter,
    x2,
    t2,
    u2,
    lambda x, w: conv_transpose(x, w, [2, 2]),
    [2, 2],
    unsplit=SPACE2,
  ),
  _backprop_input(
    "conv3d_backprop_input", mtf.conv3d_backprop_input, x3, w3, y3, conv, unsplit=SPACE3
  ),
  _backprop_filter(
    "conv3d_backprop_filter", mtf.conv3d_backprop_filter, x3, w3, y3, conv, unsplit=SPACE3
  ),
  _backprop_input(
    "conv3d_transpose_backprop_input",
    mtf.conv3d_transpose_backprop_input,
    x3,
    t3,
    u3,
    lambda x, w: conv_transpose(x, w, [2, 1, 1]),
    [2, 1, 1],
    unsplit=SPACE3,
  ),
  _backprop_filter(
    "conv3d_transpose_backprop_filter",
    mtf.conv3d_transpose_backprop_filter,
    x3,
    t3,
    u3,
    lambda x, w: conv_transpose(x, w, [2, 1, 1]),
    [2, 1, 1],
    unsplit=SPACE3,
  ),
  op(
    "convolution_1d_dilated",
    lambda x, w: mtf.convolution(x, w, dilations=[2]),
    lambda x, w: conv(x[:, None], _dilated(w, 2)[None])[:, 0],
    "b:2 w:8 i:2",
    "fw:3 i:2 o:4",
    unsplit="fw",
  ),
  op(
    "convolution_causal",
    lambda x, w: mtf.convolution(x, w, padding=[(2, 0)]),
    lambda x, w: conv(np.pad(x, [(0, 0), (2, 0), (0, 0)])[:, None], w[None], None, "VALID")[:, 0],
    "b:4 w:4 i:2",
    "fw:3 i:2 o:4",
    unsplit="fw",
  ),
  op(
    "convolution_groups",
    lambda x, w: mtf.convolution(x, w, [2, 1], groups=("g", 4)),
    lambda x, w: np.stack([conv(x[..., g, :], w[:, :, g], [2, 1]) for g in range(4)], -2),
    "b:2 h:4 w:4 g:4 i:2",
    "fh:2 fw:3 g:4 i:2 o:2",
    unsplit=SPACE2,
  ),
  op(
    "convolution_depthwise",
    lambda x, w: mtf.convolution(x, w, groups=("c", 4)),
    lambda x, w: np.stack([conv(x[..., c : c + 1], w[:, :, c, None]) for c in range(4)], -2),
    "b:2 h:4 w:4 c:4",
    "fh:3 fw:3 c:4 o:2",
    unsplit=SPACE2,
  ),
  op(
    "convolution_depthwise_3d",
    lambda x, w: mtf.convolution(x, w, [1, 2, 2], groups=("c", 2)),
    lambda x, w: np.stack(
      [conv(x[..., c : c + 1], w[:, :, :, c, None], [1, 2, 2]) for c in range(2)], -2
    ),
    "b:2 d:2 h:4 w:2 c:2",
    "fd:3 fh:2 fw:1 c:2 o:4",
    unsplit=SPACE3,
  ),
  op(
    "convolution_transposed_3d",
    lambda x, w: mtf.convolution(x, w, [2, 1, 2], transposed=True),
    lambda x, w: conv_transpose(x, w, [2, 1, 2]),
    "b:2 d:2 h:4 w:2 i:2",
    "fd:3 fh:3 fw:2 o:2 i:2",
    unsplit=SPACE3,
  ),
]
