"""A model of one's own in a loop of one's own: train, evaluate, checkpoint, go on, another layout.

Two spirals of points are told apart. The program is written with `mtf.function`; `toy_model.py`
beside it has the same parts in the style of the TF1 library. Interrupt it and start it again: it
goes on from its last checkpoint, also with another --mesh_shape or --layout.

  python -m mesh_tensorflow.examples.own_loop --model_dir spirals
  python -m mesh_tensorflow.examples.own_loop --model_dir spirals --steps 600 --layout hidden:cols
"""

from __future__ import annotations

import argparse

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf

from mesh_tensorflow.checkpoint import Checkpointer
from mesh_tensorflow.examples import mesh_flags
from mesh_tensorflow.meshes import layout_names

batch, place, arm = mtf.Dimension("batch", 64), mtf.Dimension("place", 2), mtf.Dimension("arm", 2)
hidden = mtf.Dimension("hidden", 32)


def spirals(points: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Points [points, 2] on two noisy spirals, and which of the two each is on [points]."""
  draw = np.random.default_rng(seed)
  arms, turn = draw.integers(0, 2, points), draw.uniform(0.5, 2.0, points) * np.pi
  angle = turn + np.pi * arms
  places = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) / np.pi
  return (places + draw.normal(0, 0.1, places.shape)).astype("float32"), arms.astype("int32")


def model(x: mtf.Tensor) -> mtf.Tensor:
  """Logits [batch, arm] of places [batch, place]; both functions below share the variables."""
  for name in ("first", "second"):
    x = mtf.layers.dense(x, hidden, reduced_dims=x.shape.dims[-1:], activation=mtf.tanh, name=name)
    x = mtf.rename_dimension(x, "hidden", "hidden_in") if name == "first" else x
  return mtf.layers.dense(x, arm, reduced_dims=[hidden], name="logits")


def parse_args(argv: list[str] | None, description: str) -> argparse.Namespace:
  """The command line of this program, and of own_program.py."""
  parser = argparse.ArgumentParser(
    description=description.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
  )
  parser.add_argument("--model_dir", default="spirals", help="folder of the checkpoints")
  parser.add_argument("--steps", type=int, default=400, help="training steps in all")
  parser.add_argument("--layout", default="batch:rows,hidden:cols", help="the layout rules")
  mesh_flags.add_mesh_flags(parser, "rows:2,cols:2")
  return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
  """Trains, with an evaluation and a checkpoint every 100 steps."""
  args = parse_args(argv, __doc__)
  mesh = mesh_flags.make_mesh_impl(args.mesh_shape, args.layout, args.implementation)
  signature = [mtf.TensorSpec([batch, place]), mtf.TensorSpec([batch], tf.int32)]

  @mtf.function(mesh, signature)
  def train_step(x, labels):
    loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(model(x), labels, arm))
    mtf.optimize.AdamWOptimizer(learning_rate=0.01).minimize(loss)
    return loss

  @mtf.function(mesh, signature)
  def count_right(x, labels):
    return mtf.reduce_sum(mtf.to_float(mtf.equal(mtf.argmax(model(x), arm), labels)))

  data = tf.data.Dataset.from_tensor_slices(spirals(2048, seed=1)).shuffle(2048, seed=1)
  data = data.repeat().batch(batch.size).prefetch(1)
  held_out = tf.data.Dataset.from_tensor_slices(spirals(512, seed=2)).batch(batch.size)
  with Checkpointer(args.model_dir, mesh.variable_store, max_to_keep=3) as checkpoints:
    train_step.create_variables()
    layout_names.check_names(mesh, train_step.graph)
    restored = checkpoints.restore_or_none()
    step = restored.step if restored else 0
    print(f"Going on from {restored.path}" if restored else "Beginning at step 0", flush=True)
    for x, labels in data.skip(step).take(max(0, args.steps - step)):
      loss = train_step(x, labels)
      step += 1
      if step % 100 == 0 or step == args.steps:
        right = sum(float(count_right(*b)) for b in held_out) / 512
        print(f"step {step:>4}  loss {float(loss):.4f}  held out {right:.1%} right", flush=True)
        checkpoints.save(step)


if __name__ == "__main__":
  mesh_flags.run(main)
