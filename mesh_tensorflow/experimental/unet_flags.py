"""Flags of `unet`."""

from __future__ import annotations

from absl import flags

from mesh_tensorflow.experimental import flag_definitions as define

# They are flags of the module that calls `define_flags`.
flags.disclaim_key_flags()


def define_flags() -> None:
  """Defines them."""
  define.boolean("sampled_2d_slices", False, "Whether the model is of slices of scans, in 2-D.")
  define.integer("ct_resolution", 128, "Positions of a scan along each axis.")
  define.integer("n_dataset_read_interleave", 16, "Files that are read in turn.")
  define.integer("n_dataset_processes", 16, "Scans that are parsed at a time.")
  define.integer("batch_size_train", 32, "Examples in a batch of training.")
  define.integer("batch_size_eval", 32, "Examples in a batch of evaluation.")
  define.integer("image_nx_block", 8, "Blocks along the first axis of a scan.")
  define.integer("image_ny_block", 8, "Blocks along its second axis.")
  define.integer("image_c", 1, "Channels of an image: consecutive slices, in 2-D.")
  define.integer("label_c", 3, "Classes: background, liver, lesion.")
  define.integer(
    "pred_downsample", 2, "Positions of which predictions are averages, along an axis."
  )
  define.boolean("output_ground_truth", True, "Whether predictions have the labels beside them.")
  define.integer(
    "n_base_filters", 32, "Channels of the first level; each deeper one has twice them."
  )
  define.integer("network_depth", 4, "Levels of resolution.")
  define.integer("n_conv_per_block", 2, "Convolutions of a level, on each side.")
  define.boolean(
    "with_batch_norm", True, "Whether convolutions are followed by batch normalization."
  )
  define.number("dropout_keep_p", 0.5, "Probability to keep a number; 1 for no dropout.")
  define.number("xen_liver_weight", 8.0, "Weight of the liver's positions in the cross-entropy.")
  define.number("xen_lesion_weight", 16.0, "What lesions weigh more than the liver, plus 1 of all.")
  define.number("dice_loss_weight", 0.2, "Part of the Dice loss in the loss; 0 to 1.")
  define.number("dice_epsilon", 0.1, "Added to the area that the Dice loss divides by.")
  define.number("image_translate_ratio", 0.0, "Standard deviation of shifts, in widths of a scan.")
  define.number("image_transform_ratio", 0.0, "Standard deviation of the entries of random maps.")
  define.number("image_noise_probability", 0.0, "Probability to add noise to a scan.")
  define.number("image_noise_ratio", 0.0, "Largest standard deviation of the noise.")
  define.number("image_corrupt_ratio_mean", 0.0, "Part of a scan that is set to zero, on average.")
  define.number("image_corrupt_ratio_stddev", 0.0, "Standard deviation of that part.")
  define.number("per_class_intensity_scale", 0.0, "Standard deviation of changes of intensity.")
  define.number("per_class_intensity_shift", 0.0, "Mean change of the intensity of lesions.")
  define.string("mtf_dtype", "bfloat16", "dtype of data, weights and activations.")
  define.string(
    "layout",
    "batch:cores, image_nx_block:rows, image_ny_block:columns",
    "Which dimension is split over which axis of the mesh.",
  )
  define.string(
    "train_file_pattern", "", "TFRecord files of training; {} stands for ct_resolution."
  )
  define.string("eval_file_pattern", "", "TFRecord files of evaluation; likewise.")
