"""Data of `unet`: CT scans in TFRecord files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import flags

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.experimental import data_aug_lib

FLAGS = flags.FLAGS


def dataset_creator(is_training: bool, sizes: Sequence[Sequence[int]]) -> tf.data.Dataset:
  """An endless data set of (image, one-hot label); files and hyperparameters are flags.

  Args:
    is_training: whether files are shuffled, and scans are augmented.
    sizes: sizes of an image and of a label.

  Returns:
    A `tf.data.Dataset` without a dimension of examples.

  Raises:
    ConfigError: the flag of the files is not given, or no file has such a name.
  """
  flag = "train_file_pattern" if is_training else "eval_file_pattern"
  pattern = str(FLAGS[flag].value).format(FLAGS.ct_resolution)
  if not pattern or not tf.io.gfile.glob(pattern):
    raise ConfigError(f"--{flag} {pattern!r} is the name of no file")
  data = tf.data.Dataset.list_files(pattern, shuffle=is_training).repeat()
  read = lambda path: tf.data.TFRecordDataset(path, compression_type="GZIP")  # noqa: E731
  if is_training:
    data = data.interleave(
      read,
      FLAGS.n_dataset_read_interleave,
      num_parallel_calls=tf.data.AUTOTUNE,
      deterministic=False,
    )
    data = data.shuffle(FLAGS.n_dataset_processes)
    data = data.map(_train_example, FLAGS.n_dataset_processes, deterministic=False)
  else:
    data = data.interleave(read, 1).map(_parsed)
    data = data.map(lambda x, t: (tf.clip_by_value(x / 1024.0 + 0.5, 0.0, 1.0), t))
    if FLAGS.sampled_2d_slices:
      data = data.map(_all_slices).unbatch()
  return data.map(lambda x, t: _example(x, t, sizes))


def _parsed(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Image and label of a scan, float32."""
  features = {n: tf.io.FixedLenFeature([], tf.string) for n in ("image/ct_image", "image/label")}
  parsed = tf.io.parse_single_example(record, features)
  shape = [FLAGS.ct_resolution] * 3
  image, label = (tf.reshape(tf.io.decode_raw(parsed[n], tf.float32), shape) for n in features)
  return image, label


def _train_example(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  image, label = _parsed(record)
  resolution, c = FLAGS.ct_resolution, FLAGS.image_c
  if FLAGS.sampled_2d_slices:
    begin = tf.random.uniform([], 0, resolution - c + 1, tf.int32)
    image, label = (tf.slice(t, [0, 0, begin], [-1, -1, c]) for t in (image, label))
  for axis in range(3):
    image, label = data_aug_lib.maybe_flip(image, label, axis)
  image, label = data_aug_lib.maybe_rot180(image, label, 2)
  image = data_aug_lib.intensity_shift(
    image, label, FLAGS.per_class_intensity_scale, FLAGS.per_class_intensity_shift
  )
  image = data_aug_lib.image_corruption(
    image, label, resolution, FLAGS.image_corrupt_ratio_mean, FLAGS.image_corrupt_ratio_stddev
  )
  image = data_aug_lib.maybe_add_noise(
    image, image.shape, 1, 4, FLAGS.image_noise_probability, FLAGS.image_noise_ratio
  )
  image, label = data_aug_lib.projective_transform(
    image, label, resolution, FLAGS.image_translate_ratio, FLAGS.image_transform_ratio,
    FLAGS.sampled_2d_slices,
  )  # fmt: skip
  if FLAGS.sampled_2d_slices:
    label = label[..., c // 2]
  return image, label


def _all_slices(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Every run of neighbouring slices, with the label of the middle one."""
  c = FLAGS.image_c
  runs = range(FLAGS.ct_resolution - c + 1)
  images = tf.stack([image[..., i : i + c] for i in runs])
  return images, tf.stack([label[..., i + c // 2] for i in runs])


def _example(
  image: tf.Tensor, label: tf.Tensor, sizes: Sequence[Sequence[int]]
) -> tuple[tf.Tensor, tf.Tensor]:
  dtype = tf.as_dtype(FLAGS.mtf_dtype)
  label = tf.one_hot(tf.cast(label, tf.int32), FLAGS.label_c)
  return tf.cast(tf.reshape(image, sizes[0]), dtype), tf.cast(tf.reshape(label, sizes[1]), dtype)


def whole_scan(blocks: np.ndarray) -> np.ndarray:
  """A scan as one cube.

  Args:
    blocks: [nx, ny, sx, sy, sz].
  """
  nx, ny, sx, sy, sz = blocks.shape
  scan: np.ndarray = blocks.transpose([0, 2, 1, 3, 4]).reshape([nx * sx, ny * sy, sz])
  return scan
