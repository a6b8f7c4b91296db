"""The gin-configured Transformer of Mesh TensorFlow.

Files beside the rooms are the module names of the archived package, a few lines each, which gin
files and programs use: `transformer`, `transformer_layers`, `dataset`, `utils` and others, and the
programs `main` and `launch`. What they name is in the rooms. A room imports from those above it
only; `attention`, `moe`, `fixup_layers` and `universal_transformer` are also names of the archived
package.

    files, meshes          what is read, and by which worker; devices, layouts, sizes of batches
    vocabularies, data     text to ids; examples from texts: read, encoded, packed
    schedules              learning rates
    models, embeddings     what a model is made of but its layers: stacks, decoding; embeddings
    moe, attention         mixtures of experts; parts of attention: functions, masks, variables
    layers                 the layers of a Transformer
    fixup_layers, universal_transformer
    programs               what a mesh computes: a file a program: training, evaluation
    gin_config             reading and checking of gin files
    generation             prefill, decode, scheduler, sampling: prompts in, texts out
    training               a model with its folder: the Transformer's trainer, its configuration
    modes                  what `utils.run` does: one file a mode, with its whole loop
    commands               the command line: the trainer, and what starts several of it

`data`, `layers`, `modes`, `schedules` and `vocabularies` list their files: to add one of a kind,
copy a file and name it in that list.
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
