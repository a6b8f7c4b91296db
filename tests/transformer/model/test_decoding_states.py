"""The order in which a loop over steps keeps keys and values."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.model.decoding_states import in_reading_order
from tests.transformer import lm_program as lm

BATCH, BEAM, HEADS = (mtf.Dimension(*d) for d in (("batch", 2), ("beam", 3), ("heads", 4)))
MEMORY, D_KV = mtf.Dimension("memory_length", 5), mtf.Dimension("d_kv", 6)
CACHE = mtf.Shape([BATCH, MEMORY, HEADS, D_KV])


def _names(x: mtf.Tensor) -> str:
  return " ".join(d.name for d in x.shape)


def test_order():
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  k, v = (mtf.zeros(mesh, CACHE) for _ in range(2))
  assert _names(in_reading_order(k)) == "batch heads memory_length d_kv"
  keys, values, length = in_reading_order((k, v, MEMORY))
  assert _names(keys) == "batch heads d_kv memory_length"
  assert _names(values) == "batch heads memory_length d_kv"
  assert length is MEMORY


@pytest.mark.parametrize("count", [1, 2])
def test_keys_that_are_values_stay_one_tensor(count):
  k = mtf.zeros(mtf.Mesh(mtf.Graph(), "mesh"), CACHE)
  *ordered, _ = in_reading_order((*[k] * count, MEMORY))
  assert len({id(x) for x in ordered}) == 1
  assert _names(ordered[0]) == "batch heads memory_length d_kv"


@pytest.mark.parametrize("queries", [[], [BEAM]])
def test_attention_takes_keys_in_both_orders(queries):
  """The same result, and keys are not transposed again."""
  rng, transposed = np.random.default_rng(0), []

  @mtf.function(
    lm.one_device(), [mtf.TensorSpec([BATCH, *queries, HEADS, D_KV]), *[mtf.TensorSpec(CACHE)] * 2]
  )
  def both(q, k, v):
    keys, values, _ = in_reading_order((k, v, MEMORY))
    before = len(q.graph.operations)
    found = attention.attention(q, keys, values, MEMORY, D_KV, D_KV)
    transposed[:] = [o for o in q.graph.operations[before:] if o.inputs in ([keys], [values])]
    return found, attention.attention(q, k, v, MEMORY, D_KV, D_KV)

  shapes = ([d.size for d in [BATCH, *queries, HEADS, D_KV]], *[CACHE.to_integer_list] * 2)
  found, expected = both(*[rng.standard_normal(s).astype(np.float32) for s in shapes])
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  assert not transposed
