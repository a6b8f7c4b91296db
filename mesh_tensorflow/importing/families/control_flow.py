"""Loops, conditions, and the lists that loops write into: what tf.while_loop and Keras' RNNs make.

A list of tensors is the tensor of its elements, stacked along a first dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError, UnsupportedError
from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.nested import loop_of, possible_branches, variables_changed
from mesh_tensorflow.importing.nodes import Node, Program, Wire
from mesh_tensorflow.importing.replicating import relate_program
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labelled,
  Labels,
  Rule,
  rule,
)
from mesh_tensorflow.importing.value import Value, flat
from mesh_tensorflow.operations.comparison import equal
from mesh_tensorflow.operations.conditional import ConditionalOperation
from mesh_tensorflow.operations.constants import constant, zeros
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.indexing import GatherOperation
from mesh_tensorflow.operations.loops import while_loop
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.where import where
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor


def _join(axes: Axes, *wires: Wire) -> None:
  """Joins wires axis by axis, except constants, which unrelated nodes may share."""
  wires = tuple(w for w in wires if w.static is None and w.variable is None)
  for i in range(wires[0].rank if wires else 0):
    axes.join(*[(w, i) for w in wires if w.rank == wires[0].rank])


def _tensor(make: Construction, wire: Wire, like: Wire) -> Tensor:
  """Tensor of a wire, renamed and transposed to the dimensions of another wire."""
  return make.value(wire, make.axes_of(like)).ordered()


@rule("While", "StatelessWhile")
class While(Rule):
  """`mtf.while_loop`, with gradients; what the body does not change is taken from outside."""

  def relate(self, node: Node, axes: Axes) -> None:
    loop = loop_of(node)
    for i in loop.varying:
      _join(axes, loop.body.inputs[i], node.inputs[i], loop.body.outputs[i], node.outputs[i])
    for i in set(range(len(node.inputs))) - set(loop.varying):
      _join(axes, node.inputs[i], node.outputs[i])
    for program in (loop.condition, loop.body):
      relate_program(program, axes)

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    loop = loop_of(node)
    inner = [loop.body.inputs[i] for i in loop.varying]
    changed = variables_changed([loop.condition, loop.body])
    start = [_tensor(make, node.inputs[i], w) for i, w in zip(loop.varying, inner)]

    def inputs(state: Sequence[Tensor]) -> list[Value | None]:
      found: list[Value | None] = [None] * len(node.inputs)
      for i, w, x in zip(loop.varying, inner, state):
        found[i] = Value(x, make.axes_of(w))
      return found

    def cond_fn(*state: Tensor) -> Tensor:
      with make.inside(changed):
        return make.run(loop.condition, inputs(state))[0].tensor

    def body_fn(*state: Tensor) -> list[Tensor]:
      with make.inside(changed):
        outputs = [loop.body.outputs[i] for i in loop.varying]
        make.run(dataclasses.replace(loop.body, outputs=tuple(outputs)), inputs(state))
        return [_tensor(make, y, w) for y, w in zip(outputs, inner)]

    # None is TensorFlow's word for no limit, too.
    results = while_loop(cond_fn, body_fn, start, maximum_iterations=loop.most)
    values: list[Value | None] = []
    for i, wire in enumerate(node.outputs):
      if i in loop.varying:
        place = loop.varying.index(i)
        values.append(Value(results[place], make.axes_of(inner[place])))
      elif node.inputs[i].variable is not None or wire.dtype == tf.resource:
        values.append(None)
      else:
        values.append(make.value(node.inputs[i]))
    return values


class _Branches(Rule):
  """Base class of conditions: runs one of several programs, chosen by number."""

  def relate(self, node: Node, axes: Axes) -> None:
    for program in possible_branches(node):
      relate_program(program, axes)
      for inner, out in zip(program.outputs, node.outputs):
        _join(axes, inner, out)

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    programs = possible_branches(node)
    if node.static(0) is not None:
      make.run(programs[0], [None] * (len(node.inputs) - 1))
      return [make.value(y, make.axes_of(w)) for y, w in zip(programs[0].outputs, node.outputs)]
    results = self.choose(make.value(node.inputs[0]).tensor, programs, node, make)
    return [Value(x, make.axes_of(w)) for x, w in zip(results, node.outputs)]

  def choose(
    self, chosen: Tensor, programs: Sequence[Program], node: Node, make: Construction
  ) -> Sequence[Tensor]:
    """Makes the operations that run the program number `chosen`; returns its results."""
    raise NotImplementedError


def _run(program: Program, node: Node, make: Construction) -> Callable[[], list[Tensor]]:
  def branch() -> list[Tensor]:
    with make.inside():
      make.run(program, [None] * (len(node.inputs) - 1))
      return [_tensor(make, y, w) for y, w in zip(program.outputs, node.outputs)]

  return branch


@rule("If", "StatelessIf")
class If(_Branches):
  """`mtf.cond`."""

  def choose(
    self, chosen: Tensor, programs: Sequence[Program], node: Node, make: Construction
  ) -> Sequence[Tensor]:
    pred = chosen if chosen.dtype == tf.bool else cast(chosen, tf.bool)
    true_fn, false_fn = (_run(p, node, make) for p in programs)
    return ConditionalOperation(pred, true_fn, false_fn).outputs


@rule("Case", "StatelessCase")
class Case(_Branches):
  """One `mtf.cond` in another; a number out of range means the last one, as in TensorFlow."""

  def choose(
    self, chosen: Tensor, programs: Sequence[Program], node: Node, make: Construction
  ) -> Sequence[Tensor]:
    def from_number(i: int) -> Callable[[], list[Tensor]]:
      run = _run(programs[i], node, make)
      if i == len(programs) - 1:
        return run
      return lambda: ConditionalOperation(equal(chosen, i), run, from_number(i + 1)).outputs

    return from_number(0)()


def list_labels(wire: Wire) -> list[Label]:
  """The labels of a list: "list" for its first axis, numbers for those of the elements.

  Raises:
    ShapeError: the shape of the elements is not known.
  """
  if not wire.shape or None in wire.shape:
    raise ShapeError(
      f"from_tensorflow: the shape of the elements of the list {wire.name} is not known; give the "
      "TensorArray an element_shape"
    )
  return ["list", *range(wire.rank - 1)]


def list_dim(dims: Mapping[Label, Dims], node: Node) -> Dimension | None:
  """The dimension that elements lie along; None for a list of one."""
  if len(dims["list"]) > 1:
    raise UnsupportedError(
      f"from_tensorflow: the elements of {node} lie along several dimensions, "
      f"{[d.name for d in dims['list']]}, which a reshape made one axis of"
    )
  return dims["list"][0] if dims["list"] else None


@rule("TensorListReserve")
class Reserve(Labelled):
  """New list: zeros, the values that unwritten elements have."""

  def labels(self, node: Node) -> Labels:
    return Labels([None, None], [list_labels(node.outputs[0])])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    labels = list_labels(node.outputs[0])
    dtype = tf.as_dtype(node.attributes["element_dtype"])
    shape = Shape(flat(dims[label] for label in labels))
    return [zeros(make.mesh, shape, dtype if dtype != tf.bool else tf.bool)]


@rule("TensorListFromTensor", "TensorListStack")
class Stack(Labelled):
  """Identity: a list is represented by its stacked elements."""

  def labels(self, node: Node) -> Labels:
    stacked = node.inputs[0] if node.type == "TensorListStack" else node.outputs[0]
    labels = list_labels(stacked)
    return Labels([labels, *[None] * (len(node.inputs) - 1)], [labels])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    return [xs[0]]


@rule("TensorListGetItem")
class GetItem(Labelled):
  """The element at a place."""

  def labels(self, node: Node) -> Labels:
    labels = list_labels(node.inputs[0])
    return Labels([labels, None, None], [labels[1:]])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    dim = list_dim(dims, node)
    if dim is None:
      return [xs[0]]
    index = make.value(node.inputs[1]).tensor
    return [GatherOperation(xs[0], index, dim, in_range=True, name="get_item").outputs[0]]


@rule("TensorListSetItem")
class SetItem(Labelled):
  """The list with another element at a place."""

  def labels(self, node: Node) -> Labels:
    labels = list_labels(node.outputs[0])
    return Labels([labels, None, labels[1:]], [labels])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    dim = list_dim(dims, node)
    before, _, item = xs
    if dim is None:
      return [item]
    here = equal(mtf_range(make.mesh, dim, tf.int32), make.value(node.inputs[1]).tensor)
    return [where(here, item, before, output_shape=before.shape)]


@rule("TensorListLength")
class Length(Rule):
  """The number of elements, which is static."""

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    list_labels(node.inputs[0])
    count = node.inputs[0].shape[0]
    return [Value(constant(make.mesh, count, Shape([]), tf.int32), ())]
