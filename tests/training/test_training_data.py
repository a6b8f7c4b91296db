"""Which examples a process asks for and keeps, and how many steps a call has."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow.environment import data_sets
from mesh_tensorflow.training import data as training_data
from mesh_tensorflow.training.data import SavedPipeline
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.training.trainer import open_data
from tests.transformer import training_program as program

BATCH, LENGTH = program.BATCH, program.LENGTH


@pytest.fixture
def steps(cpu_devices):
  return program.make_trainer().steps


def rows(numbers):
  return numbers.map(lambda n: {"targets": tf.fill([LENGTH], n + 1)})


def first_batch(data):
  ((targets,),) = data.calls(1, 1)
  return targets.numpy()


def test_a_function_that_skips_is_told_what_was_seen(steps):
  """So nothing of it is read in vain."""
  asked = []

  def numbered(sequence_length, vocabulary, dataset_split, skip=0):
    asked.append(skip)
    return rows(tf.data.Dataset.range(skip, 100))

  data = open_data(steps, numbered, None, "train", 3)
  np.testing.assert_array_equal(first_batch(data)[0, :, 0], np.arange(3 * BATCH, 4 * BATCH) + 1)
  assert asked == [3 * BATCH]


def test_of_another_function_what_was_seen_is_left_out(steps):
  def numbered(sequence_length, vocabulary, dataset_split):
    return rows(tf.data.Dataset.range(100))

  data = open_data(steps, numbered, None, "train", 3)
  np.testing.assert_array_equal(first_batch(data)[0, :, 0], np.arange(3 * BATCH, 4 * BATCH) + 1)


@pytest.fixture
def third_and_fourth(steps, monkeypatch):
  """The programs of a process that has the third and fourth row of a batch, and half of each."""
  half = LENGTH // 2
  # Of the examples alone, or with the length.
  part = lambda shape: ([2, half][: len(shape)], [2, half][: len(shape)])  # noqa: E731
  monkeypatch.setattr(steps.mesh_impl, "local_part", part)
  return steps


def test_of_all_rows_a_process_keeps_its_own(third_and_fourth):
  def numbered(sequence_length, vocabulary, dataset_split):
    return rows(tf.data.Dataset.range(100))

  found = first_batch(open_data(third_and_fourth, numbered, None, "train"))
  np.testing.assert_array_equal(found, np.full([1, 2, LENGTH // 2], [[[3], [4]]]))


def test_a_function_is_asked_for_the_rows_of_a_process_and_the_last(third_and_fourth):
  asked = []

  def of_rows(sequence_length, vocabulary, dataset_split, batch_rows=None):
    asked.append(batch_rows)
    return rows(tf.data.Dataset.range(30).map(batch_rows.numbers))

  found = first_batch(open_data(third_and_fourth, of_rows, None, "train"))
  np.testing.assert_array_equal(found, np.full([1, 2, LENGTH // 2], [[[3], [4]]]))
  assert set(asked) == {BatchRows(BATCH, (2, 3, BATCH - 1))}


class TestTuner:
  """Of TensorFlow's tuner an iterator's end may have to wait for up to a minute."""

  def test_a_data_set_is_not_tuned(self):
    numbers = tf.data.Dataset.range(5)
    plain = data_sets.without_autotuning(numbers)
    assert plain.options().autotune.enabled is False
    assert list(plain.as_numpy_iterator()) == list(range(5))

  @pytest.mark.parametrize("enabled", [True, False])
  def test_its_own_option_is_kept(self, enabled):
    options = tf.data.Options()
    options.autotune.enabled = enabled
    numbers = tf.data.Dataset.range(5).with_options(options)
    assert data_sets.without_autotuning(numbers) is numbers

  def test_what_a_training_reads_is_not_tuned(self, steps, monkeypatch):
    iterated = []
    plain = tf.data.Dataset.__iter__
    monkeypatch.setattr(
      tf.data.Dataset, "__iter__", lambda dataset: iterated.append(dataset) or plain(dataset)
    )
    data = open_data(steps, lambda *_, **__: rows(tf.data.Dataset.range(100)), None, "train", 0)
    first_batch(data)
    list(training_data.reading(tf.data.Dataset.range(5)))
    # Before them may be one that only makes iterators of its epochs.
    assert [d.options().autotune.enabled for d in iterated[-2:]] == [False, False]


class _Numbers:
  """A stream of the batches 0, 1, 2 ..., which ends after so many."""

  def __init__(self, count):
    self.count, self.skipped = count, []

  def skip(self, seen):
    self.skipped.append(seen)

  def calls(self, count, wanted):
    done = 0
    while done < min(count, self.count):
      steps = min(wanted(done), self.count - done)
      yield (tf.range(done, done + steps),)
      done += steps


@pytest.mark.parametrize("agree", [False, True])
@pytest.mark.parametrize(("count", "left"), [(20, 20), (20, 9), (2, 20)])
def test_calls_end_where_they_would_have_and_with_the_data(agree, count, left):
  """Also where all workers agree on how many steps a call has, which here is one worker."""
  stream = _Numbers(left)
  most = iter([4, 1, 4, 4, 2, 4, 4, 4, 4])
  pipeline = SavedPipeline(stream, "input_pipeline", agree, seen=5)
  sizes = [len(x) for (x,) in pipeline.calls(count, 4, lambda: next(most))]
  whole = [4, 1, 3, 4, 2, 2, 4]
  ends = np.minimum(np.cumsum(whole), min(count, left))
  assert sizes == [n for n in np.diff(ends, prepend=0).tolist() if n]
  assert stream.skipped == [5]
