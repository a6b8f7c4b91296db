"""Data sets for training and evaluation: readers, encoding, packing, padding.

Conventions: id 0 is padding and id 1 ends a sequence (EOS); there is no begin-of-sequence id.
Packed data has, next to a feature `f`, `f_segmentation` (the number of the sequence in its row,
from 1; 0 for padding) and `f_position` (from 0 in each sequence).

A reader meant for the trainer takes the keywords `sequence_length`, `vocabulary` and
`dataset_split`; `batch_size` is accepted and has no effect. It yields single examples. If it knows
its examples by number, it takes `skip` and `batch_rows`, too; else its sources read the part of
their records that `input_shards.current()` tells (see `TrainingData` of
`mesh_tensorflow.training.data`).
"""

from mesh_tensorflow.transformer.data.encoding import (
  encode_all_features,
  encode_dataset,
  supervised_to_dict,
)
from mesh_tensorflow.transformer.data.eval_datasets import (
  EvalDataset,
  parallel_text_eval_datasets,
  text_lm_eval_datasets,
  tfds_eval_datasets,
)
from mesh_tensorflow.transformer.data.packing import (
  ensure_dataset_eos,
  pack_dataset,
  pack_or_pad,
  pad_dataset_with_zeroed_out_examples,
  trim_and_pad_dataset,
)
from mesh_tensorflow.transformer.data.stream_readers import (
  make_text_line_dataset,
  packed_parallel_tsv_dataset,
  pretokenized_t2t_dataset,
  pretokenized_tfds_dataset,
  pretokenized_tfrecord_dataset,
  sample_from_text_line_datasets,
  simple_text_line_dataset,
  tfds_sentences,
  untokenized_tfds_dataset,
)
from mesh_tensorflow.transformer.data.text_readers import (
  own_pairs,
  own_text,
  own_tokens,
  parallel_text_dataset,
  text_lm_dataset,
)
from mesh_tensorflow.transformer.data.tokenizing import tokenize

__all__ = [
  "EvalDataset",
  "encode_all_features",
  "encode_dataset",
  "ensure_dataset_eos",
  "make_text_line_dataset",
  "own_pairs",
  "own_text",
  "own_tokens",
  "pack_dataset",
  "pack_or_pad",
  "packed_parallel_tsv_dataset",
  "parallel_text_dataset",
  "parallel_text_eval_datasets",
  "pad_dataset_with_zeroed_out_examples",
  "pretokenized_t2t_dataset",
  "pretokenized_tfds_dataset",
  "pretokenized_tfrecord_dataset",
  "sample_from_text_line_datasets",
  "simple_text_line_dataset",
  "supervised_to_dict",
  "text_lm_dataset",
  "text_lm_eval_datasets",
  "tfds_eval_datasets",
  "tfds_sentences",
  "tokenize",
  "trim_and_pad_dataset",
  "untokenized_tfds_dataset",
]
