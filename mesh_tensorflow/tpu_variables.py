"""A name of the archived package for `mesh_tensorflow.tpu.variables`."""

from mesh_tensorflow.tpu.variables import TF_23, ReplicatedVariable, VariableBase

__all__ = ["TF_23", "ReplicatedVariable", "VariableBase"]
