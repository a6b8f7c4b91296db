"""The U-Net of examples/unet3d.py: a training step on volumes that do not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from benchmarks.unet_sizes import UNetSize
from mesh_tensorflow.examples import unet3d


def make_function(
  size: UNetSize, mesh: str = "", implementation: str = "placement"
) -> mtf.Function:
  """The training step, a function of images and labels; its first result is the loss.

  Args:
    size: the network and the batch.
    mesh: mesh shape, of axes "d", "h" and "w", on virtual CPU devices; "" is one device.
    implementation: "placement" or "simd".
  """
  given = dataclasses.asdict(size)
  flags = [f"--{name}={value}" for name, value in given.items() if name != "name"]
  args = unet3d.parse_args([*flags, f"--implementation={implementation}"])
  return unet3d.Segmentation(args, mesh or "d:1").train_step


def make_volumes(size: UNetSize) -> list[tf.Tensor]:
  """The batch: images and labels."""
  return [tf.constant(a) for a in unet3d.volumes(0, size.batch_size, size.size)]


def make_step(size: UNetSize, mesh: str, implementation: str) -> Callable[[], Any]:
  """A step that returns the loss before the update; arguments as of `make_function`."""
  step, volumes = make_function(size, mesh, implementation), make_volumes(size)
  compiled = tf.function(lambda images, labels: step(images, labels)[0], autograph=False)
  return lambda: compiled(*volumes)
