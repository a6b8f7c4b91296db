"""Which errors of TensorFlow's are those of a division by zero."""

from __future__ import annotations

import pytest
import tensorflow as tf

from mesh_tensorflow.running.lowering import is_division_by_zero


@pytest.mark.parametrize(
  ("error", "is_one"),
  [
    (tf.errors.InvalidArgumentError(None, None, "Integer division by zero [Op:Mod]"), True),
    (tf.errors.InvalidArgumentError(None, None, "Incompatible shapes: [2] vs. [3]"), False),
    (tf.errors.InternalError(None, None, "Integer division by zero"), False),
    (ZeroDivisionError("integer division by zero"), False),  # Of Python, before anything runs.
  ],
)
def test_errors(error, is_one):
  assert is_division_by_zero(error) == is_one
