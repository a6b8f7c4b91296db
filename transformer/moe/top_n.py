"""Routers that send each token to its best two, or n, experts (Shazeer et al., 2017; GShard)."""

from __future__ import annotations

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.moe.router import RouterCall
from mesh_tensorflow.transformer.moe.routing import Routing, TokenRouting

_POLICIES = ("all", "none", "threshold", "random")


def top_2_routing(call: RouterCall) -> tuple[Routing, mtf.Tensor]:
  """Each token goes to its two best experts; gates are normalized to a sum of 1.

  The second expert is subject to `second_policy_train/eval`. Slots are taken by all first choices,
  then by second ones, each in the order of tokens. A token of importance 0.5 has only a second
  choice: its best expert.

  Args:
    call: a `RouterCall`.

  Returns:
    (routing, auxiliary loss).

  Raises:
    ConfigError: the second policy is none of the known ones.
  """
  experts = call.experts_dim
  logits = call.logits()
  gates = mtf.softmax(logits, experts)
  gate_1, index_1 = mtf.top_1(gates, experts)
  chosen_1 = call.where_first(mtf.one_hot(index_1, experts))
  gate_1 = call.where_first(gate_1)
  # Where there is no first choice (importance 0.5), the best expert is the second choice.
  others = gates * (1.0 - chosen_1)
  gate_2, index_2 = mtf.top_1(others, experts)
  chosen_2 = call.where_any(mtf.one_hot(index_2, experts))
  total = gate_1 + gate_2 + 1e-9
  gate_1 /= total
  gate_2 /= total
  loss = masked_before_means_loss(call, chosen_1, call.where_first(gates))
  if call.hparam("use_second_place_loss"):
    loss += 0.5 * _second_place_loss(call, chosen_2, others)
  # After the loss: a choice that is given up still says where the router wanted to go.
  chosen_2 = _apply_second_policy(call, gate_2, chosen_2)
  slot_1, kept_1, taken = call.first_come(chosen_1)
  slot_2, kept_2, _ = call.first_come(chosen_2, taken)
  choices = [(index_1, slot_1, gate_1 * kept_1), (index_2, slot_2, gate_2 * kept_2)]
  routing = TokenRouting(call.token_dims, experts, call.capacity_dim, choices)
  return routing, call.total_loss(loss, logits)


def top_n_routing(call: RouterCall) -> tuple[Routing, mtf.Tensor]:
  """Each token goes to its `top_n_num_experts_per_token` best experts.

  As `top_2_routing`; with n = 1 the gate is the probability itself. All choices but the first are
  subject to the second policy.

  Args:
    call: a `RouterCall`.

  Returns:
    (routing, auxiliary loss).

  Raises:
    ConfigError: the second policy is none of the known ones; n is not between 1 and the number of
      experts, or it is 1 with `use_second_place_loss`.
  """
  experts, n = call.experts_dim, call.hparam("top_n_num_experts_per_token")
  if not 1 <= n <= experts.size:
    raise errors.ConfigError(
      f"{call.name}: top_n_num_experts_per_token must be 1 to {experts.size}, the number of "
      f"experts, got {n}"
    )
  logits = call.logits()
  gates = mtf.softmax(logits, experts)
  remaining, chosen, picked = gates, [], []
  for k in range(n):
    gate, index = mtf.top_1(remaining, experts)
    chosen.append(call.where_any(mtf.one_hot(index, experts)))
    picked.append((index, call.where_any(gate)))
    if k < n - 1:
      remaining *= 1.0 - chosen[-1]
    if k == 0:
      others = remaining
  if n > 1:
    total = mtf.add_n([gate for _, gate in picked]) + 1e-9
    # Padding has gates of 0, which the 1e-9 keeps from being 0 / 0.
    picked = [(index, gate / total) for index, gate in picked]
  loss = masked_before_means_loss(call, chosen[0], call.where_first(gates))
  if call.hparam("use_second_place_loss"):
    if n == 1:
      raise errors.ConfigError(
        f"{call.name}: use_second_place_loss needs top_n_num_experts_per_token of at least 2, got 1"
      )
    loss += 0.5 * _second_place_loss(call, chosen[1], others)
  choices, taken = [], None
  for k, (index, gate) in enumerate(picked):
    if k:
      chosen[k] = _apply_second_policy(call, gate, chosen[k])
    slot, kept, taken = call.first_come(chosen[k], taken)
    choices.append((index, slot, gate * kept))
  routing = TokenRouting(call.token_dims, experts, call.capacity_dim, choices)
  return routing, call.total_loss(loss, logits)


def masked_before_means_loss(call: RouterCall, chosen: mtf.Tensor, gates: mtf.Tensor) -> mtf.Tensor:
  """The balance loss: experts squared times the mean of (mean gate) * (fraction of choices).

  Args:
    call: the `RouterCall`.
    chosen: float32 `[<token dims>, <experts>]`: 1 for the chosen expert, 0 at padding.
    gates: float32 `[<token dims>, <experts>]`: a differentiable stand-in, 0 at padding.
  """
  # Counting is not differentiable; the mean gate, which is, stands in for one of the factors.
  density = mtf.reduce_mean(chosen, reduced_dim=call.group_dim)
  density_proxy = mtf.reduce_mean(gates, reduced_dim=call.group_dim)
  # Both are 1 / experts where tokens are spread evenly: then the loss is 1, however many there are.
  return mtf.reduce_mean(density_proxy * density) * float(call.experts_dim.size**2)


def _second_place_loss(call: RouterCall, chosen: mtf.Tensor, others: mtf.Tensor) -> mtf.Tensor:
  """The balance loss of second choices among the experts that were not first."""
  normalized = others / (mtf.reduce_sum(others, reduced_dim=call.experts_dim) + 1e-9)
  return masked_before_means_loss(call, chosen, normalized)


def _apply_second_policy(call: RouterCall, gate: mtf.Tensor, chosen: mtf.Tensor) -> mtf.Tensor:
  """`chosen` without the choices that the second policy gives up.

  Args:
    call: the `RouterCall`.
    gate: float32 of the token dims: normalized.
    chosen: float32 `[<token dims>, <experts>]`.
  """
  policy = call.hparam_of_mode("second_policy")
  threshold = call.hparam_of_mode("second_threshold")
  if policy == "all":
    return chosen
  if policy == "none":
    return mtf.zeros_like(chosen)
  if policy == "threshold":
    return chosen * mtf.cast(mtf.greater(gate, threshold), chosen.dtype)
  if policy == "random":
    # GShard's: a second expert with a small gate adds little, and its slot may serve another token.
    drawn = mtf.random_uniform(gate.mesh, gate.shape, dtype=tf.float32)
    return chosen * mtf.cast(mtf.less(drawn, gate * (1.0 / max(threshold, 1e-9))), chosen.dtype)
  mode = "train" if call.train else "eval"
  raise errors.ConfigError(
    f"{call.name}: second_policy_{mode} {policy!r} is none of {', '.join(_POLICIES)}"
  )
