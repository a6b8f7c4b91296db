"""Names of dimensions: what the user gives, else of variables' paths, arguments and operations."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence

from mesh_tensorflow.errors import DimensionError
from mesh_tensorflow.importing.axes import Axes, Factor
from mesh_tensorflow.importing.nodes import Program, Wire
from mesh_tensorflow.program.dimensions import Dimension

# What the axes of a variable are, by the end of its path: from the last one backwards.
_ROLES = {
  "bias": ("units",),
  "beta": ("features",),
  "depthwise_kernel": ("multiplier", "channels"),
  "embeddings": ("features", "vocabulary"),
  "gamma": ("features",),
  "moving_mean": ("features",),
  "moving_variance": ("features",),
  "pointwise_kernel": ("filters", "channels"),
  "recurrent_kernel": ("gates", "units"),
}
_KERNEL = {2: ("units", "input"), 3: (), 4: ("filters", "channels"), 5: ("filters", "channels")}
# A name in a layout ends at any of these.
_ILLEGAL = re.compile(r"[:;,\s]+")


class Places:
  """Named wires of a program: its arguments, its results, its variables.

  Args:
    arguments: name -> wire.
    outputs: name -> wire.
    variables: path -> wires of its handles.
  """

  def __init__(
    self,
    arguments: Mapping[str, Wire],
    outputs: Mapping[str, Wire],
    variables: Mapping[str, Wire],
  ):
    self.arguments = arguments
    self.outputs = outputs
    self.variables = variables

  def matching(self, pattern: str) -> dict[str, Wire]:
    """Wires that a key of `dims` names: an argument, a result, or variables by a pattern."""
    for named in (self.arguments, self.outputs):
      if pattern in named:
        return {pattern: named[pattern]}
    ends = {n: w for n, w in self.arguments.items() if n.rsplit("/", 1)[-1] == pattern}
    if len(ends) == 1:  # "user" of "features/user"
      return ends
    return {p: w for p, w in self.variables.items() if fnmatch.fnmatchcase(p, pattern)}

  @property
  def names(self) -> list[str]:
    """All names."""
    return [*self.arguments, *self.outputs, *self.variables]


def give_names(axes: Axes, places: Places, dims: Mapping[str, Sequence[str | None]]) -> None:
  """Enters the names that the user gives, before axes are joined.

  Args:
    axes: the classes of axes.
    places: what has a name.
    dims: name of an argument or result, or pattern over variables' paths -> a name, or None, for
      each axis.

  Raises:
    DimensionError: there is nothing of that name; it has another number of axes; or an axis is
      given two names.
  """
  for pattern, names in dims.items():
    found = places.matching(pattern)
    if not found:
      close = difflib.get_close_matches(pattern, places.names, 3) or places.names[:8]
      raise DimensionError(
        f"from_tensorflow: dims has {pattern!r}, but no argument, result or variable is named so; "
        f"there are {', '.join(close)}"
      )
    for path, wire in found.items():
      _name_axes(axes, pattern, path, wire, names)


def _name_axes(
  axes: Axes, pattern: str, path: str, wire: Wire, names: Sequence[str | None]
) -> None:
  if isinstance(names, str) or len(names) != wire.rank:
    raise DimensionError(
      f"from_tensorflow: dims[{pattern!r}] is {names!r}, but {path} has {wire.rank} axes of sizes "
      f"{list(wire.shape)}; give a list with a name, or None, for each"
    )
  given = [n for n in names if n is not None]
  if len(set(given)) != len(given):
    raise DimensionError(f"from_tensorflow: dims[{pattern!r}] has a name twice: {list(names)}")
  for i, name in enumerate(names):
    if name is None:
      continue
    if not isinstance(name, str) or not name or _ILLEGAL.search(name):
      raise DimensionError(
        f"from_tensorflow: dims[{pattern!r}] has the name {name!r}; a name of a dimension is text "
        "without blanks, colons, commas and semicolons"
      )
    for factor in axes.factors(wire, i):
      if factor.name not in (None, name):
        raise DimensionError(
          f"from_tensorflow: two names for axis {i} of {path}: {factor.name!r} and {name!r}"
        )
      factor.name, factor.pinned = name, True


def name_factors(axes: Axes, program: Program, places: Places) -> dict[Factor, Dimension]:
  """Gives each factor a dimension.

  Repeated parts share names: where paths are equal but for numbers, sizes are equal, and no tensor
  has both. Two sizes never share one.

  Args:
    axes: the classes of axes, all joins made.
    program: the program.
    places: what has a name.

  Raises:
    DimensionError: a name of the user's would stand for two sizes, or twice in one tensor.
  """
  _share_given_names(axes)
  made_by = {w: node.name for node in program.nodes for w in node.outputs}
  wished: dict[Factor, str] = {}
  for factor in axes.all_factors():
    if factor.name is None and factor.alike is None:
      wished[factor] = _wish(factor, places, made_by)
  _share_names_of_repetitions(wished)
  taken: dict[str, Factor] = {f.name: f for f in axes.all_factors() if f.name is not None}
  result: dict[Factor, Dimension] = {}
  # Of those that are alike to others the names follow from theirs.
  for factor in sorted(axes.all_factors(), key=lambda f: f.name is None and f.alike is not None):
    if factor.name is None:
      for name in _choices(factor, wished):
        other = taken.get(name)
        if other is None or (factor.alike is not None and _may_share(factor, other)):
          factor.name = name
          break
      taken.setdefault(str(factor.name), factor)
      taken[str(factor.name)].wires |= factor.wires
    result[factor] = Dimension(str(factor.name), factor.size)
  return result


def _choices(factor: Factor, wished: Mapping[Factor, str]) -> Iterator[str]:
  """Yields candidate names for a factor, the best first."""
  if factor.alike is not None:
    origin = factor.alike.resolved()[0]
    # As in attention: the positions that are looked at, of the same sequence.
    base = f"memory_{origin.name or _memory(origin)}"
  else:
    base = wished[factor]
  yield base
  number = 1
  while True:
    number += 1
    yield f"{base}_{number}"


def _memory(origin: Factor) -> str:
  return "axis" if origin.alike is None else f"memory_{origin.alike.resolved()[0].name or 'axis'}"


def _may_share(factor: Factor, other: Factor) -> bool:
  return factor.size == other.size and not factor.wires & other.wires


def _share_given_names(axes: Axes) -> None:
  """Joins factors with the same user-given name; raises an error if they cannot be joined."""
  first: dict[str, Factor] = {}
  for factor in axes.all_factors():
    if factor.name is None:
      continue
    other = first.setdefault(factor.name, factor)
    if other is factor:
      continue
    if other.size != factor.size:
      raise DimensionError(
        f"from_tensorflow: the name {factor.name!r} is given to axes of sizes {other.size} "
        f"({other.where}) and {factor.size} ({factor.where}); name one of them differently"
      )
    both = other.wires & factor.wires
    if both:
      raise DimensionError(
        f"from_tensorflow: {next(iter(both))} would have the dimension {factor.name!r} twice "
        f"({other.where} and {factor.where}); name one of them differently"
      )
    other.absorb(factor)


def _share_names_of_repetitions(wished: dict[Factor, str]) -> None:
  """Joins factors of repeated layers; removes the absorbed ones from `wished`."""
  first: dict[tuple[str, int], list[Factor]] = {}
  for factor, name in list(wished.items()):
    key = re.sub(r"_?\d+", "#", name.rsplit(".", 1)[0]) + name.rsplit(".", 1)[-1], factor.size
    alike = first.setdefault((re.sub("#", "", key[0]), key[1]), [])
    for other in alike:
      if not other.wires & factor.wires:
        other.absorb(factor)
        del wished[factor]
        break
    else:
      alike.append(factor)


def _wish(factor: Factor, places: Places, made_by: Mapping[Wire, str]) -> str:
  """Preferred name of a factor, before collisions are resolved."""
  of_variable = {w: path for path, w in places.variables.items()}
  of_argument = {w: name for name, w in places.arguments.items()}
  candidates: list[tuple[int, str]] = []
  for wire, i in factor.places:
    if wire in of_variable:
      name, is_made = _name_of_variable_axis(of_variable[wire], wire.rank, i)
      candidates.append((0 if is_made else 1, name))
    elif wire in of_argument:
      candidates.append((2, f"{of_argument[wire]}.{i}"))
    elif wire in made_by:
      scope = made_by[wire].rsplit("/", 1)[0]
      candidates.append((3, f"{scope}.{i}"))
  name = min(candidates, key=lambda c: c[0])[1] if candidates else "axis"
  return _ILLEGAL.sub("_", name)


def _name_of_variable_axis(path: str, rank: int, axis: int) -> tuple[str, bool]:
  """Name of an axis of a variable, and whether it is an output axis of the layer."""
  scope, _, leaf = path.rpartition("/")
  is_kernel = leaf in ("kernel", "w")
  roles = _KERNEL.get(rank, ()) if is_kernel else _ROLES.get(leaf, ())
  behind = rank - 1 - axis
  if leaf == "bias" and rank > 1:  # As of Keras' EinsumDense: the kernel tells as much.
    roles = ()
  role = roles[behind] if behind < len(roles) else str(axis)
  of_layer = bool(scope) and (is_kernel or leaf in _ROLES)
  return f"{scope if of_layer else path}.{role}", role in ("units", "filters", "features")
