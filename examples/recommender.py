"""Learns clicks from features of millions of values, in tables that are split over the mesh.

A model in the manner of DLRM (Naumov et al., 2019): each categorical feature has a table of
vectors, a small network makes a vector of the numbers, and the products of all pairs of vectors
tell the click. One feature, the history, has several values, whose vectors are averaged; its ids
are hashed into the largest table. The clicks are drawn: values by a Zipf law, and each value has a
tendency, so there is something to learn.

Every device has 1/n of each table, and of its optimizer's slots. A step exchanges ids and vectors
and touches the rows that were seen, so it takes no longer if the tables are larger.

  python -m mesh_tensorflow.examples.recommender --train_steps 200
  python -m mesh_tensorflow.examples.recommender --mesh_shape "a:2,b:4" --rows 10000 \
      --most_rows 80000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf

from mesh_tensorflow.examples import mesh_flags

FEATURES = ("user", "item", "site", "query")
# Rows and examples are numbered in this many blocks, so that a mesh of two axes can split both.
BLOCKS = 8
ROW_OPTIMIZERS = {
  "sgd": mtf.sparse.Sgd,
  "adagrad": mtf.sparse.Adagrad,
  "adam": mtf.sparse.LazyAdam,
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
  """The command line."""
  parser = argparse.ArgumentParser(
    description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
  )
  parser.add_argument("--rows", type=int, default=1_000_000, help="values of each of four features")
  parser.add_argument("--most_rows", type=int, default=20_000_000, help="rows of the history")
  parser.add_argument("--width", type=int, default=16, help="numbers in a vector")
  parser.add_argument("--history", type=int, default=5, help="most values of a history")
  parser.add_argument("--numbers", type=int, default=8, help="numbers of an example")
  parser.add_argument("--hidden", type=int, default=64, help="size of hidden layers")
  parser.add_argument("--batch_size", type=int, default=2048, help="examples in a step")
  parser.add_argument("--zipf", type=float, default=1.2, help="exponent of the law of values")
  parser.add_argument("--train_steps", type=int, default=100, help="steps")
  parser.add_argument("--optimizer", default="adagrad", choices=list(ROW_OPTIMIZERS), help="rows'")
  parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
  mesh_flags.add_mesh_flags(parser, "all:8")
  return parser.parse_args(argv)


def draw_clicks(args: argparse.Namespace, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
  """Batches of examples without end: ids, histories (-1: no more), numbers, clicks."""
  rng = np.random.default_rng(seed)
  shape = [BLOCKS, args.batch_size // BLOCKS]
  while True:
    batch: dict[str, Any] = {
      name: (rng.zipf(args.zipf, shape) - 1) % args.rows for name in FEATURES
    }
    seen = rng.zipf(args.zipf, [*shape, args.history]) - 1
    length = rng.integers(0, args.history + 1, [*shape, 1])
    batch["history"] = np.where(np.arange(args.history) < length, seen % 2**40, -1)
    batch["numbers"] = rng.normal(size=[*shape, args.numbers]).astype(np.float32)
    # The tendency of a value: a number that looks random, the same for each occurrence.
    score = sum(np.sin(batch[name] * (i + 1.0) + i) for i, name in enumerate(FEATURES))
    score = score + batch["numbers"][..., 0]
    batch["click"] = (rng.random(shape) < 1 / (1 + np.exp(-2 * score))).astype(np.float32)
    yield batch


class Recommender:
  """The model, and its training step on a mesh.

  Args:
    args: the command line.
    impl: the mesh implementation.
  """

  def __init__(self, args: argparse.Namespace, impl: mtf.MeshImpl):
    if args.batch_size % BLOCKS:
      raise mtf.ConfigError(f"--batch_size {args.batch_size} is no multiple of {BLOCKS}")
    self.args, self.impl = args, impl
    self.batch = [
      mtf.Dimension("batch_a", BLOCKS), mtf.Dimension("batch_b", args.batch_size // BLOCKS)
    ]  # fmt: skip
    self.width = mtf.Dimension("width", args.width)
    self.values = mtf.Dimension("values", args.history)
    self.numbers = mtf.Dimension("numbers", args.numbers)
    specs = {name: mtf.TensorSpec(self.batch, tf.int64) for name in FEATURES}
    specs["history"] = mtf.TensorSpec([*self.batch, self.values], tf.int64)
    specs["numbers"] = mtf.TensorSpec([*self.batch, self.numbers])
    specs["click"] = mtf.TensorSpec(self.batch)
    self.order = list(specs)
    self.step = mtf.function(impl, list(specs.values()))(self._step)

  def train(self, batch: dict[str, np.ndarray]) -> float:
    """One step; returns the loss before it."""
    return float(self.step(*[batch[name] for name in self.order]))

  def _table(self, mesh: mtf.Mesh, name: str, rows: int) -> mtf.sparse.Table:
    inner = -(-rows // BLOCKS // BLOCKS) * BLOCKS  # Whatever the mesh, it divides them.
    dims = [mtf.Dimension("rows_a", BLOCKS), mtf.Dimension("rows_b", inner)]
    return mtf.sparse.table(mesh, name, dims, self.width)

  def _step(self, *tensors: mtf.Tensor) -> mtf.Tensor:
    inputs, mesh = dict(zip(self.order, tensors)), tensors[0].mesh
    vectors = [
      mtf.sparse.lookup(self._table(mesh, name, self.args.rows), inputs[name]) for name in FEATURES
    ]
    history = self._table(mesh, "history", self.args.most_rows)
    vectors.append(
      mtf.sparse.lookup(history, inputs["history"], combine="mean", over=self.values, hashed=True)
    )
    hidden = mtf.Dimension("hidden", self.args.hidden)
    x = self._dense(inputs["numbers"], hidden, "numbers_in", mtf.relu)
    vectors.append(self._dense(x, self.width, "numbers_out"))
    loss = mtf.reduce_mean(self._misfit(vectors, hidden, inputs["click"]))
    mtf.sparse.minimize(
      loss,
      ROW_OPTIMIZERS[self.args.optimizer](self.args.lr),
      mtf.optimize.SgdOptimizer(self.args.lr),
    )
    return loss

  def _dense(
    self, x: mtf.Tensor, to: mtf.Dimension, name: str, activation: Any = None
  ) -> mtf.Tensor:
    return mtf.layers.dense(
      x, [to], reduced_dims=x.shape.dims[-1:], activation=activation, name=name
    )

  def _misfit(
    self, vectors: list[mtf.Tensor], hidden: mtf.Dimension, click: mtf.Tensor
  ) -> mtf.Tensor:
    """The cross entropy of each example."""
    count = mtf.Dimension("features", len(vectors))
    stacked = mtf.stack(vectors, "features", axis=len(self.batch))
    other = mtf.rename_dimension(stacked, "features", "others")
    others = mtf.Dimension("others", count.size)
    products = mtf.einsum([stacked, other], [*self.batch, count, others])
    flat = mtf.reshape(products, [*self.batch, mtf.Dimension("pairs", count.size**2)])
    x = self._dense(flat, hidden, "top_in", mtf.relu)
    bias = mtf.layers.dense(stacked, [mtf.Dimension("one", 1)],
                            reduced_dims=[count, self.width], name="alone")  # fmt: skip
    logit = self._dense(x, mtf.Dimension("one", 1), "top_out") + bias
    return mtf.layers.sigmoid_cross_entropy_with_logits(mtf.reshape(logit, self.batch), click)

  def bytes_by_device(self) -> dict[str, int]:
    """Bytes of tables and slots on each device."""
    found: dict[str, int] = {}
    for stored in self.impl.variable_store:
      if stored.shape.dimension_names[0] == "rows_a":
        for v in stored.slices:
          size = v.shape.num_elements() * v.dtype.size
          found[v.device] = found.get(v.device, 0) + size
    return found


def layout_of(mesh_shape: str) -> str:
  """Rows and examples over the first mesh axis, and over the second if there is one."""
  axes = mtf.convert_to_shape(mesh_shape).dims
  mesh_flags.axes_of(mesh_shape, 2, "recommender")
  return ",".join(f"batch_{k}:{a.name},rows_{k}:{a.name}" for k, a in zip("ab", axes))


def main(argv: list[str] | None = None) -> list[float]:
  """Trains; returns the losses."""
  args = parse_args(argv)
  impl = mesh_flags.make_mesh_impl(args.mesh_shape, layout_of(args.mesh_shape), args.implementation)
  model, losses, seconds = Recommender(args, impl), [], []
  for i, batch in zip(range(args.train_steps), draw_clicks(args)):
    start = time.perf_counter()
    losses.append(model.train(batch))
    seconds.append(time.perf_counter() - start)
    if i % 20 == 19 or i + 1 == args.train_steps:
      print(f"step {i + 1}  loss {np.mean(losses[-20:]):.4f}", flush=True)
  sizes = model.bytes_by_device()
  print(
    f"{np.median(seconds[1:] or seconds) * 1e3:.1f} ms a step; tables and slots: "
    f"{sum(sizes.values()) / 2**20:.0f} MB, on each of {len(sizes)} devices "
    f"{max(sizes.values()) / 2**20:.0f} MB"
  )
  return losses


if __name__ == "__main__":
  mesh_flags.run(main)
