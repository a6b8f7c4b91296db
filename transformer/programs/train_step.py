"""One step of training: loss, gradients, updates; and the same step that only looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.training import nonfinite
from mesh_tensorflow.training.reported import ReportedValues
from mesh_tensorflow.transformer.meshes import mesh_setup
from mesh_tensorflow.transformer.models import step_sums
from mesh_tensorflow.transformer.programs.forward import Forward
from mesh_tensorflow.transformer.programs.updates import Updates


def train_step(
  steps: Forward,
  feature_names: Sequence[str],
  optimizer: Callable[..., Any],
  *,
  is_trained: Callable[[mtf.Variable], bool],
  skip_nonfinite: bool = False,
  look: Callable[[mtf.Graph], None] | None = None,
  reported: ReportedValues | None = None,
  updates: Updates | None = None,
) -> mtf.Function:
  """One step: loss, gradients, updates; microbatches included.

  Args:
    steps: the model on its mesh.
    feature_names: the features of the data, in the order of the step's arguments.
    optimizer: called as `optimizer(learning_rate=...)`.
    is_trained: which variables are updated.
    skip_nonfinite: updates nothing if the loss or a gradient is NaN or infinite.
    look: called with the graph when it is complete, before it is lowered.
    reported: what it returns besides.
    updates: clipping, averages and microbatches; None: those of `Updates()`.

  Returns:
    An `mtf.function` of (*features, learning rate, step) that returns the loss, float32; with
    `skip_nonfinite` a list of it and the number of elements that are not finite. With `reported`
    that list ends with the vector of its values, if there are any; if they have norms, the last
    argument, a bool, asks for them.
  """
  signature = _signature(steps, feature_names)
  if reported is not None and reported.norms:
    signature.append(mtf.TensorSpec([], tf.bool, "norms_wanted"))

  @mtf.function(steps.mesh_impl, signature)
  def train_step(*args: mtf.Tensor) -> Any:
    *values, learning_rate, step = args[: len(feature_names) + 2]
    graph, loss, grads, sums = _loss_and_gradients(steps, feature_names, values, step, updates)
    trained = [(g, v) for g, v in zip(grads, graph.trainable_variables) if is_trained(v)]
    if reported is not None and reported.norms:
      reported.before_updates(args[-1], trained)
    (updates or Updates()).apply(optimizer(learning_rate=learning_rate), trained)
    step_sums.update(sums)
    mesh_setup.check_tensor_names(steps.mesh_impl, graph)
    if look is not None:
      look(graph)
    results = [mtf.cast(loss, tf.float32)]
    if skip_nonfinite:
      gradients = [g for g, _ in trained if g is not None]
      results.append(nonfinite.skip_updates(graph, [*results, *gradients]))
    if reported is not None:
      results += reported.after_updates(graph)
    return results if len(results) > 1 else results[0]

  return train_step


def watch_step(
  steps: Forward, feature_names: Sequence[str], updates: Updates | None = None
) -> tuple[list[str], mtf.Function]:
  """A training step that updates nothing and looks for NaN and infinity.

  Args:
    steps: the model on its mesh.
    feature_names: as of `train_step`.
    updates: likewise.

  Returns:
    A list, which the first call of the function fills with what the tensors are; and an
    `mtf.function` of (*features, learning rate, step) that returns for each tensor, in the order
    in which they are computed, the number of elements that are not finite.
  """
  titles: list[str] = []

  @mtf.function(steps.mesh_impl, _signature(steps, feature_names))
  def watch_step(*args: mtf.Tensor) -> Any:
    *values, _, step = args
    graph, _, grads, _ = _loss_and_gradients(steps, feature_names, values, step, updates)
    titles[:], counts = nonfinite.watched(graph, grads, graph.trainable_variables)
    return counts

  return titles, watch_step


def _signature(steps: Forward, feature_names: Sequence[str]) -> list[mtf.TensorSpec]:
  steps.check_features(feature_names)
  return [
    # A process of a mesh that spans several gives its own part of the batch.
    *[steps.feature_spec(n, training=True, local=True) for n in feature_names],
    mtf.TensorSpec([], tf.float32, "learning_rate"),
    mtf.TensorSpec([], tf.int64, "step"),
  ]


def _loss_and_gradients(
  steps: Forward,
  feature_names: Sequence[str],
  values: Sequence[mtf.Tensor],
  step: mtf.Tensor,
  updates: Updates | None,
) -> tuple[mtf.Graph, mtf.Tensor, Sequence[mtf.Tensor | None], list[step_sums.StepSum]]:
  """The graph of a step, its loss, the gradients of all trainable variables, and other sums."""
  num_microbatches = (updates or Updates()).num_microbatches(
    steps.batch_dim, steps.sequence_length, steps.mesh_impl
  )
  graph = step.graph
  # Noise is a function of the step: a training that goes on draws what it would have drawn.
  graph.random_seed = step
  graph.global_step = step
  features = dict(zip(feature_names, values))

  def losses(features: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
    loss = steps.logits_and_loss(features, "train", num_microbatches)[1]
    sums[:] = step_sums.take(graph)
    return {"loss": loss, **step_sums.as_outputs(sums)}

  sums: list[step_sums.StepSum] = []
  if num_microbatches > 1:
    grads, outputs = mtf.serialize_training_step(
      features, losses, steps.batch_dim, num_microbatches
    )
    return graph, outputs["loss"], grads, step_sums.of_step(sums, outputs)
  loss = losses(features)["loss"]
  # Other than above, None for what the loss does not depend on.
  found = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
  return graph, loss, found, sums
