"""Settings of every training loop: the Transformer's, BERT's, the U-Net's, and users' own."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from mesh_settings.records import setting
from mesh_settings.rules import (
  ABOVE_ZERO,
  BELOW_ONE,
  COUNT,
  COUNT_OR_ZERO,
  NOT_BELOW_ZERO,
  PATH,
  WHOLE,
  Rule,
  is_number,
  names_to,
  one_of,
)

STATE_DTYPES = ("float32", "bfloat16", "int8")
NONFINITE = ("stop", "skip")
# What is better of two values of a metric.
METRIC_MODES = ("auto", "min", "max")
# Of what is random.
PURPOSES = ("weights", "data", "dropout", "sampling")


def steps_to_profile(given: object) -> tuple[int, int] | None:
  """The steps of a profile: (10, 20) of such a pair or of "10:20"; None of what is neither.

  Args:
    given: by a user.
  """
  if isinstance(given, str):
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", given)
    given = (int(match[1]), int(match[2])) if match else None
  if not isinstance(given, (tuple, list)) or len(given) != 2:
    return None
  first, last = given
  if not all(isinstance(n, int) and not isinstance(n, bool) for n in given):
    return None
  return (first, last) if 0 <= first < last else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerSettings:
  """The settings of a training loop; the help of each field says what it means.

  Attributes:
    owner: who is told of them, for errors: "run" of gin, "--" of flags, or a class.
  """

  owner: str = dataclasses.field(default="run", compare=False)

  def named(self, name: str) -> str:
    """A setting as its user writes it: `run.nonfinite`, `--nonfinite`."""
    return self.owner + ("" if self.owner == "--" else ".") + name

  iterations_per_loop: int = setting(
    "training steps in one call of the compiled program.", 100, COUNT
  )
  save_checkpoints_steps: int = setting(
    "steps between checkpoints; 0: only the last step is saved.",
    5000,
    COUNT_OR_ZERO,
    flag="--save_every",
    short="Steps between checkpoints.",
  )
  keep_checkpoint_max: int | None = setting(
    "number of checkpoints to keep, the newest; None: all.", 5, COUNT
  )
  init_checkpoint: str | None = setting(
    "a checkpoint to start from when model_dir has none; see `init_checkpoint.restore`.",
    None,
    flag="--init_checkpoint",
    metavar="PATH",
    flag_values=PATH,
    short="A checkpoint to start from when the folder has none.",
  )
  seed: int = setting(
    "of all that is random: initial weights, the order of the data, dropout, samples. What is "
    "drawn for one of these is independent of the others.",
    0,
    flag="--seed",
    flag_values=COUNT_OR_ZERO,
    short="Of weights, data order and dropout.",
  )
  seeds: dict[str, int] | None = setting(
    "other seeds than `seed` for single purposes: a dict from "
    '"weights", "data", "dropout" or "sampling".',
    None,
    names_to(WHOLE, PURPOSES).or_none(),
  )
  report_every: int = setting(
    "steps between lines of the report.", 100, COUNT, flag="--report_every"
  )
  norms_every: int | None = setting(
    "in training, steps between norms of gradients, weights and updates; None: those that have a "
    "line of the report; 0: none are computed.",
    None,
    COUNT_OR_ZERO,
  )
  peak_flops: Any = setting(
    "peak FLOP/s of all devices together, for `flops_utilization`; or a machine, by the name of a "
    "shipped one or of its file; None: measured before the first step; 0: no utilization is "
    "reported.",
    None,
    Rule(
      "a number of FLOP/s, the name of a machine or of its file, or None",
      lambda x: x is None or isinstance(x, str) or is_number(x) and x >= 0,
    ),
  )
  profile_steps: Any = setting(
    'the steps to profile with TensorFlow\'s profiler, (first, last) or "first:last"; None: none.',
    None,
    Rule(
      "two steps, the first before the last, such as (10, 20) or '10:20'",
      lambda x: x is None or steps_to_profile(x) is not None,
    ),
  )
  nonfinite: str = setting(
    'in training, what a NaN or infinite loss does: "stop": it ends training with an error that '
    'names the step and the tensor; "skip": a step whose loss or gradients are NaN or infinite '
    "updates nothing, and is counted.",
    "stop",
    one_of(NONFINITE),
  )
  loss_scale: Any = setting(
    'in training, what the loss is multiplied by, and its gradients divided by: "dynamic": a scale '
    "that is halved by a step whose gradients are not finite, which updates nothing, and doubled "
    'after 2,000 others; "auto": such a one in float16, else none; a number; or None.',
    "auto",
    Rule(
      "'auto', 'dynamic', a number above 0, or None",
      lambda x: x in (None, "auto", "dynamic") or (is_number(x) and x > 0),
    ),
  )
  jit_compile: bool = setting(
    "whether XLA compiles training steps and programs that generate tokens, which must be on one "
    "device: there are no exchanges in XLA. A GPU takes fewer and larger kernels so; a CPU decodes "
    "a few sequences faster, and gains nothing in training.",
    False,
  )
  gradient_dtype: str | None = setting(
    "in training, the dtype in which gradients of weights are summed over processors: "
    '"float32", or "bfloat16" for half the traffic; None: that of the activations.',
    None,
    Rule("'float32', 'bfloat16' or None", lambda x: x in (None, "float32", "bfloat16")),
  )
  max_grad_norm: float | None = setting(
    "in training, gradients of all variables together are scaled to this norm where theirs is "
    "larger; None: they are not.",
    None,
    ABOVE_ZERO,
  )
  ema_decay: float | None = setting(
    "in training, the decay of a moving average of the weights, which is kept beside them (0.999, "
    "say: over about 1000 steps); None: there is none.",
    None,
    BELOW_ONE,
  )
  state_dtype: str = setting(
    'in training, the dtype of the running averages of optimizers: "float32"; "bfloat16"; "int8": '
    "8 bits for each element, with scales; see `Optimizer.with_state_dtype`.",
    "float32",
    one_of(STATE_DTYPES),
  )
  stochastic_rounding: bool = setting(
    "in training, weights that are stored in bfloat16 (`get_variable_dtype.slice_dtype`) are "
    "rounded up or down at random, so that they are right on average; False: to the nearest.",
    False,
  )
  use_ema: bool = setting(
    "the modes that evaluate, decode or export take that average from a checkpoint, in place of "
    "the weights; and so do evaluations in training.",
    False,
  )
  average_checkpoints: int = setting(
    "the modes that evaluate, decode or export take the mean of the weights of so many "
    "checkpoints: of the one that they are to take and those before it, of which the folder must "
    'have enough (`keep_checkpoint_max`). Mode "average" writes it.',
    1,
    COUNT,
  )
  gradient_accumulation_steps: int | None = setting(
    "in training, the number of microbatches into which a batch is cut, one after the other, for "
    "one update; `batch_size` is that of the update. None: as `serialize_num_microbatches` says.",
    None,
    COUNT,
  )
  eval_every_steps: int = setting(
    "in training, steps between evaluations on held-out data, and one after the last step: on "
    '`eval_dataset_fn`, or, if that is not bound, on the split "validation" of '
    "`train_dataset_fn`; 0: none. See `Validation`.",
    0,
    COUNT_OR_ZERO,
    flag="--eval_every",
    short="Steps between evaluations on the held-out part (0: none).",
  )
  eval_steps: int | None = setting(
    "number of batches of such an evaluation, at most; None: all.", 100, COUNT
  )
  best_metric: str = setting(
    "the metric of these evaluations that tells which checkpoint is best and whether training ends "
    'early: "loss", "bits_per_token" or "token_accuracy"; or one of the `metric_fns` of '
    '`eval_dataset_fn`, such as "bleu": the data sets are then decoded and compared, too, as by '
    'mode "eval". Of one of several data sets: "NAME/bleu".',
    "loss",
    Rule(
      "the name of a metric, such as 'loss' or 'bleu'", lambda x: isinstance(x, str) and x != ""
    ),
  )
  best_metric_mode: str = setting(
    'whether the lowest ("min") or the highest ("max") value of `best_metric` is the best; "auto": '
    "the lowest of a loss and of bits_per_token, the highest of everything else.",
    "auto",
    one_of(METRIC_MODES),
  )
  keep_best: bool = setting(
    "whether the checkpoint that is best in these evaluations, by `best_metric`, is kept beside "
    'the newest `keep_checkpoint_max`; its `eval_checkpoint_step` is "best".',
    True,
  )
  early_stopping_patience: int | None = setting(
    "number of evaluations in a row in which `best_metric` is no better, after which training "
    "ends; None: it does not end early.",
    None,
    COUNT,
  )
  early_stopping_min_delta: float = setting(
    "`best_metric` must be better by more than this, in its own unit (nats, of a loss), to count "
    "as better.",
    0.0,
    NOT_BELOW_ZERO,
  )
  allow_config_change: bool = setting(
    "whether the checkpoints may be of another model or vocabulary than this one: that is then "
    "told, else refused; see `gin_config.model_config`.",
    False,
  )
