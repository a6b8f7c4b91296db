"""Checks of arguments, by the annotations of the function that is called.

Every public function and method goes through `checked`, so that a wrong argument is told
when the graph is built, with the names of function and argument, and not by what comes to
grief over it later. What an annotation accepts: `kinds`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from mesh_tensorflow.arguments import kinds
from mesh_tensorflow.arguments.kinds import GraphMember, Kind, SymbolicTensor
from mesh_tensorflow.errors import GraphError

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Parameter(NamedTuple):
  """A parameter of a function.

  Attributes:
    types: exact types of which every value is accepted, without a look at the value.
    kind: decides on other values; None: all are accepted.
    name: its name.
    default: a value that is accepted whatever its kind is.
  """

  types: frozenset[type]
  kind: Kind | None
  name: str
  default: Any


class Signature:
  """The parameters of a function, and what each accepts.

  Args:
    function: a function of the package.
    name: for messages; by default the function's.
  """

  def __init__(self, function: Callable[..., object], name: str | None = None):
    self._name = name or function.__name__.removeprefix("mtf_")
    namespace = vars(inspect.getmodule(inspect.unwrap(function)))
    self._positional: list[_Parameter] = []
    self._by_name: dict[str, _Parameter] = {}
    parameters = list(inspect.signature(function).parameters.values())
    self._first = 1 if parameters and parameters[0].name == "self" else 0
    for p in parameters[self._first :]:
      if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
        continue
      kind = kinds.kind_of(_evaluated(p.annotation, namespace))
      types = kind.types if kind is not None else frozenset()
      # The name of an operation may always be left to the operation.
      optional = p.default is None or p.name == "name" and p.default is not p.empty
      # `ShapeLike | None` is one flat union, of which `ShapeLike` is looked up as a whole.
      if optional or str(p.annotation).endswith("| None"):
        types |= {type(None)}
      found = _Parameter(types, kind, p.name, p.default)
      if p.kind is not p.KEYWORD_ONLY:
        self._positional.append(found)
      self._by_name[p.name] = found

  def check(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raises a typed error for the first argument that is not of its parameter's kind.

    Args:
      args: positional arguments of the call; for a method `self` comes first.
      kwargs: keyword arguments of the call.

    Raises:
      GraphError: tensors of two graphs are given.
    """
    first: GraphMember | None = None
    for (types, kind, name, default), value in self._pairs(args, kwargs):
      of_value = type(value)
      if kind is not None and of_value not in types and value is not default:
        if not kind.accepts(value):
          error = kind.refuse(self._label(args, kwargs, value), name, value)
          raise error
      if of_value is list or of_value is tuple:
        members = [v for v in value if isinstance(v, GraphMember)]
      elif isinstance(value, GraphMember):
        members = [value]
      else:
        continue
      for v in members:
        if first is None:
          first = v
        elif v.graph is not first.graph:
          raise GraphError(
            f"{self._label(args, kwargs, v, first)}: {_described(v)} belongs to another graph "
            f"than {_described(first)}; make both in one graph, or export the one "
            "(lowering.export_to_tf_tensor) and import it here"
          )

  def _pairs(
    self, args: Sequence[object], kwargs: Mapping[str, object]
  ) -> Iterable[tuple[_Parameter, Any]]:
    pairs = zip(self._positional, args[self._first :])
    if not kwargs:
      return pairs
    by_name = self._by_name
    return itertools.chain(pairs, [(by_name[k], v) for k, v in kwargs.items() if k in by_name])

  def _label(self, args: Sequence[object], kwargs: Mapping[str, object], *others: object) -> str:
    """Label for messages: the function, the `name` argument, and the first tensor argument."""
    label = self._name
    pairs = list(self._pairs(args, kwargs))
    for p, value in pairs:
      if p.name == "name" and isinstance(value, str):
        label += f" {value!r}"
    for _, value in pairs:
      for v in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(v, SymbolicTensor) and not any(v is o for o in others):
          return f"{label} of {v!r}"
    return label


def _described(x: object) -> str:
  """Describes a tensor with its mesh, or a mesh or operation, for a message."""
  mesh = getattr(x, "mesh", None)
  return repr(x) if mesh is None else f"{x!r} on {mesh!r}"


def _evaluated(annotation: object, namespace: Mapping[str, object]) -> Any:
  """Evaluates a string annotation; Any if a name in it is undefined at run time."""
  if not isinstance(annotation, str):
    return annotation
  try:
    return eval(annotation, {}, _Names(namespace))  # noqa: S307 - the package's own source
  except NameError:
    return Any


class _Names(dict[str, Any]):
  """Namespace of a module, with classes of higher packages that only its annotations name."""

  def __missing__(self, name: str) -> Any:
    return kinds.class_named(name)


def checked(function: _Function) -> _Function:
  """Decorator: checks the arguments against the annotations before calling the function."""
  signature: Signature | None = None

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    nonlocal signature
    if signature is None:
      # At the first call: the classes that annotations name may be defined after the function.
      signature = Signature(function, _name_of(function))
    signature.check(args, kwargs)
    return function(*args, **kwargs)

  # For `inspect.getfullargspec`, which gin asks and which does not look behind a wrapper.
  vars(call)["__signature__"] = inspect.signature(function)
  return cast(_Function, call)


def _name_of(function: Callable[..., object]) -> str:
  """Name of a function for messages; for a constructor that of the class."""
  name = getattr(function, "__qualname__", function.__name__).rsplit("<locals>.", 1)[-1]
  return name.removesuffix(".__init__").removeprefix("mtf_")


def check_functions(namespace: dict[str, Any], left_alone: Collection[str] = ()) -> None:
  """Wraps the functions of a module's namespace in `checked`.

  Args:
    namespace: `globals()` of a module that users import from.
    left_alone: names of functions that take slices of tensors, or are compared by identity.
  """
  for name, value in list(namespace.items()):
    if (
      inspect.isfunction(value)
      and value.__module__.startswith("mesh_tensorflow")
      and name not in left_alone
      and not name.startswith("_")
    ):
      namespace[name] = checked(value)


def constructor_of(cls: type) -> tuple[type, Callable[..., None]]:
  """The class, of a class and its bases, that defines `__init__`; and that function."""
  owner = next(c for c in cls.__mro__ if "__init__" in vars(c))
  return owner, vars(owner)["__init__"]


@functools.cache
def signature_of_class(cls: type) -> Signature | None:
  """Signature of a class's constructor; None for a class from another package."""
  owner, constructor = constructor_of(cls)
  if not owner.__module__.startswith("mesh_tensorflow."):
    return None
  return Signature(constructor, cls.__name__)
