"""Subword vocabularies by SentencePiece (Kudo and Richardson, 2018): trained, stored, used.

Needs the package sentencepiece: `pip install sentencepiece`.
"""

from __future__ import annotations

import functools
import io
import itertools
import logging
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.arguments.declared import COUNT, COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.environment.protobuf import fields
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data.files import text_files
from mesh_tensorflow.transformer.data.moses import MosesWords
from mesh_tensorflow.transformer.data.vocabularies import kept as kept_lib
from mesh_tensorflow.transformer.data.vocabularies.base import EOS_ID, PAD_ID, PythonVocabulary
from mesh_tensorflow.transformer.data.vocabularies.kept import write_whole_file
from mesh_tensorflow.transformer.data.vocabularies.piece_sampling import NORMAL, PieceSampler

_LOG = logging.getLogger("mesh_tensorflow")

UNK_ID = 2
_FIRST_ID = 2  # The first id that stands for text, if only for an unknown character.
_TOLD = 20  # Warnings name so many unknown parts of texts.
_UNIGRAM, _BPE = 1, 2  # Types of models in SentencePiece's files.
_LONGEST_SENTENCE = 1 << 16  # Bytes; SentencePiece leaves longer ones out when it trains.


class SentencePieceVocabulary(PythonVocabulary):
  """A SentencePiece model.

  Id 0 is padding, 1 EOS and 2 unknown; `extra_ids` more (sentinels) follow the model's pieces and
  decode to nothing. `encode` adds no EOS.

  Args:
    model: the content of a SentencePiece model file with these ids.
    extra_ids: number of ids after the pieces.
    moses_language: see `get_subword_vocabulary`.

  Raises:
    ConfigError: sentencepiece is not installed, or the model numbers padding or EOS differently.
    DataError: the content is no SentencePiece model.
  """

  def __init__(self, model: bytes, extra_ids: int = 0, moses_language: str = ""):
    if extra_ids < 0:
      raise ConfigError(f"SentencePieceVocabulary: extra_ids (={extra_ids}) must not be negative")
    try:
      self._processor = sentencepiece_module().SentencePieceProcessor(model_proto=bytes(model))
    except RuntimeError as e:
      raise DataError(f"this is not a SentencePiece model: {e}") from e
    found = (self._processor.pad_id(), self._processor.eos_id())
    if found != (PAD_ID, EOS_ID):
      raise ConfigError(
        f"this SentencePiece model numbers padding and EOS {found}, and it must be "
        f"{(PAD_ID, EOS_ID)}: train it with pad_id=0, eos_id=1, unk_id=2, bos_id=-1, as "
        "train_subword_vocabulary does"
      )
    self._model = bytes(model)
    self._extra_ids = int(extra_ids)
    self._words = MosesWords(moses_language) if moses_language else None
    self._pieces = self._processor.get_piece_size()
    self._told: set[str] = set()

  @classmethod
  def load(
    cls, filename: str, extra_ids: int = 0, moses_language: str = ""
  ) -> SentencePieceVocabulary:
    """Reads a SentencePiece model file.

    Args:
      filename: its path.
      extra_ids: number of ids after the pieces.
      moses_language: see `get_subword_vocabulary`.

    Raises:
      DataError: the file is missing or damaged.
    """
    model = text_files.read_text_file(os.path.expanduser(filename), encoding=None).text
    try:
      return cls(model, extra_ids, moses_language)
    except DataError as e:
      raise DataError(f"{filename}: {e}") from e

  def save(self, filename: str) -> None:
    """Writes the model file, whole or not at all.

    Raises:
      ConfigError: it cannot be written.
    """
    write_whole_file(filename, self._model)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, SentencePieceVocabulary) and other.content() == self.content()

  def __hash__(self) -> int:
    return hash(self.content())

  def content(self) -> bytes:
    language = f" {self._words.language}" if self._words else ""
    return b"%d%s\n%s" % (self._extra_ids, language.encode(), self._model)

  @property
  def vocab_size(self) -> int:
    return int(self._pieces) + self._extra_ids

  @property
  def model(self) -> bytes:
    """The content of its model file."""
    return self._model

  @property
  def unk_id(self) -> int:
    """The unknown id, for text without a piece."""
    return UNK_ID

  def encode(self, s: str | bytes) -> list[int]:
    return self.encode_texts([s if isinstance(s, str) else s.decode("utf-8", "replace")])[0]

  def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
    texts = [self._in_words(text) for text in texts]
    # For one text SentencePiece's threads take longer than the text.
    encode = self._processor.encode
    rows: list[list[int]] = encode(texts) if len(texts) > 1 else [encode(t) for t in texts]
    if len(self._told) < _TOLD:
      for text, ids in zip(texts, rows):
        if UNK_ID in ids:
          self._tell_of_unknown(text, ids)
    return rows

  def _in_words(self, text: str) -> str:
    return self._words.cut(text) if self._words else text

  def _tell_of_unknown(self, text: str, ids: Sequence[int]) -> None:
    """Warns of the parts of a text that have no piece, of each once."""
    pieces = self._processor.encode(text, out_type=str)
    new = {p for p, i in zip(pieces, ids) if i == UNK_ID} - self._told
    if not new:
      return
    self._told |= new
    more = "; no more of them are told" if len(self._told) >= _TOLD else ""
    _LOG.warning(
      "%d part(s) of the text are not in the subword vocabulary, and become the unknown id %d: "
      "%r in %r%s",
      *(len(new), UNK_ID, " ".join(sorted(new))[:60], text[:60], more),
    )

  def sample(self, texts: Sequence[str], alpha: float, seed: Sequence[int]) -> list[list[int]]:
    """Like `encode`, of each of several texts, with pieces that are chosen at random.

    Args:
      texts: the texts.
      alpha: of BPE the rate at which merges are left out, of unigram pieces the exponent of the
        probabilities of cuts: the smaller, the more alike they are.
      seed: whole numbers from 0 on; the result is a function of the arguments.

    Raises:
      ConfigError: the model is of words or characters, which are cut in one way only.
    """
    texts = [self._processor.normalize(self._in_words(text)) for text in texts]
    return self._sampler.sample(texts, alpha, seed)

  @functools.cached_property
  def _sampler(self) -> PieceSampler:
    pieces, kind = read_pieces(self._model)
    if kind not in (_UNIGRAM, _BPE):
      raise ConfigError(
        "sampled_pieces: a model of words or characters cuts a text in one way only; give one of "
        "model_type 'bpe' or 'unigram', or sampled_pieces = 0"
      )
    return PieceSampler(pieces, unigram=kind == _UNIGRAM)

  def encode_array(self, s: str | bytes) -> np.ndarray:
    """Like `encode`, but int32 [length]."""
    return np.array(self.encode(s), np.int32)

  def decode(self, ids: Iterable[int]) -> str:
    # Sentinels are behind the pieces, and SentencePiece refuses ids that it has no piece for.
    text = str(self._processor.decode([int(i) for i in ids if _FIRST_ID <= i < self._pieces]))
    return self._words.join(text) if self._words else text

  def decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    """Like `decode`, for each row; it calls Python."""

    def decode(rows: np.ndarray) -> np.ndarray:
      flat = [self.decode(row).encode() for row in rows.reshape([-1, rows.shape[-1]])]
      return np.array(flat, object).reshape(rows.shape[:-1])

    ids = tf.convert_to_tensor(ids)
    text = tf.numpy_function(decode, [ids], tf.string, stateful=False)
    return tf.ensure_shape(text, ids.shape[:-1])


def read_pieces(model: bytes) -> tuple[list[tuple[str, float, int]], int]:
  """Text, score and type of each piece of a model, and the type of the model.

  The numbers are those of sentencepiece_model.proto.

  Args:
    model: the content of a model file.
  """
  pieces, kind = [], _UNIGRAM
  for number, value in fields(model):
    if number == 1:
      piece = dict(fields(value))
      (score,) = struct.unpack("<f", piece[2]) if 2 in piece else (0.0,)
      pieces.append((piece[1].decode(), score, piece.get(3, NORMAL)))
    elif number == 2:
      kind = dict(fields(value)).get(3, _UNIGRAM)
  return pieces, kind


def train_subword_vocabulary(
  sentences: Iterable[str | bytes],
  vocab_size: int,
  *,
  model_type: str = "unigram",
  character_coverage: float = 1.0,
  byte_fallback: bool = False,
  normalization: str = "identity",
  max_sentences: int = 10_000_000,
  exact: bool = False,
  moses_language: str = "",
) -> SentencePieceVocabulary:
  """Trains a SentencePiece model; the result is a function of the arguments.

  Args:
    sentences: lines of text (UTF-8, if bytes).
    vocab_size: number of ids, padding, EOS and unknown included.
    model_type: "unigram", "bpe", "char" or "word".
    character_coverage: the part of all characters that get a piece; the rest are unknown.
    byte_fallback: encode characters without a piece as bytes (256 of the ids), rather than as
      unknown.
    normalization: of characters: "identity", "nfkc", "nmt_nfkc", "nfkc_cf" or "nmt_nfkc_cf".
    max_sentences: take so many at most.
    exact: decoding gives the text again, as a language model needs it: with its line ends, each a
      piece, and with blanks at both ends and several in a row, which are left out otherwise;
      implies `byte_fallback`. (The sign U+2581, which stands for a blank in pieces, becomes one.)
    moses_language: see `get_subword_vocabulary`.

  Returns:
    The vocabulary.

  Raises:
    ConfigError: sentencepiece is not installed, or the settings do not fit the text.
    DataError: there is no text.
  """
  sentencepiece = sentencepiece_module()
  if exact and moses_language:
    raise ConfigError(
      "train_subword_vocabulary: exact is not for words as by Moses: give no moses_language"
    )
  encoded = (s if isinstance(s, bytes) else s.encode() for s in sentences)
  if moses_language:
    words = MosesWords(moses_language)
    encoded = (words.cut(s.decode("utf-8", "replace")).encode() for s in encoded)
  lines = itertools.islice((s for s in encoded if s.strip()), max_sentences)
  first = next(lines, None)
  if first is None:
    raise DataError("train_subword_vocabulary: there is no text to train a vocabulary from")
  model = io.BytesIO()
  started = time.perf_counter()
  try:
    sentencepiece.SentencePieceTrainer.train(
      # The first was taken out to see whether there is one.
      sentence_iterator=itertools.chain([first], lines),
      model_writer=model,
      vocab_size=vocab_size,
      model_type=model_type,
      character_coverage=character_coverage,
      byte_fallback=byte_fallback or exact,
      normalization_rule_name=normalization,
      remove_extra_whitespaces=not exact,
      add_dummy_prefix=not exact,
      # Moses has said what a word is: "arrière-plan" is one, and may be a piece.
      split_by_unicode_script=not moses_language,
      # Indentation would be a piece for each blank.
      allow_whitespace_only_pieces=exact,
      # Sentences have no line ends, so none would be learned.
      user_defined_symbols=["\n"] if exact else [],
      max_sentence_length=_LONGEST_SENTENCE,
      pad_id=PAD_ID,
      eos_id=EOS_ID,
      unk_id=UNK_ID,
      # -1: there is none; decoders start from padding.
      bos_id=-1,
      num_threads=1,  # Sums of several threads come in any order, and their last bits differ.
      minloglevel=2,
    )
  except (RuntimeError, OSError) as e:
    most = re.search(r"too high.*<= (\d+)", str(e))
    why = (
      f"too high for so small a text; give at most {most[1]} (get_subword_vocabulary.vocab_size = "
      f"{most[1]}, or run.vocabulary = 'sentencepiece:{most[1]}')"
      if most
      else str(e)
    )
    raise ConfigError(
      f"train_subword_vocabulary: SentencePiece cannot make a {model_type!r} vocabulary of "
      f"vocab_size {vocab_size} from this text: {why}"
    ) from e
  _LOG.info("trained a subword vocabulary in %.1f s", time.perf_counter() - started)
  return SentencePieceVocabulary(model.getvalue(), moses_language=moses_language)


@gin.configurable(module="mesh_tensorflow.transformer.vocabulary")
@affects("report")
@takes(vocab_size=COUNT, extra_ids=COUNT_OR_ZERO)
def get_subword_vocabulary(
  filename: str = gin.REQUIRED,
  train_files: str | Sequence[str] | None = None,
  sentences: Callable[[], Iterable[str | bytes]] | None = None,
  vocab_size: int | None = None,
  data_dir: str = "",
  model_type: str = "unigram",
  character_coverage: float = 1.0,
  byte_fallback: bool = False,
  normalization: str = "identity",
  max_sentences: int = 10_000_000,
  extra_ids: int = 0,
  moses_language: str = "",
) -> SentencePieceVocabulary:
  """A subword vocabulary from a file; if there is none yet, it is trained and the file written.

  Of several workers the chief does that, and the others wait for it.

  Args:
    filename: the model file. The trainer keeps a copy with the checkpoints, and takes that.
    train_files: text files (plain or .gz; globs), whose lines to train on.
    sentences: in place of files: called for an iterable of lines.
    vocab_size: number of ids, `extra_ids` not counted. A file with another number is refused.
    data_dir: folder of `train_files`, if these are relative.
    model_type: "unigram", "bpe", "char" or "word".
    character_coverage: the part of all characters that get a piece, 0 to 1; the rest are unknown.
    byte_fallback: encode characters without a piece as bytes (256 of the ids), not as unknown.
    normalization: of characters: "identity", "nfkc", "nmt_nfkc", "nfkc_cf" or "nmt_nfkc_cf".
    max_sentences: maximum number of lines to train on.
    extra_ids: number of ids after the pieces.
    moses_language: code of a language, "fr" for instance: texts are first cut into words by the
      rules of Moses, which takes elisions ("l'homme": l' and homme) and punctuation apart, and
      decoded words are joined by its rules. Needs sacremoses. "": words end at blanks, and pieces
      where letters and other signs meet.

  Returns:
    The vocabulary.

  Raises:
    ConfigError: there is no file and nothing to train on; or the file has another size, or cannot
      be written.
    DataError: a file is missing, empty or damaged.
  """
  filename = os.path.expanduser(filename)
  load = functools.partial(
    SentencePieceVocabulary.load, extra_ids=extra_ids, moses_language=moses_language
  )

  def train() -> None:
    if tf.io.gfile.exists(filename):
      return
    if (train_files is None) == (sentences is None) or vocab_size is None:
      raise ConfigError(
        f"there is no vocabulary file {filename!r}; to train one, give vocab_size and either "
        "train_files or sentences (get_subword_vocabulary)"
      )
    print(f"training a subword vocabulary of {vocab_size:,} pieces: {filename}", flush=True)
    train_subword_vocabulary(
      _lines_of(data_dir, train_files) if sentences is None else sentences(),
      vocab_size,
      model_type=model_type,
      character_coverage=character_coverage,
      byte_fallback=byte_fallback,
      normalization=normalization,
      max_sentences=max_sentences,
      moses_language=moses_language,
    ).save(filename)

  def make() -> SentencePieceVocabulary:
    _wait_for_file(filename, train)
    return load(filename)

  result: SentencePieceVocabulary = kept_lib.kept(
    "subwords",
    {"filename": filename},
    make=make,
    load=load,
    save=SentencePieceVocabulary.save,
    source=lambda: filename if tf.io.gfile.exists(filename) else None,
  )
  if vocab_size is not None and result.vocab_size != vocab_size + extra_ids:
    raise ConfigError(
      f"the vocabulary file {filename!r} has {result.vocab_size - extra_ids} pieces, and "
      f"vocab_size is {vocab_size}; bind another filename (and another model_dir, if it has "
      "checkpoints) to train another one"
    )
  return result


def _wait_for_file(filename: str, train: Callable[[], None]) -> None:
  """Lets the chief create a missing file; raises if this worker does not see it then."""
  # Those who have a file of their own, on disks of several machines, do not need the chief's.
  if workers.any_worker(not tf.io.gfile.exists(filename)):
    by_chief(train)
    if not tf.io.gfile.exists(filename):
      raise ConfigError(
        f"this worker does not see the vocabulary file {filename!r}, which the chief wrote: give "
        "a filename in a folder that all workers see, or copy the file"
      )


def _lines_of(folder: str, globs: str | Sequence[str] | None) -> Iterable[str]:
  for file in text_files.read_text_files(text_files.in_folder(folder, globs or ())):
    yield from file.text.split("\n")


def sentencepiece_module() -> ModuleType:
  """The package sentencepiece; `ConfigError` if it is not installed."""
  try:
    import sentencepiece
  except ImportError as e:
    raise ConfigError(
      "subword vocabularies need the package sentencepiece: pip install sentencepiece; "
      "get_byte_vocabulary() needs nothing"
    ) from e
  return sentencepiece
