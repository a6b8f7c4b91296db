"""Trains and evaluates the U-Net of `unet` on a mesh.

  python -m mesh_tensorflow.experimental.model_executor --nouse_tpu \
      --mesh_shape 'rows:2,columns:2' --checkpoint_dir run \
      --layout 'image_nx_block:rows,image_ny_block:columns' \
      --train_file_pattern 'train/*.tfrecords' --eval_file_pattern 'eval/*.tfrecords'

The loop is that of all trainings (`mesh_tensorflow.training.loop`); weights stay on the devices
between training and evaluation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import flags

from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import ops, optimize, workers
from mesh_tensorflow.environment.virtual_devices import virtual_cpu_devices
from mesh_tensorflow.experimental import flag_definitions as define
from mesh_tensorflow.experimental import unet
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.placement.mesh_impl import PlacementMeshImpl
from mesh_tensorflow.meshes.tpu import mesh as tpu_mesh
from mesh_tensorflow.program.dimensions import ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Graph, Mesh, Tensor
from mesh_tensorflow.running.function import TensorSpec, function
from mesh_tensorflow.training import command
from mesh_tensorflow.training.data import reading
from mesh_tensorflow.training.loop import TrainingLoop
from mesh_tensorflow.training.settings import checked_settings
from mesh_tensorflow.training.state import ModelState
from mesh_tensorflow.training.trainer import ModelProgram
from mesh_tensorflow.training.validation import Evaluator

FLAGS = flags.FLAGS

_TRAINER_FLAGS = command.trainer_flags(save_checkpoints_steps=500)

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
define.boolean("on_gcp", False, "Kept for commands that give it; not used.")
define.integer("iterations_per_call", 100, "Most steps of one call of the compiled program.")
for _flag in _TRAINER_FLAGS:
  define.flag(*_flag)
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

  def __init__(self, sess: object, use_tpu: bool, mesh_shape: ShapeLike, layout_rules: LayoutLike):
    del sess
    self._use_tpu = use_tpu
    self._shape = convert_to_shape(mesh_shape)
    if use_tpu:
      self._impl: Any = tpu_mesh.make_mesh_impl(self._shape, layout_rules, FLAGS.master or "local")
    else:
      n = self._shape.size
      # To list logical devices would start TensorFlow, after which no virtual ones can be made.
      if len(tf.config.list_physical_devices("GPU")) >= n:
        devices = [d.name for d in tf.config.list_logical_devices("GPU")][:n]
      else:
        devices = virtual_cpu_devices(n)
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


def _model_fn(features: dict[str, Tensor], mode: str) -> tuple[Tensor, dict[str, Tensor]]:
  """Loss and metrics of a batch; updates of batch norm are operations of the graph."""
  _, loss, metrics, _ = unet.unet_of_tensors(mode, features["image"], features["label"])
  return loss, metrics


def _specs(dataset_str: str) -> dict[str, TensorSpec]:
  dtype = tf.as_dtype(FLAGS.mtf_dtype)
  shapes = unet.get_input_mtf_shapes(dataset_str)
  return {n: TensorSpec(shape, dtype, n) for n, shape in zip(("image", "label"), shapes)}


def _examples(dataset_str: str) -> tf.data.Dataset:
  data = unet.get_dataset_creator(dataset_str)()
  return data.map(lambda image, label: {"image": image, "label": label})


def _learning_rate(step: tf.Tensor) -> tf.Tensor:
  drops = tf.floor(tf.cast(step, tf.float32) / FLAGS.lr_drop_steps)
  return FLAGS.lr * FLAGS.lr_drop_rate**drops


class _Evaluation(Evaluator):
  """The evaluation of the U-Net, an `Evaluator` of the loop: means of metrics, and predictions.

  Args:
    state: the variables.
  """

  def __init__(self, state: ModelState):
    self._state = state
    self._program = ModelProgram(_model_fn, state.mesh_impl, _specs("eval"))

  def datasets(self) -> dict[str, Callable[[], tf.data.Dataset]]:
    """The data set, as `held_out` of the loop."""
    return {"eval": lambda: _examples("eval")}

  def check(self, dataset: tf.data.Dataset) -> Sequence[str]:
    """See `Evaluator`."""
    return self._program.feature_names(dataset)

  @functools.cached_property
  def step(self) -> Any:
    """The compiled evaluation of a batch; asking for it makes the variables."""
    specs = list(_specs("eval").values())

    @function(self._state.mesh_impl, specs)
    def eval_step(image: Tensor, label: Tensor) -> Any:
      predictions, loss, metrics, _ = unet.unet_of_tensors("eval", image, label)
      return {"loss": loss, **metrics}, [ops.to_float(p) for p in predictions]

    compiled = tf.function(eval_step, autograph=False)
    compiled.get_concrete_function(
      *[tf.TensorSpec(s.shape.to_integer_list, s.dtype) for s in specs]
    )
    return compiled

  def metrics(
    self, dataset: tf.data.Dataset, max_batches: int | None, goes_on: Callable[[], bool]
  ) -> dict[str, float] | None:
    """See `Evaluator`; predictions are written, if the flags say so."""
    size = self._program.examples.size
    batches = dataset.batch(size, drop_remainder=True).take(max_batches or -1)
    processor, number = unet.PostProcessor(), self._state.step
    sums: dict[str, float] = {}
    count = 0
    for batch in reading(batches.prefetch(1)):
      if not goes_on():
        return None
      scalars, predictions = self.step(batch["image"], batch["label"])
      values = {name: float(x) for name, x in scalars.items()}
      sums = {name: sums.get(name, 0.0) + x for name, x in values.items()}
      if FLAGS.pred_output_dir and workers.current().is_chief:
        folder = f"{number}_{count}" if count else str(number)
        results = [*[p.numpy() for p in predictions], values["loss"], number]
        processor.record(results, os.path.join(FLAGS.pred_output_dir, folder))
      count += 1
    if FLAGS.pred_output_dir and count and workers.current().is_chief:
      processor.finish()
    self.shown = list(sums) or self.shown
    return {name: total / count for name, total in sums.items()}

  def text(self, metrics: Mapping[str, float]) -> str:
    """Loss and metrics."""
    return ", ".join(f"{name} {value:.5g}" for name, value in metrics.items())


def train_and_eval() -> None:
  """Trains and evaluates in turn, as the flags say; a phase of no steps is left out.

  A run that finds checkpoints goes on from the newest, and does as many steps more. Shuffled and
  augmented scans begin anew.
  """
  train, evaluate = FLAGS.num_train_iterations_per_loop, FLAGS.num_eval_iterations_per_loop
  context = MeshContext(None, FLAGS.use_tpu, FLAGS.mesh_shape, unet.get_layout())
  state = ModelState(context.mesh_impl, FLAGS.checkpoint_dir or None)
  evaluation = _Evaluation(state) if evaluate > 0 else None
  if train <= 0:
    if evaluation is not None:
      _evaluate(state, evaluation)
    return
  settings = checked_settings(
    TrainerSettings(owner="--"),
    iterations_per_loop=FLAGS.iterations_per_call,
    **{name: FLAGS[name].value for _, name, *_ in _TRAINER_FLAGS},
    eval_every_steps=train if evaluation is not None else 0,
    eval_steps=max(1, evaluate),
  )
  program = ModelProgram(_model_fn, context.mesh_impl, _specs("train"))
  loop = TrainingLoop(
    program,
    state,
    settings,
    optimizer=optimize.AdafactorOptimizer,
    learning_rate=_learning_rate,
    held_out=evaluation.datasets if evaluation is not None else None,
    evaluator=evaluation,
  )
  loop.report_dir = FLAGS.summary_dir or FLAGS.checkpoint_dir if FLAGS.write_summary else None
  # What is drawn of shuffled scans is other data in any case: none is left out.
  loop.train(lambda skip=0: _examples("train"), steps=FLAGS.num_training_loops * train)


def _evaluate(state: ModelState, evaluation: _Evaluation) -> None:
  """Evaluates the newest checkpoint."""
  _ = evaluation.step
  state.restore()
  number = FLAGS.num_eval_iterations_per_loop
  found = evaluation.metrics(_examples("eval"), number, lambda: True)
  state.say(f"step {state.step}  eval {evaluation.text(found or {})}")


def main(_: object) -> None:
  """The command."""
  train_and_eval()


if __name__ == "__main__":
  command.run_program(main, __doc__, own="mesh_tensorflow.experimental.", trains=True)
