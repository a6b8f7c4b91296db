"""The picture of docs/importing.md: `python -m docs.tools.imported_picture` writes it.

A block of a Transformer in plain TensorFlow, imported, drawn by `Imported.save_picture`.
"""

from __future__ import annotations

import pathlib
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf

FILE = pathlib.Path(__file__).resolve().parent.parent / "drawings" / "imported.svg"


class Block(tf.Module):
  """Attention of two heads, and a dense layer."""

  def __init__(self) -> None:
    super().__init__()
    shapes = {"query": [8, 2, 4], "key": [8, 2, 4], "value": [8, 2, 4], "out": [2, 4, 8]}
    self.attention = {name: tf.Variable(tf.ones(shape)) for name, shape in shapes.items()}
    self.up, self.down = tf.Variable(tf.ones([8, 16])), tf.Variable(tf.ones([16, 8]))

  def __call__(self, x: Any) -> Any:
    with tf.name_scope("block/attention"):
      q, k, v = (
        tf.einsum("btd,dhk->bthk", x, self.attention[name]) for name in ("query", "key", "value")
      )
      weights = tf.nn.softmax(tf.einsum("bthk,bshk->bhts", q, k))
      x += tf.einsum("bhts,bshk,hkd->btd", weights, v, self.attention["out"])
    with tf.name_scope("block/dense"):
      return x + tf.nn.relu(x @ self.up) @ self.down


def draw() -> str:
  """The picture."""
  dims = {
    "x": ["batch", "length", "d_model"],
    "attention/query": [None, "heads", "d_head"],
    "up": [None, "d_ff"],
  }
  return mtf.from_tensorflow(Block(), [tf.TensorSpec([4, 6, 8])], dims=dims).picture()


if __name__ == "__main__":
  FILE.write_text(draw(), encoding="utf-8")
  print(f"written: {FILE}")
