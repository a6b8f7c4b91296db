"""The part of the input that a worker reads, and the files that a data set reads."""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.errors import DataError

_NOTED: contextvars.ContextVar[dict[str, None] | None] = contextvars.ContextVar(
  "files_read", default=None
)


def note(paths: Iterable[str]) -> None:
  """Records files as read, inside a block of `noted`; else does nothing.

  To be called while a data set function is called, not later, in its generators and maps.
  """
  noted = _NOTED.get()
  if noted is not None:
    noted.update(dict.fromkeys(paths))


@contextlib.contextmanager
def noted() -> Iterator[dict[str, None]]:
  """Context manager that records files; yields a dict whose keys are their paths, in order."""
  found: dict[str, None] = {}
  token = _NOTED.set(found)
  try:
    yield found
  finally:
    _NOTED.reset(token)


@dataclasses.dataclass(frozen=True)
class BatchRows:
  """The examples of each batch that this worker needs.

  Attributes:
    batch: number of examples in a batch.
    needed: their indices in a batch, in ascending order.
  """

  batch: int
  needed: tuple[int, ...]

  def count(self, examples: int) -> int:
    """Number of needed examples among the first `examples` ones."""
    batches, rest = divmod(max(0, examples), self.batch)
    return batches * len(self.needed) + bisect.bisect_left(self.needed, rest)

  def numbers(self, k: tf.Tensor) -> tf.Tensor:
    """Maps indices of needed examples to their numbers among all examples; int64 of any shape."""
    size = len(self.needed)
    return k // size * self.batch + tf.gather(tf.constant(self.needed, tf.int64), k % size)

  def within(self, begin: int, end: int) -> list[int]:
    """Numbers of the needed examples from `begin` to `end`, negative ones excluded."""
    numbers = np.arange(max(0, begin), end)
    needed: list[int] = numbers[self.mask()[numbers % self.batch]].tolist()
    return needed

  def mask(self) -> np.ndarray:
    """Bool mask [batch] of the needed examples."""
    mask = np.zeros(self.batch, bool)
    mask[list(self.needed)] = True
    return mask


@dataclasses.dataclass(frozen=True)
class InputShard:
  """One of the parts that the input is divided into, as in `tf.distribute.InputContext`.

  Attributes:
    count: number of parts.
    index: the number of this one.
  """

  count: int = 1
  index: int = 0

  def of(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """This part of a data set; every element is in one part."""
    return dataset if self.count == 1 else dataset.shard(self.count, self.index)

  def of_files(
    self, files: Sequence[str], read: Callable[[list[str]], tf.data.Dataset]
  ) -> tf.data.Dataset:
    """This part of the records of files.

    Each part has equally many whole files, as many as there are; of the files that are left over,
    which all parts read, it has its part of the records.

    Args:
      files: paths, the same in all parts.
      read: called with a list of paths, returns a data set of their records, which do not depend
        on each other.
    """
    files = list(files)
    if self.count == 1:
      return read(files)
    # Whole files, where they can be divided: otherwise each worker would read what it then drops.
    border = len(files) - len(files) % self.count
    parts = [read(files[:border][self.index :: self.count])] if border else []
    if border < len(files) or not files:
      parts.append(self.of(read(files[border:])))
    return parts[0] if len(parts) == 1 else parts[0].concatenate(parts[1])

  def rows(self) -> BatchRows | None:
    """The examples of this part by their numbers; None: all."""
    return None if self.count == 1 else BatchRows(self.count, (self.index,))


class _Reading:
  """A shard with a flag that is set when a source has asked for it."""

  def __init__(self, shard: InputShard):
    self.shard = shard
    self.asked = False


_READING: contextvars.ContextVar[_Reading | None] = contextvars.ContextVar("reading", default=None)


def current() -> InputShard:
  """The part that a source of data should read.

  To be asked for while a data set function is called (not later, in its generators and maps). A
  function that asks for it divides all its data by it; of one that does not the trainer takes each
  n-th example. It is all of the data, but in the trainer with `TrainingData.shard_input`.
  """
  reading = _READING.get()
  if reading is None:
    return InputShard()
  reading.asked = True
  return reading.shard


def read_shard(shard: InputShard, dataset_fn: Callable[[], tf.data.Dataset]) -> tf.data.Dataset:
  """A shard of the data set of a function, which may ask for `current()`."""
  if shard.count == 1:
    return dataset_fn()
  reading = _Reading(shard)
  token = _READING.set(reading)
  try:
    dataset = dataset_fn()
  finally:
    _READING.reset(token)
  return dataset if reading.asked else shard.of(dataset)


def divide(rows: np.ndarray) -> tuple[InputShard, np.ndarray]:
  """Divides the input among the workers; every worker calls it.

  Workers that need a row in common have the same shard. The others have different ones, in the
  order of their first rows.

  Args:
    rows: bool [batch], the rows of a batch that this worker needs.

  Returns:
    The shard of this worker; and bool [rows of the batch that come from this shard], those of them
    that this worker needs.
  """
  masks = workers.gather(rows.astype(np.int32)).astype(bool)
  groups: list[np.ndarray] = []
  for mask in np.unique(masks, axis=0):
    # A mask that meets two groups makes one of them: through it, they need rows in common.
    joined = [g for g in groups if (g & mask).any()]
    groups = [g for g in groups if not (g & mask).any()]
    groups.append(np.any([mask, *joined], axis=0))
  groups.sort(key=lambda g: int(np.argmax(g)))
  index = next(i for i, g in enumerate(groups) if (g & rows).any())
  return InputShard(len(groups), index), rows[groups[index]]


def agreed(
  calls: Iterable[tuple[tf.Tensor, ...]], count: int, asked: Callable[[], int]
) -> Iterator[tuple[tf.Tensor, ...]]:
  """Truncates calls to the steps for which all workers have data; a collective generator.

  Args:
    calls: what this worker has read: tensors [steps, ...], `asked()` steps but for the last.
    count: steps in all.
    asked: how many steps the call was to have that was read last, in all workers.

  Raises:
    DataError: another worker cannot read its data.
  """
  calls = iter(calls)
  while count > 0:
    batches: tuple[tf.Tensor, ...] | None = None
    failure: Exception | None = None
    try:
      batches = next(calls, None)
    except Exception as e:  # noqa: BLE001 - it is raised when the others know.
      failure = e
    here = -1 if failure else 0 if batches is None else int(batches[0].shape[0])
    steps = _steps_of_all(here, failure)
    if steps and batches is not None:  # Who has none says 0 or -1.
      yield batches if steps == here else tuple(x[:steps] for x in batches)
    if steps < min(count, asked()):
      return
    count -= steps


def _steps_of_all(here: int, failure: Exception | None) -> int:
  """Smallest number of steps that any worker has read; raises if reading failed in one."""
  counts = workers.gather(np.int32(here))
  if failure is not None:
    raise failure
  failed: list[Any] = np.flatnonzero(counts < 0).tolist()
  if failed:
    raise DataError(
      f"{workers.current().names(failed)} cannot read the shard of the training data that "
      "TrainingData.shard_input gave it; its error says why"
    )
  return int(counts.min())
