"""Parts of models other than layers; `transformer.py` has the public names."""
