"""The training loop, `Trainer`, and its parts: data, checkpoints, signals, validation, reports.

Nothing here knows what is trained: a program is a function of named tensors.
"""
