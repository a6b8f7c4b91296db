"""The router of today's mixtures of experts: k best experts, gates of sum 1, balance by a bias."""

from __future__ import annotations

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.models.step_sums import StepSum
from mesh_tensorflow.transformer.moe.router import RouterCall
from mesh_tensorflow.transformer.moe.routing import Routing, TokenRouting
from mesh_tensorflow.transformer.moe.top_n import masked_before_means_loss

_SCORES = ("softmax", "sigmoid")


def top_k_routing(call: RouterCall) -> tuple[Routing, mtf.Tensor]:
  """Each token goes to its `top_n_num_experts_per_token` best experts; all choices are kept.

  Experts are chosen at once by their scores, the softmax or sigmoid of the logits. Gates are the
  scores of those chosen, divided by their sum (`normalize_gates`; of a softmax that is the softmax
  over the chosen, as in Jiang et al., 2024, arXiv:2401.04088), times `gate_scale`. Slots are taken
  by all first choices, then by second ones, each in the order of tokens.

  With `balance_rate` experts are balanced without a loss (Wang et al., 2024, arXiv:2408.15664;
  DeepSeek-AI, 2024, arXiv:2412.19437): a bias for each expert is added to the scores by which
  experts are chosen, not to the gates. After a step of training it goes up by the rate for experts
  that got less than the mean number of tokens, and down by it for those that got more. Variable:
  `<name>/balance_bias` [<experts>], not trained. Without it the loss is that of `top_2_routing`
  over all choices, 1 where experts are used alike.

  Args:
    call: a `RouterCall`.

  Returns:
    (routing, auxiliary loss).

  Raises:
    ConfigError: the number of experts of a token is not between 1 and that of experts, the scores
      are not known, or the rate is not positive.
  """
  experts, k = call.experts_dim, call.hparam("top_n_num_experts_per_token")
  kind, rate = call.hparam("router_scores"), call.hparam("balance_rate")
  _check(call, k, kind, rate)
  logits = call.logits()
  scores = mtf.softmax(logits, experts) if kind == "softmax" else mtf.sigmoid(logits)
  bias = None if rate is None else _balance_bias(call)
  preferred = scores if bias is None else mtf.add(scores, bias, output_shape=scores.shape)
  k_dim = mtf.Dimension("k", k)
  # Where a token goes has no gradient: it comes through the gates.
  _, indices = mtf.top_k(mtf.stop_gradient(preferred), experts, k_dim)
  choices = mtf.one_hot(indices, experts)
  gates = mtf.einsum([scores, choices], output_shape=indices.shape)
  if call.hparam("normalize_gates"):
    # Sigmoids may all be nearly 0.
    total = mtf.reduce_sum(gates, reduced_dim=k_dim) + 1e-20
    gates = mtf.divide(gates, total, output_shape=gates.shape)
  gates *= float(call.hparam("gate_scale"))
  chosen_k = [call.where_any(x) for x in mtf.unstack(choices, k_dim)]
  all_chosen = mtf.add_n(chosen_k)
  if bias is None:
    shares = scores / mtf.reduce_sum(scores, reduced_dim=experts)
    loss = masked_before_means_loss(call, all_chosen * (1.0 / k), call.where_first(shares))
  else:
    loss = mtf.zeros(logits.mesh, mtf.Shape([]), logits.dtype)
    if call.train and call.loads is not None:
      load = mtf.reduce_sum(mtf.stop_gradient(all_chosen), output_shape=[experts])
      call.loads.append(StepSum(bias, load, rate))
  routed, taken = [], None
  each = zip(chosen_k, mtf.unstack(indices, k_dim), mtf.unstack(gates, k_dim))
  for chosen, index, gate in each:
    slot, kept, taken = call.first_come(chosen, taken)
    routed.append((index, slot, gate * kept))
  routing = TokenRouting(call.token_dims, experts, call.capacity_dim, routed)
  return routing, call.total_loss(loss, logits)


def _balance_bias(call: RouterCall) -> mtf.Tensor:
  """The bias of the experts' scores: float32 whatever activations are, for its steps are small."""
  with mtf.variable_scope(call.name):
    bias: mtf.Tensor = mtf.get_variable(
      call.inputs.mesh,
      "balance_bias",
      mtf.Shape([call.experts_dim]),
      dtype=mtf.VariableDType(tf.float32),
      initializer=tf.zeros_initializer(),
      trainable=False,
    )
  return bias


def _check(call: RouterCall, k: int, kind: str, rate: float | None) -> None:
  experts = call.experts_dim
  if not 1 <= k <= experts.size:
    raise errors.ConfigError(
      f"{call.name}: top_n_num_experts_per_token must be 1 to {experts.size}, the number of "
      f"experts, got {k}"
    )
  if kind not in _SCORES:
    raise errors.ConfigError(f"{call.name}: router_scores {kind!r} is none of {', '.join(_SCORES)}")
  if rate is not None and rate <= 0:
    raise errors.ConfigError(
      f"{call.name}: balance_rate must be positive, or None for a balance loss, got {rate}"
    )
