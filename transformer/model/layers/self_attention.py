"""Self-attention: of all positions, and of a window of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import (
  BELOW_ONE,
  COUNT,
  COUNT_OR_ZERO,
  affects,
  one_of,
  takes,
)
from mesh_tensorflow.transformer.model import attention, beam_caches
from mesh_tensorflow.transformer.model.attention.bias import (
  length_to_memory_length,
  position_in_sequence,
  relative_attention_bias,
  segments,
  self_attention_bias,
)
from mesh_tensorflow.transformer.model.attention.params import attention_params
from mesh_tensorflow.transformer.model.attention.prompts import scope_component
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer
from mesh_tensorflow.transformer.model.decoding_states import overwrite, write_at
from mesh_tensorflow.transformer.model.dropout import dropout_broadcast_dims

_MODULE = "mesh_tensorflow.transformer.transformer_layers"


@gin.configurable(module=_MODULE)
@affects(training="dropout_rate z_loss_coeff initial_gain")
@takes(
  num_heads=COUNT,
  num_memory_heads=COUNT_OR_ZERO,
  key_value_size=COUNT,
  dropout_rate=BELOW_ONE,
  relative_attention_num_buckets=COUNT,
  attention_func=one_of(["hybrid"]),
)
@dataclasses.dataclass(eq=False, repr=False)
class SelfAttention(TransformerLayer):
  """Multi-head attention of a sequence to itself.

  `call` composes parts that subclasses override: the variables (`make_params`), queries, keys and
  values (`projected`), their positions (`positioned`), the KV cache (`with_earlier`), masks and
  biases (`compute_bias`), the attention function (`attend`), and the output.

  Args:
    num_heads: number of query heads.
    num_memory_heads: number of heads of keys and values (1: multi-query, more: grouped-query
      attention); 0: as many as queries have.
    key_value_size: size of a key and of a value.
    shared_kv: whether keys are the values.
    dropout_rate: rate at which attention weights become 0 in training.
    attention_kwargs: dict of further arguments of `attention.attention`.
    relative_attention_type: None, "bias" (a bias for each head and bucket of relative
      positions), "bias_shared" (the same for all layers of a stack) or "contextual" (computed
      from the query).
    relative_attention_num_buckets: number of buckets.
    attention_func: None, or "hybrid".
    combine_dims: whether the variables are matrices.
    keep_query_heads_dims: whether the output keeps the heads apart.
    fold_scaling_into_initializer: see `attention.AttentionParams`.
    z_loss_coeff: see `attention.attention`.
    use_hyperprompt: whether the network that makes prompts is itself made, from embeddings of task
      and layer; see `attention.make_params_hyperprompt`, else `attention.make_params_mtlprompt`.
    hyperprompt_mtlshare: whether all tasks share that network.
    hyperprompt_length_encoder: number of trained prompts in front of the keys and values of layers
      in the scope `encoder`; None: none.
    hyperprompt_length_decoder: likewise of layers in the scope `decoder`.
    hyperprompt_hidden_dim: hidden size of the network that makes prompts.
    hyperprompt_task_num: number of tasks.
    initial_gain: see `attention.AttentionParams`; `@deepnorm_initial_gain()`, say.
  """

  num_heads: int = 8
  num_memory_heads: int = 0
  key_value_size: int = 128
  shared_kv: bool = False
  dropout_rate: float = 0.0
  attention_kwargs: dict[str, Any] | None = None
  relative_attention_type: str | None = None
  relative_attention_num_buckets: int = 32
  attention_func: str | None = None
  combine_dims: bool = True
  keep_query_heads_dims: bool = False
  fold_scaling_into_initializer: bool = True
  z_loss_coeff: float | None = None
  use_hyperprompt: bool = False
  hyperprompt_mtlshare: bool = False
  hyperprompt_length_encoder: int | None = None
  hyperprompt_length_decoder: int | None = None
  hyperprompt_hidden_dim: int | None = None
  hyperprompt_task_num: int = 8
  initial_gain: float | None = dataclasses.field(default=None, kw_only=True)

  # How many first positions of a sequence are seen from everywhere; see `GroupedQueryAttention`.
  num_sinks = 0
  # Whether there are no queries, but only the dims of the input.
  no_query = False
  # Whether memory may be in any order, as `with_earlier` tells its positions. That of a subclass
  # with an `attend` of its own, which may take an index for a position, only if it says so, too.
  memory_in_any_order = True

  def __init_subclass__(cls, **kwargs: Any) -> None:
    super().__init_subclass__(**kwargs)
    if "attend" in vars(cls) and "memory_in_any_order" not in vars(cls):
      cls.memory_in_any_order = False

  def __post_init__(self) -> None:
    self.attention_kwargs = self.attention_kwargs or {}

  # ------------------------------------------------------- hooks of subclasses

  def layer_output_from_attention_output(
    self, context: Context, attention_output: mtf.Tensor, losses: list[mtf.Tensor] | None
  ) -> mtf.Tensor:
    """Maps the attention output to the layer's output: the identity; for subclasses to override."""
    del context, losses
    return attention_output

  def expected_attention_output_shape(
    self, x: mtf.Tensor, params: attention.AttentionParams
  ) -> mtf.Shape:
    """The dims of the output of attention."""
    if self.keep_query_heads_dims:
      return mtf.Shape(x.shape[:-1] + params.query_heads_dims + x.shape[-1:])
    return x.shape

  def attention_kwargs_from_context(self, context: Context) -> dict[str, Any]:
    """Further arguments of `attention`: dropout."""
    kwargs = dict(self.attention_kwargs or {})
    kwargs["dropout_rate"] = self.dropout_rate if context.train else 0.0
    kwargs.setdefault("dropout_broadcast_dims", dropout_broadcast_dims(context))
    return kwargs

  def make_params(self, context: Context) -> attention.AttentionParams:
    """Creates the variables, or finds them."""
    return attention_params(
      context=context,
      kv_dim=self.kv_dim,
      num_heads=self.num_heads,
      num_memory_heads=self.num_memory_heads,
      shared_kv=self.shared_kv,
      no_query=self.no_query,
      combine_dims=self.combine_dims,
      keep_query_heads_dims=self.keep_query_heads_dims,
      fold_scaling_into_initializer=self.fold_scaling_into_initializer,
      initial_gain=self.initial_gain,
    )

  def min_relative_position(self, context: Context) -> int | None:
    """The relative position of the leftmost memory that is seen, or None."""
    del context
    return None

  def max_relative_position(self, context: Context) -> int | None:
    """The relative position of the rightmost memory that is seen, or None."""
    del context
    return None

  def projected(
    self, context: Context, x: mtf.Tensor, params: attention.AttentionParams
  ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
    """Queries, and keys and values (or one tensor that is both), of the layer's input."""
    return params.compute_q(x), params.keys_and_values(self.as_memory(context, x))

  def positioned(
    self, context: Context, q: mtf.Tensor, memory: list[mtf.Tensor]
  ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
    """Applies position encodings to queries and memory: none here; for subclasses to override.

    Args:
      context: a `Context`.
      q: the queries.
      memory: keys and values of the same positions, or one tensor that is both; the dimension of
        positions may be called `memory_length`.
    """
    del context
    return q, memory

  @property
  def kv_dim(self) -> mtf.Dimension:
    """The dimension of a key, and of a value."""
    return mtf.Dimension("d_kv", self.key_value_size)

  @property
  def attention_fn(self) -> Callable[..., mtf.Tensor]:
    """The attention function; has the signature of `attention.attention`."""
    return attention.hybrid_attention if self.attention_func == "hybrid" else attention.attention

  def attend(
    self,
    context: Context,
    q: mtf.Tensor,
    memory: list[mtf.Tensor],
    memory_length: mtf.Dimension,
    bias: mtf.Tensor | None,
  ) -> mtf.Tensor:
    """Calls the attention function on queries, and on keys and values (or one tensor for both)."""
    return self.attention_fn(
      q,
      memory[0],
      memory[-1],
      memory_length_dim=memory_length,
      key_dim=self.kv_dim,
      value_dim=self.kv_dim,
      bias=bias,
      **self._attention_arguments(context),
    )

  def _attention_arguments(self, context: Context) -> dict[str, Any]:
    return dict(
      context=context, z_loss_coeff=self.z_loss_coeff, **self.attention_kwargs_from_context(context)
    )

  def output(
    self,
    context: Context,
    x: mtf.Tensor,
    params: attention.AttentionParams,
    o: mtf.Tensor,
    losses: list[mtf.Tensor] | None,
  ) -> mtf.Tensor:
    """The layer's output, of what the heads have attended to."""
    shape = self.expected_attention_output_shape(x, params)
    return self.layer_output_from_attention_output(
      context, params.compute_output(o, output_shape=shape), losses
    )

  # ---------------------------------------------------------------- the layer

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`.

    The decoding states are keys and values `[<batch_dims>, memory_length, heads, d_kv]`; the order
    of the last dims that is given is kept.
    """
    params = self.make_params(context)
    q, memory = self.positioned(context, *self.projected(context, x, params))
    memory, memory_position = self.with_earlier(context, memory)
    memory_length = memory[0].shape.get_dim_by_name("memory_length")
    num_prompts = self._num_prompts()
    if num_prompts:
      k, v, memory_position, memory_length = attention.concat_hyper_prompts_kv(
        memory[0],
        memory[-1],
        scope_component(0),
        self.use_hyperprompt,
        memory_length,
        self.hyperprompt_task_num,
        mtf.Shape(params.memory_heads_dims).size,
        self.hyperprompt_hidden_dim,
        self.kv_dim,
        context,
        self.hyperprompt_mtlshare,
        self.dropout_rate,
        num_prompts,
      )
      memory = [k, v]
    bias = self.compute_bias(
      context, memory_position, x, params.query_heads_dims, q, use_prompt_kv=bool(num_prompts)
    )
    o = self.attend(context, q, memory, memory_length, bias)
    return self.output(context, x, params, o, losses)

  def _num_prompts(self) -> int:
    """Number of prompts of a layer in the open variable scope."""
    lengths = {
      "encoder": self.hyperprompt_length_encoder,
      "decoder": self.hyperprompt_length_decoder,
    }
    return lengths.get(scope_component(0)) or 0

  def memory_length(self, context: Context) -> mtf.Dimension:
    """The dimension of what is attended to."""
    return mtf.Dimension("memory_length", context.length_dim.size)

  def rename_length_to_memory_length(self, x: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Calls the length dimension of x `memory_length`."""
    return length_to_memory_length(x, context, self.memory_length(context))

  def as_memory(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """The layer's input, as what keys and values are computed from."""
    # One position is not a sequence yet: `with_earlier` puts it among those before.
    return x if context.mode == "incremental" else self.rename_length_to_memory_length(x, context)

  def with_earlier(
    self, context: Context, memory: list[mtf.Tensor]
  ) -> tuple[list[mtf.Tensor], mtf.Tensor]:
    """Extends memory by the KV cache of earlier positions; returns it with its positions.

    In decoding the result is recorded as the layer's new states, its KV cache.

    Args:
      context: a `Context`.
      memory: tensors with dimension `memory_length`; without it in incremental decoding.

    Returns:
      (the tensors, with dimension `memory_length`; int32 positions along it).
    """
    # Prompts stand before the positions.
    if context.beam_dim is not None and self.memory_in_any_order and not self._num_prompts():
      return self._with_entries_of_all_beams(context, context.beam_dim, memory)
    incremental = context.mode == "incremental"
    memory_length = self.memory_length(context)
    if incremental:
      memory = [
        write_at(old, new, context.position, memory_length)
        for old, new in zip(context.get_states(len(memory)), memory)
      ]
    if incremental or context.mode == "first_part":
      context.record_new_states(memory)
    if incremental:
      return memory, mtf.range(context.mesh, memory_length, tf.int32)
    return memory, self.rename_length_to_memory_length(context.position, context)

  def _with_entries_of_all_beams(
    self, context: Context, beam: mtf.Dimension, memory: list[mtf.Tensor]
  ) -> tuple[list[mtf.Tensor], mtf.Tensor]:
    """`with_earlier` of a KV cache that beams share; see `beam_caches`."""
    if context.mode == "first_part":
      # A search begins with empty sequences.
      context.record_new_states([beam_caches.empty(m, beam) for m in memory])
      return memory, self.rename_length_to_memory_length(context.position, context)
    caches = [
      beam_caches.written(old, new, context.position, beam)
      for old, new in zip(context.get_states(len(memory)), memory)
    ]
    context.record_new_states(caches)
    positions = context.cached(
      ("positions_of_entries", beam),
      lambda: beam_caches.positions(context.mesh, context.length_dim, beam),
    )
    return [beam_caches.joined(cache, beam) for cache in caches], positions

  def compute_bias(
    self,
    context: Context,
    memory_position: mtf.Tensor,
    x: mtf.Tensor,
    heads_dims: list[mtf.Dimension],
    q: mtf.Tensor,
    use_prompt_kv: object = None,
  ) -> mtf.Tensor | None:
    """Computes the bias of the attention logits.

    -1e9 where attention is not allowed, plus the relative bias.

    Args:
      context: a `Context`.
      memory_position: int32 tensor with dimension `memory_length`.
      x: the layer's input.
      heads_dims: dims of query heads.
      q: the queries.
      use_prompt_kv: whether memory begins with prompts.

    Returns:
      A tensor whose dims are among those of the products, or None.

    Raises:
      ConfigError: an unknown relative_attention_type.
    """
    del x
    num_prompts = self._num_prompts() if use_prompt_kv else 0
    return self_attention_bias(self, context, memory_position, heads_dims, q, num_prompts)


@gin.configurable(module=_MODULE)
@affects(training="dropout_rate")
@takes(
  radius=COUNT,
  num_heads=COUNT,
  num_memory_heads=COUNT_OR_ZERO,
  key_value_size=COUNT,
  dropout_rate=BELOW_ONE,
)
class LocalSelfAttention(SelfAttention):
  """Self-attention to the last `radius` positions (to both sides, if not autoregressive).

  Position p sees (p - radius, p], or (p - radius, p + radius] in a model that is not fully
  autoregressive. The decoding states are keys and values `[<batch_dims>, heads, window, d_kv]`:
  position p is in slot p mod radius. A subclass may have `num_sinks` first positions that are seen
  from everywhere: they have the first slots to themselves, and the others begin behind them.

  Args:
    radius: how far a position sees.
    num_heads: see `SelfAttention`.
    num_memory_heads: see `SelfAttention`.
    key_value_size: see `SelfAttention`.
    shared_kv: see `SelfAttention`.
    dropout_rate: see `SelfAttention`.
    attention_kwargs: see `SelfAttention`.
  """

  def __init__(
    self,
    radius: int = 128,
    num_heads: int = 8,
    num_memory_heads: int = 0,
    key_value_size: int = 128,
    shared_kv: bool = False,
    dropout_rate: float = 0.0,
    attention_kwargs: dict[str, Any] | None = None,
  ):
    super().__init__(
      num_heads, num_memory_heads, key_value_size, shared_kv, dropout_rate, attention_kwargs
    )
    self.radius = radius

  @property
  def window_dim(self) -> mtf.Dimension:
    """The slots: those of sinks, then those of the window."""
    return mtf.Dimension("window", self.num_sinks + self.radius)

  def _slot(self, position: mtf.Tensor) -> mtf.Tensor:
    """Slot of a position in the cache; positions visible at the same time have distinct slots."""
    if not self.num_sinks:
      return mtf.mod(position, self.radius)
    n = self.num_sinks
    return mtf.cwise(lambda p: tf.where(p < n, p, n + (p - n) % self.radius), [position])

  def _latest(self, position: mtf.Tensor, window: mtf.Dimension) -> mtf.Tensor:
    """Latest position in each slot after `position` was written; negative for empty slots."""
    n = self.num_sinks

    def latest(here: tf.Tensor, slot: tf.Tensor) -> tf.Tensor:
      # Of the positions equal to the slot's modulo the radius, counted behind the sinks.
      last = here - (here - slot) % self.radius
      if not n:
        return last
      return tf.where(slot < n, tf.where(here < slot, -1, slot), tf.where(last < n, -1, last))

    return mtf.binary_op_with_broadcasting(
      latest,
      position,
      mtf.range(position.mesh, window, tf.int32),
      output_shape=mtf.Shape([*position.shape.dims, window]),
    )

  def min_relative_position(self, context: Context) -> int | None:
    """The relative position of the leftmost memory that is seen."""
    return 1 - self.radius

  def max_relative_position(self, context: Context) -> int | None:
    """The relative position of the rightmost memory that is seen; None: masks say it."""
    return None if context.model.fully_autoregressive else self.radius

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    params = self.make_params(context)
    q, memory = self.positioned(context, params.compute_q(x), params.keys_and_values(x))
    heads_dims = params.query_heads_dims
    if context.mode == "incremental":
      o = self._attend_incrementally(context, q, memory, heads_dims)
    else:
      if context.mode == "first_part":
        context.record_new_states([self._window_state(context, t) for t in memory])
      # Below, blocks with their halo would be most of the square of products anyway.
      if context.length_dim.size <= max(256, 4 * self.radius):
        o = self._attend_to_all(context, x, q, memory, heads_dims)
      else:
        o = self._attend_in_blocks(context, q, memory, heads_dims)
    return self.output(context, x, params, o, losses)

  def _attend_to_all(
    self,
    context: Context,
    x: mtf.Tensor,
    q: mtf.Tensor,
    memory: list[mtf.Tensor],
    heads_dims: list[mtf.Dimension],
  ) -> mtf.Tensor:
    """For short sequences: all products, with a mask."""
    memory = [self.rename_length_to_memory_length(t, context) for t in memory]
    position = self.rename_length_to_memory_length(context.position, context)
    bias = self.compute_bias(context, position, x, heads_dims, q)
    return self.attend(context, q, memory, self.memory_length(context), bias)

  def _attend_in_blocks(
    self,
    context: Context,
    q: mtf.Tensor,
    memory: list[mtf.Tensor],
    heads_dims: list[mtf.Dimension],
  ) -> mtf.Tensor:
    """For long sequences."""
    model = context.model
    # A block must lie on one processor, so the layout has a say in how long blocks are.
    num_splits = 1
    if model.layout is not None and model.mesh_shape is not None:
      num_splits = mtf.tensor_dim_to_mesh_dim_size(
        model.layout, model.mesh_shape, context.length_dim
      )
      if context.length_dim.size % num_splits:
        num_splits = 1  # It is split unevenly, and whole where it is cut into blocks.

    def relative_bias(relative_position: mtf.Tensor, q_blocks: mtf.Tensor) -> mtf.Tensor:
      return self._relative_bias(
        context,
        ("blocks", relative_position.shape),
        lambda: relative_position,
        heads_dims,
        q_blocks,
      )

    return attention.local_attention_1d(
      q,
      memory[0],
      memory[-1],
      context.length_dim,
      self.kv_dim,
      self.kv_dim,
      fully_autoregressive=model.fully_autoregressive,
      length_dim_num_splits=num_splits,
      radius=self.radius,
      sequence_id=segments(context),
      write_priority=context.write_priority,
      read_priority=context.read_priority,
      attention_kwargs=self._attention_arguments(context),
      relative_bias_fn=relative_bias if self.relative_attention_type else None,
      num_sinks=self.num_sinks,
      sink_position=position_in_sequence(context) if self.num_sinks else None,
    )

  def _attend_incrementally(
    self,
    context: Context,
    q: mtf.Tensor,
    memory: list[mtf.Tensor],
    heads_dims: list[mtf.Dimension],
  ) -> mtf.Tensor:
    """One query, over the slots of the window."""
    window = self.window_dim
    position = context.position

    def relative_position() -> mtf.Tensor:
      """Relative position of each slot's content, in (-radius, 0] except for sinks."""
      latest = self._latest(position, window)
      return mtf.sub(latest, position, output_shape=latest.shape)

    def mask() -> mtf.Tensor:
      """Attention bias that masks empty slots."""
      slots = mtf.range(q.mesh, window, tf.int32)
      # Slots are filled in order: from a position on, all are.
      written = mtf.greater_equal(
        position, slots, output_shape=mtf.Shape([*position.shape.dims, window])
      )
      return attention.visibility_mask_to_attention_bias(written, context.activation_dtype)

    here = context.cached(
      ("window_slot", window, self.radius, position),
      lambda: mtf.one_hot(self._slot(position), window, dtype=tf.bool),
    )
    states = [
      overwrite(old, new, here) for old, new in zip(context.get_states(len(memory)), memory)
    ]
    context.record_new_states(states)
    bias = context.cached(("window_mask", window, position), mask)
    if self.relative_attention_type:
      relative = self._relative_bias(
        context, ("window", window, self.radius, position), relative_position, heads_dims, q
      )
      bias = mtf.add(relative, bias, output_shape=relative.shape)
    return self.attend(context, q, states, window, bias)

  def _relative_bias(
    self,
    context: Context,
    key: tuple[Hashable, ...],
    relative_position: Callable[[], mtf.Tensor],
    heads_dims: list[mtf.Dimension],
    q: mtf.Tensor,
  ) -> mtf.Tensor:
    """The relative bias; that of the first such layer, if it is shared."""
    position = context.cached(("relative_position", *key), relative_position)

    def compute() -> mtf.Tensor:
      return relative_attention_bias(self, context, position, heads_dims, q)

    if self.relative_attention_type != "bias_shared":
      return compute()
    limits = (self.min_relative_position(context), self.max_relative_position(context))
    key = ("self_attention_bias", *limits, *key, tuple(heads_dims))
    return context.cached(key, compute)

  def _window_state(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """The last positions before `context.initial_position`, each in its slot."""
    window, length = self.window_dim, context.length_dim
    end = context.initial_position
    # At a negative position there is nothing: the gather gives zeros.
    position = context.cached(
      ("window_positions", window, self.radius, end), lambda: self._latest(end - 1, window)
    )
    i = x.shape.dims.index(length)
    batch, (*heads, kv_dim) = x.shape.dims[:i], x.shape.dims[i + 1 :]
    shape = mtf.Shape([*batch, *heads, window, kv_dim])
    return mtf.gather(x, position, length, output_shape=shape)
