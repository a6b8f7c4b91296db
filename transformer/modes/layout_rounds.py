"""Searches of a model whose graph depends on its layout: in rounds, from several starts.

Numbers of microbatches and groups of experts follow from the layout, so what a search predicts is
for the model as it is built for the layout the search began with. What is found is built anew and
timed; the next round begins with it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError, LayoutError, OutOfMemoryError
from mesh_tensorflow.planning.auto_layout import LayoutChoice
from mesh_tensorflow.planning.program import Program
from mesh_tensorflow.planning.text import format_bytes
from mesh_tensorflow.running.function import Function
from mesh_tensorflow.transformer.modes import variants
from mesh_tensorflow.transformer.modes.planned_steps import StepMaker
from mesh_tensorflow.transformer.modes.variants import Variant

# Each round is a whole search; whether a third would find more was not tried.
_ROUNDS = 2
# Predictions of one layout that differ by less are of the same graph.
_SAME = 1e-3


class Start(NamedTuple):
  """The layout that a model is built for.

  Attributes:
    mesh_shape: the mesh shape.
    layout: the layout rules.
  """

  mesh_shape: mtf.Shape
  layout: mtf.LayoutRules


class Rounds:
  """The searches of a model.

  Args:
    make: makes the training step for a mesh and a layout.
    by_name: the ways to build it, the bound one first.
    settings: of `mtf.auto_layout`, but for the program.
  """

  def __init__(self, make: StepMaker, by_name: Mapping[str, Variant], settings: Mapping[str, Any]):
    self._make, self._by_name, self._settings = make, by_name, settings
    self._built: list[LayoutChoice] = []
    self._searched: list[LayoutChoice] = []
    self._ends: list[float] = []
    self._proven = True
    self._error: Exception | None = None
    self._graphs: set[int] = set()

  def search(self, start: Start) -> None:
    """Searches, from the model as it is built for one layout.

    Where nothing is found, that is an error of `best`, unless another search finds something.

    Args:
      start: the layout.
    """
    try:
      self._search(start)
    except (ConfigError, LayoutError, OutOfMemoryError) as e:
      # Of the batch a device may have less than there are microbatches, say.
      self._error = self._error or e

  def _search(self, start: Start) -> None:
    first, *others = self._by_name
    # With stages each number of microbatches has been told, and is the same for all layouts.
    for i in range(_ROUNDS if self._settings.get("stages") is None else 1):
      step = self._start(start, first)
      if (graph := _fingerprint(step)) in self._graphs:
        return
      self._graphs.add(graph)
      choice = mtf.auto_layout(
        step,
        choices={n: functools.partial(self._start, start, n) for n in others},
        when_short=[n for n in others if self._by_name[n].recompute],
        **self._settings,
      )
      if first:  # A search knows the first program by no name.
        choice = _named(choice, first)
      real = self._as_built(choice)
      self._built.append(real)
      self._searched += choice.alternatives
      is_same = abs(real.seconds - choice.seconds) <= _SAME * choice.seconds
      self._proven = self._proven and choice.proven and is_same and i == 0
      self._ends.append(real.seconds)
      if is_same:
        break
      start = Start(choice.mesh_shape, choice.layout)

  def _start(self, start: Start, name: str) -> Function:
    """The training step that a search looks at."""
    more = () if self._settings.get("stages") is None else (True,)
    return self._make(*start, self._by_name[name], *more)

  def add(self, bound: Start) -> None:
    """Times a layout that need not be found, built as gin says; after a search.

    Args:
      bound: the layout.
    """
    self._check()
    like = dataclasses.replace(
      self._built[0], settings="", shard_state=(), stages=1, search_seconds=0.0
    )
    of = dataclasses.replace(like, mesh_shape=bound.mesh_shape, layout=bound.layout)
    self._built.append(self._as_built(of))

  def best(self) -> LayoutChoice:
    """The best of all, and the next best; what was only searched is never before what is built.

    Raises:
      OutOfMemoryError: as they are built, none fits; or no search has found one.
      LayoutError: no layout suits the model.
      ConfigError: no model can be built.
    """
    self._check()
    limit = self._built[0].memory_limit
    fitting = [c for c in self._built if c.memory <= limit]
    if not fitting:
      real = self._built[-1]
      raise OutOfMemoryError(
        f"the layout {rules_text(real.layout)} on the mesh {mesh_text(real.mesh_shape)} was found, "
        f"but a model built for it needs {format_bytes(real.memory)} a device, which has "
        f"{format_bytes(int(limit))}; smaller microbatches or more devices need less"
      )
    rows = {_key(c): c for c in [*self._searched, *fitting]}
    fastest = min(c.seconds for c in fitting)
    for key, c in rows.items():
      if c.seconds < fastest:
        rows[key] = self._as_built(c)
    first, *others = sorted((c for c in rows.values() if c.memory <= limit), key=_order)
    took = sum(c.search_seconds for c in self._built)
    return dataclasses.replace(
      first,
      alternatives=tuple(others[: self._settings["alternatives"]]),
      # Of a model that is another one for another layout only those were searched.
      proven=self._proven
      and all(math.isclose(s, self._ends[0], rel_tol=_SAME) for s in self._ends),
      search_seconds=took,
    )

  def _check(self) -> None:
    """Raises the error of the first search that has failed, if all have."""
    if not self._built and self._error is not None:
      raise self._error

  def _as_built(self, choice: LayoutChoice) -> LayoutChoice:
    """The layout with the costs of the model as it is built for it."""
    step = self._make(choice.mesh_shape, choice.layout, variants.of_choice(choice))
    built = mtf.describe(step, machine=choice.machine)
    assert built.seconds is not None
    pipeline = built.pipeline
    memory = int(built.memory.total if pipeline is None else pipeline.memory)
    return dataclasses.replace(
      choice,
      stages=1 if pipeline is None else len(pipeline.stages),
      seconds=built.seconds,
      memory=memory,
      alternatives=(),
      # Of a bound layout those that are bound.
      shard_state=tuple(built.shard_state),
      reshard_after_forward=built.reshard_after_forward,
    )


def _named(choice: LayoutChoice, first: str) -> LayoutChoice:
  """A choice whose program has the name `first` if it has none; so have its alternatives."""
  others = tuple(_named(c, first) for c in choice.alternatives)
  return dataclasses.replace(choice, settings=choice.settings or first, alternatives=others)


def _fingerprint(step: Function) -> int:
  """A number that differs for graphs of other operations or shapes."""
  graph = Program("choose_layout", step).evaluator().graph
  return hash(tuple((type(op).__name__, *(x.shape for x in op.outputs)) for op in graph.operations))


def _key(choice: LayoutChoice) -> tuple[Any, ...]:
  built = variants.of_choice(choice)
  return (tuple(choice.mesh_shape), frozenset(choice.layout.pairs), built.name)


def _order(choice: LayoutChoice) -> tuple[float, int, Sequence[Any]]:
  return (choice.seconds, len(choice.layout.pairs), choice.layout.pairs)


def rules_text(rules: mtf.LayoutRules) -> str:
  """Layout rules as they are written in gin files."""
  return ",".join(f"{name}:{mesh_name}" for name, mesh_name in rules.pairs)


def mesh_text(shape: mtf.Shape) -> str:
  """A mesh shape as it is written in gin files."""
  return ",".join(f"{m.name}:{m.size}" for m in shape)
