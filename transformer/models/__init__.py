"""What a model is made of apart from its layers; `transformer.py` has the public names."""
