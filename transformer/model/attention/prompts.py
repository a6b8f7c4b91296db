"""Trained prompts in front of the keys and values of self-attention.

A program that uses them puts int32 task ids `[batch, 1]` into `context.cache["task-id"]`, or (for
decoding, where each position has a context of its own) into `context.shared_params["task-id"]`; and
the trained tensors into `context.shared_params["encoder"]` and `context.shared_params["decoder"]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.model.context import Context


def concat_hyper_prompts_kv(
  k: mtf.Tensor,
  v: mtf.Tensor,
  scope_encoder_or_decoder: str,
  use_hyperprompt: bool,
  memory_length: mtf.Dimension,
  task_num: int,
  num_heads: int,
  prefix_hidden_dim: int | None,
  kv_dim: mtf.Dimension,
  context: Context,
  mtlprompt_share: bool,
  dropout_rate: float,
  prompt_length: int,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor, mtf.Dimension]:
  """Puts prompts in front of keys and values.

  Args:
    k: keys `[<batch dims>, memory_length, <heads>, kv_dim]`; memory_length must not be split.
    v: values, of the same dims.
    scope_encoder_or_decoder: "encoder" or "decoder": whose parameters to use.
    use_hyperprompt: `make_params_hyperprompt`; else `make_params_mtlprompt`.
    memory_length: the dimension of what is attended to.
    task_num: number of tasks.
    num_heads: number of heads of keys.
    prefix_hidden_dim: hidden size of the network that makes the prompts.
    kv_dim: dimension of keys and values.
    context: a `Context`.
    mtlprompt_share: whether all tasks share that network.
    dropout_rate: in training.
    prompt_length: number of prompts.

  Returns:
    (k, v, positions, dim): the longer keys and values, 0, 1, ... along the longer dimension, and
    that dimension.
  """
  arguments = (task_num, num_heads, prefix_hidden_dim, kv_dim, context, mtlprompt_share)
  if use_hyperprompt:
    prompts = make_params_hyperprompt(
      *arguments, dropout_rate, prompt_length, scope=scope_encoder_or_decoder
    )
  else:
    prompts = make_params_mtlprompt(*arguments, dropout_rate, prompt_length)
  prompt_dim = mtf.Dimension(memory_length.name, prompt_length)

  def joined(prompt: mtf.Tensor, x: mtf.Tensor) -> mtf.Tensor:
    # One head has no dimension; beams have the prompts of their row.
    prompt = mtf.reshape(prompt, [d for d in prompt.shape if d.name != "heads" or d in x.shape])
    shape = mtf.Shape([prompt_dim if d == memory_length else d for d in x.shape])
    # An einsum of one operand repeats it along the dims that it lacks, such as beams.
    prompt = mtf.cast(mtf.einsum([prompt], output_shape=shape), x.dtype)
    return mtf.concat([prompt, x], memory_length.name)

  k, v = joined(prompts[0], k), joined(prompts[1], v)
  longer = mtf.Dimension(memory_length.name, memory_length.size + prompt_length)
  return k, v, mtf.range(k.mesh, longer, tf.int32), longer


def make_params_mtlprompt(
  task_num: int,
  num_heads: int,
  prefix_hidden_dim: int | None,
  kv_dim: mtf.Dimension,
  context: Context,
  mtlprompt_share: bool,
  dropout_rate: float,
  prompt_length: int | None = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Keys and values of the prompts of each row's task, by two dense layers.

  Variables: `prompt/w_k_up` and `prompt/w_v_up` [d_model, prefix_hidden], `prompt/w_k_down` and
  `prompt/w_v_down` [prefix_hidden, heads, d_kv], each with a leading [task_num] unless the tasks
  share them. The prompts are `shared_params[<first component of the variable scope>]["prompts"]`
  [task_num, memory_length, d_model].

  Args:
    task_num: number of tasks.
    num_heads: number of heads.
    prefix_hidden_dim: size of the hidden layer.
    kv_dim: dimension of keys and values.
    context: a `Context`.
    mtlprompt_share: whether all tasks share the dense layers.
    dropout_rate: in training.
    prompt_length: number of prompts, if they are to be checked.

  Returns:
    (k, v): `[batch, memory_length=prompt_length, heads, d_kv]` each.

  Raises:
    ConfigError: a parameter or the task ids are missing, or do not fit.
  """
  prompts = _shared(context, scope_component(0), "prompts")
  task_dim, model_dim = prompts.shape[0], prompts.shape[-1]
  _check_prompts(prompts, task_num, prompt_length)
  if prefix_hidden_dim is None:
    raise errors.ConfigError(
      "prompts: the size of the hidden layer that makes them is None; bind "
      "SelfAttention.hyperprompt_hidden_dim"
    )
  hidden = mtf.Dimension("prefix_hidden", prefix_hidden_dim)
  leading = [] if mtlprompt_share else [task_dim]
  up = leading + [model_dim, hidden]
  down = leading + [hidden, mtf.Dimension("heads", num_heads), kv_dim]
  with mtf.variable_scope("prompt"):
    weights = [
      mtf.get_variable(context.mesh, name, mtf.Shape(dims), dtype=context.variable_dtype)
      for name, dims in (("w_k_up", up), ("w_v_up", up), ("w_k_down", down), ("w_v_down", down))
    ]
  k_up, v_up, k_down, v_down = weights
  prompts = _normalized_prompts(prompts)
  return (
    _through_network(prompts, (k_up, k_down), context, dropout_rate),
    _through_network(prompts, (v_up, v_down), context, dropout_rate),
  )


def make_params_hyperprompt(
  task_num: int,
  num_heads: int,
  prefix_hidden_dim: int | None,
  kv_dim: mtf.Dimension,
  context: Context,
  mtlprompt_share: bool,
  dropout_rate: float,
  prompt_length: int,
  scope: str | None = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Like `make_params_mtlprompt`, with dense layers made from embeddings of task and layer.

  All is in `shared_params[scope]`: `prompts`, `task_raw_embedding` [task_num, n],
  `layer_embedding` [layers, m], `task_projector_layer_one` [n + m, hidden],
  `task_projector_layer_two` [hidden, out], and from [out] to the weights of the dense layers
  `hypernet_w_k_up`, `hypernet_w_k_down`, `hypernet_w_v_up` and `hypernet_w_v_down`. The layer's
  number is that of its block: 3 in the variable scope `encoder/block_003/...`.

  Arguments are those of `make_params_mtlprompt`, of which num_heads, prefix_hidden_dim, kv_dim and
  mtlprompt_share are not used; and scope, "encoder" or "decoder": by default the first component of
  the variable scope.

  Raises:
    ConfigError: a parameter or the task ids are missing, or do not fit; or the scope names no block
      that has an embedding.
  """
  del mtlprompt_share, num_heads, prefix_hidden_dim, kv_dim  # The given tensors have these sizes.
  scope = scope or scope_component(0)

  def shared(name: str) -> mtf.Tensor:
    return _shared(context, scope, name)

  prompts = shared("prompts")
  _check_prompts(prompts, task_num, prompt_length)
  task_embedding, layer_embedding = shared("task_raw_embedding"), shared("layer_embedding")
  number = _block_number(layer_embedding.shape[0].size)
  layer = mtf.gather(layer_embedding, number, layer_embedding.shape[0])
  task_dim, name = task_embedding.shape[0], task_embedding.shape[1].name
  # Both parts of a concatenation need its dimension's name.
  layer = mtf.rename_dimension(layer, layer.shape[0].name, name)
  layer = mtf.broadcast(layer, mtf.Shape([task_dim, *layer.shape]))
  e = mtf.concat([task_embedding, layer], name)
  e = mtf.relu(_times(e, shared("task_projector_layer_one")))
  e = mtf.dropout(e, context.train, rate=dropout_rate)
  e = _times(e, shared("task_projector_layer_two"))
  e = mtf.layers.layer_norm(e, e.shape[-1], name="prompt_task_embed_layernorm")
  prompts = _normalized_prompts(prompts)

  def made(which: str) -> mtf.Tensor:
    weights = [_times(e, shared(f"hypernet_w_{which}_{part}")) for part in ("up", "down")]
    return _through_network(prompts, weights, context, dropout_rate)

  return made("k"), made("v")


def _times(x: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
  """Contracts the last dim of x with the first of w."""
  last, first = x.shape[-1], w.shape[0]
  if last != first:
    x = mtf.rename_dimension(x, last.name, first.name)
  return mtf.einsum([x, w], output_shape=mtf.Shape(x.shape.dims[:-1] + w.shape.dims[1:]))


def _normalized_prompts(prompts: mtf.Tensor) -> mtf.Tensor:
  return mtf.layers.layer_norm(prompts, prompts.shape[-1], name="prompts_layernorm")


def _through_network(
  prompts: mtf.Tensor, weights: Sequence[mtf.Tensor], context: Context, dropout_rate: float
) -> mtf.Tensor:
  """The prompts of the rows' tasks, after two dense layers: [batch, memory_length, heads, d_kv]."""
  up, down = weights
  *leading, model_dim = prompts.shape.dims
  hidden = up.shape[-1]
  x = mtf.dropout(prompts, context.train, rate=dropout_rate)
  x = mtf.relu(mtf.einsum([x, up], output_shape=mtf.Shape(leading + [hidden])))
  x = mtf.dropout(x, context.train, rate=dropout_rate)
  made = down.shape.dims[-2:]
  x = mtf.einsum([x, down], output_shape=mtf.Shape(leading + made))
  task_id = context.cache.get("task-id")
  if task_id is None:
    task_id = context.shared_params.get("task-id")
  if task_id is None:
    raise errors.ConfigError(
      'prompts: context.cache["task-id"] and context.shared_params["task-id"] are missing; put the '
      "task ids there, an int32 tensor [batch, 1]"
    )
  return mtf.gather(x, mtf.reshape(task_id, mtf.Shape(task_id.shape.dims[:-1])), leading[0])


def _shared(context: Context, scope: str, name: str) -> mtf.Tensor:
  """A parameter that the program has put into the context."""
  group = context.shared_params.get(scope)
  if group is None or name not in group:
    raise errors.ConfigError(
      f'prompts: context.shared_params["{scope}"]["{name}"] is missing; the program that uses '
      "prompts puts their parameters there"
    )
  parameter: mtf.Tensor = group[name]
  return parameter


def _check_prompts(prompts: mtf.Tensor, task_num: int, prompt_length: int | None) -> None:
  sizes = prompts.shape.to_integer_list
  if len(sizes) != 3 or sizes[0] != task_num or prompt_length not in (None, sizes[1]):
    raise errors.ConfigError(
      f"prompts: {prompts} must be [tasks, memory_length, d_model] with {task_num} tasks and "
      f"{prompt_length} positions"
    )


def scope_component(i: int) -> str:
  """A component of the name of the open variable scope; "" if it has fewer."""
  name: str = mtf.get_variable_scope().name
  return [*name.split("/"), "", ""][i]


def _block_number(num_layers: int) -> int:
  """The number of the block whose variable scope is open."""
  number = scope_component(1).rpartition("_")[2]
  if not number.isdigit() or int(number) >= num_layers:
    raise errors.ConfigError(
      f"prompts: the variable scope {mtf.get_variable_scope().name!r} must name a block in its "
      f"second component, block_000 to block_{num_layers - 1:03d}: layer_embedding has "
      f"{num_layers} rows"
    )
  return int(number)
