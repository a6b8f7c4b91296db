"""Another name of `mesh_tensorflow.training.best_checkpoint`."""

from mesh_tensorflow.training.best_checkpoint import best_checkpoint as best_checkpoint
