"""Names of dimensions, arguments, variables and parts of an imported model."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, DimensionError
from mesh_tensorflow.importing.axes import Axes, Factor
from mesh_tensorflow.importing.nodes import Program, Wire
from mesh_tensorflow.program.dimensions import Dimension


def callable_of(fn: Any) -> Callable[..., Any]:
  """Returns the callable to trace: of a tf.Module its `__call__`.

  Raises:
    ArgumentError: it cannot be called.
  """
  if not callable(fn):
    raise ArgumentError(
      "from_tensorflow: fn must be a tf.function, a Keras model, a tf.Module with __call__, or "
      f"another callable, got {type(fn).__name__}"
    )
  if hasattr(fn, "get_concrete_function"):
    return fn  # type: ignore[no-any-return]
  method = fn.__call__
  if isinstance(fn, tf.Module) and hasattr(method, "get_concrete_function"):
    return method  # type: ignore[no-any-return]
  # A function of its own: AutoGraph translates functions, not objects.
  return fn if inspect.isroutine(fn) else lambda *args, **kwargs: fn(*args, **kwargs)


def parameter_names(fn: Any, count: int) -> list[str]:
  """The names of the first parameters of a function.

  Args:
    fn: what the user gave: of a Keras model, `call` has the names.
    count: number of parameters.
  """
  called = getattr(fn, "call", fn)
  try:
    parameters = list(inspect.signature(called).parameters.values())
  except (TypeError, ValueError):
    parameters = []
  named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
  names = [p.name for p in parameters if p.kind in named]
  rest = [f"argument_{i}" for i in range(len(names), count)]
  return [*names, *rest][:count]


def named_leaves(name: str, structure: object) -> Iterator[tuple[str, Any]]:
  """The leaves of a nested structure, in the order of `tf.nest.flatten`, with their paths.

  Args:
    name: of the whole.
    structure: dicts, tuples, lists, and leaves.
  """
  if isinstance(structure, Mapping):
    for key in sorted(structure):
      yield from named_leaves(f"{name}/{key}", structure[key])
  elif isinstance(structure, (list, tuple)):
    names = getattr(structure, "_fields", range(len(structure)))
    for key, part in zip(names, structure):
      yield from named_leaves(f"{name}/{key}", part)
  else:
    yield name, structure


def variable_paths(fn: Any, own: OwnNames) -> dict[int, tuple[str, bool]]:
  """Names of the variables of a model or module, and whether they are trained.

  Args:
    fn: what the user gave: a Keras model or layer, a tf.Module, a method of one, or a function.
    own: the names of its parts.

  Returns:
    By the id of the tf.Variable. Those that are found nowhere have the names that TensorFlow knows.
  """
  owner = getattr(fn, "__self__", fn)
  found: dict[int, tuple[str, bool]] = {}
  if isinstance(owner, tf.Module):
    _walk(owner, "", found, set())
  for v in (*keras_variables(owner), *own.variables):
    found.setdefault(id(v.value), (own.of(v.path) if is_part(v) else v.path, bool(v.trainable)))
  return found


def keras_variables(owner: object) -> Sequence[Any]:
  """The variables of a Keras object: its own kind, which have a path and a value."""
  variables = getattr(owner, "variables", ()) if hasattr(owner, "call") else ()
  return [v for v in variables if hasattr(v, "path") and hasattr(v, "value")]


def _walk(value: object, path: str, found: dict[int, tuple[str, bool]], seen: set[int]) -> None:
  """Enters the variables below an attribute of a module."""
  if id(value) in seen:
    return
  seen.add(id(value))
  if isinstance(value, tf.Variable):
    found[id(value)] = path, bool(value.trainable)
  elif isinstance(value, Mapping):
    for key, part in value.items():
      _walk(part, f"{path}/{key}", found, seen)
  elif isinstance(value, (list, tuple)):
    for i, part in enumerate(value):
      _walk(part, f"{path}/{i}", found, seen)
  elif isinstance(value, tf.Module):
    for key, part in vars(value).items():
      if not key.startswith("_self_"):
        _walk(part, f"{path}/{key}".lstrip("/"), found, seen)


_COUNTED = re.compile(r"(.+?)(?:_(\d+))?")


class OwnNames:
  """Names of parts and variables as in a process that has nothing but this model.

  Args:
    owner: a model, or a function that uses some.
    variables: paths of variables from which Keras makes those of an optimizer's.

  Attributes:
    variables: Keras' variables that the owner has, or uses.
  """

  def __init__(self, owner: object, variables: Iterable[str] = ()):
    parts = _parts_of(owner)
    self.variables = [x for x in parts if hasattr(type(x), "assign") and hasattr(type(x), "path")]
    self._parts = _counted_among(parts)
    self._flat: list[tuple[str, str]] = []
    flat = [(path.replace("/", "_"), self.of(path).replace("/", "_")) for path in variables]
    self._flat = sorted(flat, key=lambda pair: -len(pair[0]))

  def of(self, path: str) -> str:
    """Renumbers the parts of a path, or of an operation's name, within this model.

    Args:
      path: names, joined by slashes.
    """
    return "/".join(map(self._part, path.split("/")))

  def _part(self, name: str) -> str:
    if name in self._parts:
      return self._parts[name]
    for path, own in self._flat:
      if name.startswith(f"{path}_"):  # "sequential_1_dense_3_kernel_momentum"
        return own + name[len(path) :]
    # TensorFlow counts scopes of one name: "dense_3_1" is where that layer is called again.
    again = _COUNTED.fullmatch(name)
    if again is not None and again[2] and again[1] in self._parts:
      return f"{self._parts[again[1]]}_{again[2]}"
    return name


def _counted_among(parts: Iterable[object]) -> dict[str, str]:
  """Maps names with Keras' process-wide counters to names counted within this model."""
  numbers: dict[str, set[int]] = {}
  given: set[str] = set()
  for part in parts:
    name = getattr(part, "name", None)
    found = _COUNTED.fullmatch(name) if isinstance(name, str) else None
    if found is None:
      continue
    if _plain(found[1]) == _plain(type(part).__name__):
      numbers.setdefault(found[1], set()).add(int(found[2] or 0))
    else:
      given.add(found[0])
  own: dict[str, str] = {}
  for base, used in numbers.items():
    free = (n for i in range(len(used) + len(given)) if (n := _numbered(base, i)) not in given)
    own.update(zip((_numbered(base, n) for n in sorted(used)), free))
  return own


def _numbered(base: str, number: int) -> str:
  return f"{base}_{number}" if number else base


def _plain(name: str) -> str:
  """Normalizes a name: "multi_head_attention" and "MultiHeadAttention" become equal."""
  return re.sub(r"\W|_", "", name).lower()


def _parts_of(owner: object) -> list[Any]:
  """Layers, metrics, optimizers and variables below an object."""
  seen: dict[int, Any] = {id(owner): owner}
  waiting = [owner, *_used_by(owner)]
  parts = []
  while waiting:
    x = waiting.pop()
    if isinstance(x, Mapping):
      inside: Collection[Any] = list(x.values())
    elif isinstance(x, (list, tuple, set, frozenset)):
      inside = list(x)
    elif x is owner or is_part(x):
      parts.append(x)
      inside = list(getattr(x, "__dict__", {}).values())
    else:
      continue
    for y in inside:
      if id(y) not in seen:
        seen[id(y)] = y
        waiting.append(y)
  return parts


def is_part(x: object) -> bool:
  """True if it is a part of a model, so that its name may have Keras' counter."""
  kind = type(x)
  return hasattr(kind, "variables") or kind.__module__.partition(".")[0] == "keras"


def _used_by(owner: Any) -> list[Any]:
  """Objects in a function's closure and globals, and the object that a method is bound to."""
  function = getattr(owner, "python_function", owner)  # Of a tf.function.
  found = [getattr(function, "__self__", None)]
  try:
    names = inspect.getclosurevars(function)
  except (TypeError, ValueError):  # It is no function of Python's.
    return found
  return [*found, *names.nonlocals.values(), *names.globals.values()]


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
  # The first variable counts, not the first that was joined: so programs of one model agree.
  of_variable = {w: (n, path) for n, (path, w) in enumerate(places.variables.items())}
  of_argument = {w: name for name, w in places.arguments.items()}
  candidates: list[tuple[int, int, str]] = []
  for wire, i in factor.places:
    if wire in of_variable:
      number, path = of_variable[wire]
      name, is_made = _name_of_variable_axis(path, wire.rank, i)
      candidates.append((0 if is_made else 1, number, name))
    elif wire in of_argument:
      candidates.append((2, 0, f"{of_argument[wire]}.{i}"))
    elif wire in made_by:
      scope = made_by[wire].rsplit("/", 1)[0]
      candidates.append((3, 0, f"{scope}.{i}"))
  name = min(candidates, key=lambda c: c[:2])[2] if candidates else "axis"
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
