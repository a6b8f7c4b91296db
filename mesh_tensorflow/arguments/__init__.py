"""Checks of arguments by the annotations of the function called.

`checking` reads the annotations, `kinds` knows which kind each stands for, `kind` is what a kind
is, `values` and `containers` are those of Python, NumPy and TensorFlow. `declared` is what else
authors say of arguments: their ranges, and what they affect.
"""
