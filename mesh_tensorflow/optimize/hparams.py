"""Optimizers made from an object of hyperparameters."""

from __future__ import annotations

from typing import Any

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.optimize.adafactor import (
  AdafactorOptimizer,
  adafactor_decay_rate_adam,
  adafactor_decay_rate_pow,
)
from mesh_tensorflow.optimize.base import Optimizer
from mesh_tensorflow.optimize.scalars import ScalarLike
from mesh_tensorflow.optimize.sgd_momentum import SgdOptimizer

__all__ = ["adafactor_optimizer_from_hparams", "make_optimizer"]


def make_optimizer(hparams: Any, lr: ScalarLike) -> Optimizer:
  """The optimizer that `hparams.optimizer` names: "SGD" or "Adafactor".

  Args:
    hparams: an object with the attributes that are read.
    lr: learning rate.

  Raises:
    ConfigError: another name.
  """
  if hparams.optimizer == "SGD":
    return SgdOptimizer(lr)
  if hparams.optimizer == "Adafactor":
    return adafactor_optimizer_from_hparams(hparams, lr)
  raise ConfigError(f"hparams.optimizer {hparams.optimizer!r} is not one of SGD, Adafactor")


def adafactor_optimizer_from_hparams(hparams: Any, lr: ScalarLike) -> AdafactorOptimizer:
  """`AdafactorOptimizer` from attributes that start with `optimizer_adafactor_`.

  Args:
    hparams: has `decay_type` ("Adam", with `beta2`; or "pow", with `memory_exponent`),
      `multiply_by_parameter_scale`, `beta1`, `clipping_threshold` and `factored`, each with
      that prefix.
    lr: learning rate.

  Raises:
    ConfigError: another decay type.
  """
  decay_type = hparams.optimizer_adafactor_decay_type
  if decay_type == "Adam":
    decay_rate = adafactor_decay_rate_adam(hparams.optimizer_adafactor_beta2)
  elif decay_type == "pow":
    decay_rate = adafactor_decay_rate_pow(hparams.optimizer_adafactor_memory_exponent)
  else:
    raise ConfigError(
      f"hparams.optimizer_adafactor_decay_type {decay_type!r} is not one of Adam, pow"
    )
  return AdafactorOptimizer(
    multiply_by_parameter_scale=hparams.optimizer_adafactor_multiply_by_parameter_scale,
    learning_rate=lr,
    decay_rate=decay_rate,
    beta1=hparams.optimizer_adafactor_beta1,
    clipping_threshold=hparams.optimizer_adafactor_clipping_threshold,
    factored=hparams.optimizer_adafactor_factored,
  )
