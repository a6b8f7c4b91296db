"""Data sets: packing against a plain Python packer, padding, encoding, readers."""

from __future__ import annotations

import inspect
import sys
import types

import gin
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import dataset as ds
from mesh_tensorflow.transformer.data import packing
from mesh_tensorflow.transformer.vocabulary import ByteVocabulary, CharacterVocabulary


def make(examples, dtype=tf.int64):
  """A data set of dicts of sequences of different lengths."""
  keys = list(examples[0])
  return tf.data.Dataset.from_generator(
    lambda: iter(examples), output_signature={k: tf.TensorSpec([None], dtype) for k in keys}
  )


def rows(dataset):
  return [{k: np.asarray(v).tolist() for k, v in r.items()} for r in dataset.as_numpy_iterator()]


def packed_in_python(examples, lengths):
  """The algorithm of pack_dataset, token by token."""
  result = []
  size = max(lengths.values())

  def close(row):
    flat = {}
    for k, n in lengths.items():
      ids, position = row[k]
      ids, position = ids + [0] * (n - len(ids)), position + [0] * (n - len(position))
      count, segments = 0, []
      for i, p in zip(ids, position):
        count += p == 0
        segments.append(count if i else 0)
      flat.update({k: ids, k + "_position": position, k + "_segmentation": segments})
    result.append(flat)

  for g in range(0, len(examples), size):
    row = {k: ([], []) for k in lengths}
    for example in examples[g : g + size]:
      cut = {k: list(example[k])[:n] for k, n in lengths.items()}
      cut = {k: v[: np.count_nonzero(v)] for k, v in cut.items()}
      if any(len(row[k][0]) + len(cut[k]) > n for k, n in lengths.items()):
        close(row)
        row = {k: ([], []) for k in lengths}
      for k, v in cut.items():
        row[k][0].extend(v)
        row[k][1].extend(range(len(v)))
    close(row)
  return result


# ---------------------------------------------------------------------------- packing


def test_two_examples_in_one_row():
  examples = [
    {"inputs": [7, 8, 5, 1], "targets": [3, 9, 1]},
    {"inputs": [8, 4, 9, 3, 1], "targets": [4, 1]},
  ]
  assert rows(ds.pack_dataset(make(examples), length=10)) == [
    {
      "inputs": [7, 8, 5, 1, 8, 4, 9, 3, 1, 0],
      "inputs_segmentation": [1, 1, 1, 1, 2, 2, 2, 2, 2, 0],
      "inputs_position": [0, 1, 2, 3, 0, 1, 2, 3, 4, 0],
      "targets": [3, 9, 1, 4, 1, 0, 0, 0, 0, 0],
      "targets_segmentation": [1, 1, 1, 2, 2, 0, 0, 0, 0, 0],
      "targets_position": [0, 1, 2, 0, 1, 0, 0, 0, 0, 0],
    }
  ]


def test_truncation_fills_two_rows():
  examples = [
    {"inputs": [7, 8, 5, 6, 9, 4, 1], "targets": [3, 9, 1]},
    {"inputs": [8, 4, 9, 3, 1], "targets": [4, 1]},
  ]
  packed = rows(ds.pack_dataset(make(examples), length={"inputs": 5, "targets": 4}))
  assert [r["inputs"] for r in packed] == [[7, 8, 5, 6, 9], [8, 4, 9, 3, 1]]
  assert [r["targets"] for r in packed] == [[3, 9, 1, 0], [4, 1, 0, 0]]


def test_inner_zero_costs_the_tail():
  packed = rows(ds.pack_dataset(make([{"x": [5, 0, 7, 1]}]), length=6))
  assert packed == [
    {
      "x": [5, 0, 7, 0, 0, 0],
      "x_position": [0, 1, 2, 0, 0, 0],
      "x_segmentation": [1, 0, 1, 0, 0, 0],
    }
  ]


def test_example_empty_in_one_key_shifts_its_numbering():
  examples = [{"inputs": [], "targets": [3, 1]}, {"inputs": [4, 1], "targets": [5, 1]}]
  (row,) = rows(ds.pack_dataset(make(examples), length=5))
  assert row["inputs_segmentation"] == [1, 1, 0, 0, 0]
  assert row["targets_segmentation"] == [1, 1, 2, 2, 0]


def test_packing_stays_inside_groups_of_length_examples():
  packed = rows(ds.pack_dataset(make([{"x": [i + 2]} for i in range(7)]), length=3))
  assert [r["x"] for r in packed] == [[2, 3, 4], [5, 6, 7], [8, 0, 0]]
  packed = rows(ds.pack_dataset(make([{"x": [2, 1]}] * 4), length=3))
  assert [r["x"] for r in packed] == [[2, 1, 0]] * 4


def test_group_of_empty_examples_gives_one_empty_row():
  packed = rows(ds.pack_dataset(make([{"x": []}, {"x": []}]), length=2))
  assert packed == [{"x": [0, 0], "x_position": [0, 0], "x_segmentation": [0, 0]}]


def test_empty_dataset_stays_empty():
  assert rows(ds.pack_dataset(make([{"x": [1]}]).take(0), length=2)) == []


def test_unneeded_features_are_dropped_and_outputs_are_int32():
  dataset = make([{"x": [3, 1], "y": [4, 1]}], dtype=tf.int16)
  packed = ds.pack_dataset(dataset, length={"x": 4, "z": 9}, keys=["x"], use_custom_ops=True)
  assert packed.element_spec == {
    k: tf.TensorSpec([4], tf.int32) for k in ("x", "x_segmentation", "x_position")
  }
  assert rows(packed)[0]["x"] == [3, 1, 0, 0]


sequences = st.lists(st.integers(0, 5), max_size=7)


@hypothesis.given(
  st.lists(st.tuples(sequences, sequences), max_size=20), st.integers(1, 6), st.integers(1, 6)
)
def test_packing_equals_the_python_packer(examples, a, b):
  examples = [{"inputs": x, "targets": y} for x, y in examples]
  lengths = {"inputs": a, "targets": b}
  dataset = make(examples or [{"inputs": [], "targets": []}]).take(len(examples))
  assert rows(ds.pack_dataset(dataset, lengths)) == packed_in_python(examples, lengths)


@hypothesis.given(st.lists(st.integers(1, 6), max_size=40))
def test_row_ends_equal_the_python_packer(sizes):
  expected = packed_in_python([{"x": [1] * n} for n in sizes], {"x": 6})
  counts = [max(r["x_segmentation"]) for r in expected]
  assert packing.choose_row_ends(sizes, 6).tolist() == np.cumsum(counts).tolist()


def test_packing_errors():
  dataset = make([{"x": [1]}])
  with pytest.raises(errors.DataError, match=r"no feature \['z'\]; the features are \['x'\]"):
    ds.pack_dataset(dataset, 4, keys=["z"])
  with pytest.raises(ValueError, match="'x'.*int64 of shape"):
    ds.pack_dataset(dataset.batch(2), 4)
  with pytest.raises(errors.DataError, match="string"):
    ds.pack_dataset(tf.data.Dataset.from_tensors({"x": ["a"]}), 4)
  with pytest.raises(errors.DataError, match="no length is given for feature 'x'"):
    ds.pack_dataset(dataset, {"y": 4})
  with pytest.raises(errors.DataError, match="dicts"):
    ds.pack_dataset(tf.data.Dataset.range(3), 4)


# ---------------------------------------------------------------------------- padding


def test_pack_or_pad_packs_or_pads():
  dataset = make([{"x": [2, 3], "y": [4]}, {"x": [5, 6, 7, 8], "y": [9]}])
  padded = rows(ds.pack_or_pad(dataset, 3, pack=False, feature_keys=["x"]))
  assert padded == [{"x": [2, 3, 0], "y": [4]}, {"x": [5, 6, 7], "y": [9]}]
  padded = rows(ds.pack_or_pad(dataset, 3, pack=False, ensure_eos=True))
  assert padded == [{"x": [2, 3, 0], "y": [4, 0, 0]}, {"x": [5, 6, 1], "y": [9, 0, 0]}]
  padded = rows(ds.pack_or_pad(dataset, {"x": 4, "y": 1}, pack=False, ensure_eos=["x"]))
  assert padded == [{"x": [2, 3, 0, 0], "y": [4]}, {"x": [5, 6, 7, 1], "y": [9]}]
  packed = rows(ds.pack_or_pad(dataset, 6, feature_keys=["x"], ensure_eos=True))
  assert [r["x"] for r in packed] == [[2, 3, 5, 6, 7, 1]]
  assert packed[0]["x_segmentation"] == [1, 1, 2, 2, 2, 2]


def test_trim_and_pad_any_rank_and_dtype():
  example = {
    "f": tf.ones([2, 3], tf.float16),
    "s": tf.constant(["a", "b", "c"]),
    "s2": tf.constant([["a", "b"]]),
    "n": tf.constant(5),
  }
  dataset = tf.data.Dataset.from_tensors(example)
  lengths = {"f": 4, "s": 2, "s2": 2}
  out = ds.trim_and_pad_dataset(dataset, lengths, feature_keys=["f", "s", "s2"])
  assert out.element_spec["f"] == tf.TensorSpec([4, 3], tf.float16)
  (row,) = rows(out)
  assert row["f"] == [[1] * 3] * 2 + [[0] * 3] * 2
  assert row["s"] == [b"a", b"b"]
  assert row["s2"] == [[b"a", b"b"], [b"", b""]]
  assert row["n"] == 5
  with pytest.raises(errors.DataError, match="'n' is a scalar"):
    ds.trim_and_pad_dataset(dataset, 4)


def test_many_examples_are_padded_in_groups():
  """Also rows of ragged tensors, and beside features of any length, which share no group."""
  sequences = [list(range(1, i % 7 + 1)) for i in range(150)]
  padded = [(x + [0] * 4)[:4] for x in sequences]
  ragged = tf.data.Dataset.from_tensor_slices({"x": tf.ragged.constant(sequences)})
  out = ds.trim_and_pad_dataset(ragged, 4)
  assert out.element_spec == {"x": tf.TensorSpec([4], tf.int32)} and out.cardinality() == 150
  assert [r["x"] for r in rows(out)] == padded
  assert [r["x"] for r in rows(ds.trim_and_pad_dataset(out, 4))] == padded
  assert [r["x"] for r in rows(ds.pack_dataset(ragged.skip(1).take(2), 4))] == [[1, 1, 2, 0]]
  mixed = make([{"x": x, "other": x[::-1]} for x in sequences])
  out = rows(ds.trim_and_pad_dataset(mixed, 4, feature_keys=["x"]))
  assert [r["x"] for r in out] == padded and [r["other"][::-1] for r in out] == sequences
  beside = tf.data.Dataset.zip((mixed, tf.data.Dataset.range(150))).map(
    lambda x, n: {"x": x["x"], "n": n}
  )
  out = rows(ds.trim_and_pad_dataset(beside, 4, feature_keys=["x"]))
  assert [r["x"] for r in out] == padded and [r["n"] for r in out] == list(range(150))


def test_ensure_dataset_eos():
  dataset = make([{"x": [2, 7], "y": [7]}, {"x": [2, 0], "y": [1]}, {"x": [1, -4], "y": [2]}])
  out = rows(ds.ensure_dataset_eos(dataset, ["x"]))
  assert [r["x"] for r in out] == [[2, 1], [2, 0], [1, 0]]
  assert [r["y"] for r in out] == [[7], [1], [2]]
  assert [r["y"] for r in rows(ds.ensure_dataset_eos(dataset))] == [[1], [1], [1]]


def test_pad_dataset_with_zeroed_out_examples():
  dataset = tf.data.Dataset.from_tensor_slices({"x": [[1, 2], [3, 4]], "s": ["a", "b"]})
  out = rows(ds.pad_dataset_with_zeroed_out_examples(dataset).take(5))
  assert [r["x"] for r in out] == [[1, 2], [3, 4]] + [[0, 0]] * 3
  assert [r["s"] for r in out] == [b"a", b"b", b"", b"", b""]


# --------------------------------------------------------------------------- encoding


def test_encode_dataset_adds_no_eos():
  dataset = tf.data.Dataset.from_tensors({"inputs": "ab", "targets": "b"})
  out = ds.encode_dataset(dataset, CharacterVocabulary("ab"))
  assert out.element_spec["inputs"].dtype == tf.int32
  assert rows(out) == [{"inputs": [2, 3], "targets": [3]}]


def test_encode_all_features_adds_eos_and_drops_numbers():
  dataset = tf.data.Dataset.from_tensors({"inputs": "ab", "idx": 3})
  out = ds.encode_all_features(dataset, CharacterVocabulary("ab"))
  assert out.element_spec["inputs"].dtype == tf.int64
  assert rows(out) == [{"inputs": [2, 3, 1]}]


def test_supervised_to_dict():
  dataset = tf.data.Dataset.from_tensors(("a", "b"))
  assert rows(ds.supervised_to_dict(dataset, False)) == [{"inputs": b"a", "targets": b"b"}]
  assert rows(ds.supervised_to_dict(dataset, True)) == [{"targets": b"b"}]


# ---------------------------------------------------------------------------- readers


def write_records(path, examples):
  with tf.io.TFRecordWriter(str(path)) as writer:
    for example in examples:
      feature = {
        k: tf.train.Feature(int64_list=tf.train.Int64List(value=v)) for k, v in example.items()
      }
      writer.write(
        tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
      )


def test_pretokenized_t2t_dataset(tmp_path):
  write_records(tmp_path / "ende-dev-00000", [{"inputs": [5, 6, 1], "targets": [7, 1]}])
  write_records(tmp_path / "ende-dev-00001", [{"inputs": [8, 1], "targets": [9, 1]}])
  kwargs = dict(dataset_name="ende", data_dir=str(tmp_path), sequence_length=8)
  (row,) = rows(ds.pretokenized_t2t_dataset(dataset_split="dev", **kwargs))
  assert row["inputs"] == [5, 6, 1, 8, 1, 0, 0, 0]
  assert row["targets_segmentation"] == [1, 1, 2, 2, 0, 0, 0, 0]
  (row,) = rows(
    ds.pretokenized_t2t_dataset(
      dataset_split="dev", text2self=True, eos_included=False, vocab_shift=10, **kwargs
    )
  )
  assert row["targets"] == [17, 11, 1, 19, 11, 1, 0, 0] and "inputs" not in row
  with pytest.raises(errors.DataError, match="no file matches .*ende-train"):
    ds.pretokenized_t2t_dataset(**kwargs)
  write_records(tmp_path / "ende-train-0", [{"inputs": [5, 1], "targets": [7, 1]}])
  endless = ds.pretokenized_t2t_dataset(**{**kwargs, "sequence_length": 2})
  assert [r["inputs"] for r in rows(endless.take(3))] == [[5, 1]] * 3


@pytest.mark.parametrize("eos_included", [True, False])
def test_many_records_are_cut_and_packed(tmp_path, eos_included):
  ids = [list(range(1, i % 11 + 1)) for i in range(150)]
  write_records(tmp_path / "ende-dev-0", [{"inputs": x, "targets": x[::2]} for x in ids])
  found = ds.pretokenized_t2t_dataset(
    dataset_name="ende", data_dir=str(tmp_path), dataset_split="dev", vocab_shift=5,
    eos_included=eos_included, sequence_length={"inputs": 8, "targets": 9},
  )  # fmt: skip
  end = [] if eos_included else [1]
  shifted = [[i + 5 for i in x] for x in ids]
  examples = [{"inputs": x + end, "targets": x[::2] + end} for x in shifted]
  assert rows(found) == packed_in_python(examples, {"inputs": 8, "targets": 9})


@pytest.fixture
def fake_tfds(monkeypatch):
  loaded = {}

  def load(name, split, as_supervised, data_dir, shuffle_files, read_config=None):
    assert not shuffle_files or read_config.options.deterministic
    loaded.update(split=split, data_dir=data_dir, shuffle_files=shuffle_files)
    dataset = loaded["dataset"]
    return dataset.map(lambda ex: (ex["inputs"], ex["targets"])) if as_supervised else dataset

  fake = types.SimpleNamespace(load=load, ReadConfig=types.SimpleNamespace)
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", fake)
  return loaded


def test_pretokenized_tfds_dataset(fake_tfds):
  fake_tfds["dataset"] = make([{"inputs": [4, 5], "targets": [6]}, {"inputs": [7], "targets": [8]}])
  kwargs = dict(dataset_name="x", tfds_data_dir="dir", sequence_length=6)
  (row,) = rows(ds.pretokenized_tfds_dataset(text2self=False, dataset_split="validation", **kwargs))
  assert row["inputs"] == [5, 6, 1, 8, 1, 0]
  assert row["targets"] == [7, 1, 9, 1, 0, 0]
  assert (fake_tfds["data_dir"], fake_tfds["shuffle_files"]) == ("dir", False)
  train = ds.pretokenized_tfds_dataset(text2self=True, dataset_split="train", **kwargs)
  assert set(rows(train.take(1))[0]) == {"targets", "targets_segmentation", "targets_position"}
  assert fake_tfds["shuffle_files"]


def test_untokenized_tfds_dataset(fake_tfds):
  fake_tfds["dataset"] = tf.data.Dataset.from_tensors({"inputs": "a", "targets": "bc"})
  kwargs = dict(
    dataset_name="x",
    tfds_data_dir=None,
    dataset_split="test",
    sequence_length=4,
    vocabulary=CharacterVocabulary("abc"),
  )
  out = rows(ds.untokenized_tfds_dataset(text2self=False, pack=False, **kwargs))
  assert out == [{"inputs": [2, 1, 0, 0], "targets": [3, 4, 1, 0]}]
  # A language model: the text becomes the targets, whatever its name.
  for feature in ("text", "sentence"):
    fake_tfds["dataset"] = tf.data.Dataset.from_tensors({"label": 1, feature: "bc"})
    (row,) = rows(ds.untokenized_tfds_dataset(text2self=True, pack=True, **kwargs))
    assert row["targets"] == [3, 4, 1, 0] and row["targets_position"] == [0, 1, 2, 0]
  fake_tfds["dataset"] = tf.data.Dataset.from_tensors({"de": "a", "en": "b"})
  with pytest.raises(errors.DataError, match=r"text2self needs one text feature.*'de', 'en'"):
    ds.untokenized_tfds_dataset(text2self=True, pack=True, **kwargs)


def test_translation_of_a_tfds_dataset_in_the_other_direction(fake_tfds):
  fake_tfds["dataset"] = tf.data.Dataset.from_tensors({"de": "ab", "en": "c"})
  kwargs = dict(dataset_name="x", tfds_data_dir=None, dataset_split="test")
  vocabularies = (CharacterVocabulary("c"), CharacterVocabulary("ab"))
  read = dict(text2self=False, sequence_length=4, vocabulary=vocabularies, pack=False, **kwargs)
  out = rows(ds.untokenized_tfds_dataset(inputs_feature="en", targets_feature="de", **read))
  assert out == [{"inputs": [2, 1, 0, 0], "targets": [2, 3, 1, 0]}]
  with pytest.raises(errors.ConfigError, match=r"no feature \['fr'\], only \['de', 'en'\]"):
    ds.untokenized_tfds_dataset(inputs_feature="fr", targets_feature="de", **read)
  with pytest.raises(errors.ConfigError, match="name both features or none"):
    ds.untokenized_tfds_dataset(inputs_feature="en", **read)
  (evaluated,) = ds.tfds_eval_datasets(
    3, vocabularies, "test", "x", inputs_feature="en", targets_feature="de", metric_fns=[max]
  )
  assert (evaluated.name, evaluated.metric_fns) == ("test", [max])
  assert rows(evaluated.dataset_fn()) == [
    {
      "inputs": [2, 1, 0],
      "targets": [2, 3, 1],
      "inputs_pretokenized": b"c",
      "targets_pretokenized": b"ab",
    }
  ]
  (row,) = rows(evaluated.dataset_fn(sequence_length={"inputs": 1, "targets": 2}))
  assert (row["inputs"], row["targets"]) == ([1], [2, 1])
  (row,) = rows(evaluated.dataset_fn(sequence_length=None))
  assert row["targets"] == [2, 3, 1]
  texts = ds.tfds_sentences("x", ("en", "de"))
  assert list(texts) == [b"c", b"ab"]


def test_text_line_readers(tmp_path):
  (tmp_path / "a1.txt").write_text("one\ntwo\n")
  (tmp_path / "a2.txt").write_text("three\n")
  (tmp_path / "b.txt").write_text("four\n")
  glob = str(tmp_path / "a*.txt")
  gin.bind_parameter("sample_from_text_line_datasets.shuffle_buffer_size", 20)
  once = [x.decode() for x in ds.simple_text_line_dataset(glob).as_numpy_iterator()]
  assert sorted(once) == ["one", "three", "two"]
  endless = ds.make_text_line_dataset(glob)
  assert endless.element_spec == tf.TensorSpec([], tf.string)
  assert len(list(endless.take(10))) == 10
  mixed = ds.sample_from_text_line_datasets([(glob, 1), (str(tmp_path / "b.txt"), 3)])
  share = sum(x.numpy() == b"four" for x in mixed.take(200)) / 200
  assert 0.6 < share < 0.9
  for reader in (ds.simple_text_line_dataset, ds.make_text_line_dataset):
    with pytest.raises(errors.DataError, match=r"no file matches '.*none\*'"):
      reader(str(tmp_path / "none*"))
  with pytest.raises(errors.ConfigError, match="glob_weight_list is empty"):
    ds.sample_from_text_line_datasets([])


def test_text_lines_of_compressed_files(shared_data):
  lines = ds.simple_text_line_dataset(str(shared_data / "multi30k" / "val.en.gz"))
  assert len(list(lines)) == 1014


@pytest.mark.slow
def test_packed_parallel_tsv_dataset():
  lines = tf.data.Dataset.from_tensor_slices(['ab\t"b', "a\taaaaa", "b\tb"])
  kwargs = dict(dataset_split="train", sequence_length=8)
  (row,) = rows(
    ds.packed_parallel_tsv_dataset(
      dataset=lines,
      vocabulary=(CharacterVocabulary("ab"), CharacterVocabulary('"ab')),
      max_encoded_len=5,
      **kwargs,
    )
  )
  assert row["inputs"] == [2, 3, 1, 3, 1, 0, 0, 0]
  assert row["targets"] == [2, 4, 1, 4, 1, 0, 0, 0]
  out = rows(
    ds.packed_parallel_tsv_dataset(
      dataset=lines, vocabulary=CharacterVocabulary('"ab'), append_eos=False, **kwargs
    )
  )
  assert [r["targets"] for r in out] == [[2, 4, 3, 3, 3, 3, 3, 4]]
  bad = tf.data.Dataset.from_tensors("a\tb\tc")
  with pytest.raises(tf.errors.InvalidArgumentError):
    rows(
      ds.packed_parallel_tsv_dataset(dataset=bad, vocabulary=CharacterVocabulary("abc"), **kwargs)
    )


def test_gin_bindings_reach_the_readers(tmp_path):
  (tmp_path / "t.txt").write_text("ab\tb\n")
  gin.parse_config(
    f"""
    dataset.packed_parallel_tsv_dataset.dataset = @dataset.simple_text_line_dataset()
    dataset.simple_text_line_dataset.glob = "{tmp_path}/*.txt"
    mesh_tensorflow.transformer.dataset.pack_or_pad.pack = False
    dataset.pack_dataset.use_custom_ops = False
    """
  )
  out = ds.packed_parallel_tsv_dataset(
    dataset_split="train", sequence_length=4, vocabulary=ByteVocabulary()
  )
  assert rows(out) == [{"inputs": [100, 101, 1, 0], "targets": [101, 1, 0, 0]}]


@pytest.mark.parametrize(
  "name, signature",
  [
    ("pack_dataset", "dataset, length, keys, use_custom_ops"),
    ("pack_or_pad", "dataset, length, pack, feature_keys, ensure_eos"),
    (
      "packed_parallel_tsv_dataset",
      "dataset, dataset_split, batch_size, sequence_length, vocabulary, append_eos, eos_id, "
      "max_encoded_len",
    ),
    (
      "pretokenized_tfds_dataset",
      "dataset_name, text2self, tfds_data_dir, dataset_split, batch_size, sequence_length, "
      "vocabulary, one_epoch",
    ),
    (
      "untokenized_tfds_dataset",
      "dataset_name, text2self, tfds_data_dir, dataset_split, batch_size, sequence_length, "
      "vocabulary, pack, inputs_feature, targets_feature, one_epoch",
    ),
    (
      "pretokenized_t2t_dataset",
      "dataset_name, text2self, data_dir, dataset_split, batch_size, sequence_length, vocabulary, "
      "eos_included, vocab_shift, one_epoch",
    ),
    (
      "pretokenized_tfrecord_dataset",
      "filenames, text2self, eos_included, repeat, batch_size, sequence_length, vocab_shift, "
      "skip_damaged",
    ),
    ("sample_from_text_line_datasets", "glob_weight_list, shuffle_buffer_size, prefetch"),
    ("EvalDataset", "name, dataset_fn, postprocess_fn, metric_fns"),
  ],
)
def test_signatures(name, signature):
  assert ", ".join(inspect.signature(getattr(ds, name)).parameters) == signature
