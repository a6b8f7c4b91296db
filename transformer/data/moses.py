"""Words and texts as by the scripts of Moses (Koehn et al., 2007).

Needs the package sacremoses: `pip install sacremoses`.
"""

from __future__ import annotations

import importlib
from typing import Any

from mesh_tensorflow.errors import ConfigError


def optional_package(name: str, what: str) -> Any:
  """Imports a package that is an extra.

  Args:
    name: of the package.
    what: what needs it, for the error.

  Raises:
    ConfigError: it is not installed.
  """
  try:
    return importlib.import_module(name)
  except ImportError as e:
    raise ConfigError(f"{what} needs the package {name}: pip install {name}") from e


class MosesWords:
  """Cuts texts into words, and joins words to texts.

  A word is what stands between blanks: punctuation is a word of its own, and an elision ends where
  the language says, as in "l' homme". Special characters stay as they are; a typographic
  apostrophe, which sacremoses takes for a word, becomes a plain one.

  Args:
    language: its code, "fr" for instance. Those that Moses has no rules for are treated as English.

  Raises:
    ConfigError: sacremoses is not installed.
  """

  def __init__(self, language: str):
    moses = optional_package("sacremoses", "Words as by Moses")
    self.language = language
    self._tokenizer = moses.MosesTokenizer(lang=language)
    self._detokenizer = moses.MosesDetokenizer(lang=language)

  def cut(self, text: str) -> str:
    """The words of a text, with a blank between two."""
    plain = text.replace("’", "'")
    return str(self._tokenizer.tokenize(plain, return_str=True, escape=False))

  def join(self, words: str) -> str:
    """The text of words with blanks between them."""
    return str(self._detokenizer.detokenize(words.split(), unescape=False))
