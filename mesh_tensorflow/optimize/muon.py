"""Muon: momentum, made orthogonal by products alone, of variables taken for matrices."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.errors import ConfigError, ShapeError
from mesh_tensorflow.operations.binary import add, multiply, sub
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast, negative
from mesh_tensorflow.operations.one_hot import one_hot
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.operations.stacking import stack, unstack
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.adam import AdamWOptimizer
from mesh_tensorflow.optimize.base import Optimizer
from mesh_tensorflow.optimize.scalars import ScalarLike, check_at_least, check_below_one
from mesh_tensorflow.optimize.update import (
  UpdateOperation,
  decay,
  is_float32,
  subtract,
  subtract_scaled,
)
from mesh_tensorflow.optimize.weight_decay import WeightDecay, check_patterns, found_in
from mesh_tensorflow.program.argument_kinds import CastableTensor, FloatTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product, no_such_dimension
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor

__all__ = ["MuonOptimizer", "orthogonalize"]


# Look-up tables, of which a step changes the rows of some tokens or distances only; what makes the
# logits, whose columns stand for one token each; and what is not multiplied as a matrix is.
NOT_MATRICES = (
  "embedding",
  "(^|/)logits/",
  "softmax",
  "bias$",
  "scale$",
  "prompt",
)
# Dimensions along which each index has a matrix of its own.
STACKED = ("ensemble", "stacked", "experts", "expert_x", "expert_y", "num_expert_layers")
# The dimension on one side of the matrices of a layer; all of the other side is multiplied by it.
MODEL = ("d_model",)


@dataclasses.dataclass(frozen=True)
class Matrix:
  """A variable as matrices.

  Attributes:
    rows: dimensions of the rows (inputs): the first side in the shape, unless given otherwise.
    columns: dimensions of the columns (outputs).
  """

  rows: list[Dimension]
  columns: list[Dimension]

  @property
  def sizes(self) -> tuple[int, int]:
    """Numbers of rows and columns."""
    return (
      list_product([d.size for d in self.rows]),
      list_product([d.size for d in self.columns]),
    )


def by_rule(shape: Shape, stacked: Sequence[str], model: Sequence[str]) -> Matrix | None:
  """The matrix that a shape means; None if it is none, or could be several.

  Without the stacked dimensions, two are rows and columns. Of more, the first or the last is one
  side, and the rest the other, if that one alone is a dimension of the model.

  Args:
    shape: shape of the variable.
    stacked: names of dimensions along which each index has a matrix of its own.
    model: names of dimensions of the model.
  """
  dims = [d for d in shape if d.name not in stacked]
  if len(dims) == 2:
    return Matrix(dims[:1], dims[1:])
  if len(dims) > 2 and sum(d.name in model for d in dims) == 1:
    if dims[0].name in model:
      return Matrix(dims[:1], dims[1:])
    if dims[-1].name in model:
      return Matrix(dims[:-1], dims[-1:])
  return None


@dataclasses.dataclass(frozen=True)
class NamedMatrix:
  """Row and column dimensions of the variables in whose name a pattern is found.

  Attributes:
    pattern: regular expression, for `re.search`.
    rows: names of dimensions.
    columns: names of dimensions.
  """

  pattern: str
  rows: tuple[str, ...]
  columns: tuple[str, ...]

  def of(self, variable: Variable) -> Matrix:
    """The matrix of a variable in whose name the pattern is found.

    Raises:
      ConfigError: the variable has no such dimensions.
    """
    by_name = {d.name: d for d in variable.shape}
    missing = [n for n in (*self.rows, *self.columns) if n not in by_name]
    if missing:
      raise ConfigError(
        f"MuonOptimizer: matrices names {', '.join(missing)} of variables {self.pattern!r}, but "
        f"{variable.full_name} has {variable.shape}"
      )
    return Matrix([by_name[n] for n in self.rows], [by_name[n] for n in self.columns])


def named_matrices(given: Sequence[object]) -> list[NamedMatrix]:
  """Checks the argument `matrices` of `MuonOptimizer`.

  Args:
    given: (regular expression, names of rows, names of columns) for each.

  Raises:
    ConfigError: one is nothing of the kind.
  """
  found = []
  for entry in given:
    if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not isinstance(entry[0], str):
      raise _wrong(entry, "it is none")
    sides = [entry[1], entry[2]]
    if not all(_is_names(s) for s in sides):
      raise _wrong(entry, "rows and columns must each be a list of names")
    if set(sides[0]) & set(sides[1]):
      raise _wrong(entry, "a dimension is both")
    try:
      re.compile(entry[0])
    except re.error as e:
      raise _wrong(entry, str(e)) from None
    found.append(NamedMatrix(entry[0], tuple(sides[0]), tuple(sides[1])))
  return found


def _is_names(side: Any) -> bool:
  is_list = isinstance(side, (list, tuple)) and bool(side)
  return is_list and all(isinstance(n, str) for n in side)


def _wrong(entry: object, why: str) -> ConfigError:
  return ConfigError(
    f"MuonOptimizer: matrices has {entry!r}, where a (regular expression, rows, columns) is "
    f"expected, such as ('/q$', ['d_model'], ['heads']): {why}"
  )


# Keller Jordan (2024), https://kellerjordan.github.io/posts/muon/: found by search, so that the
# slope at 0 is large and all of (0, 1] ends near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@checked
def orthogonalize(
  x: FloatTensor,
  rows: Sequence[Dimension],
  columns: Sequence[Dimension],
  num_iterations: int = 5,
  coefficients: Sequence[float] = COEFFICIENTS,
  epsilon: float = 1e-7,
  product_dtype: DTypeLike = "float32",
) -> Tensor:
  """About U V^T for the singular value decomposition U S V^T of a matrix, by Newton-Schulz steps.

  With (a, b, c) the coefficients:

    X <- X / (|X|_F + epsilon)
    X <- a X + (b A + c A A) X  with A = X X^T,  num_iterations times

  With the coefficients of Jordan's Muon the singular values end between about 0.7 and 1.2, not at
  1; (1.5, -0.5, 0) converges to 1, in more steps.

  Rows and columns may each be several dimensions, any of them split. Of X and X^T the one with
  fewer rows is taken. If these are not split, a processor multiplies the columns that it has, and
  what is exchanged in each step is the sum of A over the processors that split the columns; where
  rows are split, X and A are also gathered along them.

  Args:
    x: a floating `Tensor`.
    rows: dimensions of x.
    columns: other dimensions of x. Those that are neither count matrices: each index has its own.
    num_iterations: number of Newton-Schulz steps, at least 0.
    coefficients: (a, b, c) of a step.
    epsilon: added to the Frobenius norm |X|_F; at least 0.
    product_dtype: "float32", or "bfloat16": X, A and their products are rounded to that, after
      they were divided by the norm, which is computed in float32.

  Returns:
    A float32 `Tensor` of the shape of x.

  Raises:
    ConfigError: there are not three coefficients, a number is out of its range, or the dtype is
      another.
    DimensionError: rows or columns are not in x.
    ShapeError: there are none of one kind, or a dimension is both.
  """
  _check(x, rows, columns, num_iterations, coefficients, epsilon)
  dtype = _product_dtype(f"orthogonalize {x}", product_dtype)
  x, factor = _newton_schulz(x, rows, columns, num_iterations, coefficients, epsilon, dtype)
  return x if factor == 1.0 else multiply(x, factor)


def _newton_schulz(
  x: Tensor,
  rows: Sequence[Dimension],
  columns: Sequence[Dimension],
  num_iterations: int,
  coefficients: Sequence[float],
  epsilon: float,
  dtype: tf.DType,
) -> tuple[Tensor, float]:
  """The matrix of `orthogonalize`, and a number by which it is still to be multiplied."""
  rows, columns = list(rows), list(columns)
  if list_product([d.size for d in rows]) > list_product([d.size for d in columns]):
    rows, columns = columns, rows
  matrices = [d for d in x.shape if d not in rows and d not in columns]
  x = cast(x, tf.float32)
  squares = einsum([x, x], output_shape=Shape(matrices))
  # Names of no layout rule: along these nothing is split.
  again = _renamed(rows, "_orthogonal_")
  between = _renamed(rows, "_orthogonal_sum_")
  square = Shape(matrices + rows + list(again.values()))
  a, b, c = coefficients
  # With X multiplied by |c| ** 0.25 the factor of A A is 1 or -1: one pass over A less.
  unit = abs(c) ** 0.25 if c and num_iterations else 1.0
  factor = cwise(lambda s: unit / (tf.sqrt(s) + epsilon), [squares], name="inverse_norm")
  x = cast(multiply(x, factor, output_shape=x.shape), dtype)
  identity = _identity(x.mesh, rows, again)

  def diagonal(number: float) -> Tensor:
    return cast(multiply(identity, number), dtype)

  for _ in range(num_iterations):
    other_x = _rename(x, again)
    polynomial = einsum([x, other_x], output_shape=square)
    # a + (b + c A) A: numbers are added to the squares, which are smaller than X.
    if c:
      # A is symmetric: its second factor is A with its rows, not with its columns, summed over.
      to_sum = {again[d]: between[d] for d in rows}
      # Added first: a sum of A over the mesh is waited for once.
      linear = add(polynomial, diagonal(b * unit**2 / c), output_shape=square)
      if c < 0:
        linear = negative(linear)
      polynomial = einsum(
        [_rename(linear, to_sum), _rename(polynomial, between)], output_shape=square
      )
    else:
      polynomial = multiply(polynomial, b)
    polynomial = add(polynomial, diagonal(a), output_shape=square)
    x = einsum([polynomial, other_x], output_shape=x.shape)
  return cast(x, tf.float32), 1.0 / unit


def _product_dtype(owner: str, given: DTypeLike) -> tf.DType:
  dtype = tf.as_dtype(given)
  if dtype not in (tf.float32, tf.bfloat16):
    raise ConfigError(f"{owner}: product_dtype {dtype.name!r} is not one of float32, bfloat16")
  return dtype


def _check(
  x: Tensor,
  rows: Sequence[Dimension],
  columns: Sequence[Dimension],
  num_iterations: int,
  coefficients: Sequence[float],
  epsilon: float,
) -> None:
  if len(coefficients) != 3 or num_iterations < 0 or epsilon < 0:
    raise ConfigError(
      f"orthogonalize {x}: give three coefficients (={list(coefficients)}), num_iterations "
      f"(={num_iterations}) of at least 0, and epsilon (={epsilon}) of at least 0"
    )
  for what, dims in (("rows", rows), ("columns", columns)):
    for d in dims:
      if d not in x.shape:
        raise no_such_dimension(f"orthogonalize: {what}", d, x)
  if not rows or not columns or set(rows) & set(columns):
    raise ShapeError(
      f"orthogonalize {x}: rows {Shape(list(rows))} and columns {Shape(list(columns))} must each "
      "have a dimension, and none in common"
    )


def _identity(mesh: Mesh, rows: list[Dimension], again: dict[Dimension, Dimension]) -> Tensor:
  """1 where all indices of the rows are those of the columns, `[rows, again]`; else 0."""
  parts = [one_hot(mtf_range(mesh, d, tf.int32), again[d]) for d in rows]
  return einsum(parts, output_shape=Shape(rows + list(again.values())))


def _renamed(dims: Sequence[Dimension], prefix: str) -> dict[Dimension, Dimension]:
  return {d: Dimension(prefix + d.name, d.size) for d in dims}


def _rename(x: Tensor, new: dict[Dimension, Dimension]) -> Tensor:
  return reshape(x, Shape([new.get(d, d) for d in x.shape]))


# Factor of a step, by the numbers of rows (inputs) and columns (outputs).
_ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
  # A step of an orthogonal matrix has RMS 1 / sqrt(max(rows, columns)); AdamW's is about 0.2.
  "match_rms_adamw": lambda rows, columns: float(0.2 * max(rows, columns) ** 0.5),
  "original": lambda rows, columns: float(max(1.0, columns / rows) ** 0.5),
}

# Matrices of one shape are stacked up to this number of elements: products of small ones take less
# time than their overhead; for large ones a copy would only cost memory.
_STACKED_ELEMENTS = 2**20
_STACK = "_muon_stack"


class _Step(NamedTuple):
  """Pending step of a matrix, before its direction is orthogonalized.

  Attributes:
    variable: the weight.
    matrix: its rows and columns.
    m: the momentum's slot.
    excess: m - g.
    direction: the momentum to orthogonalize.
  """

  variable: Variable
  matrix: Matrix
  m: Variable
  excess: Tensor
  direction: Tensor


class MuonUpdateOperation(UpdateOperation):
  """m <- m - (1 - momentum) * (m - g); w <- w - lr * (scale * o + weight_decay_rate * w).

  Slots: m; tensors: m - g, o; scalars: lr.
  """

  def __init__(
    self,
    variable: Variable,
    slots: Sequence[Variable],
    tensors: Sequence[Tensor],
    lr: float | Tensor,
    *,
    momentum: float,
    scale: float,
    weight_decay_rate: float,
  ):
    super().__init__(variable, slots, tensors, [lr], name=f"{variable.full_name}/muon")
    self._momentum = momentum
    self._scale = scale
    self._weight_decay_rate = weight_decay_rate

  def step(
    self, w: tf.Variable, m: tf.Tensor, excess: tf.Tensor, o: tf.Tensor, lr: tf.Tensor
  ) -> tuple[list[Any], tf.Tensor]:
    # The numbers are multiplied first: what has the size of the weight is passed over less often.
    step = (self._scale * lr) * o
    if self._weight_decay_rate:
      step += (self._weight_decay_rate * lr) * tf.cast(w.read_value(), tf.float32)
    return [subtract(w, step)], m - (1.0 - self._momentum) * excess

  def update(
    self, w: tf.Variable, m: tf.Variable, excess: tf.Tensor, o: tf.Tensor, lr: tf.Tensor
  ) -> list[Any]:
    if not is_float32(w):
      return super().update(w, m, excess, o, lr)
    done = [decay(w, self._weight_decay_rate * lr)] if self._weight_decay_rate else []
    done.append(subtract_scaled(w, self._scale * lr, o))
    return [*done, subtract_scaled(m, 1.0 - self._momentum, excess)]


@gin.configurable(module="mesh_tensorflow.optimize")
@affects("training")
@takes(epsilon=NOT_BELOW_ZERO)
class MuonOptimizer(Optimizer):
  """Muon (Jordan et al., 2024; https://kellerjordan.github.io/posts/muon/) for matrices.

  In float32, with g the gradient and w the weight, a matrix of some rows and columns:

    m <- momentum * m + (1 - momentum) * g
    u = momentum * m + (1 - momentum) * g with `nesterov`, else m
    w <- w - lr * (scale * orthogonalize(u) + weight_decay_rate * w)

  `scale` is 0.2 * sqrt(max(rows, columns)) with `adjust_learning_rate` "match_rms_adamw" (Liu et
  al., 2025, arXiv:2502.16982): then rates and weight decays of AdamW serve for both; or
  sqrt(max(1, columns / rows)) with "original". These are the rules of `torch.optim.Muon`.

  What is no matrix is updated by `others`. What is one, and which dimensions are its rows and
  columns, is decided of each variable by the first that holds:

    1. A pattern of `matrices` is found in its name: rows and columns are as given there.
    2. A pattern of `exclude_from_muon` is found in its name: it is none.
    3. Without the dimensions of `stacked_dim_names`, it has two: the first is its rows.
    4. Without them it has more, of which only the first, or only the last, is among
       `model_dim_names`: that one is one side, all others together the other.
    5. It is none.

  Each index of the other dimensions (of experts, say) has a matrix of its own. The matrix is that
  of the whole variable: how it is split does not change the step; see `orthogonalize` for what is
  exchanged. Where a matrix is not split, all processors do the same products.

  Slot of a matrix: `{weight}/muon_m`, float32, of its shape; of others those of `others`.

  Args:
    learning_rate: lr, a `ScalarLike`; that of `others`, too.
    weight_decay_rate: decoupled weight decay of matrices, which is multiplied by lr; 0: none.
    momentum: decay rate of the gradient's moving average m.
    nesterov: whether u looks one step ahead (Nesterov's momentum).
    num_iterations: number of Newton-Schulz steps; see `orthogonalize`.
    coefficients: (a, b, c) of a Newton-Schulz step; see `orthogonalize`.
    epsilon: added to the Frobenius norm that a matrix is divided by; see `orthogonalize`.
    adjust_learning_rate: rule of `scale`, "match_rms_adamw" or "original"; see above.
    learning_rate_factor: multiplies lr for matrices: what "original" needs, whose rates are
      larger than AdamW's.
    others: an optimizer class or factory, called with `learning_rate`.
    matrices: a list of (regular expression, names of rows, names of columns). With
      ("/q$", ["d_model"], ["d_kv"]), for one, each head has a matrix of its own.
    exclude_from_muon: regular expressions; by default those of embeddings, logits, biases, scales
      and prompts.
    stacked_dim_names: names of dimensions that count matrices, and are neither rows nor columns.
    model_dim_names: names of dimensions that are a side of a matrix by themselves; see rule 4.
    exclude_from_weight_decay: regular expressions; matrices in whose name one is found do not
      decay. By default all decay.
    product_dtype: dtype of the products that orthogonalize, "float32" or "bfloat16", as in Jordan's
      Muon and PyTorch's: several times as fast on TPUs, GPUs, and CPUs with AMX.

  Raises:
    ConfigError: an argument is out of its range.
  """

  @checked
  def __init__(
    self,
    learning_rate: ScalarLike,
    weight_decay_rate: float = 0.01,
    momentum: float = 0.95,
    nesterov: bool = True,
    num_iterations: int = 5,
    coefficients: Sequence[float] = COEFFICIENTS,
    epsilon: float = 1e-7,
    adjust_learning_rate: str = "match_rms_adamw",
    learning_rate_factor: float = 1.0,
    others: Callable[..., Optimizer] = AdamWOptimizer,
    matrices: Sequence[Any] | None = None,
    exclude_from_muon: Sequence[str] | None = None,
    stacked_dim_names: Sequence[str] = STACKED,
    model_dim_names: Sequence[str] = MODEL,
    exclude_from_weight_decay: Sequence[str] | None = None,
    product_dtype: DTypeLike = "float32",
  ):
    owner = type(self).__name__
    check_at_least(
      owner, 0, weight_decay_rate=weight_decay_rate, epsilon=epsilon, num_iterations=num_iterations,
      learning_rate_factor=learning_rate_factor,
    )  # fmt: skip
    check_below_one(owner, momentum=momentum)
    if adjust_learning_rate not in _ADJUSTMENTS:
      raise ConfigError(
        f"{owner}: adjust_learning_rate {adjust_learning_rate!r} is not one of "
        f"{', '.join(_ADJUSTMENTS)}"
      )
    if len(coefficients) != 3:
      raise ConfigError(f"{owner}: coefficients (={list(coefficients)}) must be three numbers")
    self._learning_rate = learning_rate
    self._momentum = momentum
    self._nesterov = nesterov
    dtype = _product_dtype(owner, product_dtype)
    self._newton_schulz = (num_iterations, list(coefficients), epsilon, dtype)
    self._adjust = _ADJUSTMENTS[adjust_learning_rate]
    self._factor = learning_rate_factor
    self._others = others(learning_rate=learning_rate)
    self._matrices = named_matrices(matrices or ())
    excluded = NOT_MATRICES if exclude_from_muon is None else exclude_from_muon
    self._not_matrices = check_patterns(owner, "exclude_from_muon", excluded)
    self._stacked = list(stacked_dim_names)
    self._model = list(model_dim_names)
    self._weight_decay = WeightDecay(owner, weight_decay_rate, exclude_from_weight_decay or ())

  @checked
  def apply_grad(self, grad: CastableTensor | None, var: Variable) -> list[Operation]:
    if not self._has_gradient(grad, var):
      return []
    matrix = self.matrix_of(var)
    if matrix is None:
      others: list[Operation] = self._others.apply_grad(grad, var)
      return others
    step = self._direction(grad, var, matrix)
    ((o, factor),) = self._orthogonal([step])
    return [self._update(step, o, factor)]

  def _apply_all(
    self, grads: Sequence[CastableTensor | None], variables: Sequence[Variable]
  ) -> list[Operation]:
    if type(self).apply_grad is not MuonOptimizer.apply_grad:
      return super()._apply_all(grads, variables)  # A subclass says what happens to each.
    found: list[list[Operation]] = [[] for _ in variables]
    groups: dict[Any, list[tuple[int, Matrix]]] = {}
    for i, (grad, var) in enumerate(zip(grads, variables)):
      matrix = self.matrix_of(var) if grad is not None else None
      if matrix is None:
        found[i] = self.apply_grad(grad, var)
      elif self._has_gradient(grad, var):
        key = (var.mesh, var.shape, tuple(matrix.rows), tuple(matrix.columns))
        groups.setdefault(key, []).append((i, matrix))
    for (_, shape, *_), members in groups.items():
      most = max(1, _STACKED_ELEMENTS // max(1, shape.size))
      for begin in range(0, len(members), most):
        part = members[begin : begin + most]
        steps = [self._direction(grads[i], variables[i], matrix) for i, matrix in part]
        for (i, _), step, (o, factor) in zip(part, steps, self._orthogonal(steps)):
          found[i] = [self._update(step, o, factor)]
    return [op for ops in found for op in ops]

  def _direction(self, grad: Any, var: Variable, matrix: Matrix) -> _Step:
    """Computes the new momentum of a matrix, and the direction to orthogonalize."""
    m = self._slot(var, "/muon_m")
    g = cast(grad, tf.float32)
    # The new m is g + momentum * (m - g), and one step ahead is that with its square.
    excess = sub(m.value, g)
    direction = add(g, multiply(excess, self._momentum ** (2 if self._nesterov else 1)))
    return _Step(var, matrix, m, excess, direction)

  def _orthogonal(self, steps: list[_Step]) -> list[tuple[Tensor, float]]:
    """Orthogonalizes directions of one shape, stacked so that each product is batched.

    Args:
      steps: the steps.

    Returns:
      For each the matrix, and a number by which it is still to be multiplied.
    """
    rows, columns = steps[0].matrix.rows, steps[0].matrix.columns
    if len(steps) == 1:
      return [_newton_schulz(steps[0].direction, rows, columns, *self._newton_schulz)]
    # A name of no layout rule: the matrices themselves are split as their variables are.
    stacked = stack([s.direction for s in steps], _STACK)
    o, factor = _newton_schulz(stacked, rows, columns, *self._newton_schulz)
    return [(x, factor) for x in unstack(o, o.shape.get_dim_by_name(_STACK))]

  def _update(self, step: _Step, o: Tensor, factor: float) -> Operation:
    return MuonUpdateOperation(
      step.variable,
      [step.m],
      [step.excess, o],
      self._scalar(self._learning_rate, step.variable.mesh, "learning_rate"),
      momentum=self._momentum,
      scale=self._factor * self._adjust(*step.matrix.sizes) * factor,
      weight_decay_rate=self._factor * self._weight_decay.rate_of(step.variable),
    )

  def matrix_of(self, var: Variable) -> Matrix | None:
    """Rows and columns of a variable; None if `others` updates it.

    Args:
      var: a `Variable` operation.

    Raises:
      ConfigError: `matrices` names dimensions that it has not.
    """
    for named in self._matrices:
      if re.search(named.pattern, var.full_name):
        return named.of(var)
    if found_in(self._not_matrices, var):
      return None
    return by_rule(var.shape, self._stacked, self._model)
