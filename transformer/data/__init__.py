"""From texts to examples: what is read, encoded, packed; `dataset.py` has the old names.

    files, vocabularies  what is read, and by which worker; text to ids
    options              arguments of readers, each declared once, and `reader`, which takes them
    sources              documents and pairs of files, and what of them is held out
    encoding, packing    text to ids; sequences to rows
    token_rows, pair_rows   rows that are found by their number
    text_readers         readers of these: own_text, own_tokens, text_lm, own_pairs, parallel_text
    stream_readers       readers of records that come in order: lines, TFRecords, TFDS
    tokenizing           documents encoded once, into files that are mapped into memory
    stdlib_text          files that every machine has
    eval_datasets, bleu  what is evaluated on, and a metric
    seqio_tasks          tasks of seqio, under T5's names
    text_io, text2self   prompts and samples; inputs and targets as one sequence

A reader meant for the trainer takes the keywords `sequence_length`, `vocabulary` and
`dataset_split`; `batch_size` is accepted and has no effect. It yields single examples. If it knows
its examples by number, it takes `skip` and `batch_rows`, too; else its sources read the part of
their records that `input_shards.current()` tells (see `TrainingData` of
`mesh_tensorflow.training.data`).

To add one, copy a reader of `stream_readers.py`; its file is named below, as gin knows a reader
when its file is imported.
"""

from mesh_tensorflow.transformer.data import (
  bleu,
  eval_datasets,
  stdlib_text,
  stream_readers,
  text_readers,
)
