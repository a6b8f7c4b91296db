"""Keras models on a mesh: `mtf.keras.enable()`, then `keras.distribution` means what it says.

    serving            Keras' own distribution API under TensorFlow: `enable`
    parallelize        the same for one model, "rows:2,cols:2" say; `ParallelModel`
    hooks              Keras' own loops, with the mesh's functions in them
    programs           a program for each size of batch; steps: what Keras computes in one
    stages             where a model is cut into the stages of a pipeline
    batches            what Keras' loops hand over, as tensors
    layouts            mesh and layout: searched, by hand, or in Keras' words; `AutoParallel`
    processes          several processes: who there is, their devices, input, files and end
    mirror             the state: on the mesh, or in the model's own variables while Python uses it
    spilling           weights that are loaded before they have slices, in a temporary file
    summary            how the variables lie on the mesh

It is imported when `mtf.keras` is asked for first: Keras takes a second. Within this room `import
keras` is Keras itself.
"""

from mesh_tensorflow.keras.layouts import AutoParallel
from mesh_tensorflow.keras.parallelize import ParallelModel, parallelize
from mesh_tensorflow.keras.serving import disable, enable, is_enabled

__all__ = ["AutoParallel", "ParallelModel", "disable", "enable", "is_enabled", "parallelize"]
