"""Readers of records of options: signature, docstring, gin, checks, texts for vocabularies."""

from __future__ import annotations

import dataclasses
import inspect

import gin
import pytest
import tensorflow as tf

from mesh_settings.rules import one_of
from mesh_tensorflow import errors
from mesh_tensorflow.training.input_shards import BatchRows, InputShard, read_shard
from mesh_tensorflow.transformer.data.files.arguments import argument
from mesh_tensorflow.transformer.data.options import ByNumber, reader, texts_of
from mesh_tensorflow.transformer.gin_config import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Letters(ByNumber):
  letters: str = argument("the letters; each is an example.", gin.REQUIRED)
  case: str = argument("upper or lower.", "lower", one_of(("lower", "upper")))


SEEN = []


@reader(
  Letters,
  "sequence_length vocabulary letters dataset_split case skip",
  lambda options, feature: iter([options.letters, options.case, str(feature)]),
  case="upper",
)
def letters_of_a_test(options: Letters) -> tf.data.Dataset:
  """Letters.

  {settings}
  """
  SEEN.append(options)
  return tf.data.Dataset.from_tensor_slices(list(options.letters)).skip(options.skip)


def test_a_reader_takes_the_fields_of_its_record():
  signature = inspect.signature(letters_of_a_test)
  kinds = {p.name: p.kind.name for p in signature.parameters.values()}
  positional = [n for n, kind in kinds.items() if kind == "POSITIONAL_OR_KEYWORD"]
  assert positional == "sequence_length vocabulary letters dataset_split case skip".split()
  assert set(kinds) - set(positional) == {"batch_size", "seed", "batch_rows"}
  assert signature.parameters["case"].default == "upper"
  assert signature.return_annotation == "tf.data.Dataset"
  assert "    letters: the letters; each is an example.\n" in letters_of_a_test.__doc__
  found = letters_of_a_test(8, (None, "targets"), "abc", skip=1)
  assert list(found.as_numpy_iterator()) == [b"b", b"c"]
  options = SEEN.pop()
  assert (options.train, options.length, options.of_targets) == (True, 8, "targets")
  assert options.lengths("inputs", "targets") == {"inputs": 8, "targets": 8}


def test_gin_binds_options_and_checks_them():
  with pytest.raises(RuntimeError, match="Required bindings.*letters"):
    letters_of_a_test(8, None)
  with pytest.raises(errors.ConfigError, match="letters_of_a_test.letters is not bound: give the"):
    texts_of(letters_of_a_test)("inputs")
  gin.parse_config("dataset.letters_of_a_test.letters = 'xy'")
  assert list(texts_of(letters_of_a_test)("inputs")) == ["xy", "upper", "inputs"]
  assert len(list(letters_of_a_test(8, None))) == 2
  for option, error in (
    ({"case": "uper"}, "letters_of_a_test: case .='uper'. must be one of lower, upper; did you"),
    ({"skip": -1}, "letters_of_a_test: skip .=-1. must not be negative"),
  ):
    with pytest.raises(errors.ConfigError, match=error):
      letters_of_a_test(8, None, **option)
  # As the check of all bindings, before gin takes the first, has it.
  selector = "mesh_tensorflow.transformer.dataset.letters_of_a_test"
  assert checks.declared_values(selector, "case").choices == ("lower", "upper")
  assert {checks.effect_of(selector, n) for n in ("case", "skip", "letters")} == {"training"}


def test_rows_are_those_given_or_those_of_the_shard():
  def needed(**options):
    letters_of_a_test(8, None, "ab", **options)
    return SEEN.pop()

  seen = []
  read_shard(InputShard(3, 1), lambda: seen.append(needed().needed) or tf.data.Dataset.range(1))
  assert seen == [BatchRows(3, (1,))]
  assert needed().needed is None
  assert needed(batch_rows=BatchRows(2, (0,))).needed == BatchRows(2, (0,))
  assert (needed().order_seed, needed(seed=3).order_seed) == (0, 3)
