"""The recommender: it learns, on any mesh the same, and a device has its share of the tables."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf
from examples import mesh_flags, recommender

SMALL = ["--rows", "1000", "--most_rows", "4000", "--batch_size", "64", "--width", "8"]


def losses(mesh_shape: str, implementation: str, steps: int, *flags: str):
  args = recommender.parse_args([*SMALL, *flags])
  layout = recommender.layout_of(mesh_shape)
  model = recommender.Recommender(
    args, mesh_flags.make_mesh_impl(mesh_shape, layout, implementation)
  )
  return [model.train(b) for _, b in zip(range(steps), recommender.draw_clicks(args))], model


@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh_shape, implementation",
  [
    ("a:2,b:2", "simd"),
    pytest.param("a:8", "placement", marks=pytest.mark.long),
    pytest.param("a:2,b:4", "simd", marks=pytest.mark.long),
  ],
)
def test_the_mesh_changes_nothing(mesh_shape, implementation):
  want, _ = losses("one:1", "placement", 4)
  got, model = losses(mesh_shape, implementation, 4)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  sizes, n = model.bytes_by_device(), mtf.convert_to_shape(mesh_shape).size
  assert len(sizes) == n and set(sizes.values()) == {sum(sizes.values()) // n}


@pytest.mark.long
def test_it_learns():
  found, _ = losses("one:1", "placement", 300, "--batch_size", "256", "--lr", "0.2")
  assert np.mean(found[-50:]) < 0.66 < np.mean(found[:20])  # Chance is 0.693.


@pytest.mark.long
def test_program(capsys):
  recommender.main([*SMALL, "--train_steps", "2", "--mesh_shape", "a:2,b:2"])
  assert "on each of 4 devices" in capsys.readouterr().out
  with pytest.raises(mtf.MeshShapeError, match="splits over 2"):
    recommender.main([*SMALL, "--mesh_shape", "a:2,b:2,c:2"])
  with pytest.raises(mtf.ConfigError, match="batch_size 12 is no multiple of 8"):
    recommender.main(["--batch_size", "12", "--mesh_shape", "a:1"])
