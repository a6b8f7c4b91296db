"""Products of several slices: which two come first."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.operations import contraction

I, J, K, L = (mtf.Dimension(n, s) for n, s in [("i", 100), ("j", 2), ("k", 3), ("l", 2)])
CHAIN = [(I,), (I, J), (J, K), (K, L)]


def _drawn(dims):
  return tf.constant(np.random.default_rng(0).standard_normal([d.size for d in dims]), tf.float32)


def test_the_smallest_product_is_made_first():
  """However much is summed for it: what no other operand has is not in the result."""
  terms = [(_drawn(dims), dims) for dims in CHAIN]
  # Two elements; of the last two operands' product there are four.
  assert contraction._cheapest_pair(terms, (L,)) == (0, 1)
  # A dimension of the output stays.
  assert contraction._cheapest_pair(terms, (I, L)) == (2, 3)


def test_a_chain_is_the_product_in_any_order():
  tensors = [_drawn(dims) for dims in CHAIN]
  a, b, c, d = (t.numpy() for t in tensors)
  found = contraction.contract(tensors, CHAIN, (L,))
  np.testing.assert_allclose(found, a @ b @ c @ d, rtol=1e-3, atol=1e-3)
