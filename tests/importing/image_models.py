"""Models of Keras for images, volumes and clicks: whole ones, and a small one of the same kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers


def _norm(x: Any, activation: Any = None) -> Any:
  x = layers.BatchNormalization()(x)
  return x if activation is None else layers.Activation(activation)(x)


def _residual(x: Any) -> Any:
  """A block of ResNet50, with a shortcut of stride 2."""
  shortcut = _norm(layers.Conv2D(16, 1, strides=2)(x))
  y = _norm(layers.Conv2D(8, 1, strides=2)(x), "relu")
  y = _norm(layers.Conv2D(8, 3, padding="same")(y), "relu")
  return layers.Activation("relu")(layers.Add()([shortcut, _norm(layers.Conv2D(16, 1)(y))]))


def _inverted(x: Any, activation: str, divided: bool) -> Any:
  """A block of MobileNetV3 or EfficientNet: depthwise, with squeeze and excitation."""
  y = _norm(layers.Conv2D(24, 1, padding="same", use_bias=False)(x), activation)
  y = layers.ZeroPadding2D(1)(y)
  y = _norm(layers.DepthwiseConv2D(3, padding="valid", use_bias=False)(y), activation)
  s = layers.GlobalAveragePooling2D(keepdims=True)(y)
  s = layers.Conv2D(8, 1, activation="relu")(s)
  s = layers.Conv2D(24, 1)(s)
  s = layers.ReLU(6.0)(s + 3.0) * (1.0 / 6.0) if divided else layers.Activation("sigmoid")(s)
  y = _norm(layers.Conv2D(16, 1, padding="same", use_bias=False)(layers.Multiply()([y, s])))
  return layers.Dropout(0.0, noise_shape=(None, 1, 1, 1))(y)


def _convnext(x: Any) -> Any:
  """A block of ConvNeXt: a convolution with as many groups as channels, dense layers, gelu."""
  channels = x.shape[-1]
  y = layers.Conv2D(channels, 3, padding="same", groups=channels)(x)
  y = layers.LayerNormalization(epsilon=1e-6)(y)
  y = layers.Dense(32, activation="gelu")(y)
  return layers.Add()([x, layers.Dense(channels)(y)])


def small_images() -> keras.Model:
  """What ResNet50, MobileNetV3, EfficientNetB0 and ConvNeXtTiny are made of, in small."""
  x = inputs = layers.Input([16, 16, 4])
  x = layers.Rescaling(0.5)(x)
  x = layers.ZeroPadding2D(3)(x)
  x = _norm(layers.Conv2D(8, 7, strides=2)(x), "relu")
  x = layers.MaxPooling2D(3, strides=2)(layers.ZeroPadding2D(1)(x))
  x = _residual(x)
  x = _inverted(x, "hard_swish", divided=True)
  x = _inverted(x, "swish", divided=False)
  x = _convnext(x)
  x = layers.GlobalAveragePooling2D()(x)
  return keras.Model(inputs, layers.Dense(6)(x))


def unet_3d() -> keras.Model:
  """A U-Net of two levels, of volumes of 8 positions a side.

  Without relu: of its zeros the normalization makes numbers that are equal but for rounding, which
  depends on the instructions that a processor has, and pooling gives equal ones a gradient each.
  """
  x = inputs = layers.Input([8, 8, 8, 2])
  skips = []
  for channels in (4, 8):
    x = layers.Conv3D(channels, 3, padding="same", activation="swish")(x)
    x = layers.BatchNormalization()(x)
    skips.append(x)
    x = layers.MaxPooling3D(2)(x)
  x = layers.Conv3D(16, 3, padding="same", activation="swish")(x)
  for channels, skip in zip((8, 4), reversed(skips)):
    x = layers.Conv3DTranspose(channels, 2, strides=2, padding="same")(x)
    x = layers.Conv3D(channels, 3, padding="same", activation="swish")(
      layers.Concatenate()([x, skip])
    )
  return keras.Model(inputs, layers.Conv3D(3, 1, activation="softmax")(x))


def recommender() -> keras.Model:
  """Three tables, of which a click has a row each, and dense layers."""
  ids = [layers.Input([], dtype="int32", name=n) for n in ("user", "item", "shop")]
  rows = [layers.Embedding(n, 8)(i) for n, i in zip((48, 32, 16), ids)]
  x = layers.Dense(16, activation="relu")(layers.Concatenate()(rows))
  return keras.Model(ids, layers.Dense(2)(x))


def application(name: str, size: int = 32) -> Callable[[], keras.Model]:
  """One of `keras.applications`, without weights and for small images."""
  return lambda: getattr(keras.applications, name)(
    weights=None, input_shape=(size, size, 3), classes=8, classifier_activation=None
  )


APPLICATIONS = ("ResNet50", "MobileNetV3Small", "EfficientNetB0", "ConvNeXtTiny")


def arguments(model: keras.Model, batch: int = 4) -> list[np.ndarray]:
  """Numbers for the inputs of a model: normal ones, or ids of its smallest table."""
  rng = np.random.default_rng(4)
  made = []
  for x in model.inputs:
    shape = (batch, *x.shape[1:])
    if x.dtype == "int32":
      made.append(rng.integers(0, 16, shape).astype(np.int32))
    else:
      made.append(rng.normal(size=shape).astype(x.dtype))
  return made


def caller(model: keras.Model, training: bool) -> Callable[..., Any]:
  """The model as a function of its inputs."""
  if len(model.inputs) == 1:
    return lambda x: model(x, training=training)
  return lambda *xs: model(list(xs), training=training)
