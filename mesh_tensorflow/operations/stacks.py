"""Stacks of slices: what a forward pass leaves for its backward pass.

How often a loop runs is known only when it has run, so what it keeps of each iteration has no
shape that a named dimension could tell. It is on a stack (Yu et al., "Dynamic Control Flow in
Large-Scale Machine Learning", 2018): to the program a scalar of dtype `tf.variant`, on each
processor a list of this processor's own slices, in TensorFlow's `TensorList`, onto which a push
copies nothing. The gradient of a push is a pop, that of a pop a push; so what is made of both can
be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.constants import zeros_like
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor, is_differentiable


class Element(NamedTuple):
  """Element type of a stack: tensors of one shape and dtype, or stacks of them.

  Attributes:
    shape: of an element.
    dtype: of an element; `tf.variant` if the elements are stacks.
    inner: element type of the inner stacks; None if the elements are tensors.
    length: maximum number of elements; None if not known.
  """

  shape: Shape
  dtype: tf.DType
  inner: Element | None = None
  length: int | None = None

  def bytes_of_slice(self, impl: MeshImpl) -> int:
    """Bytes of a full stack on one processor; those of one element if the length is unknown."""
    if self.inner is not None:
      one = self.inner.bytes_of_slice(impl)
    else:
      one = math.prod(impl.slice_shape(self.shape)) * self.dtype.size
    return int(one * (self.length or 1))


def element_like(x: Tensor, length: int | None = None) -> Element:
  """Element type of a stack for `x`, with at most `length` elements."""
  return Element(x.shape, x.dtype, x.stack_of, length)


def is_stack(x: Tensor) -> bool:
  """True if the tensor is a stack."""
  return bool(x.dtype == tf.variant)


def carries_gradient(x: Tensor) -> bool:
  """True if a tensor can have a gradient: if it is floating or complex, or a stack of such."""
  element: Element | None = x.stack_of
  if is_stack(x):
    while element is not None and element.dtype == tf.variant:
      element = element.inner
    return element is not None and is_differentiable(element.dtype)
  return is_differentiable(x.dtype)


def stack_tensor(
  op: Operation, element: Element, index: int = 0, name: str | None = None
) -> Tensor:
  """Creates the tensor of a stack, as an output of an operation."""
  result = Tensor(op, Shape([]), tf.variant, index=index, name=name)
  result.stack_of = element
  return result


def empty_slices(impl: MeshImpl, element: Element, max_num_elements: int = -1) -> Any:
  """Each processor's empty list."""
  shape = impl.slice_shape(element.shape)
  return impl.slicewise(
    lambda: tf.raw_ops.EmptyTensorList(
      element_shape=tf.constant(shape, tf.int32),
      max_num_elements=max_num_elements,
      element_dtype=element.dtype,
    )
  )


def push_slices(impl: MeshImpl, stack: LaidOut, value: LaidOut) -> Any:
  """Each processor's list, with its slice of `value` on top."""
  return impl.slicewise(
    lambda s, t: tf.raw_ops.TensorListPushBack(input_handle=s, tensor=t), stack, value
  )


class EmptyStackOperation(Operation):
  """A stack without elements.

  Args:
    mesh: a `Mesh`.
    element: what will be pushed.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(self, mesh: Mesh, element: Element, name: str | None = None):
    super().__init__([], mesh=mesh, name=name or "empty_stack")
    self._element = element
    self._outputs = [stack_tensor(self, element)]
    self._initialize_all_dimensions_as_splittable()

  def lower(self, lowering: LoweringInProgress) -> None:
    slices = empty_slices(lowering.mesh_impl(self), self._element)
    lowering.set_tensor_lowering(self._outputs[0], slices)


class PushOperation(Operation):
  """A stack with `x` on top; see `push`."""

  lowers_uneven_slices = True

  def __init__(self, stack: Tensor, x: Tensor, name: str | None = None):
    super().__init__([stack, x], name=name or "push")
    self._outputs = [stack_tensor(self, stack.stack_of or element_like(x))]
    self._initialize_all_dimensions_as_splittable()

  @property
  def has_gradient(self) -> bool:
    return carries_gradient(self._inputs[1])

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return list(pop(grad_ys[0]))

  def lower(self, lowering: LoweringInProgress) -> None:
    stack, x = (lowering.tensors[t] for t in self._inputs)
    lowering.set_tensor_lowering(
      self._outputs[0], push_slices(lowering.mesh_impl(self), stack, x.to_laid_out_tensor())
    )


class PopOperation(Operation):
  """A stack without its top element, and that element; see `pop`."""

  lowers_uneven_slices = True

  def __init__(self, stack: Tensor, name: str | None = None):
    super().__init__([stack], name=name or "pop")
    self._element = _element_of(stack)
    element = self._element
    if element.dtype == tf.variant and element.inner is not None:
      value = stack_tensor(self, element.inner, index=1)
    else:
      value = Tensor(self, element.shape, element.dtype, index=1)
    self._outputs = [stack_tensor(self, element), value]
    self._initialize_all_dimensions_as_splittable()

  @property
  def has_gradient(self) -> bool:
    return carries_gradient(self._inputs[0])

  def gradient(self, grad_ys: list[Tensor | None]) -> Sequence[Tensor | None]:
    rest, value = (zero_gradient(y) if g is None else g for g, y in zip(grad_ys, self._outputs))
    return [push(rest, value)]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    shape, dtype = impl.slice_shape(self._element.shape), self._element.dtype

    def pop_slice(stack: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      rest, value = tf.raw_ops.TensorListPopBack(
        input_handle=stack, element_shape=tf.constant(shape, tf.int32), element_dtype=dtype
      )
      value.set_shape(shape)  # TensorFlow knows it only where it has seen the push.
      return rest, value

    results = impl.slicewise(pop_slice, lowering.tensors[self._inputs[0]])
    for out, slices in zip(self._outputs, results):
      lowering.set_tensor_lowering(out, slices)


def _element_of(stack: Tensor) -> Element:
  if stack.stack_of is None:
    raise UnsupportedError(f"{stack} is not known to be a stack, so nothing can be read from it")
  element: Element = stack.stack_of
  return element


def empty_stack(mesh: Mesh, element: Element) -> Tensor:
  """A stack without elements."""
  return EmptyStackOperation(mesh, element).outputs[0]


def push(stack: Tensor, x: Tensor) -> Tensor:
  """The stack with `x` on top."""
  return PushOperation(stack, x).outputs[0]


def pop(stack: Tensor) -> tuple[Tensor, Tensor]:
  """The stack without its top element, and that element."""
  rest, value = PopOperation(stack).outputs
  return rest, value


def zero_gradient(x: Tensor) -> Tensor:
  """Zero gradient of a tensor on which nothing depends; an empty stack for a stack."""
  return empty_stack(x.mesh, _element_of(x)) if is_stack(x) else zeros_like(x)
