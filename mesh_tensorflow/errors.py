"""Typed errors: every error of the package derives from `MeshError`.

Most kinds are also a `ValueError`, so code written for the TF1 library, which
caught `ValueError`, goes on working; those in whose place it had a `TypeError`, an
`AssertionError`, a `KeyError` or a `NotImplementedError` are such a one, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_transformer_cli import untrusted


class MeshError(Exception):
  """Base class of every error that the package raises on purpose."""

  # AutoGraph raises an error of the same class, with the place in the user's code added,
  # only for classes whose constructor is this one. A type checker would take it for one that
  # returns anything.
  if not TYPE_CHECKING:
    __init__ = Exception.__init__


def _bounded(error: Exception) -> str:
  """The message of an error about what people hand in, which may quote it: not of any length."""
  text = Exception.__str__(error)
  # AutoGraph puts the places in the user's code in front.
  return text if text.startswith("in user code:") else untrusted.shortened(text)


class DimensionError(MeshError, ValueError):
  """A dimension is malformed, missing, or given twice."""


class DimensionTypeError(DimensionError, TypeError):
  """Something that is no dimension at all, or no list of dimensions."""


class ShapeError(MeshError, ValueError):
  """Shapes of the operands of an operation do not fit together."""


class SizeError(ShapeError, AssertionError):
  """Sizes, counts or paddings that do not go with the dimension they are given for."""


class DTypeError(MeshError, ValueError, TypeError):
  """The dtypes of the operands of an operation do not fit together."""


class LayoutError(MeshError, ValueError):
  """A tensor cannot be laid out on the mesh as the layout rules say."""


class LayoutTypeError(LayoutError, TypeError):
  """Something that is no layout at all."""


class MeshShapeError(MeshError, ValueError):
  """The mesh does not fit the devices."""


class GraphError(MeshError, ValueError):
  """An operation is used in a way that the graph does not allow."""


class ArgumentError(GraphError, TypeError, AssertionError):
  """An argument is missing, is of another kind than asked for, or must not be given."""


class NotLoweredError(GraphError, KeyError):
  """A lowering is asked for a tensor or an operation that it did not lower."""

  # KeyError shows the quoted form of its message.
  __str__ = Exception.__str__


class VariableError(MeshError, ValueError):
  """A variable is asked for with another shape or dtype, or does not exist."""


class DivisionError(MeshError, ValueError, ZeroDivisionError):
  """A division by the number zero."""


class GradientError(MeshError, ValueError):
  """A gradient was asked for that does not exist."""


class UnsupportedError(MeshError, NotImplementedError):
  """An operation that this mesh implementation or TensorFlow cannot run."""


class CollectiveError(MeshError, RuntimeError):
  """A collective failed: a device took another path, died, or timed out."""


class WorkerLostError(CollectiveError):
  """A worker process of the cluster was killed, failed, or hangs."""


class CheckpointError(MeshError, ValueError):
  """A checkpoint is missing, damaged, or of another model.

  Attributes:
    details: all names, where the text has the first ones of many.
  """

  details = ""
  __str__ = _bounded


class DamagedCheckpointError(CheckpointError):
  """Files of a checkpoint are missing, or are not what was written.

  Attributes:
    what: the damage, without advice.
  """

  what = ""


class NewerFormatError(CheckpointError):
  """A checkpoint is of a format that a newer version of the package writes."""


class StorageError(CheckpointError):
  """A file cannot be written or read: a full disk, a missing right, a file system that fails."""


class OutOfMemoryError(MeshError, MemoryError):
  """A program needs more memory than the devices or the machine have."""


class ConfigError(MeshError, ValueError):
  """A setting (gin binding, flag, file name) is wrong or contradicts another."""

  __str__ = _bounded


class LockedError(ConfigError):
  """Another process trains in the same folder."""


class DataError(MeshError, ValueError):
  """Input data is missing, empty, or malformed."""

  __str__ = _bounded


class NonFiniteError(MeshError, ArithmeticError):
  """The loss or a gradient became NaN or infinite."""


class StoppedError(MeshError, RuntimeError):
  """A signal asked the program to stop, and it saved what it had done."""


class RemovedNameError(MeshError, AttributeError):
  """A name of the TF1 library that has no meaning in TensorFlow 2; the text says what has."""


class RemovedImportError(MeshError, ImportError):
  """An import of a name of the TF1 library that has no meaning in TensorFlow 2."""


class InstallationError(MeshError, ImportError):
  """This Python, or what is installed in it, cannot run the package."""
