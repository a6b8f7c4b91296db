"""The benchmark model in plain JAX: one jitted function for the whole step.

On a mesh the weights that `ours.LAYOUT` splits are given a `NamedSharding`, the batch another one,
and XLA's partitioner does the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import mesh_tensorflow as mtf
from benchmarks import sizes
from benchmarks.sizes import Size

try:
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding, PartitionSpec
except ImportError:
  jax = None


def make_step(size: Size, seed: int = 0, mesh_shape: str = "") -> Callable[[np.ndarray], Any]:
  """Returns a function that runs one training step and returns the loss before the update.

  Args:
    size: the size of model and batch.
    seed: the seed of the initial weights.
    mesh_shape: such as "batch:2,model:2", of virtual CPU devices; "" is one device.

  Returns:
    A callable from int32 tokens [batch, length] to a scalar array.

  Raises:
    ImportError: JAX is not installed.
  """
  if jax is None:
    raise ImportError("benchmarks.jax_gpt needs jax, which is not installed")
  dims = mtf.convert_to_shape(mesh_shape).dims
  if dims:
    jax.config.update("jax_num_cpu_devices", mtf.convert_to_shape(mesh_shape).size)
  names, lengths = [d.name for d in dims] or ["batch"], [d.size for d in dims] or [1]
  mesh = jax.make_mesh(lengths, names, axis_types=(AxisType.Auto,) * len(names))

  def put(value: Any, *axes: str | None) -> Any:
    known = [axis if axis in mesh.axis_names else None for axis in axes]
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*known)))

  def placed(name: str, value: np.ndarray) -> Any:
    axes: list[str | None] = [None] * value.ndim
    if (weight := name.split("/")[-1]) in sizes.MODEL_AXIS:
      axes[sizes.MODEL_AXIS[weight]] = "model"
    return put(value, *axes)

  values = sizes.initial_values(size, seed)
  params = {name: placed(name, value) for name, value in values.items()}
  zeros = [{n: placed(n, np.zeros_like(v)) for n, v in values.items()} for _ in range(2)]
  state = (params, *zeros)
  step = jax.jit(functools.partial(_train_step, size), donate_argnums=0)

  def train_step(tokens: np.ndarray) -> Any:
    nonlocal state
    loss, state = step(state, put(tokens, "batch", None))
    return loss

  return train_step


def _train_step(size: Size, state: tuple, tokens: Any) -> tuple:
  """Adam without bias correction: v -= learning_rate * m / (sqrt(v) + epsilon)."""
  params, means, squares = state
  loss, grads = jax.value_and_grad(functools.partial(_loss, size))(params, tokens)
  mean = jax.tree.map(lambda m, g: sizes.BETA1 * m + (1 - sizes.BETA1) * g, means, grads)
  square = jax.tree.map(lambda v, g: sizes.BETA2 * v + (1 - sizes.BETA2) * g * g, squares, grads)
  params = jax.tree.map(
    lambda p, m, v: p - sizes.LEARNING_RATE * m / (jnp.sqrt(v) + sizes.ADAM_EPSILON),
    params,
    mean,
    square,
  )
  return loss, (params, mean, square)


def _loss(size: Size, params: dict[str, Any], tokens: Any) -> Any:
  """The mean over positions of cross entropy and z-loss, zero for padding targets."""
  inputs = jnp.pad(tokens[:, :-1], [[0, 0], [1, 0]])
  x = params["embedding"][inputs] + params["positions"]
  mask = jnp.where(jnp.tri(size.length, dtype=bool), 0.0, -1e9)
  for i in range(size.layers):
    weights = {n: params[f"block_{i}/{n}"] for n in ("q", "k", "v", "o", "wi", "wo")}
    y = _rms_norm(x, params[f"block_{i}/attention_scale"])
    x += _attention(size, weights, y, mask)
    y = _rms_norm(x, params[f"block_{i}/ffn_scale"])
    x += jax.nn.relu(y @ weights["wi"]) @ weights["wo"]
  x = _rms_norm(x, params["final_scale"]) * size.d_model**-0.5
  logits = x @ params["embedding"].T
  log_z = jax.nn.logsumexp(logits, axis=-1)
  picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
  losses = log_z - picked + sizes.Z_LOSS * jnp.square(log_z)
  return jnp.sum(losses * (tokens > 0)) / size.positions


def _attention(size: Size, weights: dict[str, Any], x: Any, mask: Any) -> Any:
  heads = [size.batch, size.length, size.heads, size.d_kv]
  q, k, v = ((x @ weights[name]).reshape(heads) for name in "qkv")
  probabilities = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + mask)
  y = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)
  return y.reshape([*heads[:2], -1]) @ weights["o"]


def _rms_norm(x: Any, scale: Any) -> Any:
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(mean_square + sizes.NORM_EPSILON) * scale
