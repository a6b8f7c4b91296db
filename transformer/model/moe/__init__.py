"""Mixtures of experts; `transformer/moe.py` has the old names."""
