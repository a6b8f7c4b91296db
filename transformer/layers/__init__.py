"""The layers of a Transformer; `transformer_layers.py` has the public names."""
