"""Augmentation of scans."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.experimental import data_aug_lib as aug
from tests.experimental.test_unet import scan

N = 16


@pytest.fixture
def both():
  tf.random.set_seed(5)
  image, label = scan(2, N)
  return tf.constant(image), tf.constant(label)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_flips(both, axis):
  flipped = aug.maybe_flip(*both, axis, 0.9)
  for got, given in zip(flipped, both):
    np.testing.assert_array_equal(got, np.flip(given.numpy(), axis))
  for got, given in zip(aug.maybe_flip(*both, axis, 0.1), both):
    np.testing.assert_array_equal(got, given)
  drawn = {bool(np.all(aug.maybe_flip(*both, axis)[0] == both[0])) for _ in range(20)}
  assert drawn == {True, False}


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_half_turns(both, axis):
  turned = aug.maybe_rot180(*both, axis, 2)
  plane = tuple(a for a in range(3) if a != axis)
  for got, given, back in zip(turned, both, aug.maybe_rot180(*turned, axis, 2)):
    np.testing.assert_array_equal(got, np.flip(given.numpy(), plane))
    np.testing.assert_array_equal(back, given)
  np.testing.assert_array_equal(aug.maybe_rot180(*both, axis, 0)[0], both[0])
  with pytest.raises(ShapeError, match="static_axis"):
    aug.maybe_rot180(*both, 3)


def test_nothing_is_changed_without_probability(both):
  image, label = both
  assert aug.intensity_shift(image, label, 0.0, 0.0) is image
  assert aug.image_corruption(image, label, N, 0.0, 0.0) is image
  assert aug.maybe_add_noise(image, image.shape, 1, 4, 0.0, 0.5) is image
  assert aug.projective_transform(image, label, N, 0.0, 0.0) == (image, label)
  for got, given in zip(aug.maybe_gen_fake_data_based_on_real_data(*both, N, 0.1, 0.0), both):
    np.testing.assert_array_equal(got, given)


def test_intensities_of_lesions_and_the_rest_move_apart(both):
  image, label = both
  moved = aug.intensity_shift(image, label, 0.0, 0.25) / image
  lesion = label.numpy() > 1.5
  np.testing.assert_allclose(moved.numpy()[lesion], 1.25, rtol=1e-5)
  np.testing.assert_allclose(moved.numpy()[~lesion], 0.75, rtol=1e-5)


@pytest.mark.parametrize("ratio", [0.2, 0.6])
def test_corruption_zeroes_its_part_outside_of_lesions(both, ratio):
  image, label = both
  found = aug.image_corruption(image, label, N, ratio, 0.0).numpy()
  lesion = label.numpy() > 1.5
  np.testing.assert_array_equal(found[lesion], image.numpy()[lesion])
  assert np.mean(found[~lesion] == 0) == pytest.approx(ratio, abs=0.05)
  kept = found != 0
  np.testing.assert_array_equal(found[kept], image.numpy()[kept])


def test_noise_has_at_most_its_ratio(both):
  image, _ = both
  noise = np.stack(
    [aug.maybe_add_noise(image, image.shape, 1, 4, 1.0, 0.3) - image for _ in range(8)]
  )
  assert 0.02 < noise.std() < 0.3
  assert abs(noise).max() <= 2 * 2 * 0.3 + 1e-6


def test_projective_maps_move_image_and_label_alike():
  tf.random.set_seed(1)
  label = np.zeros([N, N, N], "f")
  label[4:12, 4:12, 4:12] = 2.0
  image, label = aug.projective_transform(tf.constant(label / 2), tf.constant(label), N, 0.1, 0.003)
  assert not np.all(label.numpy()[4:12, 4:12, 4:12] == 2)
  assert set(np.unique(label)) == {0.0, 2.0}
  inside = image.numpy() > 0.5
  assert np.mean(inside == (label.numpy() > 1)) > 0.97


def test_made_up_lesions(both):
  image, label = both
  # Lesions darker than the liver, as in scans.
  image = tf.where(label > 1.5, image - 0.4, image)
  for _ in range(10):
    made, classes = aug.maybe_gen_fake_data_based_on_real_data(image, label, N, 0.3, 1.0)
    organ = label.numpy() > 0.5
    assert np.all(classes.numpy()[~organ] == 0)
    fake = classes.numpy() == 2
    assert fake.any() and np.all(classes.numpy()[organ & ~fake] == 1)
    old = (label.numpy() > 1.5) & ~fake
    if old.any():
      assert made.numpy()[old].mean() > image.numpy()[old].mean()


def test_noise_between_grid_points_is_linear():
  x = tf.constant(np.array([0.0, 4.0], "f").reshape([2, 1, 1]))
  # As in TensorFlow 1: position i is at i * 2 / 8 of the grid, and beyond its end the last number.
  assert aug._resized(x, 0, 8).numpy().ravel().tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
