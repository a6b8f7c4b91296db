"""Trains a stack of dense layers to give back its input, on a mesh of virtual CPU devices.

The smallest whole program in the style of the TF1 library: a graph, layers, gradients, an
optimizer, a Lowering; training and evaluation in turn; checkpoints, from which it goes on.

  python -m mesh_tensorflow.examples.toy_model
  python -m mesh_tensorflow.examples.toy_model --mesh_shape "rows:2,cols:2" \
      --layout "batch:rows,hidden_odd:cols" --implementation simd --optimizer Adafactor --lr 0.01 \
      --model_dir toy
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf
import tqdm

from mesh_tensorflow import checkpoint
from mesh_tensorflow.examples import mesh_flags
from mesh_tensorflow.meshes import layout_names

ROWS = 10000


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
  """The command line; the names are those of the TF1 program."""
  parser = argparse.ArgumentParser(
    description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
  )
  model = parser.add_argument_group("the model")
  model.add_argument("--batch_size", type=int, default=64, help="rows in a batch")
  model.add_argument("--io_size", type=int, default=16, help="numbers in a row")
  model.add_argument("--hidden_size", type=int, default=16, help="size of each hidden layer")
  model.add_argument("--num_hidden_layers", type=int, default=1, help="number of hidden layers")
  for kind, default, what in [
    ("master", "bfloat16", "weights in checkpoints"),
    ("slice", "float32", "weights on the devices"),
    ("activation", "float32", "everything computed"),
  ]:
    model.add_argument(f"--{kind}_dtype", default=default, help=f"dtype of {what}")
  training = parser.add_argument_group("training")
  training.add_argument("--optimizer", default="SGD", choices=["SGD", "Adafactor"], help="which")
  training.add_argument("--lr", type=float, default=1e-4, help="learning rate")
  training.add_argument("--train_steps", type=int, default=10000, help="steps in all")
  training.add_argument("--iterations", type=int, default=100, help="steps in one call, one line")
  training.add_argument(
    "--steps_per_checkpoint", type=int, default=200, help="steps between evaluations (0: no such)"
  )
  training.add_argument(
    "--model_dir", default="", help="folder of checkpoints, which a new run goes on from (none)"
  )
  training.add_argument(
    "--step_with_nan", type=int, default=-1, help="puts a NaN into the data of this step"
  )
  mesh = parser.add_argument_group("the mesh")
  mesh.add_argument("--mesh_shape", default="all:8", help="names and sizes of the mesh axes")
  mesh.add_argument(
    "--layout",
    default="hidden_odd:all",
    help="which dimension (batch, io, hidden_odd, hidden_even) is split over which mesh axis",
  )
  mesh.add_argument(
    "--implementation",
    default="placement",
    choices=["placement", "simd"],
    help="one graph for all devices, or one program that every device runs",
  )
  return parser.parse_args(argv)


def make_mesh_impl(args: argparse.Namespace) -> mtf.MeshImpl:
  """The mesh, on virtual CPU devices."""
  shape = mtf.convert_to_shape(args.mesh_shape)
  devices = mtf.virtual_cpu_devices(shape.size)
  if args.implementation == "simd":
    return mtf.SimdMeshImpl(shape, args.layout, devices)
  return mtf.PlacementMeshImpl(shape, args.layout, devices)


def toy_model(x: mtf.Tensor, args: argparse.Namespace) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Dense layers that shall give back x.

  Args:
    x: a `Tensor` [batch, io].
    args: the command line.

  Returns:
    What they give back, and the mean of the squares of its errors.
  """
  dtype = mtf.VariableDType(
    tf.as_dtype(args.master_dtype),
    tf.as_dtype(args.slice_dtype),
    tf.as_dtype(args.activation_dtype),
  )
  io_dim = x.shape[-1]
  # Two names in turn: one layer is split over the mesh, the next one puts the parts together.
  names = ["hidden_odd" if i % 2 else "hidden_even" for i in range(1, args.num_hidden_layers + 1)]
  dims = [mtf.Dimension(name, args.hidden_size) for name in names] + [io_dim]
  y = mtf.cast(x, dtype.activation_dtype)
  for i, dim in enumerate(dims, start=1):
    kernel = {"use_bias": False, "variable_dtype": dtype, "name": f"layer_{i}"}
    y = mtf.layers.dense(y, dim, reduced_dims=y.shape.dims[-1:], **kernel)
  loss = mtf.reduce_mean(mtf.square(mtf.to_float(y) - mtf.to_float(x)))
  return y, loss


def check_layout(mesh_impl: mtf.MeshImpl, args: argparse.Namespace) -> None:
  """Raises `mtf.LayoutError` for a layout rule that names what nothing has: it would do nothing."""
  graph = mtf.Graph()
  shape = mtf.Shape([("batch", args.batch_size), ("io", args.io_size)])
  toy_model(mtf.zeros(mtf.Mesh(graph, "toy"), shape), args)
  layout_names.check_names(mesh_impl, graph)


def make_step(
  mesh_impl: mtf.MeshImpl, args: argparse.Namespace, train: bool
) -> Callable[[tf.Tensor], tf.Tensor]:
  """A function from a batch to its loss; for training it also updates the weights."""

  def program(batch: tf.Tensor) -> tf.Tensor:
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "toy")
    shape = mtf.Shape([("batch", args.batch_size), ("io", args.io_size)])
    _, loss = toy_model(mtf.import_tf_tensor(mesh, batch, shape=shape), args)
    updates = []
    if train:
      optimizer = mtf.optimize.SgdOptimizer(args.lr)
      if args.optimizer == "Adafactor":
        optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=args.lr)
      variables = graph.trainable_variables
      grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
      updates = optimizer.apply_grads(grads, variables)
      step = mtf.optimize.get_global_step(mesh)
      updates.append(mtf.assign_add(step, mtf.ones_like(step)))
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
      return tf.identity(lowering.export_to_tf_tensor(loss))

  return lambda batch: mesh_impl.run(program, [batch])


class ToyTrainer:
  """Training and evaluation of the toy model on one mesh.

  Args:
    mesh_impl: the mesh.
    args: the command line.
  """

  def __init__(self, mesh_impl: mtf.MeshImpl, args: argparse.Namespace):
    self._args = args
    rows = np.random.default_rng(0).uniform(size=[ROWS, args.io_size]).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    self._train_data = dataset.repeat().batch(args.batch_size)
    self._eval_data = dataset.batch(args.batch_size, drop_remainder=True)
    train_step = make_step(mesh_impl, args, train=True)
    spec = tf.TensorSpec([args.batch_size, args.io_size])

    @tf.function
    def train(batches: Any, first_step: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
      """The losses of so many steps: one call, whatever their number."""
      losses = tf.TensorArray(tf.float32, steps)
      for i in tf.range(steps):
        batch = tf.ensure_shape(next(batches), spec.shape)
        is_bad = tf.equal(first_step + i, args.step_with_nan)
        losses = losses.write(i, train_step(tf.where(is_bad, float("nan"), batch)))
      return losses.stack()

    self._train = train
    self._evaluate = tf.function(make_step(mesh_impl, args, train=False), input_signature=[spec])
    # Tracing makes the variables, which restoring a checkpoint needs.
    n = tf.TensorSpec([], tf.int32)
    self._train.get_concrete_function(iter(self._train_data), n, n)

  def batches(self, first_step: int) -> Any:
    """The batches from a step on."""
    return iter(self._train_data.skip(first_step).prefetch(1))

  def train(self, batches: Any, first_step: int, steps: int) -> np.ndarray:
    """Runs training steps; returns their losses.

    Raises:
      mtf.NonFiniteError: one of them is not finite.
    """
    losses = self._train(batches, tf.constant(first_step), tf.constant(steps)).numpy()
    bad = np.flatnonzero(~np.isfinite(losses))
    if bad.size:
      raise mtf.NonFiniteError(
        f"the loss of step {first_step + bad[0]} is {losses[bad[0]]}: the data of this step or the "
        f"weights before it are not finite, or the learning rate {self._args.lr} is too high"
      )
    return losses

  def evaluate(self) -> float:
    """The mean loss of all rows (of whole batches)."""
    return float(np.mean([float(self._evaluate(batch)) for batch in self._eval_data]))


def main(argv: list[str] | None = None) -> None:
  """Trains and evaluates in turn."""
  args = parse_args(argv)
  mesh_impl = make_mesh_impl(args)
  check_layout(mesh_impl, args)
  print(f"Mesh {args.mesh_shape} ({args.implementation}), layout {args.layout}", flush=True)
  trainer = ToyTrainer(mesh_impl, args)
  step, saver = 0, None
  if args.model_dir:
    saver = checkpoint.Checkpointer(args.model_dir, mesh_impl.variable_store, max_to_keep=3)
    restored = saver.restore_or_none()
    if restored:
      step = restored.step
      print(f"Going on from {restored.path}", flush=True)
  else:
    print("No checkpoints are written: no --model_dir was given", flush=True)
  batches = trainer.batches(step)
  every = args.steps_per_checkpoint or args.train_steps
  with tqdm.tqdm(total=args.train_steps, initial=step, unit="step", disable=None) as bar:
    while step < args.train_steps:
      stop = min(args.train_steps, (step // every + 1) * every)
      while step < stop:
        started, n = time.perf_counter(), min(args.iterations, stop - step)
        losses = trainer.train(batches, step, n)
        step += n
        bar.update(n)
        speed = n / (time.perf_counter() - started)
        bar.write(f"step {step:>6}  loss {losses.mean():.6f}  {speed:.0f} steps/s", sys.stdout)
      if saver is not None:
        saver.save(step)
      if args.steps_per_checkpoint:
        bar.write(f"step {step:>6}  eval loss {trainer.evaluate():.6f}", sys.stdout)
  if saver is not None:
    saver.wait()
    print(f"Checkpoints are in {args.model_dir}")


if __name__ == "__main__":
  mesh_flags.run(main)
