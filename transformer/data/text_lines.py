"""Readers of lines of text files."""

from __future__ import annotations

from collections.abc import Sequence

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.files import text_files

_MODULE = "mesh_tensorflow.transformer.dataset"


@gin.configurable(module=_MODULE)
@affects("training")
@takes(shuffle_buffer_size=COUNT, prefetch=COUNT_OR_ZERO)
def sample_from_text_line_datasets(
  glob_weight_list: Sequence[tuple[str, float]],
  shuffle_buffer_size: int = 100000,
  prefetch: int = 1000,
) -> tf.data.Dataset:
  """Endless shuffled lines of several sets of text files, mixed by weight.

  Args:
    glob_weight_list: (glob of text files, relative weight) of each set.
    shuffle_buffer_size: in lines, for each set.
    prefetch: in lines, for each set.

  Returns:
    A data set of scalar strings.

  Raises:
    DataError: a glob matches no file.
  """
  if not glob_weight_list:
    raise ConfigError("sample_from_text_line_datasets: glob_weight_list is empty")
  datasets = [
    # Repeated, then shuffled: the buffer is filled once, not anew in each epoch.
    text_files.text_line_dataset(glob).repeat().shuffle(shuffle_buffer_size).prefetch(prefetch)
    for glob, _ in glob_weight_list
  ]
  if len(datasets) == 1:
    return datasets[0]
  total = sum(weight for _, weight in glob_weight_list)
  return tf.data.Dataset.sample_from_datasets(
    datasets, weights=[weight / total for _, weight in glob_weight_list]
  )


@gin.configurable(module=_MODULE)
@affects("training")
def make_text_line_dataset(glob: str = gin.REQUIRED) -> tf.data.Dataset:
  """Endless shuffled lines of the text files of one glob; see `sample_from_text_line_datasets`."""
  return sample_from_text_line_datasets([(glob, 1.0)])


@gin.configurable(module=_MODULE)
@affects("training")
@takes(shuffle_buffer_size=COUNT)
def simple_text_line_dataset(
  glob: str = gin.REQUIRED, shuffle_buffer_size: int = 100000
) -> tf.data.Dataset:
  """The lines of the text files that match a glob: shuffled, each once."""
  return text_files.text_line_dataset(glob).shuffle(shuffle_buffer_size)
