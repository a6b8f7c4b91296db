"""Training data that ends is repeated, and what was seen is left out by arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.training import data as training_data
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.training.trainer import open_data
from tests.transformer import training_program as program

pytestmark = pytest.mark.usefixtures("without_attention")
BATCH = program.BATCH
ROWS = 20
OF_AN_ERA = ROWS * training_data.EPOCHS_OF_AN_ERA // BATCH


@pytest.fixture(scope="module")
def steps(cpu_devices):
  return program.make_trainer().steps


def row(n):
  return {"targets": tf.fill([program.LENGTH], n + 1)}


def shuffled(sequence_length, vocabulary, dataset_split):
  """Shuffled twice, also by files; its size is known."""
  files = tf.data.Dataset.range(4).shuffle(4, seed=2)
  rows = files.interleave(lambda f: tf.data.Dataset.range(f * 5, f * 5 + 5), cycle_length=2)
  return rows.shuffle(7).apply(tf.data.experimental.assert_cardinality(ROWS)).map(row)


def uncounted(sequence_length, vocabulary, dataset_split):
  """Of a size that TensorFlow does not know; 20 rows of 25."""
  return tf.data.Dataset.range(25).shuffle(9).filter(lambda n: n % 5 > 0).map(row)


def numbered(sequence_length, vocabulary, dataset_split, skip=0):
  return tf.data.Dataset.range(skip, ROWS).map(row)


def numbered_uncounted(sequence_length, vocabulary, dataset_split, skip=0):
  return tf.data.Dataset.range(skip, ROWS).filter(lambda n: True).map(row)


def of_rows(sequence_length, vocabulary, dataset_split, batch_rows=None):
  assert batch_rows is None or isinstance(batch_rows, BatchRows)
  return tf.data.Dataset.range(ROWS).shuffle(9).map(row)


def endless(sequence_length, vocabulary, dataset_split):
  return tf.data.Dataset.range(ROWS).shuffle(9).repeat().map(row)


def batches(data, count, per_call=7):
  """The numbers of the rows, [steps, batch]."""
  calls = [call[0].numpy() for call in data.calls(count, per_call)]
  assert all(len(x) == per_call for x in calls[:-1])
  return np.concatenate(calls).reshape(-1, BATCH, program.LENGTH)[..., 0] - 1


FUNCTIONS = [shuffled, uncounted, numbered, numbered_uncounted, of_rows, endless]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_batch_n_is_the_same_wherever_training_goes_on(function, steps, monkeypatch):
  """Also in the era after the first; of fewer epochs here, as all are read."""
  monkeypatch.setattr(training_data, "EPOCHS_OF_AN_ERA", 20)
  era = ROWS * 20 // BATCH
  whole = batches(open_data(steps, function, None, "train"), era + 20)
  assert whole.shape == (era + 20, BATCH)
  for seen in (1, 2, 33, era - 1, era, era + 9):
    rest = batches(open_data(steps, function, None, "train", seen), 11)
    np.testing.assert_array_equal(rest, whole[seen : seen + 11], err_msg=f"{seen}")


def test_the_order_is_that_of_the_data_set_repeated(steps):
  whole = batches(open_data(steps, shuffled, None, "train"), OF_AN_ERA)
  tf.random.set_seed(steps.mesh_impl.variable_store.seed)
  plain = shuffled({}, None, "train").repeat().batch(BATCH).take(OF_AN_ERA)
  expected = np.stack([x["targets"][:, 0] - 1 for x in plain])
  np.testing.assert_array_equal(whole, expected)
  by_epoch = whole.reshape(-1, ROWS)
  assert (np.sort(by_epoch, 1) == np.arange(ROWS)).all()
  assert len({tuple(order) for order in by_epoch.tolist()}) > 90
  more = batches(open_data(steps, shuffled, None, "train", OF_AN_ERA), OF_AN_ERA)
  assert (more != whole).any()  # Another era has another order.


@pytest.mark.parametrize(
  "function",
  [FUNCTIONS[0], *(pytest.param(f, marks=pytest.mark.long) for f in FUNCTIONS[1:])],
  ids=lambda f: f.__name__,
)
def test_saved_positions_go_on_over_epochs(function, steps, tmp_path):
  def make(seen):
    return open_data(steps, function, None, "train", seen).saved_with_checkpoints()

  whole = batches(make(0), 40)
  pipeline = make(0)
  found = []
  for i, n in enumerate((1, 2, 3, 5, 2, 7, 20)):
    found.append(batches(pipeline, n))
    (write,) = pipeline.attachments().values()
    write(training_data.checkpoint_lib.attachment(f"{tmp_path}/model.ckpt-{i}", "input_pipeline"))
    pipeline = make(1000)
    pipeline.restore(f"{tmp_path}/model.ckpt-{i}")
  np.testing.assert_array_equal(np.concatenate(found), whole)
  np.testing.assert_array_equal(batches(make(9), 11), whole[9:20])  # Without a position.


def test_it_is_said_once_how_many_examples_an_epoch_has(steps):
  said = []
  data = open_data(steps, uncounted, None, "train", say=said.append)
  assert data.examples_in_epoch is None
  batches(data, 40)
  assert data.examples_in_epoch == ROWS
  assert len(said) == 1 and "epoch of 20 examples begins anew" in said[0]


def test_readers_that_repeat_are_asked_for_one_epoch(steps):
  def reader(sequence_length, vocabulary, dataset_split, one_epoch=False):
    dataset = shuffled(sequence_length, vocabulary, dataset_split)
    return dataset if one_epoch else dataset.repeat()

  data = open_data(steps, reader, None, "train", 1_000_000)
  assert data.examples_in_epoch == ROWS
  assert batches(data, 3).shape == (3, BATCH)


def test_seen_examples_are_not_read_one_by_one(steps, tmp_path):
  """A million steps of ten files: an epoch is read to count it, and never again."""
  for i in range(10):
    lines = (f"{i * 370 + j}\n" for j in range(370 + i))
    (tmp_path / f"{i}.tsv").write_text("".join(lines))
  rows = sum(370 + i for i in range(10))
  read = []

  def count(line):
    read.append(line)
    return line

  def files(sequence_length, vocabulary, dataset_split):
    lines = tf.data.TextLineDataset([str(tmp_path / f"{i}.tsv") for i in range(10)])
    lines = lines.map(lambda x: tf.ensure_shape(tf.numpy_function(count, [x], tf.string), []))
    return lines.map(lambda x: row(tf.strings.to_number(x, tf.int32)))

  # An era of 100 epochs has whole batches only.
  first = 1_000_000 % (rows * training_data.EPOCHS_OF_AN_ERA // BATCH) * BATCH
  values = np.array([i * 370 + j for i in range(10) for j in range(370 + i)])
  values = values[[j % rows for j in range(first, first + 3 * BATCH)]]
  ahead = 200 * BATCH  # A call, and what is prefetched.
  said = []
  data = open_data(steps, files, None, "train", 1_000_000, say=said.append)
  np.testing.assert_array_equal(batches(data, 3, 3).reshape(-1), values)
  assert len(read) <= 2 * rows + ahead
  assert "examples seen before" in said[0]
  assert data.examples_in_epoch == rows
  # Counted before, as a checkpoint tells; and also where that is not right any more.
  for told, most in ((rows, rows), (rows - 7, rows), (3 * rows, 2 * rows), (10**9, 2 * rows)):
    read.clear()
    data = open_data(steps, files, None, "train", 1_000_000, examples_in_epoch=told)
    assert batches(data, 3, 3).shape == (3, BATCH)
    assert len(read) <= most + ahead, told


@pytest.mark.slow
def test_a_checkpoint_of_a_million_steps(tmp_path):
  """It knows what an epoch has: of the data less than one is read before the first new step."""
  read = []

  def count(n):
    read.append(n)
    return n

  def counted(sequence_length, vocabulary, dataset_split):
    numbers = tf.data.Dataset.range(3000).filter(lambda n: True)
    seen = numbers.map(lambda n: tf.ensure_shape(tf.numpy_function(count, [n], n.dtype), []))
    return seen.map(lambda n: row(n % 9))

  options = dict(model_dir=str(tmp_path), dropout=False, steps_per_call=50)
  trainer = program.make_trainer(**options)
  trainer.train(counted, 376)
  trainer.state.step = 1_000_000
  trainer.save(asynchronous=False)
  read.clear()
  again = program.make_trainer(**{**options, "steps_per_call": 2})
  again.train(counted, 1_000_002)
  assert len(again.losses) == 2
  assert 0 < len(read) <= 3000 + 100 * BATCH


@pytest.mark.parametrize("count", [0, 1, BATCH - 1])
@pytest.mark.parametrize("seen", [0, 5])
def test_data_without_a_whole_batch_ends_at_once(count, seen, steps):
  def known(sequence_length, vocabulary, dataset_split):
    return tf.data.Dataset.range(count).map(row)

  def unknown(sequence_length, vocabulary, dataset_split):
    return tf.data.Dataset.range(count).filter(lambda n: True).map(row)

  def skipping(sequence_length, vocabulary, dataset_split, skip):
    return tf.data.Dataset.range(min(skip, count), count).map(row)

  def by_rows(sequence_length, vocabulary, dataset_split, batch_rows):
    return tf.data.Dataset.range(count).map(row)

  for function in (known, unknown, skipping, by_rows):
    assert not list(open_data(steps, function, None, "train", seen).calls(5, 2))
    if not seen:  # Of a training that begins.
      with pytest.raises(errors.DataError, match="no complete batch of 8 sequences"):
        program.make_trainer().train(function, 3)


def test_data_that_can_be_read_once_only(steps):
  once = iter(range(ROWS))

  def function(sequence_length, vocabulary, dataset_split):
    numbers = tf.data.Dataset.from_generator(lambda: once, output_types=tf.int32, output_shapes=[])
    return numbers.map(row)

  with pytest.raises(errors.DataError, match="ended after 2 of 10 steps.*read several times"):
    program.make_trainer().train(function, 10)


@pytest.mark.parametrize("lengths", [[5] * 4 * BATCH, [program.LENGTH, 5] * BATCH])
def test_examples_of_other_lengths_than_the_models(lengths, steps):
  """Where the data set does not say how long they are; all of them, or some."""

  def ragged(sequence_length, vocabulary, dataset_split):
    spec = {"targets": tf.TensorSpec([None], tf.int32)}
    rows = lambda: ({"targets": [1] * n} for n in lengths)  # noqa: E731
    return tf.data.Dataset.from_generator(rows, output_signature=spec)

  # Without TensorFlow's graph optimizer batches are made whole first: 8 examples of 5.
  told = r"run.sequence_length says; .* dataset.pack_or_pad .*(\[.*5|tensor with 40 values)"
  with pytest.raises(errors.DataError, match=told) as caught:
    batches(open_data(steps, ragged, None, "train"), 2)
  assert len(str(caught.value).splitlines()) == 1
