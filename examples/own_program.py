"""A model function of one's own on the common training loop: two spirals of points are told apart.

  python -m mesh_tensorflow.examples.own_program --model_dir spirals
  python -m mesh_tensorflow.examples.own_program --model_dir spirals --steps 600 --layout hidden:all

It saves, and goes on from its last checkpoint, also on another mesh; SIGTERM and Ctrl-C save and
end with exit code 74; metrics.jsonl has its report. `own_loop.py` has the loop written out.
"""

from __future__ import annotations

import sys

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import tensorflow as tf

from mesh_tensorflow.examples import mesh_flags
from mesh_tensorflow.examples.own_loop import arm, batch, model, parse_args, place, spirals
from mesh_tensorflow.training import command


def model_fn(features, mode):
  """Loss, and the part of the points that are told apart, of a batch."""
  logits, labels = model(features["place"]), features["arm"]
  loss = mtf.layers.softmax_cross_entropy_with_logits(logits, labels, arm)
  right = mtf.to_float(mtf.equal(mtf.argmax(logits, arm), labels))
  return mtf.reduce_mean(loss), {"right": mtf.reduce_mean(right)}


def points(number: int, seed: int) -> tf.data.Dataset:
  """A data set of single points."""
  places, arms = spirals(number, seed)
  return tf.data.Dataset.from_tensor_slices({"place": places, "arm": arms}).shuffle(number)


def main(argv: list[str] | None = None) -> None:
  """Trains, with an evaluation and a checkpoint every 100 steps."""
  args = parse_args(argv, __doc__)
  mesh = mesh_flags.make_mesh_impl(args.mesh_shape, args.layout, args.implementation)
  features = {"place": mtf.TensorSpec([batch, place]), "arm": mtf.TensorSpec([batch], tf.int32)}
  trainer = mtf.Trainer(
    model_fn, mesh, features, model_dir=args.model_dir, optimizer=mtf.optimize.AdamWOptimizer,
    learning_rate=0.01, eval_dataset_fn=lambda: points(512, seed=2),
    save_checkpoints_steps=100, eval_every_steps=100,
  )  # fmt: skip
  trainer.train(lambda: points(2048, seed=1), args.steps)


if __name__ == "__main__":
  sys.exit(command.guarded(main))
