"""Data sets without TensorFlow's tuner, for which the end of an iterator has to wait.

The thread in which TensorFlow tunes a pipeline sleeps for up to a minute at a time, and often
misses that its iterator is being deleted; the deletion waits until it wakes. A program that has
trained or evaluated for 25 s stands still for 15 s more (seen in TensorFlow 2.21).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """The same data set, whose iterators are deleted at once.

  AUTOTUNE then stands for as many calls as there are threads, and for buffers that grow when they
  were found empty. There is no buffer behind the last stage unless the data set has one.

  Args:
    dataset: where its options say whether it is tuned, they are kept.
  """
  if dataset.options().autotune.enabled is not None:
    return dataset
  options = tf.data.Options()
  options.autotune.enabled = False
  return dataset.with_options(options)


class UntunedIterators(contextlib.AbstractContextManager[None]):
  """Context in which every iterator of a `tf.data.Dataset` is one `without_autotuning`.

  For loops of others, which make their iterators themselves. What the tuner would have added, a
  buffer behind the last stage, is added here. Threads may be inside of the context at once.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._inside = 0
    self._plain: Callable[[tf.data.Dataset], Any] = tf.data.Dataset.__iter__

  def __enter__(self) -> None:
    with self._lock:
      self._inside += 1
      if self._inside == 1:
        plain = self._plain = tf.data.Dataset.__iter__
        tf.data.Dataset.__iter__ = lambda dataset: plain(_untuned(dataset))

  def __exit__(self, *error: object) -> None:
    with self._lock:
      self._inside -= 1
      if not self._inside:
        tf.data.Dataset.__iter__ = self._plain


untuned_iterators = UntunedIterators()


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
  if dataset.options().autotune.enabled is not None:
    return dataset
  return without_autotuning(dataset.prefetch(1))
