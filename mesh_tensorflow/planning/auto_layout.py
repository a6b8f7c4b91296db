"""`mtf.auto_layout`: the layout, and the mesh shape, with the least predicted time that fits."""

from __future__ import annotations

import collections
import dataclasses
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import ArgumentError, LayoutError, OutOfMemoryError
from mesh_tensorflow.meshes.layout import LayoutLike, LayoutRules, convert_to_layout_rules
from mesh_tensorflow.planning.evaluation import bytes_of_variable
from mesh_tensorflow.planning.machine import Machine, convert_to_machine
from mesh_tensorflow.planning.pipeline import Blocks
from mesh_tensorflow.planning.program import Program, loaded_machine, machine_of, read_once
from mesh_tensorflow.planning.search import Best, Found, InStages, Sharding, Task
from mesh_tensorflow.planning.text import WIDTH, format_bytes, format_seconds, table
from mesh_tensorflow.program.dimensions import Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Graph, Tensor
from mesh_tensorflow.running.function import Function

_DEFAULT_MACHINE = "cpu"
# The part of the time limit that looking for the nearest may take where nothing fits.
_NEAREST = 0.25
# The part of the time limit that the search has at least, however long reading programs takes.
_SEARCH = 0.25


@dataclasses.dataclass(frozen=True)
class LayoutChoice:
  """A layout and its predicted cost.

  Attributes:
    mesh_shape: the mesh shape.
    layout: the `LayoutRules`.
    seconds: predicted time of a step.
    memory: peak bytes of one device.
    proven: whether the search was complete: no layout that fits is predicted to be faster.
    alternatives: the next best, the best first.
    machine: the machine it is predicted for.
    memory_limit: bytes that a device has.
    search_seconds: how long the search took.
    settings: name of the chosen program of `choices`; "" if there were none.
    shard_state: mesh dimensions over which variables are stored in shards; see
      `MeshImpl.with_sharded_state`.
    reshard_after_forward: likewise.
    stages: number of stages of a pipeline, each on a mesh of `mesh_shape`; 1: there is none.
    cut: of these how many of the program's meshes each stands for.
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
  settings: str = ""
  shard_state: tuple[str, ...] = ()
  reshard_after_forward: bool = True
  stages: int = 1
  cut: tuple[int, ...] = ()

  @property
  def built_with(self) -> str:
    """Names of the choices besides mesh and layout, in words."""
    words = [f"{self.stages} stages"] if self.stages > 1 else []
    words += [self.settings] if self.settings else []
    if self.shard_state:
      words.append(f"state in shards{'' if self.reshard_after_forward else ', gathered once'}")
    return ", ".join(words)

  def why_unsplit(self) -> str:
    """Why the layout splits nothing over the mesh, with figures; "" if it splits something."""
    if self.layout.pairs or self.mesh_shape.size == 1 or self.stages > 1:
      return ""
    whole = f"whole on each device, a step is predicted to take {format_seconds(self.seconds)}"
    split = next((c for c in self.alternatives if c.layout.pairs), None)
    if split is None:
      ended = "" if self.proven else f"; the search ended after {self.search_seconds:.1f} s"
      found = 1 + len(self.alternatives)
      return f"{whole}, and none of the {found} best layouts found splits anything{ended}"
    rules = ",".join(f"{t}:{m}" for t, m in split.layout.pairs)
    return (
      f"{whole}, and {format_seconds(split.seconds)} by the best layout that splits something "
      f"({rules}), as its exchanges take more time than is saved ({self.machine.name})"
    )

  def to_text(self) -> str:
    """The choice and its alternatives as a table of at most 100 columns."""
    how = "no layout is faster" if self.proven else "the best found: the search was not complete"
    choices = (self, *self.alternatives)
    rows = [
      [
        ",".join(f"{m.name}:{m.size}" for m in c.mesh_shape) or "one device",
        format_seconds(c.seconds),
        format_bytes(c.memory),
      ]
      for c in choices
    ]
    columns = ["mesh", "a step", "a device"]
    if any(c.built_with for c in choices):
      columns.append("built with")
      rows = [[*row, c.built_with or "as given"] for row, c in zip(rows, choices)]
    header, *lines = table(columns, rows, len(rows)).split("\n")
    first = (
      f"Layouts for {self.machine.name}, with {format_bytes(int(self.memory_limit))} a device; "
      f"{how} ({self.search_seconds:.1f} s)"
    )
    indent = " " * (max(map(len, [header, *lines])) + 2)
    unsplit = self.why_unsplit()
    told = textwrap.wrap(f"Nothing is split: {unsplit}", WIDTH) if unsplit else []
    written = [first, *told, header.ljust(len(indent)) + "layout"]
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
  choices: Mapping[str, Graph | Function | Callable[[], object]] | None = None,
  shard_state: bool = False,
  stages: Sequence[int] | None = None,
  when_short: Collection[str] = (),
) -> LayoutChoice:
  """Finds the layout with the least predicted step time among those that fit into memory.

  Args:
    program: an `mtf.Graph` or an `mtf.function`. (Where a function looks at the layout of its mesh
      while it builds its graph, that is the graph that is searched.)
    devices: number of devices: then the mesh shape is chosen too, of one to three dimensions.
    mesh_shape: a mesh shape, in place of `devices`.
    machine: an `mtf.planning.Machine`, the name of a shipped one, or a .json file; a CPU host by
      default. As in `mtf.describe`, of the workers that TF_CONFIG names.
    memory_limit: bytes that a device may hold; the memory of the machine's by default.
    fixed: layout rules that the layout must have; with `devices` their mesh dimensions are those
      of the mesh that is chosen. No other dimension is split differently from what they say.
    results: `Tensor`s of a graph that will be exported, as in `mtf.describe`.
    alternatives: number of next best layouts to report.
    time_limit: seconds of processor time after which the best so far is returned, not proven:
      what else the host does changes no answer. Reading a large program takes part of it; a quarter
      is left to the search all the same, which looks at the unsplit layout first.
    choices: other programs that do the same, by names such as "microbatches=4, recompute": with
      recomputation, microbatches, another optimizer. Graphs, functions, or functions without
      arguments that make one. One of them is taken where it is faster, or where the program itself
      does not fit; `settings` of the result says which.
    shard_state: whether variables may be stored in shards over all dimensions of the mesh, as by
      `MeshImpl.with_sharded_state`, where a layout does not fit otherwise; `shard_state` of the
      result says if they are. False: as the mesh of an `mtf.function` has them (over all its
      dimensions: over all of the mesh that is chosen).
    stages: numbers of stages to choose from, for a program that is a pipeline with more meshes, one
      for each layer, say: neighbouring meshes are then one stage. Each of S stages has a mesh of
      `devices` / S devices, those of another S are not looked at; of 1 all devices have one mesh.
      None: as many as the program has meshes, if it is a pipeline.
    when_short: names of `choices` that save memory and no time, as recomputation does: they are
      read and searched only if a layout of the others does not fit.

  Returns:
    A `LayoutChoice`, which prints as a table.

  Raises:
    ArgumentError: neither or both of `devices` and `mesh_shape` are given, or `stages` without
      `devices`; a number is out of its range; a name of `choices` is empty, or one of
      `when_short` is not among them.
    LayoutError: `fixed` contradicts the program or the mesh, or a mesh dimension divides no
      dimension of the program.
    OutOfMemoryError: no layout fits; it says which needs least, and what takes the memory.
    ConfigError: there is no such machine, or its file is wrong.
  """
  start, started = time.monotonic(), time.thread_time()
  if (devices is None) == (mesh_shape is None):
    raise ArgumentError("auto_layout takes either devices=8 or mesh_shape='a:2,b:4'")
  if devices is not None and devices < 1:
    raise ArgumentError(f"auto_layout: devices must be at least 1, got {devices}")
  if alternatives < 0 or (memory_limit is not None and memory_limit <= 0):
    raise ArgumentError(
      "auto_layout: alternatives must not be negative, and memory_limit (bytes) positive; got "
      f"{alternatives} and {memory_limit}"
    )
  if stages is not None and (devices is None or not stages or min(stages) < 1):
    raise ArgumentError(
      f"auto_layout: stages takes numbers of at least 1, and devices=, got stages={stages!r} and "
      f"devices={devices!r}"
    )
  what = Program("auto_layout", program, results)
  chosen = convert_to_machine(_DEFAULT_MACHINE if machine is None else machine)
  assert chosen is not None
  rules = convert_to_layout_rules(fixed or "")
  shape = None if mesh_shape is None else convert_to_shape(mesh_shape)
  size = devices if shape is None else int(shape.size)
  assert size is not None
  chosen = loaded_machine(machine_of(chosen, what.mesh_impl, size), what.mesh_impl, size)
  if memory_limit is None:
    memory_limit = chosen.memory_of_each(size)
  choices = {} if choices is None else choices
  for name in when_short:
    if name not in choices:
      raise ArgumentError(
        f"auto_layout: when_short names {name!r}, which is none of choices: {', '.join(choices)}"
      )
  given = (chosen, rules, float(memory_limit), shape, size, stages)
  with read_once():
    first = {n: p for n, p in choices.items() if n not in when_short}
    tasks = _tasks({"": what, **_programs(first)}, *given)

    def others() -> list[Task]:
      saving = _programs({n: p for n, p in choices.items() if n in when_short})
      try:
        return _tasks(saving, *given)
      except LayoutError:  # As of others that no mesh suits, nothing is said of them.
        return []

    best, proven = _searched(
      tasks,
      others if when_short else list,
      shard_state,
      size,
      1 + alternatives,
      started,
      time_limit,
    )
  took = time.monotonic() - start
  made = [_choice(f, tasks[0], proven, took) for f in best.found]
  return dataclasses.replace(made[0], alternatives=tuple(made[1:]))


def _searched(
  tasks: list[Task],
  others: Callable[[], list[Task]],
  shard_state: bool,
  devices: int,
  count: int,
  started: float,
  time_limit: float,
) -> tuple[Best, bool]:
  """Searches for the best layouts; also returns whether the search was complete.

  Other programs, and shards, only take less memory: they are looked at where that was short.

  Raises:
    OutOfMemoryError: none fits.
  """
  best, proven, was_short = Best(count), True, False
  # Reading a large program may use up the limit; the search gets some time all the same.
  end = max(started + time_limit, time.thread_time() + _SEARCH * time_limit)
  open_ = collections.deque(tasks)
  while open_:
    task, now = open_.popleft(), time.thread_time()
    # Time that one task leaves unused is shared by the others.
    in_shards = 0 if was_short or not shard_state else 2 * len(tasks)
    proven = task.search(best, now + (end - now) / (1 + len(open_) + in_shards)) and proven
    if not open_ and not was_short and any(t.short_of_memory for t in tasks):
      was_short = True
      more = others()
      end = max(end, time.thread_time() + _SEARCH * time_limit) if more else end
      if shard_state:
        more += [t.in_shards(again) for t in [*tasks, *more] for again in (False, True)]
      open_.extend(more)
      tasks = [*tasks, *more]
  if not best.found:
    nearest = _nearest(tasks, time.thread_time() + _NEAREST * time_limit)
    if nearest is None or nearest.memory.total > tasks[0].limit:
      raise _nothing_fits(tasks, nearest, devices, proven)
    # The layout found by memory alone fits after all.
    for task in tasks:
      task.consider(best, nearest)
  return best, proven


def _tasks(
  programs: Mapping[str, Program],
  machine: Machine,
  rules: LayoutRules,
  limit: float,
  shape: Shape | None,
  devices: int,
  stages: Sequence[int] | None,
) -> list[Task]:
  """Builds a search `Task` for each program, and number of stages, that some mesh shape suits.

  Raises:
    LayoutError: no program has one; the message is that of the first program.
  """
  tasks: list[Task] = []
  errors = []
  parts = [devices] if shape is None else shape.to_integer_list
  for name, program in programs.items():
    evaluator = program.evaluator(parts)
    impl = program.mesh_impl
    sharding = Sharding(impl.state_dims, impl.reshards_after_forward) if impl else Sharding()
    if shape is None and impl and set(impl.state_dims) == set(impl.shape.dimension_names):
      # Over the whole mesh, whichever it will be.
      sharding = Sharding(None if impl.state_dims else (), impl.reshards_after_forward)
    blocks = Blocks.of(evaluator.graph)
    try:
      task = Task(evaluator, machine, rules, limit, name, sharding)
    except LayoutError as e:
      errors.append(e)
      continue
    for count, one in _in_stages(task, blocks, devices, shape, stages):
      try:
        if shape is not None:
          one.on_given(shape)
        else:
          one.on_any(devices // count)
        tasks.append(one)
      except LayoutError as e:
        errors.append(e)
  if not tasks:
    if errors:
      raise LayoutError(str(errors[0])) from errors[0]
    if stages is None:
      raise LayoutError(
        f"auto_layout: the {len(blocks or ())} meshes of the program's pipeline do not "
        f"divide the {devices} devices, and each stage has as many; stages= tells other numbers"
      )
    raise LayoutError(
      f"auto_layout: no number of stages of {list(stages)} divides the {devices} devices and is at "
      "most that of the meshes of the program's pipeline"
    )
  return tasks


def _in_stages(
  task: Task,
  blocks: Blocks | None,
  devices: int,
  shape: Shape | None,
  stages: Sequence[int] | None,
) -> Iterator[tuple[int, Task]]:
  """Yields the numbers of stages that a program can have, each with its task."""
  meshes = 1 if blocks is None else len(blocks)
  for count in [meshes] if stages is None else sorted(set(stages)):
    if count > meshes or (shape is None and devices % count):
      continue
    if count == 1 or blocks is None:
      yield 1, task
    else:
      yield count, task.in_stages(InStages(blocks, count))


def _programs(choices: Mapping[str, Any]) -> dict[str, Program]:
  """The programs to choose from."""
  found = {}
  for name, given in choices.items():
    if not name:
      raise ArgumentError("auto_layout: a name of choices is empty; that is the program itself")
    if callable(given) and not isinstance(given, Function):
      given = given()
    found[name] = Program(f"auto_layout: choices[{name!r}]", given)
  return found


def _nearest(tasks: Sequence[Task], deadline: float) -> Found | None:
  """Searches for the layout of least memory; None if none is found in time.

  In this search the `seconds` of a `Found` are bytes, too.
  """
  best = Best(1)
  for task in tasks:
    task.search(best, deadline, for_memory=True)
  return best.found[0] if best.found else None


def _nothing_fits(
  tasks: Sequence[Task], nearest: Found | None, devices: int, proven: bool
) -> OutOfMemoryError:
  """Builds the error if no layout fits; it describes the layout of least memory."""
  limit = format_bytes(int(tasks[0].limit))
  none = "no layout fits" if proven else "no layout was found that fits"
  programs = len({t.settings for t in tasks})
  several = f", of {programs} ways to build the program" if programs > 1 else ""
  text = f"{none} into the {limit} of a device, of {devices}{several}"
  if nearest is None:
    return OutOfMemoryError(f"{text}; the search for the one that needs least ran out of time")
  m = nearest.memory
  task = next(t for t in tasks if t.built_as == nearest.built_as()[1:])
  sizes = {v.full_name: bytes_of_variable(v) for v in task.evaluator.variables}
  whole = sorted(sizes.items(), key=lambda v: -v[1])
  variables = ", ".join(f"{n} {format_bytes(b)}" for n, b in whole[:3])
  largest = ", ".join(f"{h.name} {format_bytes(h.bytes)}" for h in m.largest[:3])
  rules = ",".join(f"{d}:{nearest.mesh_shape[a].name}" for d, a in sorted(nearest.layout.items()))
  choice = _choice(nearest, task, proven, 0.0)
  built = f"{choice.built_with}, " if choice.built_with else ""
  ways = [] if several else ["microbatches", "recomputation"]
  ways += [] if choice.shard_state or devices == 1 else ["state in shards"]
  less = ["More devices", "a smaller batch", *ways]
  return OutOfMemoryError(
    f"{text}. Nearest is {built}{rules or 'no rule'} on the mesh {nearest.mesh_shape.to_string}, "
    f"with {format_bytes(m.total)} a device: variables {format_bytes(m.variables)} (the largest, "
    f"whole: {variables or 'none'}), inputs {format_bytes(m.inputs)}, activations "
    f"{format_bytes(m.activations)} at {m.peak_operation} (the largest: {largest or 'none'}). "
    f"{', '.join(less[:-1])} or {less[-1]} need less"
  )


def _choice(found: Found, task: Task, proven: bool, took: float) -> LayoutChoice:
  """Converts a layout that was found to the public `LayoutChoice`."""
  return LayoutChoice(
    mesh_shape=found.mesh_shape,
    layout=LayoutRules([(d, found.mesh_shape[a].name) for d, a in sorted(found.layout.items())]),
    seconds=found.seconds,
    memory=found.memory.total,
    proven=proven,
    alternatives=(),
    machine=task.machine,
    memory_limit=task.limit,
    search_seconds=took,
    settings=found.settings,
    shard_state=found.sharding.over(found.mesh_shape),
    reshard_after_forward=found.sharding.reshard_after_forward,
    stages=found.stages,
    cut=found.cut,
  )


__all__ = ["LayoutChoice", "auto_layout"]
