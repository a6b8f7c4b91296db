"""Variables as matrices: the dimensions that are rows, and those that are columns."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product

# Look-up tables, of which a step changes the rows of some tokens or distances only; what makes the
# logits, whose columns stand for one token each; and what is not multiplied as a matrix is.
NOT_MATRICES = (
  "embedding",
  "(^|/)logits/",
  "softmax",
  "bias$",
  "scale$",
  "prompt",
)
# Dimensions along which each index has a matrix of its own.
STACKED = ("ensemble", "stacked", "experts", "expert_x", "expert_y", "num_expert_layers")
# The dimension on one side of the matrices of a layer; all of the other side is multiplied by it.
MODEL = ("d_model",)


@dataclasses.dataclass(frozen=True)
class Matrix:
  """A variable as matrices.

  Attributes:
    rows: dimensions of the rows (inputs): the first side in the shape, unless given otherwise.
    columns: dimensions of the columns (outputs).
  """

  rows: list[Dimension]
  columns: list[Dimension]

  @property
  def sizes(self) -> tuple[int, int]:
    """Numbers of rows and columns."""
    return (
      list_product([d.size for d in self.rows]),
      list_product([d.size for d in self.columns]),
    )


def by_rule(shape: Shape, stacked: Sequence[str], model: Sequence[str]) -> Matrix | None:
  """The matrix that a shape means; None if it is none, or could be several.

  Without the stacked dimensions, two are rows and columns. Of more, the first or the last is one
  side, and the rest the other, if that one alone is a dimension of the model.

  Args:
    shape: shape of the variable.
    stacked: names of dimensions along which each index has a matrix of its own.
    model: names of dimensions of the model.
  """
  dims = [d for d in shape if d.name not in stacked]
  if len(dims) == 2:
    return Matrix(dims[:1], dims[1:])
  if len(dims) > 2 and sum(d.name in model for d in dims) == 1:
    if dims[0].name in model:
      return Matrix(dims[:1], dims[1:])
    if dims[-1].name in model:
      return Matrix(dims[:-1], dims[-1:])
  return None


@dataclasses.dataclass(frozen=True)
class NamedMatrix:
  """Row and column dimensions of the variables in whose name a pattern is found.

  Attributes:
    pattern: regular expression, for `re.search`.
    rows: names of dimensions.
    columns: names of dimensions.
  """

  pattern: str
  rows: tuple[str, ...]
  columns: tuple[str, ...]

  def of(self, variable: Variable) -> Matrix:
    """The matrix of a variable in whose name the pattern is found.

    Raises:
      ConfigError: the variable has no such dimensions.
    """
    by_name = {d.name: d for d in variable.shape}
    missing = [n for n in (*self.rows, *self.columns) if n not in by_name]
    if missing:
      raise ConfigError(
        f"MuonOptimizer: matrices names {', '.join(missing)} of variables {self.pattern!r}, but "
        f"{variable.full_name} has {variable.shape}"
      )
    return Matrix([by_name[n] for n in self.rows], [by_name[n] for n in self.columns])


def named_matrices(given: Sequence[Any]) -> list[NamedMatrix]:
  """Checks the argument `matrices` of `MuonOptimizer`.

  Args:
    given: (regular expression, names of rows, names of columns) for each.

  Raises:
    ConfigError: one is nothing of the kind.
  """
  found = []
  for entry in given:
    if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not isinstance(entry[0], str):
      raise _wrong(entry, "it is none")
    sides = [entry[1], entry[2]]
    if not all(_is_names(s) for s in sides):
      raise _wrong(entry, "rows and columns must each be a list of names")
    if set(sides[0]) & set(sides[1]):
      raise _wrong(entry, "a dimension is both")
    try:
      re.compile(entry[0])
    except re.error as e:
      raise _wrong(entry, str(e)) from None
    found.append(NamedMatrix(entry[0], tuple(sides[0]), tuple(sides[1])))
  return found


def _is_names(side: Any) -> bool:
  is_list = isinstance(side, (list, tuple)) and bool(side)
  return is_list and all(isinstance(n, str) for n in side)


def _wrong(entry: Any, why: str) -> ConfigError:
  return ConfigError(
    f"MuonOptimizer: matrices has {entry!r}, where a (regular expression, rows, columns) is "
    f"expected, such as ('/q$', ['d_model'], ['heads']): {why}"
  )
