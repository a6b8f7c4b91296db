"""Options of readers: each is declared once, in a record, whose fields are arguments of a reader.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class MyOptions(ByNumber):
      path: str = argument("the file.", gin.REQUIRED)

    @reader(MyOptions, "sequence_length vocabulary dataset_split path seed skip batch_size")
    def my_reader(options: MyOptions) -> tf.data.Dataset: ...

`my_reader` takes the fields as arguments, those that are named there also by position; gin binds
them by the name `dataset.my_reader`. Its docstring has "{settings}" where the arguments stand.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import gin
import tensorflow as tf

from mesh_settings.records import settings_of, takes_settings
from mesh_settings.rules import COUNT, COUNT_OR_ZERO, one_of
from mesh_tensorflow.arguments.declared import affects, declares
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.training import input_shards, seeds
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.data.files.arguments import argument, check_choices
from mesh_tensorflow.transformer.data.packing import Length

MODULE = "mesh_tensorflow.transformer.dataset"

_F = TypeVar("_F", bound=Callable[..., Any])
_Options = TypeVar("_Options")


# ------------------------------------------------------------------------------- records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
  """Options of all readers."""

  sequence_length: Length = argument("an int, or a dict from each feature (`inputs`, `targets`).")
  vocabulary: Any = argument("a `Vocabulary`, or a tuple of one for inputs and one for targets.")
  dataset_split: str = argument('"train", or another split of the data.', "train")
  batch_size: int | None = argument("has no effect.", None, COUNT.or_none())

  @property
  def train(self) -> bool:
    """True for the training split."""
    return self.dataset_split == "train"

  @property
  def length(self) -> int:
    """The length of targets.

    Raises:
      ConfigError: there is none.
    """
    return self.lengths("targets")["targets"]

  def lengths(self, *features: str) -> dict[str, int]:
    """The length of each of some features.

    Raises:
      ConfigError: one is missing.
    """
    given = self.sequence_length
    if not isinstance(given, Mapping):
      return dict.fromkeys(features, int(given))
    missing = [f for f in features if f not in given]
    if missing:
      raise ConfigError(f"sequence_length {given} has no {', '.join(map(repr, missing))}")
    return {f: int(given[f]) for f in features}

  @property
  def of_targets(self) -> Any:
    """The vocabulary of targets."""
    return self.vocabulary[1] if isinstance(self.vocabulary, tuple) else self.vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByNumber(Examples):
  """Options of readers that know their examples by number, and can start at any of them."""

  seed: int | None = argument("seed of the order; None: that of the run (`run.seeds`).", None)
  skip: int = argument(
    "number of the example to start at; what comes before is not made.", 0, COUNT_OR_ZERO
  )
  batch_rows: BatchRows | None = argument(
    "the examples of each batch to make, where the first batch begins at `skip`; None: those of "
    "the current input shard, or all.",
    None,
  )

  @property
  def order_seed(self) -> int:
    """The seed of the order; to be asked for while the reader is called."""
    return seeds.chosen(self.seed)

  @property
  def needed(self) -> BatchRows | None:
    """The examples of each batch to make; None: all. To be asked for while the reader is called."""
    return self.batch_rows or input_shards.current().rows()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoSplits(ByNumber):
  """Options of readers of what is trained on, and of what is held out."""

  dataset_split: str = argument(
    '"train", or "validation": what is held out.', "train", one_of(("train", "validation"))
  )


# -------------------------------------------------------------------------------- readers


def reader(
  record: type[_Options],
  order: str,
  texts: Callable[[_Options, str | None], Iterator[str]] | None = None,
  **defaults: Any,
) -> Callable[[Callable[[_Options], tf.data.Dataset]], Callable[..., tf.data.Dataset]]:
  """Decorator of a function of options: makes it a reader, which gin can bind.

  Args:
    record: the class of the options, a frozen dataclass.
    order: names of the arguments that may be given by position; the others are keywords.
    texts: yields the training texts to build a vocabulary from, of the options that gin binds, and
      a feature or None for all; see `with_texts`.
    **defaults: other defaults than those of the record.
  """

  def decorate(read: Callable[[_Options], tf.data.Dataset]) -> Callable[..., tf.data.Dataset]:
    def call(given: dict[str, Any]) -> tf.data.Dataset:
      options = record(**given)
      check_choices(options, read.__name__)
      if isinstance(options, ByNumber) and options.skip < 0:
        raise ConfigError(f"{read.__name__}: skip (={options.skip}) must not be negative")
      return read(options)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
      setattr(call, name, getattr(read, name))
    made = takes_settings(record, order.split(), defaults)(call)
    made = gin.configurable(module=MODULE)(affects("training")(declares(record)(made)))
    return made if texts is None else with_texts(lambda f: texts(_bound(made, record), f))(made)

  return decorate


def _bound(made: Callable[..., object], record: type[_Options]) -> _Options:
  """The options of a reader, as gin binds them; None for those that the trainer gives.

  Raises:
    ConfigError: one that has to be bound is not.
  """
  bound, values = gin.get_bindings(made), {}
  for name, parameter in inspect.signature(made).parameters.items():
    values[name] = bound.get(name, parameter.default)
    if values[name] is gin.REQUIRED:
      help, _, _ = settings_of(record)[name].help.partition(";")
      raise ConfigError(f"{made.__name__}.{name} is not bound: give {help.rstrip('.')}")
    if values[name] is parameter.empty:
      values[name] = None
  return record(**values)


def with_texts(texts: Callable[[str | None], Iterator[str]]) -> Callable[[_F], _F]:
  """Decorator that attaches to a data set function the texts to build a vocabulary from.

  `run.vocabulary = 'sentencepiece:8000'` is made of them.

  Args:
    texts: called with the feature, or None for all; returns the texts of the training split, as gin
      binds the arguments of the function.
  """

  def mark(dataset_fn: _F) -> _F:
    dataset_fn.__dict__["texts"] = texts
    return dataset_fn

  return mark


def texts_of(
  dataset_fn: Callable[..., object] | None,
) -> Callable[[str | None], Iterator[str]] | None:
  """The text iterator that `with_texts` attached to a data set function; None without one."""
  # Also of the function in a scope of gin's, which copies attributes.
  found: Callable[[str | None], Iterator[str]] | None = getattr(dataset_fn, "texts", None)
  return found
