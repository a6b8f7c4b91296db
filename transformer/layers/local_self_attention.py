"""Self-attention to a window of positions."""

from __future__ import annotations

from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT, COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.layers.attention_bias import relative_attention_bias
from mesh_tensorflow.transformer.layers.self_attention import SelfAttention
from mesh_tensorflow.transformer.models.context import Context
from mesh_tensorflow.transformer.models.decoding_states import overwrite


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
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

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    params = self.make_params(context)
    q = params.compute_q(x)
    if self.shared_kv:
      memory = [params.compute_kv(x)]
    else:
      memory = [params.compute_k(x), params.compute_v(x)]
    q, memory = self.positioned(context, q, memory)
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
    output = params.compute_output(o, output_shape=self.expected_attention_output_shape(x, params))
    return self.layer_output_from_attention_output(context, output, losses)

  def _attention_arguments(self, context: Context) -> dict[str, Any]:
    return dict(
      context=context, z_loss_coeff=self.z_loss_coeff, **self.attention_kwargs_from_context(context)
    )

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
    return self.attention_fn(
      q,
      memory[0],
      memory[-1],
      memory_length_dim=self.memory_length(context),
      key_dim=self.kv_dim,
      value_dim=self.kv_dim,
      bias=self.compute_bias(context, position, x, heads_dims, q),
      **self._attention_arguments(context),
    )

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
    # The finer division is the one that attention keeps to; see `attention_bias`.
    sequence_id = context.sequence_id
    if isinstance(context.subsequence_id, mtf.Tensor):
      sequence_id = context.subsequence_id

    def relative_bias(relative_position: mtf.Tensor, q_blocks: mtf.Tensor) -> mtf.Tensor:
      return self._relative_bias(
        context,
        ("blocks", relative_position.shape),
        lambda: relative_position,
        heads_dims,
        q_blocks,
      )

    sink_position = context.packed_position
    if sink_position is None or context.length_dim not in sink_position.shape:
      sink_position = context.position
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
      sequence_id=sequence_id,
      write_priority=context.write_priority,
      read_priority=context.read_priority,
      attention_kwargs=self._attention_arguments(context),
      relative_bias_fn=relative_bias if self.relative_attention_type else None,
      num_sinks=self.num_sinks,
      sink_position=sink_position if self.num_sinks else None,
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
    return self.attention_fn(
      q,
      states[0],
      states[-1],
      memory_length_dim=window,
      key_dim=self.kv_dim,
      value_dim=self.kv_dim,
      bias=bias,
      **self._attention_arguments(context),
    )

  def _relative_bias(
    self,
    context: Context,
    key: tuple[Any, ...],
    relative_position: Any,
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
