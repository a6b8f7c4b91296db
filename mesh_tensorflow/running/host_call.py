"""Summaries and contexts for programs written for the TF1 library."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import GraphError, UnsupportedError
from mesh_tensorflow.running.lowering import Lowering

SCALAR_SUMMARIES_COLLECTION_KEY = "mtf_scalar_summaries"

# SummaryMetadata {plugin_data {plugin_name: "scalars"} data_class: DATA_CLASS_SCALAR}. With it
# `tf.summary.write` writes what `tf.summary.scalar` does, also where TensorBoard is not installed.
_SCALAR_METADATA = b"\x0a\x09\x0a\x07scalars\x20\x01"


def outside_all_rewrites() -> AbstractContextManager[None]:
  """A context in which operations run at once, outside of every tf.function being traced."""
  context: AbstractContextManager[None] = tf.init_scope()
  return context


@checked
def create_host_call(
  model_dir: str, *, lowering: Lowering | None = None, step: object = None
) -> tuple[Callable[..., None], list[tf.Tensor]] | None:
  """The `mtf.scalar_summary`s of a program, and a function that writes them.

  Args:
    model_dir: folder for the event files.
    lowering: the `Lowering` of the program: it holds the summaries.
    step: number of the step, an integer or a tf.Tensor; `graph.global_step`, or the variable
      `global_step` of the graph by default.

  Returns:
    None if the program has no summaries; else (fn, tensors). The tensors have shape [1]; a
    step function can return them. `fn(*tensors)`, called eagerly, writes them.

  Raises:
    UnsupportedError: no lowering is given: there is no collection of summaries besides it.
    GraphError: the program has no step, and none is given.
  """
  if lowering is None:
    raise UnsupportedError(
      "create_host_call: TensorFlow 2 has no graph collections to take the summaries from; give "
      "the Lowering that has them: create_host_call(model_dir, lowering=lowering)"
    )
  if not lowering.scalar_summaries:
    return None
  names = [name for name, _ in lowering.scalar_summaries]
  step = _step_of(lowering) if step is None else step
  tensors = [tf.reshape(tf.cast(step, tf.int32), [1])]
  for _, value in lowering.scalar_summaries:
    if value.dtype == tf.int64:
      value = tf.cast(value, tf.int32)
    elif value.dtype == tf.bfloat16:
      value = tf.cast(value, tf.float32)
    tensors.append(tf.reshape(value, [1]))

  def write(global_step: tf.Tensor, *values: tf.Tensor) -> None:
    writer = tf.summary.create_file_writer(model_dir)
    at = tf.cast(tf.reshape(global_step, [-1])[0], tf.int64)
    with writer.as_default():
      for name, value in zip(names, values, strict=True):
        mean = tf.reduce_mean(tf.cast(value, tf.float32))
        tf.summary.write(name, mean, step=at, metadata=_SCALAR_METADATA)
    writer.close()

  return write, tensors


def _step_of(lowering: Lowering) -> tf.Tensor:
  step = lowering.graph.global_step
  if step is None and "global_step" in lowering.graph.name_to_variable:
    step = lowering.graph.name_to_variable["global_step"].value
  if step is None:
    raise GraphError(
      "create_host_call: the graph has neither a global_step nor a variable of that name; give "
      "the number of the step: create_host_call(model_dir, lowering=lowering, step=step)"
    )
  return lowering.export_to_tf_tensor(step)


def remove_summaries() -> None:
  """Does nothing: summaries belong to a `Lowering`, and the next has none of them."""
