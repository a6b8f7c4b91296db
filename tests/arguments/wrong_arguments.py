"""Calls of everything public with one argument replaced by a wrong one: what comes of them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.arguments.argument_calls import CALLS, World

# In place of an argument's name: all that are floating tensors, at once.
ALL = "tensors"
STRANGER = mtf.Dimension("stranger", 5)

# What is put in place of every argument.
WRONG: dict[str, Callable[[World], Any]] = {
  "None": lambda k: None,
  "number": lambda k: 3,
  "negative": lambda k: -1,
  "zero": lambda k: 0,
  "fraction": lambda k: 2.5,
  "text": lambda k: "wrong",
  "array": lambda k: np.ones([4, 8], np.float32),
  "tf.Tensor": lambda k: tf.ones([4, 8]),
  "list of None": lambda k: [None],
  "list of numbers": lambda k: [3, 5, 7],
  "list of text": lambda k: ["wrong"],
  "dict": lambda k: {"wrong": 3},
  "object": lambda k: object(),
  "tensor": lambda k: k.x,
  "other graph": lambda k: World().x,
  "list of another graph": lambda k: [World().x],
  "dimension": lambda k: STRANGER,
  "size of text": lambda k: ("a", "4"),
  "pair": lambda k: ("stranger", 5),
  "list of pairs": lambda k: [("b", 8)],
  "whole fraction": lambda k: 2.0,
}

# And, besides, in place of arguments that are tensors, dimensions, or lists with one of these.
OF_TENSORS: dict[str, Callable[[World, mtf.Tensor], Any]] = {
  dtype.name: lambda k, x, d=dtype: mtf.import_tf_tensor(
    k.mesh,
    tf.fill(x.shape.to_integer_list, "s")
    if d == tf.string
    else tf.zeros(x.shape.to_integer_list, d),
    x.shape,
  )
  for dtype in (tf.bool, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float64, tf.string)
}
OF_TENSORS["same of another graph"] = lambda k, x: World().of(*x.shape, dtype=x.dtype)
OF_DIMENSIONS: dict[str, Callable[[World, mtf.Dimension], Any]] = {
  "zero size": lambda k, d: mtf.Dimension(d[0], 0),
  "negative size": lambda k, d: mtf.Dimension(d[0], -4),
  "another size": lambda k, d: mtf.Dimension(d[0], d[1] + 1),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What came of a call.

  Attributes:
    name: of what was called.
    argument: the one that was replaced.
    wrong: name of what it was replaced with.
    error: what was raised, or None.
    lowered: whether the graph was built, and the error came later.
  """

  name: str
  argument: str
  wrong: str
  error: Exception | None
  lowered: bool

  @property
  def kind(self) -> str:
    """ "accepted", "typed", "late" (typed, but not before lowering) or "untyped"."""
    if self.error is None:
      return "accepted"
    if not isinstance(self.error, mtf.MeshError):
      return "untyped"
    return "late" if self.lowered else "typed"

  def __str__(self) -> str:
    text = str(self.error).split("\n")[0][:160]
    what = "" if self.error is None else f" {type(self.error).__name__}: {text}"
    return f"{self.kind} {self.name}({self.argument}={self.wrong}){what}"


def public_names() -> dict[str, Any]:
  """Everything public that can be called, by its name in `CALLS`."""
  found: dict[str, Any] = {}
  for prefix, module in (
    ("", mtf.ops),
    ("", mtf),
    ("layers.", mtf.layers),
    ("optimize.", mtf.optimize),
    ("initializers.", mtf.initializers),
    ("beam_search.", mtf.beam_search),
    ("utils.", mtf.utils),
  ):
    for name, value in vars(module).items():
      home = getattr(value, "__module__", None) or ""
      if name.startswith("_") or not callable(value) or not home.startswith("mesh_tensorflow"):
        continue
      if inspect.isclass(value) and issubclass(value, BaseException):
        continue
      # What a module only uses is public elsewhere.
      if prefix in ("initializers.", "beam_search.", "utils.") and home != module.__name__:
        continue
      found.setdefault(prefix + name, value)
  # `abs`, `pow`, `range` and `slice` are the functions mtf_abs and so on.
  return {n: v for n, v in found.items() if f"mtf_{n}" not in found}


def resolve(name: str) -> Callable[..., Any]:
  """What is called by a name of `CALLS`."""
  value: Any = mtf
  for part in name.split("."):
    value = getattr(value, part)
  return value


def cases(name: str) -> Iterator[tuple[str, str, Callable[[World, dict], Any]]]:
  """(argument, name of what is wrong, function that makes it) of a callable."""
  function = resolve(name)
  valid = CALLS[name](World())
  tensors = [v for a in valid.values() for v in (a if isinstance(a, list) else [a])]
  if sum(isinstance(v, mtf.Tensor) and v.dtype.is_floating for v in tensors) > 1:
    for dtype in OF_TENSORS:
      if "graph" not in dtype:
        yield ALL, dtype, lambda k, v, dtype=dtype: all_tensors(k, v, dtype)
  for parameter in inspect.signature(function).parameters.values():
    argument = parameter.name
    if argument == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
      continue
    for wrong, make in WRONG.items():
      yield argument, wrong, lambda k, valid, make=make: make(k)
    value = valid.get(argument)
    for kind, makers in ((mtf.Tensor, OF_TENSORS), (mtf.Dimension, OF_DIMENSIONS)):
      if isinstance(value, kind):
        for wrong, make in makers.items():
          yield argument, wrong, lambda k, v, make=make, a=argument: make(k, v[a])
      elif isinstance(value, (list, tuple)) and value and isinstance(value[0], kind):
        for wrong, make in makers.items():
          yield (
            argument,
            f"list with {wrong}",
            lambda k, v, make=make, a=argument: [make(k, v[a][0]), *v[a][1:]],
          )


def all_tensors(k: World, valid: dict[str, Any], dtype: str) -> None:
  """Replaces all floating tensors among the arguments by tensors of a dtype."""
  for name, value in valid.items():
    values = value if isinstance(value, list) else [value]
    if values and all(isinstance(v, mtf.Tensor) for v in values) and name != "self":
      made = [OF_TENSORS[dtype](k, v) if v.dtype.is_floating else v for v in values]
      valid[name] = made if isinstance(value, list) else made[0]


def outcome(name: str, argument: str, wrong: str, make: Callable[[World, dict], Any]) -> Outcome:
  """Calls, and lowers what was built."""
  k = World()
  arguments = CALLS[name](k)
  if argument:
    made = make(k, arguments)
    if argument != ALL:
      arguments[argument] = made
  lowered = False
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      result = call_with(resolve(name), arguments)
      lowered = True
      abstract = any(type(op) is mtf.Operation for op in k.graph.operations)
      if k.graph.operations and "lowering" not in vars(k) and not abstract:
        mtf.Lowering(k.graph, {op.mesh: k.impl for op in k.graph.operations})
      del result
  except Exception as e:  # noqa: BLE001 - any is an outcome
    # Thousands are kept: without the frames, which would keep their graphs.
    e.__cause__ = e.__context__ = None
    return Outcome(name, argument, wrong, e.with_traceback(None), lowered)
  return Outcome(name, argument, wrong, None, lowered)


def call_with(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
  """Calls; enters what is a context manager, and calls what a function of `mtf.function` made."""
  arguments = dict(arguments)
  owner = [arguments.pop("self")] if "self" in arguments else []
  result = function(*owner, **arguments)
  if isinstance(result, contextlib.AbstractContextManager):
    with result:
      pass
  return result


def accepted(outcomes: Iterable[Outcome]) -> str:
  """What is accepted, as text: arguments and values, and the functions of which it holds."""
  by_argument: dict[tuple[str, str], list[str]] = {}
  for o in outcomes:
    values = by_argument.setdefault((o.name, o.argument), [])
    if o.error is None:
      values.append(o.wrong)
  lines: dict[str, list[str]] = {}
  for (name, argument), values in by_argument.items():
    if values:
      lines.setdefault(f"{argument} = {' | '.join(values)}", []).append(name)
  return "".join(f"{line}\n  {' '.join(names)}\n" for line, names in sorted(lines.items()))


def listed(text: str) -> set[tuple[str, str, str]]:
  """What a text of `accepted` says: function, argument, value."""
  lines = text.splitlines()
  return {
    (name, argument, value)
    for line, names in zip(lines[::2], lines[1::2])
    for argument, _, values in [line.partition(" = ")]
    for value in values.split(" | ")
    for name in names.split()
  }
