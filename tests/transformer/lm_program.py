"""A small language model and its values on any mesh, for the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer, transformer_layers

TARGETS = np.array([[9, 2, 3, 4, 1, 0], [7, 1, 0, 0, 0, 0]], np.int32)

# The sublayers of the packaged defaults.
SUBLAYERS = dict(
  sublayers_initial=[transformer.sublayer_dropout],
  sublayers_per_layer=[
    transformer.sublayer_rms_norm,
    transformer.sublayer_call_layer,
    transformer.sublayer_dropout,
    transformer.sublayer_residual,
  ],
  sublayers_final=[transformer.sublayer_rms_norm, transformer.sublayer_dropout],
)


def make_model(
  attention: dict[str, Any] | None = None,
  dense: dict[str, Any] | None = None,
  stack: dict[str, Any] | None = None,
  num_layers: int = 2,
  num_heads: int = 2,
  d_kv: int = 3,
  d_ff: int = 5,
  **kwargs: Any,
) -> transformer.Unitransformer:
  """The language model of the golden values, with changes."""
  stack = SUBLAYERS if stack is None else stack
  layers = [
    [
      transformer_layers.SelfAttention,
      dict(num_heads=num_heads, key_value_size=d_kv) | (attention or {}),
    ],
    [transformer_layers.DenseReluDense, dict(hidden_size=d_ff) | (dense or {})],
  ]
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
    transformer.make_layer_stack(
      layers, lambda made: transformer.LayerStack(made, **stack), num_layers=num_layers
    ),
    **(options | kwargs),
  )


def one_device() -> mtf.PlacementMeshImpl:
  return mtf.PlacementMeshImpl("all:1", "", ["CPU:0"])


def set_golden_weights(store: mtf.VariableStore) -> None:
  """Element j of the n-th variable by name is 0.5 sin(1 + n + 0.7 j), plus 1 in scales."""
  for n, name in enumerate(sorted(s.name for s in store if not s.name.startswith("_"))):
    variable = store[name]
    j = np.arange(variable.shape.size)
    value = 0.5 * np.sin(1 + n + 0.7 * j) + (1.0 if name.endswith("scale") else 0.0)
    variable.assign(value.reshape(variable.shape.to_integer_list).astype(np.float32))


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
  """Runs each operation of an `mtf.function` at once: for a single call that is much faster."""
  tf.config.run_functions_eagerly(True)
  try:
    yield
  finally:
    tf.config.run_functions_eagerly(False)


def run(
  impl: Any,
  program: Callable[..., Any],
  *arrays: np.ndarray,
  names: Sequence[str] = (),
  traced: bool = False,
  **kwargs: Any,
) -> Any:
  """Runs `program(*tensors)` on a mesh; returns NumPy arrays.

  Args:
    impl: the mesh implementation.
    program: takes mtf.Tensors `[batch, length]` and returns a structure of them.
    *arrays: int32 arrays.
    names: of the dimensions, if they are not batch and length.
    traced: whether it becomes a tf.function.
    **kwargs: arguments of the call.
  """
  names = names or ("batch", "length")
  signature = [mtf.TensorSpec(list(zip(names, np.shape(a))), np.asarray(a).dtype) for a in arrays]
  function = mtf.function(impl, input_signature=signature)(program)
  with contextlib.nullcontext() if traced else eagerly():
    result = function(*arrays, **kwargs)
  return tf.nest.map_structure(lambda t: t.numpy() if tf.is_tensor(t) else t, result)


def loss_program(model: transformer.Unitransformer, mode: str = "train", **options: Any) -> Any:
  """A program from targets (and sequence ids) to (loss, logits, squared gradient)."""

  def program(targets, sequence_id=None):
    if sequence_id is None:
      sequence_id = mtf.minimum(targets, 1)
      inputs = transformer.autoregressive_inputs(targets)
    else:
      inputs = transformer.autoregressive_inputs(targets, sequence_id=sequence_id)
    logits, loss = model.call_simple(
      inputs, targets, compute_loss=True, mode=mode, sequence_id=sequence_id, **options
    )
    if mode != "train":
      return loss, logits
    variables = targets.graph.trainable_variables
    grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
    assert all(g is not None for g in grads), [v for v, g in zip(variables, grads) if g is None]
    squared = mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in grads])
    return loss, logits, squared

  return program


def initialize(impl: Any, model: transformer.Unitransformer, targets: np.ndarray = TARGETS) -> Any:
  """Creates the model's variables and returns the store."""
  run(impl, loss_program(model, "eval"), targets)
  return impl.variable_store


def parse(bindings: str) -> None:
  """Parses gin bindings."""
  gin.parse_config(bindings)
