"""Parts of a folder of tokens: the documents of a file each, encoded by one or more processes."""

from __future__ import annotations

import array
import concurrent.futures
import dataclasses
import json
import logging
import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tqdm

from mesh_tensorflow.checkpoint import folder
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.transformer.data import encoding
from mesh_tensorflow.transformer.files import token_folder
from mesh_tensorflow.transformer.files.documents import Progress
from mesh_tensorflow.transformer.files.own_files import OwnFiles
from mesh_tensorflow.transformer.files.token_folder import SPLITS
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID
from mesh_transformer_cli import untrusted

_LOG = logging.getLogger("mesh_tensorflow")

# Below so many bytes of input, further processes need longer to start than they save.
_FEW_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Job:
  """The task description that all encoding processes get."""

  files: OwnFiles
  fraction: float
  vocabulary: Any
  parts: str

  @property
  def dtype(self) -> str:
    """dtype of the ids in files."""
    return "uint16" if self.vocabulary.vocab_size <= 2**16 else "uint32"

  def counts(self, number: int) -> dict[str, list[int]] | None:
    """The numbers of tokens and documents of a part, by split; None if it is not done."""
    try:
      with open(self.path(number, "json"), "rb") as f:
        counts: dict[str, list[int]] = untrusted.parse(f.read())
      untrusted.expect(counts, dict.fromkeys(SPLITS, [int]))
      if any(len(counts[split]) != 2 for split in SPLITS):
        return None
      whole = all(
        os.path.getsize(self.path(number, name(split))) == count * size
        for split in SPLITS
        for name, count, size in (
          (token_folder.tokens_file, counts[split][0], np.dtype(self.dtype).itemsize),
          (token_folder.documents_file, counts[split][1], 8),
        )
      )
    except (OSError, ValueError):
      return None
    return counts if whole else None

  def path(self, number: int, name: str) -> str:
    """A file of a part."""
    return os.path.join(self.parts, f"{number}.{name}")


def _make_part(job: Job, number: int, read: Progress) -> None:
  """Encodes one file."""
  begins = {split: array.array("q") for split in SPLITS}
  sizes = dict.fromkeys(SPLITS, 0)
  eos = np.array([EOS_ID], job.dtype).tobytes()
  out = {s: open(job.path(number, token_folder.tokens_file(s)), "wb") for s in SPLITS}
  try:
    for sides in job.files.divided(job.fraction, number, read):
      for split, texts in zip(SPLITS, sides):
        if texts is None:
          continue
        ids = encoding.encode(job.vocabulary, texts[0], job.files.paths[number])
        begins[split].append(sizes[split])
        out[split].write(ids.astype(job.dtype).tobytes())
        out[split].write(eos)
        sizes[split] += len(ids) + 1
  finally:
    for file in out.values():
      file.close()
  for split in SPLITS:
    with open(job.path(number, token_folder.documents_file(split)), "wb") as f:
      np.array(begins[split], "<i8").tofile(f)
  # Last: a part that has it is whole.
  counts = {s: [sizes[s], len(begins[s])] for s in SPLITS}
  folder.write(job.parts, job.path(number, "json"), json.dumps(counts).encode())


def make_parts(job: Job, processes: int | None, progress: bool) -> None:
  """Encodes the files whose parts are not there."""
  bytes_of = {n: os.path.getsize(p) for n, p in enumerate(job.files.paths)}
  missing = [n for n in bytes_of if job.counts(n) is None]
  if len(missing) < len(bytes_of):
    _LOG.info("%d of %d files were encoded before", len(bytes_of) - len(missing), len(bytes_of))
  count = min(len(missing), processes or os.cpu_count() or 1)
  few = processes is None and sum(bytes_of[n] for n in missing) < _FEW_BYTES
  with tqdm.tqdm(
    total=sum(bytes_of.values()),
    initial=sum(bytes_of[n] for n in bytes_of if n not in missing),
    unit="B", unit_scale=True, desc="tokenize", disable=None if progress else True,
  ) as bar:  # fmt: skip
    if count <= 1 or few or not _can_be_sent(job):
      for number in missing:
        _make_part(job, number, bar.update)
    else:
      # The largest first: so none of them is begun when the others are done.
      _in_processes(job, sorted(missing, key=lambda n: -bytes_of[n]), count, bar.update)


def _can_be_sent(job: Job) -> bool:
  """True if the job, with its vocabulary, can be pickled for other processes."""
  try:
    pickle.dumps(job)
  except Exception as e:  # noqa: BLE001 - of any kind, by the vocabulary's own code.
    _LOG.info("one process encodes: the vocabulary cannot be sent to others (%s)", e)
    return False
  return True


def _in_processes(
  job: Job, numbers: Sequence[int], count: int, update: Callable[[int], Any]
) -> None:
  """Encodes files by several processes; the first error ends all."""
  methods = multiprocessing.get_all_start_methods()
  context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
  if "forkserver" in methods:
    # One process imports TensorFlow, and all others are forks of it: this one, which may have
    # threads of TensorFlow that hold locks, cannot be forked.
    context.set_forkserver_preload([__name__])
  queue = context.SimpleQueue()
  with concurrent.futures.ProcessPoolExecutor(
    count, mp_context=context, initializer=_begin_process, initargs=(job, queue)
  ) as pool:
    futures = [pool.submit(_make_part_here, n) for n in numbers]
    left = set(futures)
    try:
      while left:
        done, left = concurrent.futures.wait(left, 0.2, concurrent.futures.FIRST_EXCEPTION)
        while not queue.empty():
          update(queue.get())
        for future in done:
          future.result()
    except concurrent.futures.process.BrokenProcessPool as e:
      raise DataError(
        "a process that encodes files was killed, as the system does when memory is short: call "
        "again with fewer processes; it goes on with the files that are missing"
      ) from e
    finally:
      for future in futures:
        future.cancel()
      # A process that has more to tell than the queue holds would not end.
      while any(future.running() for future in futures):
        concurrent.futures.wait(futures, 0.1)
        while not queue.empty():
          queue.get()


# Of a process that encodes: what it was told, and where it tells how much it has read.
_here: list[Any] = []


def _begin_process(job: Job, queue: Any) -> None:
  _here[:] = job, queue


def _make_part_here(number: int) -> None:
  job, queue = _here
  _make_part(job, number, queue.put)
