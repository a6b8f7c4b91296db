"""A name of the archived package for `mesh_tensorflow.meshes.tpu.variables`."""

from mesh_tensorflow.meshes.tpu.variables import TF_23, ReplicatedVariable, VariableBase

__all__ = ["TF_23", "ReplicatedVariable", "VariableBase"]
