"""Imperative tensors: `mtf.eager` runs operations when they are made."""
