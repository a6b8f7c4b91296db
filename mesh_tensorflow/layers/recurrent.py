"""Recurrent layers: LSTM, GRU, and a plain one, over sequences of known or of dynamic length.

The products with the inputs are one product for the whole sequence; the loop over positions has
those with the state. Where the hidden dimension is split, each position puts the state together
for that product, and so does the way back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import DTypeError, ShapeError
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.binary import add, minimum, multiply, sub
from mesh_tensorflow.operations.comparison import less
from mesh_tensorflow.operations.constants import constant, zeros
from mesh_tensorflow.operations.einsum import einsum, transpose
from mesh_tensorflow.operations.elementwise import cast, sigmoid, tanh
from mesh_tensorflow.operations.indexing import GatherOperation, ScatterAddOperation
from mesh_tensorflow.operations.loops import while_loop
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reduction import reduce_max
from mesh_tensorflow.operations.reshape import rename_dimension
from mesh_tensorflow.operations.slicing import mtf_slice
from mesh_tensorflow.operations.stacking import unstack
from mesh_tensorflow.operations.variables import VariableDType, VariableDTypeLike, get_variable
from mesh_tensorflow.operations.where import where
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import FloatTensor, IntTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
)
from mesh_tensorflow.program.graph import Tensor, dimension_of

__all__ = ["gru", "lstm", "simple_rnn"]

Activation = Callable[[Tensor], Tensor]
# (inputs of a position [batch, gates, hidden], the states) -> the new states; the first one is the
# output.
Cell = Callable[[Tensor, Sequence[Tensor]], list[Tensor]]


def lstm(
  x: FloatTensor,
  hidden_dim: Dimension,
  length_dim: DimensionLike | str | None = None,
  lengths: IntTensor | None = None,
  initial_state: Sequence[Tensor] | None = None,
  activation: Activation = tanh,
  recurrent_activation: Activation = sigmoid,
  use_bias: bool = True,
  unit_forget_bias: bool = True,
  go_backwards: bool = False,
  variable_dtype: VariableDTypeLike | None = None,
  name: str = "lstm",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
  """Long short-term memory (Hochreiter and Schmidhuber, 1997), as Keras' `LSTM`.

    i, f, o = sigmoid(x K + h R + b), g = tanh(x K + h R + b)
    c' = f * c + i * g,  h' = o * tanh(c')

  Variables: `{name}/kernel` [input, lstm_gates=4, hidden], `{name}/recurrent_kernel`
  [_hidden, lstm_gates, hidden] and `{name}/bias` [lstm_gates, hidden]; the gates are in Keras'
  order, i, f, g, o, so Keras' weights only need another shape.

  Args:
    x: a `Tensor`; its last dimension is summed over, all but that and the length are batch.
    hidden_dim: dimension of the states; x has none of that name.
    length_dim: the dimension of x to go along, or its name; by default that of the name "length",
      or else the last but one.
    lengths: an integer `Tensor` of (some of) the batch dimensions: positions from there on are not
      looked at. The states stay as they are, and an output is that of the last position, as with
      Keras' masks. The loop ends at the longest. By default all have the whole length.
    initial_state: h and c, of the batch dimensions and `hidden_dim`; zeros by default.
    activation: a function of a `Tensor`, of the candidates and of the output.
    recurrent_activation: a function of a `Tensor`, of the gates.
    use_bias: whether there is a bias.
    unit_forget_bias: whether the bias of f begins with 1.
    go_backwards: begins at the end (of each sequence); outputs stay at their positions.
    variable_dtype: dtypes of the variables; x's by default.
    name: name of the scope of the variables.

  Returns:
    (outputs, (h, c)): the h of all positions, of x's dimensions with `hidden_dim` in place of the
    last, and the last states.

  Raises:
    DimensionError: x has no such length.
    ShapeError: x has a dimension of the name of `hidden_dim`; lengths or initial states do not fit.
  """
  layer = _Layer("lstm", x, hidden_dim, length_dim, lengths, variable_dtype, go_backwards)
  gates = Dimension("lstm_gates", 4)
  bias = np.zeros([4, layer.hidden.size], np.float32)
  bias[1] = 1.0 if unit_forget_bias else 0.0
  with scope.variable_scope(name):
    inputs = layer.inputs(gates, bias if use_bias else None)
    recurrent = layer.recurrent_kernel(gates)

  def cell(x: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
    h, c = states
    i, f, g, o = unstack(add(x, layer.product(h, recurrent)), gates)
    i, f, o = (recurrent_activation(gate) for gate in (i, f, o))
    c = add(multiply(f, c), multiply(i, activation(g)))
    return [multiply(o, activation(c)), c]

  outputs, (h, c) = layer.run(cell, inputs, initial_state, 2)
  return outputs, (h, c)


def gru(
  x: FloatTensor,
  hidden_dim: Dimension,
  length_dim: DimensionLike | str | None = None,
  lengths: IntTensor | None = None,
  initial_state: Tensor | None = None,
  activation: Activation = tanh,
  recurrent_activation: Activation = sigmoid,
  use_bias: bool = True,
  reset_after: bool = True,
  go_backwards: bool = False,
  variable_dtype: VariableDTypeLike | None = None,
  name: str = "gru",
) -> tuple[Tensor, Tensor]:
  """Gated recurrent units (Cho et al., 2014), as Keras' `GRU`.

    z, r = sigmoid(x K + h R + b),  h' = z * h + (1 - z) * g
    g = tanh(x K + b + r * (h R + b'))     with `reset_after`
    g = tanh(x K + b + (r * h) R)          without

  Variables: `{name}/kernel` [input, gru_gates=3, hidden], `{name}/recurrent_kernel`
  [_hidden, gru_gates, hidden], `{name}/bias` [gru_gates, hidden], and with `reset_after`
  `{name}/recurrent_bias` of the same; the gates are in Keras' order, z, r, g. Keras has both biases
  in one, as its two rows.

  Arguments as `lstm`; `initial_state` is h, and `reset_after` says whether r is applied after the
  product with R, or before it.

  Returns:
    (outputs, h): as `lstm`, with one state.
  """
  layer = _Layer("gru", x, hidden_dim, length_dim, lengths, variable_dtype, go_backwards)
  gates = Dimension("gru_gates", 3)
  bias = np.zeros([3, layer.hidden.size], np.float32) if use_bias else None
  recurrent_bias = None
  with scope.variable_scope(name):
    inputs = layer.inputs(gates, bias)
    recurrent = layer.recurrent_kernel(gates)
    if use_bias and reset_after:
      recurrent_bias = layer.variable("recurrent_bias", [gates, layer.hidden], initializers.Zeros())

  def cell_after(x: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
    (h,) = states
    inner = layer.product(h, recurrent)
    inner = inner if recurrent_bias is None else add(inner, recurrent_bias)
    x_z, x_r, x_g = unstack(x, gates)
    h_z, h_r, h_g = unstack(inner, gates)
    z, r = recurrent_activation(add(x_z, h_z)), recurrent_activation(add(x_r, h_r))
    return [_mixed(z, h, activation(add(x_g, multiply(r, h_g))))]

  two = mtf_slice(recurrent, 0, 2, gates.name)
  last = unstack(recurrent, gates)[2]

  def cell_before(x: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
    (h,) = states
    x_z, x_r, x_g = unstack(x, gates)
    h_z, h_r = unstack(layer.product(h, two), Dimension(gates.name, 2))
    z, r = recurrent_activation(add(x_z, h_z)), recurrent_activation(add(x_r, h_r))
    return [_mixed(z, h, activation(add(x_g, layer.product(multiply(r, h), last))))]

  cell = cell_after if reset_after else cell_before
  outputs, (h,) = layer.run(cell, inputs, _one(initial_state), 1)
  return outputs, h


def simple_rnn(
  x: FloatTensor,
  hidden_dim: Dimension,
  length_dim: DimensionLike | str | None = None,
  lengths: IntTensor | None = None,
  initial_state: Tensor | None = None,
  activation: Activation = tanh,
  use_bias: bool = True,
  go_backwards: bool = False,
  variable_dtype: VariableDTypeLike | None = None,
  name: str = "simple_rnn",
) -> tuple[Tensor, Tensor]:
  """h' = tanh(x K + h R + b) (Elman, 1990), as Keras' `SimpleRNN`.

  Variables: `{name}/kernel` [input, hidden], `{name}/recurrent_kernel` [_hidden, hidden] and
  `{name}/bias` [hidden].

  Arguments as `gru`, without gates.

  Returns:
    (outputs, h): as `lstm`, with one state.
  """
  layer = _Layer("simple_rnn", x, hidden_dim, length_dim, lengths, variable_dtype, go_backwards)
  with scope.variable_scope(name):
    inputs = layer.inputs(None, np.zeros([layer.hidden.size], np.float32) if use_bias else None)
    recurrent = layer.recurrent_kernel(None)

  def cell(x: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
    return [activation(add(x, layer.product(states[0], recurrent)))]

  outputs, (h,) = layer.run(cell, inputs, _one(initial_state), 1)
  return outputs, h


def _mixed(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
  """z * x + (1 - z) * y."""
  return add(multiply(z, x), multiply(sub(1.0, z), y))


def _one(state: Tensor | None) -> list[Tensor] | None:
  return None if state is None else [state]


@dataclasses.dataclass
class _Layer:
  """Common part of `lstm`, `gru` and `simple_rnn`; attributes are arguments of theirs."""

  kind: str
  x: Tensor
  hidden: Dimension
  length_dim: DimensionLike | str | None
  lengths: Tensor | None
  variable_dtype: VariableDTypeLike | None
  go_backwards: bool

  def __post_init__(self) -> None:
    x = self.x
    if x.shape.ndims < 2:
      raise ShapeError(f"{self.kind} takes at least a length and a dimension of inputs, got {x}")
    self.input = x.shape.dims[-1]
    self.length = self._length()
    if self.length == self.input:
      raise ShapeError(
        f"{self.kind}: {self.length.name}={self.length.size} is the last dimension of {x}, which "
        "is summed over, so it cannot be the length; transpose x (mtf.transpose)"
      )
    self.batch = [d for d in x.shape.dims if d not in (self.input, self.length)]
    # The states in a product with the recurrent kernel, which has them twice.
    self.inner = Dimension(f"_{self.hidden.name}", self.hidden.size)
    for d in [*self.batch, self.length]:
      if d.name in (self.hidden.name, self.inner.name):
        raise ShapeError(
          f"{self.kind}: {x} has a dimension {d.name}, the name of the states; give hidden_dim "
          "another one"
        )
    self.renamed = self.x
    if self.input.name in (self.hidden.name, self.inner.name):
      # As in `dense`: in the kernel the inputs have a name of their own.
      self.renamed = rename_dimension(x, self.input.name, f"_{self.kind}_{self.input.name}")
      self.input = self.renamed.shape.dims[-1]
    if self.lengths is not None:
      for d in self.lengths.shape:
        if d not in self.batch:
          raise ShapeError(
            f"{self.kind}: lengths {self.lengths} have {d.name}={d.size}, which is no batch "
            f"dimension of {x}"
          )
      self.lengths = cast(self.lengths, tf.int32)

  def _length(self) -> Dimension:
    x = self.x
    if self.length_dim is None:
      return next((d for d in x.shape if d.name == "length"), x.shape.dims[-2])
    return dimension_of(self.kind, self.length_dim, x)

  def variable(self, name: str, dims: Sequence[Dimension], initializer: object) -> Tensor:
    dtype = self.variable_dtype or VariableDType(tf.float32, tf.float32, self.x.dtype)
    return get_variable(self.x.mesh, name, Shape(dims), dtype=dtype, initializer=initializer)

  def inputs(self, gates: Dimension | None, bias: np.ndarray | None) -> Tensor:
    """The products with the inputs, of all positions: [length, batch, gates, hidden]."""
    dims = [self.hidden] if gates is None else [gates, self.hidden]
    # Glorot and Bengio's range, of a matrix [input, gates * hidden], as in Keras.
    limit = math.sqrt(6.0 / max(1, self.input.size + math.prod(d.size for d in dims)))
    kernel = self.variable("kernel", [self.input, *dims], initializers.RandomUniform(-limit, limit))
    # The length first, so that a position's are one piece of memory.
    y = einsum([self.renamed, kernel], output_shape=Shape([self.length, *self.batch, *dims]))
    if bias is None:
      return y
    first = tf.constant_initializer(bias)
    return add(y, self.variable("bias", dims, first))

  def recurrent_kernel(self, gates: Dimension | None) -> Tensor:
    dims = [self.inner, self.hidden] if gates is None else [self.inner, gates, self.hidden]
    limit = math.sqrt(
      3.0 / max(1, self.hidden.size)
    )  # So that a product keeps the size of the states.
    return self.variable("recurrent_kernel", dims, initializers.RandomUniform(-limit, limit))

  def product(self, h: Tensor, kernel: Tensor) -> Tensor:
    """Multiplies the states with a kernel, whose first dimension is the states'."""
    h = rename_dimension(h, self.hidden.name, self.inner.name)
    return einsum([h, kernel], output_shape=Shape([*self.batch, *kernel.shape.dims[1:]]))

  def states(self, given: Sequence[Tensor] | None, count: int) -> list[Tensor]:
    shape = Shape([*self.batch, self.hidden])
    if given is None:
      return [zeros(self.x.mesh, shape, self.x.dtype) for _ in range(count)]
    if isinstance(given, Tensor) or len(given) != count:
      raise ShapeError(f"{self.kind} has {count} states, but initial_state is {given!r}")
    for h in given:
      if not isinstance(h, Tensor) or set(h.shape) != set(shape):
        raise ShapeError(
          f"{self.kind}: the initial state {h!r} has not the dimensions {shape} of batch and states"
        )
      if h.dtype != self.x.dtype:
        raise DTypeError(f"{self.kind}: the initial state {h} has not the dtype of {self.x}")
    return [h if h.shape == shape else transpose(h, shape) for h in given]

  def run(
    self, cell: Cell, inputs: Tensor, given: Sequence[Tensor] | None, count: int
  ) -> tuple[Tensor, list[Tensor]]:
    """Adds the loop over the positions; returns outputs and last states."""
    mesh, length, lengths = self.x.mesh, self.length, self.lengths
    start = self.states(given, count)
    stacked = Shape([length, *start[0].shape])
    steps = constant(mesh, length.size, Shape([]), tf.int32)
    if lengths is not None:
      steps = minimum(reduce_max(lengths, output_shape=Shape([])), steps)

    def body(step: Tensor, *states: Tensor) -> list[Tensor]:
      i = sub(sub(steps, 1), step) if self.go_backwards else step
      now = GatherOperation(inputs, i, length, in_range=True, name="position").outputs[0]
      new = cell(now, states)
      if lengths is not None:
        inside = less(i, lengths)
        new = [where(inside, h, before) for h, before in zip(new, states)]
      at = ScatterAddOperation(new[0], i, stacked, length, in_range=True, name="output")
      return [add(step, 1), *new, at.outputs[0]]

    first = constant(mesh, 0, Shape([]), tf.int32)
    _, *states, outputs = while_loop(
      lambda step, *_: less(step, steps),
      body,
      [first, *start],
      has_accumulators=True,
      maximum_iterations=length.size,
    )
    if lengths is not None:
      inside = less(mtf_range(mesh, length, tf.int32), lengths)
      # As in Keras: behind its end an output stays what it was; in front of a beginning, and of a
      # sequence without positions, there is none.
      outside = zeros(mesh, Shape([]), outputs.dtype)
      if not self.go_backwards:
        outside = where(less(0, lengths), states[0], outside)
      outputs = where(inside, outputs, outside, output_shape=stacked)
    order = [self.hidden if d == self.x.shape.dims[-1] else d for d in self.x.shape.dims]
    return transpose(outputs, Shape(order)), list(states)
