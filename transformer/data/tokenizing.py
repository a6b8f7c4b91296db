"""Encodes own files once, into a folder of tokens, which `own_tokens` reads.

Each input file becomes a part of its own, by one of several processes. What is interrupted goes on
with the files that are missing; only at the end the parts are joined, and the metadata is written.
"""

from __future__ import annotations

import array
import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tqdm

from mesh_settings.records import takes_settings
from mesh_tensorflow.checkpoint import folder
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import model_files
from mesh_tensorflow.transformer.data import encoding, sources
from mesh_tensorflow.transformer.data.files import token_folder
from mesh_tensorflow.transformer.data.files.arguments import argument
from mesh_tensorflow.transformer.data.files.documents import Progress
from mesh_tensorflow.transformer.data.files.own_files import OwnFiles
from mesh_tensorflow.transformer.data.files.token_folder import SPLITS, TokenFolder
from mesh_tensorflow.transformer.data.vocabularies import kept, named
from mesh_tensorflow.transformer.data.vocabularies.base import EOS_ID, Vocabulary
from mesh_transformer_cli import untrusted

_LOG = logging.getLogger("mesh_tensorflow")

# Below so many bytes of input, further processes need longer to start than they save.
_FEW_BYTES = 32 << 20
_PARTS = ".parts"
# So many tokens show whether the vocabulary knows the text.
_SAMPLE = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenize(sources.HeldOut):
  """Options of `tokenize`."""

  path: str | Sequence[str] = argument("see `own_text`.")
  output_dir: str = argument("the folder of tokens; it is made.")
  vocabulary: Any = argument(
    "a `Vocabulary`, or the name of one, which is made of the training documents if it is made of "
    "texts; see `named_vocabulary`. It is kept in the folder."
  )
  validation_path: None = None  # No argument.
  validation_fraction: float | None = argument(
    "part of the documents to hold out, 0 to 1; see `own_text`.", sources.HELD_OUT
  )
  processes: int | None = argument(
    "number of processes; None: one per processor, at most one per file.", None
  )
  progress: bool = argument("True to show a progress bar in a terminal.", True)


@takes_settings(Tokenize, ("path", "output_dir", "vocabulary"))
def tokenize(given: dict[str, Any]) -> TokenFolder:
  """Encodes the documents of files, for `own_tokens`; each ends with an EOS.

  Called again after an interruption, it goes on; when all is done, it does nothing.

  {settings}

  Returns:
    What is in the folder.

  Raises:
    ConfigError: a setting is wrong, or the folder holds something else.
    DataError: see `own_text`.
    StorageError: the folder cannot be written.
  """
  options = Tokenize(**given)
  vocabulary, processes = options.vocabulary, options.processes
  source = sources.source("tokenize", options)
  output_dir = _local(options.output_dir)
  if processes is not None and processes < 1:
    raise ConfigError(f"processes (={processes}) must be at least 1")
  made_from = _made_from(source.files, source.fraction, vocabulary)
  if token_folder.is_token_folder(output_dir):
    return _there(output_dir, made_from)
  with model_files.errors_of_writing(output_dir, "tokens", "folder"):
    parts = _parts_folder(output_dir, made_from)
    described, made = _vocabulary(vocabulary, source, parts)
    job = EncodingTask(source.files, source.fraction, made, parts)
    make_parts(job, processes, options.progress)
    tokens = _join(job, output_dir, described, made_from)
    if not tokens.tokens["train"]:
      raise source.nothing("train")
    sample = np.asarray(np.memmap(_path(output_dir, "train"), tokens.dtype, "r")[:_SAMPLE])
    encoding.check_known(sample, made, source.name)
    file = os.path.join(output_dir, token_folder.METADATA)
    folder.write(output_dir, file, tokens.to_json())
    shutil.rmtree(os.path.join(output_dir, _PARTS))
  return tokens


def summary(tokens: TokenFolder) -> str:
  """Summary of a folder of tokens, with the gin bindings for training on it; a few lines."""
  counts = [
    f"{tokens.tokens[s]:,} tokens of {tokens.documents[s]:,} documents {what}"
    for s, what in (("train", "to train on"), ("validation", "held out"))
  ]
  kind, size = tokens.vocabulary["class"], tokens.vocabulary["size"]
  lines = [f"{tokens.path}: {', '.join(counts)}; {kind} of {size:,} ids"]
  lines += [
    "  run.train_dataset_fn = @dataset.own_tokens",
    f"  own_tokens.path = {tokens.path!r}",
  ]
  if not tokens.tokens["validation"]:
    lines.append("  nothing is held out: give another validation_fraction, or smaller documents")
  if tokens.vocabulary["kept"]:
    lines.append(f"  run.vocabulary = 'tokens:{tokens.path}'")
  return "\n".join(lines)


# ------------------------------------------------------------------ what is there already


def _local(path: str) -> str:
  if "://" in os.fspath(path):
    raise ConfigError(f"{path} is not on this machine: tokens are mapped into memory from a disk")
  return os.path.expanduser(os.fspath(path))


def _made_from(files: OwnFiles, fraction: float, vocabulary: Vocabulary | str) -> dict[str, Any]:
  """Fingerprint of the inputs of tokenization (files, forms, vocabulary), JSON-like."""
  stats = [os.stat(p) for p in files.paths if "://" not in p]
  if len(stats) < len(files.paths):
    raise ConfigError("tokenize reads files of this machine: copy them here")
  name = vocabulary if isinstance(vocabulary, str) else kept.describe(vocabulary)
  made_from = {
    "files": [[p, s.st_size, s.st_mtime_ns] for p, s in zip(files.paths, stats)],
    "forms": [dataclasses.asdict(f) for f in files.forms],
    "validation_fraction": fraction,
    "vocabulary": name,
  }
  # As it comes back from a file: tuples are lists there.
  found: dict[str, Any] = json.loads(json.dumps(made_from))
  return found


def _there(output_dir: str, made_from: dict[str, Any]) -> TokenFolder:
  """Reads the tokens of a folder; raises if they were made from other inputs."""
  tokens = token_folder.read(output_dir)
  different = [k for k, v in made_from.items() if tokens.made_from.get(k) != v]
  if different:
    raise ConfigError(
      f"{output_dir} has tokens that were made from other {', '.join(different)}: give another "
      "folder, or remove this one"
    )
  return tokens


def _parts_folder(output_dir: str, made_from: dict[str, Any]) -> str:
  """Makes the folder of the parts; keeps those already made, removes parts of other inputs."""
  parts = os.path.join(output_dir, _PARTS)
  foreign = [_path(output_dir, s) for s in SPLITS if os.path.exists(_path(output_dir, s))]
  if foreign and not os.path.isdir(parts):
    raise ConfigError(f"{foreign[0]} is there, and not of this program: give another folder")
  own = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
  os.makedirs(parts, exist_ok=True)
  for name in os.listdir(parts):
    if name != own:
      _LOG.info("%s: what was made for other files or settings is removed", output_dir)
      shutil.rmtree(os.path.join(parts, name))
  path = os.path.join(parts, own)
  os.makedirs(path, exist_ok=True)
  return path


def _vocabulary(
  vocabulary: Vocabulary | str, source: sources.Source, parts: str
) -> tuple[dict[str, Any], Any]:
  """Makes the vocabulary, or loads it if an interrupted run had; returns (description, it)."""
  note = os.path.join(parts, "vocabulary.json")
  if os.path.exists(note):
    with open(note, "rb") as f:
      described = untrusted.expect(untrusted.parse(f.read()), {"kept": str})
    if described["kept"] == "file":
      return described, named.load_any(os.path.join(parts, token_folder.VOCABULARY))

  def texts(feature: str | None) -> Iterator[str]:
    del feature
    return (texts[0] for _, texts in source.documents("train"))

  made = named.resolve(vocabulary, texts)
  made = made[1] if isinstance(made, tuple) else made
  described = named.save_beside(made, parts)
  folder.write(parts, note, json.dumps(described).encode())
  return described, made


# ------------------------------------------------------------------------ parts, by processes


@dataclasses.dataclass(frozen=True)
class EncodingTask:
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


def _make_part(job: EncodingTask, number: int, read: Progress) -> None:
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


def make_parts(job: EncodingTask, processes: int | None, progress: bool) -> None:
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


def _can_be_sent(job: EncodingTask) -> bool:
  """True if the job, with its vocabulary, can be pickled for other processes."""
  try:
    pickle.dumps(job)
  except Exception as e:  # noqa: BLE001 - of any kind, by the vocabulary's own code.
    _LOG.info("one process encodes: the vocabulary cannot be sent to others (%s)", e)
    return False
  return True


def _in_processes(
  job: EncodingTask, numbers: Sequence[int], count: int, update: Callable[[int], object]
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


def _begin_process(job: EncodingTask, queue: Any) -> None:
  _here[:] = job, queue


def _make_part_here(number: int) -> None:
  job, queue = _here
  _make_part(job, number, queue.put)


# ------------------------------------------------------------------------------ the whole


def _path(output_dir: str, split: str) -> str:
  return os.path.join(output_dir, token_folder.tokens_file(split))


def _join(
  job: EncodingTask, output_dir: str, vocabulary: dict[str, Any], made_from: dict[str, Any]
) -> TokenFolder:
  """Joins the parts in the order of the files, and writes the metadata."""
  numbers = range(len(job.files.paths))
  counts: list[dict[str, list[int]]] = []
  for number in numbers:
    found = job.counts(number)
    if found is None:
      raise DataError(f"{job.path(number, 'json')} is gone: is another process at work there?")
    counts.append(found)
  for split in SPLITS:
    with open(_path(output_dir, split), "wb") as out:
      for number in numbers:
        with open(job.path(number, token_folder.tokens_file(split)), "rb") as part:
          shutil.copyfileobj(part, out, 1 << 22)
      out.flush()
      os.fsync(out.fileno())
    begin = 0
    with open(os.path.join(output_dir, token_folder.documents_file(split)), "wb") as out:
      for number in numbers:
        begins = np.fromfile(job.path(number, token_folder.documents_file(split)), "<i8")
        out.write((begins + begin).tobytes())
        begin += counts[number][split][0]
      out.flush()
      os.fsync(out.fileno())
  if vocabulary["kept"] == "file":
    names = (os.path.join(p, token_folder.VOCABULARY) for p in (job.parts, output_dir))
    shutil.copyfile(*names)
  total = {s: [sum(c[s][i] for c in counts) for i in (0, 1)] for s in SPLITS}
  return TokenFolder(
    output_dir,
    job.dtype,
    vocabulary,
    tokens={s: total[s][0] for s in SPLITS},
    documents={s: total[s][1] for s in SPLITS},
    made_from=made_from,
  )
