"""Language-model data from a folder of tokens: nothing is encoded, only what is used is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import data_seed, input_shards
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.data import own_documents, token_rows
from mesh_tensorflow.transformer.data.packing import Length
from mesh_tensorflow.transformer.files import token_folder
from mesh_tensorflow.transformer.vocabularies import kept


def _texts(feature: str | None) -> Iterator[str]:
  """There are none: the tokens say of which vocabulary they are."""
  del feature
  path = gin.get_bindings(own_tokens).get("path", "FOLDER")
  raise ConfigError(
    f"tokens have their vocabulary: give run.vocabulary = 'tokens:{path}', or tokenize again"
  )


@own_documents.with_texts(_texts)
@gin.configurable(module="mesh_tensorflow.transformer.dataset")
@affects("training")
@takes(context_tokens=COUNT_OR_ZERO, skip=COUNT_OR_ZERO, batch_size=COUNT)
def own_tokens(
  sequence_length: Length,
  vocabulary: Any,
  dataset_split: str = "train",
  path: str = gin.REQUIRED,
  mode: str = "stream",
  order: str = "shuffled",
  context_tokens: int = 0,
  seed: int | None = None,
  skip: int = 0,
  batch_size: int | None = None,
  *,
  batch_rows: BatchRows | None = None,
) -> tf.data.Dataset:
  """Examples for a language model from a folder that `mesh-transformer tokenize` made.

  They are those of `own_text` of the same files and settings. The files are mapped into memory:
  they may be larger than it, and processes of one machine share it.

  Args:
    sequence_length: an int, or a dict with "targets".
    vocabulary: that of the tokens (`run.vocabulary = 'tokens:FOLDER'`); of an (inputs, targets)
      tuple that of targets.
    dataset_split: "train"; any other name means the held-out documents.
    path: the folder.
    mode: see `own_text`.
    order: of training, "shuffled" or "random"; see `own_text`.
    context_tokens: number of ids at the start of a window that are context and are not scored.
    seed: of the order; None: that of the run (`run.seeds`).
    skip: start at this example; what comes before is not read.
    batch_size: has no effect.
    batch_rows: make only the examples that are needed of each batch, the first of which begins at
      `skip`; None: all.

  Returns:
    A data set of dicts of int32 [sequence_length].

  Raises:
    ConfigError: a setting is wrong.
    DataError: there is no such folder, or it is not whole; the split has no tokens, or fewer than a
      window; or the tokens are of another vocabulary.
  """
  del batch_size
  cut = token_rows.Cut(
    token_rows.length_of(sequence_length), mode, order, context_tokens, data_seed.chosen(seed)
  )
  tokens = token_folder.read(path)
  vocabulary = vocabulary[1] if isinstance(vocabulary, tuple) else vocabulary
  given, needed = kept.describe(vocabulary), tokens.vocabulary
  if given["digest"] != needed["digest"]:
    raise DataError(
      f"the tokens of {tokens.path} are of {needed['class']} of {needed['size']} ids, and "
      f"run.vocabulary is another one ({given['class']} of {given['size']}): give run.vocabulary = "
      f"'tokens:{tokens.path}', or tokenize again"
    )
  split = "train" if dataset_split == "train" else "validation"
  sizes = None
  if mode == "packed":
    sizes = np.diff(tokens.map_documents(split), append=tokens.tokens[split])
  return token_rows.dataset(
    tokens.map_tokens(split),
    cut,
    train=split == "train",
    what=f"the {split} split of {tokens.path}",
    document_sizes=sizes,
    skip=skip,
    rows=batch_rows or input_shards.current().rows(),
  )
