"""Checks of arguments, by the annotations of the function that is called.

Every public function and method goes through `checked`, so that a wrong argument is told
when the graph is built, with the names of function and argument, and not by what comes to
grief over it later. What an annotation accepts: `kinds`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from mesh_tensorflow.arguments import kinds
from mesh_tensorflow.arguments.kind import GraphMember, Kind, SymbolicTensor
from mesh_tensorflow.errors import GraphError

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Of a parameter: the exact types that are accepted at once, its kind, its name.
_Entry: TypeAlias = tuple[frozenset[type], Kind | None, str]


class Signature:
  """The parameters of a function, and what each accepts.

  Args:
    function: a function of the package.
    name: for messages; by default the function's.
    only_lowering: whether `is_plainly_right` looks only at what would come out in the lowering.
  """

  def __init__(
    self, function: Callable[..., Any], name: str | None = None, *, only_lowering: bool = False
  ):
    self._name = name or function.__name__.removeprefix("mtf_")
    namespace = vars(inspect.getmodule(inspect.unwrap(function)))
    self._positional: list[_Entry] = []
    self._by_name: dict[str, _Entry] = {}
    parameters = list(inspect.signature(function).parameters.values())
    self._first = 1 if parameters and parameters[0].name == "self" else 0
    self._optional: set[str] = set()
    for p in parameters[self._first :]:
      if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
        continue
      kind = kinds.kind_of(_evaluated(p.annotation, namespace))
      entry: _Entry = (frozenset(), None, p.name)
      if kind is not None:
        # The name of an operation may always be left to the operation.
        optional = p.default is None or p.name == "name" and p.default is not p.empty
        # `ShapeLike | None` is one flat union, of which `ShapeLike` is looked up as a whole.
        optional = optional or str(p.annotation).endswith("| None")
        entry = (kind.types | {type(None)} if optional else kind.types, kind, p.name)
        if optional:
          self._optional.add(p.name)
      if p.kind is not p.KEYWORD_ONLY:
        self._positional.append(entry)
      self._by_name[p.name] = entry
    found = {name: kind for name, (_, kind, _) in self._by_name.items() if kind is not None}
    about_lowering = {name: k for name, k in found.items() if k.is_about_lowering}
    self.is_about_lowering = bool(about_lowering)
    self.is_plainly_right = self._compiled(parameters, about_lowering if only_lowering else found)

  def _compiled(
    self, parameters: Sequence[inspect.Parameter], looked_at: Mapping[str, Kind]
  ) -> Callable[..., bool]:
    """Compiles a fast check with the same parameters: True if all arguments are surely valid.

    `check` takes longer than building many operations. So, as `dataclasses` does, this generates a
    function from source text, which takes a fraction of a microsecond.
    """
    bound: dict[str, Any] = {}

    def bind(value: Any) -> str:
      name = f"_{len(bound)}"
      bound[name] = value
      return name

    tests, tensors = [], []
    declared = []
    for p in parameters:
      default = None if p.default is p.empty else bind(p.default)
      declared.append(p.replace(annotation=p.empty, default=p.empty))
      kind = looked_at.get(p.name)
      if default is not None:
        declared[-1] = p.replace(annotation=p.empty, default=_Source(default))
      if kind is None:
        continue
      test = kind.quick(p.name, bind)
      if p.name in self._optional:
        test = f"{p.name} is None or {test}"
      elif default is not None:
        test = f"{p.name} is {default} or {test}"
      elif test.startswith("type(") and kind.words.endswith("ensor"):
        tensors.append(p.name)
      tests.append(f"({test})")
    # Tensors of one mesh are of one graph.
    tests += [f"{tensors[0]}._mesh is {x}._mesh" for x in tensors[1:]]
    source = f"lambda {str(inspect.Signature(declared))[1:-1]}: {' and '.join(tests) or True}"
    right: Callable[..., bool] = eval(source, bound)  # noqa: S307 - made above
    return right

  def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises a typed error for the first argument that is not of its parameter's kind.

    Args:
      args: positional arguments of the call; for a method `self` comes first.
      kwargs: keyword arguments of the call.

    Raises:
      GraphError: tensors of two graphs are given.
    """
    pairs = list(zip(self._positional, args[self._first :]))
    if kwargs:
      pairs += [(self._by_name[k], v) for k, v in kwargs.items() if k in self._by_name]
    graph = first = None
    for (types, kind, name), value in pairs:
      if kind is not None and type(value) not in types and not kind.accepts(value):
        error = kind.refuse(self._label(pairs, value), name, value)
        raise error
      for v in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(v, GraphMember):
          if graph is None:
            graph, first = v.graph, v
          elif v.graph is not graph:
            raise GraphError(
              f"{self._label(pairs, v, first)}: {_described(v)} belongs to another graph than "
              f"{_described(first)}; make both in one graph, or export the one "
              "(lowering.export_to_tf_tensor) and import it here"
            )

  def check_object(self, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Checks the arguments of a constructor: by the fast check, then by `check`."""
    try:
      right = self.is_plainly_right(cls, *args, **kwargs)
    except (TypeError, AttributeError):
      right = False
    if not right:
      self.check((cls, *args), kwargs)

  def _label(self, pairs: Sequence[Any], *others: Any) -> str:
    """Label for messages: the function, the `name` argument, and the first tensor argument."""
    label = self._name
    for (_, _, name), value in pairs:
      if name == "name" and isinstance(value, str):
        label += f" {value!r}"
    for _, value in pairs:
      for v in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(v, SymbolicTensor) and not any(v is o for o in others):
          return f"{label} of {v!r}"
    return label


def _described(x: Any) -> str:
  """Describes a tensor with its mesh, or a mesh or operation, for a message."""
  mesh = getattr(x, "mesh", None)
  return repr(x) if mesh is None else f"{x!r} on {mesh!r}"


class _Source:
  """Stand-in for a default value: its `repr` is source text."""

  def __init__(self, text: str):
    self._text = text

  def __repr__(self) -> str:
    return self._text


def _evaluated(annotation: Any, namespace: Mapping[str, Any]) -> Any:
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
  is_plainly_right: Callable[..., bool]

  def first(*args: Any, **kwargs: Any) -> bool:
    nonlocal signature, is_plainly_right
    signature = Signature(function, _name_of(function))
    is_plainly_right = signature.is_plainly_right
    return is_plainly_right(*args, **kwargs)

  # Made at the first call: the classes that annotations name may be defined after the function.
  is_plainly_right = first

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    try:
      right = is_plainly_right(*args, **kwargs)
    except (TypeError, AttributeError):  # Too few (gin may know the others), or another kind.
      right = False
    if not right:
      assert signature is not None  # `first` made it.
      signature.check(args, kwargs)
    return function(*args, **kwargs)

  # For `inspect.getfullargspec`, which gin asks and which does not look behind a wrapper.
  vars(call)["__signature__"] = inspect.signature(function)
  return cast(_Function, call)


def _name_of(function: Callable[..., Any]) -> str:
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
def signature_of_class(cls: type, only_lowering: bool = False) -> Signature | None:
  """Signature of a class's constructor; None for a class from another package."""
  owner, constructor = constructor_of(cls)
  if not owner.__module__.startswith("mesh_tensorflow."):
    return None
  return Signature(constructor, cls.__name__, only_lowering=only_lowering)


@functools.cache
def signature_to_check_first(cls: type) -> Signature | None:
  """`signature_of_class`, if wrong arguments would fail only in the lowering; else None."""
  signature = signature_of_class(cls, only_lowering=True)
  return signature if signature is not None and signature.is_about_lowering else None
