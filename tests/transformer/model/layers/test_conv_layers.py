"""Convolutions while decoding: the last inputs that they keep."""

from __future__ import annotations

import collections
import logging

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer_layers
from tests.transformer import lm_program as lm
from tests.transformer.layer_context import make_context

RNG = np.random.default_rng(8)
X = RNG.normal(size=[2, 5, 4]).astype(np.float32)
DIMS = [("batch", 2), ("length", 5), ("d_model", 4)]


def run(fn):
  """The values of `fn(x)`, and the variables."""
  impl = lm.one_device()
  program = mtf.function(impl, input_signature=[mtf.TensorSpec(DIMS)])(fn)
  program(X)
  lm.set_golden_weights(impl.variable_store)
  return [t.numpy() for t in program(X)], {s.name: s.numpy() for s in impl.variable_store}


def test_a_centered_filter_ends_at_the_position_while_decoding(caplog):
  layer = transformer_layers.Conv1DLayer(filter_size=3, output_size=2, activation="relu")

  def program(x):
    start = mtf.import_tf_tensor(x.mesh, [2, 0], [x.shape[0]])
    context = make_context(x, mode="first_part", initial_position=start, new_states=[])
    with mtf.variable_scope("layer"):
      layer.call(context, x)
    states, results = context.new_states, list(context.new_states)
    for step in range(2):
      now = mtf.gather(x, start + step, x.shape[1])
      context = make_context(x, mode="incremental", states=states, new_states=[])
      with mtf.variable_scope("layer"):
        results.append(layer.call(context, now))
      states = context.new_states
    return results

  with caplog.at_level(logging.WARNING, "mesh_tensorflow"):
    (state, *steps), w = run(program)
  assert "centered in training" in caplog.text
  kernel = w["layer/conv2d/kernel"][0]
  padded = np.concatenate([np.zeros([2, 3, 4]), X], axis=1)
  for row, begin in enumerate((2, 0)):
    np.testing.assert_allclose(state[row], padded[row, begin : begin + 3])
    for i, y in enumerate(steps):
      # The position is number begin + i; three zeros stand before number 0.
      window = padded[row, begin + i + 1 : begin + i + 4]
      want = np.maximum(np.einsum("fi,fio->o", window, kernel), 0)
      np.testing.assert_allclose(y[row], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("filter_size", [1, 3, 5])
def test_a_state_may_be_as_long_as_the_sequence(filter_size):
  layer = transformer_layers.Conv1D()

  def program(x):
    start = mtf.import_tf_tensor(x.mesh, [4, 1], [x.shape[0]])
    context = make_context(x, initial_position=start, new_states=[])
    layer.record_states_first_part_mode(context, x, filter_size, "window")
    (old,) = context.new_states
    assert old.shape.dims[1] == mtf.Dimension("window", filter_size)
    context = make_context(x, states=[old], new_states=[])
    now = mtf.gather(x, start, x.shape[1])
    return old, layer.record_states_incremental_mode(context, now, filter_size, "window")

  (old, new), _ = run(program)
  padded = np.concatenate([np.zeros([2, filter_size, 4]), X], axis=1)
  for row, begin in enumerate((4, 1)):
    np.testing.assert_allclose(old[row], padded[row, begin : begin + filter_size])
    np.testing.assert_allclose(new[row], padded[row, begin + 1 : begin + 1 + filter_size])


def test_a_context_of_three_attributes_is_enough():
  context_type = collections.namedtuple("Context", ["inputs", "activation_dtype", "mode"])
  layers = [
    transformer_layers.Conv1DLayer(filter_size=3, output_size=2),
    transformer_layers.SeparableConv1DLayer(-1, 1, output_size=3),
  ]

  def program(x):
    ids = mtf.ones(x.mesh, x.shape.dims[:2], dtype=np.int32)
    context = context_type(inputs=ids, activation_dtype=x.dtype, mode="train")
    return [layer.call(context, x) for layer in layers]

  values, _ = run(program)
  assert [v.shape for v in values] == [(2, 5, 2), (2, 5, 3)]
