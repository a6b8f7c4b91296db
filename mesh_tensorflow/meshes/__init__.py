"""Meshes: layouts, processors, slices of tensors and of variables, redistribution.

`contract` is what a mesh implementation owes a program, `mesh_impl` what follows from it. The
implementations are `placement`, `simd` and `tpu`; the last two exchange data by `collectives`.
"""
