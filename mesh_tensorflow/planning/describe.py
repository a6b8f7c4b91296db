"""`mtf.describe`: a report of the splits and the costs of a layout, before a run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from mesh_settings import hints
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import (
  ArgumentError,
  ConfigError,
  GraphError,
  LayoutError,
  UnsupportedError,
)
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.planning import text
from mesh_tensorflow.planning.cost_model import StepTime
from mesh_tensorflow.planning.evaluation import Evaluation
from mesh_tensorflow.planning.lowering import OperationCost
from mesh_tensorflow.planning.machine import Machine, convert_to_machine
from mesh_tensorflow.planning.pictures import draw_layout, draw_time
from mesh_tensorflow.planning.pipeline import plan_pipeline
from mesh_tensorflow.planning.program import Program, loaded_machine, machine_of
from mesh_tensorflow.planning.shares import SharesChoice, chosen_shares
from mesh_tensorflow.program.dimensions import Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Graph, Tensor
from mesh_tensorflow.running.function import Function, attach_planner


@dataclasses.dataclass(frozen=True)
class RuleMatch:
  """Dimensions, variables and tensors that a layout rule matched.

  Attributes:
    tensor_dimension: name of the tensor dimension.
    mesh_dimension: name of the mesh dimension.
    mesh_size: size of the mesh dimension, None if the mesh has none of that name.
    sizes: sizes of the tensor dimensions of that name.
    variables: number of variables that it splits.
    tensors: number of other tensors that it splits.
    problem: why it has no effect, or "".
  """

  tensor_dimension: str
  mesh_dimension: str
  mesh_size: int | None
  sizes: list[int]
  variables: int
  tensors: int
  problem: str


@dataclasses.dataclass(frozen=True)
class Placement:
  """Placement of a tensor or variable on the mesh.

  Attributes:
    name: of the tensor, or full name of the variable.
    shape: (dimension name, size) pairs.
    split: for each dimension the name of the mesh dimension that splits it, or None.
    dtype: name of the dtype of the slices.
    bytes: size of the whole.
    bytes_per_device: size of a slice.
    copies: number of devices that hold the same slice.
    trainable: of a variable; None for tensors.
  """

  name: str
  shape: list[tuple[str, int]]
  split: list[str | None]
  dtype: str
  bytes: int
  bytes_per_device: int
  copies: int
  trainable: bool | None = None

  @property
  def is_replicated(self) -> bool:
    """True if every device holds the whole tensor."""
    return all(m is None for m in self.split)


class Report:
  """Report of what a layout splits and costs; `str(report)` has at most 100 columns.

  Args:
    evaluation: the layout of a program, evaluated.
    title: name of the program.
    machine: the machine that it is timed for, or None.
    tokens: number of tokens per step, or None.
    processors_of_devices: number of processors of each device; one by default.

  Attributes:
    title: name of the program.
    mesh_shape: the mesh shape.
    layout: the `LayoutRules`.
    shard_state: mesh dimensions over which variables are stored in shards.
    reshard_after_forward: of these, whether weights are gathered anew before each use.
    rules: a `RuleMatch` for each rule.
    idle_mesh_dimensions: names of the mesh dimensions (of more than one device) that split nothing.
    variables: a `Placement` for each variable, those with the largest slices first.
    tensors: a `Placement` for each other tensor, in the order of the program.
    operations: an `OperationCost` for each operation, in the order of the program.
    memory: an `evaluation.Memory`: bytes of one device, or, where some have several, of one
      processor.
    processors_of_devices: number of processors of each device.
    machine: the `Machine`, or None.
    time: a `cost_model.StepTime`: the breakdown of the time of a step; None without a machine.
    tokens: number of tokens per step; None if not known.
    find_shares: finds `shares`; None if the machine says nothing of single devices.
    pipeline: a `pipeline.PipelinePlan`: its stages, bubble and schedule; None if there is none. All
      else is then for one device that does the work of all stages, one after the other.
  """

  def __init__(
    self,
    evaluation: Evaluation,
    title: str,
    machine: Machine | None = None,
    tokens: int | None = None,
    processors_of_devices: Sequence[int] | None = None,
  ):
    impl = evaluation.mesh_impl
    self.title = title
    self.processors_of_devices = list(processors_of_devices or [1] * impl.size)
    self.machine = machine
    self.tokens = tokens
    self.mesh_shape: Shape = impl.shape
    self.layout = impl.layout_rules
    self.shard_state = list(impl.state_dims)
    self.reshard_after_forward = impl.reshards_after_forward
    self._impl = impl
    self._evaluation = evaluation
    self.operations = list(evaluation.costs.values())
    self.memory = evaluation.memory
    self.tensors = [
      self._place(x.name, x.shape, x.dtype)
      for op in evaluation.costs
      if not isinstance(op, Variable)
      for x in op.outputs
    ]
    variables = [op for op in evaluation.graph.operations if isinstance(op, Variable)]
    self.variables = sorted(
      (
        self._place(v.full_name, v.shape, v.slice_dtype, v.trainable, v.stored_impl(impl))
        for v in variables
      ),
      key=lambda v: -v.bytes_per_device,
    )
    self.time: StepTime | None = None if machine is None else self.timed(machine)
    self.find_shares: Callable[[], SharesChoice] | None = None
    costs = evaluation.costs_on(machine)
    self.pipeline = plan_pipeline(evaluation.graph, impl, costs, machine)
    names = evaluation.dimension_names
    self.rules = [self._match(t, m, names) for t, m in self.layout.pairs]
    used = {r.mesh_dimension for r in self.rules if not r.problem} | set(impl.state_dims)
    self.idle_mesh_dimensions = [
      m.name for m in self.mesh_shape if m.size > 1 and m.name not in used
    ]

  def timed(self, machine: Machine) -> StepTime:
    """Predicts the time of a step on a machine, by part.

    Args:
      machine: any machine, not only that of the report.
    """
    return self._evaluation.time(machine)

  @functools.cached_property
  def shares(self) -> SharesChoice | None:
    """Shares for devices of unequal speed, beside the equal split; None if there is no choice."""
    try:
      return None if self.find_shares is None else self.find_shares()
    except (ConfigError, LayoutError):  # The devices make no other mesh, or the layout suits none.
      return None

  @property
  def replicated_tensors(self) -> list[Placement]:
    """Tensors that every device holds whole, largest first."""
    return sorted((t for t in self.tensors if t.is_replicated), key=lambda t: -t.bytes)

  @property
  def replicated_variables(self) -> list[Placement]:
    """Variables that every device holds whole, largest first."""
    return [v for v in self.variables if v.is_replicated]

  @property
  def seconds(self) -> float | None:
    """Predicted seconds of a step; None without a machine."""
    if self.time is None:
      return None
    return self.time.seconds if self.pipeline is None else self.pipeline.seconds

  @property
  def utilisation(self) -> float | None:
    """Model FLOPs utilization: `flops_needed` as a fraction of peak; None without a machine."""
    if self.time is None or not self.seconds:
      return None
    done = self.flops_per_device * self.mesh_shape.size
    needed = self.flops_needed / done if done else 1.0
    stages = 1 if self.pipeline is None else len(self.pipeline.stages)
    return self.time.ideal_seconds * needed / (self.seconds * stages)

  @property
  def tokens_per_second(self) -> float | None:
    """Predicted tokens per second; None without a machine or if `tokens` is not known."""
    if self.tokens is None or not self.seconds:
      return None
    return self.tokens / self.seconds

  @property
  def flops_per_device(self) -> int:
    """FLOPs of one device: matrix products and convolutions, two a multiply-add."""
    return sum(op.flops * op.times for op in self.operations)

  @property
  def flops_needed(self) -> int:
    """FLOPs of all devices, without redundant copies of the same work."""
    devices = self.mesh_shape.size
    return sum(op.flops * op.times * devices // op.repeated for op in self.operations)

  def bytes_moved(self, operation: OperationCost | None = None) -> dict[str, int]:
    """Bytes that one device sends over each mesh dimension.

    Args:
      operation: one of `self.operations`; all of them by default.
    """
    total = {m.name: 0 for m in self.mesh_shape}
    for op in self.operations if operation is None else [operation]:
      for axis, n in op.bytes_over().items():
        total[self.mesh_shape[axis].name] += n
    return total

  def to_dict(self) -> dict[str, Any]:
    """The report as a dict of numbers, strings, lists and dicts (as JSON has them)."""
    memory = self.memory
    return {
      "title": self.title,
      "mesh_shape": {m.name: m.size for m in self.mesh_shape},
      "devices": len(self.processors_of_devices),
      "processors_of_devices": self.processors_of_devices,
      "layout": [list(p) for p in self.layout.written],
      "shard_state": self.shard_state,
      "rules": [dataclasses.asdict(r) for r in self.rules],
      "idle_mesh_dimensions": self.idle_mesh_dimensions,
      "memory_per_device": {
        "variables": memory.variables,
        "inputs": memory.inputs,
        "activations": memory.activations,
        "total": memory.total,
        "peak_operation": memory.peak_operation,
        "largest_at_peak": [{"tensor": n, "bytes": b} for n, b in memory.largest[:20]],
      },
      "seconds": self.seconds,
      "pipeline": None if self.pipeline is None else self.pipeline.to_dict(),
      "shares": None if self.shares is None else self.shares.to_dict(),
      "time": self._time_dict(),
      "flops_per_device": self.flops_per_device,
      "flops_needed": self.flops_needed,
      "bytes_moved": self.bytes_moved(),
      "operations": [self._operation_dict(op) for op in self.operations],
      "variables": [_placement_dict(v) for v in self.variables],
      "replicated_tensors": [_placement_dict(t) for t in self.replicated_tensors],
    }

  def _time_dict(self) -> dict[str, Any] | None:
    if self.time is None or self.machine is None:
      return None
    work = self.time.work
    return {
      "machine": self.machine.name,
      "parts": self.time.parts(),
      "products": [
        {
          "dtype": dtype,
          "flops_at_most": 10**size,
          "flops": work.flops[dtype, size],
          "seconds": seconds,
        }
        for (dtype, size), seconds in sorted(work.products.items())
      ],
      "latency": self.time.latency,
      "utilisation": self.utilisation,
      "tokens": self.tokens,
      "tokens_per_second": self.tokens_per_second,
    }

  def to_text(self, rows: int = 10) -> str:
    """The report as text; tables have at most `rows` rows, the costliest first."""
    return text.report_text(self, rows)

  def __str__(self) -> str:
    return self.to_text()

  def save_picture(self, path: str, tensor: Tensor | Variable | str | None = None) -> None:
    """Draws which device holds which part of a tensor (needs matplotlib).

    Args:
      path: a file name; its end says the format: .svg, .png or .pdf.
      tensor: an `mtf.Tensor` or `mtf.Variable`, or the name of one; by default the
        variable with the largest slices that is split (or tensor, if there is none).

    Raises:
      GraphError: the program has no such tensor.
      UnsupportedError: matplotlib is not installed, or cannot write this format.
    """
    placement = self._find(tensor)
    shape = convert_to_shape(placement.shape)
    parts: dict[tuple[int, ...], list[int]] = {}
    for pnum in range(self.mesh_shape.size):
      parts.setdefault(tuple(self._impl.slice_begin(shape, pnum)), []).append(pnum)
    mesh = ",".join(f"{m.name}:{m.size}" for m in self.mesh_shape) or "1 device"
    split = text.shape_text(placement.shape, placement.split)
    title = f"{placement.name} [{split}] on mesh {mesh}"
    draw_layout(path, shape, self._impl.slice_shape(shape), parts, title)

  def save_time_picture(self, path: str) -> None:
    """Draws where the time of a step goes, and memory over the step (needs matplotlib).

    Args:
      path: a file name; its end says the format: .svg, .png or .pdf.

    Raises:
      GraphError: the report was made without a machine.
      UnsupportedError: matplotlib is not installed, or cannot write this format.
    """
    if self.time is None:
      raise GraphError("a picture of the time needs mtf.describe(program, machine=...)")
    held = self.memory.variables + self.memory.inputs
    title = f"{self.title}: {text.format_seconds(self.time.seconds)} a step"
    draw_time(path, self.time.parts(), [held + h.bytes for h in self.memory.timeline], held, title)

  def _find(self, tensor: Tensor | Variable | str | None) -> Placement:
    known = self.variables + self.tensors
    if tensor is None:
      splits = [p for p in self.variables if not p.is_replicated]
      splits = splits or sorted(
        (t for t in self.tensors if not t.is_replicated), key=lambda t: -t.bytes_per_device
      )
      if not (splits or known):
        raise GraphError("the program has no tensor to draw")
      return (splits or known)[0]
    if isinstance(tensor, Variable):
      tensor = tensor.value
    if isinstance(tensor, Tensor):
      return self._place(tensor.name, tensor.shape, tensor.dtype)
    for p in known:
      if tensor in (p.name, p.name.rsplit(":", 1)[0]):
        return p
    raise GraphError(
      f"the program has no tensor {tensor!r}{_did_you_mean(str(tensor), [p.name for p in known])}"
    )

  def _place(
    self,
    name: str,
    shape: Shape,
    dtype: tf.DType,
    trainable: bool | None = None,
    impl: MeshImpl | None = None,
  ) -> Placement:
    impl = self._impl if impl is None else impl
    layout, part = impl.tensor_layout(shape), impl.slice_size(shape)
    # A mesh dimension of size 1 splits nothing.
    sizes = self.mesh_shape.to_integer_list
    return Placement(
      name=name,
      shape=[(d.name, d.size) for d in shape],
      split=[None if a is None or sizes[a] == 1 else self.mesh_shape[a].name for a in layout],
      dtype=dtype.name,
      bytes=shape.size * dtype.size,
      bytes_per_device=part * dtype.size,
      copies=part * self.mesh_shape.size // max(shape.size, 1),
      trainable=trainable,
    )

  def _match(self, tensor_dim: str, mesh_dim: str, names: set[str]) -> RuleMatch:
    mesh = {m.name: m.size for m in self.mesh_shape}

    def having(places: list[Placement]) -> list[Placement]:
      return [p for p in places if tensor_dim in dict(p.shape)]

    variables, tensors = having(self.variables), having(self.tensors)
    sizes = {size for p in variables + tensors for name, size in p.shape if name == tensor_dim}
    problem = ""
    if mesh_dim not in mesh:
      problem = f"the mesh has no dimension {mesh_dim!r}{_did_you_mean(mesh_dim, mesh)}"
    elif tensor_dim not in names:
      problem = f"the program has no dimension {tensor_dim!r}{_did_you_mean(tensor_dim, names)}"
    elif mesh[mesh_dim] == 1:
      problem = "a mesh dimension of size 1 splits nothing"
    return RuleMatch(
      tensor_dim,
      mesh_dim,
      mesh.get(mesh_dim),
      sorted(sizes),
      0 if problem else len(variables),
      0 if problem else len(tensors),
      problem,
    )

  def _operation_dict(self, op: OperationCost) -> dict[str, Any]:
    return {
      "name": op.name,
      "type": op.type,
      "flops": op.flops,
      "repeated": op.repeated,
      "times": op.times,
      "in_unbounded_loop": op.in_unbounded_loop,
      "bytes_moved": {m: n for m, n in self.bytes_moved(op).items() if n},
      "collectives": [
        {
          "kind": c.kind,
          "reduction": c.reduction,
          "mesh_dimensions": [self.mesh_shape[a].name for a in c.mesh_axes],
          "slice_bytes": c.slice_bytes,
          "bytes_moved": {self.mesh_shape[a].name: n for a, n in c.bytes_over.items()},
        }
        for c in op.collectives
      ],
    }


@checked
def describe(
  graph_or_function: Graph | Function,
  layout: LayoutLike | None = None,
  mesh_shape: ShapeLike | None = None,
  *,
  mesh_impl: MeshImpl | None = None,
  results: list[Tensor] | None = None,
  machine: Machine | str | None = None,
  tokens: int | None = None,
) -> Report:
  """Reports which dimensions a layout splits, what it replicates, and what it costs.

  The program is lowered for the mesh on symbolic slices: nothing is computed or
  allocated, so neither the size of the mesh nor that of the model matters.

  Args:
    graph_or_function: an `mtf.Graph`, or an `mtf.function`.
    layout: layout rules; those of `mesh_impl` (or of the function's) by default.
    mesh_shape: mesh shape; likewise.
    mesh_impl: a `MeshImpl` to take layout and mesh shape from.
    results: `Tensor`s of a graph that will be exported; by default those that no operation
      reads (but no unused gradients, if the graph has assignments). What no result and no
      assignment needs is not counted. A function's results are what it returns.
    machine: an `mtf.planning.Machine`, the name of one that comes with the package, or a .json
      file: the report then predicts `seconds`; over the workers that TF_CONFIG names, if the mesh
      can be theirs.
    tokens: how many tokens a step takes; by default the elements of the largest integer argument
      of a function whose last dimension is a length.

  Returns:
    A `Report`: as text `str(report)`, `report.to_dict()`, `report.save_picture(path, tensor)`.

  Raises:
    GraphError: layout or mesh shape is missing, or the function has no input signature.
    LayoutError: the layout does not suit the program.
    UnsupportedError: stages of a pipeline differ in shape or layout.
    ConfigError: there is no such machine, or its file is wrong.
    ArgumentError: `tokens` is not positive.
  """
  machine = convert_to_machine(machine)
  program = Program("describe", graph_or_function, results)
  mesh_impl = program.mesh_impl if mesh_impl is None else mesh_impl
  if mesh_impl is not None:
    if layout is None or mesh_shape is None:
      _check_alike(mesh_impl)
    layout = mesh_impl.layout_rules if layout is None else layout
    mesh_shape = mesh_impl.shape if mesh_shape is None else mesh_shape
  if layout is None or mesh_shape is None:
    missing = "layout" if layout is None else "mesh_shape"
    raise GraphError(f"describe of a graph needs a layout and a mesh_shape; {missing} is missing")

  measured = None
  if machine is not None:
    size = convert_to_shape(mesh_shape).size
    measured = machine_of(machine, mesh_impl, size)
    machine = loaded_machine(measured, mesh_impl, size)
  if tokens is not None and tokens < 1:
    raise ArgumentError(
      f"describe: tokens must be at least 1, got {tokens!r}; leave it out where a step takes none"
    )
  tokens = program.tokens if tokens is None else tokens
  sharding: Any = (
    () if mesh_impl is None else (mesh_impl.state_dims, mesh_impl.reshards_after_forward)
  )
  evaluator = program.evaluator()
  evaluation = evaluator.evaluate(mesh_shape, layout, *sharding)
  loads = None
  if mesh_impl is not None and mesh_impl.size == evaluation.mesh_impl.size:
    loads = mesh_impl.processors_of_devices
  report = Report(evaluation, program.title, machine, tokens, loads)
  if measured is not None and measured.speeds and report.pipeline is None:
    shape = convert_to_shape(mesh_shape)
    report.find_shares = functools.partial(
      chosen_shares, evaluator, measured, shape, layout, sharding
    )
  return report


def _check_alike(mesh_impl: MeshImpl) -> None:
  """Raises `UnsupportedError` if the stages of a mesh differ in shape or layout."""

  def told(impl: MeshImpl) -> str:
    mesh = ",".join(f"{m.name}:{m.size}" for m in impl.shape)
    return f"mesh {mesh or 'of one device'}, layout {impl.layout_rules.to_string or '(no rules)'}"

  for name, impl in mesh_impl.stages.items():
    if told(impl) != told(mesh_impl):
      raise UnsupportedError(
        "describe predicts stages of one mesh shape and layout, and stage0 has "
        f"{told(mesh_impl)}, {name} {told(impl)}; mtf.describe(step, layout, mesh_shape) predicts "
        "all of them on such a mesh"
      )


def _placement_dict(p: Placement) -> dict[str, Any]:
  """A placement as numbers, texts, lists and dicts."""
  return {**dataclasses.asdict(p), "shape": [list(d) for d in p.shape]}


def _did_you_mean(name: str, known: Collection[str]) -> str:
  """'; did you mean ...?', or what there is if nothing is close."""
  close = hints.did_you_mean(name, known, shown=repr)
  if close or not known:
    return close
  return f"; there are {', '.join(sorted(known)[:12])}{', ...' if len(known) > 12 else ''}"


attach_planner(describe)
