"""Embeddings of tokens: `mesh_tensorflow.transformer.vocab_embeddings`; see `embeddings`."""

from mesh_tensorflow.transformer.embeddings.adaptive import AdaptiveVocabEmbedding
from mesh_tensorflow.transformer.embeddings.factorized import FactorizedVocabEmbedding
from mesh_tensorflow.transformer.embeddings.mixtape import Mixtape
from mesh_tensorflow.transformer.embeddings.mixture_of_softmaxes import MixtureOfSoftmaxes

__all__ = [
  "AdaptiveVocabEmbedding",
  "FactorizedVocabEmbedding",
  "Mixtape",
  "MixtureOfSoftmaxes",
]
