"""Subword vocabularies by SentencePiece: `mesh_tensorflow.transformer.subword_vocabulary`."""

from mesh_tensorflow.transformer.data.vocabularies.subwords import (
  UNK_ID,
  SentencePieceVocabulary,
  get_subword_vocabulary,
  train_subword_vocabulary,
)

__all__ = [
  "UNK_ID",
  "SentencePieceVocabulary",
  "get_subword_vocabulary",
  "train_subword_vocabulary",
]
