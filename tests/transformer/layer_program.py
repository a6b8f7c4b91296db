"""Programs for tests of single layers, and of models made of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.model import decoding
from tests.transformer import bi_program
from tests.transformer import lm_program as lm

FLOATS = mtf.VariableDType()


class Model:
  """As much of a model as layers ask for."""

  ensemble_dim = None
  ensemble_dims: list[mtf.Dimension] = []
  layout = None
  mesh_shape = None
  fully_autoregressive = True

  def __init__(self, model_dim: mtf.Dimension):
    self.model_dim = model_dim


def context(
  x: mtf.Tensor, batch: int = 1, mode: str = "eval", **kwargs: Any
) -> transformer.Context:
  """A context for x `[<batch dims>, length, <model dim>]`, which has `batch` batch dimensions."""
  dims: Sequence[mtf.Dimension] = x.shape.dims
  return transformer.Context(
    Model(dims[-1]), x.mesh, dims[:batch], dims[batch], FLOATS, mode=mode, **kwargs
  )


def make_lm(
  layers: Sequence[Any], stack: Any = None, num_layers: int = 1, **kwargs: Any
) -> transformer.Unitransformer:
  """A language model of the given layers; d_model 4, 11 tokens."""
  if stack is None:
    stack = functools.partial(transformer.LayerStack, **lm.SUBLAYERS)
  options = dict(
    d_model=4,
    input_vocab_size=11,
    output_vocab_size=11,
    autoregressive=True,
    max_length=16,
    vocab_divisor=1,
    shared_embedding_and_softmax_weights=True,
  )
  return transformer.Unitransformer(
    transformer.make_layer_stack(layers, stack, num_layers=num_layers), **(options | kwargs)
  )


def full_program(model: transformer.Unitransformer) -> Any:
  """A program from targets to the logits of the full pass."""

  def program(targets):
    inputs = transformer.autoregressive_inputs(targets)
    return model.call_simple(inputs, targets, compute_loss=False, mode="eval")[0]

  return program


def stepwise_program(model: transformer.Unitransformer) -> Any:
  """A program from targets to the logits of decoding one position after another."""

  def program(targets):
    length = targets.shape.dims[-1]
    positions = mtf.range(targets.mesh, length, tf.int32)
    decoder = decoding.IncrementalModel(
      model,
      mtf.zeros_like(targets),
      mtf.zeros(targets.mesh, mtf.Shape([]), tf.int32),
      positions,
      FLOATS,
    )
    states, logits = [mtf.zeros_like(s) for s in decoder.states], []
    for i in range(length.size):
      # Only tokens before the position are there.
      ids = targets * mtf.to_int32(mtf.less(positions, i))
      position = mtf.constant(targets.mesh, i, dtype=tf.int32)
      step_logits, states = decoder.step(position, ids, states)
      logits.append(step_logits)
    return mtf.stack(logits, "length", axis=targets.shape.ndims - 1)

  return program


def check_decoding(model: transformer.Unitransformer, targets: np.ndarray = lm.TARGETS) -> None:
  """Decoding step by step gives the logits of the full pass, and samples their largest."""
  impl = lm.one_device()
  bi_program.random_weights(lm.initialize(impl, model, targets))
  full = lm.run(impl, full_program(model), targets)
  stepwise = lm.run(impl, stepwise_program(model), targets)
  assert np.ptp(full) > 0.1
  np.testing.assert_allclose(stepwise, full, rtol=1e-4, atol=1e-4)

  def sample(given):
    return model.sample_autoregressive(given, stop_at_token=None)

  given = np.where(np.arange(targets.shape[1]) < 2, np.maximum(targets, 1), 0).astype(np.int32)
  ids = lm.run(impl, sample, given)
  expected = lm.run(impl, full_program(model), ids).argmax(-1)
  np.testing.assert_array_equal(ids[:, 2:], expected[:, 2:])


def losses_and_gradients(
  model: transformer.Unitransformer, impl: Any, targets: np.ndarray = lm.TARGETS, **kwargs: Any
) -> list[np.ndarray]:
  """Training loss, squared gradient and logits, with random weights."""
  bi_program.random_weights(lm.initialize(impl, model, targets))
  loss, _, squared = lm.run(impl, lm.loss_program(model, **kwargs), targets)
  _, logits = lm.run(impl, lm.loss_program(model, "eval", **kwargs), targets)
  return [loss, squared, logits]


def names(model: transformer.Unitransformer, targets: np.ndarray = lm.TARGETS) -> dict[str, Any]:
  """The shapes of the model's variables, by name."""
  impl = lm.one_device()
  store = lm.initialize(impl, model, targets)
  return {s.name: store[s.name].shape for s in store if not s.name.startswith("_")}
