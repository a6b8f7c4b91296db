"""Spatial partitioning: a U-Net for scans that no device holds, its data, and its training.

    unet              the model of 2-D and 3-D scans in blocks, its losses and metrics
    input_reader      slices of each example for each processor, from `tf.data`
    model_executor    training and evaluation on a mesh: `python -m
                      mesh_tensorflow.experimental.model_executor`
    data_aug_lib      flips, rotations, noise, projective maps, made-up lesions
    offline_data_aug  the same, written to files beforehand
    volumes           blocks of NIfTI, HDF5 and Zarr files, read without the rest of the file

Modules are imported by name; nothing is imported here.
"""
