"""Common parts of all mixture-of-experts routers: logits, noise, losses, capacity."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.models.step_sums import StepSum
from mesh_tensorflow.transformer.moe.hparams import hparam, hparam_of_mode

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
