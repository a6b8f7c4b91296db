"""Makes a WordPiece vocabulary from text files.

  python -m mesh_tensorflow.bert.make_vocab --input_file='text/*.txt' --output_file=vocab.txt \
    --vocab_size=8000

Words are taken apart as `tokenization.BasicTokenizer` does. The vocabulary begins with all single
characters; then the two neighbouring pieces that occur together most often become one piece, again
and again, until it is full (byte pair encoding, Sennrich et al., 2016, arXiv:1508.07909, with the
"##" of WordPieces; what Hugging Face's trainer of BERT vocabularies does). It is our own because
TensorFlow Text, which has another trainer, does not exist for each TensorFlow that this package
runs on.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf
import tqdm
from absl import flags

from mesh_tensorflow.bert import settings, tokenization
from mesh_tensorflow.bert.program_flags import Flag, ProgramFlags
from mesh_tensorflow.errors import ConfigError, DataError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


FLAGS = ProgramFlags(
  (
    Flag(flags.DEFINE_string, "input_file", None, "Text files: globs, separated by commas."),
    Flag(flags.DEFINE_string, "output_file", None, "The vocabulary to write, a token a line."),
    Flag(flags.DEFINE_integer, "vocab_size", 30522, "Most tokens, special ones included."),
    Flag(flags.DEFINE_bool, "do_lower_case", True, "Lower-case the text, and drop accents."),
    Flag(flags.DEFINE_integer, "min_count", 2, "How often a piece must occur to become a token."),
  ),
)
FLAGS.define(__name__)


def count_words(lines: Iterable[str | bytes], do_lower_case: bool = True) -> dict[str, int]:
  """Counts the occurrences of each word in lines of text."""
  tokenizer = tokenization.BasicTokenizer(do_lower_case=do_lower_case)
  counts: collections.Counter[str] = collections.Counter()
  for line in lines:
    counts.update(tokenizer.tokenize(line))
  return dict(counts)


class _Pairs:
  """Words split into pieces, with the frequency of each pair of adjacent pieces.

  Args:
    counts: how often each word occurs.
    alphabet: the single characters, with "##", that are pieces.
  """

  def __init__(self, counts: Mapping[str, int], alphabet: set[str]):
    self._words: list[list[str]] = []
    self._counts: list[int] = []
    self._pairs: collections.Counter[tuple[str, str]] = collections.Counter()
    self._where: dict[tuple[str, str], set[int]] = collections.defaultdict(set)
    for word, count in sorted(counts.items()):
      pieces = _characters(word)
      if len(pieces) > 1 and alphabet.issuperset(pieces):
        self._words.append(pieces)
        self._counts.append(count)
        self._count(len(self._words) - 1, 1)
    # Entries whose count is out of date are passed over when they come up.
    self._heap = [(-n, pair) for pair, n in self._pairs.items()]
    heapq.heapify(self._heap)

  def _count(self, word: int, sign: int) -> set[tuple[str, str]]:
    """Adds (`sign` 1) or subtracts (-1) the pairs of a word; returns them."""
    pieces = self._words[word]
    pairs = set()
    for pair in zip(pieces, pieces[1:]):
      self._pairs[pair] += sign * self._counts[word]
      self._where[pair].add(word)
      pairs.add(pair)
    return pairs

  def most_frequent(self) -> tuple[tuple[str, str], int] | None:
    """Returns the most frequent pair and its count (ties by alphabet); None if there is none."""
    while self._heap:
      count, pair = self._heap[0]
      if self._pairs[pair] == -count and count:
        return pair, -count
      heapq.heappop(self._heap)
    return None

  def join(self, pair: tuple[str, str]) -> str:
    """Makes one piece of the two, in all words; returns it."""
    joined = pair[0] + pair[1].removeprefix("##")
    changed: set[tuple[str, str]] = set()
    for word in self._where.pop(pair):
      changed |= self._count(word, -1)
      pieces: list[str] = []
      for piece in self._words[word]:
        if pieces and (pieces[-1], piece) == pair:
          pieces[-1] = joined
        else:
          pieces.append(piece)
      self._words[word] = pieces
      changed |= self._count(word, 1)
    for other in changed:
      heapq.heappush(self._heap, (-self._pairs[other], other))
    return joined


def _characters(word: str) -> list[str]:
  return [word[0], *[f"##{c}" for c in word[1:]]]


def train(counts: Mapping[str, int], vocab_size: int, min_count: int = 2) -> list[str]:
  """The vocabulary for words.

  Args:
    counts: how often each word occurs.
    vocab_size: most tokens.
    min_count: how often a piece must occur to become a token.

  Returns:
    `SPECIAL`, the characters (alphabetically), then the joined pieces in their order. Fewer than
    `vocab_size` where no more pieces occur often enough.

  Raises:
    DataError: there are no words.
    ConfigError: there is no room for all characters.
  """
  if not counts:
    raise DataError("there are no words to make a vocabulary of")
  characters: collections.Counter[str] = collections.Counter()
  for word, count in counts.items():
    for piece in _characters(word):
      characters[piece] += count
  alphabet = sorted(c for c, n in characters.items() if n >= min_count)
  vocab = [*SPECIAL, *alphabet]
  if len(vocab) > vocab_size:
    raise ConfigError(
      f"vocab_size (={vocab_size}) has no room for the {len(alphabet)} characters that occur "
      f"{min_count} times or more and {len(SPECIAL)} special tokens: {len(vocab)} are needed; or "
      "raise min_count"
    )
  pairs = _Pairs(counts, set(alphabet))
  there = set(vocab)
  with tqdm.tqdm(total=vocab_size, initial=len(vocab), disable=None, leave=False) as bar:
    while len(vocab) < vocab_size and (found := pairs.most_frequent()) is not None:
      pair, count = found
      if count < min_count:
        break
      joined = pairs.join(pair)
      if joined not in there:  # Two ways may lead to one piece.
        vocab.append(joined)
        there.add(joined)
        bar.update()
  return vocab


def main(_: Sequence[str]) -> None:
  """Does what the flags say."""
  FLAGS.check_positive("vocab_size", "min_count")
  counts: collections.Counter[str] = collections.Counter()
  for file in settings.find_files(FLAGS.input_file, "input_file"):
    with tf.io.gfile.GFile(file, "rb") as f:
      counts.update(count_words(f.read().split(b"\n"), FLAGS.do_lower_case))
  vocab = train(counts, FLAGS.vocab_size, FLAGS.min_count)
  try:
    with tf.io.gfile.GFile(FLAGS.output_file, "w") as f:
      f.write("".join(f"{token}\n" for token in vocab))
  except tf.errors.OpError as e:
    raise ConfigError(f"cannot write {FLAGS.output_file}: {e.message}") from e
  print(f"{len(counts)} words, {len(vocab)} tokens written to {FLAGS.output_file}")


if __name__ == "__main__":
  settings.run_program(main, __doc__, ["input_file", "output_file"])
