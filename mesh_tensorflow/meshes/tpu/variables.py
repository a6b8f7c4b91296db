"""One variable for each replica of a program, seen as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import tensorflow as tf

from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.errors import DTypeError, UnsupportedError, VariableError

# Kept for programs that ask: this TensorFlow is newer than 2.3.
TF_23 = True
VariableBase = tf.types.experimental.TensorLike


class ReplicatedVariable:
  """Acts as the variable of the replica that runs the program, and as the first one elsewhere.

  The mesh implementations do not need it: they keep the slices of a variable in a
  `mtf.VariableStore` and hand each program its own. It is of use in a program of one's own
  that `tf.distribute.Strategy.run` replicates.

  Args:
    name: a name.
    variables: one tf.Variable for each replica, of equal shape and dtype.

  Raises:
    VariableError: there is no variable, or they differ.
  """

  def __init__(self, name: str, variables: Sequence[tf.Variable]):
    self._name = name
    self._variables = list(variables)
    if not self._variables:
      raise VariableError(f"ReplicatedVariable {name!r} needs at least one variable")
    first = self._variables[0]
    for v in self._variables[1:]:
      if (v.shape, v.dtype) != (first.shape, first.dtype):
        raise VariableError(
          f"ReplicatedVariable {name!r}: {v.name} has shape {v.shape} and {v.dtype.name}, "
          f"{first.name} has shape {first.shape} and {first.dtype.name}"
        )

  def get(self) -> tf.Variable:
    """The variable of this replica; outside of a replicated program the first one.

    Raises:
      VariableError: more replicas run than there are variables.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
      return self._variables[0]
    replica = tf.get_static_value(tf.convert_to_tensor(context.replica_id_in_sync_group))
    if replica is None or not 0 <= int(replica) < len(self._variables):
      raise VariableError(
        f"ReplicatedVariable {self._name!r} has {len(self._variables)} variables, and is asked for "
        f"that of replica {replica} of {context.num_replicas_in_sync}"
      )
    return self._variables[int(replica)]

  @property
  def name(self) -> str:
    """The name given to the constructor."""
    return self._name

  @property
  def handle(self) -> tf.Tensor:
    """The resource handle of this replica's variable."""
    return self.get().handle

  @property
  def dtype(self) -> tf.DType:
    """The common dtype."""
    return self._variables[0].dtype

  @property
  def shape(self) -> tf.TensorShape:
    """The common shape."""
    return self._variables[0].shape

  def get_shape(self) -> tf.TensorShape:
    """The common shape."""
    return self.shape

  @property
  def constraint(self) -> None:
    """None: the variables have no constraint."""
    return None

  @property
  def op(self) -> tf.Operation:
    """The operation that made this replica's variable.

    Raises:
      UnsupportedError: when executing eagerly, where no operations exist.
    """
    return self._graph_only("op", lambda: self.get().op)

  @property
  def graph(self) -> tf.Graph:
    """The tf.Graph of this replica's variable.

    Raises:
      UnsupportedError: when executing eagerly, where there is no graph.
    """
    return self._graph_only("graph", lambda: self.get().graph)

  @property
  def initializer(self) -> tf.Operation:
    """The operation that initialises this replica's variable.

    Raises:
      UnsupportedError: when executing eagerly, where variables are initialised at once.
    """
    return self._graph_only("initializer", lambda: self.get().initializer)

  def _graph_only(self, what: str, fetch: Callable[[], object]) -> Any:
    try:
      value = fetch()
    except AttributeError:
      value = None
    if value is None:
      raise UnsupportedError(
        f"ReplicatedVariable {self._name!r}: a variable of TensorFlow 2 has no {what}; it is "
        "initialised when it is made and belongs to no graph"
      )
    return value

  def read_value(self) -> tf.Tensor:
    """The value of this replica's variable."""
    return self.get().read_value()

  def assign(
    self,
    value: npt.ArrayLike | tf.Tensor,
    use_locking: bool | None = None,
    name: str | None = None,
    read_value: bool = False,
  ) -> Any:
    """Sets this replica's variable.

    Args:
      value: the new value.
      use_locking: whether to hold the variable's lock.
      name: name of the operation.
      read_value: return the variable, instead of the operation.
    """
    return self.get().assign(value, use_locking=use_locking, name=name, read_value=read_value)

  def assign_add(
    self,
    delta: npt.ArrayLike | tf.Tensor,
    use_locking: bool | None = None,
    name: str | None = None,
    read_value: bool = True,
  ) -> Any:
    """Adds to this replica's variable; see `assign`."""
    return self.get().assign_add(delta, use_locking=use_locking, name=name, read_value=read_value)

  def assign_sub(
    self,
    delta: npt.ArrayLike | tf.Tensor,
    use_locking: bool | None = None,
    name: str | None = None,
    read_value: bool = True,
  ) -> Any:
    """Subtracts from this replica's variable; see `assign`."""
    return self.get().assign_sub(delta, use_locking=use_locking, name=name, read_value=read_value)

  def to_proto(self, export_scope: str | None = None) -> Any:
    """Refuses: TensorFlow 2 keeps variables in checkpoints, not in graph protos.

    Args:
      export_scope: has no meaning.

    Raises:
      UnsupportedError: always.
    """
    del export_scope
    raise UnsupportedError(
      f"ReplicatedVariable {self._name!r} has no proto; save its variables in a checkpoint "
      "(tf.train.Checkpoint, or mesh_tensorflow.checkpoint.Checkpointer)"
    )

  def __repr__(self) -> str:
    return f"ReplicatedVariable({self._name!r}, {len(self._variables)} x {self.shape})"

  def __add__(self, other: npt.ArrayLike | tf.Tensor) -> tf.Tensor:
    return self.read_value() + other

  def __radd__(self, other: npt.ArrayLike | tf.Tensor) -> tf.Tensor:
    return other + self.read_value()

  def __sub__(self, other: npt.ArrayLike | tf.Tensor) -> tf.Tensor:
    return self.read_value() - other

  def __rsub__(self, other: npt.ArrayLike | tf.Tensor) -> tf.Tensor:
    return other - self.read_value()

  def __mul__(self, other: npt.ArrayLike | tf.Tensor) -> tf.Tensor:
    return self.read_value() * other

  def __rmul__(self, other: npt.ArrayLike | tf.Tensor) -> tf.Tensor:
    return other * self.read_value()

  def __truediv__(self, other: npt.ArrayLike | tf.Tensor) -> tf.Tensor:
    return self.read_value() / other

  def __rtruediv__(self, other: npt.ArrayLike | tf.Tensor) -> tf.Tensor:
    return other / self.read_value()

  def __neg__(self) -> tf.Tensor:
    return -self.read_value()

  def __getitem__(self, key: Any) -> tf.Tensor:
    return self.read_value()[key]


def _to_tensor(
  value: ReplicatedVariable,
  dtype: DTypeLike | None = None,
  name: str | None = None,
  as_ref: bool = False,
) -> Any:
  del as_ref
  if dtype is not None and not tf.as_dtype(dtype).is_compatible_with(value.dtype):
    raise DTypeError(
      f"{value!r} is of {value.dtype.name}, and asked for as {tf.as_dtype(dtype).name}; tf.cast it"
    )
  return tf.identity(value.read_value(), name=name)


tf.register_tensor_conversion_function(ReplicatedVariable, _to_tensor)
