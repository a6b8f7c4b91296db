"""Examples from texts: read, encoded, packed; `dataset.py` has the public names."""
