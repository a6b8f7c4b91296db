"""A small encoder-decoder, configured by the packaged gin files, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import gin
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.gin_paths import gin_dir
from mesh_tensorflow.transformer.model import decoding
from tests.transformer import lm_program as lm

INPUTS = np.array([[5, 6, 7, 1, 0, 0], [3, 4, 2, 8, 9, 1]], np.int32)
TARGETS = lm.TARGETS

# That of the golden values.
SIZES = """
num_layers = 2
d_model = 4
d_ff = 5
num_heads = 2
d_kv = 3
dropout_rate = 0.0
Unitransformer.max_length = 16
Unitransformer.vocab_divisor = 1
"""
T5_1_0 = """
Unitransformer.positional_embedding = False
SelfAttention.relative_attention_type = "bias_shared"
LayerStack.dropout_rate = 0.0
LayerStack.norm_epsilon = 1e-6
"""
T5_1_1 = """
Unitransformer.positional_embedding = False
SelfAttention.relative_attention_type = "bias_shared"
DenseReluDense.activation = ["gelu", "linear"]
Unitransformer.shared_embedding_and_softmax_weights = False
"""


def configure(bindings: str = "", files: tuple[str, ...] = ()) -> None:
  """Parses defaults.gin, other packaged files, the small sizes, and more bindings."""
  gin.clear_config()
  gin.add_config_file_search_path(gin_dir())
  gin.parse_config_files_and_bindings(["defaults.gin", *files], [SIZES, bindings])


def make_model(
  bindings: str = "", vocab: int = 11, model_type: str = "bitransformer", **kwargs: Any
) -> Any:
  """The encoder-decoder of the golden values, with changes."""
  configure(bindings, **kwargs)
  return utils.build_model(model_type, vocab, vocab)


def loss_program(model: Any, mode: str = "train", **options: Any) -> Any:
  """A program from inputs and targets to (loss, logits, gradients by name, squared gradient)."""

  def program(inputs, targets):
    logits, loss = model.call_simple(inputs, targets, compute_loss=True, mode=mode, **options)
    if mode != "train":
      return loss, logits
    variables = targets.graph.trainable_variables
    grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
    assert all(g is not None for g in grads), [v for v, g in zip(variables, grads) if g is None]
    squared = mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in grads])
    return loss, logits, dict(zip([v.full_name for v in variables], grads)), squared

  return program


def initialize(
  impl: Any, model: Any, inputs: np.ndarray = INPUTS, targets: np.ndarray = TARGETS
) -> mtf.VariableStore:
  """Creates the model's variables and returns the store."""
  lm.run(impl, loss_program(model, "eval"), inputs, targets)
  return impl.variable_store


def golden(impl: Any, model: Any) -> mtf.VariableStore:
  """Creates the model's variables with the golden weights."""
  store = initialize(impl, model)
  lm.set_golden_weights(store)
  return store


def names(impl: Any) -> list[str]:
  """Names of the model's variables, sorted."""
  return sorted(s.name for s in impl.variable_store if not s.name.startswith("_"))


def random_weights(store: mtf.VariableStore, seed: int = 0, scale: float = 0.6) -> None:
  """Sets all of a model's variables to normal numbers, plus 1 in scales."""
  rng = np.random.default_rng(seed)
  for name in sorted(s.name for s in store if not s.name.startswith("_")):
    sizes = store[name].shape.to_integer_list
    value = scale * rng.normal(size=sizes) + (1.0 if name.endswith("scale") else 0.0)
    store[name].assign(value.astype(np.float32))


def stepwise_program(model: Any) -> Any:
  """A program from inputs and targets to the logits of decoding one position after another."""

  def program(inputs, targets):
    variable_dtype = mtf.VariableDType(tf.float32)
    shared = model._shared_params(inputs.mesh, variable_dtype)
    encoded, _ = model._encode(
      inputs,
      mtf.minimum(inputs, 1),
      False,
      mode="infer",
      variable_dtype=variable_dtype,
      shared_params=shared,
    )
    length = targets.shape.dims[-1]
    positions = mtf.range(inputs.mesh, length, tf.int32)
    decoder = decoding.IncrementalModel(
      model.decoder,
      mtf.zeros_like(targets),
      mtf.zeros(inputs.mesh, mtf.Shape([]), tf.int32),
      positions,
      variable_dtype,
      shared_params=shared,
      **encoded,
    )
    states, logits = [mtf.zeros_like(s) for s in decoder.states], []
    for i in range(length.size):
      position = mtf.constant(inputs.mesh, i, dtype=tf.int32)
      # Only tokens before the position are there.
      ids = targets * mtf.to_int32(mtf.less(positions, i))
      step_logits, states = decoder.step(position, ids, states)
      logits.append(step_logits)
    return mtf.stack(logits, "length", axis=targets.shape.ndims - 1)

  return program
