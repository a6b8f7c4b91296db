"""BLEU as metrics, for gin files that import it: `mesh_tensorflow.transformer.bleu`."""

from mesh_tensorflow.transformer.data.bleu import bleu, moses_bleu

__all__ = ["bleu", "moses_bleu"]
