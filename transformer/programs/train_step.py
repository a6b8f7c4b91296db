"""One step of training: loss, gradients, updates; and the same step that only looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.meshes import batching, mesh_setup
from mesh_tensorflow.transformer.programs import nonfinite
from mesh_tensorflow.transformer.programs.forward import Forward


def train_step(
  steps: Forward,
  feature_names: Sequence[str],
  optimizer: Callable[..., Any],
  *,
  is_trained: Callable[[mtf.Variable], bool],
  skip_nonfinite: bool = False,
  look: Callable[[mtf.Graph], None] | None = None,
) -> mtf.Function:
  """One step: loss, gradients, updates; microbatches included.

  Args:
    steps: the model on its mesh.
    feature_names: the features of the data, in the order of the step's arguments.
    optimizer: called as `optimizer(learning_rate=...)`.
    is_trained: which variables are updated.
    skip_nonfinite: updates nothing if the loss or a gradient is NaN or infinite.
    look: called with the graph when it is complete, before it is lowered.

  Returns:
    An `mtf.function` of (*features, learning rate, step) that returns the loss, float32; with
    `skip_nonfinite` a list of it and the number of elements that are not finite.
  """

  @mtf.function(steps.mesh_impl, _signature(steps, feature_names))
  def train_step(*args: mtf.Tensor) -> Any:
    *values, learning_rate, step = args
    graph, loss, grads = _loss_and_gradients(steps, feature_names, values, step)
    trained = [(g, v) for g, v in zip(grads, graph.trainable_variables) if is_trained(v)]
    optimizer(learning_rate=learning_rate).apply_grads(
      [g for g, _ in trained], [v for _, v in trained]
    )
    mesh_setup.check_tensor_names(steps.mesh_impl, graph)
    if look is not None:
      look(graph)
    loss = mtf.cast(loss, tf.float32)
    if not skip_nonfinite:
      return loss
    return [loss, nonfinite.skip_updates(graph, [loss, *[g for g, _ in trained if g is not None]])]

  return train_step


def watch_step(steps: Forward, feature_names: Sequence[str]) -> tuple[list[str], mtf.Function]:
  """A training step that updates nothing and looks for NaN and infinity.

  Args:
    steps: the model on its mesh.
    feature_names: as of `train_step`.

  Returns:
    A list, which the first call of the function fills with what the tensors are; and an
    `mtf.function` of (*features, learning rate, step) that returns for each tensor, in the order
    in which they are computed, the number of elements that are not finite.
  """
  titles: list[str] = []

  @mtf.function(steps.mesh_impl, _signature(steps, feature_names))
  def watch_step(*args: mtf.Tensor) -> Any:
    *values, _, step = args
    graph, _, grads = _loss_and_gradients(steps, feature_names, values, step)
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
  steps: Forward, feature_names: Sequence[str], values: Sequence[mtf.Tensor], step: mtf.Tensor
) -> tuple[mtf.Graph, mtf.Tensor, Sequence[mtf.Tensor | None]]:
  """The graph of a step, its loss, and the gradients of all trainable variables."""
  num_microbatches = batching.serialize_num_microbatches(
    steps.batch_dim,
    steps.sequence_length,
    steps.mesh_impl.shape,
    steps.mesh_impl.layout_rules,
  )
  graph = step.graph
  # Noise is a function of the step: a training that goes on draws what it would have drawn.
  graph.random_seed = step
  graph.global_step = step
  features = dict(zip(feature_names, values))

  def losses(features: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
    return {"loss": steps.logits_and_loss(features, "train", num_microbatches)[1]}

  if num_microbatches > 1:
    grads, outputs = mtf.serialize_training_step(
      features, losses, steps.batch_dim, num_microbatches
    )
    return graph, outputs["loss"], grads
  loss = losses(features)["loss"]
  return graph, loss, mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
