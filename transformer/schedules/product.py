"""The product of several schedules."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import gin

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.transformer.schedules.base import MODULE, Rate, Schedule, Step


@gin.configurable(module=MODULE)
@affects("training")
def product_learning_rate(
  step: Step,
  total_train_steps: int,
  factors: Sequence[float | Schedule] = gin.REQUIRED,
  offset: int = 0,
) -> Rate:
  """The product of several schedules and numbers.

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    factors: numbers, and schedules `f(step, total_train_steps)`.
    offset: the schedules start at this step.

  Returns:
    A scalar tensor, or a float if all factors are numbers.
  """
  ret = 1.0
  for f in factors:
    ret *= f(step - offset, total_train_steps - offset) if callable(f) else f
  return ret


def bound_schedule(schedule: Any, total_train_steps: int) -> Any:
  """A schedule as a function of the step alone; numbers stay numbers.

  Args:
    schedule: a function `(step, total_train_steps)`, a list of such and numbers, or a number.
    total_train_steps: number of training steps.
  """
  if isinstance(schedule, list):
    schedule = functools.partial(product_learning_rate, factors=schedule)
  if callable(schedule):
    return functools.partial(schedule, total_train_steps=total_train_steps)
  return schedule
