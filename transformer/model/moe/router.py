"""Routers of a mixture of experts: of a `RouterCall` they make (routing, auxiliary loss)."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.model.context import TransformerLayer
from mesh_tensorflow.transformer.model.moe.hparams import hparam, hparam_of_mode
from mesh_tensorflow.transformer.model.moe.routing import (
  ExpertRouting,
  Routing,
  TokenRouting,
  scatter_add,
)
from mesh_tensorflow.transformer.model.step_sums import StepSum


def summarize_routing(
  name: str, routing: Routing, loss: mtf.Tensor, importance: mtf.Tensor | None
) -> None:
  """Reports statistics of a router through `mtf.scalar_summary`.

  `<name>/aux_loss`; `<name>/fraction_routed`, the fraction of tokens that got a slot;
  `<name>/expert_gate`, the mean gate of the slots in use; `<name>/experts/<i>`, the fraction of
  them that are expert i's.

  Args:
    name: of the router.
    routing: its decision.
    loss: its auxiliary loss, a scalar.
    importance: 0 for padding, of the dims of tokens; or None.
  """
  # Watching costs no backward pass.
  gates = mtf.stop_gradient(routing.gates_of_slots())
  used = mtf.cast(mtf.greater(gates, 0.0), tf.float32)
  of_experts = mtf.reduce_sum(used, output_shape=[routing.experts_dim])
  number = mtf.maximum(mtf.reduce_sum(of_experts), 1.0)
  tokens = mtf.Shape(routing.token_dims)
  # Counted by slots, of which a token may have several.
  slots_of_token = scatter_add(used, routing.token_of_slot(), tokens, routing.group_dim)
  routed = mtf.reduce_sum(mtf.cast(mtf.greater(slots_of_token, 0.0), tf.float32))
  if importance is None:
    fraction_routed = routed * (1.0 / tokens.size)
  else:
    counted = mtf.reduce_sum(mtf.cast(mtf.greater(importance, 0.0), tf.float32))
    fraction_routed = routed / mtf.maximum(counted, 1.0)
  mtf.scalar_summary(f"{name}/aux_loss", mtf.stop_gradient(loss))
  mtf.scalar_summary(f"{name}/fraction_routed", fraction_routed)
  mtf.scalar_summary(f"{name}/expert_gate", mtf.reduce_sum(gates) / number)
  for i, fraction in enumerate(mtf.unstack(of_experts / number, routing.experts_dim)):
    mtf.scalar_summary(f"{name}/experts/{i}", fraction)


# Added to logits that must not be chosen. Finite: it is multiplied by masks, and 0 times infinity
# is no number.
_NEVER = -1e9


@dataclasses.dataclass(frozen=True)
class RouterCall:
  """The arguments of one call of a router.

  Attributes:
    inputs: `[<batch dims>, <group dim>, d_model]`.
    outer_expert_dims: dimensions of inputs along which each index has a router of its own.
    experts_dim: the experts to choose among; not split.
    capacity_dim: the slots of an expert for a group.
    hparams: an object with `moe_` attributes.
    train: whether the layer is being trained.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    importance: of the dims of tokens: 1 for tokens, 0 for padding, 0.5 for tokens of second
      importance (in the inner level of two); None: all are 1.
    name: scope of the variables.
    num_microbatches: how many of such calls make a training step; or None.
    token_embeddings: of the dims of inputs, for `word_embed_mode`; or None.
    loads: list to which a router appends the tokens of experts, if these change its variables after
      the step; or None.
  """

  inputs: mtf.Tensor
  outer_expert_dims: Sequence[mtf.Dimension] | None
  experts_dim: mtf.Dimension
  capacity_dim: mtf.Dimension
  hparams: Any
  train: bool
  variable_dtype: mtf.VariableDType | tf.DType
  importance: mtf.Tensor | None
  name: str
  num_microbatches: int | None
  token_embeddings: mtf.Tensor | None
  loads: list[StepSum] | None = None

  @property
  def token_dims(self) -> list[mtf.Dimension]:
    dims: list[mtf.Dimension] = self.inputs.shape.dims[:-1]
    return dims

  @property
  def group_dim(self) -> mtf.Dimension:
    return self.inputs.shape.dims[-2]

  def hparam(self, name: str) -> Any:
    return hparam(self.hparams, name)

  def hparam_of_mode(self, name: str) -> Any:
    return hparam_of_mode(self.hparams, name, self.train)

  # ------------------------------------------------------------------ padding

  def where_first(self, x: mtf.Tensor) -> mtf.Tensor:
    """x where the importance is 1, else 0."""
    if self.importance is None:
      return x
    return x * mtf.cast(mtf.equal(self.importance, 1.0), x.dtype)

  def where_any(self, x: mtf.Tensor) -> mtf.Tensor:
    """x where the importance is not 0, else 0."""
    if self.importance is None:
      return x
    return x * mtf.cast(mtf.greater(self.importance, 0.0), x.dtype)

  def is_first(self) -> mtf.Tensor | None:
    """float32: 1 where the importance is 1, else 0; None if it is 1 everywhere."""
    if self.importance is None:
      return None
    return mtf.cast(mtf.equal(self.importance, 1.0), tf.float32)

  # ------------------------------------------------------------------- logits

  def perturbed_inputs(self, policy: str) -> mtf.Tensor:
    """The inputs as float32, in training with noise as the policy says."""
    # Routers compute in float32 whatever the activations are ("selective precision", Fedus et al.,
    # 2021, section 2.4): an exponential makes much of the rounding of bfloat16.
    x = mtf.cast(self.inputs, tf.float32)
    if policy == "input_dropout":
      return mtf.dropout(x, self.train, keep_prob=1.0 - self.hparam("switch_dropout"))
    if policy == "input_jitter" and self.train:
      return mtf.layers.multiplicative_jitter(x, self.hparam("switch_jitter"))
    return x

  def logits(self, inputs: mtf.Tensor | None = None) -> mtf.Tensor:
    """float32 `[<token dims>, <experts>]`; variable `<name>/kernel`.

    Args:
      inputs: float32, in place of the inputs.

    Raises:
      ConfigError: the hyperparameter `word_embed_mode` is none of the known ones, or there are no
        token embeddings.
    """
    x = mtf.cast(self.inputs, tf.float32) if inputs is None else inputs
    x = self._with_token_embeddings(x)
    return mtf.layers.dense(
      x,
      self.experts_dim,
      reduced_dims=x.shape.dims[-1:],
      expert_dims=list(self.outer_expert_dims or []),
      use_bias=False,
      variable_dtype=self.variable_dtype,
      name=self.name,
    )

  def _with_token_embeddings(self, x: mtf.Tensor) -> mtf.Tensor:
    mode = self.hparam("word_embed_mode")
    if mode is None:
      return x
    known = ("concat", "concat_stop_grad", "add", "add_stop_grad", "embed_only")
    if mode not in known:
      raise errors.ConfigError(
        f"{self.name}: word_embed_mode {mode!r} is not None or one of {', '.join(known)}"
      )
    if self.token_embeddings is None:
      raise errors.ConfigError(
        f"{self.name}: word_embed_mode {mode!r} needs the embeddings of the tokens, which the "
        "layer does not get here"
      )
    # Their table is trained through the router, too, if the gradient is not stopped.
    embeddings = mtf.cast(self.token_embeddings, tf.float32)
    if mode.endswith("stop_grad"):
      embeddings = mtf.stop_gradient(embeddings)
    if mode.startswith("concat"):
      return mtf.concat([x, embeddings], x.shape.dims[-1].name)
    return embeddings if mode == "embed_only" else x + embeddings

  def away_from_the_top(self, logits: mtf.Tensor) -> mtf.Tensor:
    """In training, with a probability for each token, logits that exclude its best expert.

    Hyperparameters: `use_second_place_expert_prob`, the probability, or None; and
    `use_second_place_expert_prob_temp`: the expert is drawn from the others at this temperature;
    None: it is the second best.
    """
    probability = self.hparam("use_second_place_expert_prob")
    if not self.train or probability is None:
      return logits
    tokens = logits.shape - self.experts_dim
    use = mtf.less(mtf.random_uniform(logits.mesh, tokens, dtype=tf.float32), probability)
    use = mtf.cast(use, logits.dtype)
    top = mtf.one_hot(mtf.argmax(logits, self.experts_dim), self.experts_dim, dtype=logits.dtype)
    others = logits + top * use * _NEVER
    temperature = self.hparam("use_second_place_expert_prob_temp")
    if temperature is None:
      return others
    drawn = mtf.sample_with_temperature(others, self.experts_dim, temperature)
    drawn = mtf.one_hot(drawn, self.experts_dim, dtype=logits.dtype)
    return others + (1.0 - drawn) * use * _NEVER

  # ------------------------------------------------------------------- losses

  def total_loss(self, balance_loss: mtf.Tensor, logits: mtf.Tensor) -> mtf.Tensor:
    """The balance loss divided by the number of microbatches; in training with the z-loss."""
    # The gradients of microbatches are added up: each has its share of the loss.
    if self.num_microbatches and self.num_microbatches > 1:
      balance_loss *= 1.0 / self.num_microbatches
    z_loss = self.hparam("z_loss")
    if not self.train or z_loss is None:
      return balance_loss
    loss = router_z_loss(logits, self.experts_dim, self.num_microbatches, self.importance)
    return balance_loss + loss * float(z_loss)

  def masked_after_means_loss(self, chosen: mtf.Tensor, gates: mtf.Tensor) -> mtf.Tensor:
    """The balance loss of the switch family (Fedus et al., 2021, equation 4).

    The mean over groups and experts of (fraction of the group that chose the expert) times (mean
    gate of the expert), times experts squared. Padding counts in both means; the loss of a group
    is multiplied by its fraction of tokens that are not padding.

    Args:
      chosen: float32 `[<token dims>, ..., <experts>]`, 1 for the chosen expert.
      gates: float32 `[<token dims>, <experts>]`.
    """
    # Choices have no gradient: the router learns to balance through the mean gates alone.
    density = mtf.reduce_mean(chosen, reduced_dim=self.group_dim)
    product = density * mtf.reduce_mean(gates, reduced_dim=self.group_dim)
    counted = self.is_first()
    if counted is not None:
      product *= mtf.reduce_mean(counted, reduced_dim=self.group_dim)
    return mtf.reduce_mean(product) * float(self.experts_dim.size**2)

  # ----------------------------------------------------------------- capacity

  def first_come(
    self, chosen: mtf.Tensor, taken: mtf.Tensor | None = None
  ) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Gives tokens the slots of the experts they chose, in their order, while there are some.

    Args:
      chosen: float32 `[<token dims>, <experts>]`: 1 for the chosen expert; 0 in a row without a
        choice.
      taken: float32 `[<batch dims>, <experts>]`: slots taken before; None: none.

    Returns:
      (slot, kept, taken): float32 of the token dims, the number of the slot; float32 of the token
      dims, 1 if there was one; slots taken after it.
    """
    before = mtf.cumsum(chosen, self.group_dim, exclusive=True)
    if taken is not None:
      before += taken
    slot = mtf.reduce_sum(before * chosen, reduced_dim=self.experts_dim)
    # The slot of a token without a choice is 0, too, which may be another's.
    has_choice = mtf.reduce_sum(chosen, reduced_dim=self.experts_dim)
    kept = has_choice * mtf.cast(mtf.less(slot, float(self.capacity_dim.size)), tf.float32)
    # Only what was kept takes slots: choices made after these begin behind them.
    now = mtf.einsum([chosen, kept], output_shape=before.shape - self.group_dim)
    return slot, kept, now if taken is None else taken + now


def router_z_loss(
  logits: mtf.Tensor,
  experts_dim: mtf.Dimension,
  num_microbatches: int | None,
  importance: mtf.Tensor | None = None,
) -> mtf.Tensor:
  """Mean over tokens of the square of the logits' partition function (Zoph et al., 2022).

  Args:
    logits: `[<token dims>, <experts>]`.
    experts_dim: the experts.
    num_microbatches: the loss is divided by it; None: 1.
    importance: of the token dims; only tokens of importance 1 count. None: all.
  """
  square = mtf.square(mtf.reduce_logsumexp(logits, experts_dim))
  if importance is None:
    loss = mtf.reduce_mean(square)
  else:
    counted = mtf.cast(mtf.equal(importance, 1.0), square.dtype)
    # A batch may be padding only.
    number = mtf.maximum(mtf.reduce_sum(counted), 1.0)
    loss = mtf.reduce_sum(square * counted) / number
  return loss * (1.0 / (num_microbatches or 1))


_POLICIES = ("argmax", "input_dropout", "input_jitter", "sample")


def switch_routing(call: RouterCall) -> tuple[Routing, mtf.Tensor]:
  """Each token goes to one expert: the best, or one drawn, as `switch_policy_train/eval` says.

  The gate is the router's probability of the expert. Slots are taken in the order of tokens.

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


_SECOND_POLICIES = ("all", "none", "threshold", "random")


def top_2_routing(call: RouterCall) -> tuple[Routing, mtf.Tensor]:
  """Each token goes to its two best experts; gates are normalized to a sum of 1.

  The second expert is subject to `second_policy_train/eval`. Slots are taken by all first choices,
  then by second ones, each in the order of tokens. A token of importance 0.5 has only a second
  choice: its best expert.

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
    f"{call.name}: second_policy_{mode} {policy!r} is none of {', '.join(_SECOND_POLICIES)}"
  )


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


def switch_max_routing(call: RouterCall) -> tuple[Routing, mtf.Tensor]:
  """Like `switch_routing`, but experts take those tokens that have the highest gates.

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


def refuse_noncausal(layer: TransformerLayer, gating: str, allowed: bool, model: object) -> None:
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
    hparams: object,
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
  hparams: object,
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
