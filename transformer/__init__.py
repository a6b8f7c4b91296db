"""The gin-configured Transformer of Mesh TensorFlow.

Gin files and programs use the modules right in this package, whose names are those of the TF1
library: `transformer`, `transformer_layers`, `dataset`, `utils` and others, and the programs `main`
and `launch`. Most of them name what is in one of the packages below. A package imports from those
above it only; `attention`, `moe`, `fixup_layers` and `universal_transformer` are also names of the
TF1 library.

    files, meshes          what is read, and by which worker; devices, layouts, sizes of batches
    vocabularies, data     text to ids; examples from texts: read, encoded, packed
    models                 what a model is made of but its layers: stacks, embeddings, decoding
    moe, attention         mixtures of experts; attention functions and their parameters
    layers                 the layers of a Transformer
    fixup_layers, universal_transformer
    programs               what a mesh computes: steps of training, evaluation and prediction
    gin_config             reading and checking of gin files
    training               the training loop, checkpoints, progress, stopping
    modes                  what `utils.run` does: training, evaluation, scoring, translation, export
"""

from mesh_tensorflow.transformer import (
  attention,
  dataset,
  learning_rate_schedules,
  moe,
  transformer,
  transformer_layers,
  utils,
  vocabulary,
)

__all__ = [
  "attention",
  "dataset",
  "learning_rate_schedules",
  "moe",
  "transformer",
  "transformer_layers",
  "utils",
  "vocabulary",
]
