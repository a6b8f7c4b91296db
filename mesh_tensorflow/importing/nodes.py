"""Intermediate representation of a traced TensorFlow function: wires, nodes, variables, programs.

Plain records without behaviour. Shapes are static; what TensorFlow could compute while tracing is a
NumPy array on the wire (`Wire.static`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(eq=False)
class Wire:
  """A tensor of the function, or a variable of it; compared by identity.

  Attributes:
    name: for messages, unique within a program: that of the tf.Tensor.
    shape: static sizes; of a variable those of its value.
    dtype: of its values; of a variable that of its value. tf.variant for a TensorList.
    is_stack: whether it is a TensorList that only grows and shrinks at its end, as the gradient of
      a tf.while_loop has them: its length is not known, and `shape` is that of an element.
    static: the values, where they are known without running; None elsewhere.
    variable: the variable, if this is the handle of one.
    resource: the eager tensor, if this is the handle of something else outside of the function.
  """

  name: str
  shape: tuple[int, ...]
  dtype: tf.DType
  static: np.ndarray | None = None
  variable: VariableRecord | None = None
  resource: Any = None
  is_stack: bool = False

  # Attributes by which operations that compute with it are alike, for `planning`.
  alike_by: ClassVar[Sequence[str]] = (
    "shape",
    "dtype",
    "static",
    "variable",
    "resource",
    "is_stack",
  )

  @property
  def rank(self) -> int:
    """Number of axes."""
    return len(self.shape)

  def __repr__(self) -> str:
    return f"{self.name}{list(self.shape)}:{self.dtype.name}"


@dataclasses.dataclass(eq=False)
class VariableRecord:
  """A tf.Variable that the function uses.

  Attributes:
    path: its name within the original: Keras' path, tf.Module's, or TensorFlow's name.
    variable: the original.
    trainable: whether optimizers change it.
  """

  path: str
  variable: tf.Variable
  trainable: bool


# Builds the program of a function's body for given input wires; static ones are constants in there.
Body = Callable[[Sequence[Wire]], "Program"]


@dataclasses.dataclass(eq=False)
class Node:
  """An operation of the function.

  Attributes:
    type: TensorFlow's name of it: "MatMul".
    name: of this one.
    inputs: what it takes.
    outputs: what it makes.
    attributes: by name, as `tf.Operation.get_attr` gives them; functions are left out.
    functions: of a While or If: its functions, by the name of the attribute; of a Case a list is
      spread over "branches_0", "branches_1", ...
    line: the line of Python that made it: "model.py:12, in call".
    arguments: the names of the inputs, as `tf.raw_ops` has them, each with the number of tensors of
      one that is a list (else None).
    may_replicate: whether the user lets it be computed whole on each device, if it has no rule.
    fallback: whether it is.
    is_stateful: whether TensorFlow says that its result is no function of its inputs.
    parts: of several operations between which shapes depend on values: these, in order. They are
      computed together, whole on each device.
    settable: names of the attributes that `tf.raw_ops` takes; others follow from the inputs.
    gradient: of an IdentityN that ends a function under tf.custom_gradient: its gradient. What that
      uses of the forward pass stands behind the other inputs.
    no_gradient: of such a one that cannot be differentiated the reason.
    operation: name of the operation of the traced graph that it is, or is called by.
  """

  type: str
  name: str
  inputs: tuple[Wire, ...]
  outputs: tuple[Wire, ...]
  attributes: Mapping[str, Any]
  functions: Mapping[str, Body] = dataclasses.field(default_factory=dict)
  line: str = ""
  arguments: Sequence[tuple[str, int | None]] = ()
  settable: frozenset[str] = frozenset()
  may_replicate: bool = False
  fallback: bool = False
  is_stateful: bool = False
  parts: tuple[Node, ...] = ()
  gradient: CustomGradient | None = None
  no_gradient: str = ""
  operation: str = ""

  alike_by: ClassVar[Sequence[str]] = (
    "type", "inputs", "outputs", "attributes", "functions", "arguments", "settable", "parts",
    "gradient", "no_gradient", "is_stateful", "fallback",
  )  # fmt: skip

  def static(self, index: int) -> np.ndarray | None:
    """The values of an input, where they are known without running."""
    return self.inputs[index].static

  def __repr__(self) -> str:
    return f"{self.type} {self.name} ({self.line})"


@dataclasses.dataclass(eq=False)
class Program:
  """A function without calls: nodes in the order in which they run.

  Attributes:
    inputs: its arguments.
    outputs: its results.
    nodes: what is between; calls are inlined, constants are folded, what nothing needs is left out.
  """

  inputs: tuple[Wire, ...]
  outputs: tuple[Wire, ...]
  nodes: tuple[Node, ...]

  @property
  def wires(self) -> list[Wire]:
    """All wires, in order of first appearance."""
    found = dict.fromkeys(self.inputs)
    for node in self.nodes:
      found.update(dict.fromkeys([*node.inputs, *node.outputs]))
    found.update(dict.fromkeys(self.outputs))
    return list(found)


@dataclasses.dataclass(eq=False)
class CustomGradient:
  """The gradient that tf.custom_gradient gives a function.

  Attributes:
    program: from gradients of outputs, and what it uses of the function, to gradients of inputs.
    of_outputs: the numbers of the outputs whose gradients are its arguments.
    of_inputs: the numbers of the inputs whose gradients are its results; others have none.
    count: number of inputs, and of outputs, of the function.
  """

  program: Program
  of_outputs: tuple[int, ...]
  of_inputs: tuple[int, ...]
  count: int
