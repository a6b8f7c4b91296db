"""Several training steps as one TensorFlow function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def compile_steps(
  step: Callable[..., Any],
  batch_shapes: Sequence[Sequence[int]],
  learning_rate: Callable[[tf.Tensor], tf.Tensor],
  counts_bad: bool,
) -> Any:
  """Compiles a loop over training steps.

  Args:
    step: see `ModelSteps.train_step`.
    batch_shapes: of each feature.
    learning_rate: a function of the number of the step, an int64 scalar.
    counts_bad: whether `step` returns, beside the loss, how many elements were not finite.

  Returns:
    A function of (int32 batches [n, <shape of a batch>] for each feature, number of the first
    step). It returns float32 [2, n]: the losses, and how many elements of loss and gradients were
    not finite, if that is counted. Any n: a shorter last call needs no program of its own.
  """
  spec = tuple(tf.TensorSpec([None, *shape], tf.int32) for shape in batch_shapes)

  @tf.function(input_signature=[spec, tf.TensorSpec([], tf.int64)], autograph=False)
  def call(batches, first_step):
    count = tf.shape(batches[0])[0]

    def one(i, results):
      at = first_step + tf.cast(i, tf.int64)
      result = step(*[b[i] for b in batches], learning_rate(at), at)
      return i + 1, results.write(i, tf.stack(result) if counts_bad else result)

    results = tf.TensorArray(tf.float32, size=count, element_shape=[2] if counts_bad else [])
    _, results = tf.while_loop(lambda i, _: i < count, one, [0, results], parallel_iterations=1)
    results = results.stack()
    return tf.transpose(results) if counts_bad else tf.stack([results, tf.zeros_like(results)])

  return call
