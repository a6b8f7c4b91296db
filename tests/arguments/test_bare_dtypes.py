"""A dtype alone is taken wherever the archived library takes one for a `VariableDType`.

There `mtf.get_variable` makes one of it, so that whatever hands its `variable_dtype` on takes it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from mesh_tensorflow import transformer as package
from mesh_tensorflow.operations.variables import convert_to_variable_dtype
from mesh_tensorflow.transformer import (
  adaptive_softmax,
  attention,
  fixup_layers,
  heterogeneous_moe,
  moe,
  transformer,
  transformer_layers,
  vocab_embeddings,
)
from tests.transformer import layer_program, lm_program

B, L, D, O, V = (
  mtf.Dimension("b", 2), mtf.Dimension("length", 4), mtf.Dimension("d", 8), mtf.Dimension("o", 6),
  mtf.Dimension("v", 16),
)  # fmt: skip
H, K = mtf.Dimension("heads", 2), mtf.Dimension("k", 4)
X, Y, Z = mtf.Dimension("x", 4), mtf.Dimension("y", 4), mtf.Dimension("z", 4)
XB, YB = mtf.Dimension("xb", 2), mtf.Dimension("yb", 2)
HALF = tf.bfloat16


def of(mesh: mtf.Mesh, *dims: mtf.Dimension, dtype: Any = HALF) -> mtf.Tensor:
  return mtf.zeros(mesh, list(dims), dtype)


def experts(layer: Any) -> Any:
  return lambda m: layer(of(m, B, L, D), D, moe.HParams(**MOE), False, HALF)


MOE = dict(
  moe_gating="top_2", moe_num_experts=2, moe_loss_coef=1e-3, moe_hidden_size=8, moe_group_size=8,
  moe_min_expert_capacity=4, moe_capacity_factor_train=1.25, moe_capacity_factor_eval=2.0,
  moe_use_second_place_loss=False, moe_second_policy_train="all", moe_second_policy_eval="all",
  moe_second_threshold_train=0.2, moe_second_threshold_eval=0.2,
)  # fmt: skip
ATTENTION = (D, D, D, K, K, [H], [H], HALF)


def embedding(cls: Any, **more: Any) -> Any:
  return lambda m: cls(m, V, D, HALF, "e", None, **more)


PLACES = {
  "get_variable": lambda m: mtf.get_variable(m, "v", [B], dtype=HALF),
  "layers.dense": lambda m: layers.dense(of(m, B, D), [O], [D], variable_dtype=HALF),
  "layers.get_dense_kernel_weights": lambda m: layers.get_dense_kernel_weights(
    of(m, B, D), [O], [D], [], layers.VarianceScalingInitializer(), variable_dtype=HALF
  ),
  "layers.embedding": lambda m: layers.embedding(of(m, B, dtype=tf.int32), V, D, HALF),
  "layers.embedding_weights": lambda m: layers.embedding_weights(m, V, D, HALF),
  "layers.conv2d": lambda m: layers.conv2d(of(m, B, X, Y, D), O, variable_dtype=HALF),
  "layers.conv3d": lambda m: layers.conv3d(of(m, B, X, Y, Z, D), O, variable_dtype=HALF),
  "layers.conv2d_transpose": lambda m: layers.conv2d_transpose(
    of(m, B, X, Y, D), O, variable_dtype=HALF
  ),
  "layers.conv3d_transpose": lambda m: layers.conv3d_transpose(
    of(m, B, X, Y, Z, D), O, variable_dtype=HALF
  ),
  "layers.conv2d_with_blocks": lambda m: layers.conv2d_with_blocks(
    of(m, B, XB, YB, X, Y, D), O, h_blocks_dim=XB, w_blocks_dim=YB, variable_dtype=HALF
  ),
  "layers.conv3d_with_blocks": lambda m: layers.conv3d_with_blocks(
    of(m, B, XB, YB, X, Y, Z, D), O, d_blocks_dim=XB, h_blocks_dim=YB, variable_dtype=HALF
  ),
  "layers.conv2d_transpose_with_blocks": lambda m: layers.conv2d_transpose_with_blocks(
    of(m, B, XB, YB, X, Y, D), O, h_blocks_dim=XB, w_blocks_dim=YB, variable_dtype=HALF
  ),
  "layers.conv3d_transpose_with_blocks": lambda m: layers.conv3d_transpose_with_blocks(
    of(m, B, XB, YB, X, Y, Z, D), O, d_blocks_dim=XB, h_blocks_dim=YB, variable_dtype=HALF
  ),
  "layers.multihead_attention_params": lambda m: layers.multihead_attention_params(
    m, H, D, K, HALF
  ),
  "layers.lstm": lambda m: layers.lstm(of(m, B, L, D), O, L, variable_dtype=HALF),
  "layers.gru": lambda m: layers.gru(of(m, B, L, D), O, L, variable_dtype=HALF),
  "layers.simple_rnn": lambda m: layers.simple_rnn(of(m, B, L, D), O, L, variable_dtype=HALF),
  "attention.AttentionParams": lambda m: attention.AttentionParams(m, *ATTENTION),
  "attention.attention_params_simple": lambda m: attention.attention_params_simple(
    m, D, K, H, HALF
  ),
  "fixup_layers.AttentionParamsFixup": lambda m: fixup_layers.AttentionParamsFixup(
    m, *ATTENTION, num_blocks=2
  ),
  "transformer.VocabEmbedding": embedding(transformer.VocabEmbedding),
  "adaptive_softmax.AdaptiveSoftmaxVocabEmbedding": embedding(
    adaptive_softmax.AdaptiveSoftmaxVocabEmbedding,
    clusters=[dict(token_count=16, embedding_size=8)],
  ),
  "vocab_embeddings.FactorizedVocabEmbedding": embedding(
    vocab_embeddings.FactorizedVocabEmbedding, inner_dimension_size=4
  ),
  "vocab_embeddings.MixtureOfSoftmaxes": embedding(
    vocab_embeddings.MixtureOfSoftmaxes, num_softmaxes=2
  ),
  "vocab_embeddings.Mixtape": embedding(vocab_embeddings.Mixtape, gate_embedding_size=4),
  "moe.transformer_moe_layer_v1": experts(moe.transformer_moe_layer_v1),
  "heterogeneous_moe.transformer_moe_layer_v1": experts(
    lambda x, out, hparams, train, dtype: heterogeneous_moe.transformer_moe_layer_v1(
      x, out, hparams, train, dtype, context=None
    )
  ),
}


@pytest.mark.parametrize("place", list(PLACES))
def test_a_dtype_alone(place):
  graph = mtf.Graph()
  PLACES[place](mtf.Mesh(graph, "m"))
  made = [v for v in graph.all_variables if v.activation_dtype == HALF]
  assert made and all(v.master_dtype == v.slice_dtype == HALF for v in made)


def test_whoever_has_such_a_parameter_says_so():
  """Of all modules: a place that is new is found."""
  found, wrong = set(), []
  names = [m.name for m in pkgutil.walk_packages(package.__path__, "mesh_tensorflow.transformer.")]
  names += ["mesh_tensorflow.layers", "mesh_tensorflow.experimental.unet"]
  for name in names:
    module = importlib.import_module(name)
    for own in vars(module).values():
      if not getattr(own, "__module__", "").startswith("mesh_tensorflow"):
        continue
      methods = list(vars(own).values()) if inspect.isclass(own) else [own]
      for f in methods:
        if not inspect.isfunction(inspect.unwrap(f)) if callable(f) else True:
          continue
        parameter = inspect.signature(inspect.unwrap(f)).parameters.get("variable_dtype")
        if parameter is None or parameter.annotation is parameter.empty:
          continue
        found.add(f.__qualname__)
        if not any(word in str(parameter.annotation) for word in ("DTypeLike", "tf.DType", "Any")):
          wrong.append(f"{f.__module__}.{f.__qualname__}: {parameter.annotation}")
  assert not wrong
  assert {"Context.__init__", "Unitransformer.call_simple", "dense"} <= found and len(found) > 40


def test_models_take_it():
  impl = lm_program.one_device()
  model = lm_program.make_model(sinusoid_positional_embedding=True)
  targets = lm_program.TARGETS
  results = []
  for dtype in (tf.float32, mtf.VariableDType(tf.float32)):
    loss, logits, _ = lm_program.run(
      impl, lm_program.loss_program(model, variable_dtype=dtype), targets
    )
    ids = lm_program.run(
      impl, lambda p, d=dtype: model.sample_autoregressive(p, variable_dtype=d), targets
    )
    results.append((float(loss), logits.tolist(), ids.tolist()))
  assert results[0] == results[1]


def test_a_context_takes_it():
  """`SelfAttention` in a context of a bare dtype, of which it asks the activations' dtype."""
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x = of(mesh, B, L, D)
  position = mtf.range(mesh, L, tf.int32)
  context = transformer.Context(
    layer_program.Model(D), mesh, [B], L, HALF, position=position, position_is_default=True,
    read_priority=position, write_priority=position,
  )  # fmt: skip
  assert context.variable_dtype == mtf.VariableDType(HALF) and context.activation_dtype == HALF
  y = transformer_layers.SelfAttention(num_heads=2, key_value_size=4).call(context, x)
  assert y.shape == x.shape and y.dtype == HALF


@pytest.mark.parametrize("wrong", [3, None, "float33", tf.constant(1.0)])
def test_what_is_no_dtype_is_refused(wrong):
  with pytest.raises(mtf.errors.DTypeError, match=r"must be a tf.DType or an mtf.VariableDType"):
    convert_to_variable_dtype(wrong)
