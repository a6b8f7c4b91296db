"""Numbers into a graph and out of it again, for tests of programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import RemovedNameError, ShapeError
from mesh_tensorflow.meshes.placement.mesh_impl import PlacementMeshImpl
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Graph, Mesh, Tensor
from mesh_tensorflow.running.lowering import Lowering


class NumpyConverter:
  """Converts between NumPy arrays, mtf Tensors and tf.Tensors, on a mesh of one device.

  It owns a graph and a mesh. Variables of the graph keep their values from one conversion
  to the next.
  """

  def __init__(self) -> None:
    self._graph = Graph()
    self._mesh = Mesh(self._graph, "mtf_mesh")
    self._variable_store = VariableStore()

  @property
  def graph(self) -> Graph:
    """The mtf graph."""
    return self._graph

  @property
  def mesh(self) -> Mesh:
    """The mesh, to make tensors on."""
    return self._mesh

  @property
  def session(self) -> Any:
    """Refuses: there are no sessions.

    Raises:
      RemovedNameError: always.
    """
    raise RemovedNameError(
      "NumpyConverter.session: TensorFlow 2 has no sessions; convert_mtf_tensor_to_np_array "
      "computes the value of a tensor"
    )

  def convert_np_array_to_mtf_tensor(
    self, x: Any, dim_names: Sequence[str] | None = None, dtype: tf.DType = tf.int32
  ) -> Tensor:
    """A constant `Tensor`.

    Args:
      x: an array, or nested lists.
      dim_names: a name for each axis; dim0, dim1, ... by default.
      dtype: dtype of the result; with the default, int32, fractions are cut off.

    Returns:
      A `Tensor` on `self.mesh`.

    Raises:
      ShapeError: there are not as many names as axes.
    """
    x = np.asarray(x)
    names = [f"dim{i}" for i in range(x.ndim)] if dim_names is None else list(dim_names)
    if len(names) != x.ndim:
      raise ShapeError(
        f"convert_np_array_to_mtf_tensor: {len(names)} names {names} for the {x.ndim} axes of an "
        f"array of shape {list(x.shape)}"
      )
    shape = Shape([(n, int(size)) for n, size in zip(names, x.shape)])
    return constant(self._mesh, x.astype(dtype.as_numpy_dtype), shape=shape, dtype=dtype)

  def convert_mtf_tensor_to_tf_tensor(self, mtf_tensor: Tensor) -> tuple[Lowering, tf.Tensor]:
    """The value of a tensor of `self.graph`.

    Args:
      mtf_tensor: a `Tensor`.

    Returns:
      (a `Lowering` of the graph on one device, the value as a tf.Tensor).
    """
    impl = PlacementMeshImpl("all:1", {}, [""], variable_store=self._variable_store)
    lowering = Lowering(self._graph, {self._mesh: impl})
    return lowering, lowering.export_to_tf_tensor(mtf_tensor)

  def convert_mtf_tensor_to_np_array(self, x_mtf: Tensor) -> np.ndarray:
    """The value of a tensor of `self.graph`, as an array.

    Args:
      x_mtf: a `Tensor`.

    Returns:
      An array of its shape.
    """
    value: np.ndarray = self.convert_mtf_tensor_to_tf_tensor(x_mtf)[1].numpy()
    return value
