"""What a mesh computes for the trainer: steps of training, evaluation and prediction."""
