"""`mtf.auto_layout`: the layout, and the mesh shape, with the least predicted time that fits."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import ArgumentError, LayoutError, OutOfMemoryError
from mesh_tensorflow.meshes.layout import LayoutLike, LayoutRules, convert_to_layout_rules
from mesh_tensorflow.planning.chains import Chains
from mesh_tensorflow.planning.held import Holdings
from mesh_tensorflow.planning.machine import Machine, convert_to_machine
from mesh_tensorflow.planning.program import Program, implementation_of
from mesh_tensorflow.planning.search import Best, Costs, Found, Search
from mesh_tensorflow.planning.text import WIDTH, format_bytes, format_seconds, table
from mesh_tensorflow.program.dimensions import Dimension, Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Graph, Tensor
from mesh_tensorflow.running.function import Function

_DEFAULT_MACHINE = "cpu"
# The part of the time limit that looking for the nearest may take where nothing fits.
_NEAREST = 0.25


@dataclasses.dataclass(frozen=True)
class LayoutChoice:
  """A layout with what it is predicted to cost.

  Attributes:
    mesh_shape: the mesh shape.
    layout: the `LayoutRules`.
    seconds: predicted, of a step.
    memory: bytes that one device holds at its peak.
    proven: whether no layout is predicted to be faster that fits: the search was complete.
    alternatives: the next best, the best first.
    machine: the machine it is predicted for.
    memory_limit: bytes that a device has.
    search_seconds: how long the search took.
  """

  mesh_shape: Shape
  layout: LayoutRules
  seconds: float
  memory: int
  proven: bool
  alternatives: tuple[LayoutChoice, ...]
  machine: Machine
  memory_limit: float
  search_seconds: float

  def to_text(self) -> str:
    """The choice and its alternatives as a table of at most 100 columns."""
    how = "no layout is faster" if self.proven else "the best found before time ran out"
    choices = (self, *self.alternatives)
    rows = [
      [
        ",".join(f"{m.name}:{m.size}" for m in c.mesh_shape) or "one device",
        format_seconds(c.seconds),
        format_bytes(c.memory),
      ]
      for c in choices
    ]
    header, *lines = table(["mesh", "a step", "a device"], rows, len(rows)).split("\n")
    first = (
      f"Layouts for {self.machine.name}, with {format_bytes(int(self.memory_limit))} a device; "
      f"{how} ({self.search_seconds:.1f} s)"
    )
    indent = " " * (max(map(len, [header, *lines])) + 2)
    written = [first, header.ljust(len(indent)) + "layout"]
    for line, c in zip(lines, choices):
      layout = ", ".join(f"{t}:{m}" for t, m in c.layout.pairs) or "(no rules)"
      start = line.ljust(len(indent))
      written.append(textwrap.fill(layout, WIDTH, initial_indent=start, subsequent_indent=indent))
    return "\n".join(written)

  def __str__(self) -> str:
    return self.to_text()


@checked
def auto_layout(
  program: Graph | Function,
  devices: int | None = None,
  mesh_shape: ShapeLike | None = None,
  machine: Machine | str | None = None,
  memory_limit: float | None = None,
  fixed: LayoutLike | None = None,
  *,
  results: list[Tensor] | None = None,
  alternatives: int = 9,
  time_limit: float = 60.0,
) -> LayoutChoice:
  """The layout with the least predicted time of a step, of all that fit into memory.

  Args:
    program: an `mtf.Graph` or an `mtf.function`. (Where a function looks at the layout of its mesh
      while it builds its graph, that is the graph that is searched.)
    devices: how many there are: then the mesh shape is chosen too, of one to three dimensions.
    mesh_shape: a mesh shape, in place of `devices`.
    machine: an `mtf.planning.Machine`, the name of a shipped one, or a .json file; a CPU host by
      default.
    memory_limit: bytes that a device may hold; the memory of the machine's by default.
    fixed: layout rules that the layout must have; with `devices` their mesh dimensions are those
      of the mesh that is chosen. No other dimension is split differently from what they say.
    results: see `mtf.describe`.
    alternatives: how many of the next best are told.
    time_limit: seconds after which the best so far is returned, not proven.

  Returns:
    A `LayoutChoice`, which prints as a table.

  Raises:
    ArgumentError: neither or both of `devices` and `mesh_shape` are given.
    LayoutError: `fixed` contradicts the program or the mesh, or a mesh dimension divides no
      dimension of the program.
    OutOfMemoryError: no layout fits; it says which needs least, and what takes the memory.
    ConfigError: there is no such machine, or its file is wrong.
  """
  start = time.monotonic()
  if (devices is None) == (mesh_shape is None):
    raise ArgumentError("auto_layout takes either devices=8 or mesh_shape='a:2,b:4'")
  if devices is not None and devices < 1:
    raise ArgumentError(f"auto_layout: devices must be at least 1, got {devices}")
  what = Program("auto_layout", program, results)
  chosen = convert_to_machine(_DEFAULT_MACHINE if machine is None else machine)
  assert chosen is not None
  chosen = chosen.variant(implementation_of(what.mesh_impl))
  rules = convert_to_layout_rules(fixed or "")
  graph, outputs = what.build()
  chains = Chains(graph, outputs)
  shape = None if mesh_shape is None else convert_to_shape(mesh_shape)
  size = devices if shape is None else int(shape.size)
  assert size is not None
  if memory_limit is None:
    memory_limit = chosen.memory_of_each(size)
  task = _Task(chains, chosen, rules, float(memory_limit))
  if shape is not None:
    meshes = [task.on(shape)]
  else:
    meshes = task.on_any(size)
  best, deadline = Best(1 + alternatives), start + time_limit
  proven = task.search(meshes, best, deadline)
  if not best.found:
    raise task.nothing_fits(meshes, size, proven, time.monotonic() + _NEAREST * time_limit)
  took = time.monotonic() - start
  made = [task.choice(f, proven, took) for f in best.found]
  return dataclasses.replace(made[0], alternatives=tuple(made[1:]))


@dataclasses.dataclass
class _Mesh:
  """A mesh shape with what may be split over it."""

  shape: Shape
  domains: dict[str, set[int]]
  fixed: dict[str, int | None]


class _Task:
  """What is searched, and under which conditions."""

  def __init__(self, chains: Chains, machine: Machine, rules: LayoutRules, limit: float):
    self.chains, self.machine, self.rules, self.limit = chains, machine, rules, limit
    self.free = False  # Whether the mesh shape is.
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
      for x in op.outputs
      if {d, e} <= set(x.shape.dimension_names)
    )

  def on(self, shape: Shape) -> _Mesh:
    """The mesh, checked.

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
    return _Mesh(shape, domains, fixed)

  def _divides(self, name: str, parts: int) -> bool:
    return all(n % parts == 0 for n in self.chains.dims[name])

  def on_any(self, devices: int) -> list[_Mesh]:
    """The meshes of so many devices, those with few dimensions first.

    Raises:
      LayoutError: the rules suit none of them.
    """
    self.free = True
    found: list[_Mesh] = []
    error: LayoutError | None = None
    for shape in self._shapes(devices):
      try:
        found.append(self.on(shape))
      except LayoutError as e:
        error = error or e
    if not found:
      raise LayoutError(f"no mesh of {devices} devices suits the program: {error}") from error
    return found

  def _shapes(self, devices: int) -> Iterator[Shape]:
    names = list(dict.fromkeys(m for _, m in self.rules.pairs))
    # Over links that differ, and with names, it matters which dimension is which.
    ordered = len(self.machine.links) > 1 or bool(names)
    for count in range(max(1, len(names)), 4):
      for sizes in _factorizations(devices, count):
        if not ordered and list(sizes) != sorted(sizes, reverse=True):
          continue
        for order in _places(names, count, len(self.machine.links) > 1):
          yield Shape([Dimension(n, s) for n, s in zip(order, sizes)])

  def search(self, meshes: Sequence[_Mesh], best: Best, deadline: float) -> bool:
    """Searches all meshes; returns whether that was complete."""
    complete = True
    for mesh in meshes:
      search = Search(
        self.costs,
        self.holdings,
        mesh.shape,
        mesh.domains,
        mesh.fixed,
        self.limit,
        best,
        deadline,
        most_idle=1 if self.free else None,
      )
      search.run()
      complete = complete and search.complete
    return complete

  def nothing_fits(
    self, meshes: Sequence[_Mesh], devices: int, proven: bool, deadline: float
  ) -> OutOfMemoryError:
    """The error that says what is nearest."""
    best = Best(1)
    for mesh in meshes:
      Search(
        self.costs,
        self.holdings,
        mesh.shape,
        mesh.domains,
        mesh.fixed,
        None,
        best,
        deadline,
        for_memory=True,
      ).run()
    limit = format_bytes(int(self.limit))
    none = "no layout fits" if proven else "no layout was found that fits"
    text = f"{none} into the {limit} of a device, of {devices}"
    if not best.found:
      return OutOfMemoryError(f"{text}; the search for the one that needs least ran out of time")
    nearest, m = best.found[0], best.found[0].memory
    variables = ", ".join(f"{n} {format_bytes(b)}" for n, b in self.holdings.variables()[:3])
    largest = ", ".join(f"{h.name} {format_bytes(h.bytes)}" for h in m.largest[:3])
    rules = ",".join(f"{d}:{nearest.mesh_shape[a].name}" for d, a in sorted(nearest.layout.items()))
    return OutOfMemoryError(
      f"{text}. Nearest is {rules or 'no rule'} on the mesh {nearest.mesh_shape.to_string}, with "
      f"{format_bytes(m.total)} a device: variables {format_bytes(m.variables)} (the largest, "
      f"whole: {variables or 'none'}), inputs {format_bytes(m.inputs)}, activations "
      f"{format_bytes(m.activations)} at {m.peak_operation} (the largest: {largest or 'none'}). "
      "More devices, a smaller batch, microbatches or recomputation need less"
    )

  def choice(self, found: Found, proven: bool, took: float) -> LayoutChoice:
    """What was found, as users see it."""
    return LayoutChoice(
      mesh_shape=found.mesh_shape,
      layout=LayoutRules([(d, found.mesh_shape[a].name) for d, a in sorted(found.layout.items())]),
      seconds=found.seconds,
      memory=found.memory.total,
      proven=proven,
      alternatives=(),
      machine=self.machine,
      memory_limit=self.limit,
      search_seconds=took,
    )


def _factorizations(n: int, count: int) -> Iterator[tuple[int, ...]]:
  """Ordered factors above 1 (of 1: one of 1)."""
  if count == 1:
    if n > 1:
      yield (n,)
    return
  for first in range(n, 1, -1):
    if n % first == 0:
      for rest in _factorizations(n // first, count - 1):
        yield (first, *rest)


def _places(names: Sequence[str], count: int, anywhere: bool) -> Iterator[list[str]]:
  """Names of mesh dimensions: the given ones in all places, or in the first, and others."""
  others = [f"mesh_{i}" for i in range(count + len(names)) if f"mesh_{i}" not in names]
  for places in itertools.permutations(range(count), len(names)):
    if not anywhere and list(places) != list(range(len(names))):
      continue
    spare = iter(others)
    given: Mapping[int, str] = dict(zip(places, names))
    yield [given[i] if i in given else next(spare) for i in range(count)]


__all__ = ["LayoutChoice", "auto_layout"]
