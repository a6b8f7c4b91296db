"""Trains and evaluates the U-Net of `unet` on a mesh.

  python -m mesh_tensorflow.experimental.model_executor --nouse_tpu \
      --mesh_shape 'rows:2,columns:2' --checkpoint_dir run \
      --layout 'image_nx_block:rows,image_ny_block:columns' \
      --train_file_pattern 'train/*.tfrecords' --eval_file_pattern 'eval/*.tfrecords'

One program for each phase is traced once; weights stay on the devices between phases.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags

from mesh_tensorflow import checkpoint, ops, optimize
from mesh_tensorflow.environment.virtual_devices import virtual_cpu_devices
from mesh_tensorflow.experimental import flag_definitions as define
from mesh_tensorflow.experimental import input_reader, unet
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.placement.mesh_impl import PlacementMeshImpl
from mesh_tensorflow.program.dimensions import ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Graph, Mesh
from mesh_tensorflow.tpu import mesh as tpu_mesh

FLAGS = flags.FLAGS
_LOG = logging.getLogger("mesh_tensorflow")

# `tf.summary.write` writes what `tf.summary.scalar` does, also where TensorBoard is not installed.
_SCALAR_METADATA = b"\x0a\x09\x0a\x07scalars\x20\x01"

define.boolean("use_tpu", True, "Whether the mesh is of the cores of a TPU; else of GPUs or CPUs.")
define.number("lr", 0.003, "Learning rate of the first steps.")
define.number(
  "lr_drop_steps", 20000.0, "Steps after which the learning rate drops, again and again."
)
define.number("lr_drop_rate", 0.3, "What it is multiplied by.")
define.integer("num_train_iterations_per_loop", 500, "Steps of training before each evaluation.")
define.integer("num_eval_iterations_per_loop", 2, "Steps of each evaluation.")
define.integer("num_training_loops", 1000, "How often training and evaluation follow each other.")
define.string("mesh_shape", "rows:4, columns:4, cores:2", "Names and sizes of the mesh's axes.")
define.string("master", "", "Name or address of the TPU; the local one if empty.")
define.string("checkpoint_dir", "", "Folder of checkpoints, from the newest of which it goes on.")
define.integer("save_checkpoints_steps", 500, "Steps between checkpoints.")
define.boolean("on_gcp", False, "Kept for commands that give it; not used.")
define.boolean("write_summary", True, "Whether metrics are written for TensorBoard.")
define.string("summary_dir", "", "Where metrics go; checkpoint_dir if empty.")
define.string("pred_output_dir", "", "Where predictions go; none are written if empty.")


class MeshContext:
  """The devices, and the mesh on them.

  Args:
    sess: not used; there are no sessions.
    use_tpu: whether the mesh is of the cores of a TPU. Else of GPUs if there are enough, else of
      CPU devices of this process.
    mesh_shape: mesh shape.
    layout_rules: layout rules.

  Raises:
    ConfigError: there is no TPU.
    MeshShapeError: the mesh does not fit the devices.
  """

  def __init__(self, sess: Any, use_tpu: bool, mesh_shape: ShapeLike, layout_rules: LayoutLike):
    del sess
    self._use_tpu = use_tpu
    self._shape = convert_to_shape(mesh_shape)
    if use_tpu:
      self._impl: Any = tpu_mesh.make_mesh_impl(self._shape, layout_rules, FLAGS.master or "local")
    else:
      gpus = [d.name for d in tf.config.list_logical_devices("GPU")]
      n = self._shape.size
      devices = gpus[:n] if len(gpus) >= n else virtual_cpu_devices(n)
      self._impl = PlacementMeshImpl(self._shape, layout_rules, devices)

  @property
  def device_assignment(self) -> Any:
    """The TPU device assignment; None for other devices."""
    return self._impl.device_assignment if self._use_tpu else None

  @property
  def num_hosts(self) -> int | None:
    """Number of hosts of the TPU; None for other devices."""
    return self.device_assignment.topology.num_tasks if self._use_tpu else None

  @property
  def num_cores(self) -> int | None:
    """Number of cores of the TPU; None for other devices."""
    return self._shape.size if self._use_tpu else None

  @property
  def num_cores_per_host(self) -> int | None:
    """Number of cores of each host of the TPU; None for other devices."""
    return self._shape.size // self.num_hosts if self.num_hosts else None

  @property
  def mesh_impl(self) -> MeshImpl:
    """The `MeshImpl`."""
    return self._impl  # type: ignore[no-any-return]

  def create_graph_mesh_and_mesh_impl(self) -> tuple[Graph, Mesh, MeshImpl]:
    """A new graph, a mesh in it, and the implementation, which is the same each time."""
    graph = Graph()
    return graph, Mesh(graph, "my_mesh"), self.mesh_impl


class _Phase:
  """Steps of training or of evaluation: the data, and a TensorFlow function.

  Args:
    context: a `MeshContext`.
    dataset_str: "train" or "eval".
  """

  def __init__(self, context: MeshContext, dataset_str: str):
    self._context, self._dataset_str = context, dataset_str
    self._impl = context.mesh_impl
    shapes = unet.get_input_mtf_shapes(dataset_str)
    self._reader = input_reader.PlacementMeshImplInputReader(
      self._impl, unet.get_dataset_creator(dataset_str), shapes
    )
    self._names: list[str] = []
    self._step = tf.function(self._run, autograph=False)
    dtype = tf.as_dtype(FLAGS.mtf_dtype)
    slices = [[tf.TensorSpec(self._impl.slice_shape(s), dtype)] * self._impl.size for s in shapes]
    # Tracing makes the variables, which restoring a checkpoint needs.
    self._step.get_concrete_function(*slices, tf.TensorSpec([], tf.float32))

  def step(self, learning_rate: float = 0.0) -> tuple[dict[str, float], list[np.ndarray]]:
    """Runs a step; returns (metrics and loss by name, predictions)."""
    images, labels = self._reader.next_slices()
    with self._impl.errors_of_runs(self._dataset_str):
      scalars, predictions = self._step(images, labels, tf.constant(learning_rate))
    values = {name: float(v) for name, v in zip(self._names, scalars)}
    return values, [p.numpy() for p in predictions]

  def _run(
    self, images: list[tf.Tensor], labels: list[tf.Tensor], learning_rate: tf.Tensor
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    return self._impl.run(self._program, [images, labels, learning_rate])  # type: ignore[no-any-return]

  def _program(
    self, images: list[tf.Tensor], labels: list[tf.Tensor], learning_rate: tf.Tensor
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    graph, mesh, impl = self._context.create_graph_mesh_and_mesh_impl()
    images, labels = (_of_program(impl, t) for t in (images, labels))
    predictions, loss, metrics, updates = unet.unet_with_spatial_partition(
      mesh, impl, self._dataset_str, images, labels
    )
    if self._dataset_str == "train":
      variables = graph.trainable_variables
      gradients = ops.gradients([loss], [v.outputs[0] for v in variables])
      optimizer = optimize.AdafactorOptimizer(learning_rate=learning_rate)
      updates = [*updates, *optimizer.apply_grads(gradients, variables)]
      step = optimize.get_global_step(mesh)
      updates.append(ops.assign_add(step, ops.ones_like(step)))
    lowering = ops.Lowering(graph, {mesh: impl})
    scalars = {**metrics, "loss": loss}
    self._names = list(scalars)
    wanted = [] if self._dataset_str == "train" else predictions
    with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
      return (
        [tf.cast(lowering.export_to_tf_tensor(t), tf.float32) for t in scalars.values()],
        [tf.cast(lowering.export_to_tf_tensor(t), tf.float32) for t in wanted],
      )


def _of_program(impl: MeshImpl, slices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
  """The slices that the running program has: all, or that of its one processor."""
  stacked: Callable[[Any], tf.Tensor] = lambda pnum: (  # noqa: E731
    tf.gather(tf.stack(slices), pnum) if tf.is_tensor(pnum) else slices[pnum]
  )
  mine = impl.slicewise(stacked, impl.laid_out_pnum())
  return list(mine.tensor_list)


def _learning_rate(step: int) -> float:
  return float(FLAGS.lr * FLAGS.lr_drop_rate ** (step // FLAGS.lr_drop_steps))


class _Run:
  """Weights, checkpoints and summaries of a run."""

  def __init__(self) -> None:
    self._context = MeshContext(None, FLAGS.use_tpu, FLAGS.mesh_shape, unet.get_layout())
    self._phases: dict[str, _Phase] = {}
    self._saver: checkpoint.Checkpointer | None = None
    self.step = 0
    folder = FLAGS.summary_dir or FLAGS.checkpoint_dir
    self._writer = None
    if FLAGS.write_summary and folder:
      self._writer = tf.summary.create_file_writer(folder)

  def train(self, steps: int) -> None:
    phase = self._phase("train")
    for _ in range(steps):
      rate = _learning_rate(self.step)
      values, _ = phase.step(rate)
      self.step += 1
      self._report("train", {**values, "learning_rate": rate})
      if self._saver is not None and self.step % FLAGS.save_checkpoints_steps == 0:
        self._saver.save(self.step)
    if self._saver is not None:
      self._saver.save(self.step)

  def evaluate(self, steps: int) -> None:
    phase, processor = self._phase("eval"), unet.PostProcessor()
    for i in range(steps):
      values, predictions = phase.step()
      self._report("eval", values)
      if FLAGS.pred_output_dir:
        folder = os.path.join(FLAGS.pred_output_dir, f"{self.step}_{i}" if i else str(self.step))
        processor.record([*predictions, values["loss"], self.step], folder)
    if FLAGS.pred_output_dir:
      processor.finish()

  def close(self) -> None:
    if self._saver is not None:
      self._saver.wait()

  def _phase(self, name: str) -> _Phase:
    if name not in self._phases:
      self._phases[name] = _Phase(self._context, name)
      self._restore()
    return self._phases[name]

  def _restore(self) -> None:
    """Restores the newest checkpoint, at the beginning of the run only."""
    if not FLAGS.checkpoint_dir or self._saver is not None:
      return
    store = self._context.mesh_impl.variable_store
    self._saver = checkpoint.Checkpointer(FLAGS.checkpoint_dir, store)
    if checkpoint.latest_checkpoint(FLAGS.checkpoint_dir):
      # Without training there are no variables of an optimizer.
      restored = self._saver.restore(ignore_unexpected="train" not in self._phases)
      self.step = restored.step or 0

  def _report(self, phase: str, values: dict[str, float]) -> None:
    _LOG.info(
      "%s step %d: %s", phase, self.step, ", ".join(f"{n} {v:.5g}" for n, v in values.items())
    )
    if self._writer is not None:
      with self._writer.as_default(step=self.step):
        for name, value in values.items():
          tf.summary.write(
            f"{phase}_{name}", np.array(value, np.float32), metadata=_SCALAR_METADATA
          )


def train_and_eval() -> None:
  """Trains and evaluates in turn, as the flags say; a phase of no steps is left out."""
  run = _Run()
  for _ in range(FLAGS.num_training_loops):
    if FLAGS.num_train_iterations_per_loop > 0:
      run.train(FLAGS.num_train_iterations_per_loop)
    if FLAGS.num_eval_iterations_per_loop > 0:
      run.evaluate(FLAGS.num_eval_iterations_per_loop)
  run.close()


def main(_: Any) -> None:
  """The command."""
  train_and_eval()


if __name__ == "__main__":
  app.run(main, sys.argv)
