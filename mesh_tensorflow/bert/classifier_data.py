"""Examples of tasks that classify a text, or two, and the files of known ones."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.bert import tokenization
from mesh_tensorflow.errors import DataError, UnsupportedError


class InputExample:
  """A text, or two, to be classified.

  Args:
    guid: names the example.
    text_a: the text.
    text_b: a second one, for tasks on pairs.
    label: its class; None if it is not known.
  """

  def __init__(self, guid: str, text_a: str, text_b: str | None = None, label: str | None = None):
    self.guid = guid
    self.text_a = text_a
    self.text_b = text_b
    self.label = label


class PaddingInputExample:
  """Fills up a batch: an example that does not count."""


class InputFeatures:
  """An example as numbers; attributes are called as the arguments.

  Args:
    input_ids: WordPieces.
    input_mask: 1 for them, 0 for what fills up.
    segment_ids: 0 for the first text, 1 for the second.
    label_id: number of the class.
    is_real_example: whether it counts.
  """

  def __init__(
    self,
    input_ids: Sequence[int],
    input_mask: Sequence[int],
    segment_ids: Sequence[int],
    label_id: int,
    is_real_example: bool = True,
  ):
    self.input_ids = input_ids
    self.input_mask = input_mask
    self.segment_ids = segment_ids
    self.label_id = label_id
    self.is_real_example = is_real_example


class DataProcessor:
  """The files of a task. A subclass defines the methods."""

  def get_train_examples(self, data_dir: str) -> list[InputExample]:
    """The examples to train on."""
    raise NotImplementedError

  def get_dev_examples(self, data_dir: str) -> list[InputExample]:
    """The examples to evaluate on."""
    raise NotImplementedError

  def get_test_examples(self, data_dir: str) -> list[InputExample]:
    """The examples to predict."""
    raise NotImplementedError

  def get_labels(self) -> list[str]:
    """The classes, in the order of their numbers."""
    raise NotImplementedError

  @classmethod
  def _read_tsv(cls, input_file: str, quotechar: str | None = None) -> list[list[str]]:
    """The cells of a file with tabs between them, line by line.

    Raises:
      DataError: it cannot be read.
    """
    try:
      with tf.io.gfile.GFile(input_file, "r") as f:
        # A text may be longer than csv's limit of a cell.
        csv.field_size_limit(2**30)
        if quotechar:
          return list(csv.reader(f, delimiter="\t", quotechar=quotechar))
        return list(csv.reader(f, delimiter="\t", quoting=csv.QUOTE_NONE))
    except tf.errors.NotFoundError as e:
      raise DataError(f"there is no file {input_file}") from e
    except (tf.errors.OpError, UnicodeDecodeError, csv.Error) as e:
      raise DataError(f"cannot read {input_file}: {e}") from e


def _text(line: Sequence[str], column: int, place: str) -> str:
  """A cell.

  Raises:
    DataError: the line has fewer.
  """
  try:
    return tokenization.convert_to_unicode(line[column])
  except IndexError:
    raise DataError(
      f"{place} has {len(line)} columns between tabs, column {column + 1} is needed"
    ) from None


class _Files(DataProcessor):
  """A task with a file for each set, whose columns say what is where.

  Attributes:
    files: names of the files, by set: "train", "dev" and "test".
    labels: the classes.
  """

  files: dict[str, str]
  labels: tuple[str, ...]

  def get_train_examples(self, data_dir: str) -> list[InputExample]:
    return self._examples(data_dir, "train")

  def get_dev_examples(self, data_dir: str) -> list[InputExample]:
    return self._examples(data_dir, "dev")

  def get_test_examples(self, data_dir: str) -> list[InputExample]:
    return self._examples(data_dir, "test")

  def get_labels(self) -> list[str]:
    return list(self.labels)

  def _has_header(self, set_type: str) -> bool:
    raise NotImplementedError

  def _example(self, line: Sequence[str], set_type: str, i: int, place: str) -> InputExample:
    raise NotImplementedError

  def _examples(self, data_dir: str, set_type: str) -> list[InputExample]:
    file = os.path.join(data_dir, self.files[set_type])
    found = []
    for i, line in enumerate(self._read_tsv(file)):
      if line and not (i == 0 and self._has_header(set_type)):
        found.append(self._example(line, set_type, i, f"{file}, line {i + 1},"))
        self._check_label(found[-1].label, f"{file}, line {i + 1}")
    if not found:
      raise DataError(f"{file} has no examples")
    return found

  def _check_label(self, label: object, place: str) -> None:
    if label not in self.labels:
      raise DataError(f"{place}: label {label!r} is not one of {', '.join(self.labels)}")


class ColaProcessor(_Files):
  """CoLA: whether a sentence is acceptable. Label in column 2, text in column 4; test: column 2."""

  files = {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}
  labels = ("0", "1")

  def _has_header(self, set_type: str) -> bool:
    return set_type == "test"

  def _example(self, line: Sequence[str], set_type: str, i: int, place: str) -> InputExample:
    guid = f"{set_type}-{i}"
    if set_type == "test":
      return InputExample(guid, _text(line, 1, place), label="0")
    return InputExample(guid, _text(line, 3, place), label=_text(line, 1, place))


class MrpcProcessor(_Files):
  """MRPC: whether two sentences mean the same. Label in column 1, texts in columns 4 and 5."""

  files = {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}
  labels = ("0", "1")

  def _has_header(self, set_type: str) -> bool:
    del set_type
    return True

  def _example(self, line: Sequence[str], set_type: str, i: int, place: str) -> InputExample:
    a, b = (_text(line, column, place) for column in (3, 4))
    label = "0" if set_type == "test" else _text(line, 0, place)
    return InputExample(f"{set_type}-{i}", a, b, label)


class MnliProcessor(_Files):
  """MultiNLI: what follows from what. Texts in columns 9 and 10, label in the last."""

  files = {"train": "train.tsv", "dev": "dev_matched.tsv", "test": "test_matched.tsv"}
  labels = ("contradiction", "entailment", "neutral")

  def _has_header(self, set_type: str) -> bool:
    del set_type
    return True

  def _example(self, line: Sequence[str], set_type: str, i: int, place: str) -> InputExample:
    a, b = (_text(line, column, place) for column in (8, 9))
    label = "contradiction" if set_type == "test" else _text(line, -1, place)
    return InputExample(f"{set_type}-{_text(line, 0, place)}", a, b, label)


class XnliProcessor(_Files):
  """XNLI: MultiNLI, translated. There is no test set.

  Attributes:
    language: language of the examples.
  """

  files = {"train": os.path.join("multinli", "multinli.train.{}.tsv"), "dev": "xnli.dev.tsv"}
  labels = ("contradiction", "entailment", "neutral")

  def __init__(self) -> None:
    self.language = "zh"

  def get_train_examples(self, data_dir: str) -> list[InputExample]:
    file = os.path.join(data_dir, self.files["train"].format(self.language))
    found = []
    for i, line in enumerate(self._read_tsv(file)):
      if i and line:
        place = f"{file}, line {i + 1}"
        a, b, label = (_text(line, column, f"{place},") for column in range(3))
        found.append(InputExample(f"train-{i}", a, b, label=_xnli_label(label)))
        self._check_label(found[-1].label, place)
    return found

  def get_dev_examples(self, data_dir: str) -> list[InputExample]:
    file = os.path.join(data_dir, self.files["dev"])
    found = []
    for i, line in enumerate(self._read_tsv(file)):
      place = f"{file}, line {i + 1}"
      if i and line and _text(line, 0, f"{place},") == self.language:
        label, a, b = (_text(line, column, f"{place},") for column in (1, 6, 7))
        found.append(InputExample(f"dev-{i}", a, b, label=label))
        self._check_label(label, place)
    return found

  def get_test_examples(self, data_dir: str) -> list[InputExample]:
    raise UnsupportedError(
      "the files of XNLI that this task reads have no test set: leave --do_predict out, --do_eval "
      "takes the development set"
    )


def _xnli_label(label: str) -> str:
  return "contradiction" if label == "contradictory" else label


PROCESSORS: dict[str, type[DataProcessor]] = {
  "cola": ColaProcessor,
  "mnli": MnliProcessor,
  "mrpc": MrpcProcessor,
  "xnli": XnliProcessor,
}
