"""How fast `own_tokens` reads, beside a loop over np.memmap: `python -m benchmarks.token_files`.

The loop is what small trainers have: random windows of a mapped file, copied into a batch. Both
sides take turns; the file is in the page cache. What is printed is the median of the rounds, and
how long the first batch takes at step 0 and at step 1,000,000.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np

from mesh_tensorflow.transformer import dataset, vocabulary
from mesh_tensorflow.transformer.data.files.token_folder import TokenFolder
from mesh_tensorflow.transformer.data.vocabularies import kept

BATCH = 16


def write_tokens(folder: str, count: int) -> None:
  """A folder of random tokens, in documents of about 500."""
  rng = np.random.default_rng(0)
  begins = np.zeros(1, "<i8")
  ids = rng.integers(3, 259, count, dtype=np.uint16)
  ids[rng.integers(0, count, count // 500)] = 1
  ids.astype("<u2").tofile(os.path.join(folder, "train.bin"))
  begins.tofile(os.path.join(folder, "train.documents.bin"))
  described = {**kept.describe(vocabulary.ByteVocabulary()), "kept": "bytes"}
  counts = ({"train": count, "validation": 0}, {"train": 1, "validation": 0})
  with open(os.path.join(folder, "tokens.json"), "wb") as f:
    f.write(TokenFolder(folder, "uint16", described, *counts, {}).to_json())


def plain(folder: str, length: int) -> Iterator[np.ndarray]:
  """Batches of random windows, by NumPy alone."""
  tokens = np.memmap(os.path.join(folder, "train.bin"), "<u2", "r")
  rng = np.random.default_rng(1)
  while True:
    begins = rng.integers(0, len(tokens) - length, BATCH)
    yield np.stack([tokens[b : b + length].astype(np.int32) for b in begins])


def ours(folder: str, length: int, skip: int = 0, **kwargs: str) -> Iterator[object]:
  """Batches of the reader."""
  rows = dataset.own_tokens(length, vocabulary.ByteVocabulary(), path=folder, skip=skip, **kwargs)
  return iter(rows.batch(BATCH).prefetch(2))


def seconds_of(batches: Iterator[object], steps: int) -> tuple[float, float]:
  """Seconds that pass, and seconds of processors."""
  started = time.perf_counter(), time.process_time()
  for _ in itertools.islice(batches, steps):
    pass
  return time.perf_counter() - started[0], time.process_time() - started[1]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--tokens", type=int, default=100_000_000)
  parser.add_argument("--length", type=int, default=1024)
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument("--rounds", type=int, default=5)
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    write_tokens(folder, arguments.tokens)
    sides: dict[str, Callable[[], Iterator[object]]] = {
      "np.memmap": lambda: plain(folder, arguments.length),
      "own_tokens, random": lambda: ours(folder, arguments.length, order="random"),
      "own_tokens, shuffled": lambda: ours(folder, arguments.length),
      "own_tokens, documents": lambda: ours(folder, arguments.length, mode="documents"),
    }
    running = {name: make() for name, make in sides.items()}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for batches in running.values():
      seconds_of(batches, 20)
    for name in [*sides] * arguments.rounds:
      seconds = seconds_of(running[name], arguments.steps)
      millions = arguments.steps * BATCH * arguments.length / 1e6
      rates[name].append((millions / seconds[0], millions / seconds[1]))
    for name, found in rates.items():
      passed, computed = (statistics.median(values) for values in zip(*found))
      print(f"{name:24} {passed:6.1f} million tokens/s; {computed:6.1f} in a second of a processor")
    for step in (0, 1_000_000):
      seconds, _ = seconds_of(ours(folder, arguments.length, skip=step * BATCH), 1)
      print(f"first batch at step {step:9,}: {seconds:.2f} s")


if __name__ == "__main__":
  main()
