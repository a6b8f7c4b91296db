"""The picture of docs/keras.md: `python -m docs.tools.keras_picture` writes it.

A step of training of a small Keras model, as `ParallelModel.picture` draws it.
"""

from __future__ import annotations

import pathlib

import keras
import numpy as np

import mesh_tensorflow as mtf

FILE = pathlib.Path(__file__).resolve().parent.parent / "drawings" / "keras.svg"


def draw() -> str:
  """The picture."""
  layers = [
    keras.Input([8]),
    keras.layers.Dense(32, activation="gelu", name="up"),
    keras.layers.Dense(4, name="down"),
  ]
  model = keras.Sequential(layers, name="mlp")
  model.compile("adam", "mse")
  parallel = mtf.keras.parallelize(model, "one:1")
  parallel.predict(np.zeros([4, 8], np.float32), verbose=0)
  return parallel.picture()


if __name__ == "__main__":
  FILE.write_text(draw(), encoding="utf-8")
  print(f"written: {FILE}")
