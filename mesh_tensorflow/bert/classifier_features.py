"""Examples of a classifier as numbers."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.bert import records, tokenization
from mesh_tensorflow.bert.classifier_data import InputExample, InputFeatures, PaddingInputExample


def _truncate_seq_pair(tokens_a: list[str], tokens_b: list[str], max_length: int) -> None:
  """Shortens the longer one from its end, in place, until both have room; the second of equals."""
  while len(tokens_a) + len(tokens_b) > max_length:
    (tokens_a if len(tokens_a) > len(tokens_b) else tokens_b).pop()


def convert_single_example(
  ex_index: int,
  example: InputExample | PaddingInputExample,
  label_list: Sequence[str],
  max_seq_length: int,
  tokenizer: tokenization.FullTokenizer,
) -> InputFeatures:
  """[CLS] text_a [SEP], and text_b [SEP] if there is one, as numbers.

  Args:
    ex_index: not used.
    example: the example; padding becomes zeros.
    label_list: the classes, in the order of their numbers.
    max_seq_length: of the result.
    tokenizer: makes WordPieces.

  Raises:
    KeyError: the label is none of the classes.
  """
  del ex_index
  if isinstance(example, PaddingInputExample):
    zeros = [0] * max_seq_length
    return InputFeatures(zeros, list(zeros), list(zeros), 0, is_real_example=False)
  tokens_a = tokenizer.tokenize(example.text_a)
  tokens_b = tokenizer.tokenize(example.text_b) if example.text_b else []
  if tokens_b:
    _truncate_seq_pair(tokens_a, tokens_b, max_seq_length - 3)
  else:
    del tokens_a[max_seq_length - 2 :]
  tokens = ["[CLS]", *tokens_a, "[SEP]"]
  segment_ids = [0] * len(tokens)
  if tokens_b:
    tokens += [*tokens_b, "[SEP]"]
    segment_ids += [1] * (len(tokens_b) + 1)
  filling = [0] * (max_seq_length - len(tokens))
  return InputFeatures(
    tokenizer.convert_tokens_to_ids(tokens) + filling,
    [1] * len(tokens) + filling,
    segment_ids + filling,
    {label: i for i, label in enumerate(label_list)}[str(example.label)],
  )


def convert_examples_to_features(
  examples: Sequence[InputExample | PaddingInputExample],
  label_list: Sequence[str],
  max_seq_length: int,
  tokenizer: tokenization.FullTokenizer,
) -> list[InputFeatures]:
  """As `convert_single_example`, of several."""
  return [
    convert_single_example(i, e, label_list, max_seq_length, tokenizer)
    for i, e in enumerate(examples)
  ]


def file_based_convert_examples_to_features(
  examples: Sequence[InputExample | PaddingInputExample],
  label_list: Sequence[str],
  max_seq_length: int,
  tokenizer: tokenization.FullTokenizer,
  output_file: str,
) -> None:
  """As `convert_single_example`, of several, into a file of records."""
  with tf.io.TFRecordWriter(output_file) as writer:
    for i, example in enumerate(examples):
      feature = convert_single_example(i, example, label_list, max_seq_length, tokenizer)
      writer.write(
        records.example(
          {
            "input_ids": feature.input_ids,
            "input_mask": feature.input_mask,
            "segment_ids": feature.segment_ids,
            "label_ids": [feature.label_id],
            "is_real_example": [int(feature.is_real_example)],
          }
        )
      )
