"""Keras models on a mesh: `mtf.keras.enable()`, then `keras.distribution` means what it says.

    serving            Keras' own distribution API under TensorFlow: `enable`
    parallelize        the same for one model: `parallelize(model, "rows:2,cols:2")`
    parallel_model     `ParallelModel`, with the methods of a keras.Model
    hooks              Keras' own loops, with the mesh's functions in them
    programs           a program for each size of batch; steps: what Keras computes in one
    batches            what Keras' loops hand over, as tensors
    layouts            the layout: searched, by hand, or in Keras' words
    meshes             what may stand for a mesh; `AutoParallel`
    mirror             the state: on the mesh, or in the model's own variables while Python uses it
    summary            how the variables lie on the mesh

It is imported when `mtf.keras` is asked for first: Keras takes a second. Within this room `import
keras` is Keras itself.
"""

from mesh_tensorflow.keras.meshes import AutoParallel
from mesh_tensorflow.keras.parallel_model import ParallelModel
from mesh_tensorflow.keras.parallelize import parallelize
from mesh_tensorflow.keras.serving import disable, enable, is_enabled

__all__ = ["AutoParallel", "ParallelModel", "disable", "enable", "is_enabled", "parallelize"]
