"""The training loop, and what surrounds it: checkpoints, progress, stopping."""
