"""Valid calls of what argument_calls.py has no line for: those that the line of its test makes.

A descriptor of the conformance suite, or a case of the optimizers, calls what it tests. So what is
new in the language needs no second line, until its arguments want to be chosen with care.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import mesh_tensorflow as mtf
from tests.arguments.argument_calls import Arguments, World
from tests.conformance.framework import Descriptor
from tests.conformance.suite import FAMILIES


class _CalledError(Exception):
  """Ends a call where what is looked for is called.

  Args:
    arguments: of it, by name.
  """

  def __init__(self, arguments: dict[str, Any]):
    super().__init__()
    self.arguments = arguments


def derived(name: str) -> Arguments | None:
  """What makes the arguments of a public function or class, or None if no test line calls it.

  Args:
    name: as in `CALLS`: "square", "layers.dense", "optimize.SgdOptimizer".
  """
  module, _, last = name.rpartition(".")
  homes = [getattr(mtf, module)] if module else [mtf, mtf.ops]
  function = getattr(homes[0], last)
  signature = inspect.signature(function)

  def record(*args: Any, **kwargs: Any) -> Any:
    raise _CalledError(dict(signature.bind(*args, **kwargs).arguments))

  def arguments(line: Callable[[World, Any], Any], k: World) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
      for home in homes:
        stack.enter_context(mock.patch.object(home, last, record))
      try:
        line(k, lambda build: record if build is function else build)
      except _CalledError as e:
        return e.arguments
    return {}

  for line in _lines(name):
    with contextlib.suppress(Exception):  # It is about something else, and comes to grief here.
      if arguments(line, World()):
        return functools.partial(arguments, line)
  return None


def _lines(name: str) -> Iterator[Callable[[World, Any], Any]]:
  """What may call it: descriptors whose name begins with its name; of optimizers all cases."""
  module, _, last = name.rpartition(".")
  if module == "optimize":
    from tests.optimize.test_optimizers import CASES

    for case in CASES:
      yield lambda k, replaced, case=case: case.make()
  for descriptors in FAMILIES.values():
    for d in descriptors:
      if d.name.startswith(last.removeprefix("mtf_")):
        yield functools.partial(_build, d)


def _build(d: Descriptor, k: World, replaced: Callable[[Any], Any]) -> Any:
  inputs = [mtf.import_tf_tensor(k.mesh, a, x.shape) for a, x in zip(d.arrays, d.inputs)]
  return replaced(d.build)(*(inputs or [k.mesh]))
