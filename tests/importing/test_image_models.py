"""Models of Keras for images, volumes and clicks, unmodified, beside Keras on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import mesh_tensorflow as mtf
from tests.importing import comparing, image_models, layouts

LONG_IF_SEARCHED = ("test_a_small_model_of_all_kinds_of_images_in_training",)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
  keras.utils.set_random_seed(5)
  yield
  set_floats("float32")


def set_floats(dtype: str) -> None:
  """Inputs and layers of models that are made from now on are of this dtype."""
  keras.config.set_floatx(dtype)
  keras.config.set_dtype_policy(dtype)  # It keeps the floats of the first layer that was made.


def both_of(
  model: keras.Model, training: bool, layout: Any, devices: list[str], *, simd: bool
) -> comparing.Both:
  """The model by Keras and on a mesh; batch statistics must be the same afterwards, too."""
  fn = image_models.caller(model, training)
  args = image_models.arguments(model)
  imported = comparing.imported_of(fn, args)
  rules = layout(imported) if callable(layout) else layout
  both = comparing.compare(fn, args, rules, devices, simd=simd, traced=True, imported=imported)
  expected = [v.numpy() for v in model.variables]
  both.imported.sync()
  for v, value in zip(model.variables, expected):
    np.testing.assert_allclose(v.numpy(), value, rtol=1e-4, atol=1e-5, err_msg=v.path)
  assert not both.imported.fallbacks
  return both


def test_a_small_model_of_all_kinds_of_images_in_training(cpu_devices: list[str]) -> None:
  model = image_models.small_images()
  layout = "x.0:r,conv2d_2.filters:c"
  both = both_of(model, True, layout, cpu_devices[:4], simd=True)
  assert both.difference < 1e-3


@pytest.mark.long
def test_a_small_model_of_all_kinds_of_images_in_inference(cpu_devices: list[str]) -> None:
  model = image_models.small_images()
  both = both_of(model, False, "x.0:r,x.1:c", cpu_devices[:4], simd=False)
  assert both.difference < 1e-4


@pytest.mark.long  # test_images.py has convolutions of volumes, with space split.
def test_u_net_of_volumes_with_space_split(cpu_devices: list[str]) -> None:
  model = image_models.unet_3d()
  both = both_of(model, True, "x.0:r,x.1:c", cpu_devices[:4], simd=True)
  assert both.difference < 1e-4


def test_recommender_with_tables_split_over_both_axes(cpu_devices: list[str]) -> None:
  model = image_models.recommender()
  tables = [("embedding.vocabulary", "r"), ("embedding_1.vocabulary", "c")]
  for simd, devices in ((False, cpu_devices[:4]), (True, cpu_devices)):
    both = both_of(model, True, [*tables, ("argument_0.0", "r")], devices, simd=simd)
    assert both.difference < 1e-5


# Each application in training and not, on both meshes and implementations, on a layout by hand and
# a drawn one.
WAYS = (
  # training, devices, simd, layout
  (False, 4, False, "drawn"),
  (False, 8, True, "by hand"),
  (True, 4, True, "drawn"),
  (True, 8, False, "by hand"),
)


# In training a model without pretrained weights is chaotic: that of one device changes by a tenth
# if its input does by 1e-7. So there it is float64.
@pytest.mark.long
@pytest.mark.timeout(3600)  # On placement each of a thousand operations is made for each device.
@pytest.mark.parametrize("way", WAYS, ids=lambda w: f"{'training' if w[0] else 'inference'}-{w[1]}")
@pytest.mark.parametrize("name", image_models.APPLICATIONS)
def test_applications(name: str, way: tuple[bool, int, bool, str], cpu_devices: list[str]) -> None:
  training, count, simd, kind = way
  if training:
    set_floats("float64")
  model = image_models.application(name)()
  if training:
    for layer in model._flatten_layers():
      if isinstance(layer, keras.layers.Dropout):
        layer.rate = 0.0

  def layout(imported: mtf.Imported) -> layouts.Layout:
    columns = count // 2
    if kind == "by hand":
      return layouts.by_hand(imported, columns)
    return layouts.drawn(imported, 2, columns, seed=image_models.APPLICATIONS.index(name))

  both = both_of(model, training, layout, cpu_devices[:count], simd=simd)
  # What is wrong is so by as much as it is large.
  assert both.own_difference(1e-6) < 1e-3 if training else both.own_difference(1e-3) < 1e-2
  known = {op.type for op in small_types()}
  assert {op.type for op in both.imported.operations} <= known


def small_types() -> list[Any]:
  """The operations of the small model, training and not."""
  model = image_models.small_images()
  return [
    op
    for training in (False, True)
    for op in mtf.from_tensorflow(
      image_models.caller(model, training),
      [mtf.TensorSpec(list(zip("bhwc", (4, *model.inputs[0].shape[1:]))), "float32")],
    ).operations
  ]
