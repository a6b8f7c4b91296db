"""What each of several workers reads: rows of each batch, or a shard; ends, resumption, faults.

The workers of these tests are threads of one process, which meet where processes would.
"""

from __future__ import annotations

import collections
import gzip
import itertools
import shutil
import sys
import threading
import types

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors, workers
from mesh_tensorflow.training import data as training_data
from mesh_tensorflow.training import input_shards
from mesh_tensorflow.training.input_shards import BatchRows, InputShard
from mesh_tensorflow.transformer import dataset as ds
from mesh_tensorflow.transformer.data import pair_rows
from mesh_tensorflow.transformer.data.files import records
from mesh_tensorflow.transformer.training.trainer import open_data
from mesh_tensorflow.transformer.vocabulary import ByteVocabulary
from tests.kinds import in_turns, kept
from tests.transformer import training_program
from tests.transformer import worker_processes as program

LENGTH = training_program.LENGTH
BATCH = training_program.BATCH
# (first row, rows) of each worker.
SPLIT = [(0, 4), (4, 4)]
QUARTERS = [(0, 2), (2, 2), (4, 2), (6, 2)]
REPLICAS = [(0, 4), (0, 4), (4, 4), (4, 4)]
SAME = [(0, 8), (0, 8)]
OVERLAPPING = [(0, 3), (2, 2), (4, 4)]


class Meeting:
  """`workers.gather` between threads."""

  def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch):
    self.size = size
    self.barrier = threading.Barrier(size, timeout=120)
    self.values: dict[int, np.ndarray] = {}
    self.here = threading.local()
    monkeypatch.setattr(workers, "gather", self.gather)
    addresses = tuple(("worker", i, f"host{i}:1") for i in range(size))
    cluster = workers.Cluster(addresses, 0)
    monkeypatch.setattr(workers, "current", lambda: cluster)

  def gather(self, value):
    self.values[self.here.index] = np.asarray(value)
    self.barrier.wait()
    result = np.stack([self.values[i] for i in range(self.size)])
    self.barrier.wait()
    return result

  def run(self, program):
    """The results, or errors, of `program(worker)` in all workers."""
    results = [None] * self.size

    def work(worker):
      self.here.index = worker
      try:
        results[worker] = program(worker)
      except Exception as e:  # noqa: BLE001 - the test looks at it.
        results[worker] = e

    threads = [threading.Thread(target=work, args=[i]) for i in range(self.size)]
    for t in threads:
      t.start()
    for t in threads:
      t.join()
    return results


@pytest.fixture(scope="module")
def steps(cpu_devices):
  return training_program.make_trainer().steps


def of_worker(steps, begin, count):
  """The programs of the model as a worker has them that needs some rows of each batch."""
  impl = steps.mesh_impl.__class__.__new__(steps.mesh_impl.__class__)
  impl.__dict__.update(steps.mesh_impl.__dict__)
  impl.local_part = lambda shape: (
    [begin, *[0] * (shape.ndims - 1)],
    [count, *shape.to_integer_list[1:]],
  )
  return steps.on_mesh(impl)


def batches(data, count, per_call=2):
  """Of each feature that the data has: an array [steps, ...]."""
  calls = [tuple(x.numpy() for x in call) for call in data.calls(count, per_call)]
  return dict(zip(data.names, (np.concatenate(x) for x in zip(*calls))))


def all_workers(monkeypatch, steps, layout, dataset_fn, count, *, vocabulary=None, **options):
  """What each worker gets, if the rows of each are `layout`."""

  def work(worker):
    own = of_worker(steps, *layout[worker])
    return batches(open_data(own, dataset_fn, vocabulary, "train", **options), count)

  return Meeting(len(layout), monkeypatch).run(work)


# ----------------------------------------------------------------- rows of each batch


def test_rows_of_a_batch_by_number():
  for batch, needed in [(5, (0, 1, 4)), (3, (2,)), (1, (0,))]:
    rows = BatchRows(batch, needed)
    expected = [n for n in range(40) if n % batch in needed]
    assert [rows.count(n) for n in range(41)] == [sum(e < n for e in expected) for n in range(41)]
    assert rows.count(-3) == 0
    assert rows.numbers(tf.range(rows.count(40), dtype=tf.int64)).numpy().tolist() == expected
    assert rows.within(-7, 40) == expected
    assert rows.within(9, 23) == [n for n in expected if 9 <= n < 23]


@pytest.fixture
def texts(tmp_path):
  """Readers of a text that know their examples by number."""
  letters = np.random.RandomState(0).choice(list("abcdefghij   \n"), 4000)
  (tmp_path / "text.txt").write_text("".join(letters))
  lines = ["".join(np.random.RandomState(i).choice(list("abcd"), 1 + i % 9)) for i in range(150)]
  (tmp_path / "pairs.tsv").write_text("".join(f"{s}\t{s[::-1]}\n" for s in lines))
  text = {"train_files": str(tmp_path / "text.txt"), "validation_fraction": 0.1}
  pairs = {"files": {s: str(tmp_path / "pairs.tsv") for s in ("train", "validation")}}
  return {
    "windows": (ds.text_lm_dataset, {**text, "mode": "stream", "context_tokens": 2}),
    "documents": (ds.text_lm_dataset, {**text, "document_unit": "line"}),
    "pairs": (ds.parallel_text_dataset, pairs),
    "padded": (ds.parallel_text_dataset, {**pairs, "pack": False}),
  }


KINDS_AND_SKIPS = list(itertools.product(["windows", "documents", "pairs", "padded"], [0, 77]))


@pytest.mark.parametrize(("kind", "skip"), kept(KINDS_AND_SKIPS, in_turns(KINDS_AND_SKIPS)))
def test_a_data_set_of_needed_rows(kind, skip, texts):
  """Those that are needed of all examples, over blocks and epochs, and of finite splits."""
  reader, options = texts[kind]
  for split, count in (("train", 400), ("validation", None)):
    arguments = {
      "sequence_length": LENGTH, "vocabulary": ByteVocabulary(), "dataset_split": split,
      "skip": skip, **options,
    }  # fmt: skip
    whole = list(itertools.islice(reader(**arguments).as_numpy_iterator(), count))
    assert count is None or len(whole) == count
    for rows in (BatchRows(12, (0, 1, 2, 11)), BatchRows(200, (*range(100, 150), 199))):
      part = reader(**arguments, batch_rows=rows)
      assert part.element_spec == reader(**arguments).element_spec
      expected = [ex for i, ex in enumerate(whole) if i % rows.batch in rows.needed]
      found = part.take(len(expected)) if count else part
      found = list(found.as_numpy_iterator())
      assert len(found) == len(expected)
      for a, b in zip(found, expected):
        np.testing.assert_equal(a, b)


@pytest.mark.parametrize("layout", [QUARTERS, SAME, OVERLAPPING])
def test_workers_see_the_batches_of_one(layout, texts, steps, monkeypatch):
  """By default: of a data set that knows its rows by number, and of one that does not."""
  reader, options = texts["documents"]

  def by_number(sequence_length, vocabulary, dataset_split, skip, batch_rows):
    assert (batch_rows is None) == (layout is SAME)
    return reader(
      sequence_length, ByteVocabulary(), skip=skip, batch_rows=batch_rows, **options
    ).map(small)

  def by_number_without_skip(sequence_length, vocabulary, dataset_split, batch_rows):
    return by_number(sequence_length, vocabulary, dataset_split, 0, batch_rows)

  def any_function(sequence_length, vocabulary, dataset_split):
    return reader(sequence_length, ByteVocabulary(), **options).map(small)

  def small(example):
    return {k: v % training_program.VOCAB for k, v in example.items()}

  expected = batches(open_data(steps, any_function, None, "train", 3), 6)
  assert expected["targets"].shape == (6, BATCH, LENGTH)
  for function in (by_number, by_number_without_skip, any_function):
    for shard_input in (False, True):
      if shard_input and function is any_function:
        continue
      parts = all_workers(
        monkeypatch, steps, layout, function, 6, seen_steps=3, shard_input=shard_input
      )
      for (begin, count), part in zip(layout, parts):
        for name, values in expected.items():
          np.testing.assert_array_equal(part[name], values[:, begin : begin + count])


def test_only_needed_rows_are_made(texts, monkeypatch):
  reader, options = texts["padded"]
  made = []
  block = pair_rows._EncodedPairs.block

  def counted(self, rows, packed):
    made.append(len(rows))
    return block(self, rows, packed)

  monkeypatch.setattr(pair_rows._EncodedPairs, "block", counted)
  options |= {
    "sequence_length": LENGTH,
    "vocabulary": ByteVocabulary(),
    "dataset_split": "validation",
  }
  assert len(list(reader(**options, batch_rows=BatchRows(10, (3, 9))))) == sum(made) == 30
  made.clear()
  assert len(list(reader(**options))) == sum(made) == 150


# ------------------------------------------------------------------------------ shards


def write_records(folder, counts, first=1):
  """Files of so many records; each has ids of its own, in a sequence as long as a row."""
  files = []
  for i, count in enumerate(counts):
    files.append(str(folder / f"made-train-{i:05}"))
    with tf.io.TFRecordWriter(files[-1]) as writer:
      for n in range(first, first + count):
        ids = tf.train.Feature(int64_list=tf.train.Int64List(value=[n] * LENGTH))
        example = tf.train.Example(features=tf.train.Features(feature={"targets": ids}))
        writer.write(example.SerializeToString())
    first += count
  return files


def reader_of(files, *, repeat=False, **options):
  """A data set function of the files' records."""

  def dataset_fn(sequence_length, vocabulary, dataset_split):
    return ds.pretokenized_tfrecord_dataset(
      files, True, True, repeat, None, sequence_length, **options
    )

  return dataset_fn


def parts_of(count, dataset_fn):
  return [
    list(input_shards.read_shard(InputShard(count, i), dataset_fn).as_numpy_iterator())
    for i in range(count)
  ]


COUNTS_AND_SIZES = list(
  itertools.product([2, 3, 5], [(4, 4, 4, 4), (3, 7), (9, 2, 5, 5, 1, 6, 6), (11,)])
)


@pytest.mark.parametrize(
  ("count", "sizes"), kept(COUNTS_AND_SIZES, [COUNTS_AND_SIZES[i] for i in (0, 5, 6, 9, 11)])
)
def test_every_record_is_in_one_shard(count, sizes, tmp_path):
  files = write_records(tmp_path, sizes)
  whole = [r for f in files for r in tf.data.TFRecordDataset(f).as_numpy_iterator()]
  for options in ({}, {"skip_damaged": True}):
    parts = parts_of(count, lambda options=options: records.tfrecord_dataset(files, **options))
    assert sorted(itertools.chain(*parts)) == sorted(whole)
  if len(files) % count == 0:  # Whole files.
    shares = [sum(sizes[i::count]) for i in range(count)]
    assert [len(p) for p in parts] == shares
  if len(files) < count:  # As even as can be.
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
  assert input_shards.current() == InputShard(1, 0)


def test_lines_of_plain_and_compressed_files(tmp_path):
  lines = [f"line {i}" for i in range(23)]
  (tmp_path / "a.txt").write_text("\n".join(lines[:5]))
  (tmp_path / "b.txt").write_text("\n".join(lines[5:13]))
  (tmp_path / "c.txt.gz").write_bytes(gzip.compress("\n".join(lines[13:]).encode()))
  glob = str(tmp_path / "*.txt*")
  for count in (2, 3, 4):
    parts = parts_of(count, lambda: ds.simple_text_line_dataset(glob))
    assert sorted(itertools.chain(*parts)) == sorted(x.encode() for x in lines)
    assert min(map(len, parts)) > 0


def test_the_part_of_a_tensorflow_dataset(monkeypatch):
  """TFDS is asked for a part of the split, and to read its files in the same order always."""
  asked = []

  def load(name, split, as_supervised, data_dir, shuffle_files, read_config):
    asked.append((split, read_config.options.deterministic))
    return tf.data.Dataset.from_tensors({"text": "a"})

  def even_splits(split, n):
    return [f"{split} {i} of {n}" for i in range(n)]

  fake = types.SimpleNamespace(load=load, even_splits=even_splits, ReadConfig=types.SimpleNamespace)
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", fake)
  for shard in (InputShard(3, 1), InputShard()):
    input_shards.read_shard(
      shard,
      lambda: ds.untokenized_tfds_dataset(
        "made", True, None, "train", None, 8, ByteVocabulary(), pack=False
      ),
    )
  assert asked == [("train 1 of 3", True), ("train", True)]


def test_a_tensorflow_dataset_is_divided(tmp_path):
  tfds = pytest.importorskip("tensorflow_datasets")
  pytest.importorskip("importlib_resources")  # A part of TFDS that not every installation has.
  texts = [f"text {i:02}" for i in range(11)]
  data = tf.data.Dataset.from_tensor_slices({"text": texts})
  features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
  tfds.dataset_builders.store_as_tfds_dataset(
    name="made", version="1.0.0", features=features, split_datasets={"validation": data},
    data_dir=str(tmp_path), disable_shuffling=True,
  )  # fmt: skip

  def read():
    return ds.untokenized_tfds_dataset(
      "made", True, str(tmp_path), "validation", None, 8, ByteVocabulary(), pack=False
    )

  whole = [ByteVocabulary().decode(x["targets"].tolist()) for x in read().as_numpy_iterator()]
  assert [t[:7] for t in whole] == texts
  parts = parts_of(3, read)
  assert [len(p) for p in parts] == [4, 4, 3]
  found = [ByteVocabulary().decode(x["targets"].tolist()) for x in itertools.chain(*parts)]
  assert sorted(found) == sorted(whole)


@pytest.mark.parametrize("kind", ["windows", "documents", "pairs"])
def test_readers_by_number_inside_other_functions(kind, texts):
  """One that does not take `batch_rows` may call, and mix, those that do."""
  reader, options = texts[kind]
  arguments = {"sequence_length": LENGTH, "vocabulary": ByteVocabulary(), **options}
  whole = list(reader(**arguments).take(40).as_numpy_iterator())
  for index in range(4):
    shard = input_shards.read_shard(InputShard(4, index), lambda: reader(**arguments))
    for a, b in zip(shard.take(10).as_numpy_iterator(), whole[index::4], strict=True):
      np.testing.assert_equal(a, b)


def count_parsing(meeting, monkeypatch):
  """How many records each worker parses; counted while the data is read."""
  parsed = collections.defaultdict(set)
  parse = tf.io.parse_example

  def counted(records, features):
    worker = meeting.here.index  # When it is traced, in the worker's own thread.

    def count(records):
      parsed[worker].update(records.tolist())  # They are repeated.
      return records

    counted = tf.numpy_function(count, [records], tf.string, stateful=True)
    return parse(tf.ensure_shape(counted, [None]), features)

  monkeypatch.setattr(tf.io, "parse_example", counted)
  return parsed


SHARES = [
  (SPLIT, [16] * 4, [32, 32]),
  (SPLIT, [20, 20, 24], [32, 32]),
  (QUARTERS, [64], [16] * 4),
  (REPLICAS, [16] * 4, [32] * 4),
  (SAME, [16] * 4, [64, 64]),
  (OVERLAPPING, [32, 32], [32, 32, 32]),
]


@pytest.mark.parametrize(
  ("layout", "sizes", "shares"), kept(SHARES, [SHARES[i] for i in (1, 2, 3, 5)])
)
def test_a_worker_parses_its_share(layout, sizes, shares, steps, tmp_path, monkeypatch):
  """64 records of a row each in 8 batches: each is seen once, by those who need its row."""
  files = write_records(tmp_path, sizes, first=-31)
  meeting = Meeting(len(layout), monkeypatch)
  parsed = count_parsing(meeting, monkeypatch)

  def work(worker):
    own = of_worker(steps, *layout[worker])
    data = open_data(own, reader_of(files, vocab_shift=100), None, "train", shard_input=True)
    return batches(data, 8)

  parts = meeting.run(work)
  assert [len(parsed[i]) for i in range(len(layout))] == shares
  rows = {}
  for (begin, count), part in zip(layout, parts):
    assert part["targets"].shape == (8, count, LENGTH)
    assert part["targets_segmentation"].all()
    for i in range(count):
      values = part["targets"][:, i, 0].tolist()
      assert rows.setdefault(begin + i, values) == values
  assert sorted(itertools.chain(*rows.values())) == list(range(69, 133))


def test_a_function_that_does_not_ask_gives_each_worker_its_turn(steps, monkeypatch):
  def numbered(sequence_length, vocabulary, dataset_split, skip):
    assert skip == 0  # It cannot know of which shard.
    rows = tf.data.Dataset.range(1, 1000)
    return rows.map(lambda n: {"targets": tf.fill([LENGTH], n)})

  for seen in (0, 2):
    first, second = all_workers(
      monkeypatch, steps, SPLIT, numbered, 3, seen_steps=seen, shard_input=True
    )
    both = np.arange(seen * BATCH + 1, (seen + 3) * BATCH + 1)
    assert first["targets"][..., 0].reshape(-1).tolist() == both[::2].tolist()
    assert second["targets"][..., 0].reshape(-1).tolist() == both[1::2].tolist()


def test_one_worker_reads_all(steps, tmp_path):
  files = write_records(tmp_path, [20, 25])
  plain, sharded = (
    batches(open_data(steps, reader_of(files), None, "train", shard_input=s), 5)
    for s in (False, True)
  )
  assert plain["targets"].shape == (5, BATCH, LENGTH)
  for name, values in plain.items():
    np.testing.assert_array_equal(sharded[name], values)


# ----------------------------------------------------------- ends, faults, resumption


SIZES = {(20, 13): True, (40, 3): False, (9,): True, (1,): False}
SIZES_AND_SAVED = [(*size, saved) for size in SIZES.items() for saved in (False, True)]


@pytest.mark.parametrize(
  ("sizes", "expected", "saved"), kept(SIZES_AND_SAVED, in_turns(SIZES_AND_SAVED))
)
def test_shards_repeat_if_all_have_a_batch(sizes, expected, saved, steps, tmp_path, monkeypatch):
  """No worker begins a step for which another one has no data."""
  files = write_records(tmp_path, sizes)

  def work(worker):
    own = of_worker(steps, *SPLIT[worker])
    data = open_data(own, reader_of(files), None, "train", shard_input=True)
    calls = data.saved_with_checkpoints() if saved else data
    return [len(x[0]) for x in calls.calls(7, 2)]

  assert Meeting(2, monkeypatch).run(work) == [[2, 2, 2, 1] if expected else []] * 2


def test_a_damaged_shard_stops_all(steps, tmp_path, monkeypatch):
  files = write_records(tmp_path, [40, 40])
  with open(files[1], "r+b") as f:
    f.seek(f.seek(0, 2) // 2)
    f.write(b"damaged")

  def work(worker):
    own = of_worker(steps, *SPLIT[worker])
    data = open_data(own, reader_of(files), None, "train", shard_input=True)
    return sum(len(x[0]) for x in records.reading(data.calls(100, 2)))

  first, second = Meeting(2, monkeypatch).run(work)
  assert isinstance(first, errors.DataError) and "worker 1 (host1:1) cannot read the shard" in str(
    first
  )
  assert isinstance(second, errors.DataError) and f"{files[1]}: record" in str(second)


@pytest.mark.parametrize("layout", kept([REPLICAS, OVERLAPPING], [OVERLAPPING]))
def test_training_that_goes_on_sees_what_comes_next(layout, steps, tmp_path, monkeypatch):
  """By examples that are skipped, and by the position that was saved."""
  files = write_records(tmp_path, [20, 13, 6])
  read = reader_of(files, repeat=True)
  names = []

  def work(worker):
    own = of_worker(steps, *layout[worker])

    def make(seen):
      return open_data(own, read, None, "train", seen, shard_input=True)

    whole, skipped = batches(make(0), 20), batches(make(7), 13)
    before = make(0).saved_with_checkpoints()
    assert sum(len(x[0]) for x in before.calls(7, 2)) == 7
    ((name, write),) = before.attachments().items()
    names.append((worker, name))
    write(training_data.checkpoint_lib.attachment(f"{tmp_path}/model.ckpt-{worker}", name))
    after = make(0).saved_with_checkpoints()
    assert after.is_in(f"{tmp_path}/model.ckpt-{worker}")
    after.restore(f"{tmp_path}/model.ckpt-{worker}")
    after.names = [*whole]
    return whole, skipped, batches(after, 13)

  for result in Meeting(len(layout), monkeypatch).run(work):
    assert not isinstance(result, Exception), result
    whole, skipped, restored = result
    for name, values in whole.items():
      assert values.shape[0] == 20
      np.testing.assert_array_equal(skipped[name], values[7:])
      np.testing.assert_array_equal(restored[name], values[7:])
  # Another layout of the input does not take it for its own.
  by_name = collections.defaultdict(set)
  for worker, name in names:
    by_name[name].add(layout[worker])
  assert all(len(rows) == 1 for rows in by_name.values())
  assert not any(name == "input_pipeline" for name in by_name)


@pytest.mark.slow
def test_positions_of_other_layouts_have_other_names(steps, texts, tmp_path, monkeypatch):
  files = write_records(tmp_path, [20, 13])
  reader, options = texts["documents"]

  def by_number(sequence_length, vocabulary, dataset_split, batch_rows):
    return reader(sequence_length, ByteVocabulary(), batch_rows=batch_rows, **options)

  found = []
  for layout, shard_input in itertools.product((SPLIT, QUARTERS), (False, True)):

    def work(worker, layout=layout, shard_input=shard_input):
      own = of_worker(steps, *layout[worker])
      data = open_data(own, reader_of(files), None, "train", shard_input=shard_input)
      return list(data.saved_with_checkpoints().attachments())

    found += itertools.chain(*Meeting(len(layout), monkeypatch).run(work))
  own = of_worker(steps, *SPLIT[0])
  data = open_data(own, by_number, None, "train")
  found += data.saved_with_checkpoints().attachments()
  found += open_data(steps, reader_of(files), None, "train").saved_with_checkpoints().attachments()
  assert len(found) == 14 and len(set(found)) == 14


# -------------------------------------------------------------------- real processes


def sharded(folder, *bindings):
  """Arguments of a training of 2 workers, each with its own rows and its own shard."""
  mesh = program.on_mesh("batch:2", "batch:batch")
  return program.trainer_arguments(folder, *mesh, "TrainingData.shard_input = True", *bindings)


@pytest.mark.long
@pytest.mark.subprocess
@pytest.mark.parametrize(
  "more",
  [
    pytest.param([], id="skipped"),
    pytest.param(["run.checkpoint_input_pipeline = True"], id="saved"),
  ],
)
def test_two_workers_train_on_shards_and_go_on(tmp_path, more):
  """Records that repeat, shuffled; stopped and gone on with, by skipping and by position."""
  generator = np.random.default_rng(0)
  for i in range(3):
    with tf.io.TFRecordWriter(str(tmp_path / f"made-train-{i:05}")) as writer:
      for n in generator.integers(3, 16, [17]):
        ids = tf.train.Feature(int64_list=tf.train.Int64List(value=[*range(2, n), 1]))
        example = tf.train.Example(features=tf.train.Features(feature={"targets": ids}))
        writer.write(example.SerializeToString())
  records = [
    "run.train_dataset_fn = @dataset.pretokenized_t2t_dataset",
    "dataset.pretokenized_t2t_dataset.dataset_name = 'made'",
    "dataset.pretokenized_t2t_dataset.text2self = True",
    f"dataset.pretokenized_t2t_dataset.data_dir = '{tmp_path}'",
  ]
  # Where the position is saved, batches do not go over the end of an epoch: another order.
  whole, folder = tmp_path / "whole", tmp_path / "gone_on"
  program.run(2, sharded(whole, *records, *more))
  assert sorted(program.losses(whole)) == list(range(1, 9))
  for i in range(2):
    positions = list(whole.glob(f"*-8.with-input_pipeline_shard_{i}_of_2_*-0000{i}.index"))
    assert len(positions) == len(more)
  shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*-8.*", "events*"))
  program.run(2, sharded(folder, *records, *more))
  assert sorted(program.losses(folder)) == list(range(5, 9))
  assert program.checkpoint_values(folder, 8) == program.checkpoint_values(whole, 8)


@pytest.mark.long
@pytest.mark.subprocess
def test_two_workers_repeat_their_shards(tmp_path):
  """One shard has data for a step more than the other: each is repeated when it ends."""
  lines = ["to be or\tnot to be"] * 30
  (tmp_path / "a.tsv").write_text("\n".join(lines[:12]))
  (tmp_path / "b.tsv").write_text("\n".join(lines[:25]))
  bindings = [
    "run.model_type = 'delimited_lm'",
    "run.train_dataset_fn = @dataset.packed_parallel_tsv_dataset",
    "packed_parallel_tsv_dataset.dataset = @dataset.simple_text_line_dataset()",
    f"simple_text_line_dataset.glob = '{tmp_path}/*.tsv'",
    "pack_or_pad.pack = False",
    "Unitransformer.max_length = 32",
  ]
  out = program.run(2, sharded(tmp_path / "model", *bindings))
  assert out.count("begins anew") == 1
  assert sorted(program.losses(tmp_path / "model")) == list(range(1, 9))
