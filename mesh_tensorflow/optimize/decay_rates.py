"""Decay rates of Adafactor's running averages, as functions of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.optimize.scalars import function_of_step

__all__ = ["adafactor_decay_rate_adam", "adafactor_decay_rate_pow"]


@gin.configurable(module="mesh_tensorflow.optimize")
@checked
@affects("training")
def adafactor_decay_rate_pow(exponent: float = 0.8, offset: float = 0) -> Callable[[Any], Any]:
  """1 - (t - offset + 1) ** -exponent (Shazeer and Stern, 2018).

  Args:
    exponent: power by which 1 minus the rate falls with the step.
    offset: a step; before it the result is not finite.

  Returns:
    A function of the step t (a number, a tf.Tensor or an mtf.Tensor).
  """
  # 0 at the first step: averages that begin with zeros take its squares as they are.
  return function_of_step(lambda t: 1.0 - tf.pow(t + float(1 - offset), -exponent))


@checked
def adafactor_decay_rate_adam(beta2: float) -> Callable[[Any], Any]:
  """Adam's running average with its bias correction: b (1 - b^(T - 1)) / (1 - b^T), T = t + 1.

  Args:
    beta2: b.

  Returns:
    A function of the step t (a number, a tf.Tensor or an mtf.Tensor).
  """
  return function_of_step(
    lambda t: beta2 * (1.0 - tf.pow(beta2, t)) / (1.0 - tf.pow(beta2, t + 1.0))
  )
