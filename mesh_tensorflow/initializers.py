"""`mtf.initializers`: initial values of variables, from `mesh_tensorflow.numerics`."""

from mesh_tensorflow.numerics.initializers import (
  Constant,
  FromFunction,
  GlorotUniform,
  Initializer,
  Ones,
  RandomNormal,
  RandomUniform,
  TruncatedNormal,
  Zeros,
  check_initializer,
  convert_to_initializer,
  default_initializer,
)

__all__ = [
  "Initializer",
  "Constant",
  "Zeros",
  "Ones",
  "RandomNormal",
  "TruncatedNormal",
  "RandomUniform",
  "GlorotUniform",
  "FromFunction",
  "default_initializer",
  "convert_to_initializer",
  "check_initializer",
]
