"""Common parts of the readers of own files: split documents, and texts for vocabularies.

`run.vocabulary = 'sentencepiece:8000'` is made of the texts that are trained on. Which these are
the data set function says: `with_texts` gives it an attribute `texts`.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import gin

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.files import own_files
from mesh_tensorflow.transformer.files.own_files import OwnFiles, Texts

FRACTION = 0.05

_F = TypeVar("_F", bound=Callable[..., Any])
# How `own_files.find` reads, by the names of the readers' arguments.
_OF_FILES = ("format", "document", "separator", "header", "quotes", "encoding")


@dataclasses.dataclass(frozen=True)
class Source:
  """Documents to train on, and documents that are held out.

  Attributes:
    files: of both, or of those to train on.
    validation: files of held-out documents; None: those of `files`.
    fraction: the part of `files` that is held out.
  """

  files: OwnFiles
  validation: OwnFiles | None
  fraction: float

  @property
  def name(self) -> str:
    """The files, for messages."""
    first, *more = self.files.paths
    return f"{first} and {len(more)} more files" if more else first

  def documents(self, split: str) -> Iterator[tuple[str, Texts]]:
    """The documents of a split, in order, each with the path of its file.

    Args:
      split: "train"; any other name means what is held out.
    """
    train = split == "train"
    if self.validation is not None and not train:
      yield from self.validation.documents()
      return
    for number, path in enumerate(self.files.paths):
      for parts in self.files.divided(self.fraction, number):
        texts = parts[0] if train else parts[1]
        if texts is not None:
          yield path, texts

  def nothing(self, split: str) -> str:
    """Text for an error message that says why a split has no documents."""
    files = self.validation if self.validation is not None and split != "train" else self.files
    count = sum(1 for _ in itertools.islice(files.documents(), 1000))
    if not count:
      return f"{files.paths[0]} has no text" if len(files.paths) == 1 else (
        f"none of the {len(files.paths)} files has any text, {files.paths[0]} for instance"
      )  # fmt: skip
    return (
      f"none of the {count} documents of {self.name} is in the {split} split (validation_fraction "
      f"{self.fraction}): give another fraction, validation_path, or smaller documents (document = "
      "'paragraph' or 'line')"
    )


def source(
  reader: str,
  path: str | Sequence[str],
  validation_path: str | Sequence[str] | None,
  validation_fraction: float | None,
  **how: Any,
) -> Source:
  """Finds the files of training and held-out documents.

  Args:
    reader: the name of the reader, for errors.
    path: a file, a folder, a glob, or a list of them.
    validation_path: the same, for the held-out documents; or None.
    validation_fraction: part of the documents of `path` to hold out, 0 to 1; None: `FRACTION`, or 0
      if there is a `validation_path`.
    **how: arguments of `own_files.find`.

  Raises:
    ConfigError: both a path and a fraction are given, or it is no fraction.
    DataError: see `own_files.find`.
  """
  if validation_path is not None and validation_fraction:
    raise ConfigError(f"{reader}: give validation_path or validation_fraction, not both")
  if validation_fraction is None:
    validation_fraction = 0.0 if validation_path is not None else FRACTION
  if not 0 <= validation_fraction < 1:
    raise ConfigError(
      f"{reader}: validation_fraction (={validation_fraction}) must be at least 0 and less than 1"
    )
  files = own_files.find(path, **how)
  validation = None
  if validation_path is not None:
    validation = own_files.find(validation_path, **how)
    both = set(files.paths) & set(validation.paths)
    if both:
      raise ConfigError(
        f"{reader}: {len(both)} file(s) are in path and in validation_path, {min(both)} for "
        "instance: the held-out text would be trained on"
      )
  return Source(files, validation, validation_fraction)


def bound(reader: Callable[..., Any], fields: Sequence[str]) -> Source:
  """The documents of a reader, as gin binds its arguments.

  Args:
    reader: a configurable with the arguments of `own_text`.
    fields: its arguments that name fields.

  Raises:
    ConfigError: its `path` is not bound.
  """
  given = gin.get_bindings(reader)
  name = reader.__name__
  if "path" not in given:
    raise ConfigError(
      f"{name}.path is not bound: give the file, the folder or the glob of the text"
    )
  defaults = {n: p.default for n, p in inspect.signature(reader).parameters.items()}
  values = {**defaults, **given}
  chosen = tuple(values[f] for f in fields if values[f] is not None)
  return source(
    name,
    values["path"],
    values["validation_path"],
    values["validation_fraction"],
    fields=chosen,
    **{n: values[n] for n in _OF_FILES if n in values},
  )


def with_texts(texts: Callable[[str | None], Iterator[str]]) -> Callable[[_F], _F]:
  """Decorator that attaches to a data set function the texts to build a vocabulary from.

  Args:
    texts: called with the feature, or None for all; returns the texts of the training split, as gin
      binds the arguments of the function.
  """

  def mark(dataset_fn: _F) -> _F:
    dataset_fn.__dict__["texts"] = texts
    return dataset_fn

  return mark


def texts_of(dataset_fn: Callable[..., Any] | None) -> Callable[[str | None], Iterator[str]] | None:
  """The text iterator that `with_texts` attached to a data set function; None without one."""
  # Also of the function in a scope of gin's, which copies attributes.
  found: Callable[[str | None], Iterator[str]] | None = getattr(dataset_fn, "texts", None)
  return found
