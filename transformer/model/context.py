"""The context of a call of a model, which its layers get, and the base class of layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar, cast, overload

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.operations.variables import convert_to_variable_dtype
from mesh_tensorflow.transformer.model.step_sums import StepSum

T = TypeVar("T")


class TransformerLayer:
  """Base class of layers.

  A constructor only stores hyperparameters; variables are created when the layer is called, in
  the variable scope that is open then. So one layer object may be called in several scopes, and
  calling it twice in one scope shares the weights.
  """

  _name: str | None = None

  def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Applies the layer.

    Args:
      context: a `Context`.
      x: `[<batch_dims>, length, d_model]`; `[<batch_dims>, d_model]` when `context.mode` is
        "incremental".

    Returns:
      A tensor of the dimensions of x.
    """
    raise NotImplementedError(f"{type(self).__name__} defines no call")

  def set_name(self, name: str) -> None:
    """Sets the variable scope in which a layer stack calls the layer."""
    self._name = name

  @property
  def name(self) -> str | None:
    """The variable scope in which a layer stack calls the layer."""
    return self._name

  def to_json(self) -> str:
    """The class and its hyperparameters as JSON text."""
    return json.dumps({"class": type(self).__name__, **vars(self)}, default=repr)


class _Given(Generic[T]):
  """Descriptor of an attribute that only some calls have; raises an error in other calls."""

  def __set_name__(self, owner: type[Context], name: str) -> None:
    self._name = name

  @overload
  def __get__(self, context: None, owner: type[Context]) -> _Given[T]: ...

  @overload
  def __get__(self, context: Context, owner: type[Context]) -> T: ...

  def __get__(self, context: Context | None, owner: type[Context]) -> _Given[T] | T:
    if context is None:
      return self
    value = vars(context).get(self._name)
    if value is None:
      raise errors.GraphError(
        f"the context of this call (mode {context.mode!r}) has no {self._name}, which a layer or "
        f"sublayer needs; make the Context with {self._name}, or leave out that layer"
      )
    return cast(T, value)

  def __set__(self, context: Context, value: T | None) -> None:
    vars(context)[self._name] = value


class Context:
  """Everything about one call of a model that its layers share.

  Args:
    model: the `Unitransformer`.
    mesh: an `mtf.Mesh`.
    batch_dims: a list of dimensions.
    length_dim: the dimension of positions.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    beam_dim: in decoding the last of `batch_dims`, of beams that share the KV caches of
      self-attention; see `beam_caches`. None: each has its own.
    mode: "train", "eval" or "infer"; in decoding "first_part" (given tokens, in parallel), then
      "incremental" (one position at a time).
    position: int32 tensor of positions; its dims are among `batch_dims + [length_dim]`.
    position_is_default: whether position is 0, 1, ... along `length_dim`.
    sequence_id: int32 tensor: 0 for padding, else a number per packed sequence; or the Python
      int 1 (decoding with an encoder); or None.
    subsequence_id: int32 tensor, a finer division for self-attention; or None.
    states: list of tensors, the decoding state before this position.
    new_states: list to which layers append the state after it.
    losses: list to which layers append auxiliary losses; None if losses are not wanted.
    initial_position: int32 tensor, in "first_part" the number of given tokens.
    layer_outputs: list to which the layer stack appends.
    encoder_output: tensor with a dimension `memory_length`.
    encoder_sequence_id: as sequence_id, with dimension `memory_length`.
    constant_states: list written in "first_part", read in "incremental".
    shared_params: dict of tensors and embeddings that stacks share.
    encoder_layer_outputs: list of tensors.
    write_priority: int32 tensor: a position is seen by those of at least its priority.
    read_priority: int32 tensor.
    inputs: the token ids this call is about.
    encoder_inputs: the token ids of the encoder.
    num_microbatches: how many of such calls make a training step.
  """

  position = _Given[mtf.Tensor]()
  initial_position = _Given[mtf.Tensor]()
  encoder_output = _Given[mtf.Tensor]()
  states = _Given[list[mtf.Tensor]]()
  new_states = _Given[list[mtf.Tensor]]()
  constant_states = _Given[list[Any]]()
  # Those of the layer stack's current layer; the stack sets them.
  current_layer = _Given[TransformerLayer]()
  current_layer_input = _Given[mtf.Tensor]()

  def __init__(
    self,
    model: Any,
    mesh: mtf.Mesh,
    batch_dims: Sequence[mtf.Dimension],
    length_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType | tf.DType,
    beam_dim: mtf.Dimension | None = None,
    mode: str = "train",
    position: mtf.Tensor | None = None,
    position_is_default: bool = False,
    sequence_id: int | mtf.Tensor | None = None,
    subsequence_id: int | mtf.Tensor | None = None,
    states: list[mtf.Tensor] | None = None,
    new_states: list[mtf.Tensor] | None = None,
    losses: list[mtf.Tensor] | None = None,
    initial_position: mtf.Tensor | None = None,
    layer_outputs: list[mtf.Tensor] | None = None,
    encoder_output: mtf.Tensor | None = None,
    encoder_sequence_id: Any = None,
    constant_states: list[Any] | None = None,
    shared_params: dict[str, Any] | None = None,
    encoder_layer_outputs: list[mtf.Tensor] | None = None,
    write_priority: mtf.Tensor | None = None,
    read_priority: mtf.Tensor | None = None,
    inputs: mtf.Tensor | None = None,
    encoder_inputs: mtf.Tensor | None = None,
    num_microbatches: int = 1,
  ):
    self.model = model
    self.mesh = mesh
    self.batch_dims = list(batch_dims)
    self.length_dim = length_dim
    self.variable_dtype = convert_to_variable_dtype(variable_dtype)
    self.beam_dim = beam_dim
    self.mode = mode
    self.position = position
    self.position_is_default = position_is_default
    self.sequence_id = sequence_id
    self.subsequence_id = subsequence_id
    self.states = states
    self.new_states = new_states
    self.losses = losses
    self.initial_position = initial_position
    self.layer_outputs = [] if layer_outputs is None else layer_outputs
    self.encoder_output = encoder_output
    self.encoder_sequence_id = encoder_sequence_id
    self.constant_states = constant_states
    self.shared_params = shared_params or {}
    self.encoder_layer_outputs = encoder_layer_outputs
    self.write_priority = write_priority
    self.read_priority = read_priority
    self.inputs = inputs
    self.encoder_inputs = encoder_inputs
    self.num_microbatches = num_microbatches
    # The layer stack counts its calls of layers here.
    self.layer_index = 0
    self.next_constant_state = 0
    # What layers of one call share, such as attention masks; see `cached`.
    self.cache: dict[Hashable, Any] = {}
    # Told what is cached, while the layer is one whose tensors are lost; see `recomputation`.
    self.keep_cached: Callable[[Hashable, Any], None] | None = None
    self.input_embeddings: mtf.Tensor | None = None
    # int32 positions within packed sequences, where `position` counts along the whole length.
    self.packed_position: mtf.Tensor | None = None
    # While decoding the ids `[<batch_dims>, length]`, of which those before `position` count.
    self.decoded_ids: mtf.Tensor | None = None
    # Of KV caches that beams share, the entries that each sees: bool `[<batch_dims>, <entries>]`.
    self.seen_by_beams: mtf.Tensor | None = None
    self.decoder_layers_per_module: Any = None
    # What layers count of the tokens of a step of training; None where it cannot be counted.
    self.step_sums: list[StepSum] | None = []

  @property
  def train(self) -> bool:
    return self.mode == "train"

  @property
  def activation_dtype(self) -> tf.DType:
    return self.variable_dtype.activation_dtype

  @property
  def encoder_length_dim(self) -> mtf.Dimension:
    """The dimension `memory_length` of the encoder's output."""
    (ret,) = [d for d in self.encoder_output.shape.dims if d.name == "memory_length"]
    return ret

  @property
  def nonpadding(self) -> Any:
    """1 where there is a token and 0 at padding: a tensor of the activation dtype.

    None if there are no sequence ids; the Python int 1 if the sequence id is 1.
    """
    if self.sequence_id is None:
      return None
    if not isinstance(self.sequence_id, mtf.Tensor):
      return 1
    return self.cached(
      ("nonpadding", self.sequence_id),
      lambda: mtf.cast(mtf.not_equal(self.sequence_id, 0), self.activation_dtype),
    )

  def cached(self, key: Hashable, compute: Callable[[], T]) -> T:
    """`compute()`, computed once per context and key.

    Args:
      key: everything the value depends on that may differ between layers of this context.
        Tensors are compared by identity.
      compute: makes the value.
    """
    if key not in self.cache:
      self.cache[key] = compute()
      if self.keep_cached is not None:
        self.keep_cached(key, self.cache[key])
    return cast(T, self.cache[key])

  def get_position(self) -> mtf.Tensor:
    """Positions: 0, 1, ... along `length_dim` if those are the default ones."""
    if self.position_is_default:
      return mtf.range(self.mesh, self.length_dim, dtype=tf.int32)
    return self.position

  def get_states(self, n: int) -> list[mtf.Tensor]:
    """The next n loop states; a layer calls this before it records its new ones."""
    begin = len(self.new_states)
    return self.states[begin : begin + n]

  def record_new_states(self, new_states: Sequence[mtf.Tensor]) -> None:
    """Appends loop states, in the order in which `get_states` reads them."""
    self.new_states.extend(new_states)

  def record_constant_state(self, s: object) -> None:
    """Stores a state that later positions use unchanged."""
    self.constant_states.append(s)

  def get_constant_state(self) -> Any:
    """The next constant state, in the order in which they were recorded."""
    ret = self.constant_states[self.next_constant_state]
    self.next_constant_state += 1
    return ret
