"""Keras models on a mesh: `mtf.keras.parallelize(model, "rows:2,cols:2")`.

    parallelize        what a user calls
    parallel_model     `ParallelModel`, with the methods of a keras.Model
    hooks              Keras' own loops, with the mesh's functions in them
    programs           a program for each size of batch; steps: what Keras computes in one
    batches            what Keras' loops hand over, as tensors
    deciding           the layout: searched, by hand, or in Keras' words
    layouts            Keras' maps of variables' layouts as layout rules
    meshes             what may stand for a mesh
    mirror             the state on the mesh, and in the model's own variables
    access             who reads or writes those
    summary            how the variables lie on the mesh

It is imported when `mtf.keras` is asked for first: Keras takes a second. Within this room `import
keras` is Keras itself.
"""

from mesh_tensorflow.keras.parallel_model import ParallelModel
from mesh_tensorflow.keras.parallelize import parallelize

__all__ = ["ParallelModel", "parallelize"]
