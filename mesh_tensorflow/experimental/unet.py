"""A U-Net that finds the liver and its lesions in CT scans, split over a mesh by space.

Ronneberger, Fischer and Brox, 2015 (arXiv:1505.04597), in two or three dimensions. An axis of a
scan is two dimensions, blocks and positions in a block; blocks are split over the mesh, and
convolutions exchange the margins of neighbours. Hou et al., 2019 (arXiv:1909.03108).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags

from mesh_tensorflow import layers, ops
from mesh_tensorflow.errors import ConfigError, ShapeError
from mesh_tensorflow.experimental import unet_flags
from mesh_tensorflow.experimental.unet_data import dataset_creator, whole_scan
from mesh_tensorflow.experimental.unet_losses import loss_and_metrics
from mesh_tensorflow.meshes.layout import LayoutRules, convert_to_layout_rules
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.variables import VariableDType, VariableDTypeLike
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor

FLAGS = flags.FLAGS
unet_flags.define_flags()
_LOG = logging.getLogger("mesh_tensorflow")


def get_layout() -> LayoutRules:
  """The `LayoutRules` of the flag --layout."""
  return convert_to_layout_rules(FLAGS.layout)


def _check_dataset(dataset_str: str) -> bool:
  """Checks the name of a data set; returns whether it is "train".

  Raises:
    ConfigError: it is neither "train" nor "eval".
  """
  if dataset_str not in ("train", "eval"):
    raise ConfigError(f"dataset_str must be 'train' or 'eval', got {dataset_str!r}")
  return dataset_str == "train"


def get_input_mtf_shapes(dataset_str: str) -> list[Shape]:
  """Shapes of a batch of images and of one of labels.

  Args:
    dataset_str: "train" or "eval".

  Returns:
    [batch, image_nx_block, image_sx_block, image_ny_block, image_sy_block, image_c], and the same
    with label_c; scans have image_sz_block before the last.

  Raises:
    ConfigError: the blocks do not divide the resolution.
  """
  batch = FLAGS.batch_size_train if _check_dataset(dataset_str) else FLAGS.batch_size_eval
  nx, ny, resolution = FLAGS.image_nx_block, FLAGS.image_ny_block, FLAGS.ct_resolution
  if resolution % nx or resolution % ny:
    raise ConfigError(
      f"image_nx_block {nx} and image_ny_block {ny} must divide ct_resolution {resolution}"
    )
  dims = [
    Dimension("batch", batch),
    Dimension("image_nx_block", nx),
    Dimension("image_sx_block", resolution // nx),
    Dimension("image_ny_block", ny),
    Dimension("image_sy_block", resolution // ny),
  ]
  if not FLAGS.sampled_2d_slices:
    dims.append(Dimension("image_sz_block", resolution))
  return [
    Shape([*dims, Dimension(name, int(str(FLAGS[name].value)))]) for name in ("image_c", "label_c")
  ]


def get_dataset_creator(dataset_str: str) -> Callable[[], tf.data.Dataset]:
  """A function that makes an endless, unbatched data set of (image, label).

  Args:
    dataset_str: "train" (shuffled, with augmentation) or "eval".
  """
  shapes = get_input_mtf_shapes(dataset_str)
  sizes = [shape.to_integer_list[1:] for shape in shapes]
  return functools.partial(dataset_creator, _check_dataset(dataset_str), sizes)


def conv_with_spatial_partition(
  x: Tensor,
  sampled_2d_slices: bool,
  image_nx_dim: Dimension | None,
  image_ny_dim: Dimension | None,
  n_filters: int,
  keep_p: float,
  with_batch_norm: bool,
  is_training: bool,
  odim_name: str,
  variable_dtype: VariableDTypeLike,
  name: str,
) -> tuple[Tensor, list[Operation]]:
  """A convolution of 3 positions along each axis, batch norm, leaky ReLU and dropout.

  Args:
    x: [batch, nx, ny, sx, sy, channels], or with sz before the channels.
    sampled_2d_slices: whether x is of images, not scans.
    image_nx_dim: the blocks along the first axis; None for none.
    image_ny_dim: those along the second.
    n_filters: channels of the result.
    keep_p: probability to keep a number in dropout; 1 for no dropout.
    with_batch_norm: whether there is batch norm, over all but the channels.
    is_training: whether batch norm uses the statistics of x, and there is dropout.
    odim_name: name of the dimension of channels of the result.
    variable_dtype: dtypes of the filter.
    name: name of the scope.

  Returns:
    The result, and the operations that update the statistics of batch norm.
  """
  conv = layers.conv2d_with_blocks if sampled_2d_slices else layers.conv3d_with_blocks
  size = (3, 3) if sampled_2d_slices else (3, 3, 3)
  strides = tuple(1 for _ in size)
  x = conv(
    x, Dimension(odim_name, n_filters), size, strides, "SAME", image_nx_dim, image_ny_dim,
    variable_dtype=variable_dtype, name=name,
  )  # fmt: skip
  updates: list[Operation] = []
  if with_batch_norm:
    x, updates = layers.batch_norm(
      x, is_training, momentum=0.90, epsilon=1e-6, dims_idx_start=0, dims_idx_end=-1, name=name
    )
  return _dropout(ops.leaky_relu(x, 0.1), keep_p, is_training), updates


def deconv_with_spatial_partition(
  x: Tensor,
  sampled_2d_slices: bool,
  image_nx_dim: Dimension | None,
  image_ny_dim: Dimension | None,
  n_filters: int,
  keep_p: float,
  is_training: bool,
  odim_name: str,
  variable_dtype: VariableDTypeLike,
  name: str,
) -> Tensor:
  """A transposed convolution that doubles the positions along each axis, and dropout.

  Arguments as `conv_with_spatial_partition`.
  """
  deconv = (
    layers.conv2d_transpose_with_blocks
    if sampled_2d_slices
    else layers.conv3d_transpose_with_blocks
  )
  size = (2, 2) if sampled_2d_slices else (2, 2, 2)
  x = deconv(
    x, Dimension(odim_name, n_filters), size, size, "SAME", image_nx_dim, image_ny_dim,
    variable_dtype=variable_dtype, name=name,
  )  # fmt: skip
  return _dropout(x, keep_p, is_training)


def _dropout(x: Tensor, keep_p: float, is_training: bool) -> Tensor:
  if not is_training or keep_p == 1.0:
    return x
  return ops.dropout(x, is_training, keep_prob=keep_p)


def unet_with_spatial_partition(
  mesh: Mesh,
  mesh_impl: MeshImpl,
  dataset_str: str,
  images: Sequence[tf.Tensor],
  labels: Sequence[tf.Tensor],
) -> tuple[list[Tensor], Tensor, dict[str, Tensor], list[Operation]]:
  """The U-Net, its loss and its metrics, as operations of a mesh.

  The hyperparameters are flags.

  Args:
    mesh: a `Mesh`.
    mesh_impl: the `MeshImpl` that it will be lowered on.
    dataset_str: "train" or "eval".
    images: for each processor of the program (all, or the one of a SIMD program) its slice of
      the images, of the shape that `get_input_mtf_shapes` says.
    labels: likewise, of the labels, one-hot.

  Returns:
    (predictions, loss, metrics by name, updates of batch norm). Predictions: probabilities of liver
    and of lesions, and with --output_ground_truth the lesions, each [batch, nx, ny, sx, sy] (scans
    have sz too), averaged over --pred_downsample positions along each axis; then for each example
    the number of positions at which prediction and truth agree on lesions, and the sum of both.

  Raises:
    ConfigError: a block does not stay whole through all levels.
  """
  shapes = get_input_mtf_shapes(dataset_str)
  imported = [
    ops.import_laid_out_tensor(mesh, mesh_impl.LaidOutTensor(list(slices)), shape)
    for slices, shape in zip((images, labels), shapes)
  ]
  return unet_of_tensors(dataset_str, *imported)


def unet_of_tensors(
  dataset_str: str, images: Tensor, labels: Tensor
) -> tuple[list[Tensor], Tensor, dict[str, Tensor], list[Operation]]:
  """As `unet_with_spatial_partition`, of tensors of the shapes of `get_input_mtf_shapes`."""
  is_training = _check_dataset(dataset_str)
  dtype = tf.as_dtype(FLAGS.mtf_dtype)
  variable_dtype = VariableDType(dtype, dtype, dtype)
  x, t = (_blocks_first(ops.cast(tensor, dtype)) for tensor in (images, labels))
  for d in x.shape.dims[3:-1]:
    if d.size % 2 ** (FLAGS.network_depth - 1):
      raise ConfigError(
        f"{d.name}={d.size} must be divisible by 2 ** (network_depth - 1) = "
        f"{2 ** (FLAGS.network_depth - 1)}"
      )
  y, updates = _network(x, is_training, variable_dtype)
  predictions, loss, metrics = loss_and_metrics(y, t, FLAGS)
  return predictions, loss, metrics, updates if is_training else []


def _blocks_first(x: Tensor) -> Tensor:
  """Transposes to [batch, blocks..., positions..., channels]."""
  batch, nx, sx, ny, sy, *rest = x.shape.dims
  return ops.transpose(x, Shape([batch, nx, ny, sx, sy, *rest]))


def _network(
  x: Tensor, is_training: bool, variable_dtype: VariableDTypeLike
) -> tuple[Tensor, list[Operation]]:
  """Logits of the classes of each position."""
  is_2d = FLAGS.sampled_2d_slices
  nx, ny = x.shape.dims[1:3]
  updates: list[Operation] = []

  def convs(x: Tensor, depth: int, side: str) -> Tensor:
    for i in range(FLAGS.n_conv_per_block):
      is_first, name = depth == i == 0 and side == "down", f"conv_{depth}_{i}"
      x, new = conv_with_spatial_partition(
        x, is_2d, nx, ny, FLAGS.n_base_filters * 2**depth,
        1.0 if is_first else FLAGS.dropout_keep_p, FLAGS.with_batch_norm, is_training,
        # With one convolution of a level its input has the name of its output already.
        name if x.shape[-1].name != name else f"{name}_", variable_dtype,
        f"conv_{side}_{depth}_{i}",
      )  # fmt: skip
      updates.extend(new)
    return x

  pool = layers.max_pool2d if is_2d else layers.max_pool3d
  size = (2, 2) if is_2d else (2, 2, 2)
  remembered = []
  for depth in range(FLAGS.network_depth):
    x = convs(x, depth, "down")
    remembered.append(x)
    if depth < FLAGS.network_depth - 1:
      x = pool(x, ksize=size)
  for depth in reversed(range(FLAGS.network_depth - 1)):
    same = remembered[depth]
    x = deconv_with_spatial_partition(
      x, is_2d, nx, ny, FLAGS.n_base_filters * 2**depth, FLAGS.dropout_keep_p, is_training,
      same.shape[-1].name, variable_dtype, f"deconv_{depth}_0",
    )  # fmt: skip
    x = ops.concat([x, same], concat_dim_name=same.shape[-1].name)
    x = convs(x, depth, "up")
  head = layers.conv2d_with_blocks if is_2d else layers.conv3d_with_blocks
  ones = tuple(1 for _ in size)
  y = head(
    x, Dimension("label_c", FLAGS.label_c), ones, ones, "SAME", nx, ny,
    variable_dtype=variable_dtype, name=f"final_conv_{FLAGS.label_c}",
  )  # fmt: skip
  return y, updates


class PostProcessor:
  """Collects the predictions of an evaluation, writes them to files, and computes their score."""

  def __init__(self) -> None:
    self._intersections: list[np.ndarray] = []
    self._areas: list[np.ndarray] = []

  def record(self, results: Sequence[Any], pred_output_dir: str) -> None:
    """Takes the results of a step.

    Args:
      results: (liver, lesion, area of agreement, sum of areas, loss, global step), with the lesions
        there are after the second, if --output_ground_truth: arrays, the first with blocks as
        `unet_with_spatial_partition` gives them.
      pred_output_dir: where files go: `pred_liver_{step}_{i}.npy`, `pred_lesion_{step}_{i}.npy`
        and `label_{step}_{i}.npy`, one of each scan; of 2-D images one of each step, in blocks.
    """
    *predictions, intersection, area, _, step = [np.asarray(r) for r in results]
    tf.io.gfile.makedirs(pred_output_dir)
    for name, values in zip(("pred_liver", "pred_lesion", "label"), predictions):
      scans = [values] if FLAGS.sampled_2d_slices else [whole_scan(v) for v in values]
      for i, scan in enumerate(scans):
        path = os.path.join(pred_output_dir, f"{name}_{int(step)}_{i}.npy")
        with tf.io.gfile.GFile(path, "wb") as f:
          np.save(f, scan)
    self._intersections.append(intersection)
    self._areas.append(area)

  def finish(self) -> None:
    """Logs the Dice coefficient of the lesions: the mean of those of scans, and that of all."""
    intersection, area = (np.concatenate(a) for a in (self._intersections, self._areas))
    if FLAGS.sampled_2d_slices:
      slices = FLAGS.ct_resolution - FLAGS.image_c + 1
      if area.size % slices:
        raise ShapeError(
          f"{area.size} images were evaluated, which is no whole number of scans of {slices} images"
        )
      intersection, area = (a.reshape([-1, slices]).sum(1) for a in (intersection, area))
    per_case = np.mean(2.0 * intersection / (area + 0.001))
    all_cases = 2.0 * intersection.sum() / (area.sum() + 0.001)
    _LOG.info("dice_per_case: %.6f, dice_global: %.6f", per_case, all_cases)
