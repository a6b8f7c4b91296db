"""Search space of one program's layouts: mesh shapes, and the dimensions each may split."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence

from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.meshes.layout import LayoutRules
from mesh_tensorflow.planning.chains import Chains
from mesh_tensorflow.planning.held import Holdings
from mesh_tensorflow.planning.loops import inner_operations
from mesh_tensorflow.planning.machine import Machine
from mesh_tensorflow.planning.search import Best, Costs, Found, Search
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor


@dataclasses.dataclass
class SearchedMesh:
  """A mesh shape with what may be split over it."""

  shape: Shape
  domains: dict[str, set[int]]
  fixed: dict[str, int | None]


class Task:
  """Search problem: a program, a machine, the given rules and a memory limit.

  Args:
    chains: the program.
    machine: the machine.
    rules: that the layout must have.
    limit: bytes that a device may hold.
    settings: which of several programs it is.

  Attributes:
    meshes: those that are searched.

  Raises:
    LayoutError: the rules contradict the program, or each other.
  """

  def __init__(
    self, chains: Chains, machine: Machine, rules: LayoutRules, limit: float, settings: str = ""
  ):
    self.chains, self.machine, self.rules, self.limit = chains, machine, rules, limit
    self.settings = settings
    self.free = False  # Whether the mesh shape is.
    self.meshes: list[SearchedMesh] = []
    self.costs, self.holdings = Costs(chains, machine), Holdings(chains)
    for name, _ in rules.pairs:
      if name not in chains.dims:
        close = difflib.get_close_matches(name, chains.dims, 1)
        hint = (
          f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(chains.dims))}"
        )
        raise LayoutError(f"fixed names {name!r}, a dimension that the program has not; {hint}")
    for (d, m), (e, n) in itertools.combinations(rules.pairs, 2):
      if d == e and m != n:
        raise LayoutError(
          f"fixed contradicts itself: {d}:{m} and {e}:{n} split one dimension twice"
        )
      if m == n and frozenset((d, e)) in chains.conflicts:
        raise LayoutError(
          f"fixed contradicts the program: {d}:{m} and {e}:{n} split {self._with_both(d, e)} over "
          f"mesh dimension {m} twice"
        )

  def _with_both(self, d: str, e: str) -> Tensor:
    return next(
      x
      for op in self.chains.graph.operations
      for one in [op, *inner_operations(op)]
      for x in one.inputs + one.outputs
      if {d, e} <= set(x.shape.dimension_names)
    )

  def on_given(self, shape: Shape) -> None:
    """Restricts the search to one mesh shape.

    Args:
      shape: the mesh shape.

    Raises:
      LayoutError: see `auto_layout`.
    """
    self.meshes = [self._on(shape)]

  def _on(self, shape: Shape) -> SearchedMesh:
    """Builds the search space on a mesh shape, checked against the rules.

    Raises:
      LayoutError: see `auto_layout`.
    """
    axes = {m.name: i for i, m in enumerate(shape)}
    domains = {
      name: {
        i
        for i, m in enumerate(shape)
        if m.size > 1 and name not in self.chains.forbidden and self._divides(name, int(m.size))
      }
      for name in self.chains.dims
    }
    fixed: dict[str, int | None] = {}
    for name, mesh_name in self.rules.pairs:
      if mesh_name not in axes:
        raise LayoutError(
          f"fixed rule {name}:{mesh_name}: the mesh {shape.to_string} has no such dimension"
        )
      axis = axes[mesh_name]
      if shape[axis].size > 1 and axis not in domains[name]:
        sizes = ", ".join(map(str, sorted(self.chains.dims[name])))
        why = self.chains.forbidden.get(name)
        raise LayoutError(
          f"fixed rule {name}:{mesh_name}: "
          + (
            why or f"{name} has size {sizes}, which {mesh_name}:{shape[axis].size} does not divide"
          )
        )
      fixed[name] = axis
    for i, m in enumerate(shape):
      if m.size > 1 and not any(i in axes_of for axes_of in domains.values()):
        raise LayoutError(
          f"mesh dimension {m.name}:{m.size} divides no dimension of the program that may be "
          "split: "
          + ", ".join(
            f"{name}:{'/'.join(map(str, sorted(sizes)))}"
            for name, sizes in sorted(self.chains.dims.items())
            if name not in self.chains.forbidden
          )
        )
    return SearchedMesh(shape, domains, fixed)

  def _divides(self, name: str, parts: int) -> bool:
    return all(n % parts == 0 for n in self.chains.dims[name])

  def on_any(self, devices: int) -> None:
    """Sets the search to all mesh shapes of `devices` devices, fewest dimensions first.

    Of these the most even first: where both the batch and the weights are split far, most programs
    take the least, and with a good layout at hand other meshes need few pieces.

    Args:
      devices: number of devices.

    Raises:
      LayoutError: the rules suit none of them.
    """
    self.free = True
    found = self.meshes = []
    error: LayoutError | None = None
    for shape in self._shapes(devices):
      try:
        found.append(self._on(shape))
      except LayoutError as e:
        error = error or e
    found.sort(key=lambda mesh: (mesh.shape.ndims, max(mesh.shape.to_integer_list)))
    if error is None and not found:
      names = ", ".join(sorted({m for _, m in self.rules.pairs}))
      raise LayoutError(
        f"no mesh of {devices} devices has a dimension of size 2 or more for each that fixed names "
        f"({names}), and at most three; fixed may name fewer, or give mesh_shape"
      )
    if not found:
      raise LayoutError(f"no mesh of {devices} devices suits the program: {error}") from error

  def _shapes(self, devices: int) -> Iterator[Shape]:
    names = list(dict.fromkeys(m for _, m in self.rules.pairs))
    if devices == 1:
      yield Shape([Dimension(n, 1) for n in names or ["mesh_0"]])
    # Over links that differ, and with names, it matters which dimension is which.
    ordered = len(self.machine.links) > 1 or bool(names)
    for count in range(max(1, len(names)), 4):
      for sizes in _factorizations(devices, count):
        if not ordered and list(sizes) != sorted(sizes, reverse=True):
          continue
        for order in _places(names, count, len(self.machine.links) > 1):
          yield Shape([Dimension(n, s) for n, s in zip(order, sizes)])

  def search(self, best: Best, deadline: float, for_memory: bool = False) -> bool:
    """Searches all meshes.

    Args:
      best: takes what is found.
      deadline: of `time.thread_time`.
      for_memory: whether the least memory is looked for, whatever the limit.

    Returns:
      Whether the search was complete.
    """
    complete = True
    for mesh in self.meshes:
      search = self._search(mesh, best, deadline, for_memory)
      search.run()
      complete = complete and search.complete
    return complete

  def consider(self, best: Best, found: Found) -> None:
    """Evaluates one layout, if it is one of this program.

    Args:
      best: takes it.
      found: the layout.
    """
    for mesh in self.meshes:
      if (mesh.shape, self.settings) == (found.mesh_shape, found.settings):
        search = self._search(mesh, best)
        search.most_idle = None
        search.consider(found.layout)

  def _search(
    self, mesh: SearchedMesh, best: Best, deadline: float | None = None, for_memory: bool = False
  ) -> Search:
    return Search(
      self.costs,
      self.holdings,
      mesh.shape,
      mesh.domains,
      mesh.fixed,
      None if for_memory else self.limit,
      best,
      deadline,
      for_memory=for_memory,
      most_idle=1 if self.free and not for_memory else None,
      settings=self.settings,
    )


def _factorizations(n: int, count: int) -> Iterator[tuple[int, ...]]:
  """Yields the ordered factorizations of `n` into `count` factors above 1."""
  if count == 1:
    if n > 1:
      yield (n,)
    return
  for first in range(n, 1, -1):
    if n % first == 0:
      for rest in _factorizations(n // first, count - 1):
        yield (first, *rest)


def _places(names: Sequence[str], count: int, anywhere: bool) -> Iterator[list[str]]:
  """Yields names of `count` mesh dimensions: the given ones in any places, or first; others."""
  others = [f"mesh_{i}" for i in range(count + len(names)) if f"mesh_{i}" not in names]
  for places in itertools.permutations(range(count), len(names)):
    if not anywhere and list(places) != list(range(len(names))):
      continue
    spare = iter(others)
    given: Mapping[int, str] = dict(zip(places, names))
    yield [given[i] if i in given else next(spare) for i in range(count)]
