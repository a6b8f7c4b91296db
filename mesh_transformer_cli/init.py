"""`mesh-transformer init`: settings for a text of one's own, which train at once."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import importlib.util
import os
import shlex
import sys

from mesh_settings.rules import PATH
from mesh_transformer_cli import measuring, templates
from mesh_transformer_cli.flags import Flag, of_rule
from mesh_transformer_cli.measuring import Text, TextError
from mesh_transformer_cli.parser import Command, Parser

# Of `mesh_tensorflow.exit_codes`: a file cannot be written.
_STORAGE = 4

# Minimum number of characters for a model and a held-out part.
_LEAST = 1_000
# A vocabulary of characters: of so many different ones, and of a text that is read at each start.
_MOST_DIFFERENT, _MOST_CHARACTERS = 400, 10_000_000
# Characters of a token of SentencePiece, about.
_CHARACTERS_PER_PIECE = 3.5


@dataclasses.dataclass(frozen=True)
class Sizes:
  """A model and a training that suit a text of some length.

  Attributes:
    tokens: maximum number of the text's tokens that these sizes suit.
    layers: number of the model's layers.
    d_model: width of the model.
    heads: number of attention heads.
    length: number of tokens in a sequence.
    batch: number of sequences in a batch.
    steps: number of training steps.
    learning_rate: peak of the learning rate.
    dropout: dropout rate, where training repeats the text many times.
    validation: fraction of the text that is held out.
  """

  tokens: float
  layers: int
  d_model: int
  heads: int
  length: int
  batch: int
  steps: int
  learning_rate: float
  dropout: float
  validation: float

  @property
  def d_ff(self) -> int:
    """8 / 3 of the width: three matrices of SwiGLU as large as two of four times the width."""
    return -(-self.d_model * 8 // 3 // 8) * 8


# A minute, some minutes, and some hours on two cores; the last is for accelerators.
SIZES = (
  Sizes(3e5, 2, 64, 2, 64, 16, 1_000, 3e-3, 0.1, 0.1),
  Sizes(5e6, 4, 128, 4, 128, 16, 3_000, 2e-3, 0.0, 0.1),
  Sizes(1e8, 6, 256, 4, 256, 16, 20_000, 1e-3, 0.0, 0.05),
  Sizes(float("inf"), 12, 512, 8, 512, 32, 100_000, 6e-4, 0.0, 0.01),
)


def _encoding(text: str) -> str:
  try:
    return codecs.lookup(text).name
  except LookupError:
    raise argparse.ArgumentTypeError(
      f"Python knows no encoding {text!r}; utf-8, latin-1, cp1252, shift_jis are some"
    ) from None


# Sizes of a SentencePiece vocabulary; the maximum is four times the largest in use.
_LEAST_PIECES, _MOST_PIECES = 300, 1_000_000
# A text has to have the pieces: so many of its characters there are, at least, for each.
_CHARACTERS_FOR_A_PIECE = 4


def _vocabulary(text: str) -> str:
  kind, colon, size = text.partition(":")
  if text in ("characters", "bytes"):
    return text
  if kind == "sentencepiece":
    if not colon:
      return "sentencepiece:8000"
    if size.isdecimal() and len(size) < 10 and _LEAST_PIECES <= int(size) <= _MOST_PIECES:
      return text
    raise argparse.ArgumentTypeError(
      f"{text!r}: sentencepiece:N has a number of {_LEAST_PIECES} to {_MOST_PIECES:,}, such as "
      "sentencepiece:8000"
    )
  raise argparse.ArgumentTypeError(f"{text!r} is none of characters, bytes, sentencepiece:N")


FLAGS = (
  Flag(
    "--text",
    "The text: a file, a folder, or a pattern in quotes; plain, JSON lines, tables, Parquet; "
    "compressed or not. By default what lies in DIR.",
    of_rule(PATH),
    "PATH",
  ),
  Flag(
    "--vocabulary",
    "characters, bytes or sentencepiece:N. By default what suits the text: characters if it is "
    "short and has few different ones, SentencePiece if it is long, else bytes.",
    _vocabulary,
    "KIND",
  ),
  Flag("--field", "The field of the text, in JSON lines and tables.", metavar="NAME"),
  Flag("--encoding", "Of the text, if it is not UTF-8: latin-1, say.", _encoding, "NAME"),
  Flag("--force", "Write over files of an earlier init.", None),
)


def run(values: argparse.Namespace, parser: Parser) -> None:
  """Measures the text and writes the two files."""
  folder = values.place
  if not folder:
    parser.error("no folder is given: init DIR --text=PATH")
  if os.path.exists(folder) and not os.path.isdir(folder):
    parser.error(f"{folder} is a file; init takes the folder to write into, and --text the text")
  for name in (measuring.GIN, measuring.README):
    path = os.path.join(folder, name)
    if os.path.exists(path) and not values.force:
      parser.error(f"{path} is there already: give another folder, or --force to write over it")
  encoding = values.encoding or "utf-8"
  try:
    path, files = measuring.find(folder, values.text)
    text = measuring.measure(path, files, encoding, values.field)
    vocabulary = values.vocabulary or suitable_vocabulary(text)
    _check(text, vocabulary)
  except TextError as e:
    parser.error(str(e))
  sizes = suitable_sizes(text, vocabulary)
  written = templates.Written(folder, text, vocabulary, encoding, sizes.validation)
  try:
    os.makedirs(folder, exist_ok=True)
    for name, content in (
      (measuring.GIN, templates.gin_file(written, sizes)),
      (measuring.README, templates.readme(written, sizes)),
    ):
      with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        f.write(content)
  except OSError as e:
    print(f"{parser.prog}: {e.filename} cannot be written: {e.strerror}", file=sys.stderr)
    sys.exit(_STORAGE)
  program = parser.prog.rpartition(" ")[0]
  config = shlex.quote(os.path.join(folder, measuring.GIN))
  print(
    f"{templates.described(text)}\n"
    f"{vocabulary}; {sizes.layers} layers of {sizes.d_model}, {sizes.steps:,} steps of "
    f"{sizes.batch} x {sizes.length} tokens\n"
    f"written: {os.path.join(folder, measuring.GIN)}, {measuring.README}\n\n"
    f"next:  {program} train --config={config} --dry_run\n"
    f"       {program} train --config={config}"
  )


def suitable_vocabulary(text: Text) -> str:
  """The vocabulary that suits a text, of those that can be had."""
  if text.whole and text.characters <= _MOST_CHARACTERS and text.different <= _MOST_DIFFERENT:
    return "characters"
  if text.characters > _MOST_CHARACTERS and _has_sentencepiece():
    return "sentencepiece:8000" if text.characters < 1e9 else "sentencepiece:32000"
  return "bytes"


def suitable_sizes(text: Text, vocabulary: str) -> Sizes:
  """The sizes that suit a text."""
  per_token = _CHARACTERS_PER_PIECE if vocabulary.startswith("sentencepiece") else 1.0
  return next(s for s in SIZES if text.characters / per_token <= s.tokens)


def _has_sentencepiece() -> bool:
  return importlib.util.find_spec("sentencepiece") is not None


def _check(text: Text, vocabulary: str) -> None:
  if text.characters < _LEAST:
    raise TextError(
      f"{text.path} has {text.characters} characters; a model and a held-out part need at least "
      f"{_LEAST:,}"
    )
  if vocabulary.startswith("sentencepiece") and not _has_sentencepiece():
    raise TextError(
      "sentencepiece is not installed: pip install sentencepiece, or --vocabulary=bytes"
    )
  most = text.characters // _CHARACTERS_FOR_A_PIECE
  pieces = int(vocabulary.partition(":")[2] or 0)
  if pieces > most:
    advice = f"at most sentencepiece:{most}" if most >= _LEAST_PIECES else "characters or bytes"
    raise TextError(
      f"--vocabulary={vocabulary}: {text.path}, of {text.characters:,} characters, does not have "
      f"so many pieces; take {advice}"
    )


INIT = Command(
  "init",
  "settings for a text of your own, in a folder: then train at once",
  "Writes DIR/train.gin, a commented gin file with sizes that suit the text, and DIR/README.md, "
  "which says what to type. Reads the text once, and changes nothing else.",
  FLAGS,
  run,
  (),
  ("init my_model --text=input.txt", "init plays --vocabulary=sentencepiece:4000"),
  ("DIR", "The folder; it is made if it is not there. The text may lie in it."),
)
