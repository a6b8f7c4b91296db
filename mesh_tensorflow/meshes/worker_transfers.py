"""Point-to-point transfers of tensors between the worker processes of a cluster.

A transfer is a broadcast to a group of two, by TensorFlow's collective operations: the sender runs
the one half, the receiver the other, and both count the transfers of each direction, so that the
halves have the same number if both workers trace the same program. From one worker to another
transfers are a queue: each begins when the one before it has arrived. Directions, and pairs of
workers, do not wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.meshes.collectives.run_guard import RunGuard, unlifted_variable
from mesh_tensorflow.meshes.collectives.runtime import KEYS
from mesh_tensorflow.workers.membership import abort_collectives

# Of the group of workers 0 and 0; below the keys of the groups of meshes.
_FIRST_GROUP_KEY = 100_000

# What is sent as it is. (Broadcasts take bool and float16, too, and log an error of oneDNN's.)
_CARRIED = (tf.float32, tf.float64, tf.int32, tf.int64)


class WorkerTransfers:
  """Sends and receives of this worker."""

  def __init__(self) -> None:
    # For each direction (sender, receiver) the number of transfers done: it is changed by each, and
    # so TensorFlow runs them in order, in loops, too, and none is left out as without effect.
    self._done: dict[tuple[int, int], tf.Variable] = {}
    self._guard: RunGuard | None = None

  def send(self, x: tf.Tensor, receiver: int) -> None:
    """Sends a tensor to another worker, which calls `receive` at the same place of its program.

    Args:
      x: a tensor of static shape.
      receiver: the number of the worker.

    Raises:
      ShapeError: its shape is not known when the program is traced.
    """
    if not x.shape.is_fully_defined():
      raise ShapeError(
        f"a tensor of shape {x.shape} cannot be sent to {workers.current().name(receiver)}: a "
        "transfer between workers needs a static shape"
      )

    if not math.prod(x.shape.as_list()):
      return
    words = _as_words(x)

    def half(group_key: int, instance_key: int) -> tf.Tensor:
      return tf.raw_ops.CollectiveBcastSend(
        input=words,
        group_size=2,
        group_key=group_key,
        instance_key=instance_key,
        shape=words.shape,
      )

    self._transfer(half, workers.current().index, receiver)

  def receive(self, shape: Sequence[int], dtype: tf.DType, sender: int) -> tf.Tensor:
    """Receives a tensor from another worker, which calls `send` at the same place of its program.

    Args:
      shape: its shape.
      dtype: its dtype.
      sender: the number of the worker.
    """
    if not math.prod(shape):
      return tf.zeros(shape, dtype)
    words_shape, words_dtype = _words_of(shape, dtype)

    def half(group_key: int, instance_key: int) -> tf.Tensor:
      return tf.raw_ops.CollectiveBcastRecv(
        T=words_dtype,
        group_size=2,
        group_key=group_key,
        instance_key=instance_key,
        shape=words_shape,
      )

    words = self._transfer(half, sender, workers.current().index)
    return _from_words(tf.ensure_shape(words, words_shape), shape, dtype)

  def _transfer(self, half: Callable[[int, int], tf.Tensor], sender: int, receiver: int) -> Any:
    key = _FIRST_GROUP_KEY + sender * workers.current().size + receiver
    number = KEYS.instance_key(key)
    done = self._counter(sender, receiver)

    def run() -> tf.Tensor:
      with tf.device(workers.host_device()):
        words = half(key, number)
        with tf.control_dependencies([words]):
          done.assign_add(1, read_value=False)
        return words

    # Not inlined: inside a loop the halves of two workers would not find each other, since
    # TensorFlow's collectives go by the name of the loop, too.
    function = tf.function(run, autograph=False, experimental_attributes={"_noinline": True})
    with tf.device(workers.host_device()):
      return function()

  def _counter(self, sender: int, receiver: int) -> tf.Variable:
    if (sender, receiver) not in self._done:
      with tf.init_scope(), tf.device(workers.host_device()):
        self._done[sender, receiver] = unlifted_variable(0, tf.int64, "mtf_transfers")
    return self._done[sender, receiver]

  def guarded(self, timeout_seconds: float, program: Callable[[], list[tf.Tensor]]) -> None:
    """Adds a run to the graph in which no transfer waits longer than a time.

    Args:
      timeout_seconds: the time, in seconds; that of the first call counts.
      program: adds the run, and returns tensors that are there when it has ended.
    """
    if self._guard is None:
      host = workers.host_device()
      self._guard = RunGuard(
        [host], timeout_seconds, lambda: abort_collectives(host), self._done.values()
      )
    self._guard.framed(program)

  def reset(self) -> None:
    """Makes runs possible after one that failed midway."""
    if self._guard is not None and not self._guard.broken:
      self._guard.reset()


TRANSFERS = WorkerTransfers()


def _word(dtype: tf.DType) -> tuple[tf.DType, int]:
  """The dtype in which the bits of a dtype are sent, and how many elements a word has at least."""
  if dtype in _CARRIED:
    return dtype, 1
  if dtype.size < 4:
    return tf.int32, 4 // dtype.size
  return (tf.int32, 1) if dtype.size == 4 else (tf.int64, 1)


def _as_words(x: tf.Tensor) -> tf.Tensor:
  """The bits of a tensor as a vector of words."""
  if x.dtype == tf.bool:
    x = tf.cast(x, tf.uint8)
  word, each = _word(x.dtype)
  flat = tf.reshape(x, [-1])
  if x.dtype == word:
    return flat
  if each > 1:
    flat = tf.reshape(tf.concat([flat, tf.zeros([-flat.shape[0] % each], x.dtype)], 0), [-1, each])
  return tf.reshape(tf.bitcast(flat, word), [-1])


def _from_words(words: tf.Tensor, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
  """The tensor whose words these are."""
  if dtype == tf.bool:
    return tf.cast(_from_words(words, shape, tf.uint8), tf.bool)
  word, _ = _word(dtype)
  if dtype.size > word.size:
    words = tf.reshape(words, [-1, dtype.size // word.size])
  elements = words if dtype == word else tf.reshape(tf.bitcast(words, dtype), [-1])
  return tf.reshape(elements[: math.prod(shape)], shape)


def _words_of(shape: Sequence[int], dtype: tf.DType) -> tuple[list[int], tf.DType]:
  """Shape and dtype of the vector that `_as_words` returns."""
  word, _ = _word(dtype)
  return [-(-math.prod(shape) * dtype.size // word.size)], word
