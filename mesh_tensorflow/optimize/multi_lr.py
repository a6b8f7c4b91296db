"""Different learning rates for different variables."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import gin

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.operations.control import scalar_summary
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.adafactor import AdafactorOptimizer
from mesh_tensorflow.optimize.adam import AdamWeightDecayOptimizer
from mesh_tensorflow.optimize.base import Optimizer
from mesh_tensorflow.optimize.scalars import ScalarLike
from mesh_tensorflow.program.graph import Tensor

__all__ = [
  "AdafactorWithMultiLRSchedule",
  "AdamWithMultiLRSchedule",
  "compute_lr_for_step",
  "product_learning_rate",
]


@gin.configurable(module="mesh_tensorflow.optimize")
@checked
@affects("training")
def product_learning_rate(
  step: Any,
  total_train_steps: float,
  factors: Sequence[ScalarLike] = gin.REQUIRED,
  offset: float = 0,
) -> Any:
  """The product of factors.

  Args:
    step: the training step: a number, a tf.Tensor or an mtf.Tensor.
    total_train_steps: length of the training.
    factors: numbers, and functions that are called with (step - offset,
      total_train_steps - offset).
    offset: number of steps subtracted from `step` and `total_train_steps` for the functions.

  Returns:
    A float if all factors are numbers; else a scalar of the kind that the functions return.
  """
  product: Any = 1.0
  for factor in factors:
    if callable(factor):
      factor = factor(step - offset, total_train_steps - offset)
    # An mtf.Tensor must be asked first: a tf.Tensor does not know how to multiply with it.
    product = factor * product if isinstance(factor, Tensor) else product * factor
  return product


@gin.configurable(module="mesh_tensorflow.optimize")
@checked
@affects("training")
@takes(train_steps=COUNT_OR_ZERO)
def compute_lr_for_step(
  schedules: Sequence[Sequence[ScalarLike] | None],
  learning_rate: ScalarLike,
  train_steps: float = 524288,
) -> list[ScalarLike]:
  """Turns schedules into learning rates.

  Args:
    schedules: for each rate None, for `learning_rate`, or a list of factors for
      `product_learning_rate`.
    learning_rate: the normal rate.
    train_steps: `total_train_steps` of the product. It does not follow the length of the run:
      bind it.

  Returns:
    A list of learning rates; those of factors are functions of the step, and their values
    are reported as the scalar summary `alt_learning_rate`.
  """
  # One object for each schedule: by that `Optimizer` knows that it has evaluated, and so reported,
  # it already.
  return [
    learning_rate
    if factors is None
    else functools.partial(_reported_product, factors=list(factors), train_steps=train_steps)
    for factors in schedules
  ]


def _reported_product(step: Any, factors: list[object], train_steps: float) -> Any:
  lr = product_learning_rate(step, train_steps, factors=factors)
  if isinstance(lr, Tensor):
    scalar_summary("alt_learning_rate", lr)
  return lr


class _MultiLRSchedule(Optimizer):
  """Mixin before an optimizer that asks `_learning_rate_for`: other rates for some variables."""

  def __init__(
    self,
    variable_search: Sequence[str] | None = None,
    alt_lr_schedules: Sequence[Sequence[ScalarLike] | None] | None = None,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self._rates: list[tuple[str, ScalarLike]] = []
    if variable_search is None or alt_lr_schedules is None:
      return
    if len(variable_search) != len(alt_lr_schedules):
      raise ConfigError(
        f"variable_search has {len(variable_search)} regular expressions, alt_lr_schedules "
        f"{len(alt_lr_schedules)} schedules; there must be one for each"
      )
    rates = compute_lr_for_step(alt_lr_schedules, super()._learning_rate_for(None))
    self._rates = list(zip(variable_search, rates))

  def _learning_rate_for(self, var: Variable | None) -> ScalarLike:
    usual = super()._learning_rate_for(var)
    if var is None:
      return usual
    return next((rate for search, rate in self._rates if re.search(search, var.full_name)), usual)


@gin.configurable(module="mesh_tensorflow.optimize")
@affects("training")
class AdafactorWithMultiLRSchedule(_MultiLRSchedule, AdafactorOptimizer):
  """Adafactor with other learning rates for some variables.

  Args:
    variable_search: regular expressions. A variable uses the schedule of the first one that
      is found in its name, and the normal rate if none is.
    alt_lr_schedules: a schedule for each, see `compute_lr_for_step`.
    **kwargs: for `AdafactorOptimizer`.
  """


@gin.configurable(module="mesh_tensorflow.optimize")
@affects("training")
class AdamWithMultiLRSchedule(_MultiLRSchedule, AdamWeightDecayOptimizer):
  """Adam with other learning rates for some variables.

  Args:
    variable_search: regular expressions. A variable uses the schedule of the first one that
      is found in its name, and the normal rate if none is.
    alt_lr_schedules: a schedule for each, see `compute_lr_for_step`.
    **kwargs: for `AdamWeightDecayOptimizer`.
  """
