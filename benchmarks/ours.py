"""Our side of the benchmarks: the trainer's own training step of the Transformer package."""

from __future__ import annotations

from collections.abc import Callable

import gin
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from benchmarks.sizes import Size, initial_values
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow.transformer import (
  transformer,
  utils,
)
from mesh_tensorflow.transformer.model import mesh_setup
from mesh_tensorflow.transformer.modes import layer_cut

LAYOUT = "batch:batch,d_ff:model,heads:model,vocab:model,experts:batch,expert_hidden:model"
_LEARNING_RATE = 1e-3


def make_function(
  size: Size,
  seed: int = 0,
  mesh: str = "",
  implementation: str = "placement",
  layout: str | None = None,
  sharding: str = "",
  precision: str = "float32",
  stages: int = 1,
  microbatches: int = 1,
) -> mtf.Function:
  """The training step on a mesh of virtual CPU devices, as an `mtf.function`.

  Args:
    size: the model and the batch.
    seed: of the initial weights.
    mesh: mesh shape, such as "batch:2,model:2"; "" is one device.
    implementation: "placement" or "simd".
    layout: layout rules; by default `LAYOUT` on a mesh.
    sharding: "state" or "all": what is stored in shards over the mesh dimension "batch"; "all":
      weights are gathered for each use.
    precision: the dtype of activations.
    stages: number of such meshes, each with some of the layers, cut as the trainer does by default.
    microbatches: of a step.

  Returns:
    A function of (int32 tokens [batch, length], learning rate, step) that returns the loss.
  """
  steps = make_steps(
    size, seed, mesh, implementation, layout, sharding, precision, stages, microbatches
  )
  return steps.train_step(["targets"], mtf.optimize.AdamWeightDecayOptimizer)


def make_steps(
  size: Size,
  seed: int = 0,
  mesh: str = "",
  implementation: str = "placement",
  layout: str | None = None,
  sharding: str = "",
  precision: str = "float32",
  stages: int = 1,
  microbatches: int = 1,
) -> utils.ModelSteps:
  """The programs of the model; arguments as of `make_function`."""
  devices = mesh_setup.find_devices(stages * max(1, mtf.convert_to_shape(mesh).size))
  if layout is None:
    layout = LAYOUT if mesh else ""
  dense = "@transformer_layers.SelfAttention, @transformer_layers.DenseReluDense"
  mixture = "@transformer_layers.SelfAttention, @moe.MoE1D"
  gin.clear_config()
  gin.parse_config(f"""
    import mesh_tensorflow.transformer.moe
    import mesh_tensorflow.transformer.transformer_layers
    transformer.LayerStack.sublayers_initial = []
    transformer.LayerStack.sublayers_per_layer = [
      @transformer.sublayer_rms_norm, @transformer.sublayer_call_layer,
      @transformer.sublayer_residual]
    transformer.LayerStack.sublayers_final = [@transformer.sublayer_rms_norm]
    transformer.make_layer_stack.layers = [{f"{mixture}, {dense}" if size.experts else dense}]
    transformer.make_layer_stack.num_layers = {size.layers // (2 if size.experts else 1)}
    Unitransformer.d_model = {size.d_model}
    Unitransformer.shared_embedding_and_softmax_weights = True
    Unitransformer.max_length = {size.length}
    DenseReluDense.hidden_size = {size.d_ff}
    MoE1D.num_experts = {size.experts}
    MoE1D.hidden_size = {size.d_ff}
    MoE1D.group_size = {size.length}
    SelfAttention.num_heads = {size.heads}
    SelfAttention.key_value_size = {size.d_kv}
    get_variable_dtype.master_dtype = 'float32'
    get_variable_dtype.activation_dtype = '{precision}'
  """)
  model = transformer.Unitransformer(
    layer_stack=transformer.make_layer_stack(),
    input_vocab_size=size.vocab,
    output_vocab_size=size.vocab,
    autoregressive=True,
    layout=layout,
    mesh_shape=mesh,
  )
  impl = mesh_setup.make_mesh_impl(
    mesh,
    layout,
    devices,
    implementation=implementation,
    seed=seed,
    shard_state="batch" if sharding else "",
    reshard_after_forward=sharding == "all",
    pipeline_stages=stages,
  )
  settings = TrainerSettings(gradient_accumulation_steps=microbatches)
  lengths = {"targets": size.length}
  steps = utils.ModelSteps(model, impl, "lm", size.batch, lengths, settings=settings)
  layer_cut.set_cut(steps, mtf.optimize.AdamWeightDecayOptimizer, "auto")
  return steps


def make_step(
  size: Size,
  seed: int = 0,
  mesh: str = "",
  implementation: str = "placement",
  sharding: str = "",
  precision: str = "float32",
  stages: int = 1,
  microbatches: int = 1,
) -> Callable[[np.ndarray], tf.Tensor]:
  """One training step, from the values that every side starts from.

  Args:
    size: the model and the batch.
    seed: of the initial weights.
    mesh: see `make_function`.
    implementation: see `make_function`.
    sharding: see `make_function`.
    precision: see `make_function`.
    stages: see `make_function`.
    microbatches: see `make_function`.

  Returns:
    A function of int32 tokens [batch, length] that returns the loss.
  """
  train_step = make_function(
    size,
    seed,
    mesh,
    implementation,
    sharding=sharding,
    precision=precision,
    stages=stages,
    microbatches=microbatches,
  )
  impl = train_step.mesh_impl
  learning_rate = tf.constant(_LEARNING_RATE)
  step_number = tf.constant(0, tf.int64)
  compiled = tf.function(
    lambda tokens: train_step(tokens, learning_rate, step_number), autograph=False
  )
  # Tracing creates the variables; then they get the values that every side starts from. With
  # experts only our side is there, and its own first values do not depend on the mesh.
  compiled.get_concrete_function(tf.TensorSpec([size.batch, size.length], tf.int32))
  values = {} if size.experts else initial_values(size, seed)
  for name, value in values.items():
    impl.variable_store[_our_name(name)].assign(value)
  return compiled


def _our_name(name: str) -> str:
  """The checkpoint name of a weight of `sizes.initial_values`."""
  whole = {
    "embedding": "transformer/embedding",
    "positions": "transformer/positional_embedding",
    "final_scale": "transformer/rms_norm/scale",
  }
  if name in whole:
    return whole[name]
  block, part = name.split("/")
  prefix = f"transformer/block_{int(block.split('_')[1]):03d}"
  inner = {
    "attention_scale": "layer_000/rms_norm/scale",
    "ffn_scale": "layer_001/rms_norm/scale",
    "wi": "layer_001/DenseReluDense/wi/kernel",
    "wo": "layer_001/DenseReluDense/wo/kernel",
  }.get(part, f"layer_000/SelfAttention/{part}")
  return f"{prefix}/{inner}"
