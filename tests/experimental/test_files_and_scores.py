"""Names of files, files that are missing, and the scores that an evaluation ends with."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import flagsaver

from mesh_tensorflow.errors import ConfigError, ShapeError
from mesh_tensorflow.experimental import offline_data_aug, unet, unet_data

NAMES = ("image/ct_image", "image/label")


@pytest.fixture(autouse=True)
def parsed_flags():
  if not unet.FLAGS.is_parsed():
    unet.FLAGS.mark_as_parsed()


@pytest.mark.parametrize(("process", "name"), [(None, "scan-7"), (0, "scan-0-7"), (3, "scan-3-7")])
def test_files_of_processes_have_their_numbers(process, name, tmp_path):
  scan = np.zeros([2, 2, 2], np.float32)
  path = offline_data_aug.save_to_tfrecord(scan, scan, process, 7, str(tmp_path), "scan")
  assert path == str(tmp_path / f"{name}.tfrecords")
  assert [p.name for p in tmp_path.iterdir()] == [f"{name}.tfrecords"]


@pytest.mark.parametrize("pattern", ["", "nothing-{}*"])
def test_files_that_are_missing(pattern, tmp_path):
  where = pattern and str(tmp_path / pattern)
  with flagsaver.flagsaver(eval_file_pattern=where, ct_resolution=8):
    with pytest.raises(ConfigError, match="--eval_file_pattern '.*' is the name of no file"):
      unet_data.dataset_creator(False, [[8], [8]])


def test_noise_is_of_single_voxels_and_of_blocks_of_four(monkeypatch):
  scan = np.zeros([8, 8, 8], np.float32)
  raw = {n: tf.train.Feature(bytes_list=tf.train.BytesList(value=[scan.tobytes()])) for n in NAMES}
  record = tf.train.Example(features=tf.train.Features(feature=raw)).SerializeToString()
  scales = []

  def added(image, shape, *others):
    scales.append((tuple(shape), *others))
    return image

  monkeypatch.setattr(unet_data.data_aug_lib, "maybe_add_noise", added)
  flags = dict(ct_resolution=8, image_noise_probability=0.5, image_noise_ratio=0.25)
  with flagsaver.flagsaver(sampled_2d_slices=False, **flags):
    image, label = unet_data._train_example(tf.constant(record))
  assert scales == [((8, 8, 8), 1, 4, 0.5, 0.25)]
  assert image.shape == label.shape == (8, 8, 8)


def said_by(caplog, flat):
  """Of the agreement with the areas of two scans a step, or of six slices of scans of three."""
  end = unet.PostProcessor()
  if flat:
    end._intersections = [np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 1.0])]
    end._areas = [np.array([4.0, 8.0, 8.0, 10.0]), np.array([2.0, 4.0])]
  else:
    end._intersections = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    end._areas = [np.array([4.0, 8.0]), np.array([8.0, 10.0])]
  with caplog.at_level("INFO", "mesh_tensorflow"):
    with flagsaver.flagsaver(sampled_2d_slices=flat, ct_resolution=5, image_c=3):
      end.finish()
  return caplog.messages[-1]


def test_the_dice_coefficient_of_scans(caplog):
  """Twice the agreement over both areas: 2/4, 4/8, 6/8, 8/10; and of all 20/30."""
  assert said_by(caplog, False) == "dice_per_case: 0.637410, dice_global: 0.666644"


def test_slices_are_put_together_to_scans(caplog):
  """Three each: 12/20 and 10/16; and of all 22/36."""
  assert said_by(caplog, True) == "dice_per_case: 0.612465, dice_global: 0.611094"


def test_slices_of_no_whole_number_of_scans():
  end = unet.PostProcessor()
  end._intersections = end._areas = [np.ones([4])]
  with flagsaver.flagsaver(sampled_2d_slices=True, ct_resolution=5, image_c=3):
    with pytest.raises(ShapeError, match="4 images were evaluated, .* scans of 3 images"):
      end.finish()
