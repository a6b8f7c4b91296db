"""Subword vocabularies of tensor2tensor: `mesh_tensorflow.transformer.t2t_vocabulary`."""

from mesh_tensorflow.transformer.data.vocabularies.t2t import T2tVocabulary, get_t2t_vocabulary

__all__ = ["T2tVocabulary", "get_t2t_vocabulary"]
