"""Routers that send each token to one expert (Fedus et al., 2021), and what was made of them."""

from __future__ import annotations

import functools
import operator

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.moe.router import RouterCall
from mesh_tensorflow.transformer.moe.routing import Routing, TokenRouting

_POLICIES = ("argmax", "input_dropout", "input_jitter", "sample")


def switch_routing(call: RouterCall) -> tuple[Routing, mtf.Tensor]:
  """Each token goes to one expert: the best, or one drawn, as `switch_policy_train/eval` says.

  The gate is the router's probability of the expert. Slots are taken in the order of tokens.

  Args:
    call: a `RouterCall`.

  Returns:
    (routing, auxiliary loss).

  Raises:
    ConfigError: the switch policy is none of the known ones.
  """
  index, gate, chosen, loss = one_expert(call)
  slot, kept, _ = call.first_come(chosen)
  routing = TokenRouting(
    call.token_dims, call.experts_dim, call.capacity_dim, [(index, slot, gate * kept)]
  )
  return routing, loss


def ntlb_routing(call: RouterCall) -> tuple[Routing, mtf.Tensor]:
  """No token left behind: a token that finds no slot goes on to its next best expert.

  Each has `ntlb_top_k` tries (at most the number of experts), and is routed at most once.

  Args:
    call: a `RouterCall`.

  Returns:
    (routing, auxiliary loss).
  """
  experts = call.experts_dim
  policy = call.hparam_of_mode("switch_policy")
  inputs = call.perturbed_inputs("input_jitter" if policy == "input_jitter" else "argmax")
  logits = call.away_from_the_top(call.logits(inputs))
  gates = mtf.softmax(logits, experts)
  k_dim = mtf.Dimension("k", min(call.hparam("ntlb_top_k"), experts.size))
  top_gates, indices = mtf.top_k(gates, experts, k_dim)
  tries = mtf.one_hot(indices, experts)
  # Of all tries, needed or not: which of them a token makes depends on the slots.
  loss = call.total_loss(call.masked_after_means_loss(tries, gates), logits)
  tries, top_gates = call.where_first(tries), call.where_first(top_gates)
  each_try = zip(*(mtf.unstack(x, k_dim) for x in (tries, indices, top_gates)))
  left = taken = None
  routed: list[tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]] = []
  for chosen, index, gate in each_try:
    if left is not None:
      chosen *= left
    slot, kept, taken = call.first_come(chosen, taken)
    # Tokens that have found a slot make no more tries, and take no more slots.
    left = 1.0 - kept if left is None else left - kept
    routed.append((index * mtf.to_int32(kept), slot * kept, gate * kept))
  # Sums of tries, of which all but one are 0 for a token: it is routed at most once.
  index, slot, gate = (functools.reduce(operator.add, tries) for tries in zip(*routed))
  routing = TokenRouting(call.token_dims, experts, call.capacity_dim, [(index, slot, gate)])
  return routing, loss


def one_expert(
  call: RouterCall,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor, mtf.Tensor]:
  """One expert for each token: the best, or one drawn, as `switch_policy_train/eval` says.

  Args:
    call: a `RouterCall`.

  Returns:
    (index, gate, chosen, loss): index int32 and gate float32 of the token dims, the gate 0 at
    padding; chosen float32 `[<token dims>, <experts>]`, 0 at padding; the auxiliary loss.

  Raises:
    ConfigError: the switch policy is none of the known ones.
  """
  experts = call.experts_dim
  policy = call.hparam_of_mode("switch_policy")
  if policy not in _POLICIES:
    mode = "train" if call.train else "eval"
    raise errors.ConfigError(
      f"{call.name}: switch_policy_{mode} {policy!r} is none of {', '.join(_POLICIES)}"
    )
  logits = call.away_from_the_top(call.logits(call.perturbed_inputs(policy)))
  gates = mtf.softmax(logits, experts)
  # The gate is the probability at temperature 1 in any case: it scales the expert's output.
  if policy == "sample":
    index = mtf.sample_with_temperature(
      logits, experts, temperature=call.hparam("switch_temperature")
    )
    chosen = mtf.one_hot(index, experts)
    gate = mtf.reduce_sum(gates * chosen, reduced_dim=experts)
  else:
    gate, index = mtf.top_1(gates, experts)
    chosen = mtf.one_hot(index, experts)
  loss = call.total_loss(call.masked_after_means_loss(chosen, gates), logits)
  return index, call.where_first(gate), call.where_first(chosen), loss
