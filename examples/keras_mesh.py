"""A Keras model under `keras.distribution`, on four virtual CPU devices; its layout is searched.

python -m mesh_tensorflow.examples.keras_mesh
"""

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import keras
import numpy as np
from keras import layers


def main() -> None:
  mtf.virtual_cpu_devices(4)
  mtf.keras.enable()  # From here on keras.distribution means what it says.
  keras.distribution.set_distribution(mtf.keras.AutoParallel(mesh_shape="rows:2,cols:2"))

  keras.utils.set_random_seed(0)
  tokens = keras.Input([12], dtype="int32")
  x = layers.Embedding(64, 32, name="embedding")(tokens)
  x = x + layers.MultiHeadAttention(4, 8, name="attention")(x, x, use_causal_mask=True)
  x = x + layers.Dense(32, name="down")(layers.Dense(128, "gelu", name="up")(x))
  logits = layers.Dense(64, name="logits")(layers.LayerNormalization(name="norm")(x))
  model = keras.Model(tokens, logits, name="lm")

  # Each token is the one before plus 3, but for the first.
  texts = (np.random.default_rng(0).integers(0, 64, [512, 1]) + 3 * np.arange(13)) % 64

  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(keras.optimizers.Adam(0.005), loss, metrics=["accuracy"])
  model.fit(texts[:, :-1], texts[:, 1:], batch_size=64, epochs=4, verbose=2)
  model.summary()
  print("next after 5, 8, 11:", np.argmax(model(np.array([[5, 8, 11] + 9 * [0]]))[0, 2]))


if __name__ == "__main__":
  main()
