"""Makes records for the pretraining of BERT from text files.

  python -m mesh_tensorflow.bert.create_pretraining_data --input_file='text/*.txt' \
    --output_file=train.tfrecord --vocab_file=vocab.txt

Text files have a sentence (or another piece of text that belongs together) a line, and an empty
line between documents. Each example is a pair of pieces, the second of which follows the first in
its document or, in half of the cases, is from another one; some WordPieces are hidden
(Devlin et al., 2018, arXiv:1810.04805, section 3.1 and appendix A). What is drawn depends on the
seed, the document's number and the repetition, and on nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence

import tensorflow as tf
import tqdm
from absl import flags

from mesh_tensorflow.bert import records, settings, tokenization
from mesh_tensorflow.bert.program_flags import Flag, ProgramFlags
from mesh_tensorflow.errors import ConfigError, DataError

Document = list[list[str]]


FLAGS = ProgramFlags(
  (
    Flag(flags.DEFINE_string, "input_file", None, "Text files: globs, separated by commas."),
    Flag(
      flags.DEFINE_string,
      "output_file",
      None,
      "Files of records to write, separated by commas; examples go to each in turn.",
    ),
    Flag(flags.DEFINE_string, "vocab_file", None, "The vocabulary; make_vocab makes one."),
    Flag(flags.DEFINE_bool, "do_lower_case", True, "Lower-case the text; False for a cased model."),
    Flag(flags.DEFINE_bool, "do_whole_word_mask", False, "Hide all WordPieces of a word together."),
    Flag(
      flags.DEFINE_integer, "max_seq_length", 128, "WordPieces in an example, with [CLS], [SEP]."
    ),
    Flag(
      flags.DEFINE_integer, "max_predictions_per_seq", 20, "Most hidden WordPieces in an example."
    ),
    Flag(flags.DEFINE_integer, "random_seed", 12345, "Of pairs and hidden WordPieces."),
    Flag(flags.DEFINE_integer, "dupe_factor", 10, "How often each document is used, drawn anew."),
    Flag(flags.DEFINE_float, "masked_lm_prob", 0.15, "Part of the WordPieces that is hidden."),
    Flag(
      flags.DEFINE_float,
      "short_seq_prob",
      0.1,
      "Part of the examples that are shorter than there is room for.",
    ),
  ),
)
FLAGS.define(__name__)


@dataclasses.dataclass(frozen=True)
class Options:
  """Settings of example creation.

  Attributes:
    max_seq_length: WordPieces in an example, special ones included.
    max_predictions_per_seq: maximum number of masked WordPieces in an example.
    masked_lm_prob: fraction of the WordPieces that is masked, 0 to 1.
    short_seq_prob: fraction of the examples that are made shorter than max_seq_length, 0 to 1.
    do_whole_word_mask: whether all WordPieces of a word are masked together.

  Raises:
    ConfigError: a number out of range.
  """

  max_seq_length: int = 128
  max_predictions_per_seq: int = 20
  masked_lm_prob: float = 0.15
  short_seq_prob: float = 0.1
  do_whole_word_mask: bool = False

  def __post_init__(self) -> None:
    if self.max_seq_length < 5:
      raise ConfigError(
        f"max_seq_length (={self.max_seq_length}) must be at least 5: two pieces of text and "
        "[CLS], [SEP], [SEP]"
      )
    if not 1 <= self.max_predictions_per_seq <= self.max_seq_length:
      raise ConfigError(
        f"max_predictions_per_seq (={self.max_predictions_per_seq}) must be from 1 to "
        f"max_seq_length (={self.max_seq_length})"
      )
    for name in ("masked_lm_prob", "short_seq_prob"):
      if not 0 <= getattr(self, name) <= 1:
        raise ConfigError(f"{name} (={getattr(self, name)}) must be from 0 to 1")


@dataclasses.dataclass(frozen=True)
class TrainingInstance:
  """An example.

  Attributes:
    tokens: with [CLS] and [SEP], some replaced.
    segment_ids: 0 for the first piece, 1 for the second.
    is_random_next: whether the second piece is from elsewhere.
    masked_lm_positions: positions to predict, ascending.
    masked_lm_labels: the WordPieces that were there.
  """

  tokens: list[str]
  segment_ids: list[int]
  is_random_next: bool
  masked_lm_positions: list[int]
  masked_lm_labels: list[str]


def read_documents(files: Sequence[str], tokenizer: tokenization.FullTokenizer) -> list[Document]:
  """The documents of text files: lists of lines, each a list of WordPieces.

  The end of a file ends a document. Lines without WordPieces do not count.

  Raises:
    DataError: there are fewer than two documents, so none has another one beside it.
  """
  documents: list[Document] = [[]]
  for file in files:
    try:
      with tf.io.gfile.GFile(file, "rb") as f:
        lines = f.read().split(b"\n")
    except tf.errors.OpError as e:
      raise DataError(f"cannot read {file}: {e.message}") from e
    for line in tqdm.tqdm(lines, file, unit="line", disable=None, leave=False):
      pieces = tokenizer.tokenize(line)
      if pieces:
        documents[-1].append(pieces)
      elif not line.strip():
        documents.append([])
    documents.append([])
  documents = [d for d in documents if d]
  if len(documents) < 2:
    raise DataError(
      f"{', '.join(files)}: {len(documents)} document(s) found, two are needed at least; an empty "
      "line ends a document"
    )
  return documents


def instances_of(
  documents: Sequence[Document],
  number: int,
  vocabulary: Sequence[str],
  options: Options,
  rng: random.Random,
) -> Iterator[TrainingInstance]:
  """The examples of one document, once.

  Args:
    documents: all of them.
    number: index of the document.
    vocabulary: the WordPieces that a masked one may be replaced with.
    options: see `Options`.
    rng: random number generator.
  """
  document = documents[number]
  room = options.max_seq_length - 3  # Without [CLS], [SEP], [SEP].

  def length_wanted() -> int:
    return rng.randint(2, room) if rng.random() < options.short_seq_prob else room

  at = 0
  while at < len(document):
    # As many lines as make the length; or what is left.
    wanted, end, length = length_wanted(), at, 0
    while end < len(document) and length < wanted:
      length += len(document[end])
      end += 1
    lines = document[at:end]
    cut = rng.randint(1, len(lines) - 1) if len(lines) > 1 else 1
    first = [piece for line in lines[:cut] for piece in line]
    is_random_next = len(lines) == 1 or rng.random() < 0.5
    if is_random_next:
      second = _from_another(documents, number, max(1, wanted - len(first)), rng)
      at += cut  # The lines behind the first piece were not used.
    else:
      second = [piece for line in lines[cut:] for piece in line]
      at = end
    _shorten(first, second, room, rng)
    yield _masked(first, second, is_random_next, vocabulary, options, rng)


def _from_another(
  documents: Sequence[Document], number: int, length: int, rng: random.Random
) -> list[str]:
  """WordPieces of another document, from a drawn line on."""
  other = rng.randrange(len(documents) - 1)
  document = documents[other + (other >= number)]
  pieces: list[str] = []
  for line in document[rng.randrange(len(document)) :]:
    pieces += line
    if len(pieces) >= length:
      break
  return pieces


def _shorten(first: list[str], second: list[str], room: int, rng: random.Random) -> None:
  """Takes WordPieces from either end of the longer piece until both have room together."""
  while len(first) + len(second) > room:
    longer = first if len(first) > len(second) else second
    del longer[0 if rng.random() < 0.5 else -1]


def _masked(
  first: list[str],
  second: list[str],
  is_random_next: bool,
  vocabulary: Sequence[str],
  options: Options,
  rng: random.Random,
) -> TrainingInstance:
  """Hides some WordPieces: 80 % as [MASK], 10 % as another one, 10 % not at all."""
  tokens = ["[CLS]", *first, "[SEP]", *second, "[SEP]"]
  words: list[list[int]] = []
  for position, token in enumerate(tokens):
    if token in ("[CLS]", "[SEP]"):
      continue
    if options.do_whole_word_mask and words and token.startswith("##"):
      words[-1].append(position)
    else:
      words.append([position])
  rng.shuffle(words)
  wanted = max(1, round(len(tokens) * options.masked_lm_prob))
  wanted = min(wanted, options.max_predictions_per_seq)
  chosen: list[int] = []
  for word in words:
    if len(chosen) + len(word) <= wanted:
      chosen += word
  chosen.sort()
  labels = [tokens[position] for position in chosen]
  for position in chosen:
    draw = rng.random()
    if draw < 0.8:
      tokens[position] = "[MASK]"
    elif draw < 0.9:
      tokens[position] = rng.choice(vocabulary)
  segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
  return TrainingInstance(tokens, segments, is_random_next, chosen, labels)


def features_of(
  instance: TrainingInstance, tokenizer: tokenization.FullTokenizer, options: Options
) -> dict[str, list[float]]:
  """The features of a record, by BERT's names; see `run_pretraining.features_of`."""

  def filled(values: Sequence[float], size: int, zero: float = 0) -> list[float]:
    return [*values, *[zero] * (size - len(values))]

  length, predictions = options.max_seq_length, options.max_predictions_per_seq
  labels = tokenizer.convert_tokens_to_ids(instance.masked_lm_labels)
  return {
    "input_ids": filled(tokenizer.convert_tokens_to_ids(instance.tokens), length),
    "input_mask": filled([1] * len(instance.tokens), length),
    "segment_ids": filled(instance.segment_ids, length),
    "masked_lm_positions": filled(instance.masked_lm_positions, predictions),
    "masked_lm_ids": filled(labels, predictions),
    "masked_lm_weights": filled([1.0] * len(labels), predictions, 0.0),
    "next_sentence_labels": [int(instance.is_random_next)],
  }


def create(
  documents: Sequence[Document],
  tokenizer: tokenization.FullTokenizer,
  output_files: Sequence[str],
  options: Options,
  *,
  dupe_factor: int = 10,
  seed: int = 12345,
) -> int:
  """Writes the examples of documents, in a drawn order.

  Args:
    documents: see `read_documents`.
    tokenizer: made them.
    output_files: paths of the files of records to write.
    options: see `Options`.
    dupe_factor: number of times that each document is used.
    seed: seed of the random number generator.

  Returns:
    The number of examples.

  Raises:
    DataError: a file cannot be written.
  """
  special = ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]")
  if "[MASK]" not in tokenizer.vocab:
    raise ConfigError("the vocabulary has no [MASK], which hides WordPieces")
  vocabulary = [t for t in tokenizer.vocab if t not in special]
  made: list[TrainingInstance] = []
  for repetition in range(dupe_factor):
    for number in range(len(documents)):
      # A string: Python's generator is seeded by its digest, the same everywhere.
      rng = random.Random(f"{seed} {repetition} {number}")
      made += instances_of(documents, number, vocabulary, options, rng)
  random.Random(seed).shuffle(made)
  try:
    with contextlib.ExitStack() as stack:
      writers = [stack.enter_context(tf.io.TFRecordWriter(path)) for path in output_files]
      for i, instance in enumerate(tqdm.tqdm(made, "writing", disable=None, leave=False)):
        features = features_of(instance, tokenizer, options)
        writers[i % len(writers)].write(records.example(features))
  except tf.errors.OpError as e:
    raise DataError(f"cannot write {', '.join(output_files)}: {e.message}") from e
  return len(made)


def main(_: Sequence[str]) -> None:
  """Does what the flags say."""
  options = Options(
    max_seq_length=FLAGS.max_seq_length,
    max_predictions_per_seq=FLAGS.max_predictions_per_seq,
    masked_lm_prob=FLAGS.masked_lm_prob,
    short_seq_prob=FLAGS.short_seq_prob,
    do_whole_word_mask=FLAGS.do_whole_word_mask,
  )
  FLAGS.check_positive("dupe_factor")
  tokenizer = tokenization.FullTokenizer(FLAGS.vocab_file, do_lower_case=FLAGS.do_lower_case)
  documents = read_documents(settings.find_files(FLAGS.input_file, "input_file"), tokenizer)
  outputs = [path.strip() for path in FLAGS.output_file.split(",")]
  count = create(
    documents,
    tokenizer,
    outputs,
    options,
    dupe_factor=FLAGS.dupe_factor,
    seed=FLAGS.random_seed,
  )
  print(f"{len(documents)} documents, {count} examples written to {', '.join(outputs)}")


if __name__ == "__main__":
  settings.run_program(main, __doc__, ["input_file", "output_file", "vocab_file"])
