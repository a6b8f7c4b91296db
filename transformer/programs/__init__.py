"""Programs on a mesh for the trainer: steps of training, evaluation and prediction."""
