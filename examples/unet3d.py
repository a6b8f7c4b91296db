"""Segments blobs in volumes by a 3-D U-Net whose space is split over a mesh.

Volumes of noise with a few brighter blobs are drawn; the network learns which voxels are of a blob.
Depth, height and width are dimensions as any other: layout rules split them, and convolutions and
pooling exchange what they reach. The loss does not depend on the split.

  python -m mesh_tensorflow.examples.unet3d
  python -m mesh_tensorflow.examples.unet3d --size 64 --mesh_shape "d:2,h:2,w:2" --filters 8 \
      --memory_mb 400 --picture segmented.png
"""

from __future__ import annotations

import argparse
import os

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf

from mesh_tensorflow.examples import mesh_flags

# The dimensions of space, and the axes of the mesh that split them.
SPACE = ("depth", "height", "width")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
  """The command line."""
  parser = argparse.ArgumentParser(
    description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
  )
  model = parser.add_argument_group("the model")
  model.add_argument("--size", type=int, default=32, help="voxels along each axis")
  model.add_argument("--filters", type=int, default=4, help="channels of the first level")
  model.add_argument("--levels", type=int, default=3, help="levels of resolution")
  model.add_argument("--batch_size", type=int, default=2, help="volumes in a batch")
  training = parser.add_argument_group("training")
  training.add_argument("--epochs", type=int, default=4, help="epochs")
  training.add_argument("--steps", type=int, default=20, help="steps of an epoch")
  training.add_argument("--lr", type=float, default=0.01, help="learning rate of Adam")
  training.add_argument("--picture", default="", help="a file for a picture of a slice")
  mesh_flags.add_mesh_flags(parser, "d:2,h:2")  # Axes d, h, w split depth, height, width.
  parser.add_argument(
    "--memory_mb", type=float, default=0.0, help="memory of a device; 0: it is not looked at"
  )
  args = parser.parse_args(argv)
  for name in ("size", "filters", "levels", "batch_size", "epochs", "steps"):
    if getattr(args, name) < 1:
      parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
  halves = 2 ** (args.levels - 1)
  if args.size % halves:
    parser.error(
      f"--size {args.size} must be divisible by {halves}: --levels {args.levels} halve it "
      f"{args.levels - 1} times"
    )
  folder = os.path.dirname(args.picture) or "."
  if not os.path.isdir(folder):
    parser.error(f"--picture {args.picture}: there is no folder {folder}")
  return args


def volumes(seed: int, number: int, size: int) -> tuple[np.ndarray, np.ndarray]:
  """Drawn volumes.

  Args:
    seed: of the random numbers.
    number: of volumes.
    size: voxels along an axis.

  Returns:
    Intensities [number, size, size, size, 1], noise of standard deviation 1 with blobs that are
    1.5 brighter; and 1 where a blob is, else 0, of the same shape.
  """
  rng = np.random.default_rng(seed)
  place = np.arange(size, dtype=np.float32)
  labels = np.zeros([number, size, size, size], np.float32)
  for label in labels:
    for _ in range(rng.integers(3, 6)):
      center, radii = rng.uniform(0.2 * size, 0.8 * size, 3), rng.uniform(0.08, 0.2, 3) * size
      z, y, x = (((place - c) / r) ** 2 for c, r in zip(center, radii))
      label[z[:, None, None] + y[:, None] + x < 1.0] = 1.0
  images = rng.normal(size=labels.shape).astype(np.float32) + 1.5 * labels
  return images[..., None], labels[..., None]


def unet(x: mtf.Tensor, filters: int, levels: int) -> mtf.Tensor:
  """A U-Net; the loss of what it returns can be computed voxel by voxel.

  Args:
    x: [batch, depth, height, width, channels].
    filters: channels of the first level; each deeper one has twice them.
    levels: of resolution.

  Returns:
    Logits [batch, depth, height, width, classes=1].
  """

  def convs(x: mtf.Tensor, n: int, name: str) -> mtf.Tensor:
    for i in range(2):
      x = mtf.layers.conv3d(x, mtf.Dimension(f"{name}_{i}", n), name=f"{name}_{i}")
      x = mtf.relu(mtf.layers.instance_norm(x, name=f"{name}_{i}_norm"))
    return x

  remembered = []
  for level in range(levels):
    x = convs(x, filters * 2**level, f"down_{level}")
    if level < levels - 1:
      remembered.append(x)
      x = mtf.layers.max_pool3d(x)
  for level, same in reversed(list(enumerate(remembered))):
    up = mtf.Dimension(f"up_{level}", filters * 2**level)
    x = mtf.layers.conv3d_transpose(x, up, name=f"up_{level}")
    same = mtf.rename_dimension(same, same.shape[-1].name, up.name)
    x = convs(mtf.concat([x, same], up.name), filters * 2**level, f"joined_{level}")
  return mtf.layers.conv3d(x, mtf.Dimension("classes", 1), (1, 1, 1), name="head")


def losses(logits: mtf.Tensor, labels: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Cross-entropy plus Dice loss; and the Dice coefficient of what is called a blob."""
  voxels = mtf.reduce_mean(
    mtf.relu(logits) - logits * labels + mtf.log(1.0 + mtf.exp(mtf.negative(mtf.abs(logits))))
  )

  def dice(guess: mtf.Tensor) -> mtf.Tensor:
    both = mtf.reduce_sum(guess * labels)
    return (both * 2.0 + 1.0) / (mtf.reduce_sum(guess) + mtf.reduce_sum(labels) + 1.0)

  found = mtf.cast(mtf.greater(logits, 0.0), tf.float32)
  return voxels + 1.0 - dice(mtf.sigmoid(logits)), dice(found)


class Segmentation:
  """Training and prediction on one mesh.

  Args:
    args: the command line.
    mesh_shape: the mesh, if not that of the command line.

  Attributes:
    mesh_impl: the mesh.
    train_step: an `mtf.function` of images and labels that returns loss and Dice coefficient.
  """

  def __init__(self, args: argparse.Namespace, mesh_shape: str | None = None):
    self._args = args
    shape = mtf.convert_to_shape(args.mesh_shape if mesh_shape is None else mesh_shape)
    unknown = [d.name for d in shape if d.name not in ("d", "h", "w")]
    if unknown:
      raise mtf.MeshShapeError(f"the mesh has axes d, h and w, which split space, not {unknown}")
    layout = ",".join(f"{d}:{d[0]}" for d in SPACE if d[0] in shape.dimension_names)
    text = ",".join(f"{d.name}:{d.size}" for d in shape)
    self.mesh_impl = mesh_flags.make_mesh_impl(text, layout, args.implementation)
    dims = [("batch", args.batch_size), *((d, args.size) for d in SPACE)]
    specs = [mtf.TensorSpec([*dims, (c, 1)], tf.float32) for c in ("channels", "classes")]
    self.train_step = mtf.function(self.mesh_impl, specs)(self._update)
    self._predict = mtf.function(self.mesh_impl, specs[:1])(self._logits)

  def _logits(self, images: mtf.Tensor) -> mtf.Tensor:
    return unet(images, self._args.filters, self._args.levels)

  def _update(self, images: mtf.Tensor, labels: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
    loss, dice = losses(self._logits(images), labels)
    graph = loss.graph
    gradients = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
    optimizer = mtf.optimize.AdamWeightDecayOptimizer(self._args.lr)
    optimizer.apply_grads(gradients, graph.trainable_variables)
    return loss, dice

  def memory(self) -> float:
    """MB of a device that a step of training needs, by `mtf.describe`: nothing is computed."""
    return float(self.train_step.plan().memory.total) / 2**20

  def check_memory(self, limit_mb: float) -> None:
    """Raises `mtf.OutOfMemoryError` if a step needs more."""
    needed = self.memory()
    if needed > limit_mb:
      raise mtf.OutOfMemoryError(
        f"a step needs {needed:.0f} MB on each device of mesh {self.mesh_impl.shape}, and "
        f"--memory_mb is {limit_mb:.0f}: split space over more devices (--mesh_shape d:2,h:2,w:2), "
        "or take a smaller --size, --filters or --batch_size"
      )

  def train(self, seed: int) -> tuple[float, float]:
    """Runs a step on volumes of a seed; returns (loss, Dice coefficient)."""
    loss, dice = self.train_step(*volumes(seed, self._args.batch_size, self._args.size))
    return float(loss), float(dice)

  def predict(self, images: np.ndarray) -> np.ndarray:
    """Where blobs are: a mask of the shape of a batch of images."""
    mask: np.ndarray = self._predict(images).numpy() > 0
    return mask


def save_picture(path: str, image: np.ndarray, truth: np.ndarray, found: np.ndarray) -> None:
  """Draws the slice in which most voxels are of blobs: as it is, and with both outlines.

  Args:
    path: the file.
    image: intensities [size, size, size].
    truth: 1 where a blob is.
    found: where one was found.
  """
  import matplotlib.figure

  figure = matplotlib.figure.Figure(figsize=(8, 4.3))
  plane = int(truth.sum((1, 2)).argmax())
  for i, title in enumerate(("a slice", "blobs (green) and what was found (red)")):
    axes = figure.add_subplot(1, 2, i + 1)
    axes.imshow(image[plane], cmap="gray")
    if i:
      axes.contour(truth[plane], [0.5], colors="lime")
      axes.contour(found[plane].astype(float), [0.5], colors="red", linestyles="dashed")
    axes.set_title(title)
    axes.set_axis_off()
  figure.tight_layout()
  figure.savefig(path, dpi=80)


def main(argv: list[str] | None = None) -> list[float]:
  """Trains, and says after each epoch how good it is on volumes that it has not seen.

  Returns:
    The Dice coefficient on these after each epoch.
  """
  args = parse_args(argv)
  segmentation = Segmentation(args)
  if args.memory_mb:
    segmentation.check_memory(args.memory_mb)
  images, labels = volumes(0, args.batch_size, args.size)
  coefficients = []
  for epoch in range(args.epochs):
    seeds = range(1 + epoch * args.steps, 1 + (epoch + 1) * args.steps)
    steps = [segmentation.train(seed) for seed in seeds]
    found = segmentation.predict(images)
    coefficients.append(2.0 * float((found * labels).sum() / (found.sum() + labels.sum())))
    loss = np.mean([loss for loss, _ in steps])
    print(f"epoch {epoch + 1}: loss {loss:.4f}, Dice {coefficients[-1]:.3f}", flush=True)
  if args.picture:
    save_picture(args.picture, images[0, ..., 0], labels[0, ..., 0], found[0, ..., 0])
    print(f"A picture is in {args.picture}")
  return coefficients


if __name__ == "__main__":
  mesh_flags.run(main)
