"""Routers in which experts choose among tokens, rather than take them as they come."""

from __future__ import annotations

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.moe.router import RouterCall
from mesh_tensorflow.transformer.moe.routing import ExpertRouting, Routing, scatter_add
from mesh_tensorflow.transformer.moe.switch import one_expert


def switch_max_routing(call: RouterCall) -> tuple[Routing, mtf.Tensor]:
  """Like `switch_routing`, but experts take those tokens that have the highest gates.

  Args:
    call: a `RouterCall`.

  Returns:
    (routing, auxiliary loss).

  Raises:
    ConfigError: the switch policy is none of the known ones.
  """
  _, gate, chosen, loss = one_expert(call)
  gates, tokens = top_tokens(call, chosen * gate)
  # Slots for which there are no more tokens of this choice.
  filled = mtf.to_int32(mtf.not_equal(gates, 0.0))
  tokens = (tokens + 1) * filled - 1
  routing = ExpertRouting(call.token_dims, call.experts_dim, call.capacity_dim, tokens, gates)
  return routing, loss


def expert_selection_routing(
  call: RouterCall, normalize_by_num_experts_routed: bool = True
) -> tuple[Routing, mtf.Tensor]:
  """Each expert takes the tokens of a group that it likes most; its gates are a softmax over them.

  Args:
    call: a `RouterCall`.
    normalize_by_num_experts_routed: whether the gates of a token are divided by the number of
      slots it got.

  Returns:
    (routing, auxiliary loss).
  """
  experts, group = call.experts_dim, call.group_dim
  logits = call.logits(call.perturbed_inputs(call.hparam_of_mode("switch_policy")))
  counted = call.is_first()
  if call.importance is not None:
    # Before the softmax over tokens, in which padding would take a share from the others.
    logits += mtf.cast(mtf.equal(call.importance, 0.0), logits.dtype) * -1e9
  scores = mtf.softmax(logits, group)
  # Tokens that no expert likes, or all do, are what the loss is about.
  liked = mtf.reduce_mean(scores, reduced_dim=experts)
  if counted is None or call.importance is None:
    # Times the size once more below: 1 where all tokens are liked alike, whatever their number.
    loss = mtf.reduce_mean(mtf.square(liked)) * float(group.size)
  else:
    number = mtf.reduce_sum(mtf.cast(call.importance, tf.float32), reduced_dim=group)
    loss = mtf.reduce_mean(mtf.square(liked * counted) * number)
  loss = call.total_loss(loss * float(group.size), logits)
  gates, tokens = top_tokens(call, scores)
  if normalize_by_num_experts_routed:
    slots_of_token = scatter_add(
      mtf.ones_like(gates), tokens, mtf.Shape(call.token_dims), call.group_dim
    )
    slots_of_token = mtf.gather(slots_of_token, tokens, call.group_dim)
    # Empty slots have no token, whose count would be 0.
    gates *= mtf.reciprocal(mtf.maximum(slots_of_token, 1.0))
  routing = ExpertRouting(call.token_dims, experts, call.capacity_dim, tokens, gates)
  return routing, loss


def top_tokens(call: RouterCall, scores: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
  """For each expert the tokens of a group with the highest scores, as many as it has slots.

  Args:
    call: the `RouterCall`.
    scores: `[<token dims>, <experts>]`.

  Returns:
    (scores, tokens): both `[<batch dims>, <experts>, <slots>]`; 0 and -1 if there are fewer tokens
    than slots.
  """
  capacity = call.capacity_dim
  k_dim = mtf.Dimension(capacity.name, min(capacity.size, call.group_dim.size))
  best, tokens = mtf.top_k(scores, call.group_dim, k_dim)
  if k_dim != capacity:
    missing = [0, capacity.size - k_dim.size]
    # Padding is 0: tokens are moved up by one for it, so that they become -1 where there are none.
    best = mtf.pad(best, missing, capacity.name)
    tokens = mtf.pad(tokens + 1, missing, capacity.name) - 1
  return best, tokens
