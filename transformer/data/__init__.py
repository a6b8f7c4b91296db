"""From texts to examples: what is read, encoded, packed; `dataset.py` has the old names.

    encoding, packing, text_io, text2self   what readers have in common
    text_lines, text_lm, parallel_text, parallel_tsv, tfrecords, tfds_readers   readers
    own_text, own_pairs   text, JSON lines, tables, Parquet: documents, divided by hash
    tokenizing, own_tokens   documents encoded once, into files that are mapped into memory
    own_documents, token_rows   what these have in common
    stdlib_text          files that every machine has
    eval_datasets, bleu   what is evaluated on, and a metric

A reader meant for the trainer takes the keywords `sequence_length`, `vocabulary` and
`dataset_split`; `batch_size` is accepted and has no effect. It yields single examples. If it knows
its examples by number, it takes `skip` and `batch_rows`, too; else its sources read the part of
their records that `input_shards.current()` tells (see `training_data.TrainingData`).

To add one, copy `parallel_tsv.py` and name the file below: gin knows a reader when its file is
imported.
"""

from mesh_tensorflow.transformer.data import (
  bleu,
  eval_datasets,
  own_pairs,
  own_text,
  own_tokens,
  parallel_text,
  parallel_tsv,
  stdlib_text,
  text_lines,
  text_lm,
  tfds_readers,
  tfrecords,
)
