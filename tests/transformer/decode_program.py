"""One layer in a small model: all positions at once, and step by step, on any mesh."""

from __future__ import annotations

from typing import Any

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer, transformer_layers
from mesh_tensorflow.transformer.model.decoding import IncrementalModel
from tests.transformer import lm_program as lm

BATCH, LENGTH, MEMORY = 4, 8, 4
RNG = np.random.default_rng(11)
TOKENS = RNG.integers(2, 11, [BATCH, LENGTH]).astype(np.int32)
ENCODER_OUTPUT = RNG.normal(size=[BATCH, MEMORY, 4]).astype(np.float32)
ENCODER_IDS = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], np.int32)
ENCODER_INPUTS = RNG.integers(2, 11, [BATCH, MEMORY]).astype(np.int32)
# How many tokens are given; each row is at its own position.
GIVEN = np.array([0, 3, 1, 4], np.int32)
STEPS = int(LENGTH - GIVEN.max())
SIGNATURE = [
  mtf.TensorSpec([("batch", BATCH), ("length", LENGTH)], np.int32),
  mtf.TensorSpec([("batch", BATCH), ("memory_length", MEMORY), ("d_model", 4)]),
  mtf.TensorSpec([("batch", BATCH), ("memory_length", MEMORY)], np.int32),
  mtf.TensorSpec([("batch", BATCH), ("memory_length", MEMORY)], np.int32),
]
ARGUMENTS = (TOKENS, ENCODER_OUTPUT, ENCODER_IDS, ENCODER_INPUTS)
FLOATS = mtf.VariableDType()


def make_model(cls: Any, kwargs: dict[str, Any], num_layers: int = 1) -> Any:
  """A decoder with blocks of a layer and a feed-forward layer."""
  layers = [[cls, kwargs], [transformer_layers.DenseReluDense, dict(hidden_size=5)]]
  stack = transformer.make_layer_stack(
    layers, lambda made: transformer.LayerStack(made, **lm.SUBLAYERS), num_layers=num_layers
  )
  return transformer.Unitransformer(
    stack,
    d_model=4,
    input_vocab_size=11,
    output_vocab_size=11,
    autoregressive=True,
    max_length=16,
    vocab_divisor=1,
    shared_embedding_and_softmax_weights=True,
    positional_embedding=False,
  )


def _encoder(output: Any, ids: Any, inputs: Any, with_encoder: bool) -> dict[str, Any]:
  if not with_encoder:
    return {}
  return dict(
    encoder_output=output,
    encoder_sequence_id=ids,
    encoder_inputs=inputs,
    # Four layers of an encoder, for transparent attention.
    encoder_layer_outputs=[output * (i + 1.0) for i in range(5)],
  )


def forward(model: Any, with_encoder: bool = False, **more: Any) -> Any:
  """A program: logits of all positions, training loss, sum of its squared gradients."""

  def program(tokens: Any, *encoder: Any) -> Any:
    arguments = _encoder(*encoder, with_encoder)
    inputs = transformer.autoregressive_inputs(tokens)
    one = mtf.ones(tokens.mesh, tokens.shape, dtype=np.int32) if with_encoder else None
    logits, loss = model.call_simple(
      inputs, tokens, compute_loss=True, mode="train", sequence_id=one, **arguments, **more
    )
    variables = tokens.graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    used = [mtf.reduce_sum(mtf.square(g)) for g in grads if g is not None]
    return logits, loss, mtf.add_n(used)

  return program


def decode(model: Any, with_encoder: bool = False, **more: Any) -> Any:
  """A program: the logits of STEPS positions after the given ones, and the first states."""

  def program(tokens: Any, *encoder: Any) -> Any:
    batch, length = tokens.shape.dims
    position = mtf.import_tf_tensor(tokens.mesh, GIVEN, mtf.Shape([batch]))
    positions = mtf.range(tokens.mesh, length, dtype=np.int32)
    given = tokens * mtf.to_int32(mtf.less(positions, position, output_shape=tokens.shape))
    incremental = IncrementalModel(
      model, given, position, positions, FLOATS, **_encoder(*encoder, with_encoder), **more
    )
    states = first = incremental.states
    logits = []
    for _ in range(STEPS):
      step, states = incremental.step(position, tokens, states)
      logits.append(step)
      position += 1
    assert [s.shape for s in states] == [s.shape for s in first]
    return mtf.stack(logits, "step", axis=1), first

  return program


def expected_steps(logits: np.ndarray) -> np.ndarray:
  """The logits of all positions, at those that are decoded."""
  return np.stack([logits[np.arange(BATCH), GIVEN + i] for i in range(STEPS)], axis=1)
