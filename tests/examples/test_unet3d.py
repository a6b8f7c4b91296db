"""The U-Net of volumes: its loss on several meshes, its memory, its picture."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf
from examples import unet3d

TINY = ["--size", "16", "--filters", "2", "--levels", "2", "--batch_size", "1", "--lr", "0.03"]


def _losses(mesh_shape, steps, implementation="simd"):
  args = unet3d.parse_args([*TINY, "--implementation", implementation])
  segmentation = unet3d.Segmentation(args, mesh_shape)
  return [segmentation.train(seed)[0] for seed in range(steps)]


@pytest.mark.slow
def test_the_loss_does_not_depend_on_the_split():
  alone = _losses("d:1", 4)
  assert len(set(alone)) == 4
  np.testing.assert_allclose(_losses("d:2,h:2", 4), alone, rtol=1e-4)


@pytest.mark.long
def test_fifty_losses_do_not_depend_on_the_split():
  alone = _losses("d:1", 50)
  assert np.mean(alone[-10:]) < 0.97 * np.mean(alone[:10])
  for mesh in ("w:2", "d:2,h:2", "d:2,h:2,w:2"):
    np.testing.assert_allclose(_losses(mesh, 50), alone, rtol=1e-4)


def test_a_volume_too_large_for_one_device_fits_eight():
  args = unet3d.parse_args(["--size", "32", "--filters", "2", "--levels", "2", "--batch_size", "1"])
  alone = unet3d.Segmentation(args, "d:1")
  split = unet3d.Segmentation(args, "d:2,h:2,w:2")
  limit = alone.memory() / 4  # Of an eighth of the volume, and what is exchanged.
  with pytest.raises(mtf.OutOfMemoryError, match="split space over more devices"):
    alone.check_memory(limit)
  split.check_memory(limit)


@pytest.mark.long
def test_a_volume_too_large_for_one_device_trains_on_eight():
  flags = ["--size", "64", "--filters", "2", "--levels", "2", "--batch_size", "1", "--steps", "2"]
  flags += ["--epochs", "1", "--memory_mb", "30"]
  with pytest.raises(mtf.OutOfMemoryError):
    unet3d.main([*flags, "--mesh_shape", "d:1"])
  assert len(unet3d.main([*flags, "--mesh_shape", "d:2,h:2,w:2"])) == 1


@pytest.mark.long
def test_blobs_are_found(tmp_path, capsys):
  picture = tmp_path / "slice.png"
  flags = ["--size", "24", "--filters", "4", "--levels", "2", "--picture", str(picture)]
  dice = unet3d.main([*flags, "--epochs", "3", "--steps", "25"])
  assert dice[-1] > 0.7 and dice[-1] > dice[0]
  assert picture.read_bytes().startswith(b"\x89PNG")
  assert "epoch 3" in capsys.readouterr().out


def test_drawn_volumes_have_bright_blobs():
  images, labels = unet3d.volumes(3, 2, 24)
  assert images.shape == labels.shape == (2, 24, 24, 24, 1)
  assert 0.01 < labels.mean() < 0.3
  assert images[labels == 1].mean() - images[labels == 0].mean() == pytest.approx(1.5, abs=0.1)
  again, _ = unet3d.volumes(3, 2, 24)
  np.testing.assert_array_equal(again, images)


def test_an_axis_that_splits_no_space_is_refused():
  with pytest.raises(mtf.MeshShapeError, match="axes d, h and w"):
    unet3d.Segmentation(unet3d.parse_args(TINY), "rows:2")


@pytest.mark.parametrize(
  "flags,words",
  [
    (["--size", "30"], "divisible by 4"),
    (["--steps", "0"], "at least 1"),
    (["--picture", "no/such/folder/a.png"], "no folder no/such/folder"),
  ],
)
def test_wrong_flags_are_told_before_anything_runs(flags, words, capsys):
  with pytest.raises(SystemExit):
    unet3d.parse_args(flags)
  assert words in capsys.readouterr().err
