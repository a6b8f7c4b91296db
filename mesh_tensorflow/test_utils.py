"""A name of the archived package for `mesh_tensorflow.running.numpy_converter`."""

from mesh_tensorflow.running.numpy_converter import NumpyConverter

__all__ = ["NumpyConverter"]
