"""Reference for planning: costs and memory of a program from one lowering of all its operations."""

from __future__ import annotations

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.planning.cost_model import step_time
from mesh_tensorflow.planning.evaluation import probable_results
from mesh_tensorflow.planning.lowering import PlanLowering, Recorder, lifetimes
from mesh_tensorflow.planning.mesh_impl import PlanMeshImpl
from mesh_tensorflow.planning.program import Program, machine_of
from mesh_tensorflow.program.graph import needed_operations


class WholeLowering(PlanLowering):
  """A lowering of a whole graph, whose rules need not all match a dimension."""

  def check_layout_names(self):
    pass


class Costs:
  """Costs of a layout.

  Attributes:
    collectives: (kind, mesh axes, bytes over each axis, number of runs), sorted.
    seconds: of a step.
    memory: bytes of one device.
    activations: the part of these that outputs of operations take.
  """

  def __init__(self, graph, results, layout, mesh_shape, machine):
    impl = PlanMeshImpl(mesh_shape, layout)
    recorder = Recorder(impl)
    seed = tf.raw_ops.Placeholder(dtype=tf.int64, shape=[])
    lowering = WholeLowering(graph, {op.mesh: impl for op in graph.operations}, recorder, seed)
    operations = graph.operations
    results = probable_results(operations) if results is None else list(results)
    needed = needed_operations(operations, results)
    for op in operations:
      if op not in needed:
        del recorder.costs[op]
    operations = [op for op in operations if op in needed]
    for x in results:
      lowering.tensors[x].to_laid_out_tensor()
      recorder.attribute(x.operation)
    block = lifetimes(lowering, operations, results)
    block.inside = {
      i: recorder.inside[op] for i, op in enumerate(operations) if op in recorder.inside
    }
    costs = list(recorder.costs.values())
    self.collectives = sorted(
      (c.kind, c.mesh_axes, sorted(c.bytes_over.items()), op.times)
      for op in costs
      for c in op.collectives
    )
    self.activations = block.peak
    slices = [v for s in impl.variable_store for v in s.slices]
    self.memory = block.peak + sum(
      x.shape.num_elements() * x.dtype.size for x in [*slices, *impl.inputs]
    )
    work = ((op.work, [(c.kind, c.bytes_over) for c in op.collectives], op.times) for op in costs)
    self.seconds = step_time(work, machine, impl.shape).seconds


def costs(program, layout, mesh_shape, machine, results=None):
  """The `Costs` of a layout of a graph or a function, as `mtf.describe` takes them.

  Raises:
    LayoutError: the layout does not suit the program.
  """
  program, made = Program("costs", program, results), []
  mesh_shape = mtf.convert_to_shape(mesh_shape)
  machine = machine_of(machine, program.mesh_impl, mesh_shape.size)
  with tf.Graph().as_default():
    tf.function(
      lambda: made.append(Costs(*program.build(), layout, mesh_shape, machine)), autograph=False
    ).get_concrete_function()
  return made[0]
