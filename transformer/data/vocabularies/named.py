"""Vocabularies by name: `run.vocabulary = 'sentencepiece:8000'`.

    bytes                 the bytes of UTF-8
    characters            the characters of the training texts
    characters:FILE       those of a text, or of a file that was kept
    sentencepiece:8000    8000 subwords, trained on the training texts
    sentencepiece:FILE    a SentencePiece model
    tiktoken:FILE         a .tiktoken file
    tokens:FOLDER         that of a folder of tokens

What is made of texts is kept with the checkpoints, and then no text is needed any more.
"""

from __future__ import annotations

import base64
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mesh_settings.hints import did_you_mean
from mesh_settings.run import VOCABULARIES, is_vocabulary_name
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data.files import token_folder
from mesh_tensorflow.transformer.data.vocabularies.base import ByteVocabulary, Vocabulary
from mesh_tensorflow.transformer.data.vocabularies.characters import (
  CharacterVocabulary,
  get_character_vocabulary,
)
from mesh_tensorflow.transformer.data.vocabularies.kept import describe, kept
from mesh_tensorflow.transformer.data.vocabularies.subwords import (
  SentencePieceVocabulary,
  get_subword_vocabulary,
  train_subword_vocabulary,
)
from mesh_tensorflow.transformer.data.vocabularies.tiktoken_bpe import (
  TiktokenVocabulary,
  get_tiktoken_vocabulary,
)

# From the feature that the vocabulary is for, or None for all, to texts.
Texts = Callable[[str | None], Iterable[str]]

_FORMS = (
  "'bytes', 'characters', 'sentencepiece:8000', 'sentencepiece:FILE', 'tiktoken:FILE' or "
  "'tokens:FOLDER'"
)
# SentencePiece holds in memory what it trains on, several times. So many characters are enough.
_MOST_CHARACTERS = 100_000_000


def resolve(vocabulary: Any, texts: Texts | None) -> Any:
  """Resolves `run.vocabulary`: names become vocabularies, anything else is returned as it is.

  Args:
    vocabulary: a vocabulary, a name, or an (inputs, targets) tuple of such.
    texts: see `named_vocabulary`; called with "inputs" and "targets" for those of a tuple.

  Raises:
    ConfigError: see `named_vocabulary`.
    DataError: see `named_vocabulary`.
  """
  if isinstance(vocabulary, str):
    return named_vocabulary(vocabulary, texts)
  if isinstance(vocabulary, (tuple, list)) and any(isinstance(v, str) for v in vocabulary):
    if len(vocabulary) != 2:
      raise ConfigError(f"run.vocabulary: a pair of names is needed, not {vocabulary!r}")
    return tuple(
      named_vocabulary(v, texts, feature) if isinstance(v, str) else v
      for v, feature in zip(vocabulary, ("inputs", "targets"))
    )
  return vocabulary


def named_vocabulary(name: str, texts: Texts | None, feature: str | None = None) -> Vocabulary:
  """A vocabulary by its name; see the module.

  Within `kept.kept_in` it is the one that is kept with the checkpoints, if there is one.

  Args:
    name: such as "sentencepiece:8000".
    texts: called with `feature`, and returns the texts that it is made of, if it is made of texts;
      None: there are none.
    feature: what it is for, if several are told apart.

  Returns:
    The vocabulary.

  Raises:
    ConfigError: an unknown name; or there are no texts that it could be made of.
    DataError: a file is missing or damaged, or there is no text.
  """
  kind, _, rest = name.partition(":")
  if not is_vocabulary_name(name):
    hint = "" if kind in VOCABULARIES else did_you_mean(kind, VOCABULARIES, 1, shown=repr)
    raise ConfigError(f"there is no vocabulary {name!r}: give {_FORMS}{hint}")
  if kind == "bytes":
    return ByteVocabulary()
  if kind == "tokens":
    return _of_token_folder(rest)
  if kind == "tiktoken":
    return get_tiktoken_vocabulary(rest)
  if kind == "characters" and rest:
    return get_character_vocabulary(os.path.expanduser(rest))
  if kind == "sentencepiece" and not rest.replace("_", "").isdigit():
    return get_subword_vocabulary(rest)

  def make() -> Vocabulary:
    if texts is None:
      raise ConfigError(
        f"run.vocabulary {name!r} is made of the training texts, and run.train_dataset_fn is no "
        "reader that tells them (dataset.own_text does): give a file, as in 'sentencepiece:FILE'"
      )
    if kind == "characters":
      return _of_characters(texts(feature))
    return _of_subwords(texts, feature, int(rest))

  arguments = {"name": name} if feature is None else {"name": name, "feature": feature}
  made: Vocabulary = kept(
    # By the kinds of the functions that make them from files: who gives the file of a vocabulary
    # that was made of texts, later, means the one that is kept.
    {"characters": "characters", "sentencepiece": "subwords"}[kind],
    arguments,
    make=make,
    load=load_any,
    save=lambda vocabulary, file: vocabulary.save(file),
    source=lambda: None,
  )
  return made


def load_any(path: str) -> Any:
  """A vocabulary from the file of any vocabulary with a name; its beginning says which.

  Raises:
    DataError: the file is missing or damaged.
  """
  try:
    with open(path, "rb") as f:
      start = f.read(60)
  except OSError as e:
    raise DataError(f"cannot read the vocabulary {path}: {e}") from e
  if start.startswith(b"# mesh_tensorflow character"):
    return CharacterVocabulary.load(path, unknown="skip")
  if start.startswith(b"# mesh_tensorflow byte-pair"):
    return TiktokenVocabulary.load(path)
  return SentencePieceVocabulary.load(path)


def _of_characters(texts: Iterable[str]) -> CharacterVocabulary:
  characters: set[str] = set()
  for text in texts:
    characters.update(text)
  return CharacterVocabulary(characters, unknown="skip")


def _of_subwords(texts: Texts, feature: str | None, size: int) -> SentencePieceVocabulary:
  """Subwords of which every text is made exactly; trained by the chief for all workers."""

  def train() -> str:
    print(f"training a subword vocabulary of {size:,} pieces", flush=True)
    lines = (line for text in texts(feature) for line in text.split("\n"))
    trained = train_subword_vocabulary(thinned(lines, _MOST_CHARACTERS), size, exact=True)
    # As text: what the chief tells is of JSON's kinds.
    return base64.b64encode(trained.model).decode()

  return SentencePieceVocabulary(base64.b64decode(by_chief(train)))


def thinned(lines: Iterable[str], most: int) -> Iterator[str]:
  """Yields lines in order; of many, a deterministic random sample of about `most` characters.

  Args:
    lines: any number.
    most: characters, twice as many of which are held in memory.
  """
  draw = random.Random(0).random
  kept_lines: list[tuple[float, str]] = []
  size, share = 0, 1.0
  for line in lines:
    number = draw()
    if number >= share:
      continue
    kept_lines.append((number, line))
    size += len(line) + 1
    if size > 2 * most:
      # Half of what was kept, and of what will be: so each line has the same chance.
      share /= 2
      kept_lines = [(n, x) for n, x in kept_lines if n < share]
      size = sum(len(x) + 1 for _, x in kept_lines)
  return (line for _, line in kept_lines)


# ------------------------------------------------------------------- with a folder of tokens


def _of_token_folder(path: str) -> Vocabulary:
  """The vocabulary of a folder of tokens, kept with the checkpoints as others are."""
  found: dict[str, Any] = {}
  if token_folder.is_token_folder(path):
    found = token_folder.read(path).vocabulary
    if found["kept"] == "bytes":
      return ByteVocabulary()
  made: Vocabulary = kept(
    "tokens",
    {"path": path},
    make=lambda: load_beside(token_folder.read(path)),
    load=load_any,
    save=lambda vocabulary, file: vocabulary.save(file),
    source=lambda: None,
  )
  if found and describe(made)["digest"] != found["digest"]:
    raise ConfigError(
      f"the tokens of {path} were made with another vocabulary ({found['size']} ids) than the "
      f"checkpoints were trained with ({made.vocab_size} ids): give that folder, or another "
      "--model_dir"
    )
  return made


def load_beside(tokens: token_folder.TokenFolder) -> Vocabulary:
  """The vocabulary of a folder of tokens.

  Raises:
    ConfigError: it is not in the folder.
    DataError: it is missing, or not what the tokens were made with.
  """
  how, kind, size = (tokens.vocabulary[k] for k in ("kept", "class", "size"))
  if how == "bytes":
    return ByteVocabulary()
  if not how:
    raise ConfigError(
      f"{tokens.path} was made with a vocabulary that has no file ({kind} of {size} ids): bind "
      "run.vocabulary to it as you did then"
    )
  file = os.path.join(tokens.path, token_folder.VOCABULARY)
  vocabulary: Vocabulary = load_any(file)
  if describe(vocabulary)["digest"] != tokens.vocabulary["digest"]:
    raise DataError(f"{file} is not the vocabulary that {tokens.path} was made with")
  return vocabulary


def save_beside(vocabulary: Vocabulary, path: str) -> dict[str, Any]:
  """Writes a vocabulary into a folder of tokens, if it has a file.

  Args:
    vocabulary: any.
    path: of the folder.

  Returns:
    What a `TokenFolder` says of it.

  Raises:
    StorageError: it cannot be written.
  """
  described = describe(vocabulary)
  if described == describe(ByteVocabulary()):
    return {**described, "kept": "bytes"}
  if isinstance(vocabulary, (CharacterVocabulary, SentencePieceVocabulary, TiktokenVocabulary)):
    file = os.path.join(path, token_folder.VOCABULARY)
    vocabulary.save(file)
    # Ids behind the pieces, for one, are not in the file.
    if describe(load_any(file)) == described:
      return {**described, "kept": "file"}
    os.remove(file)
  return {**described, "kept": ""}
