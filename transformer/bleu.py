"""BLEU as a metric, for gin files that import it: `mesh_tensorflow.transformer.bleu`."""

from mesh_tensorflow.transformer.data.bleu import bleu

__all__ = ["bleu"]
