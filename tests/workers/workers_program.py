"""A small training program on meshes over all workers of the cluster; run by test_workers.py.

Worker 0 prints one line of JSON for each mesh: the losses and the result of the last step, and what
each worker is given of a batch. Arguments: devices of a worker; then of each mesh its shape, the
layout, and the kind of collectives.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import workers

STEPS = 6
BATCH, LENGTH, VOCAB, MODEL, FF = 8, 4, 12, 8, 16
FLOAT32 = mtf.VariableDType(tf.float32, tf.float32, tf.float32)


def main(devices: str, *meshes: str) -> None:
  workers.join(virtual_cpu_devices=int(devices))
  for i in range(0, len(meshes), 3):
    train(*meshes[i : i + 3])
  workers.leave()


def train(mesh_shape: str, layout: str, collectives: str) -> None:
  impl = mtf.simd_mesh_impl.SimdMeshImpl(mesh_shape, layout, collectives=collectives)
  batch, length = mtf.Dimension("batch", BATCH), mtf.Dimension("length", LENGTH)
  vocab, model, ff = (mtf.Dimension(*d) for d in zip(("vocab", "d_model", "d_ff"), (12, 8, 16)))

  @mtf.function(
    impl,
    [mtf.TensorSpec([batch, length], tf.int32, "ids", local=True), mtf.TensorSpec([], tf.int64)],
  )
  def step(ids, number):
    ids.graph.random_seed = number
    x = mtf.layers.embedding(ids, vocab, model, variable_dtype=FLOAT32, name="embedding")
    h = mtf.layers.dense(
      x, ff, reduced_dims=[model], activation=mtf.relu, variable_dtype=FLOAT32, name="wi"
    )
    h = mtf.dropout(h, True, keep_prob=0.75)
    x += mtf.layers.dense(h, model, reduced_dims=[ff], variable_dtype=FLOAT32, name="wo")
    logits = mtf.layers.dense(x, vocab, reduced_dims=[model], variable_dtype=FLOAT32, name="logits")
    loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, ids, vocab))
    mtf.optimize.AdamWeightDecayOptimizer(learning_rate=0.01).minimize(loss)
    return loss, logits

  batches = np.random.default_rng(0).integers(0, VOCAB, [STEPS, BATCH, LENGTH]).astype(np.int32)
  (row, column), (rows, columns) = impl.local_part(mtf.Shape([batch, length]))
  losses = []
  for i, ids in enumerate(batches):
    loss, logits = step(ids[row : row + rows, column : column + columns], i)
    losses.append(float(loss))
  seen = workers.gather(np.array([rows * columns, len(impl.local_processors)]))
  if workers.current().is_chief:
    result = {"losses": losses, "logits": logits.numpy().tolist(), "seen": seen.tolist()}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
