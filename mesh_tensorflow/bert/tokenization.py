"""Text to WordPieces, by the rules of the original BERT.

First words (`BasicTokenizer`), then the longest pieces of a vocabulary that make up each word
(`WordpieceTokenizer`; Schuster and Nakajima, 2012, and Wu et al., 2016, arXiv:1609.08144).
"""

from __future__ import annotations

import collections
import os
import re
import unicodedata
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TypeVar

import tensorflow as tf
from absl import flags

from mesh_tensorflow.errors import ConfigError, DataError

FLAGS = flags.FLAGS

flags.DEFINE_bool(
  "preserve_unused_tokens",
  False,
  "If set, words like [unused12] that are in the vocabulary are kept whole.",
)

_K = TypeVar("_K")
_V = TypeVar("_V")

_UNUSED = re.compile(r"\[unused\d+\]")
_LOWER_CASED = (
  "uncased_L-24_H-1024_A-16",
  "uncased_L-12_H-768_A-12",
  "multilingual_L-12_H-768_A-12",
  "chinese_L-12_H-768_A-12",
)
_CASED = ("cased_L-12_H-768_A-12", "cased_L-24_H-1024_A-16", "multi_cased_L-12_H-768_A-12")
# Scripts that put no spaces between words, by code points: each character is a word.
_CJK = (
  (0x4E00, 0x9FFF),
  (0x3400, 0x4DBF),
  (0x20000, 0x2A6DF),
  (0x2A700, 0x2B73F),
  (0x2B740, 0x2B81F),
  (0x2B820, 0x2CEAF),
  (0xF900, 0xFAFF),
  (0x2F800, 0x2FA1F),
)


def preserve_token(token: str, vocab: Container[str]) -> bool:
  """True for a vocabulary entry like [unused12], kept whole if --preserve_unused_tokens is set."""
  # `value` is also there where flags were not parsed: this is a library, too.
  if not FLAGS["preserve_unused_tokens"].value:
    return False
  return token in vocab and _UNUSED.fullmatch(token) is not None


def validate_case_matches_checkpoint(do_lower_case: bool, init_checkpoint: str | None) -> None:
  """Checks that lower-casing matches a Google checkpoint, as far as its folder's name tells.

  Args:
    do_lower_case: whether text is lower-cased.
    init_checkpoint: path of the checkpoint, or None.

  Raises:
    ConfigError: the checkpoint's model was trained with the other setting.
  """
  found = re.match(r"^.*?([A-Za-z0-9_-]+)/bert_model\.ckpt", init_checkpoint or "")
  if found is None:
    return
  model = found.group(1)
  if model in _LOWER_CASED and not do_lower_case or model in _CASED and do_lower_case:
    trained = "lower-cased" if model in _LOWER_CASED else "cased"
    raise ConfigError(
      f"--do_lower_case={do_lower_case}, but {model} of --init_checkpoint={init_checkpoint} is a "
      f"{trained} model: set --do_lower_case={not do_lower_case}"
    )


def convert_to_unicode(text: str | bytes) -> str:
  """A str as it is; bytes as UTF-8, without what is none.

  Raises:
    DataError: it is neither.
  """
  if isinstance(text, str):
    return text
  if isinstance(text, bytes):
    return text.decode("utf-8", "ignore")
  raise DataError(f"text must be str or bytes, got {type(text).__name__}: {text!r}")


def printable_text(text: str | bytes) -> str:
  """As `convert_to_unicode`: what `print` takes."""
  return convert_to_unicode(text)


def load_vocab(vocab_file: str | os.PathLike[str]) -> collections.OrderedDict[str, int]:
  """The ids of the tokens of a file, one a line.

  The id is the number of different tokens before it: a token that is there twice counts once, and
  shifts those behind it.

  Raises:
    ConfigError: there is no such file, or nothing in it.
  """
  vocab: collections.OrderedDict[str, int] = collections.OrderedDict()
  try:
    with tf.io.gfile.GFile(os.fspath(vocab_file), "rb") as f:
      # Not splitlines: a vocabulary has tokens that are other separators of lines.
      lines = f.read().split(b"\n")
  except tf.errors.OpError as e:
    reason = "there is no such file" if isinstance(e, tf.errors.NotFoundError) else e
    raise ConfigError(f"vocabulary {vocab_file}: {reason}") from e
  for line in lines[:-1] if lines[-1] == b"" else lines:
    vocab.setdefault(convert_to_unicode(line).strip(), len(vocab))
  if not vocab:
    raise ConfigError(f"vocabulary {vocab_file}: the file is empty; a token a line is needed")
  return vocab


def convert_by_vocab(vocab: Mapping[_K, _V], items: Iterable[_K]) -> list[_V]:
  """Looks up each item in a vocabulary.

  Raises:
    KeyError: an item is not in the vocabulary.
  """
  return [vocab[item] for item in items]


def convert_tokens_to_ids(vocab: Mapping[str, int], tokens: Iterable[str]) -> list[int]:
  """The ids of tokens; a KeyError if one has none."""
  return convert_by_vocab(vocab, tokens)


def convert_ids_to_tokens(inv_vocab: Mapping[int, str], ids: Iterable[int]) -> list[str]:
  """The tokens of ids; a KeyError if one has none."""
  return convert_by_vocab(inv_vocab, ids)


def whitespace_tokenize(text: str) -> list[str]:
  """The words between spaces."""
  return text.split()


class FullTokenizer:
  """Words, then WordPieces.

  Attributes:
    vocab: token -> id.
    inv_vocab: id -> token.
    basic_tokenizer: a `BasicTokenizer`.
    wordpiece_tokenizer: a `WordpieceTokenizer`.

  Args:
    vocab_file: see `load_vocab`.
    do_lower_case: see `BasicTokenizer`.
  """

  def __init__(self, vocab_file: str | os.PathLike[str], do_lower_case: bool = True):
    self.vocab = load_vocab(vocab_file)
    self.inv_vocab = {v: k for k, v in self.vocab.items()}
    self.basic_tokenizer = BasicTokenizer(do_lower_case=do_lower_case, vocab=self.vocab)
    self.wordpiece_tokenizer = WordpieceTokenizer(vocab=self.vocab)

  def tokenize(self, text: str | bytes) -> list[str]:
    """The WordPieces of a text. [CLS] and the like in it are text: "[", "cls", "]"."""
    pieces = []
    for word in self.basic_tokenizer.tokenize(text):
      if preserve_token(word, self.vocab):
        pieces.append(word)
      else:
        pieces.extend(self.wordpiece_tokenizer.tokenize(word))
    return pieces

  def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int]:
    """The ids of tokens."""
    return convert_by_vocab(self.vocab, tokens)

  def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
    """The tokens of ids."""
    return convert_by_vocab(self.inv_vocab, ids)


class BasicTokenizer:
  """Text to words: without control characters, punctuation and CJK characters each by itself.

  Args:
    do_lower_case: whether words are lower-cased and lose their accents.
    vocab: where `preserve_token` looks.
  """

  def __init__(self, do_lower_case: bool = True, vocab: Container[str] = ()):
    self.do_lower_case = do_lower_case
    self.vocab = vocab

  def tokenize(self, text: str | bytes) -> list[str]:
    """The words of a text."""
    words = []
    for word in _spaced(convert_to_unicode(text)).split():
      if preserve_token(word, self.vocab):
        words.append(word)
        continue
      if self.do_lower_case:
        word = _without_accents(word.lower())
      words.extend(_split_at_punctuation(word))
    # Lower-casing and taking apart accents may have made spaces.
    return " ".join(words).split()


class WordpieceTokenizer:
  """Splits words into WordPieces, greedily the longest first; all but a word's first have "##".

  Args:
    vocab: the WordPieces.
    unk_token: token for a word that cannot be made of WordPieces.
    max_input_chars_per_word: maximum length of a word; a longer one becomes `unk_token`.
  """

  def __init__(
    self,
    vocab: Container[str],
    unk_token: str = "[UNK]",
    max_input_chars_per_word: int = 200,
  ):
    self.vocab = vocab
    self.unk_token = unk_token
    self.max_input_chars_per_word = max_input_chars_per_word

  def tokenize(self, text: str | bytes) -> list[str]:
    """The WordPieces of words with spaces between them: "unaffable" -> un, ##aff, ##able."""
    return [p for word in convert_to_unicode(text).split() for p in self._pieces(word)]

  def _pieces(self, word: str) -> Sequence[str]:
    pieces = []
    start = 0
    if len(word) > self.max_input_chars_per_word:
      return [self.unk_token]
    while start < len(word):
      for end in range(len(word), start, -1):
        piece = ("##" if start else "") + word[start:end]
        if piece in self.vocab:
          break
      else:
        return [self.unk_token]
      pieces.append(piece)
      start = end
    return pieces


def _spaced(text: str) -> str:
  """The text without control characters, with spaces around CJK characters."""
  chars = []
  for char in text:
    code = ord(char)
    if code in (0, 0xFFFD) or _is_control(char):
      continue
    if _is_whitespace(char):
      chars.append(" ")
    elif any(first <= code <= last for first, last in _CJK):
      chars.append(f" {char} ")
    else:
      chars.append(char)
  return "".join(chars)


def _without_accents(text: str) -> str:
  decomposed = unicodedata.normalize("NFD", text)
  return "".join(c for c in decomposed if unicodedata.category(c) != "Mn")


def _split_at_punctuation(word: str) -> list[str]:
  parts = [[]]  # type: list[list[str]]
  for char in word:
    if _is_punctuation(char):
      parts += [[char], []]
    else:
      parts[-1].append(char)
  return ["".join(p) for p in parts if p]


def _is_whitespace(char: str) -> bool:
  return char in " \t\n\r" or unicodedata.category(char) == "Zs"


def _is_control(char: str) -> bool:
  return char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf")


def _is_punctuation(char: str) -> bool:
  # ASCII characters like $ and ^ are symbols to Unicode; here they count.
  code = ord(char)
  ascii_ranges = ((33, 47), (58, 64), (91, 96), (123, 126))
  if any(first <= code <= last for first, last in ascii_ranges):
    return True
  return unicodedata.category(char).startswith("P")
