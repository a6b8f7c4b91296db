"""Meshes: layouts, processors, slices of tensors and of variables, redistribution.

    contract, mesh_impl   what a mesh implementation owes a program, and what follows from it
    placement, simd, tpu   the implementations
    collectives     what the last two exchange data by
    layout          which processor has what of a tensor
    layout_names    rules for dimensions that nothing has
    laid_out        the slices of a tensor; slices: TensorFlow code on one of them
    store           the slices of variables; remade_stores: a program that makes them at each step
    redistribution, exchange   from one layout to another, moving the fewest bytes
    for_operations  a lowering, as operations use it
    memory          that of this process, and errors when it is used up
    topology        TPU cores as the processors of a mesh
    devices, variable_placer   for programs of the TF1 library

Operations import none of the implementations.
"""
