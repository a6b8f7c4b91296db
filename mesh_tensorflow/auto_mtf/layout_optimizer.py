"""The layout with the least peak of memory: another objective of the search of `planning`.

The TF1 library stated it as an integer program. For splittable dimensions S, mesh dimensions M, and
the sets of splittable dimensions that operations and tensors have, the variables are x[s, m],
whether s is split over m; y[d, a], whether the set d is assigned as a says; and z, the bytes at the
peak. It minimizes (|S| + 1) z - sum(x): the peak first, then as many dimensions as possible are
split. All variables follow from x, so branch and bound over S solves it, and proves the solution.
(OR-Tools' solver crashes in a process that has TensorFlow 2.21 loaded.)
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mesh_tensorflow.auto_mtf import print_cp_model_solution, scheduler
from mesh_tensorflow.auto_mtf.memory_estimator import MemoryEstimator
from mesh_tensorflow.auto_mtf.print_cp_model_solution import (
  IntegerProgram,
  Solution,
  Variable,
)
from mesh_tensorflow.errors import MeshError
from mesh_tensorflow.planning.search import BranchAndBound

_LOG = logging.getLogger("mesh_tensorflow")

Assignment = dict[str, str]


class SolverError(MeshError):
  """No layout was found."""


class LayoutOptimizer:
  """The integer program of a graph on a mesh.

  Args:
    memory_estimator: a `MemoryEstimator`.
    scheduler_alg: in which order the operations are taken to run: "LIST" or "NAIVE".
  """

  def __init__(self, memory_estimator: MemoryEstimator, scheduler_alg: str = "LIST"):
    self._estimator = memory_estimator
    self._graph = memory_estimator.get_graph_interface()
    self._validator = memory_estimator.get_layout_validator()
    self._mesh = self._validator.mesh_dimension_name_to_size
    self._names = sorted(self._validator.splittable_mtf_dimension_names)
    schedule = scheduler.minimize_peak_memory(self._graph, scheduler_alg)
    self._contents = self._graph.compute_memory_contents_under_schedule(schedule)
    splittable = set(self._names)
    self._operation_dims = {
      frozenset(self._graph.get_operation_mtf_dimension_names(op) & splittable)
      for op in self._graph.get_all_operation_names()
    }
    self._tensor_dims = {
      x: frozenset(self._graph.get_tensor_mtf_dimension_names(x)) & splittable
      for x in self._graph.get_all_tensor_names()
    }
    self._all_dims = self._operation_dims | set(self._tensor_dims.values())

  def solve(self, print_solution: bool = False) -> str:
    """The best layout.

    Args:
      print_solution: whether to print the solution of the integer program.

    Returns:
      "dimension:mesh_dimension" rules, sorted, joined by ";".

    Raises:
      SolverError: there is none.
    """
    search = _PeakSearch(self)
    search.descend({}, None)
    if search.best is None:
      raise SolverError(f"no layout suits the mesh {self._estimator.mesh_shape.to_string}")
    chosen = search.best[1]
    if print_solution:
      print_cp_model_solution.print_solution(
        self._model, Solution(self._model, self._values(chosen))
      )
    return ";".join(sorted(f"{name}:{mesh_name}" for name, mesh_name in chosen.items()))

  def evaluate_layout(self, layout: str) -> float:
    """Peak bytes of live tensors on one device.

    Args:
      layout: "dimension:mesh_dimension" rules, joined by ";". Unsplittable dimensions are ignored
        with a warning; divisibility of the others is not checked.

    Raises:
      KeyError: the mesh has no dimension of a name.
    """
    assignment: Assignment = {}
    for rule in filter(None, layout.split(";")):
      name, mesh_name = rule.split(":", 1)
      if name in self._names:
        assignment[name] = mesh_name
      else:
        _LOG.warning("evaluate_layout: %s cannot be split, %s is left out", name, rule)
    sizes = {x: self._size(x, assignment) for x in self._tensor_dims}
    return float(max((sum(sizes[x] for x in alive) for alive in self._contents), default=0))

  def _size(self, tensor: str, assignment: Mapping[str, str]) -> int:
    if not self._graph.is_tensor_on_canonical_device(tensor):
      return 0
    return self._graph.get_tensor_size(tensor, assignment, self._mesh)

  # ---------------------------------------------------------- the integer program

  @functools.cached_property
  def _model(self) -> IntegerProgram:
    """The integer program, as it is printed."""
    assignments = {d: _generate_assignments(d, self._mesh) for d in self._all_dims}
    locals_of = {d: {_local_var_name(d, a): 1 for a in found} for d, found in assignments.items()}
    global_names = [_global_var_name(s, m) for s, m in itertools.product(self._names, self._mesh)]
    local_names = [y for d in sorted(self._all_dims, key=sorted) for y in locals_of[d]]
    most = sum(self._size(x, {}) for x in self._tensor_dims)
    program = IntegerProgram(
      [*(Variable(name, 1) for name in [*global_names, *local_names]), Variable("z", most)]
    )
    # No operation has two dimensions on one mesh dimension, and no dimension is split twice.
    for m, d in itertools.product(self._mesh, self._operation_dims):
      program.add({_global_var_name(s, m): 1 for s in d}, 1)
    for s in self._names:
      program.add({_global_var_name(s, m): 1 for m in self._mesh}, 1)
      for m in self._mesh:
        if not self._validator.is_valid_assignment(s, m):
          program.add({_global_var_name(s, m): 1}, 0)
    for d, possible in assignments.items():
      program.add(locals_of[d], 1, 1)
      for a, y in zip(possible, locals_of[d]):
        for s in d:
          if s in a:  # y implies x.
            program.add({y: 1, _global_var_name(s, a[s]): -1}, 0)
          else:
            for m in self._mesh:  # x excludes y.
              program.add({y: 1, _global_var_name(s, m): 1}, 1)
    for alive in self._contents:
      terms: dict[str, int] = collections.Counter({"z": -1})
      for x in alive:
        d = self._tensor_dims[x]
        for a, y in zip(assignments[d], locals_of[d]):
          terms[y] += self._size(x, a)
      program.add(terms, 0)
    program.minimize({**dict.fromkeys(global_names, -1), "z": len(self._names) + 1})
    return program

  def _values(self, chosen: Assignment) -> dict[str, int]:
    """The values of all variables, from the layout."""
    values = {_global_var_name(s, m): 1 for s, m in chosen.items()}
    for d in self._all_dims:
      values[_local_var_name(d, {s: chosen[s] for s in d if s in chosen})] = 1
    values["z"] = int(self.evaluate_layout(";".join(f"{s}:{m}" for s, m in chosen.items())))
    return values


class _PeakSearch(BranchAndBound):
  """Search for the least peak of live tensors; of several the first one found."""

  def __init__(self, optimizer: LayoutOptimizer):
    super().__init__(optimizer._names)
    self._o = optimizer
    self._mesh_names = list(optimizer._mesh)
    graph = optimizer._graph
    # Tensors of the same shape and dtype are one column.
    kinds: dict[Any, str] = {}
    example: dict[str, str] = {}
    for x in optimizer._tensor_dims:
      shape = tuple(graph.get_tensor_shape(x).as_list())
      names = tuple(graph.get_tensor_mtf_dimension_names(x))
      key = (names, shape, graph.get_tensor_dtype(x), graph.get_tensor_device(x))
      example[x] = kinds.setdefault(key, x)
    self._examples = list(kinds.values())
    counts = [collections.Counter(example[x] for x in alive) for alive in optimizer._contents]
    rows = {tuple(c[x] for x in self._examples) for c in counts}
    self._counts = np.array(sorted(rows), np.int64).reshape(len(rows), len(kinds))
    is_valid = optimizer._validator.is_valid_assignment
    self._valid = {
      s: {i for i, m in enumerate(self._mesh_names) if is_valid(s, m)} for s in self.order
    }
    self.best: tuple[float, Assignment] | None = None

  @property
  def limit(self) -> float:
    return math.inf if self.best is None else self.best[0]

  def choices(self, d: str, layout: Mapping[str, int | None]) -> Iterator[int | None]:
    for axis in sorted(self._valid[d]):
      others = {t for t, a in layout.items() if a == axis}
      if not any(d in dims and others & dims for dims in self._o._operation_dims):
        yield axis
    yield None

  def ranked(self, children: list[tuple[float, int | None, Any]]) -> Iterable[Any]:
    return children

  def bound(self, d: str, layout: dict[str, int | None], state: Any) -> tuple[float, Any]:
    return self._value(layout), None

  def consider(self, layout: Mapping[str, int | None]) -> None:
    value = self._value(layout)
    if value < self.limit:
      self.best = value, self._assignment(layout)

  def _assignment(self, layout: Mapping[str, int | None]) -> Assignment:
    return {s: self._mesh_names[a] for s, a in layout.items() if a is not None}

  def _value(self, layout: Mapping[str, int | None]) -> float:
    """The objective; of a partial layout a lower bound."""
    chosen = self._assignment(layout)
    sizes = np.array([self._least(x, chosen, layout) for x in self._examples], np.int64)
    peak = int((self._counts @ sizes).max()) if self._counts.size else 0
    return (len(self.order) + 1) * peak - len(chosen) - (len(self.order) - len(layout))

  def _least(self, tensor: str, chosen: Assignment, layout: Mapping[str, int | None]) -> int:
    """Lower bound of a tensor's bytes: undecided dimensions split over all mesh dimensions left."""
    o = self._o
    dims = o._tensor_dims[tensor]
    size = o._size(tensor, chosen)
    possible = {a for d in dims if d not in layout for a in self._valid[d]}
    possible -= {a for d in dims if (a := layout.get(d)) is not None}
    return size // math.prod(o._mesh[self._mesh_names[a]] for a in possible)


def _generate_assignments(
  splittable_dims: Iterable[str], mesh_dimension_to_size: Mapping[str, int]
) -> list[Assignment]:
  """All assignments of dimensions to distinct mesh dimensions, the empty one included.

  Args:
    splittable_dims: names of dimensions.
    mesh_dimension_to_size: sizes of the mesh dimensions.
  """
  dims: Sequence[str] = sorted(splittable_dims)
  result = []
  for count in range(min(len(dims), len(mesh_dimension_to_size)) + 1):
    for some in itertools.combinations(dims, count):
      for places in itertools.permutations(mesh_dimension_to_size, count):
        result.append(dict(zip(some, places)))
  return result


def _global_var_name(splittable_dimension: str, mesh_dimension: str) -> str:
  return f"x_({splittable_dimension}:{mesh_dimension})"


def _local_var_name(splittable_dims: Iterable[str], assignment: Mapping[str, str]) -> str:
  parts = [f"{s}:{assignment[s]}" if s in assignment else s for s in sorted(splittable_dims)]
  return f"y_({','.join(parts)})"
