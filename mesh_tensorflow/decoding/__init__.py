"""Decoding on a mesh: beam search, greedy decoding and sampling."""
