"""The routers of a mixture of experts by name, and as functions that return tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.moe.expert_choice import (
  expert_selection_routing,
  switch_max_routing,
)
from mesh_tensorflow.transformer.moe.router import RouterCall
from mesh_tensorflow.transformer.moe.routing import Routing
from mesh_tensorflow.transformer.moe.switch import ntlb_routing, switch_routing
from mesh_tensorflow.transformer.moe.top_k import top_k_routing
from mesh_tensorflow.transformer.moe.top_n import top_2_routing, top_n_routing

# By the value of `moe_gating`.
ROUTERS: dict[str, Callable[[RouterCall], tuple[Routing, mtf.Tensor]]] = {
  "top_2": top_2_routing,
  "top_n": top_n_routing,
  "switch": switch_routing,
  "ntlb": ntlb_routing,
  "switch_max": switch_max_routing,
  "expert_selection": expert_selection_routing,
  "top_k": top_k_routing,
}
# In these, whether a token gets to an expert depends on all tokens of its group, later ones too.
NONCAUSAL = frozenset({"switch_max", "expert_selection"})


def router(gating: str) -> Callable[[RouterCall], tuple[Routing, mtf.Tensor]]:
  """The router of that name.

  Raises:
    ConfigError: there is none.
  """
  if gating not in ROUTERS:
    raise errors.ConfigError(
      f"mixture of experts: moe_gating {gating!r} is none of {', '.join(ROUTERS)}"
    )
  return ROUTERS[gating]


def refuse_noncausal(layer: Any, gating: str, allowed: bool, model: Any) -> None:
  """Refuses a router in which tokens depend on later ones in an autoregressive model.

  Args:
    layer: the layer of experts.
    gating: its `moe_gating`.
    allowed: its `allow_noncausal`.
    model: the model.

  Raises:
    ConfigError: the model is autoregressive, the router is one of `NONCAUSAL`, and not allowed.
  """
  if allowed or gating not in NONCAUSAL or not getattr(model, "fully_autoregressive", False):
    return
  cls = type(layer).__name__
  raise errors.ConfigError(
    f"layer {layer.name or ''} ({cls}): with moe_gating {gating!r} experts choose among the tokens "
    "of all positions, so that predictions of an autoregressive model depend on later tokens, which"
    f" are not there when it decodes. Take {', '.join(sorted(set(ROUTERS) - NONCAUSAL))}, or"
    f" set {cls}.allow_noncausal = True"
  )


def _as_tensors(
  routed: tuple[Routing, mtf.Tensor], dtype: tf.DType
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
  """(dispatch, combine, loss) of what a router returned."""
  routing, loss = routed
  return *routing.dispatch_and_combine(dtype), mtf.cast(loss, dtype)


def _gating(default_name: str) -> Callable[..., tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]]:
  """A router as a function that returns tensors of tokens x experts x slots."""
  routing_fn = ROUTERS[default_name.removesuffix("_gating")]

  def gating(
    inputs: mtf.Tensor,
    outer_expert_dims: Sequence[mtf.Dimension] | None,
    experts_dim: mtf.Dimension,
    expert_capacity_dim: mtf.Dimension,
    hparams: Any,
    train: bool,
    variable_dtype: mtf.VariableDType | tf.DType,
    importance: mtf.Tensor | None = None,
    name: str = default_name,
    num_microbatches: int | None = None,
    token_embeddings: mtf.Tensor | None = None,
  ) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    call = RouterCall(
      inputs, outer_expert_dims, experts_dim, expert_capacity_dim, hparams, train, variable_dtype,
      importance, name, num_microbatches, token_embeddings,
    )  # fmt: skip
    return _as_tensors(routing_fn(call), inputs.dtype)

  gating.__name__ = f"_{default_name}"
  gating.__doc__ = f"""`{routing_fn.__name__}` as tensors.

  Args: those of `RouterCall`; expert_capacity_dim is its capacity_dim.

  Returns:
    (dispatch, combine, loss), in the dtype of the inputs; see `Routing.dispatch_and_combine`.
  """
  return gating


_top_2_gating = _gating("top_2_gating")
_top_n_gating = _gating("top_n_gating")
_switch_gating = _gating("switch_gating")
_switch_max_gating = _gating("switch_max_gating")


def _ntlb_gating(*args: Any, name: str = "ntlb_gating", **kwargs: Any) -> tuple[mtf.Tensor, ...]:
  """`ntlb_routing` as tensors, with a dimension "k" of size 1 before that of experts."""
  dispatch, combine, loss = _gating("ntlb_gating")(*args, name=name, **kwargs)
  dims = combine.shape.dims
  shape = mtf.Shape([*dims[:-2], mtf.Dimension("k", 1), *dims[-2:]])
  return mtf.reshape(dispatch, shape), mtf.reshape(combine, shape), loss


def _expert_selection_gating(
  inputs: mtf.Tensor,
  outer_expert_dims: Sequence[mtf.Dimension] | None,
  experts_dim: mtf.Dimension,
  group_size_dim: mtf.Dimension,
  expert_capacity_dim: mtf.Dimension,
  hparams: Any,
  train: bool,
  variable_dtype: mtf.VariableDType | tf.DType,
  importance: mtf.Tensor | None = None,
  name: str = "expert_selection_gating",
  num_microbatches: int | None = None,
  normalize_by_num_experts_routed: bool = True,
  token_embeddings: mtf.Tensor | None = None,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
  """`expert_selection_routing` as tensors; see there and `RouterCall` for the arguments."""
  if group_size_dim != inputs.shape.dims[-2]:
    raise errors.ShapeError(
      f"{name}: group_size_dim {group_size_dim} is not the last but one dimension of {inputs}"
    )
  call = RouterCall(
    inputs, outer_expert_dims, experts_dim, expert_capacity_dim, hparams, train, variable_dtype,
    importance, name, num_microbatches, token_embeddings,
  )  # fmt: skip
  routed = expert_selection_routing(
    call, normalize_by_num_experts_routed=normalize_by_num_experts_routed
  )
  return _as_tensors(routed, inputs.dtype)
