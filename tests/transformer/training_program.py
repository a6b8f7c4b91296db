"""A small language model and data for the tests of the trainer."""

from __future__ import annotations

import gin
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.model import mesh_setup
from mesh_tensorflow.transformer.training.trainer import Trainer

LAYOUT = "batch:batch,d_ff:model,heads:model,vocab:model"
BATCH, LENGTH, VOCAB = 8, 16, 64

# One block of layers: a step is traced in half the time. test_init_checkpoint.py has two.
BINDINGS = """
  import mesh_tensorflow.transformer.transformer_layers
  transformer.LayerStack.sublayers_initial = [@transformer.sublayer_dropout]
  transformer.LayerStack.sublayers_per_layer = [
    @transformer.sublayer_rms_norm, @transformer.sublayer_call_layer,
    @transformer.sublayer_dropout, @transformer.sublayer_residual]
  transformer.LayerStack.sublayers_final = [
    @transformer.sublayer_rms_norm, @transformer.sublayer_dropout]
  transformer.make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.DenseReluDense]
  transformer.make_layer_stack.num_layers = 1
  Unitransformer.d_model = 32
  Unitransformer.max_length = 16
  Unitransformer.vocab_divisor = 64
  Unitransformer.shared_embedding_and_softmax_weights = True
  DenseReluDense.hidden_size = 64
  SelfAttention.num_heads = 4
  SelfAttention.key_value_size = 8
  get_variable_dtype.master_dtype = 'float32'
"""
WITHOUT_ATTENTION = BINDINGS.replace("@transformer_layers.SelfAttention, ", "")
assert WITHOUT_ATTENTION != BINDINGS
DROPOUT = """
  transformer.sublayer_dropout.dropout_rate = 0.1
  DenseReluDense.dropout_rate = 0.1
  SelfAttention.dropout_rate = 0.1
"""


def dataset(sequence_length, vocabulary=None, dataset_split="train", skip: int = 0):
  """Endless rows; row n is a function of n, with something in it to learn."""
  del vocabulary, dataset_split
  length = sequence_length["targets"]

  def row(n):
    start = tf.random.stateless_uniform([], [7, n], 1, 50, tf.int32)
    step = tf.random.stateless_uniform([], [8, n], 1, 4, tf.int32)
    return {"targets": (start + step * tf.range(length)) % (VOCAB - 1) + 1}

  return tf.data.Dataset.range(skip, 10**9).map(row)


def make_trainer(
  mesh: str = "",
  implementation: str = "placement",
  model_dir: str | None = None,
  dropout: bool = True,
  optimizer=mtf.optimize.AdamWeightDecayOptimizer,
  learning_rate=2e-3,
  microbatch_tokens: int | None = None,
  batch: int = BATCH,
  seed: int = 3,
  layout: str = LAYOUT,
  updates=None,  # A `TrainerSettings`.
  **options,
) -> Trainer:
  """A trainer of the small model on a mesh of virtual CPU devices."""
  gin.clear_config()
  gin.parse_config(BINDINGS + (DROPOUT if dropout else ""))
  gin.bind_parameter(
    "serialize_num_microbatches.tokens_per_microbatch_per_replica", microbatch_tokens
  )
  impl = mesh_setup.make_mesh_impl(
    mesh, layout if mesh else "", implementation=implementation, seed=seed
  )
  model = utils.build_model("lm", VOCAB, VOCAB, impl.layout_rules, impl.shape)
  steps = utils.ModelSteps(model, impl, "lm", batch, {"targets": LENGTH}, settings=updates)
  return Trainer(
    steps, None, model_dir, optimizer=optimizer, learning_rate_schedule=learning_rate,
    **{"quiet": True, "steps_per_call": 5, **options}
  )  # fmt: skip


def weights(trainer: Trainer) -> dict[str, np.ndarray]:
  """Every variable of the trainer, whole."""
  return {v.name: v.numpy() for v in trainer.mesh_impl.variable_store}
