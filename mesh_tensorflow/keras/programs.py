"""The programs of a Keras model on a mesh: of a training step, of evaluation, of prediction.

A program is made for each size of batch. The first one decides the names of the dimensions and the
layout; later ones have the same names, so that the variables lie as they do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.environment import collector
from mesh_tensorflow.environment.data_sets import untuned_iterators
from mesh_tensorflow.errors import GraphError, ShapeError, UnsupportedError
from mesh_tensorflow.importing.accumulating import changed_at_top, is_added_to
from mesh_tensorflow.importing.building import Start
from mesh_tensorflow.importing.imported import Imported
from mesh_tensorflow.importing.naming import named_leaves
from mesh_tensorflow.keras import hooks, mirror, processes, stages, steps
from mesh_tensorflow.keras.batches import Batch, batch_of, batches
from mesh_tensorflow.keras.layouts import (
  Decision,
  MeshChoice,
  decide,
  names_of,
  rules_by_hand,
  suited,
)
from mesh_tensorflow.keras.mirror import Mirror
from mesh_tensorflow.keras.summary import variables_table
from mesh_tensorflow.meshes.layout_names import unknown_dimension
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.binary import add, multiply
from mesh_tensorflow.operations.constants import zeros
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.operations.microbatches import accumulate
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.operations.variables import Assign
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Graph, Mesh, Operation, Tensor, on_stage
from mesh_tensorflow.running.function import Function, TensorSpec
from mesh_tensorflow.workers import agreement

_LOG = logging.getLogger("mesh_tensorflow")
# The name of the first axis of what a step gets: it counts examples.
BATCH = "batch"
# The end of the path of the state of a keras.random.SeedGenerator: a seed and a counter.
_SEED = "seed_generator_state"
# By so much the seeds of microbatches differ: an odd number, so that all of them do.
_APART = 0x2545F491


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """Request to `parallelize` for cutting a model and its batches.

  Attributes:
    stages: their number, or the names of the layers with which all but the first begin; 0 if the
      model is not cut.
    microbatches: number of parts of a training batch; None: up to four a stage.
  """

  stages: int | Sequence[str] = 0
  microbatches: int | None = None


@dataclasses.dataclass
class Microbatches:
  """A training step in microbatches.

  Attributes:
    count: their number.
    imported: the forward part, of one of them.
    graph: that it was traced in.
    added: names of the variables, metrics' say, that it only adds to.
    draws: for each state of a seed generator the number of seeds that it takes.
    factors: what computes the factors of the losses, of the whole batch, and the graph that it was
      traced in; None if no loss has one.
    finish: the end of the step, or None.
  """

  count: int
  imported: Imported
  graph: tf.Graph
  added: list[str]
  draws: dict[str, int]
  factors: tuple[Imported, tf.Graph] | None = None
  finish: Imported | None = None


@dataclasses.dataclass
class Program:
  """A step on the mesh.

  Attributes:
    kind: "train", "test", "predict" or "generate".
    batch: one of the sizes that it is for.
    imported: the forward part; the whole, if the model has a train_step of its own.
    takes_gradients: whether gradients and the optimizer's part are still to be added.
    update: the optimizer's part, or None.
    function: the whole, on the mesh.
    assigned: names of the variables that it assigns; known when it has run.
    microbatches: the forward part of a microbatch, if a step has several, and its end; or None.
  """

  kind: str
  batch: Batch
  imported: Imported
  takes_gradients: bool
  function: Function | None = None
  update: Imported | None = None
  assigned: frozenset[str] | None = None
  microbatches: Microbatches | None = None


class Programs:
  """Builds, caches and runs the programs of a Keras model on a mesh: train, test and predict.

  Args:
    model: the model.
    mesh: the mesh.
    layout: "auto", layout rules, or what Keras has for a layout.
    dims: dimension names by pattern of arguments and variables; see `from_tensorflow`.
    fallback: "replicate" or "error", for operations without a rule; see `from_tensorflow`.
    distribution: the distribution that the model was built under, in whose scope steps are traced
      and slots are made, and which says whether batches are sharded; None if there is none.
    pipeline: stages and microbatches.

  Attributes:
    model: the model.
    decision: the layout, once it is decided; None before.
    mirror: the variables of the model and of the mesh.
    unsplit: methods of the model that do not run on the mesh.
    cut: the layers with which all stages but the first begin, once a first batch has decided it.
  """

  def __init__(
    self,
    model: keras.Model,
    mesh: MeshChoice,
    layout: Any,
    dims: Mapping[str, Sequence[str | None]],
    fallback: str,
    distribution: Any = None,
    pipeline: Pipeline = Pipeline(),
  ):
    self.model = model
    self._pipeline = pipeline
    self.cut: list[Any] | None = None
    self._stage_of: dict[str, int] = {}  # By path of a variable.
    self._largest = 0  # Number of examples of the largest batch of training.
    self._scope = contextlib.nullcontext if distribution is None else distribution.scope
    # Which says whether each process has its shard of a batch.
    self._sharded_by = layout if distribution is None else distribution
    self.decision: Decision | None = None
    self.mirror = Mirror()
    self.unsplit = hooks.Unsplit(model)
    # Threads share a mesh step by step, and Keras' functions are theirs again after the last loop.
    self._lock, self._loops, self._kept = threading.RLock(), 0, contextlib.ExitStack()
    self._mesh, self._layout, self._dims, self._fallback = mesh, layout, dict(dims), fallback
    self._warned: set[str] = set()  # Types of operations that each device computes whole.
    self._told: set[str] = set()  # What was said of layouts, which are decided again for training.
    self._made: dict[Any, Program] = {}
    # By id; holding the variables keeps their ids valid.
    self._variables: dict[int, steps.NamedVariable] = {}
    self._others: list[tf.Variable] = []  # Used by a step, but not tracked by Keras.
    self._known_names: set[str] = set()
    self._built: set[str] = set()  # Kinds of steps whose variables Keras has made.
    self._compiled: Any = None  # What `compile` made when the programs were made.

  @property
  def mesh_impl(self) -> MeshImpl | None:
    """The mesh implementation, once the layout is decided."""
    return None if self.decision is None else self.decision.mesh_impl

  def latest(self, kind: str | None = None) -> Program:
    """A program, of whole batches.

    Args:
      kind: "train", "test", "predict" or "generate"; by default one of training, if there is one.

    Raises:
      GraphError: none has.
    """
    made = list(self._made.values())
    wanted = [p for p in made if p.kind == kind] if kind else made
    if not wanted:
      raise GraphError(
        "mtf.keras: no step has run yet, so the sizes of a batch are not known; call fit, "
        "train_on_batch or predict first"
      )
    # The first one is of a whole batch, the last of what was left over.
    return next((p for p in wanted if p.kind == "train"), wanted[0])

  def follow(self) -> None:
    """Forgets the programs if the model was compiled anew since they were made, by whomever."""
    compiled = steps.made_by_compile(self.model)
    if compiled is not self._compiled:
      self._compiled = compiled
      self._reset()

  def _reset(self) -> None:
    """Forgets the programs, and what only they used."""
    self._made = {}
    self._built = set()
    kept = {id(v.value) for v in self.model.variables}
    gone = {v.path for key, v in self._variables.items() if key not in kept}
    self.mirror.forget(gone)
    self._variables = {key: v for key, v in self._variables.items() if key in kept}
    self._others = []
    if self.decision is not None:
      for path in gone:
        self.decision.names.pop(path, None)
    for path in gone:
      self._stage_of.pop(path, None)

  def placement(self) -> str:
    """Table of each variable's layout on the mesh, beside that of a layout map if one was given.

    Raises:
      GraphError: no step has run yet.
    """
    self.latest()
    assert self.decision is not None
    asked = {} if self.decision.map_layout is None else self.decision.map_layout.asked
    store = self.decision.mesh_impl.variable_store
    return variables_table(list(store), self.names_of_model(), asked)

  # ---------------------------------------------- what Keras' loops call for a step

  @contextlib.contextmanager
  def running(self) -> Iterator[None]:
    """Puts the mesh's functions into the place of Keras', whose loops run inside.

    Raises:
      UnsupportedError: the model is compiled with run_eagerly=True.
    """
    with self._lock:
      if not self.is_running:
        self._replace_functions()
      self._loops += 1
    try:
      with untuned_iterators:
        yield
    finally:
      with self._lock:
        self._loops -= 1
        if not self.is_running:
          self._kept.close()

  def takes_loops(self) -> bool:
    """False while the model runs in the loop of another `Programs`, `ParallelModel.fit` say."""
    with self._lock:
      return self.is_running or "make_train_function" not in vars(self.model)

  @property
  def is_running(self) -> bool:
    """True while one of Keras' loops runs on the mesh, or several: of a callback, of threads."""
    return self._loops > 0

  def _replace_functions(self) -> None:
    self.follow()
    if self.model.run_eagerly:
      raise UnsupportedError(
        "mtf.keras: the model is compiled with run_eagerly=True, and a mesh runs programs; "
        "compile it without, and debug with tf.config.run_functions_eagerly(True)"
      )
    shadows: dict[str, Any] = self.unsplit.methods()
    if steps.generates(self.model):
      shadows["generate"] = hooks.without_distribution(self.model.generate)
      shadows["make_generate_function"] = lambda: self.generate_function
    for name, function in (
      ("train", self.train_function),
      ("test", self.test_function),
      ("predict", self.predict_function),
    ):
      shadows[f"{name}_function"] = function
      # Keras calls it before each loop, to make the function if there is none.
      shadows[f"make_{name}_function"] = lambda force=False, function=function: function
    self._kept.enter_context(hooks.replaced(self.model, shadows))

  def train_function(self, iterator: Iterable[Any]) -> Any:
    """A step of training, or several; see `keras.Model.make_train_function`."""
    return self._steps("train", iterator)

  def test_function(self, iterator: Iterable[Any]) -> Any:
    """A step of evaluation, or several."""
    return self._steps("test", iterator)

  def predict_function(self, data: Sequence[Any]) -> Any:
    """The outputs for a list of batches, one behind the other."""
    parts = [self._run("predict", batch_of(d, inputs_only=True)) for d in data]
    return tf.nest.map_structure(lambda *xs: tf.concat(xs, 0) if len(xs) > 1 else xs[0], *parts)

  def generate_function(self, inputs: Any, stop_token_ids: Any = None) -> Any:
    """Padded inputs with generated tokens in them; see `CausalLM.generate_step` of keras-hub."""
    stop = None if stop_token_ids is None else tuple(int(i) for i in stop_token_ids)
    return self._run("generate", batch_of((inputs,)), stop)

  def _steps(self, kind: str, iterator: Iterable[Any]) -> Any:
    logs: Any = None
    for data in batches(iterator, self.model.steps_per_execution):
      logs = self._run(kind, batch_of(data))
    return logs

  # ---------------------------------------------------------------------- variables

  def names_of_model(self) -> set[str]:
    """Names, on the mesh, of the variables of the model itself."""
    own = {id(v.value) for v in self.model.variables}
    return {v.path for v in self._named() if id(v.value) in own}

  def _named(self) -> list[steps.NamedVariable]:
    return steps.named_variables(self.model, self._variables, self._others)

  def _name_others(self, step: steps.Step, signature: Sequence[Any]) -> list[tf.Variable]:
    """Names variables that a step uses and Keras does not know; returns those that had no name.

    Slots of a second optimizer, say, that a train_step of the model's own has, or a variable of an
    optimizer that is inside of another one.
    """
    others = step.unnamed(signature)
    if others:
      self._others += others
      step.variables[:] = self._named()
    return others

  # ----------------------------------------------------------------------- programs

  def _run(self, kind: str, batch: Batch, stop: tuple[int, ...] | None = None) -> Any:
    with self._lock:
      return self._run_alone(kind, batch, stop)

  def _run_alone(self, kind: str, batch: Batch, stop: tuple[int, ...] | None) -> Any:
    batch = processes.whole_batch(batch, self._sharded_by)
    key = kind, batch.key, stop
    if key not in self._made:
      self._made[key] = self._make(kind, batch, stop)
    program = self._made[key]
    assert program.function is not None
    self.mirror.push()
    with mirror.unnoticed():
      results = program.function(*batch.leaves)
    if program.assigned is None:
      graph = program.function.graph
      assert graph is not None
      program.assigned = frozenset(_assigned(graph.operations))
    self.mirror.ran(program.assigned)
    return results

  def _imported(
    self, step: steps.Step, signature: list[Any] | None, names: Mapping[str, Sequence[str | None]]
  ) -> Imported:
    given = {n for of_axes in self._dims.values() for n in of_axes}
    known = {} if self.decision is None else self.decision.names
    derived = {n for of_axes in known.values() for n in of_axes if n is not None} - given
    initial_value = self.mirror.initial
    with mirror.unnoticed():  # It looks at the resources of variables, not at their values.
      return Imported(step, signature, names, self._fallback, self._warned, initial_value, derived)

  @collector.paused()
  def _make(self, kind: str, batch: Batch, stop: tuple[int, ...] | None) -> Program:
    """Imports a step, decides the layout if it is not, and binds it to the mesh."""
    with mirror.traces_unnoticed(), self._scope():
      return self._bound(kind, batch, stop)

  def _bound(self, kind: str, batch: Batch, stop: tuple[int, ...] | None) -> Program:
    fn = self._step_of(kind, stop)
    step = self._step(fn, batch)
    if self._built.isdisjoint((kind, "train")):
      if not steps.make_variables(self.model, step, batch, slots=kind == "train"):
        step = self._step(fn, batch)
      self._built.add(kind)
    step.variables[:] = self._named()
    self._name_others(step, batch.signature)
    names = self._names(step, batch)
    imported = self._imported(step, list(batch.signature), names)
    takes_gradients = kind == "train" and not steps.has_own_step(self.model)
    if takes_gradients and not self.model.trainable_variables:
      warnings.warn("The model does not have any trainable weights.", stacklevel=2)  # As Keras.
    program = Program(kind, batch, imported, takes_gradients)
    signature = [TensorSpec(shape, t.dtype) for shape, t in zip(imported.arguments, batch.leaves)]
    body = functools.partial(self._body, program)
    self._check_layout_names(kind, imported, names)
    before = self.decision
    joined = {} if before is None else before.joined(names_of(imported))
    decision = before
    if before is not None and joined and not self._is_provisional(before, kind):
      decision = before.renamed(joined)
    if decision is None or self._is_provisional(decision, kind):
      traced = step.get_concrete_function(*batch.signature).graph
      decision = decide(
        *(kind, self._mesh, self._layout, imported, body, signature, self.model, traced),
        tell=functools.partial(self._once, _LOG.warning),
        say=functools.partial(self._once, print),
        place=lambda impl: self._place_for_search(program, impl, traced, signature),
      )
      # What was made for the search has another layout.
      program.microbatches = program.update = None
      with_stages = self._mesh.with_stages(decision.mesh_impl)
      decision = dataclasses.replace(decision, mesh_impl=with_stages)
    if decision is not before:
      self._take(decision, joined)
    assert self.decision is not None
    # Variables that no program before had.
    self.decision.names.update({**names_of(imported), **self.decision.names})
    names_as_stored = {k: v for k, v in self.decision.stored.items() if k in names_of(imported)}
    if names_as_stored:
      imported.store_as(names_as_stored)
      program.update = None  # It was made while variables had other names.
    stored = (*self.decision.names.values(), *self.decision.stored.values())
    of_variables = {n for names in stored for n in names if n is not None}
    impl = suited(self.decision.mesh_impl, imported, of_variables)
    graph = step.get_concrete_function(*batch.signature).graph
    self._place(program, impl, graph, signature)
    program.function = Function(body, impl, signature, "mesh")
    program.function.__name__ = f"{self.model.name} {kind}"
    # The first run makes the mesh's variables, of the values that the originals have now.
    entered = self.mirror.enter({v.path: v.value for v in self._named()})
    if workers.current().size > 1:
      self._check_same(kind, batch, impl, entered)
    return program

  def _step(self, fn: Callable[..., Any], batch: Batch) -> steps.Step:
    around = stages.noted_calls if self._mesh.stages else contextlib.nullcontext
    return steps.Step(fn, batch.names, [], self.model, around)

  def _place(
    self, program: Program, impl: MeshImpl, graph: tf.Graph, signature: Sequence[TensorSpec]
  ) -> None:
    """Puts a program's operations on the stages, and takes a step of training apart.

    Args:
      program: the program.
      impl: its mesh.
      graph: that its forward part was traced in.
      signature: of its arguments; it gets their meshes.
    """
    if self._mesh.stages and self.cut is None:
      # All layers between which it is cut are in each kind of step.
      self.cut = stages.cut(graph, self._pipeline.stages, self.model.name)
    if program.takes_gradients and self.model.trainable_variables:
      steps.check_optimizer(self.model, bool(self._mesh.stages))
      count = self._microbatches_of(program.batch, signature, impl)
      if count > 1:
        program.microbatches = self._in_microbatches(program, count)
        # What was made for the search is for a whole batch.
        program.update = None
    if self.cut is None:
      return
    forward, traced = program.imported, graph
    if program.microbatches is not None:
      forward, traced = program.microbatches.imported, program.microbatches.graph
    placed = stages.of_forward(forward.program, traced, self.cut, self._stage_of)
    forward.place(placed)
    if program.microbatches is not None and program.microbatches.factors is not None:
      factors, of_batch = program.microbatches.factors
      factors.place(stages.of_forward(factors.program, of_batch, self.cut, self._stage_of))
    for spec, mesh in zip(signature, stages.of_arguments(forward.program, placed)):
      spec.mesh = mesh

  def _place_for_search(
    self, program: Program, impl: MeshImpl, graph: tf.Graph, signature: Sequence[TensorSpec]
  ) -> bool:
    """As `_place`; a program that is no pipeline stays on one mesh, and False is returned."""
    self._place(program, impl, graph, signature)
    if self.cut is not None and program.microbatches is not None:
      return True
    program.imported.place(None)
    for spec in signature:
      spec.mesh = None
    return False

  def _microbatches_of(self, batch: Batch, signature: Sequence[TensorSpec], impl: MeshImpl) -> int:
    """The number of microbatches of a batch.

    Raises:
      ShapeError: the number that was asked for does not divide what a replica has of the first
        batch, or of a larger one than those before.
    """
    asked, count = self._pipeline.microbatches, max(self._mesh.stages, 1)
    if asked is None and count == 1:
      return 1
    shape = signature[0].shape if signature else Shape([])
    if not shape.ndims:
      return 1
    examples = int(batch.leaves[0].shape[0])
    per_replica = examples
    for d, axis in impl.layout_rules.pairs:
      if d == shape[0].name and axis in impl.shape.dimension_names:
        size = int(impl.shape.get_dim_by_name(axis).size)
        per_replica = examples // size if examples % size == 0 else examples
    is_whole, self._largest = examples >= self._largest, max(self._largest, examples)
    most = 4 * count if asked is None else asked
    found = max(n for n in range(1, most + 1) if per_replica % n == 0)
    if asked is not None and found != asked and is_whole:
      raise ShapeError(
        f"mtf.keras: microbatches={asked} does not divide the {per_replica} examples that each "
        f"replica has of a batch of {examples}; give a number that does, {found} say, or a batch "
        f"of a multiple of {asked * examples // per_replica}"
      )
    return found

  def _in_microbatches(self, program: Program, count: int) -> Microbatches:
    """Imports the forward part of a microbatch.

    Raises:
      UnsupportedError: it changes a variable in another way than metrics and seeds do.
    """
    batch = program.batch
    for x in batch.leaves:
      if not x.shape.rank or x.shape[0] != batch.leaves[0].shape[0]:
        raise UnsupportedError(
          f"mtf.keras: a batch has tensors of {batch.leaves[0].shape[0]} examples, and one of shape"
          f" {x.shape}, which cannot be cut into {count} microbatches; give microbatches=1"
        )
    part = Batch(
      batch.names,
      tf.nest.map_structure(
        lambda x: (
          None if x is None else tf.TensorSpec([x.shape[0] // count, *x.shape[1:]], x.dtype)
        ),
        batch.values,
      ),
    )
    factors, given = self._factors(batch), part
    if factors is not None:
      scalars = [tf.TensorSpec(w.shape, w.dtype) for w in factors[0].program.outputs]
      given = Batch((*part.names, "factors"), (*part.values, scalars))
    step = self._step(steps.microbatch_step(self.model, count), given)
    step.variables[:] = self._named()
    self._name_others(step, given.signature)
    imported = self._imported(step, list(given.signature), self._names(step, part, given))
    stored = {} if self.decision is None else self.decision.stored
    names = {k: v for k, v in stored.items() if k in names_of(imported)}
    if names:
      imported.store_as(names)
    traced, added, draws = imported.program, list[str](), dict[str, int]()
    for variable, is_at_top in changed_at_top(traced).items():
      is_seed = variable.path.endswith(_SEED) and variable.variable.dtype.is_integer
      if is_at_top and is_seed and not variable.trainable:
        draws[variable.path] = sum(
          node.type.startswith("Assign") and any(w.variable is variable for w in node.inputs)
          for node in traced.nodes
        )
      elif is_at_top and is_added_to(traced, variable):
        added.append(variable.path)
      else:
        of_metrics = {id(v.value) for m in self.model.metrics for v in m.variables}
        if id(variable.variable) in of_metrics:
          raise UnsupportedError(
            f"mtf.keras: a step of training changes {variable.path}, of a metric, by more than "
            "adding to it, so it is not the sum of what its microbatches add: have the metric add "
            "only (assign_add in update_state, the rest in result), or give parallelize "
            "microbatches=1"
          )
        raise UnsupportedError(
          f"mtf.keras: a step of training changes {variable.path} by more than adding to it, as "
          "BatchNormalization does, whose statistics would be those of a microbatch: use another "
          "normalization (GroupNormalization, LayerNormalization), set trainable=False of the "
          "layer, or give parallelize microbatches=1"
        )
    graph = step.get_concrete_function(*given.signature).graph
    return Microbatches(count, imported, graph, added, draws, factors)

  def _factors(self, batch: Batch) -> tuple[Imported, tf.Graph] | None:
    """Imports what computes the factors of the losses of a batch; None if no loss has one.

    Raises:
      UnsupportedError: a factor depends on random numbers.
    """
    step = self._step(steps.factors_step(self.model), batch)
    step.variables[:] = self._named()
    self._name_others(step, batch.signature)
    concrete = step.get_concrete_function(*batch.signature)
    if not concrete.outputs:
      return None
    imported = self._imported(step, list(batch.signature), self._names(step, batch))
    imported.leave_out_changes()
    for node in imported.program.nodes:
      if any(w.variable is not None and w.variable.path.endswith(_SEED) for w in node.inputs):
        raise UnsupportedError(
          f"mtf.keras: the mask of an output of {self.model.name} depends on random numbers, "
          "dropout say, that are others in each microbatch: mask before them, give the mask as "
          "sample_weight, or give parallelize microbatches=1"
        )
    return imported, concrete.graph

  def _once(self, tell: Callable[[str], None], text: str) -> None:
    if text not in self._told:
      self._told.add(text)
      tell(text)

  def _check_same(self, kind: str, batch: Batch, impl: MeshImpl, entered: Sequence[str]) -> None:
    """Checks that all processes have the same program, first batch and initial values.

    Raises:
      ConfigError: in all processes: they have not.
    """
    agreement.check_same(
      [
        f"{kind} on the mesh {impl.shape}, split {impl.layout_rules.pairs}",
        f"arguments {batch.names} {batch.signature}",
        f"first batch of {kind} {processes.digest(batch)} (each process gives the same whole "
        "batches, shuffled by the same seed, or its shard and auto_shard_dataset=False)",
        f"values of variables {self.mirror.digest(entered)} (seeds and files of weights are the "
        "same in all processes)",
      ]
    )

  def _is_provisional(self, decision: Decision, kind: str) -> bool:
    """True if a layout decided for a program without gradients must be decided anew for training.

    A layout given by hand does not depend on the program, and stays.
    """
    return kind == "train" != decision.kind and not decision.is_by_hand

  def _take(self, decision: Decision, joined: Mapping[str, str]) -> None:
    """Sets the decision; if there was one of another layout, the state moves.

    Args:
      decision: the decision.
      joined: names of dimensions that have others now.
    """
    before, self.decision = self.decision, decision
    if before is not None:
      decision.names.update({**before.names, **decision.names})
      if decision.is_by_hand and joined:
        pairs = decision.mesh_impl.layout_rules.pairs
        renamed = list(dict.fromkeys((joined.get(d, d), m) for d, m in pairs))
        decision = dataclasses.replace(decision, mesh_impl=decision.mesh_impl.with_layout(renamed))
        self.decision = decision
      same_mesh = before.mesh_impl.shape == decision.mesh_impl.shape
      same_rules = before.mesh_impl.layout_rules == decision.mesh_impl.layout_rules
      if same_mesh and same_rules and before.stored == decision.stored and not joined:
        self.decision = dataclasses.replace(decision, mesh_impl=before.mesh_impl)
        return
      _LOG.info("mtf.keras: the state moves to the layout of training")
      self._made = {}
    self.mirror.attach(decision.mesh_impl.variable_store)

  def _check_layout_names(
    self, kind: str, imported: Imported, names: Mapping[str, Sequence[str | None]]
  ) -> None:
    """Checks that the rules a user wrote are for dimensions that there are.

    Args:
      kind: of the step.
      imported: the step.
      names: what `_names` returned: the names of arguments count for axes of size 1, too, which
        the imported program does not have, a batch of one example say.

    Raises:
      LayoutError: one is not.
    """
    rules = rules_by_hand(self._mesh, self._layout)
    self._known_names.update(imported.dimensions)
    of_arguments = [n for k, n in names.items() if k.split("/")[0].split("[")[0] in steps.ARGUMENTS]
    self._known_names.update(n for of_axes in of_arguments for n in of_axes if n is not None)
    own = {v.path.rpartition("/")[0] for v in self._variables.values()}
    of_keras = {v.path.rpartition("/")[0]: id(v.value) for v in self.model.variables}
    for name, axis in [] if rules is None else rules.pairs:
      layer, _, role = name.rpartition(".")
      meant = self._variables.get(of_keras.get(layer, 0))
      meant_name = None if meant is None else f"{meant.path.rpartition('/')[0]}.{role}"
      if name in self._known_names:
        if meant_name != name and meant_name in self._known_names and layer in own:
          _LOG.warning(
            "mtf.keras: layout rule %s:%s: numbers of names count within the model here; %s "
            "is not Keras' layer %s, whose dimension is %s",
            *(name, axis, name, layer, meant_name),
          )
      elif kind == "train" or not self._may_come(layer, name):
        known = meant_name if meant_name in self._known_names else None
        raise unknown_dimension(name, axis, self._known_names, known)

  def _may_come(self, layer: str, name: str) -> bool:
    """True if a later training step may have a dimension that this kind of step does not have."""
    if getattr(self.model, "optimizer", None) is None:
      return False
    given = {n for names in self._dims.values() for n in names}
    return name in given or layer.partition("/")[0] in steps.ARGUMENTS

  def _step_of(self, kind: str, stop: tuple[int, ...] | None) -> Callable[..., Any]:
    if kind == "train":
      steps.check_trainable(self.model)
      of = steps.own_train_step if steps.has_own_step(self.model) else steps.train_step
      return of(self.model)
    if kind == "generate" and self._mesh.stages:
      raise UnsupportedError(
        f"mtf.keras: generate of {self.model.name} in {self._mesh.stages} stages: its loop over "
        "tokens is of one mesh; call parallelize(model, ...) without stages, or the model's own "
        "generate"
      )
    if kind == "generate":
      return steps.generate_step(self.model, stop)
    return steps.test_step(self.model) if kind == "test" else steps.predict_step(self.model)

  def _names(
    self, step: steps.Step, batch: Batch, arguments: Batch | None = None
  ) -> dict[str, Sequence[str | None]]:
    """The names that the user gave, that variables have already, and of the examples.

    Args:
      step: the step.
      batch: what of its arguments is of examples.
      arguments: all of them, by default the same.
    """
    used = [v.path for v in step.used((arguments or batch).signature)]
    known = {} if self.decision is None else self.decision.names
    names: dict[str, Sequence[str | None]] = {}
    for pattern, given in self._dims.items():
      root = pattern.split("/")[0]
      elsewhere = root in steps.ARGUMENTS and root not in batch.names
      matches = [p for p in used if fnmatch.fnmatchcase(p, pattern)]
      if elsewhere or (known and root not in steps.ARGUMENTS and not matches):
        continue  # It is of another program.
      names[pattern] = given
    for path in used:
      if path in known:
        names[path.replace("[", "[[]")] = known[path]
    leaves = [
      leaf
      for name, value in zip(batch.names, batch.values)
      for leaf in named_leaves(name, value)
      if leaf[1] is not None and leaf[1].shape.rank
    ]
    firsts = [names[n][0] for n, _ in leaves if n in names and names[n][:1] not in ([], [None])]
    examples = leaves[0][1].shape[0] if leaves else None
    for name, t in leaves:
      if t.shape[0] == examples and names.get(name, [None])[0] is None:
        rest = list(names.get(name, [None] * t.shape.rank))[1:]
        names[name] = [firsts[0] if firsts else BATCH, *rest]
    return names

  def _body(self, program: Program, *tensors: Tensor) -> Any:
    """The step as operations on named dimensions."""
    with mirror.unnoticed():  # Perhaps in a thread of its own.
      return self._operations(program, tensors)

  def _operations(self, program: Program, tensors: Sequence[Tensor]) -> Any:
    flat = iter(tensors)
    args = tf.nest.map_structure(
      lambda t: None if t is None else next(flat), list(program.batch.values)
    )
    if program.microbatches is not None:
      factors = []
      if program.microbatches.factors is not None:
        factors = [program.microbatches.factors[0](*args)]
      return self._operations_in_microbatches(program, program.microbatches, tensors, factors)
    results = program.imported(*args)
    if not program.takes_gradients:
      return results
    loss, logs = results
    if self.model.trainable_variables:
      paths, found = self._trained(program.imported, loss.mesh)
      self._update(program, dict(zip(paths, gradients([loss], found))))
    return logs

  def _operations_in_microbatches(
    self,
    program: Program,
    microbatches: Microbatches,
    tensors: Sequence[Tensor],
    factors: Sequence[Any],
  ) -> Any:
    """A step of training, whose forward and backward passes are a loop over microbatches.

    Args:
      program: the step.
      microbatches: how it is taken apart.
      tensors: the batch.
      factors: a list of those of the losses, or nothing.
    """
    imported, count = microbatches.imported, microbatches.count
    batch_dim = tensors[0].shape[0]
    features = {
      str(i): x if x.shape[0] == batch_dim else reshape(x, [batch_dim, *x.shape.dims[1:]])
      for i, x in enumerate(tensors)
    }
    order: list[str] = []

    def body(parts: dict[str, Tensor], number: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
      flat = iter(parts.values())
      args = tf.nest.map_structure(
        lambda t: None if t is None else next(flat), list(program.batch.values)
      )

      def zero(_: Callable[[], Tensor], shape: Shape, mesh: Mesh, dtype: tf.DType) -> Tensor:
        return zeros(mesh, shape, dtype)

      def seed(value: Callable[[], Tensor], *_: Any) -> Tensor:
        # Not the counter: microbatches of later steps would draw the same numbers.
        state = value()
        return add(state, multiply(cast(on_stage(number), state.dtype), _APART))

      held: dict[str, Start] = dict.fromkeys(microbatches.added, zero)
      held.update(dict.fromkeys(microbatches.draws, seed))
      loss, changes = imported.call_holding(held, *args, *factors)
      loss = multiply(loss, 1.0 / count)
      paths, found = self._trained(imported, loss.mesh)
      pairs = [(p, g) for p, g in zip(paths, gradients([loss], found)) if g is not None]
      order[:] = [p for p, _ in pairs]
      added = [changes[path] for path in microbatches.added]
      return [loss, *(g for _, g in pairs), *added], {}

    sums, _ = accumulate(
      features, body, batch_dim, count, schedule=self._mesh.schedule, what="parallelize"
    )
    loss, found, added = sums[0], sums[1 : len(order) + 1], sums[len(order) + 1 :]
    values = {v.name: v.variable.dtype for v in imported.variables}
    self._update(program, {p: cast(g, values[p]) for p, g in zip(order, found)})
    return self._finish(microbatches, loss, added)

  def _finish(self, microbatches: Microbatches, loss: Tensor, added: Sequence[Tensor]) -> Any:
    """Changes variables by the sums over the microbatches; returns the logs."""
    if microbatches.finish is None:
      named = {v.path: v.value for v in self._named()}
      step = steps.Step(
        steps.finish_step(
          self.model,
          [named[p] for p in microbatches.added],
          [(named[p], n) for p, n in microbatches.draws.items()],
        ),
        ["loss", "sums"],
        self._named(),
        self.model,
      )
      signature = [
        tf.TensorSpec([], loss.dtype),
        [tf.TensorSpec(x.shape.to_integer_list, x.dtype) for x in added],
      ]
      self._name_others(step, signature)
      known = {} if self.decision is None else self.decision.names
      dims = {
        v.path.replace("[", "[[]"): known[v.path] for v in step.used(signature) if v.path in known
      }
      microbatches.finish = self._imported(step, signature, dims)
      self._place_update(microbatches.finish, [loss, *added])
    return microbatches.finish(loss, list(added))

  def _trained(self, imported: Imported, mesh: Mesh) -> tuple[list[str], list[Tensor]]:
    """The weights that a function uses and that are trained: their names and tensors."""
    graph = mesh.graph
    used = {v.name for v in imported.variables}
    named = {id(v.value): v.path for v in self._named()}
    paths = [named[id(v.value)] for v in self.model.trainable_variables]
    paths = [p for p in paths if p in used]
    return paths, [graph.name_to_variable[p].value for p in paths]

  def _update(self, program: Program, found: Mapping[str, Tensor | None]) -> None:
    """The optimizer's part of a step.

    Args:
      program: the step.
      found: by name the gradients of weights.
    """
    named = {id(v.value): v.path for v in self._named()}
    paths = [named[id(v.value)] for v in self.model.trainable_variables]
    present = [found.get(p) is not None for p in paths]
    given = [g for p in paths if (g := found.get(p)) is not None]
    if program.update is None:
      fn = steps.update_step(self.model, present)
      step = steps.Step(fn, ["gradients"], self._named(), self.model)
      signature = [[tf.TensorSpec(g.shape.to_integer_list, g.dtype) for g in given]]
      others = {id(v) for v in self._name_others(step, signature)}
      self.mirror.enter({v.path: v.value for v in step.variables if id(v.value) in others})
      dims = self._names_in_update(step, signature, given[0].graph)
      program.update = self._imported(step, None, dims)
    self._place_update(program.update, given, [given])
    program.update(given)

  def _place_update(
    self, imported: Imported, given: Sequence[Tensor], arguments: Sequence[Any] | None = None
  ) -> None:
    """Puts the operations of a function of gradients or sums on the stages of their variables.

    Args:
      imported: the function.
      given: its arguments, flat.
      arguments: they, if it is traced when it is called first.
    """
    # A layout may be searched for the whole on one mesh.
    if self.cut is None or any(not x.mesh.name.startswith("stage") for x in given):
      imported.place(None)
      return
    if arguments is not None:
      imported.trace(*arguments)
    places = [int(x.mesh.name.removeprefix("stage")) for x in given]
    imported.place(stages.of_update(imported.program, places, self._stage_of))

  def _names_in_update(
    self, step: steps.Step, signature: Sequence[Any], graph: Graph
  ) -> dict[str, Sequence[str | None]]:
    """The dimensions of the weights, as they are stored; those of the slots follow."""
    known = graph.name_to_variable
    return {
      v.path.replace("[", "[[]"): [
        d.name if d.size > 1 else None for d in known[v.path].value.shape
      ]
      for v in step.used(signature)
      if v.path in known
    }


def _assigned(operations: Iterable[Operation]) -> Iterator[str]:
  """Names of the variables that operations assign."""
  for op in operations:
    if isinstance(op, Assign):
      yield from (v.name for v in op.variables)
    yield from _assigned(getattr(op, "inner_operations", ()))
