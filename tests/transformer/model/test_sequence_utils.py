"""Shifted targets, delimiters, sinusoids, and buckets of relative positions."""

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import transformer, transformer_layers
from tests.transformer import lm_program as lm


def run_on(ids, fn, *more):
  arrays = [np.array([a], np.int32) for a in (ids, *more)]
  return list(lm.run(lm.one_device(), fn, *arrays)[0])


def test_autoregressive_inputs():
  ids, segments = [5, 6, 1, 7, 8, 1, 0, 0], [1, 1, 1, 2, 2, 2, 0, 0]
  fn = transformer.autoregressive_inputs
  assert run_on(ids, fn) == [0, 5, 6, 1, 7, 8, 1, 0]
  assert run_on(ids, fn, segments) == [0, 5, 6, 0, 7, 8, 0, 0]
  assert run_on([-3, -4, 9, 1, 2, 1, 3, 1], fn) == [0, 3, 4, 9, 1, 2, 1, 3]


def test_shift_targets():
  ids = [5, 6, 1, 7, 8, 1, 0, 0]
  assert run_on(ids, lambda x: transformer.shift_targets(x, bos_id=7)) == [7, 5, 6, 7, 7, 8, 0, 0]
  assert run_on(ids, transformer.shift_targets) == [0, 5, 6, 0, 7, 8, 0, 0]
  # The last of a full row is shifted out.
  assert run_on([5, 6, 7, 8], transformer.shift_targets) == [0, 5, 6, 7]


def test_delimited_lm_inputs_mask():
  mask = run_on([5, 6, 1, 7, 8, 1, 0, 0], transformer.delimited_lm_inputs_mask)
  assert mask == [1, 1, 1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("layout", ["", "d_model:all", "max_length:all"])
def test_sinusoids(layout, cpu_devices):
  impl = mtf.PlacementMeshImpl("all:2", layout, cpu_devices[:2])

  @mtf.function(impl, input_signature=[mtf.TensorSpec([])])
  def table(zero):
    dims = mtf.Dimension("max_length", 4), mtf.Dimension("d_model", 6)
    return transformer.sinusoid_positional_embedding_weights(zero.mesh, *dims, np.float32) + zero

  rows = table(0.0).numpy()
  np.testing.assert_allclose(
    rows[1], [0.841471, 0.00999983, 0.0000999999, 0.540302, 0.999950, 1.0], atol=1e-6
  )
  angle = np.arange(4)[:, None] * 100.0 ** -np.arange(3)
  np.testing.assert_allclose(rows, np.concatenate([np.sin(angle), np.cos(angle)], 1), atol=1e-6)


def test_sinusoids_need_an_even_size():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  with pytest.raises(errors.DimensionError, match="d_model=5 must be even"):
    transformer.sinusoid_positional_embedding_weights(
      mesh, mtf.Dimension("max_length", 4), mtf.Dimension("d_model", 5), np.float32
    )


# Bucket: last relative position it covers (memory minus query), going left from 0.
ONE_SIDED = {
  **{b: -b for b in range(16)}, 16: -18, 17: -20, 18: -23, 19: -26, 20: -30, 21: -34, 22: -39,
  23: -45, 24: -51, 25: -58, 26: -66, 27: -76, 28: -86, 29: -98, 30: -112, 31: -140,
}  # fmt: skip
TWO_SIDED = {
  **{b: -b for b in range(8)}, 8: -11, 9: -15, 10: -22, 11: -31, 12: -45, 13: -63, 14: -90,
  15: -140,
}  # fmt: skip


def expected_bucket(relative, table):
  return next(b for b, last in table.items() if relative >= last)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_position_buckets(bidirectional):
  relative = np.arange(-140, 141)
  buckets = run_on(
    relative,
    lambda x: transformer_layers._relative_position_bucket(x, bidirectional=bidirectional),
  )
  for r, bucket in zip(relative, buckets):
    if not bidirectional:
      expected = expected_bucket(min(r, 0), ONE_SIDED)
    else:
      expected = expected_bucket(-abs(r), TWO_SIDED) + (16 if r > 0 else 0)
    assert bucket == expected, r


def test_few_buckets():
  """0 and 1 have their own; from 2 on, where the logarithm has grown by half, the last one."""
  relative = np.array([1, 0, -1, -2, -3, -4, -50])
  buckets = run_on(
    relative,
    lambda x: transformer_layers._relative_position_bucket(
      x, bidirectional=False, num_buckets=3, max_distance=4
    ),
  )
  assert list(buckets) == [0, 0, 1, 2, 2, 2, 2]
