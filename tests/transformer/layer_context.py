"""Contexts in which a layer is called alone."""

from __future__ import annotations

import types
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer

FLOATS = mtf.VariableDType()


def make_context(
  x: mtf.Tensor,
  causal: bool = True,
  mode: str = "train",
  layout: Any = None,
  mesh_shape: Any = None,
  **kwargs: Any,
) -> transformer.Context:
  """A context for x, `[batch, length, d_model]`."""
  *batch_dims, length, model_dim = x.shape.dims
  model = types.SimpleNamespace(
    model_dim=model_dim,
    ensemble_dim=None,
    ensemble_dims=[],
    layout=layout,
    mesh_shape=mesh_shape,
    fully_autoregressive=causal,
    input_vocab_size_unpadded=11,
  )
  position = mtf.range(x.mesh, length, tf.int32)
  if causal:
    kwargs = dict(read_priority=position, write_priority=position) | kwargs
  kwargs = dict(position=position, position_is_default=True, losses=[]) | kwargs
  return transformer.Context(model, x.mesh, batch_dims, length, FLOATS, mode=mode, **kwargs)
