"""What `run` does: train, evaluate, score, translate, export; `utils.py` has the public names."""
