"""Typed errors: every error of the package derives from `MeshError`.

Most kinds are also a `ValueError`, so code written for the TF1 library, which
caught `ValueError`, goes on working.
"""

from __future__ import annotations


class MeshError(Exception):
  """Base class of every error that the package raises on purpose."""

  # AutoGraph raises an error of the same class, with the place in the user's code added,
  # only for classes whose constructor is this one.
  __init__ = Exception.__init__


class DimensionError(MeshError, ValueError):
  """A dimension is malformed, missing, or given twice."""


class ShapeError(MeshError, ValueError):
  """Shapes of the operands of an operation do not fit together."""


class DTypeError(MeshError, ValueError):
  """The dtypes of the operands of an operation do not fit together."""


class LayoutError(MeshError, ValueError):
  """A tensor cannot be laid out on the mesh as the layout rules say."""


class MeshShapeError(MeshError, ValueError):
  """The mesh does not fit the devices."""


class GraphError(MeshError, ValueError):
  """An operation is used in a way that the graph does not allow."""


class VariableError(MeshError, ValueError):
  """A variable is asked for with another shape or dtype, or does not exist."""


class GradientError(MeshError, ValueError):
  """A gradient was asked for that does not exist."""


class UnsupportedError(MeshError, NotImplementedError):
  """An operation that this mesh implementation or TensorFlow cannot run."""


class CollectiveError(MeshError, RuntimeError):
  """A collective failed: a device took another path, died, or timed out."""


class CheckpointError(MeshError, ValueError):
  """A checkpoint is missing, damaged, or of another model."""


class ConfigError(MeshError, ValueError):
  """A setting (gin binding, flag, file name) is wrong or contradicts another."""


class DataError(MeshError, ValueError):
  """Input data is missing, empty, or malformed."""


class NonFiniteError(MeshError, ArithmeticError):
  """The loss or a gradient became NaN or infinite."""
