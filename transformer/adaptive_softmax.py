"""The adaptive softmax, under its old name: `mesh_tensorflow.transformer.adaptive_softmax`."""

from mesh_tensorflow.transformer.embeddings.adaptive_softmax import (
  AdaptiveSoftmaxVocabEmbedding,
  adaptive_softmax_loss_fn,
)

__all__ = ["AdaptiveSoftmaxVocabEmbedding", "adaptive_softmax_loss_fn"]
