"""How lesions that are made up are painted."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from mesh_tensorflow.experimental import data_aug_lib as aug

N = 16  # So small that blobs have no soft border.


def test_lesions_are_as_dark_as_the_real_ones_and_these_are_painted_over():
  """By 1.15 times what the real ones are darker than the liver, in place of whose they are."""
  tf.random.set_seed(3)
  label = np.zeros([N, N, N], np.float32)
  label[2:14, 2:14, 2:14] = 1.0
  label[4:8, 4:8, 4:8] = 2.0
  image = np.where(label > 1.5, 0.6, np.where(label > 0.5, 1.0, 0.2)).astype(np.float32)
  made, classes = aug.maybe_gen_fake_data_based_on_real_data(
    tf.constant(image), tf.constant(label), N, 0.3, 1.0
  )
  fake, real = classes.numpy() == 2, label > 1.5
  assert fake.any() and (real & ~fake).any()
  darker = 1.15 * 0.4
  np.testing.assert_allclose(made, image + darker * (real * 1.0 - fake), atol=1e-5)
