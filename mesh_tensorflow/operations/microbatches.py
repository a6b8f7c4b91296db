"""A training step run in microbatches: a loop over parts of the batch."""

from __future__ import annotations

import logging
from collections.abc import Callable

import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, GradientError, GraphError, ShapeError
from mesh_tensorflow.meshes import schedules
from mesh_tensorflow.operations.binary import AddOperation, add, add_n
from mesh_tensorflow.operations.comparison import less
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.cross_mesh import Reshard, reshard
from mesh_tensorflow.operations.elementwise import cast_before_sum
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.operations.indexing import GatherOperation, ScatterAddOperation
from mesh_tensorflow.operations.loops import WhileLoopOperation
from mesh_tensorflow.operations.reshape import replace_dimensions
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Mesh, Tensor

__all__ = ["serialize_training_step"]

_LOG = logging.getLogger("mesh_tensorflow")


def serialize_training_step(
  features: dict[str, Tensor],
  model_fn: Callable[[dict[str, Tensor]], dict[str, Tensor]],
  batch_dim: DimensionLike,
  num_splits: int,
  *,
  schedule: str | None = None,
) -> tuple[list[Tensor], dict[str, Tensor]]:
  """Computes gradients in a loop over parts of the batch, to use less memory.

  Microbatch i is made of the examples i, i + num_splits, i + 2 * num_splits, ..., so every
  processor takes part in each. Gradients are exchanged once, after the loop.

  Args:
    features: `Tensor`s that have `batch_dim`.
    model_fn: takes a dict of such tensors with a smaller `batch_dim`, returns a dict of
      `Tensor`s, among them the scalar "loss".
    batch_dim: the batch dimension.
    num_splits: the number of microbatches; it must divide the batch.
    schedule: if the model is on several meshes (`mtf.stage`, `mtf.reshard`) its microbatches go
      through them as through a pipeline, by this schedule: "gpipe", "1f1b" or "zero_bubble"; None:
      that of the mesh of the `mtf.function` (`with_stages`), or "1f1b".

  Returns:
    The gradients of the loss for `graph.trainable_variables`, and the outputs. Outputs
    that have the batch dimension are those of the whole batch; all others, the loss
    and means among them, are the sums over the microbatches, as the gradients are.

  Raises:
    ShapeError: `num_splits` does not divide the batch.
    ArgumentError: there is no such schedule.
    GradientError: the loss does not depend on a trainable variable.
  """

  def body(parts: dict[str, Tensor], _: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    outputs = model_fn(parts)
    if not isinstance(outputs, dict) or "loss" not in outputs:
      found = sorted(outputs) if isinstance(outputs, dict) else type(outputs).__name__
      raise ArgumentError(
        f"serialize_training_step: model_fn must return a dict with the key 'loss', got {found}"
      )
    return _gradients_of_variables(outputs["loss"]), outputs

  return accumulate(
    features, body, batch_dim, num_splits, schedule=schedule, what="serialize_training_step"
  )


def accumulate(
  features: dict[str, Tensor],
  body: Callable[[dict[str, Tensor], Tensor], tuple[list[Tensor], dict[str, Tensor]]],
  batch_dim: DimensionLike,
  num_splits: int,
  *,
  schedule: str | None,
  what: str,
) -> tuple[list[Tensor], dict[str, Tensor]]:
  """Runs a function on each microbatch, and adds up its results; see `serialize_training_step`.

  Args:
    features: `Tensor`s that have `batch_dim`.
    body: takes a dict of such tensors with a smaller `batch_dim`, and the number of the microbatch,
      an int32 scalar; returns a list of tensors to be added up, in float32 at least, and a dict of
      outputs.
    batch_dim: the batch dimension.
    num_splits: the number of microbatches; it must divide the batch.
    schedule: see there.
    what: name of the caller, for messages.

  Returns:
    The sums of the list, and the outputs: those that have the batch dimension are of the whole
    batch, others sums.

  Raises:
    ShapeError: `num_splits` does not divide the batch.
    ArgumentError: there is no such schedule.
  """
  if schedule is not None:
    schedules.check_schedule(schedule, what)
  batch_dim = convert_to_dimension(batch_dim)
  if not features:
    raise GraphError(f"{what} needs at least one feature")
  for name, x in features.items():
    if batch_dim not in x.shape:
      raise no_such_dimension(f"{what}: feature {name!r}", batch_dim, x)
  if num_splits < 1 or batch_dim.size % num_splits:
    raise ShapeError(
      f"{what}: {batch_dim.name}={batch_dim.size} cannot be cut into "
      f"{num_splits} microbatches, which does not divide it"
    )
  first = next(iter(features.values()))
  mesh = first.mesh
  smaller = Dimension(batch_dim.name, batch_dim.size // num_splits)
  microbatch = Dimension("microbatch", num_splits)
  # The smaller dimension has the name of the batch, so that it is split as that is, and comes
  # first: each processor finds examples of every microbatch among its own, and moves nothing.
  cut = {k: replace_dimensions(x, batch_dim, [smaller, microbatch]) for k, x in features.items()}
  output_keys: list[str] = []
  meshes: list[tuple[Mesh, list[Mesh]]] = []  # Of each sum: that it is on, those of its parts.

  def cond_fn(i: Tensor) -> Tensor:
    return less(i, num_splits)

  def body_fn(i: Tensor) -> list[Tensor]:
    parts = {
      k: GatherOperation(
        x, reshard(i, x.mesh), microbatch, in_range=True, name="microbatch"
      ).outputs[0]
      for k, x in cut.items()
    }
    summed, outputs = body(parts, i)
    output_keys.extend(outputs)
    scattered = [_scatter_microbatch(outputs[k], i, smaller, microbatch) for k in output_keys]
    made = [_before_reshards(x) for x in [*summed, *scattered]]
    meshes.extend((x.mesh, list(of)) for x, of in zip([*summed, *scattered], made))
    # The loop adds up what follows the counter: gradients, in float32 at least, and outputs that
    # are zero outside of their microbatch.
    exact = [_in_float32(x) for of in made[: len(summed)] for x in of.values()]
    return [add(i, 1), *exact, *(x for of in made[len(summed) :] for x in of.values())]

  start = constant(mesh, 0, shape=[], dtype=tf.int32)
  results = WhileLoopOperation(
    cond_fn,
    body_fn,
    [start],
    {"maximum_iterations": num_splits},
    has_accumulators=True,
    schedule=schedule,
  ).outputs[1:]
  left = iter(results)
  totals = [add_n([reshard(next(left), mesh) for _ in of]) for mesh, of in meshes]
  n = len(totals) - len(output_keys)
  outputs = {
    k: replace_dimensions(x, [smaller, microbatch], batch_dim) if microbatch in x.shape else x
    for k, x in zip(output_keys, totals[n:])
  }
  return totals[:n], outputs


def _in_float32(x: Tensor) -> Tensor:
  """A tensor to be added up over many microbatches."""
  return cast_before_sum(x, tf.float32) if x.dtype.is_floating and x.dtype.size < 4 else x


def _before_reshards(x: Tensor) -> dict[Mesh, Tensor]:
  """The parts of which a tensor is the sum, by the meshes that make them.

  So the gradient of a variable that several meshes read goes from mesh to mesh once, and not for
  each microbatch.
  """
  if len(x.graph.meshes) == 1:
    return {x.mesh: x}
  parts: dict[Mesh, list[Tensor]] = {}
  left = [x]
  while left:
    y = left.pop()
    op = y.operation
    if isinstance(op, Reshard):
      left += op.inputs
    elif isinstance(op, AddOperation) and all(z.shape == x.shape for z in op.inputs):
      left += reversed(op.inputs)
    else:
      parts.setdefault(y.mesh, []).append(y)
  return {x.mesh: x} if list(parts) == [x.mesh] else {m: add_n(xs) for m, xs in parts.items()}


def _gradients_of_variables(loss: Tensor) -> list[Tensor]:
  """The gradients of all trainable variables.

  Raises:
    GradientError: the loss does not depend on one of them.
  """
  variables = loss.graph.trainable_variables
  grads = gradients([loss], [v.outputs[0] for v in variables])
  without = [v for v, g in zip(variables, grads) if g is None]
  for v in without:
    _LOG.error("the loss does not depend on the trainable variable %s", v)
  if without:
    names = ", ".join(v.full_name for v in without)
    raise GradientError(
      f"serialize_training_step: the loss does not depend on the trainable variables {names}"
    )
  return [g for g in grads if g is not None]


def _scatter_microbatch(x: Tensor, i: Tensor, smaller: Dimension, microbatch: Dimension) -> Tensor:
  """An output of microbatch i at its place in the batch, zeros elsewhere."""
  if smaller not in x.shape:
    return x
  shape = replace_dimensions(x.shape, smaller, [smaller, microbatch])
  return ScatterAddOperation(x, reshard(i, x.mesh), shape, microbatch, in_range=True).outputs[0]
