"""Writes augmented scans to TFRecord files, which `unet` reads for training.

python -m mesh_tensorflow.experimental.offline_data_aug --input_file_pattern 'ct/*.tfrecords' \
      --output_folder augmented --ct_resolution 128 --num_data_aug 1000
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import app, flags

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.experimental import data_aug_lib
from mesh_tensorflow.experimental import flag_definitions as define

FLAGS = flags.FLAGS
_LOG = logging.getLogger("mesh_tensorflow")

define.string("input_file_pattern", "", "TFRecord files of scans.")
define.string("output_folder", "", "Where augmented scans go.")
define.string("output_file_prefix", "augmented", "What names of files begin with.")
define.integer("ct_resolution", 128, "Positions of a scan along each axis.")
define.integer("num_data_aug", 1000, "How many scans are written.")
define.integer("process_no", None, "Number of this process among several; part of names of files.")
define.number("gen_fake_probability", 0.5, "Probability that other lesions are painted.")
define.number("min_fake_lesion_ratio", 0.05, "Smallest part of a scan from which they are cut out.")


def _scans() -> tf.data.Dataset:
  """An endless data set of (image, label): intensities 0..1, classes."""
  if not FLAGS.input_file_pattern or not tf.io.gfile.glob(FLAGS.input_file_pattern):
    raise ConfigError(f"--input_file_pattern {FLAGS.input_file_pattern!r} is the name of no file")
  shape = [FLAGS.ct_resolution] * 3

  def parsed(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    features = {n: tf.io.FixedLenFeature([], tf.string) for n in ("image/ct_image", "image/label")}
    example = tf.io.parse_single_example(record, features)
    image, label = (tf.reshape(tf.io.decode_raw(example[n], tf.float32), shape) for n in features)
    return tf.clip_by_value(image / 1024.0 + 0.5, 0.0, 1.0), label

  files = tf.data.Dataset.list_files(FLAGS.input_file_pattern).repeat()
  data = files.interleave(
    lambda path: tf.data.TFRecordDataset(path, compression_type="GZIP"), cycle_length=1
  )
  return data.map(parsed)


def apply_data_aug() -> None:
  """Writes the scans that the flags ask for.

  Raises:
    ConfigError: no file or no folder is given.
  """
  if not FLAGS.output_folder:
    raise ConfigError("--output_folder must be given")
  tf.io.gfile.makedirs(FLAGS.output_folder)
  data = _scans().map(
    lambda x, t: data_aug_lib.maybe_gen_fake_data_based_on_real_data(
      x, t, FLAGS.ct_resolution, FLAGS.min_fake_lesion_ratio, FLAGS.gen_fake_probability
    ),
    num_parallel_calls=tf.data.AUTOTUNE,
  )
  for idx, (image, label) in enumerate(data.take(FLAGS.num_data_aug)):
    path = save_to_tfrecord(
      image.numpy(), label.numpy(), FLAGS.process_no, idx, FLAGS.output_folder,
      FLAGS.output_file_prefix,
    )  # fmt: skip
    _LOG.info("%d of %d: %s", idx + 1, FLAGS.num_data_aug, path)


def save_to_tfrecord(
  image: np.ndarray,
  label: np.ndarray,
  process_no: int | None,
  idx: int,
  output_path: str,
  output_file_prefix: str,
) -> str:
  """Writes a scan to a file of its own.

  Args:
    image: intensities.
    label: classes, of the same shape.
    process_no: number of the process, or None.
    idx: number of the scan.
    output_path: the folder.
    output_file_prefix: beginning of the file's name.

  Returns:
    The path of the file, which is as `unet` reads it: GZIP, float32.
  """
  image, label = np.asarray(image, np.float32), np.asarray(label, np.float32)

  def feature(value: bytes) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

  features = {"image/ct_image": feature(image.tobytes()), "image/label": feature(label.tobytes())}
  number = "" if process_no is None else f"-{process_no}"
  path = os.path.join(output_path, f"{output_file_prefix}{number}-{idx}.tfrecords")
  with tf.io.TFRecordWriter(path, tf.io.TFRecordOptions(compression_type="GZIP")) as writer:
    example = tf.train.Example(features=tf.train.Features(feature=features))
    writer.write(example.SerializeToString())
  return path


def main(argv: Sequence[str]) -> None:
  """The command.

  Args:
    argv: what is left of the command line: the name of the program.
  """
  del argv
  apply_data_aug()


if __name__ == "__main__":
  app.run(main, sys.argv)
