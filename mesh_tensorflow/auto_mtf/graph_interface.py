"""One view of an `mtf.Graph` and of a `tf.Graph`: operations and tensors by their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf import descriptor_pool, message_factory

from mesh_tensorflow.errors import ArgumentError, GraphError
from mesh_tensorflow.program.graph import Graph, Tensor


class GraphInterface:
  """View of a graph in which operations and tensors are identified by name.

  Operations are those at the time of construction. Tensors of an `mtf.Graph` are named
  "<operation name>:<output index>".

  Args:
    graph: an `mtf.Graph`, or a `tf.Graph` (such as that of a concrete function).
    canonical_device: device of a `tf.Graph` that counts as no particular device.

  Raises:
    ArgumentError: it is neither (a TypeError).
  """

  def __init__(self, graph: Graph | tf.Graph, canonical_device: str | None = None):
    self.canonical_device = canonical_device
    self._is_mtf = isinstance(graph, Graph)
    if isinstance(graph, Graph):
      operations: list[Any] = list(graph.operations)
    elif isinstance(graph, tf.Graph):
      operations = list(graph.get_operations())
    else:
      raise ArgumentError(f"GraphInterface takes an mtf.Graph or a tf.Graph, got {graph!r}")
    self._operations: dict[str, Any] = {}
    self._tensors: dict[str, Any] = {}
    self._names: dict[Any, str] = {}
    self._final: set[str] = set()
    for op in operations:
      # Copies for a recomputation have the names of what they copy.
      name, count = op.name, 1
      while name in self._operations:
        name, count = f"{op.name}_copy_{count}", count + 1
      self._operations[name] = op
      for i, x in enumerate(op.outputs):
        tensor_name = f"{name}:{i}"
        self._tensors[tensor_name] = x
        self._names[_key(x)] = tensor_name

  # --------------------------------------------------------------- operations

  def get_num_operations(self) -> int:
    """Number of operations."""
    return len(self._operations)

  def get_all_operation_names(self) -> Iterator[str]:
    """Names of all operations, in the order of the graph."""
    yield from self._operations

  def get_operation_input_names(self, operation_name: str) -> Iterator[str]:
    """Names of the tensors that an operation takes, each as often as it takes it.

    Args:
      operation_name: of an operation.

    Yields:
      Names of tensors.

    Raises:
      KeyError: there is no such operation.
    """
    for x in self._operations[operation_name].inputs:
      yield self._names[_key(x)]

  def get_operation_output_names(self, operation_name: str) -> Iterator[str]:
    """Names of the tensors that an operation makes.

    Args:
      operation_name: of an operation.

    Yields:
      Names of tensors.

    Raises:
      KeyError: there is no such operation.
    """
    for x in self._operations[operation_name].outputs:
      yield self._names[_key(x)]

  def get_operation_device(self, operation_name: str) -> str | None:
    """The device of an operation of a `tf.Graph`, maybe ""; None in an `mtf.Graph`.

    Args:
      operation_name: of an operation.
    """
    op = self._operations[operation_name]
    return None if self._is_mtf else str(op.device)

  def get_operation_mtf_dimension_names(self, operation_name: str) -> set[str]:
    """Names of the dimensions of the inputs and outputs of an operation.

    Args:
      operation_name: of an operation.
    """
    op = self._operations[operation_name]
    return {
      name
      for x in [*op.inputs, *op.outputs]
      for name in self.get_tensor_mtf_dimension_names(self._names[_key(x)])
    }

  # ------------------------------------------------------------------ tensors

  def get_all_tensor_names(self) -> Iterator[str]:
    """Names of the outputs of all operations."""
    yield from self._tensors

  def get_tensor_dtype(self, tensor_name: str) -> tf.DType:
    """The dtype of a tensor.

    Args:
      tensor_name: of a tensor.
    """
    return self._tensors[tensor_name].dtype

  def get_tensor_shape(self, tensor_name: str) -> tf.TensorShape:
    """The sizes of a tensor.

    Args:
      tensor_name: of a tensor.
    """
    x = self._tensors[tensor_name]
    return tf.TensorShape(x.shape.to_integer_list) if self._is_mtf else x.shape

  def get_tensor_num_entries(
    self,
    tensor_name: str,
    partial_layout: Mapping[str, str] | None = None,
    mesh_dimension_to_size: Mapping[str, int] | None = None,
  ) -> int:
    """Number of elements of a tensor, or of its slice.

    Args:
      tensor_name: of a tensor.
      partial_layout: mesh dimension by name of tensor dimension.
      mesh_dimension_to_size: sizes of the mesh dimensions.

    Raises:
      GraphError: the shape of a tf.Tensor is not static.
    """
    count = self.get_tensor_shape(tensor_name).num_elements()
    if count is None:
      raise GraphError(f"the shape of {tensor_name} is not static: its size is not known")
    if partial_layout and mesh_dimension_to_size is not None:
      for name in self.get_tensor_mtf_dimension_names(tensor_name):
        if name in partial_layout:
          count = -(-count // mesh_dimension_to_size[partial_layout[name]])
    return int(count)

  def get_tensor_size(
    self,
    tensor_name: str,
    partial_layout: Mapping[str, str] | None = None,
    mesh_dimension_to_size: Mapping[str, int] | None = None,
  ) -> int:
    """Bytes of a tensor, or of its slice; arguments as of `get_tensor_num_entries`."""
    entries = self.get_tensor_num_entries(tensor_name, partial_layout, mesh_dimension_to_size)
    return int(self.get_tensor_dtype(tensor_name).size) * entries

  def get_tensor_device(self, tensor_name: str) -> str | None:
    """The device of a tensor of a `tf.Graph`, maybe ""; None in an `mtf.Graph`.

    Args:
      tensor_name: of a tensor.
    """
    x = self._tensors[tensor_name]
    return None if self._is_mtf else str(x.device)

  def is_tensor_on_canonical_device(self, tensor_name: str) -> bool:
    """True if a tensor has no device, or the canonical one.

    Args:
      tensor_name: of a tensor.
    """
    device = self.get_tensor_device(tensor_name)
    return not device or device == self.canonical_device

  def get_tensor_mtf_dimension_names(self, tensor_name: str) -> list[str]:
    """Names of the dimensions of a tensor; of a tf.Tensor there are none.

    Args:
      tensor_name: of a tensor.
    """
    x = self._tensors[tensor_name]
    return list(x.shape.dimension_names) if self._is_mtf else []

  def set_tensor_final(self, tensor_name: str) -> None:
    """Marks a tensor as one that is never freed.

    Args:
      tensor_name: of a tensor.

    Raises:
      KeyError: there is no such tensor.
    """
    self._tensors[tensor_name]
    self._final.add(tensor_name)

  def is_tensor_final(self, tensor_name: str) -> bool:
    """True if a tensor is marked as final: never freed.

    Args:
      tensor_name: of a tensor.

    Raises:
      KeyError: there is no such tensor.
    """
    self._tensors[tensor_name]
    return tensor_name in self._final

  def name_of(self, tensor: Tensor) -> str:
    """The name of an `mtf.Tensor` here.

    Args:
      tensor: a tensor of the graph.

    Raises:
      GraphError: it is not in the graph.
    """
    if tensor not in self._names:
      raise GraphError(f"{tensor} is not in the graph, or was made after its GraphInterface")
    return self._names[tensor]

  # ------------------------------------------------------------- whole graphs

  def compute_cost_graph(self, devices: Sequence[str] | None = None) -> Any:
    """The graph as a `CostGraphDef`.

    Args:
      devices: if given, tensors on other devices have no size and no shape.

    Returns:
      A protocol buffer.
    """
    result = _cost_graph_class()()
    ids = {name: i for i, name in enumerate(self._operations)}
    maker = {
      x: (ids[name], port)
      for name in self._operations
      for port, x in enumerate(self.get_operation_output_names(name))
    }
    for name in self._operations:
      node = result.node.add(name=name, id=ids[name])
      device = self.get_operation_device(name)
      if device is not None:
        node.device = device
      for x in self.get_operation_input_names(name):
        preceding, port = maker[x]
        node.input_info.add(preceding_node=preceding, preceding_port=port)
      for x in self.get_operation_output_names(name):
        node.is_final = node.is_final or self.is_tensor_final(x)
        info = node.output_info.add(
          alias_input_port=-1, dtype=self.get_tensor_dtype(x).as_datatype_enum
        )
        device = self.get_tensor_device(x)
        if devices is None or device is None or device in devices:
          info.size = self.get_tensor_size(x)
          info.shape.CopyFrom(self.get_tensor_shape(x).as_proto())
        else:
          info.size = 0
    return result

  def compute_memory_contents_under_schedule(self, schedule: Iterable[int]) -> list[frozenset[str]]:
    """Computes the live tensors at each step of a schedule.

    Args:
      schedule: numbers of the operations, in the order in which they run.

    Returns:
      For each operation the names of the tensors that are live right after it ran.
    """
    names = list(self._operations)
    uses = {x: int(x in self._final) for x in self._tensors}
    for name in names:
      for x in self.get_operation_input_names(name):
        uses[x] += 1
    alive: set[str] = set()
    contents = []
    for index in schedule:
      outputs = list(self.get_operation_output_names(names[index]))
      alive.update(outputs)
      contents.append(frozenset(alive))
      alive.difference_update(x for x in outputs if not uses[x])
      for x in self.get_operation_input_names(names[index]):
        uses[x] -= 1
        if not uses[x]:
          alive.remove(x)
    return contents


def _key(x: Any) -> Any:
  return x if isinstance(x, Tensor) else x.ref()


def _cost_graph_class() -> Any:
  """Class of the CostGraphDef message; TensorFlow has its descriptor but no public name."""
  descriptor = descriptor_pool.Default().FindMessageTypeByName("tensorflow.CostGraphDef")
  return message_factory.GetMessageClass(descriptor)
