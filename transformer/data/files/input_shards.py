"""Another name of `mesh_tensorflow.training.input_shards`, for data set functions."""

from mesh_tensorflow.training.input_shards import InputShard as InputShard
from mesh_tensorflow.training.input_shards import current as current
