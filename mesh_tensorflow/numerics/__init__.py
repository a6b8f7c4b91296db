"""Computations on one slice by plain TensorFlow: kernels, random bits, initial values."""
