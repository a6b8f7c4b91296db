"""Muon: momentum, made orthogonal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.operations.binary import add, multiply
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.stacking import stack, unstack
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.adamw import AdamWOptimizer
from mesh_tensorflow.optimize.base import Optimizer, slot_variable
from mesh_tensorflow.optimize.muon_matrices import (
  MODEL,
  NOT_MATRICES,
  STACKED,
  Matrix,
  by_rule,
  named_matrices,
)
from mesh_tensorflow.optimize.orthogonalization import COEFFICIENTS, orthogonalize
from mesh_tensorflow.optimize.scalars import ScalarLike, check_at_least, check_below_one
from mesh_tensorflow.optimize.update import UpdateOperation, subtract
from mesh_tensorflow.optimize.weight_decay import check_patterns, found_in
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["MuonOptimizer"]

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
    new_m: the new momentum.
    direction: the momentum to orthogonalize.
  """

  variable: Variable
  matrix: Matrix
  m: Variable
  new_m: Tensor
  direction: Tensor


class MuonUpdateOperation(UpdateOperation):
  """m <- new m; w <- w - lr * (scale * o + decay * w). Slots: m; tensors: new m, o; scalars: lr."""

  def __init__(
    self,
    variable: Variable,
    slots: Sequence[Variable],
    tensors: Sequence[Tensor],
    lr: float | Tensor,
    *,
    scale: float,
    weight_decay_rate: float,
  ):
    super().__init__(variable, slots, tensors, [lr], name=f"{variable.full_name}/muon")
    self._scale = scale
    self._weight_decay_rate = weight_decay_rate

  def update(
    self, w: tf.Variable, m: tf.Variable, new_m: tf.Tensor, o: tf.Tensor, lr: Any
  ) -> list[Any]:
    # The numbers are multiplied first: what has the size of the weight is passed over less often.
    step = (self._scale * lr) * o
    if self._weight_decay_rate:
      step += (self._weight_decay_rate * lr) * tf.cast(w.read_value(), tf.float32)
    return [m.assign(new_m, read_value=False), subtract(w, step)]


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
    others: Callable[..., Any] = AdamWOptimizer,
    matrices: Sequence[Any] | None = None,
    exclude_from_muon: Sequence[str] | None = None,
    stacked_dim_names: Sequence[str] = STACKED,
    model_dim_names: Sequence[str] = MODEL,
    exclude_from_weight_decay: Sequence[str] | None = None,
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
    self._weight_decay_rate = weight_decay_rate
    self._momentum = momentum
    self._nesterov = nesterov
    self._newton_schulz = (num_iterations, list(coefficients), epsilon)
    self._adjust = _ADJUSTMENTS[adjust_learning_rate]
    self._factor = learning_rate_factor
    self._others = others(learning_rate=learning_rate)
    self._matrices = named_matrices(matrices or ())
    excluded = NOT_MATRICES if exclude_from_muon is None else exclude_from_muon
    self._not_matrices = check_patterns(owner, "exclude_from_muon", excluded)
    self._stacked = list(stacked_dim_names)
    self._model = list(model_dim_names)
    self._not_decayed = check_patterns(
      owner, "exclude_from_weight_decay", exclude_from_weight_decay or ()
    )

  @checked
  def apply_grad(self, grad: CastableTensor | None, var: Variable) -> list[Operation]:
    if not self._has_gradient(grad, var):
      return []
    matrix = self.matrix_of(var)
    if matrix is None:
      others: list[Operation] = self._others.apply_grad(grad, var)
      return others
    step = self._direction(grad, var, matrix)
    o = orthogonalize(step.direction, matrix.rows, matrix.columns, *self._newton_schulz)
    return [self._update(step, o)]

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
        for (i, _), step, o in zip(part, steps, self._orthogonal(steps)):
          found[i] = [self._update(step, o)]
    return [op for ops in found for op in ops]

  def _direction(self, grad: Any, var: Variable, matrix: Matrix) -> _Step:
    """Computes the new momentum of a matrix, and the direction to orthogonalize."""
    m = slot_variable(var, f"{var.full_name}/muon_m", var.shape, tf.float32)
    new = multiply(cast(grad, tf.float32), 1.0 - self._momentum)
    new_m = add(multiply(m.value, self._momentum), new)
    direction = add(multiply(new_m, self._momentum), new) if self._nesterov else new_m
    return _Step(var, matrix, m, new_m, direction)

  def _orthogonal(self, steps: list[_Step]) -> list[Tensor]:
    """Orthogonalizes directions of one shape, stacked so that each product is batched."""
    rows, columns = steps[0].matrix.rows, steps[0].matrix.columns
    if len(steps) == 1:
      return [orthogonalize(steps[0].direction, rows, columns, *self._newton_schulz)]
    # A name of no layout rule: the matrices themselves are split as their variables are.
    stacked = stack([s.direction for s in steps], _STACK)
    o = orthogonalize(stacked, rows, columns, *self._newton_schulz)
    return unstack(o, o.shape.get_dim_by_name(_STACK))

  def _update(self, step: _Step, o: Tensor) -> Operation:
    return MuonUpdateOperation(
      step.variable,
      [step.m],
      [step.new_m, o],
      self._scalar(self._learning_rate, step.variable.mesh, "learning_rate"),
      scale=self._factor * self._adjust(*step.matrix.sizes),
      weight_decay_rate=self._factor * self._decay_of(step.variable),
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

  def _decay_of(self, var: Variable) -> float:
    return 0.0 if found_in(self._not_decayed, var) else self._weight_decay_rate
