"""Optimizers: update operations made from gradients."""

from mesh_tensorflow.optimize.adafactor import AdafactorOptimizer
from mesh_tensorflow.optimize.adam import AdamWeightDecayOptimizer
from mesh_tensorflow.optimize.base import Optimizer, count_global_step, get_global_step, reduce_rms
from mesh_tensorflow.optimize.decay_rates import (
  adafactor_decay_rate_adam,
  adafactor_decay_rate_pow,
)
from mesh_tensorflow.optimize.hparams import adafactor_optimizer_from_hparams, make_optimizer
from mesh_tensorflow.optimize.multi_lr import (
  AdafactorWithMultiLRSchedule,
  AdamWithMultiLRSchedule,
  compute_lr_for_step,
  product_learning_rate,
)
from mesh_tensorflow.optimize.sgd_momentum import MomentumOptimizer, SgdOptimizer

__all__ = [
  "AdafactorOptimizer",
  "AdafactorWithMultiLRSchedule",
  "AdamWeightDecayOptimizer",
  "AdamWithMultiLRSchedule",
  "MomentumOptimizer",
  "Optimizer",
  "SgdOptimizer",
  "adafactor_decay_rate_adam",
  "adafactor_decay_rate_pow",
  "adafactor_optimizer_from_hparams",
  "compute_lr_for_step",
  "count_global_step",
  "get_global_step",
  "make_optimizer",
  "product_learning_rate",
  "reduce_rms",
]
