"""The gin-configured Transformer of Mesh TensorFlow.

Files beside the rooms are the module names of the archived package, a few lines each, which gin
files and programs use: `transformer`, `transformer_layers`, `dataset`, `utils` and others, and the
programs `main` and `launch`. What they name is in the rooms. A room imports from those above it
only.

    data          text to ids, `files` and `vocabularies`; examples, read, encoded and packed
    model         a model and its programs on a mesh: stacks, `layers`, `attention`, `moe`,
                  embeddings, decoding; steps of training and evaluation; mesh and sizes of batches
    gin_config    reading and checking of gin files
    generation    prefill, decode, scheduler, sampling: prompts in, texts out
    training      a model with its folder: the Transformer's trainer, its configuration
    modes         what `utils.run` does: one file a mode, with its whole loop
    commands      the command line: the trainer, and what starts several of it

`data`, `data/vocabularies`, `model/layers` and `modes` list their files: to add one of a kind, copy
a file and name it in that list.
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
