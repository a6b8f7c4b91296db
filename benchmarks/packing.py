"""How fast examples are packed into rows, beside seqio: `python -m benchmarks.packing`.

Both sides are pipelines of tf.data, which run one at a time, in turns; what is printed is the
median of the rounds, in tokens a second. "ids" begins with token ids, which are in memory, "text"
with the lines of a file, which both sides encode by the same SentencePiece model and end with EOS:
ours by `encode_all_features`, theirs by `seqio.preprocessors`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from mesh_tensorflow.transformer import dataset, subword_vocabulary

try:
  import seqio
except ImportError:
  seqio = None

_BATCH = 16

Make = Callable[[], tf.data.Dataset]


def random_examples(count: int, mean: int, features: tuple[str, ...]) -> tf.data.Dataset:
  """Examples of random ids, as a data set without end that is in memory.

  Args:
    count: of different examples.
    mean: length of a sequence; lengths are log-normal.
    features: their names.
  """
  rng = np.random.default_rng(0)
  columns = {}
  for name in features:
    lengths = np.clip(rng.lognormal(np.log(mean), 0.5, count), 1, 8 * mean).astype(np.int64)
    ids = rng.integers(2, 30_000, int(lengths.sum()), dtype=np.int32)
    columns[name] = tf.RaggedTensor.from_row_lengths(ids, lengths)
  rows = tf.data.Dataset.from_tensor_slices(columns)
  # Rows of a ragged tensor are ragged in the specification, and dense in fact.
  cached = rows.map(lambda x: dict(x)).cache()
  cached.reduce(0, lambda n, _: n + 1)  # To take ragged tensors apart costs more than to pack.
  return cached.repeat()


def write_text(folder: str, lines: int) -> tuple[str, str]:
  """A file of lines of random words, and the prefix of a SentencePiece model of it."""
  import sentencepiece

  rng = np.random.default_rng(0)
  words = ["".join(rng.choice(list("abcdefghijklmnop"), rng.integers(2, 9))) for _ in range(3000)]
  path = os.path.join(folder, "text.txt")
  with open(path, "w", encoding="utf-8") as f:
    for _ in range(lines):
      f.write(" ".join(rng.choice(words, rng.integers(5, 25))) + "\n")
  model = os.path.join(folder, "pieces")
  sentencepiece.SentencePieceTrainer.train(
    input=path,
    model_prefix=model,
    vocab_size=2000,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
  )
  return path, model + ".model"


def sides_of_text(path: str, model: str, length: int) -> dict[str, Make]:
  """Lines of a text file, encoded and packed."""

  def lines() -> tf.data.Dataset:
    return tf.data.TextLineDataset(path).repeat().map(lambda line: {"targets": line})

  ours = subword_vocabulary.SentencePieceVocabulary.load(model)
  made: dict[str, Make] = {
    "ours": lambda: dataset.pack_or_pad(dataset.encode_all_features(lines(), ours, length), length)
  }
  if seqio is not None:
    theirs = seqio.SentencePieceVocabulary(model)
    features = {"targets": seqio.Feature(theirs, add_eos=True)}
    made["seqio"] = lambda: seqio.trim_and_pack_dataset(
      seqio.preprocessors.append_eos(
        seqio.preprocessors.tokenize(lines(), features, copy_pretokenized=False), features
      ),
      {"targets": length},
    )
  return made


def sides_of_ids(mean: int, features: tuple[str, ...], length: int) -> dict[str, Make]:
  """Sequences of ids, packed."""
  lengths, examples = dict.fromkeys(features, length), random_examples(20_000, mean, features)
  made: dict[str, Make] = {"ours": lambda: dataset.pack_or_pad(examples, lengths)}
  if seqio is not None:
    made["seqio"] = lambda: seqio.trim_and_pack_dataset(examples, lengths)
  return made


def tokens_a_second(make: Make, rows: int) -> float:
  """Tokens of rows that follow the first tenth, by the time that they take.

  The iterator ends with the turn: it would fill its buffers in that of another one.
  """
  batches = iter(make().batch(_BATCH))
  for _ in range(rows // _BATCH // 10 + 1):
    next(batches)
  begin = time.perf_counter()
  count = sum(
    int(np.count_nonzero(batch["targets"])) for batch in itertools.islice(batches, rows // _BATCH)
  )
  return count / (time.perf_counter() - begin)


def main() -> None:
  """The command."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
  parser.add_argument("--rows", type=int, default=4000, help="packed rows of a turn")
  args = parser.parse_args()
  if seqio is None:
    print("seqio is not installed: its columns are left out.")
  with tempfile.TemporaryDirectory() as folder:
    table = {
      "ids, 1 feature, 60 of 512": sides_of_ids(60, ("targets",), 512),
      "ids, 2 features, 15 of 64": sides_of_ids(15, ("inputs", "targets"), 64),
      "text, SentencePiece, 512": sides_of_text(*write_text(folder, 20_000), 512),
    }
    print("| tokens a second | ours | seqio | ratio |\n|---|---|---|---|")
    for name, made in table.items():
      rates: dict[str, list[float]] = {side: [] for side in made}
      for _ in range(args.rounds):
        for side, make in made.items():
          rates[side].append(tokens_a_second(make, args.rows))
      cells = [
        f"{statistics.median(rates[s]):,.0f}" if s in rates else "" for s in ("ours", "seqio")
      ]
      ratio = [x / y for x, y in zip(rates["ours"], rates.get("seqio", []))]
      ratio_cell = f"**{statistics.median(ratio):.1f}**" if ratio else ""
      print(f"| {name} | {' | '.join(cells)} | {ratio_cell} |", flush=True)


if __name__ == "__main__":
  main()
