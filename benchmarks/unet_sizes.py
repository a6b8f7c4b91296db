"""The sizes of the U-Net that the benchmarks train; no TensorFlow is needed for them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class UNetSize:
  """A network and a batch; but for the name, the flags of examples/unet3d.py.

  Attributes:
    name: of the size.
    size: voxels along each of the three axes.
    filters: channels of the first level.
    levels: of resolution.
    batch_size: volumes.
  """

  name: str
  size: int
  filters: int
  levels: int
  batch_size: int


UNET_SIZES = {"unet": UNetSize("unet", size=64, filters=8, levels=3, batch_size=1)}
