"""Shares of a mesh dimension for devices of unequal speed: proposed, timed, beside the equal split.

All processors of a mesh do equal work. Devices of speeds s and shares n finish after max(n / s) of
it, for sum(n) done; equal shares are those of one processor for each device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import ArgumentError, ConfigError, LayoutError
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.planning.evaluation import Evaluator
from mesh_tensorflow.planning.machine import Machine, convert_to_machine
from mesh_tensorflow.planning.program import Program, machine_of
from mesh_tensorflow.planning.text import format_seconds, table
from mesh_tensorflow.program.dimensions import Dimension, Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Graph, Tensor
from mesh_tensorflow.running.function import Function

# Fewer processors are preferred to a step that is shorter by less than this part.
_SIMILAR = 0.02
# Equal shares are preferred to a step that is shorter by less than this part.
_LEAST_GAIN = 0.05
_MOST_PROCESSORS = 16


def relative_time(shares: Sequence[int], speeds: Sequence[float]) -> float:
  """The time of a step, in that of a device of speed 1 doing all the work.

  Args:
    shares: number of processors of each device; 0 of one that is left out.
    speeds: of the devices.
  """
  return max(n / s for n, s in zip(shares, speeds)) / sum(shares)


def best_division(speeds: Sequence[float], processors: int) -> tuple[int, ...]:
  """Division of processors among devices that takes the least time.

  Args:
    speeds: of the devices.
    processors: how many there are to divide.

  Returns:
    A number for each device, 0 of one that is left out.
  """
  shares = [0] * len(speeds)
  for _ in range(processors):
    # To the one that is done first with one more. That is optimal: with any other division some
    # device has at least as many as one that was passed over here.
    i = min(range(len(speeds)), key=lambda i: (shares[i] + 1) / speeds[i])
    shares[i] += 1
  return tuple(shares)


@checked
def best_shares(speeds: Sequence[float], most: int | None = None) -> tuple[int, ...]:
  """Whole-numbered shares for devices of unequal speed.

  Minimizes `max(share / speed) / sum(shares)`, and prefers few processors: more of them must gain
  at least 2 %, and unequal shares at least 5 %.

  Args:
    speeds: of the devices, in any unit.
    most: maximum number of processors; by default 16, or the number of devices if it is larger.

  Returns:
    A share for each device; 0 of one that is better left out.

  Raises:
    ArgumentError: a speed is not positive, or `most` is less than the number of devices.
  """
  most = _checked_most(speeds, most)
  fastest = max(speeds)
  speeds = [s / fastest for s in speeds]
  equal = (1,) * len(speeds)
  found = {s: relative_time(s, speeds) for s in _divisions(speeds, most)}
  return _chosen(equal, found | {equal: relative_time(equal, speeds)})


def _checked_most(speeds: Sequence[float], most: int | None) -> int:
  """The maximum number of processors, which is checked with the speeds."""
  if not speeds or not all(0 < s < math.inf for s in speeds):
    raise ArgumentError(f"speeds of devices are numbers above 0, got {list(speeds)}")
  if most is None:
    return max(_MOST_PROCESSORS, len(speeds))
  if most < len(speeds):
    raise ArgumentError(
      f"most={most} processors cannot be shared by {len(speeds)} devices; give at least as many"
    )
  return most


def _divisions(speeds: Sequence[float], most: int) -> list[tuple[int, ...]]:
  """The best divisions of each number of processors, those with common factors but once."""
  found: dict[tuple[int, ...], None] = {}
  for n in range(1, most + 1):
    shares = best_division(speeds, n)
    if math.gcd(*shares) == 1:
      found[shares] = None
  return list(found)


def _chosen(equal: tuple[int, ...], seconds: dict[tuple[int, ...], float]) -> tuple[int, ...]:
  """Of shares with their times the ones to propose."""
  least = min(seconds.values())
  if equal in seconds and seconds[equal] * (1 - _LEAST_GAIN) <= least:
    return equal
  similar = [s for s, t in seconds.items() if t * (1 - _SIMILAR) <= least]
  return min(similar, key=lambda s: (sum(s), seconds[s]))


@dataclasses.dataclass(frozen=True)
class Division:
  """A mesh dimension divided among devices, with the predicted step.

  Attributes:
    parts: number of processors of each device along the mesh dimension; 0 of one that is left out.
    mesh_shape: the mesh shape.
    seconds: predicted seconds of a step.
  """

  parts: tuple[int, ...]
  mesh_shape: Shape
  seconds: float


@dataclasses.dataclass(frozen=True)
class SharesChoice:
  """Proposed shares of a mesh dimension, and the equal split; `str` shows both.

  Attributes:
    dimension: name of the mesh dimension.
    speeds: of the devices along it; of several beside each other that of the slowest.
    proposed: the `Division` to take: the equal one where no other is predicted to gain.
    equal: the one with a processor for each device; None if the layout has no such split.
    others: more that were predicted, the fastest first.
  """

  dimension: str
  speeds: tuple[float, ...]
  proposed: Division
  equal: Division | None
  others: tuple[Division, ...] = ()

  @property
  def is_equal(self) -> bool:
    """True if no shares are predicted to be faster than equal ones."""
    return self.proposed is self.equal

  @property
  def shares(self) -> dict[str, list[int]]:
    """The `shares` of a mesh implementation; without the devices that are `left_out`."""
    return {self.dimension: [n for n in self.proposed.parts if n]}

  @property
  def left_out(self) -> list[int]:
    """Numbers, along the mesh dimension, of the devices that are too slow to be of use."""
    return [i for i, n in enumerate(self.proposed.parts) if not n]

  def to_dict(self) -> dict[str, Any]:
    """Numbers, strings, lists and dicts."""

    def fields(d: Division) -> dict[str, Any]:
      mesh = {m.name: int(m.size) for m in d.mesh_shape}
      return {"parts": list(d.parts), "mesh_shape": mesh, "seconds": d.seconds}

    return {
      "dimension": self.dimension,
      "speeds": list(self.speeds),
      "proposed": fields(self.proposed),
      "equal": None if self.equal is None else fields(self.equal),
      "others": [fields(d) for d in self.others],
    }

  def __str__(self) -> str:
    speeds = ", ".join(f"{s / max(self.speeds):.3g}" for s in self.speeds)
    title = f"Devices along {self.dimension} have the speeds {speeds}"
    rows = [] if self.equal is None else [("equal split", self.equal)]
    if self.is_equal:
      title += ": no shares are predicted to gain"
    elif self.equal is None:
      title += ": the layout has no equal split"
    else:
      gain = self.proposed.seconds / self.equal.seconds
      title += f": shares are predicted to take {gain:.2f} of the equal split's step"
    if not self.is_equal:
      rows.insert(0, ("proposed", self.proposed))
    rows += [("", d) for d in self.others]
    return title + "\n" + table(
      ["division", "shares", "mesh", "step"],
      [
        [
          name,
          ":".join(map(str, d.parts)),
          ",".join(f"{m.name}:{m.size}" for m in d.mesh_shape),
          format_seconds(d.seconds),
        ]
        for name, d in rows
      ],
      6,
    )  # fmt: skip


@checked
def propose_shares(
  graph_or_function: Graph | Function,
  machine: Machine | str,
  layout: LayoutLike | None = None,
  mesh_shape: ShapeLike | None = None,
  *,
  dimension: str | None = None,
  most: int | None = None,
  results: list[Tensor] | None = None,
) -> SharesChoice:
  """Proposes shares of a mesh dimension for devices of unequal speed.

  Args:
    graph_or_function: an `mtf.Graph`, or an `mtf.function`.
    machine: an `mtf.planning.Machine` with `speeds`, as `planning.measure` finds them, or a file.
    layout: layout rules; those of the function's mesh by default.
    mesh_shape: mesh shape; likewise. The size of the dimension that gets the shares is no matter.
    dimension: name of the mesh dimension; by default the one where shares gain most.
    most: maximum number of processors along it; see `best_shares`.
    results: as of `mtf.describe`.

  Returns:
    A `SharesChoice`.

  Raises:
    ArgumentError: there is no such mesh dimension, or `most` is too small.
    ConfigError: the machine has no speeds, or not of a mesh with these dimensions.
    LayoutError: the layout does not suit the program.
    GraphError: layout or mesh shape is missing.
  """
  found = convert_to_machine(machine)
  assert found is not None
  program = Program("propose_shares", graph_or_function, results)
  impl = program.mesh_impl
  if impl is not None:
    layout = impl.layout_rules if layout is None else layout
    mesh_shape = impl.shape if mesh_shape is None else mesh_shape
  if layout is None or mesh_shape is None:
    raise ArgumentError("propose_shares of a graph needs a layout and a mesh_shape")
  shape = convert_to_shape(mesh_shape)
  found = machine_of(found, impl, shape.size)
  sharding: Any = () if impl is None else (impl.state_dims, impl.reshards_after_forward)
  evaluator = program.evaluator()
  return chosen_shares(evaluator, found, shape, layout, sharding, dimension, most)


def chosen_shares(
  evaluator: Evaluator,
  machine: Machine,
  mesh_shape: Shape,
  layout: LayoutLike,
  sharding: Any = (),
  dimension: str | None = None,
  most: int | None = None,
) -> SharesChoice:
  """As `propose_shares`, of a program that an evaluator has.

  Args:
    evaluator: of the program.
    machine: with `speeds`, as the mesh sees it.
    mesh_shape: the mesh shape.
    layout: layout rules.
    sharding: further arguments of `Evaluator.evaluate`.
    dimension: see `propose_shares`.
    most: likewise.
  """
  if not machine.speeds:
    raise ConfigError(
      f"machine {machine.name!r} has no speeds of single devices: those are equally fast as far as "
      "is known; python -m mesh_tensorflow.planning.measure finds out"
    )
  names = mesh_shape.dimension_names
  if dimension is not None and dimension not in names:
    raise ArgumentError(
      f"propose_shares: the mesh has no dimension {dimension!r}; it has "
      f"{', '.join(names) or 'none'}"
    )
  grouped = {}
  for axis, name in enumerate(names):
    groups = _groups(mesh_shape, axis, machine.speeds)
    if groups is not None and dimension in (None, name):
      grouped[axis] = groups
  if not grouped:
    raise ConfigError(
      f"machine {machine.name!r} says how fast {len(machine.speeds)} devices are; they make no "
      f"mesh {','.join(f'{m.name}:{m.size}' for m in mesh_shape)} with "
      f"{dimension or 'some dimension'} of another size"
    )

  def gained(axis: int) -> float:
    speeds = _slowest(grouped[axis], machine)
    return relative_time(best_shares(speeds), speeds)

  axis = min(grouped, key=lambda a: (gained(a), a))
  groups, speeds = grouped[axis], _slowest(grouped[axis], machine)
  most = _checked_most(speeds, most)

  def predicted(parts: tuple[int, ...]) -> Division:
    sizes = mesh_shape.to_integer_list
    sizes[axis] = sum(parts)
    shape = Shape([Dimension(n, size) for n, size in zip(names, sizes)])
    # In the order of the devices' numbers, as `with_loads` takes them.
    used = sorted((p, n) for group, n in zip(groups, parts) if n for p in group)
    kept = dataclasses.replace(machine, speeds=tuple(machine.speeds[p] for p, _ in used))
    loaded = kept.with_loads([n for _, n in used])
    return Division(parts, shape, evaluator.evaluate(shape, layout, *sharding).time(loaded).seconds)

  equal = (1,) * len(groups)
  found, problem = {}, None
  ordered = sorted(_divisions(speeds, most), key=lambda s: relative_time(s, speeds))
  shortest = relative_time(ordered[0], speeds)
  for parts in [equal, *ordered]:
    time = relative_time(parts, speeds)
    if parts in found or (parts != equal and time >= relative_time(equal, speeds)):
      continue
    # Of devices that share a host, one alone has all of it: that is no reason to take one alone.
    if machine.shared and not all(parts) and time > shortest:
      continue
    try:
      found[parts] = predicted(parts)
    except LayoutError as e:  # What the layout splits has not so many parts.
      problem = problem or e
  if not found:
    assert problem is not None
    raise problem
  best = _chosen(equal, {parts: d.seconds for parts, d in found.items()})
  others = [d for parts, d in found.items() if parts not in (best, equal)]
  others.sort(key=lambda d: d.seconds)
  return SharesChoice(names[axis], tuple(speeds), found[best], found.get(equal), tuple(others))


def _groups(shape: Shape, axis: int, speeds: Sequence[float]) -> list[list[int]] | None:
  """For each device along a mesh axis its number, and those beside it; None: they make no mesh."""
  sizes = shape.to_integer_list
  before, after = math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :])
  count, left = divmod(len(speeds), before * after)
  if left or not count:
    return None
  return [
    [(b * count + i) * after + a for b in range(before) for a in range(after)] for i in range(count)
  ]


def _slowest(groups: Sequence[Sequence[int]], machine: Machine) -> list[float]:
  return [min(machine.speeds[p] for p in group) for group in groups]
