"""Files of classification tasks, and their examples as numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import run_classifier, tokenization
from mesh_tensorflow.errors import UnsupportedError


@pytest.fixture
def tokenizer(tmp_path):
  (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\nb\nc\n##c\n")
  return tokenization.FullTokenizer(tmp_path / "vocab.txt")


def _write(folder, **files):
  for name, lines in files.items():
    path = folder / name.replace("__", "/").replace("_tsv", ".tsv")
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join("\t".join(line) + "\n" for line in lines))


def _of(examples):
  return [(e.guid, e.text_a, e.text_b, e.label) for e in examples]


def test_cola(tmp_path):
  _write(
    tmp_path,
    train_tsv=[["s", "1", "", 'He "ran.'], ["s", "0", "*", "Ran he."]],
    test_tsv=[["index", "sentence"], ["0", "A b."]],
  )
  processor = run_classifier.ColaProcessor()
  assert processor.get_labels() == ["0", "1"]
  assert _of(processor.get_train_examples(str(tmp_path))) == [
    ("train-0", 'He "ran.', None, "1"),
    ("train-1", "Ran he.", None, "0"),
  ]
  assert _of(processor.get_test_examples(str(tmp_path))) == [("test-1", "A b.", None, "0")]
  with pytest.raises(mtf.DataError, match=r"there is no file .*dev.tsv"):
    processor.get_dev_examples(str(tmp_path))


def test_mrpc_and_mnli(tmp_path):
  header = ["h"] * 12
  row = ["1", *"bcdefghijkl"]
  _write(
    tmp_path,
    dev_tsv=[header, row],
    dev_matched_tsv=[header, [*row[:-1], "neutral"]],
    test_matched_tsv=[header, row],
  )
  mrpc = run_classifier.MrpcProcessor().get_dev_examples(str(tmp_path))
  assert _of(mrpc) == [("dev-1", "d", "e", "1")]
  mnli = run_classifier.MnliProcessor()
  assert _of(mnli.get_dev_examples(str(tmp_path))) == [("dev-1", "i", "j", "neutral")]
  assert _of(mnli.get_test_examples(str(tmp_path))) == [("test-1", "i", "j", "contradiction")]
  assert mnli.get_labels() == ["contradiction", "entailment", "neutral"]


def test_xnli(tmp_path):
  dev = ["zh", "entailment", "", "", "", "", "x", "y"]
  _write(
    tmp_path,
    multinli__multinli_train_zh_tsv=[],
    xnli_dev_tsv=[["h"] * 8, dev, ["de", *dev[1:]]],
  )
  (tmp_path / "multinli").mkdir(exist_ok=True)
  (tmp_path / "multinli" / "multinli.train.zh.tsv").write_text("p\th\tl\nx\ty\tcontradictory\n")
  (tmp_path / "xnli_dev.tsv").rename(tmp_path / "xnli.dev.tsv")
  processor = run_classifier.XnliProcessor()
  assert _of(processor.get_train_examples(str(tmp_path))) == [
    ("train-1", "x", "y", "contradiction")
  ]
  assert _of(processor.get_dev_examples(str(tmp_path))) == [("dev-1", "x", "y", "entailment")]
  with pytest.raises(UnsupportedError, match="leave --do_predict out"):
    processor.get_test_examples(str(tmp_path))


@pytest.mark.parametrize(
  ("lines", "message"),
  [
    ([["s", "2", "", "x"]], "line 1: label '2' is not one of 0, 1"),
    ([["s", "1", "", "x"], ["s", "1"]], "line 2, has 2 columns between tabs, column 4 is needed"),
    ([], "has no examples"),
  ],
)
def test_wrong_files(tmp_path, lines, message):
  _write(tmp_path, train_tsv=lines)
  with pytest.raises(mtf.DataError, match=message):
    run_classifier.ColaProcessor().get_train_examples(str(tmp_path))


def test_an_example_as_numbers(tokenizer):
  def convert(text_a, text_b=None, length=8):
    example = run_classifier.InputExample("x", text_a, text_b, "yes")
    f = run_classifier.convert_single_example(0, example, ["no", "yes"], length, tokenizer)
    assert (f.label_id, f.is_real_example) == (1, True)
    return f.input_ids, f.input_mask, f.segment_ids

  assert convert("a bc") == ([2, 4, 5, 7, 3, 0, 0, 0], [1] * 5 + [0] * 3, [0] * 8)
  assert convert("a", "b z") == (
    [2, 4, 3, 5, 1, 3, 0, 0], [1] * 6 + [0] * 2, [0, 0, 0, 1, 1, 1, 0, 0]
  )  # fmt: skip
  assert convert("a " * 9)[0] == [2, *[4] * 6, 3]
  # Of a pair the longer one is cut; of equals the second.
  assert convert("a " * 4, "b " * 3)[0] == [2, 4, 4, 4, 3, 5, 5, 3]
  padding = run_classifier.convert_single_example(
    0, run_classifier.PaddingInputExample(), ["x"], 4, tokenizer
  )
  assert padding.input_ids == padding.input_mask == padding.segment_ids == [0] * 4
  assert not padding.is_real_example
  with pytest.raises(KeyError):
    run_classifier.convert_single_example(
      0, run_classifier.InputExample("x", "a", label="?"), ["x"], 4, tokenizer
    )


def test_batches_of_files_and_of_memory(tmp_path, tokenizer):
  examples = [run_classifier.InputExample(str(i), "a " * (i % 3), label="x") for i in range(5)]
  file = str(tmp_path / "records")
  run_classifier.file_based_convert_examples_to_features(examples, ["x"], 6, tokenizer, file)
  features = run_classifier.convert_examples_to_features(examples, ["x"], 6, tokenizer)
  from_file = run_classifier.file_based_input_fn_builder(file, 6, False, False)({"batch_size": 2})
  in_memory = run_classifier.input_fn_builder(features, 6, False, False)({"batch_size": 2})
  batches = list(zip(from_file.as_numpy_iterator(), in_memory.as_numpy_iterator()))
  assert [len(b["label_ids"]) for b, _ in batches] == [2, 2, 1]
  for a, b in batches:
    assert a.pop("is_real_example").all()
    assert all(x.dtype == np.int32 for x in a.values())
    tf.nest.map_structure(np.testing.assert_array_equal, a, b)


def test_training_goes_on_where_it_ended(tmp_path, tokenizer):
  rng = np.random.default_rng(0)
  texts = [" ".join(rng.choice(["a", "b", "c"], 4)) for _ in range(30)]
  examples = [run_classifier.InputExample("", t, label="x") for t in texts]
  file = str(tmp_path / "records")
  run_classifier.file_based_convert_examples_to_features(examples, ["x"], 6, tokenizer, file)
  input_fn = run_classifier.file_based_input_fn_builder(file, 6, True, True)

  def ids(count, **params):
    dataset = input_fn({"batch_size": 4, **params}).take(count)
    return [b["input_ids"].tolist() for b in dataset.as_numpy_iterator()]

  whole = ids(20, seed=3)
  assert ids(10, seed=3, first_step=10) == whole[10:]
  assert ids(20, seed=4) != whole
