"""Several training steps as one TensorFlow function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.training.reported import ReportSteps


class StopFlag:
  """A stop flag that the loop of steps polls before each step; any thread may set it."""

  def __init__(self) -> None:
    # Of the host's devices this is the one where threads beside the main one may run operations.
    with tf.init_scope(), tf.device(workers.host_device()):
      self._variable = tf.Variable(False, trainable=False, name="mtf_stop_steps")

  def put(self, up: bool) -> None:
    """Sets or clears the flag."""
    with tf.device(workers.host_device()):
      self._variable.assign(up)

  def is_up(self) -> tf.Tensor:
    """Returns the flag as a bool scalar tensor, read anew each time the operation runs."""
    with tf.device(workers.host_device()):
      return self._variable.read_value()


class CallLengths:
  """Adapts the number of steps per call, so that a call takes about a given time.

  Args:
    seconds: target duration of a call, in seconds.

  Attributes:
    most: maximum number of steps of the next call; 1 until a call was measured.
  """

  def __init__(self, seconds: float):
    self._seconds = seconds
    self.most = 1

  def measured(self, steps: int, seconds: float) -> None:
    """Updates `most` from the measured duration of a call."""
    # Below 2 ** 31: workers exchange it as an int32.
    self.most = int(min(max(1.0, self._seconds * steps / max(seconds, 1e-6)), 1e9))


def in_parts(
  calls: Iterable[tuple[tf.Tensor, ...]], most: Callable[[], int]
) -> Iterator[tuple[tf.Tensor, ...]]:
  """Splits calls with more steps than currently allowed into several calls.

  Args:
    calls: tensors [steps, ...], all of the same number of steps.
    most: returns the maximum number of steps of the next call.
  """
  for batches in calls:
    steps, at = int(batches[0].shape[0]), 0
    while at < steps:
      n = min(most(), steps - at)
      yield batches if n == steps else tuple(b[at : at + n] for b in batches)
      at += n


def compile_steps(
  step: Callable[..., object],
  batch_specs: Sequence[tf.TensorSpec],
  learning_rate: Callable[[tf.Tensor], tf.Tensor],
  counts_bad: bool,
  stop: StopFlag | None = None,
  reports: ReportSteps | None = None,
) -> Any:
  """Compiles a loop over training steps.

  Args:
    step: see `program.train_step`.
    batch_specs: of each feature of a batch.
    learning_rate: a function of the number of the step, an int64 scalar.
    counts_bad: whether `step` returns, beside the loss, how many elements were not finite.
    stop: while it is up the loop ends after the step that is going on.
    reports: says which steps are asked for norms, if `step` takes that as its last argument.

  Returns:
    A function of (batches [n, <shape of a batch>] for each feature, number of the first
    step). It returns float32 [2 + values, m]: the losses; how many elements of loss and gradients
    were not finite, if that is counted; and what else `step` returns, a row each; of n steps, or of
    fewer, one at least, if it was stopped. Any n: a shorter last call needs no program of its own.
  """
  spec = tuple(tf.TensorSpec([None, *x.shape], x.dtype) for x in batch_specs)

  def call(batches: tuple[tf.Tensor, ...], first_step: tf.Tensor) -> tf.Tensor:
    count = tf.shape(batches[0])[0]

    def one(i: tf.Tensor, results: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
      at = first_step + tf.cast(i, tf.int64)
      asked = [reports.norms_wanted(at)] if reports is not None else []
      loss, *others = tf.nest.flatten(step(*[b[i] for b in batches], learning_rate(at), at, *asked))
      if not counts_bad:
        others.insert(0, tf.zeros([]))
      return i + 1, results.write(i, tf.concat([tf.reshape(x, [-1]) for x in (loss, *others)], 0))

    def goes_on(i: tf.Tensor, _: tf.TensorArray) -> tf.Tensor:
      more = i < count
      # One step is done in any case: a call without results would need cases of its own.
      return more if stop is None else more & ~((i > 0) & stop.is_up())

    # How many values a step returns is known when it is traced, in the body of the loop.
    results = tf.TensorArray(tf.float32, size=count, element_shape=[None], infer_shape=False)
    # One after the other: each step reads the variables that the one before has written.
    done, results = tf.while_loop(goes_on, one, [0, results], parallel_iterations=1)
    # Not all of them at once: of steps that were not done there is nothing, not even a shape.
    return tf.transpose(results.gather(tf.range(done)))

  return tf.function(call, input_signature=[spec, tf.TensorSpec([], tf.int64)], autograph=False)


def steps_per_call(wanted: int, save_every: int) -> int:
  """The largest number of steps up to `wanted` after which a checkpoint can be due."""
  if not save_every:
    return wanted
  return max(n for n in range(1, min(wanted, save_every) + 1) if save_every % n == 0)
