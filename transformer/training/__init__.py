"""The training loop and its surroundings: checkpoints, progress, stopping."""
