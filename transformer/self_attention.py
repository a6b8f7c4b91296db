"""Self-attention."""

from __future__ import annotations

from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.slices import align
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.context import Context, TransformerLayer
from mesh_tensorflow.transformer.relative_position import relative_position_bucket


def attention_params(
  context: Context,
  kv_dim: mtf.Dimension,
  num_heads: int,
  num_memory_heads: int = 0,
  shared_kv: bool = False,
  no_query: bool = False,
  combine_dims: bool = True,
  keep_query_heads_dims: bool = False,
  fold_scaling_into_initializer: bool = True,
) -> attention.AttentionParams:
  """The variables of attention between vectors of the model's size.

  Args:
    context: a `Context`.
    kv_dim: dimension of keys and values.
    num_heads: number of query heads.
    num_memory_heads: number of heads of keys and values; 0: as many as queries have.
    shared_kv: whether keys are the values.
    no_query: whether there is no variable `q`.
    combine_dims: whether the variables are matrices.
    keep_query_heads_dims: whether the output keeps the heads apart.
    fold_scaling_into_initializer: see `AttentionParams`.

  Returns:
    `AttentionParams`. One head has no dimension; the heads of queries are `heads`, or with fewer
    memory heads `heads` and `query_heads`.

  Raises:
    DimensionError: num_memory_heads does not divide num_heads.
  """
  if num_heads == 1:
    query_heads_dims = memory_heads_dims = []
  elif num_memory_heads == 0:
    query_heads_dims = memory_heads_dims = [mtf.Dimension("heads", num_heads)]
  elif num_memory_heads == 1:
    query_heads_dims, memory_heads_dims = [mtf.Dimension("heads", num_heads)], []
  else:
    if num_heads % num_memory_heads:
      raise errors.DimensionError(
        f"attention: num_memory_heads (={num_memory_heads}) must divide num_heads (={num_heads})"
      )
    memory_heads_dims = [mtf.Dimension("heads", num_memory_heads)]
    query_heads_dims = memory_heads_dims + [
      mtf.Dimension("query_heads", num_heads // num_memory_heads)
    ]
  model_dim = context.model.model_dim
  return attention.AttentionParams(
    context.mesh,
    query_input_dim=model_dim,
    memory_input_dim=model_dim,
    output_dim=model_dim,
    key_dim=kv_dim,
    value_dim=kv_dim,
    query_heads_dims=query_heads_dims,
    memory_heads_dims=memory_heads_dims,
    variable_dtype=context.variable_dtype,
    shared_kv=shared_kv,
    no_query=no_query,
    combine_dims=combine_dims,
    ensemble_dim=context.model.ensemble_dim,
    keep_query_heads_dims=keep_query_heads_dims,
    fold_scaling_into_initializer=fold_scaling_into_initializer,
  )


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class SelfAttention(TransformerLayer):
  """Multi-head attention of a sequence to itself.

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
    use_hyperprompt: see `hyperprompt_hidden_dim`.
    hyperprompt_mtlshare: see `hyperprompt_hidden_dim`.
    hyperprompt_length_encoder: see `hyperprompt_hidden_dim`.
    hyperprompt_length_decoder: see `hyperprompt_hidden_dim`.
    hyperprompt_hidden_dim: trained prompts in front of keys and values, which this version does
      not have: a call with a prompt length raises UnsupportedError.
    hyperprompt_task_num: see `hyperprompt_hidden_dim`.
  """

  def __init__(
    self,
    num_heads: int = 8,
    num_memory_heads: int = 0,
    key_value_size: int = 128,
    shared_kv: bool = False,
    dropout_rate: float = 0.0,
    attention_kwargs: dict[str, Any] | None = None,
    relative_attention_type: str | None = None,
    relative_attention_num_buckets: int = 32,
    attention_func: str | None = None,
    combine_dims: bool = True,
    keep_query_heads_dims: bool = False,
    fold_scaling_into_initializer: bool = True,
    z_loss_coeff: float | None = None,
    use_hyperprompt: bool = False,
    hyperprompt_mtlshare: bool = False,
    hyperprompt_length_encoder: int | None = None,
    hyperprompt_length_decoder: int | None = None,
    hyperprompt_hidden_dim: int | None = None,
    hyperprompt_task_num: int = 8,
  ):
    self.num_heads = num_heads
    self.num_memory_heads = num_memory_heads
    self.key_value_size = key_value_size
    self.shared_kv = shared_kv
    self.dropout_rate = dropout_rate
    self.attention_kwargs = attention_kwargs or {}
    self.relative_attention_type = relative_attention_type
    self.relative_attention_num_buckets = relative_attention_num_buckets
    self.attention_func = attention_func
    self.combine_dims = combine_dims
    self.keep_query_heads_dims = keep_query_heads_dims
    self.fold_scaling_into_initializer = fold_scaling_into_initializer
    self.z_loss_coeff = z_loss_coeff
    self.use_hyperprompt = use_hyperprompt
    self.hyperprompt_mtlshare = hyperprompt_mtlshare
    self.hyperprompt_length_encoder = hyperprompt_length_encoder
    self.hyperprompt_length_decoder = hyperprompt_length_decoder
    self.hyperprompt_hidden_dim = hyperprompt_hidden_dim
    self.hyperprompt_task_num = hyperprompt_task_num

  # ------------------------------------------------------- hooks of subclasses

  def layer_output_from_attention_output(
    self, context: Context, attention_output: mtf.Tensor, losses: Any
  ) -> mtf.Tensor:
    """What the layer makes of the output of attention: nothing."""
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
    """Further arguments of `attention`: dropout, whose mask all queries of a sequence share."""
    kwargs = dict(self.attention_kwargs)
    kwargs["dropout_rate"] = self.dropout_rate if context.train else 0.0
    kwargs.setdefault("dropout_broadcast_dims", [context.length_dim])
    return kwargs

  def make_params(self, context: Context) -> attention.AttentionParams:
    """Creates the variables, or finds them."""
    return attention_params(
      context=context,
      kv_dim=self.kv_dim,
      num_heads=self.num_heads,
      num_memory_heads=self.num_memory_heads,
      shared_kv=self.shared_kv,
      combine_dims=self.combine_dims,
      keep_query_heads_dims=self.keep_query_heads_dims,
      fold_scaling_into_initializer=self.fold_scaling_into_initializer,
    )

  def min_relative_position(self, context: Context) -> int | None:
    """The relative position of the leftmost memory that is seen, or None."""
    del context
    return None

  def max_relative_position(self, context: Context) -> int | None:
    """The relative position of the rightmost memory that is seen, or None."""
    del context
    return None

  @property
  def kv_dim(self) -> mtf.Dimension:
    return mtf.Dimension("d_kv", self.key_value_size)

  @property
  def attention_fn(self) -> Any:
    if self.attention_func == "hybrid":
      raise errors.UnsupportedError(
        'SelfAttention: attention_func="hybrid" is not available in this version'
      )
    return attention.attention

  # ---------------------------------------------------------------- the layer

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`.

    The decoding states are keys and values `[<batch_dims>, memory_length, heads, d_kv]`.
    """
    self._check_no_prompt()
    params = self.make_params(context)
    q = params.compute_q(x)
    incremental = context.mode == "incremental"
    memory_length = self.memory_length(context)
    m = x if incremental else self.rename_length_to_memory_length(x, context)
    if self.shared_kv:
      memory = [params.compute_kv(m)]
    else:
      memory = [params.compute_k(m), params.compute_v(m)]
    if incremental:
      here = mtf.one_hot(context.position, memory_length, dtype=tf.bool)
      memory = [
        _replace(old, new, here)
        for old, new in zip(context.get_states(len(memory)), memory)
      ]
    if incremental or context.mode == "first_part":
      context.record_new_states(memory)
    if incremental:
      memory_position = mtf.range(context.mesh, memory_length, tf.int32)
    else:
      memory_position = self.rename_length_to_memory_length(context.position, context)
    o = self.attention_fn(
      q,
      memory[0],
      memory[-1],
      context=context,
      memory_length_dim=memory_length,
      key_dim=self.kv_dim,
      value_dim=self.kv_dim,
      bias=self.compute_bias(context, memory_position, x, params.query_heads_dims, q),
      z_loss_coeff=self.z_loss_coeff,
      **self.attention_kwargs_from_context(context),
    )
    output = params.compute_output(
      o, output_shape=self.expected_attention_output_shape(x, params)
    )
    return self.layer_output_from_attention_output(context, output, losses)

  def _check_no_prompt(self) -> None:
    if self.hyperprompt_length_encoder or self.hyperprompt_length_decoder:
      raise errors.UnsupportedError(
        "SelfAttention: prompts (hyperprompt_length_encoder, hyperprompt_length_decoder) are not "
        "available in this version"
      )

  def memory_length(self, context: Context) -> mtf.Dimension:
    """The dimension of what is attended to."""
    return mtf.Dimension("memory_length", context.length_dim.size)

  def rename_length_to_memory_length(self, x: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Calls the length dimension of x `memory_length`."""
    if context.length_dim not in x.shape.dims:
      return x
    return context.cached(
      ("memory_length", x),
      lambda: mtf.replace_dimensions(x, context.length_dim, self.memory_length(context)),
    )

  def compute_bias(
    self,
    context: Context,
    memory_position: mtf.Tensor,
    x: mtf.Tensor,
    heads_dims: list[mtf.Dimension],
    q: mtf.Tensor,
    use_prompt_kv: Any = None,
  ) -> mtf.Tensor | None:
    """What is added to the products of queries and keys.

    -1e9 where attention is not allowed, plus the relative bias.

    Args:
      context: a `Context`.
      memory_position: int32 tensor with dimension `memory_length`.
      x: the layer's input.
      heads_dims: dims of query heads.
      q: the queries.
      use_prompt_kv: kept for compatibility.

    Returns:
      A tensor whose dims are among those of the products, or None.

    Raises:
      ConfigError: an unknown relative_attention_type.
    """
    del x, use_prompt_kv
    limits = (self.min_relative_position(context), self.max_relative_position(context))

    def relative_position() -> mtf.Tensor:
      key = ("relative_position", memory_position.shape, context.position)
      return context.cached(key, lambda: _relative_position(memory_position, context.position))

    def mask() -> mtf.Tensor | None:
      key = ("self_attention_mask", limits, *_mask_sources(context))
      return context.cached(
        key, lambda: self._mask(context, relative_position, limits)
      )

    kind = self.relative_attention_type
    if kind is None:
      return mask()
    if kind not in ("bias", "bias_shared", "contextual"):
      raise errors.ConfigError(
        f'{type(self).__name__}.relative_attention_type must be None, "bias", "bias_shared" or '
        f'"contextual", got {kind!r}'
      )

    def bucket() -> mtf.Tensor:
      bidirectional = not context.model.fully_autoregressive
      buckets = self.relative_attention_num_buckets
      position = relative_position()
      return context.cached(
        ("relative_position_bucket", position, bidirectional, buckets),
        lambda: relative_position_bucket(
          position, bidirectional=bidirectional, num_buckets=buckets
        ),
      )

    def with_relative_bias() -> mtf.Tensor:
      buckets_dim = mtf.Dimension("buckets", self.relative_attention_num_buckets)
      values = self._relative_values(context, heads_dims, buckets_dim, q)
      return _sum_of(mask(), _gather_bias(values, bucket(), buckets_dim))

    if kind == "bias_shared":
      # The first layer's variable serves all layers of the stack.
      return context.cached(
        ("self_attention_bias", *limits, tuple(heads_dims), *_mask_sources(context)),
        with_relative_bias,
      )
    return with_relative_bias()

  def _mask(
    self, context: Context, relative_position: Any, limits: tuple[int | None, int | None]
  ) -> mtf.Tensor | None:
    """-1e9 where attention is not allowed; None if it is allowed everywhere."""
    low, high = limits
    visible = []
    if low is not None:
      visible.append(mtf.greater_equal(relative_position(), low))
    if high is not None:
      visible.append(mtf.less_equal(relative_position(), high))
    if context.read_priority is not None:
      write_priority = self.rename_length_to_memory_length(context.write_priority, context)
      visible.append(
        mtf.greater_equal(
          context.read_priority,
          write_priority,
          output_shape=_joined(context.read_priority.shape, write_priority.shape),
        )
      )
    sequence_id = _segments(context)
    if sequence_id is not None and context.length_dim in sequence_id.shape:
      memory_id = self.rename_length_to_memory_length(sequence_id, context)
      visible.append(
        mtf.equal(
          sequence_id, memory_id, output_shape=_joined(sequence_id.shape, memory_id.shape)
        )
      )
    if not visible:
      return None
    # The largest shape first, so that the result has its order of dims.
    visible.sort(key=lambda v: -v.shape.ndims)
    all_visible = visible[0]
    for v in visible[1:]:
      all_visible = mtf.logical_and(all_visible, v)
    return attention.visibility_mask_to_attention_bias(all_visible, context.activation_dtype)

  def _relative_values(
    self,
    context: Context,
    heads_dims: list[mtf.Dimension],
    buckets_dim: mtf.Dimension,
    q: mtf.Tensor,
  ) -> mtf.Tensor:
    """The bias of each bucket: `[<heads_dims>, buckets]`, with the dims of q if contextual."""
    leading = context.model.ensemble_dims + heads_dims
    if self.relative_attention_type == "contextual":
      return mtf.layers.dense(
        q,
        reduced_dims=[self.kv_dim],
        new_dims=[buckets_dim],
        expert_dims=leading,
        use_bias=False,
        variable_dtype=context.variable_dtype,
        name="relative_attention_ak",
      )
    return mtf.get_variable(
      context.mesh,
      "relative_attention_bias",
      mtf.Shape(leading + [buckets_dim]),
      dtype=context.variable_dtype,
    )


def _segments(context: Context) -> mtf.Tensor | None:
  """The ids that must be equal for a position to see another."""
  for ids in (context.subsequence_id, context.sequence_id):
    if isinstance(ids, mtf.Tensor):
      return ids
  return None


def _mask_sources(context: Context) -> tuple[Any, ...]:
  """What masks and relative positions are computed from."""
  return (
    context.length_dim,
    context.position,
    context.read_priority,
    context.write_priority,
    _segments(context),
  )


def _joined(query: mtf.Shape, memory: mtf.Shape) -> mtf.Shape:
  """Dims of a comparison of queries with memory: those of the query first."""
  return mtf.Shape(query.dims + [d for d in memory if d not in query])


def _relative_position(memory_position: mtf.Tensor, position: mtf.Tensor) -> mtf.Tensor:
  """Memory position minus query position."""
  shape = _joined(position.shape, memory_position.shape)
  return mtf.sub(memory_position, position, output_shape=shape)


def _gather_bias(
  values: mtf.Tensor, bucket: mtf.Tensor, buckets_dim: mtf.Dimension
) -> mtf.Tensor:
  """The values of the buckets, in the order of the products: batch, heads, lengths."""
  dims = [d for d in bucket.shape if d not in values.shape]
  dims += [d for d in values.shape if d != buckets_dim]
  lengths = [d for name in ("length", "memory_length") for d in dims if d.name == name]
  shape = mtf.Shape([d for d in dims if d not in lengths] + lengths)
  return mtf.gather(values, bucket, buckets_dim, output_shape=shape)


def _sum_of(a: mtf.Tensor | None, b: mtf.Tensor) -> mtf.Tensor:
  return b if a is None else b + a


def _replace(old: mtf.Tensor, new: mtf.Tensor, here: mtf.Tensor) -> mtf.Tensor:
  """`old`, with `new` where `here`, a bool tensor, is true."""
  dims = old.shape.dims

  def select(old: tf.Tensor, new: tf.Tensor, here: tf.Tensor) -> tf.Tensor:
    return tf.where(align(here, here_dims, dims), align(new, new_dims, dims), old)

  new_dims, here_dims = new.shape.dims, here.shape.dims
  return mtf.slicewise(
    select, [old, new, here], splittable_dims=dims, grad_function=0, name="replace"
  )
