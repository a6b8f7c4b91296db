"""The layout with the least peak of memory, as an integer program.

For splittable dimensions S, mesh dimensions M, and the sets of splittable dimensions that
operations and tensors have, the variables are x[s, m], whether s is split over m; y[d, a], whether
the set d is assigned as a says; and z, the bytes at the peak. It minimizes (|S| + 1) z - sum(x):
the peak first, then as many dimensions as possible are split. All variables follow from x, so
branch and bound over S solves it, and proves the solution. (The TF1 library gave it to OR-Tools,
whose solver crashes in a process that has TensorFlow 2.21 loaded.)
"""

from __future__ import annotations

import collections
import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mesh_tensorflow.auto_mtf import print_cp_model_solution, scheduler
from mesh_tensorflow.auto_mtf.integer_program import IntegerProgram, Solution
from mesh_tensorflow.auto_mtf.memory_estimator import MemoryEstimator
from mesh_tensorflow.errors import MeshError

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
    self._assignments = {d: _generate_assignments(d, self._mesh) for d in self._all_dims}
    self._model = self._build_model()

  def solve(self, print_solution: bool = False) -> str:
    """The best layout.

    Args:
      print_solution: whether to print the solution of the integer program.

    Returns:
      "dimension:mesh_dimension" rules, sorted, joined by ";".

    Raises:
      SolverError: there is none.
    """
    chosen = _BranchAndBound(self).solve()
    if chosen is None:
      raise SolverError(f"no layout suits the mesh {self._estimator.mesh_shape.to_string}")
    if print_solution:
      solution = Solution(self._model, self._values(chosen))
      print_cp_model_solution.print_solution(self._model, solution)
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

  def _build_model(self) -> IntegerProgram:
    program = IntegerProgram()
    for s, m in itertools.product(self._names, self._mesh):
      program.add_variable(_global_var_name(s, m), 1)
    for d in sorted(self._all_dims, key=sorted):
      for a in self._assignments[d]:
        program.add_variable(_local_var_name(d, a), 1)
    program.add_variable("z", sum(self._size(x, {}) for x in self._tensor_dims))
    # No operation has two dimensions on one mesh dimension, and no dimension is split twice.
    for m, d in itertools.product(self._mesh, self._operation_dims):
      program.add_at_most({_global_var_name(s, m): 1 for s in d}, 1)
    for s in self._names:
      program.add_at_most({_global_var_name(s, m): 1 for m in self._mesh}, 1)
      for m in self._mesh:
        if not self._validator.is_valid_assignment(s, m):
          program.add_at_most({_global_var_name(s, m): 1}, 0)
    for d, possible in self._assignments.items():
      program.add_equal({_local_var_name(d, a): 1 for a in possible}, 1)
      for a in possible:
        y = _local_var_name(d, a)
        for s in d:
          if s in a:  # y implies x.
            program.add_at_most({y: 1, _global_var_name(s, a[s]): -1}, 0)
          else:
            for m in self._mesh:  # x excludes y.
              program.add_at_most({y: 1, _global_var_name(s, m): 1}, 1)
    for alive in self._contents:
      terms: dict[str, int] = collections.Counter({"z": -1})
      for x in alive:
        d = self._tensor_dims[x]
        for a in self._assignments[d]:
          terms[_local_var_name(d, a)] += self._size(x, a)
      program.add_at_most(terms, 0)
    objective = {_global_var_name(s, m): -1 for s in self._names for m in self._mesh}
    program.minimize({**objective, "z": len(self._names) + 1})
    return program

  def _values(self, chosen: Assignment) -> dict[str, int]:
    """The values of all variables, from the layout."""
    values = {_global_var_name(s, m): 1 for s, m in chosen.items()}
    for d in self._all_dims:
      values[_local_var_name(d, {s: chosen[s] for s in d if s in chosen})] = 1
    values["z"] = int(self.evaluate_layout(";".join(f"{s}:{m}" for s, m in chosen.items())))
    return values


class _BranchAndBound:
  """Branch and bound over the dimensions; prunes what cannot beat the best layout so far."""

  def __init__(self, optimizer: LayoutOptimizer):
    self._o = optimizer
    # Tensors of the same shape and dtype are one column.
    kinds: dict[Any, int] = {}
    self._examples: list[str] = []
    column: dict[str, int] = {}
    graph = optimizer._graph
    for x in optimizer._tensor_dims:
      names = tuple(graph.get_tensor_mtf_dimension_names(x))
      shape = tuple(graph.get_tensor_shape(x).as_list())
      key = (names, shape, graph.get_tensor_dtype(x), graph.get_tensor_device(x))
      if key not in kinds:
        kinds[key] = len(kinds)
        self._examples.append(x)
      column[x] = kinds[key]
    rows = set()
    for alive in optimizer._contents:
      counts = [0] * len(kinds)
      for x in alive:
        counts[column[x]] += 1
      rows.add(tuple(counts))
    self._counts = np.array(sorted(rows), np.int64).reshape(len(rows), len(kinds))
    self._valid = {
      s: [m for m in optimizer._mesh if optimizer._validator.is_valid_assignment(s, m)]
      for s in optimizer._names
    }
    self._best: tuple[float, Assignment] | None = None

  def solve(self) -> Assignment | None:
    self._descend({}, 0)
    return None if self._best is None else self._best[1]

  def _descend(self, chosen: Assignment, depth: int) -> None:
    o = self._o
    names = o._names
    sizes = np.array([self._least(x, chosen, depth) for x in self._examples], np.int64)
    peak = int((self._counts @ sizes).max()) if self._counts.size else 0
    value = (len(names) + 1) * peak - len(chosen) - (len(names) - depth)
    if self._best is not None and value >= self._best[0]:
      return
    if depth == len(names):
      self._best = value, dict(chosen)
      return
    s = names[depth]
    for m in self._valid[s]:
      others = {t for t, n in chosen.items() if n == m}
      if not any(s in d and others & d for d in o._operation_dims):
        chosen[s] = m
        self._descend(chosen, depth + 1)
        del chosen[s]
    self._descend(chosen, depth + 1)

  def _least(self, tensor: str, chosen: Assignment, depth: int) -> int:
    """Lower bound of a tensor's bytes: undecided dimensions split over all mesh dimensions left."""
    o = self._o
    dims = o._tensor_dims[tensor]
    size = o._size(tensor, chosen)
    open_names = dims.intersection(o._names[depth:])
    if not open_names:
      return size
    used = {chosen[d] for d in dims if d in chosen}
    possible = {m for d in open_names for m in self._valid[d]} - used
    return size // math.prod(o._mesh[m] for m in possible)


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
