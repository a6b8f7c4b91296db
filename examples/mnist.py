"""Recognizes handwritten digits with convolutions whose images are split over a 2x2 mesh.

Each image is cut into 4 x 4 blocks, and the layout gives each of four (virtual CPU) devices a
quarter of them; before a convolution the devices exchange the margins of their blocks.

  python -m mesh_tensorflow.examples.mnist --train_epochs 2
  python -m mesh_tensorflow.examples.mnist --data_dir DIR      a folder with the four MNIST files
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf
import tqdm

from mesh_tensorflow import checkpoint
from mesh_tensorflow.examples import mesh_flags, mnist_dataset
from mesh_tensorflow.meshes import layout_names

CLASSES = mtf.Dimension("classes", 10)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
  """The command line; the names are those of the TF1 program."""
  parser = argparse.ArgumentParser(
    description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
  )
  data = parser.add_argument_group("the data")
  data.add_argument(
    "--data_dir",
    default="/tmp/mnist_data",
    help="folder of the MNIST files (train-images-idx3-ubyte and so on, also with .gz); without "
    "them digits are drawn",
  )
  data.add_argument("--made_examples", type=int, default=10000, help="digits to draw for training")
  training = parser.add_argument_group("training")
  training.add_argument(
    "--model_dir",
    default="",
    help="folder of checkpoints, which a new run goes on from (none)",
  )
  training.add_argument("--batch_size", type=int, default=200, help="images in a batch")
  training.add_argument("--hidden_size", type=int, default=512, help="size of both dense layers")
  training.add_argument("--train_epochs", type=int, default=40, help="times to see all images")
  training.add_argument(
    "--epochs_between_evals", type=int, default=1, help="epochs from one evaluation to the next"
  )
  training.add_argument("--eval_steps", type=int, default=0, help="batches to evaluate on (0: all)")
  mesh = parser.add_argument_group("the mesh")
  mesh.add_argument("--mesh_shape", default="b1:2;b2:2", help="names and sizes of the mesh axes")
  mesh.add_argument(
    "--layout",
    default="row_blocks:b1;col_blocks:b2",
    help="which dimension (batch, row_blocks, col_blocks, hidden1, hidden2) is split over which "
    "mesh axis",
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


def mnist_model(
  image: tf.Tensor, labels: tf.Tensor, mesh: mtf.Mesh, hidden_size: int
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
  """Two convolutions of the image in blocks, then three dense layers.

  Args:
    image: [batch, 784].
    labels: [batch]; -1 for a row that is none.
    mesh: the mesh.
    hidden_size: size of the hidden layers.

  Returns:
    Logits [batch, classes], the loss [batch], and whether the digit is right [batch].
  """
  shape = image_shape(image.shape[0])
  x = mtf.import_tf_tensor(mesh, tf.reshape(image, shape.to_integer_list), shape)
  return network(x, mtf.import_tf_tensor(mesh, labels, shape[:1]), hidden_size)


def image_shape(batch_size: int) -> mtf.Shape:
  """The shape of images in blocks: 4 x 4 of them, 7 x 7 pixels each."""
  sizes = [("row_blocks", 4), ("rows_size", 7), ("col_blocks", 4), ("cols_size", 7)]
  return mtf.Shape([("batch", batch_size), *sizes, ("one_channel", 1)])


def network(
  x: mtf.Tensor, labels: mtf.Tensor, hidden_size: int
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
  """What `mnist_model` computes of tensors of a mesh.

  Args:
    x: images, of `image_shape`.
    labels: [batch].
    hidden_size: size of the hidden layers.
  """
  batch_dim, row_blocks, rows, col_blocks, cols, channel = x.shape
  x = mtf.transpose(x, [batch_dim, row_blocks, col_blocks, rows, cols, channel])
  for i in range(2):
    x = mtf.layers.conv2d_with_blocks(
      x,
      mtf.Dimension(f"filters{i + 1}", 16),
      filter_size=(9, 9),
      strides=(1, 1),
      padding="SAME",
      h_blocks_dim=row_blocks,
      w_blocks_dim=col_blocks,
      filter_initializer=mtf.initializers.GlorotUniform(),
      name=f"conv{i}",
    )
    x = mtf.relu(x)
  x = mtf.reduce_mean(x, reduced_dim=x.shape[-1])
  hidden1, hidden2 = (mtf.Dimension(f"hidden{i}", hidden_size) for i in (1, 2))
  x = mtf.layers.dense(
    x, hidden1, reduced_dims=x.shape.dims[-4:], activation=mtf.relu, name="hidden1"
  )
  x = mtf.layers.dense(x, hidden2, reduced_dims=[hidden1], activation=mtf.relu, name="hidden2")
  logits = mtf.layers.dense(x, CLASSES, reduced_dims=[hidden2], name="logits")
  targets = mtf.one_hot(labels, CLASSES, dtype=logits.dtype)
  loss = mtf.layers.softmax_cross_entropy_with_logits(logits, targets, CLASSES)
  return logits, loss, mtf.equal(mtf.argmax(logits, CLASSES), labels)


def make_step(mesh_impl: mtf.MeshImpl, args: argparse.Namespace, mode: str) -> Callable[..., Any]:
  """One step as a tf.function of (images, labels).

  Args:
    mesh_impl: the mesh.
    args: the command line.
    mode: "train": returns the mean loss, and updates the weights; "eval": the sum of the losses
      and the number of right answers; "predict": the digits [batch].
  """

  def program(images: tf.Tensor, labels: tf.Tensor) -> Any:
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mnist")
    logits, loss, is_right = mnist_model(images, labels, mesh, args.hidden_size)
    updates = []
    if mode == "train":
      outputs = [mtf.reduce_mean(loss)]
      variables = graph.trainable_variables
      grads = mtf.gradients(outputs, [v.outputs[0] for v in variables])
      updates = mtf.optimize.AdafactorOptimizer().apply_grads(grads, variables)
      step = mtf.optimize.get_global_step(mesh)
      updates.append(mtf.assign_add(step, mtf.ones_like(step)))
    elif mode == "eval":
      outputs = [mtf.reduce_sum(loss), mtf.reduce_sum(mtf.to_int32(is_right))]
    else:
      outputs = [mtf.argmax(logits, CLASSES)]
    layout_names.check_names(mesh_impl, graph)
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
      return [tf.identity(lowering.export_to_tf_tensor(x)) for x in outputs]

  n = args.batch_size
  return tf.function(
    lambda images, labels: mesh_impl.run(program, [images, labels]),
    autograph=False,
    input_signature=[tf.TensorSpec([n, 784]), tf.TensorSpec([n], tf.int32)],
  )


def in_whole_batches(images: np.ndarray, labels: np.ndarray, batch_size: int) -> tf.data.Dataset:
  """The batches of an evaluation: the last one is filled up with rows of label -1."""
  extra = -len(images) % batch_size
  images = np.concatenate([images, np.zeros([extra, 784], np.float32)])
  labels = np.concatenate([labels, np.full([extra], -1, np.int32)])
  return mnist_dataset.dataset(images, labels).batch(batch_size)


def evaluate(
  eval_step: Callable[..., Any], images: np.ndarray, labels: np.ndarray, args: argparse.Namespace
) -> tuple[float, float]:
  """Mean loss and share of right answers."""
  if args.eval_steps:
    images, labels = (a[: args.eval_steps * args.batch_size] for a in (images, labels))
  results = [eval_step(*batch) for batch in in_whole_batches(images, labels, args.batch_size)]
  loss, right = (sum(float(r[i]) for r in results) for i in (0, 1))
  return loss / len(images), right / len(images)


def main(argv: list[str] | None = None) -> None:
  """Trains and evaluates in turn, then predicts."""
  args = parse_args(argv)
  train_images, train_labels, source = mnist_dataset.load(
    args.data_dir, "train", args.made_examples
  )
  test_images, test_labels, _ = mnist_dataset.load(
    args.data_dir, "test", max(args.batch_size, args.made_examples // 5)
  )
  steps_per_epoch = len(train_images) // args.batch_size
  if not steps_per_epoch:
    raise mtf.DataError(f"{len(train_images)} images are not one batch of {args.batch_size}")
  mesh_impl = make_mesh_impl(args)
  print(
    f"Data: {source}, {len(test_images)} more to test.\n"
    f"Mesh {args.mesh_shape} ({args.implementation}), layout {args.layout}",
    flush=True,
  )
  steps = {mode: make_step(mesh_impl, args, mode) for mode in ("train", "eval", "predict")}
  steps["train"].get_concrete_function()  # Makes the variables, which restoring needs.
  saver, step = None, 0
  if args.model_dir:
    saver = checkpoint.Checkpointer(args.model_dir, mesh_impl.variable_store, max_to_keep=3)
    restored = saver.restore_or_none()
    if restored:
      step = restored.step
      print(f"Going on from {restored.path}", flush=True)
  else:
    print("No checkpoints are written: no --model_dir was given", flush=True)
  data = mnist_dataset.dataset(train_images, train_labels)
  accuracy = None
  for epoch in range(step // steps_per_epoch, args.train_epochs):
    shuffled = data.shuffle(len(train_images), seed=epoch)
    batches = shuffled.batch(args.batch_size, drop_remainder=True).prefetch(2)
    losses = []
    for images, labels in tqdm.tqdm(
      batches, f"epoch {epoch + 1}/{args.train_epochs}", steps_per_epoch, disable=None, leave=False
    ):
      losses.append(float(steps["train"](images, labels)[0]))
    if not np.isfinite(losses).all():
      first = int(np.flatnonzero(~np.isfinite(losses))[0])
      raise mtf.NonFiniteError(f"the loss of step {first} of epoch {epoch + 1} is {losses[first]}")
    line = f"epoch {epoch + 1:>3}/{args.train_epochs}  loss {np.mean(losses):.4f}"
    if (epoch + 1) % args.epochs_between_evals == 0 or epoch + 1 == args.train_epochs:
      loss, accuracy = evaluate(steps["eval"], test_images, test_labels, args)
      line += f"  test loss {loss:.4f}  accuracy {accuracy:.2%}"
    print(line, flush=True)
    if saver is not None:
      saver.save((epoch + 1) * steps_per_epoch)
  if saver is not None:
    saver.wait()
  if accuracy is None:  # The checkpoint was that of the last epoch.
    _, accuracy = evaluate(steps["eval"], test_images, test_labels, args)
  batch = next(iter(in_whole_batches(test_images, test_labels, args.batch_size)))
  digits = steps["predict"](*batch)[0].numpy()
  n = min(20, len(test_labels))
  print(f"accuracy on {len(test_images)} test images: {accuracy:.2%} (chance: 10%)")
  print("first test images:", *test_labels[:n])
  print("read as:          ", *digits[:n])


if __name__ == "__main__":
  mesh_flags.run(main)
