"""Steps of Keras (training, evaluation, prediction) as TensorFlow functions that can be traced.

The model's own `compute_loss`, `compute_metrics`, `test_step` and `predict_step`, and the
optimizer's own `apply`: so losses, weights of samples, masks, regularizers, metrics, clipping,
schedules and averages are those of the installed Keras.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, UnsupportedError
from mesh_tensorflow.importing.naming import OwnNames
from mesh_tensorflow.keras import losses, mirror

# Names of the arguments of a step, as `dims` of `parallelize` has them.
ARGUMENTS = ("inputs", "targets", "sample_weight")


def check_model(model: Any) -> None:
  """Checks that a step of a model can be imported.

  Raises:
    ArgumentError: it is no Keras model, or Keras has another backend.
  """
  if not isinstance(model, keras.Model):
    raise ArgumentError(f"parallelize takes a keras.Model, got {model!r}")
  if keras.config.backend() != "tensorflow":
    raise ArgumentError(
      f"parallelize needs Keras on TensorFlow, and its backend is {keras.config.backend()}; set "
      "KERAS_BACKEND=tensorflow before Keras is imported"
    )


def check_trainable(model: keras.Model) -> None:
  """Checks that `fit` can be called.

  Raises:
    ArgumentError: the model is not compiled.
  """
  if model.trainable_variables and getattr(model, "optimizer", None) is None:
    raise ArgumentError("mtf.keras: the model has no optimizer; compile it before fit")


def made_by_compile(model: keras.Model) -> Any:
  """An object that each call of `compile` replaces, to notice calls by; None before the first.

  Args:
    model: the model.
  """
  return _loss_tracker(model)


def has_own_step(model: keras.Model) -> bool:
  """True if a model's class overrides `train_step`."""
  return type(model).train_step is not keras.Model.train_step


def own_train_step(model: keras.Model) -> Callable[..., Any]:
  """The whole training step of a model that has its own, with the tape and the updates in it.

  Args:
    model: a compiled model.

  Returns:
    A function of a batch that returns the logs.
  """

  def step(inputs: Any, targets: Any = None, sample_weight: Any = None) -> Any:
    data = keras.utils.pack_x_y_sample_weight(inputs, targets, sample_weight)
    return _logs(model.train_step(data))

  return step


def check_own_step(model: keras.Model) -> None:
  """Checks that the training step of a model can be taken apart, for stages and microbatches.

  Raises:
    UnsupportedError: its class overrides `train_step`.
  """
  if has_own_step(model):
    raise UnsupportedError(
      f"parallelize: {type(model).__name__} has a train_step of its own, which takes gradients and "
      "updates in one: stages and microbatches need Keras' own train_step; override compute_loss "
      "or call instead, or leave stages and microbatches out"
    )


def check_optimizer(model: keras.Model, has_stages: bool) -> None:
  """Checks that the optimizer's part of a step can be on several stages.

  Raises:
    UnsupportedError: it updates the weights of all stages, or of none, by one condition.
  """
  optimizer = model.optimizer
  if not has_stages:
    return
  steps = getattr(optimizer, "gradient_accumulation_steps", None)
  overwrites = getattr(optimizer, "use_ema", False) and optimizer.ema_overwrite_frequency
  if steps:
    what, instead = f"gradient_accumulation_steps={steps}", f"microbatches={steps}"
  elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
    what, instead = "LossScaleOptimizer", "bfloat16, which needs no loss scaling"
  elif overwrites:
    what = f"ema_overwrite_frequency={overwrites}"
    instead = "ema_overwrite_frequency=None, by which the averages are taken when training ends"
  else:
    return
  raise UnsupportedError(
    f"parallelize: with stages each updates its own weights, and {what} of the optimizer decides "
    f"about all of them at once; use {instead}, or leave stages out"
  )


def train_step(model: keras.Model) -> Callable[..., Any]:
  """The forward part of a training step.

  Args:
    model: a compiled model.

  Returns:
    A function of a batch that updates the metrics, and returns the loss to differentiate (scaled,
    if the optimizer scales it) and the logs.
  """
  forward = _forward(model)

  def step(inputs: Any, targets: Any = None, sample_weight: Any = None) -> Any:
    scaled, logs = forward(inputs, targets, sample_weight)
    return scaled, _logs(logs)

  return step


def _forward(model: keras.Model) -> Callable[..., Any]:
  tracker = _loss_tracker(model)
  call_trains = "training" in inspect.signature(model.call).parameters
  # Keras before 3.3 has no such argument of compute_loss, and overrides need not have it.
  loss_trains = "training" in inspect.signature(model.compute_loss).parameters

  def forward(inputs: Any, targets: Any, sample_weight: Any) -> Any:
    outputs = model(inputs, training=True) if call_trains else model(inputs)
    loss = model.compute_loss(
      x=inputs,
      y=targets,
      y_pred=outputs,
      sample_weight=sample_weight,
      **({"training": True} if loss_trains else {}),
    )
    if tracker is not None:
      examples = next(x for x in tf.nest.flatten(inputs) if x is not None).shape[0]
      tracker.update_state(loss, sample_weight=tf.constant(examples))
    scaled = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
    logs = model.compute_metrics(inputs, targets, outputs, sample_weight=sample_weight)
    return tf.convert_to_tensor(scaled), logs

  return forward


def factors_step(model: keras.Model) -> Callable[..., Any]:
  """The factors of the losses of a whole batch; see `losses.of_whole_batch`.

  Args:
    model: a compiled model.

  Returns:
    A function of a batch that returns them. What it changes shall be left out.
  """
  forward = _forward(model)

  def step(inputs: Any, targets: Any = None, sample_weight: Any = None) -> Any:
    with losses.of_whole_batch() as factors:
      forward(inputs, targets, sample_weight)
    return factors

  return step


def microbatch_step(model: keras.Model, count: int) -> Callable[..., Any]:
  """The forward part of a training step, of a microbatch.

  Args:
    model: a compiled model.
    count: number of microbatches.

  Returns:
    A function of a microbatch, and the factors if there are any, that updates the metrics, and
    returns the loss to differentiate: the mean of those of all microbatches is that of the batch.

  Raises:
    UnsupportedError: the metrics of microbatches do not make that of the batch.
  """
  forward = _forward(model)
  if type(model).compute_metrics is not keras.Model.compute_metrics:
    raise UnsupportedError(
      f"mtf.keras: {type(model).__name__} has a compute_metrics of its own, whose results are of a "
      "whole batch; give parallelize microbatches=1, or override get_metrics_result instead"
    )

  def step(
    inputs: Any, targets: Any = None, sample_weight: Any = None, factors: Sequence[Any] = ()
  ) -> Any:
    with losses.of_microbatch(count, factors):
      scaled, _ = forward(inputs, targets, sample_weight)
    return scaled

  return step


def finish_step(
  model: keras.Model,
  added: Sequence[tf.Variable],
  draws: Sequence[tuple[tf.Variable, int]],
) -> Callable[..., Any]:
  """The end of a training step in microbatches: metrics and seeds.

  Args:
    model: a compiled model.
    added: variables that get the sum of what the microbatches add to them.
    draws: states of seed generators, with the number of seeds that a microbatch takes.

  Returns:
    A function of (the loss, those sums) that returns the logs.
  """

  def step(loss: Any, sums: Any) -> Any:
    del loss  # An imported function has at least one argument.
    for variable, change in zip(added, sums):
      variable.assign_add(change)
    for state, count in draws:
      state.assign_add(tf.constant([0, count], state.dtype))
    return _logs(model.get_metrics_result())

  return step


def test_step(model: keras.Model) -> Callable[..., Any]:
  """A step of evaluation: a function of a batch that returns the logs."""

  def step(inputs: Any, targets: Any = None, sample_weight: Any = None) -> Any:
    return _logs(
      model.test_step(keras.utils.pack_x_y_sample_weight(inputs, targets, sample_weight))
    )

  return step


def predict_step(model: keras.Model) -> Callable[..., Any]:
  """A step of prediction: a function of inputs that returns the outputs."""

  def step(inputs: Any) -> Any:
    return model.predict_step((inputs,))

  return step


def generates(model: keras.Model) -> bool:
  """True if a model generates tokens by a `generate_step` of inputs, as those of keras-hub do."""
  methods = "generate", "generate_step", "make_generate_function"
  if not all(hasattr(model, name) for name in methods):
    return False
  return list(inspect.signature(model.generate_step).parameters) == ["inputs", "stop_token_ids"]


def generate_step(model: keras.Model, stop_token_ids: Any) -> Callable[..., Any]:
  """A step of generation: prefill of the KV cache, and the loop over the positions after it.

  Args:
    model: a model for which `generates` is True.
    stop_token_ids: ids of tokens that end a sequence; None for none.

  Returns:
    A function of padded inputs that returns them filled.
  """

  def step(inputs: Any) -> Any:
    return model.generate_step(inputs, stop_token_ids)

  return step


def update_step(model: keras.Model, present: Sequence[bool]) -> Callable[..., Any]:
  """The optimizer's part of a training step.

  Args:
    model: a compiled model.
    present: for each trainable variable whether it has a gradient.

  Returns:
    A function of the gradients there are, in order.
  """

  def step(gradients: Any) -> None:
    remaining = iter(gradients)
    all_gradients = [next(remaining) if p else None for p in present]
    model.optimizer.apply_gradients(zip(all_gradients, model.trainable_variables))

  return step


@dataclasses.dataclass(frozen=True)
class NamedVariable:
  """A variable with a name that is its own, as `from_tensorflow` asks for its paths.

  Attributes:
    path: the name.
    value: the tf.Variable.
    trainable: whether it is trained.
  """

  path: str
  value: tf.Variable
  trainable: bool


def named_variables(
  model: keras.Model, known: dict[int, NamedVariable], others: Sequence[tf.Variable] = ()
) -> list[NamedVariable]:
  """All variables of a model, its metrics and its optimizer, each with another name.

  Keras has the same path for several of them: the slots of Adafactor, metrics of one class, and
  those of a model that is compiled anew. Numbers that count in the process count in the model here.

  Args:
    model: a model, built and compiled.
    known: by the id of the tf.Variable those that have a name; the rest is entered.
    others: variables that Keras knows nothing of.
  """
  optimizer = getattr(model, "optimizer", None)
  of_keras = [
    *model.variables,
    *model.metrics_variables,
    *([] if optimizer is None else optimizer.variables),
  ]
  pairs = [(v.path, v.value) for v in of_keras]
  if any(id(value) not in known for _, value in pairs):
    own = OwnNames(model, [v.path for v in model.variables])
    pairs = [(own.of(path), value) for path, value in pairs]
  pairs += [(v.name.split(":")[0], v) for v in others]
  trained = {id(v.value) for v in model.trainable_variables}
  taken = {v.path for v in known.values()}
  found: dict[int, NamedVariable] = {}
  for own_path, value in pairs:
    key = id(value)
    if key not in known:
      path, number = own_path, 1
      while path in taken:
        number += 1
        path = f"{own_path}_{number}"
      taken.add(path)
      known[key] = NamedVariable(path, value, False)
    found[key] = dataclasses.replace(known[key], trainable=key in trained)
  return list(found.values())


class Step:
  """A step in the form that `from_tensorflow` takes: with names of arguments and variables.

  Args:
    fn: one of the functions above.
    names: its parameters that are given.
    variables: the `NamedVariable`s.
    model: the model, whose parts have names.
    around: makes a context manager, inside of which it is traced.
  """

  def __init__(
    self,
    fn: Callable[..., Any],
    names: Sequence[str],
    variables: Sequence[NamedVariable],
    model: Any = None,
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
  ):
    self.name = fn.__name__
    self.model = model
    self.variables = list(variables)

    def call(*args: Any) -> Any:
      with around():
        return fn(**dict(zip(names, args)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    call.__name__ = fn.__name__
    self.call = call
    # Keras' loops do not translate the code of models, either.
    self._traced = tf.function(call, autograph=False)

  def __call__(self, *args: Any) -> Any:
    return self._traced(*args)

  def get_concrete_function(self, *args: Any) -> Any:
    """As `tf.function.get_concrete_function`; traced once for a signature."""
    return self._traced.get_concrete_function(*args)

  def used(self, signature: Sequence[Any]) -> list[NamedVariable]:
    """The variables of this step that its trace uses.

    Args:
      signature: `tf.TensorSpec`s of its arguments.
    """
    ids = {id(v) for v in self.get_concrete_function(*signature).variables}
    return [v for v in self.variables if id(v.value) in ids]

  def unnamed(self, signature: Sequence[Any]) -> list[tf.Variable]:
    """The variables that its trace uses, and that are not among its named ones.

    Args:
      signature: `tf.TensorSpec`s of its arguments.
    """
    ids = {id(v.value) for v in self.variables}
    used = self.get_concrete_function(*signature).variables
    return [v for key, v in {id(v): v for v in used}.items() if key not in ids]


def make_variables(model: keras.Model, step: Step, batch: Any, slots: bool) -> bool:
  """Makes what Keras makes when it meets a first batch: weights, metrics, slots.

  Args:
    model: the model.
    step: is traced, which makes weights and metrics.
    batch: a `Batch`.
    slots: whether the optimizer is built. Keras builds it at the first step of training, for the
      weights that are trainable by then.

  Returns:
    False if the trace may not be that of later steps: it depends on something that was made after.
  """
  weights = len(model.variables)
  optimizer: Any = getattr(model, "optimizer", None)
  is_built = not slots or optimizer is None or optimizer.built
  step.get_concrete_function(*batch.signature)
  if slots and optimizer is not None and not optimizer.built and model.trainable_variables:
    # Keras' own look at the resources of the weights, to tell them apart, and seldom at values.
    is_of_keras = type(optimizer).__module__.partition(".")[0] == "keras"
    scope = keras.name_scope(optimizer.name, caller=optimizer)  # As Keras' own `apply` has it.
    with scope, mirror.resources_unnoticed() if is_of_keras else contextlib.nullcontext():
      optimizer.build(model.trainable_variables)
  if len(model.variables) != weights or (slots and has_own_step(model)):
    return False
  # The scale of LossScaleOptimizer, say, is a number until it is built.
  return is_built or type(optimizer).scale_loss is keras.optimizers.Optimizer.scale_loss


def _loss_tracker(model: keras.Model) -> Any:
  """The mean of the losses, which Keras' train_step updates.

  It is the first metric of a compiled model, also where a subclass hides it by a `metrics` of its
  own.
  """
  first = keras.Model.metrics.fget(model)[:1]
  return first[0] if first and first[0].name == "loss" else None


def _logs(logs: Any) -> dict[str, Any]:
  """Results of metrics as tensors: one may be a variable itself, a number, or a dict of such."""
  if not isinstance(logs, dict):
    raise UnsupportedError(
      f"mtf.keras: a step returned {logs!r}; it must return a dict of names and values"
    )
  found: dict[str, Any] = keras.tree.map_structure(
    lambda x: tf.identity(keras.ops.convert_to_tensor(x)), logs
  )
  return found
