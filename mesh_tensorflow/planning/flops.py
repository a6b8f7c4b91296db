"""Floating point operations of TensorFlow nodes, from their static shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def node_flops(node: tf.Operation) -> int:
  """FLOPs of a matrix product or convolution, two for each multiply-add; 0 for other nodes.

  Args:
    node: an operation of a TensorFlow graph. If a shape is not static, it counts as 0.
  """
  count = _COUNTS.get(node.type)
  if count is None:
    return 0
  tensors = list(node.inputs) + list(node.outputs)
  if not all(x.shape.is_fully_defined() for x in tensors):
    return 0
  return 2 * count(node)


def _matmul(transpose: str) -> Callable[[Any], int]:
  def count(node: Any) -> int:
    a = node.inputs[0].shape.as_list()
    return _size(node.outputs[0]) * int(a[-2 if node.get_attr(transpose) else -1])

  return count


def _einsum(node: Any) -> int:
  terms = node.get_attr("equation").decode().split("->")[0].split(",")
  sizes: dict[str, int] = {}
  batch = 1
  for term, x in zip(terms, node.inputs):
    shape = x.shape.as_list()
    before, dots, after = term.partition("...")
    if dots:
      broadcast = shape[len(before) : len(shape) - len(after)]
      batch = max(batch, math.prod(broadcast))
      shape = shape[: len(before)] + shape[len(shape) - len(after) :]
    sizes.update(zip(before + after, shape))
  return math.prod(sizes.values()) * batch if len(terms) > 1 else 0


def _convolution(kernel_axes_left: int, maps: int, kernel: int) -> Callable[[Any], int]:
  """Elements of the maps on the output side, times the kernel elements for each of them.

  Args:
    kernel_axes_left: number of last kernel axes that make new channels.
    maps: number of the input that is the maps; -1 for the output.
    kernel: number of the input that is the kernel; -1 for the output.
  """

  def count(node: Any) -> int:
    def tensor(i: int) -> tf.Tensor:
      return node.outputs[0] if i < 0 else node.inputs[i]

    return _size(tensor(maps)) * int(math.prod(tensor(kernel).shape.as_list()[:-kernel_axes_left]))

  return count


def _size(x: Any) -> int:
  return math.prod(x.shape.as_list())


def convolution_channels(node: tf.Operation) -> float:
  """Channels of a convolution or one of its gradients; 0 for other nodes.

  The geometric mean of the channels that one position of the filter reads and makes: what they
  are few of, processors compute slowly. A depthwise filter reads one.

  Args:
    node: an operation of a TensorFlow graph, with static shapes if it is a convolution.
  """
  kernel = _KERNELS.get(node.type)
  if kernel is None:
    return 0.0
  shape = (node.outputs[0] if kernel < 0 else node.inputs[kernel]).shape.as_list()
  reads = 1 if str(node.type).startswith("Depthwise") else shape[-2]
  return math.sqrt(reads * shape[-1])


_COUNTS: dict[str, Callable[[Any], int]] = {
  "MatMul": _matmul("transpose_a"),
  "BatchMatMul": _matmul("adj_x"),
  "BatchMatMulV2": _matmul("adj_x"),
  "BatchMatMulV3": _matmul("adj_x"),
  "Einsum": _einsum,
}
# The input that is a convolution's kernel; -1 for the output.
_KERNELS: dict[str, int] = {}
# In the gradients the maps on the output side are the incoming gradient, the third input.
for _name, _version, _left in (
  ("Conv2D", "", 1),
  ("Conv3D", "V2", 1),
  ("DepthwiseConv2dNative", "", 2),
):
  _COUNTS[_name] = _convolution(_left, -1, 1)
  _COUNTS[f"{_name}BackpropInput{_version}"] = _convolution(_left, 2, 1)
  _COUNTS[f"{_name}BackpropFilter{_version}"] = _convolution(_left, 2, -1)
  _KERNELS |= {_name: 1, f"{_name}BackpropInput{_version}": 1}
  _KERNELS[f"{_name}BackpropFilter{_version}"] = -1
