"""Stacks of layers: plain, with recomputation in the backward pass, reversible."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.transformer.model import stages, sublayers
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer
from mesh_tensorflow.transformer.model.step_sums import StepSum


@contextlib.contextmanager
def recomputed_layer(context: Context, x: mtf.Tensor) -> Iterator[None]:
  """Context manager for a layer inside `mtf.recompute_grad` or another `mtf.custom_gradient`.

  Tensors made in there cannot be used outside. So what the layer caches goes away with it,
  except for what depends on variables and not on x, such as a relative attention bias that all
  layers share: that is taken out of the recomputation. Its variables are those of the first
  layer that asks for it, as without recomputation, and it is computed once.

  Args:
    context: a `Context`.
    x: the argument of the recomputed function.
  """
  cache, keep = context.cache, context.keep_cached
  start = len(x.graph.operations)
  context.cache = dict(cache)

  def keep_shared(key: Hashable, value: object) -> None:
    if _take_out(value, x, start):
      cache[key] = value

  context.keep_cached = keep_shared
  try:
    yield
  finally:
    context.cache, context.keep_cached = cache, keep


def _take_out(value: object, x: mtf.Tensor, start: int) -> bool:
  """Moves the operations of a shared `value` out of the recomputed function.

  Args:
    value: tensors in nested lists and tuples; anything else among them is ignored.
    x: what may not be taken out.
    start: how many operations the graph had before the recomputed function.

  Returns:
    True if value depends on variables and not on x, so that it was moved.
  """
  # Backwards from the value through what was made inside: reaching x means that it must be
  # computed again, reaching only variables that it need not.
  inside = set(x.graph.operations[start:])
  pending = [t.operation for t in tf.nest.flatten(value) if isinstance(t, mtf.Tensor)]
  found: set[mtf.Operation] = set()
  uses_variables = False
  while pending:
    op = pending.pop()
    uses_variables |= isinstance(op, mtf.Variable)
    if op in found or op not in inside or op.is_external:
      continue
    if any(t is x for t in op.inputs):
      return False
    found.add(op)
    pending += [t.operation for t in op.inputs]
  if uses_variables:
    for op in found:
      op.is_external, op.is_cloneable = True, False
  return uses_variables


def as_names(names: str | Sequence[str]) -> tuple[str, ...]:
  """The names of which one may be given by itself."""
  return (names,) if isinstance(names, str) else tuple(names)


def _subclasses(cls: type) -> Iterator[type]:
  own: list[type] = cls.__subclasses__()
  for one in own:
    yield one
    yield from _subclasses(one)


_LOG = logging.getLogger("mesh_tensorflow")

Sublayer = Callable[[mtf.Tensor, "SublayerStack", Context], mtf.Tensor]


class Layers(TransformerLayer):
  """Base class of what calls layers one after another."""

  _layers: Sequence[TransformerLayer]

  @property
  def num_layers(self) -> int:
    """Number of layers, of all blocks."""
    return len(self._layers)

  @property
  def layers(self) -> Sequence[TransformerLayer]:
    """The layers, in the order in which they are called."""
    return self._layers


def check_keeps_shape(layer: TransformerLayer, x: mtf.Tensor, y: mtf.Tensor) -> None:
  """Raises ShapeError if a layer of a stack makes y, of another shape, of x."""
  if y.shape != x.shape:
    raise errors.ShapeError(
      f"layer {layer.name or ''} ({type(layer).__name__}) maps {x.shape} to {y.shape}; a layer "
      "of a stack must keep the dimensions and their order"
    )


class SublayerStack(Layers):
  """Base class of stacks of layers that have sublayers around them.

  Args:
    layers: a list of `TransformerLayer`s.
    sublayers_initial: see `LayerStack`.
    sublayers_per_layer: see `LayerStack`.
    sublayers_final: see `LayerStack`.
  """

  # Of the stacks that have the older lists of sublayers; see `LayerStack`.
  dropout_rate: float

  def __init__(
    self,
    layers: Sequence[TransformerLayer],
    sublayers_initial: Sequence[Sublayer] | None,
    sublayers_per_layer: Sequence[Sublayer] | None,
    sublayers_final: Sequence[Sublayer] | None,
  ):
    self._layers = layers
    self._sublayers_initial = sublayers_initial
    self._sublayers_per_layer = sublayers_per_layer
    self._sublayers_final = sublayers_final

  def _call_sublayers(self, which: str, x: mtf.Tensor, context: Context) -> mtf.Tensor:
    functions = getattr(self, f"_sublayers_{which}")
    if functions is None:
      raise errors.ConfigError(
        f"{type(self).__name__}: sublayers_{which} is not set; bind "
        f"{type(self).__name__}.sublayers_{which} in gin"
      )
    for fn in functions:
      x = fn(x, self, context)
    return x

  def _layer_fn(self, x: mtf.Tensor, layer: TransformerLayer, context: Context) -> mtf.Tensor:
    """The sublayers of one layer."""
    context.current_layer = layer
    context.current_layer_input = x
    y = self._call_sublayers("per_layer", x, context)
    check_keeps_shape(layer, x, y)
    return y


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
@affects(training="dropout_rate recompute_grads")
@takes(dropout_rate=BELOW_ONE)
class LayerStack(SublayerStack):
  """A list of layers, each with the same sublayers (norm, dropout, residual, ...) around it.

  A sublayer is a function `f(x, layer_stack, context) -> y`.

  Args:
    layers: a list of `TransformerLayer`s.
    sublayers_initial: sublayers before the first layer.
    sublayers_per_layer: sublayers of each layer; `sublayer_call_layer` calls the layer itself.
    sublayers_final: sublayers after the last layer.
    dropout_rate: together with `norm_epsilon`, selects the older fixed lists of sublayers, whose
      norms are called `layer_norm` and `final_layer_norm`.
    norm_epsilon: see `dropout_rate`. Its value has no effect: the epsilon is that of
      `sublayer_rms_norm`.
    recompute_grads: which layers training computes again in the backward pass instead of keeping
      their activations: all, none, or those of the named classes, such as "DenseReluDense" or
      ("SelfAttention", "EncDecAttention").

  Raises:
    ConfigError: one of dropout_rate and norm_epsilon is None and the other is not; or
      recompute_grads names something else than a class of layers.
  """

  def __init__(
    self,
    layers: Sequence[TransformerLayer],
    sublayers_initial: Sequence[Sublayer] | None = None,
    sublayers_per_layer: Sequence[Sublayer] | None = None,
    sublayers_final: Sequence[Sublayer] | None = None,
    dropout_rate: float | None = None,
    norm_epsilon: float | None = None,
    recompute_grads: bool | str | Sequence[str] = False,
  ):
    super().__init__(layers, sublayers_initial, sublayers_per_layer, sublayers_final)
    self.recompute_grads = recompute_grads
    self._check_recomputed()
    if (dropout_rate is None) != (norm_epsilon is None):
      raise errors.ConfigError(
        f"LayerStack: set both dropout_rate (={dropout_rate}) and norm_epsilon (={norm_epsilon}), "
        "which selects the older sublayers, or neither"
      )
    if dropout_rate is not None and norm_epsilon is not None:
      self._legacy_init(dropout_rate, norm_epsilon)

  def _check_recomputed(self) -> None:
    """Raises ConfigError if classes of layers are to be recomputed that there are not."""
    if isinstance(self.recompute_grads, bool):
      return
    # Gin binds it for all stacks of a model: that of an encoder has no EncDecAttention.
    known = {cls.__name__ for cls in _subclasses(TransformerLayer)}
    for name in as_names(self.recompute_grads):
      if name not in known:
        own = ", ".join(dict.fromkeys(type(layer).__name__ for layer in self.layers))
        raise errors.ConfigError(
          f"{type(self).__name__}.recompute_grads: {name!r} is no class of layers; this stack has "
          f"{own}; True is all"
        )

  def recomputes(self, layer: TransformerLayer) -> bool:
    """True if training computes a layer again in the backward pass.

    Args:
      layer: a layer of this stack.
    """
    if isinstance(self.recompute_grads, bool):
      return self.recompute_grads
    return type(layer).__name__ in as_names(self.recompute_grads)

  def _legacy_init(self, dropout_rate: float, norm_epsilon: float) -> None:
    self.dropout_rate = dropout_rate
    self.norm_epsilon = norm_epsilon
    if self._sublayers_initial or self._sublayers_per_layer or self._sublayers_final:
      _LOG.warning(
        "LayerStack: dropout_rate and norm_epsilon are set, so the given lists of sublayers are "
        "ignored; set both to None to use the lists"
      )
    self._sublayers_initial = [sublayers.sublayer_legacy_dropout]
    self._sublayers_per_layer = [
      sublayers.sublayer_legacy_rms_norm,
      sublayers.sublayer_call_layer,
      sublayers.sublayer_legacy_dropout,
      sublayers.sublayer_residual,
    ]
    self._sublayers_final = [
      sublayers.sublayer_legacy_final_rms_norm,
      sublayers.sublayer_legacy_dropout,
    ]

  def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Calls the layers in order.

    Appends to `context.layer_outputs`: x after the initial sublayers, the output of each layer
    but the last, and the result. Advances `context.layer_index`.

    Raises:
      ConfigError: a list of sublayers is missing.
      ShapeError: the sublayers of a layer change the dimensions of x.
    """
    x = self._call_sublayers("initial", x, context)
    context.layer_outputs.append(x)
    for i, layer in enumerate(self._layers):
      with mtf.variable_scope(layer.name or ""), stages.of_layer(context, i):
        if context.train and self.recomputes(layer):
          x = self._recomputed_layer(x, layer, context)
        else:
          x = self._layer_fn(x, layer, context)
      # The last layer's output is recorded after the final sublayers, below.
      if i != len(self._layers) - 1:
        context.layer_outputs.append(x)
      context.layer_index += 1
    with stages.of_layer(context, len(self._layers) - 1):
      x = self._call_sublayers("final", x, context)
      x = sublayers.sublayer_mask_padding(x, self, context)
    context.layer_outputs.append(x)
    return x

  def _recomputed_layer(
    self, x: mtf.Tensor, layer: TransformerLayer, context: Context
  ) -> mtf.Tensor:
    """Like `_layer_fn`, without keeping activations for the backward pass."""

    def fn(x: mtf.Tensor) -> Any:
      # Tensors made in here cannot be used outside: auxiliary losses leave as results.
      losses, sums = context.losses, context.step_sums
      if losses is not None:
        context.losses = []
      context.step_sums = []
      # What the layer caches of x would be a tensor of in here, too.
      try:
        with recomputed_layer(context, x):
          y = self._layer_fn(x, layer, context)
        counted.extend(context.step_sums or [])
        return (y, *[s.count for s in counted], *(context.losses or []))
      finally:
        context.losses, context.step_sums = losses, sums

    counted: list[StepSum] = []
    y: mtf.Tensor
    y, *results = mtf.recompute_grad(fn, [x])
    counts, new_losses = results[: len(counted)], results[len(counted) :]
    if context.step_sums is not None:
      context.step_sums += [dataclasses.replace(s, count=c) for s, c in zip(counted, counts)]
    if context.losses is not None:
      context.losses.extend(new_losses)
    return y


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
@takes(num_layers=COUNT)
def make_layer_stack(
  layers: Sequence[object] = gin.REQUIRED,
  layer_stack_cls: Callable[[list[TransformerLayer]], LayerStack] = LayerStack,
  num_layers: int = 6,
  block_scope: bool = True,
) -> LayerStack:
  """Makes a stack of `num_layers` equal blocks of layers.

  Args:
    layers: the layers of one block. Each is a class (or callable), or a list or tuple of a class,
      optionally a name and optionally a dict of constructor arguments, in any order.
    layer_stack_cls: called with the list of layers.
    num_layers: number of blocks.
    block_scope: whether layers are called `block_000/layer_000`; else `layer_000`, counted over
      the whole stack. A layer that is given a name has it in place of `layer_000`; without block
      scope, the layers of that name share their weights.

  Returns:
    A `LayerStack`.

  Raises:
    ConfigError: an item of `layers` is malformed.
  """
  layer_list: list[TransformerLayer] = []
  for block in range(num_layers):
    for n, item in enumerate(layers):
      cls, name, kwargs = _parse_layer(item)
      if block_scope:
        name = f"block_{block:03d}/{name or f'layer_{n:03d}'}"
      else:
        name = name or f"layer_{len(layer_list):03d}"
      layer = cls(**kwargs)
      layer.set_name(name)
      layer_list.append(layer)
  return layer_stack_cls(layer_list)


def _parse_layer(
  item: object,
) -> tuple[Callable[..., TransformerLayer], str | None, dict[str, Any]]:
  """The class, name and constructor arguments of an item of `make_layer_stack.layers`."""
  cls, name, kwargs = None, None, {}
  for part in item if isinstance(item, (list, tuple)) else [item]:
    if isinstance(part, str):
      name = part
    elif isinstance(part, dict):
      kwargs = part
    elif callable(part):
      cls = part
    else:
      raise errors.ConfigError(
        f"make_layer_stack.layers: {part!r} in {item!r} is neither a layer class, a name (str) "
        "nor a dict of arguments"
      )
  if cls is None:
    raise errors.ConfigError(f"make_layer_stack.layers: there is no layer class in {item!r}")
  return cls, name, kwargs


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
class ReversibleLayerStack(LayerStack):
  """A `LayerStack` of two streams, x1 and x2: a layer f makes (x2, x1 + f(x2)) of them.

  See `mtf.layers.reversible_half_residual_and_swap`. Both streams start as the input, and their
  sum is the result. The residual connection is part of this: `sublayers_per_layer` must do
  without `sublayer_residual`. gin bindings of `LayerStack` hold here too.

  The constructor's arguments are those of `LayerStack`; `recompute_grads` makes training compute
  the activations again in the backward pass, each layer's inputs from its outputs, so that
  none need to be kept: all of them, or none.

  Raises:
    ConfigError: recompute_grads names classes of layers.
  """

  def _check_recomputed(self) -> None:
    if not isinstance(self.recompute_grads, bool):
      raise errors.ConfigError(
        f"ReversibleLayerStack.recompute_grads is {self.recompute_grads!r}; it must be True (each "
        "layer is computed from its outputs) or False"
      )

  def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Calls the layers in order; see `LayerStack.call`.

    Appends to `context.layer_outputs` the sum of the streams after each layer but the last.
    Padding is not masked at the end.

    Raises:
      UnsupportedError: with `recompute_grads`, a layer has auxiliary losses.
    """
    if sublayers.sublayer_residual in (self._sublayers_per_layer or []):
      _LOG.warning(
        "ReversibleLayerStack: its layers have a residual connection already; take "
        "sublayer_residual out of ReversibleLayerStack.sublayers_per_layer"
      )
    x = self._call_sublayers("initial", x, context)
    context.layer_outputs.append(x)
    recompute = bool(self.recompute_grads and context.train)
    # Each stream with its value computed backwards, of which there is none in the forward pass.
    streams: tuple[mtf.Tensor, Any, mtf.Tensor, Any] = (x, None, x, None)
    for i, layer in enumerate(self._layers):
      with mtf.variable_scope(layer.name or ""):
        streams = mtf.layers.reversible_half_residual_and_swap(
          *streams, self._function(layer, context, recompute), recompute_grads=recompute
        )
      if i != len(self._layers) - 1:
        context.layer_outputs.append(streams[0] + streams[2])
      context.layer_index += 1
    x = streams[0] + streams[2]
    x = self._call_sublayers("final", x, context)
    context.layer_outputs.append(x)
    return x

  def _function(
    self, layer: TransformerLayer, context: Context, recompute: bool
  ) -> Callable[[mtf.Tensor], mtf.Tensor]:
    """The sublayers of one layer, as a function of x."""

    def fn(x: mtf.Tensor) -> mtf.Tensor:
      if not recompute:
        return self._layer_fn(x, layer, context)
      # The backward pass runs this again: a loss appended then would be one of a finished graph.
      num_losses = len(context.losses or [])
      with recomputed_layer(context, x):
        y = self._layer_fn(x, layer, context)
      if len(context.losses or []) > num_losses:
        raise errors.UnsupportedError(
          f"ReversibleLayerStack: layer {layer.name or ''} ({type(layer).__name__}) has an "
          "auxiliary loss, which has no gradient when layers are reversed; set "
          "ReversibleLayerStack.recompute_grads = False"
        )
      return y

    return fn
