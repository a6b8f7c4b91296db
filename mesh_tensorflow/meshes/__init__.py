"""Meshes: layouts, processors, slices of tensors and of variables, redistribution."""
