"""The plain model of `plain_tf` on several devices, by what TensorFlow itself has for that.

`tf.distribute.MirroredStrategy` splits the batch, and `tf.experimental.dtensor` any dimension, as
a mesh does here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from benchmarks import plain_tf, sizes
from benchmarks.sizes import Size


def make_mirrored_step(size: Size, seed: int, mesh_shape: str) -> Callable[[np.ndarray], tf.Tensor]:
  """A training step under `MirroredStrategy`, each device with an equal part of the batch.

  Args:
    size: the model and the batch.
    seed: of the initial weights.
    mesh_shape: such as "batch:4".

  Returns:
    A callable from int32 tokens [batch, length] to a scalar tf.Tensor.
  """
  devices = mtf.convert_to_shape(mesh_shape).size
  strategy = tf.distribute.MirroredStrategy(mtf.virtual_cpu_devices(devices))
  with strategy.scope():
    model = plain_tf.LanguageModel(size, sizes.initial_values(size, seed))
    variables = model.trainable_variables
    adam = plain_tf.Adam(variables)
  rows = size.batch // devices

  def replica_step(tokens: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    begin = context.replica_id_in_sync_group * rows
    with tf.GradientTape() as tape:
      loss = model.loss(tokens[begin : begin + rows])
    grads = context.all_reduce(tf.distribute.ReduceOp.SUM, tape.gradient(loss, variables))
    adam.apply(grads)
    return loss

  @tf.function(
    input_signature=[tf.TensorSpec([size.batch, size.length], tf.int32)], autograph=False
  )
  def train_step(tokens: tf.Tensor) -> tf.Tensor:
    losses = strategy.run(replica_step, (tokens,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

  return train_step


def make_dtensor_step(size: Size, seed: int, mesh_shape: str) -> Callable[[np.ndarray], tf.Tensor]:
  """A training step by DTensor: batch split over "batch", heads, d_ff and vocabulary over "model".

  Args:
    size: the model and the batch.
    seed: of the initial weights.
    mesh_shape: such as "batch:2,model:2".

  Returns:
    A callable from int32 tokens [batch, length] to a scalar tf.Tensor.
  """
  dtensor = tf.experimental.dtensor
  shape = mtf.convert_to_shape(mesh_shape)
  names = mtf.virtual_cpu_devices(shape.size)
  mesh = dtensor.create_mesh(
    [(d.name, d.size) for d in shape], devices=[n.split("/device:")[-1] for n in names]
  )

  def variable(value: np.ndarray, name: str) -> tf.Variable:
    dims = [dtensor.UNSHARDED] * value.ndim
    if name in sizes.MODEL_AXIS and "model" in shape.dimension_names:
      dims[sizes.MODEL_AXIS[name]] = "model"
    layout = dtensor.Layout(dims, mesh)
    whole = dtensor.copy_to_mesh(value, dtensor.Layout.replicated(mesh, rank=value.ndim))
    return dtensor.DVariable(dtensor.relayout(whole, layout), name=name)

  class LanguageModel(plain_tf.LanguageModel):
    def embed(self, inputs: tf.Tensor) -> tf.Tensor:
      # DTensor gathers no rows that are split.
      whole = dtensor.Layout.replicated(mesh, rank=2)
      return tf.gather(dtensor.relayout(tf.identity(self.embedding), whole), inputs)

  model = LanguageModel(size, sizes.initial_values(size, seed), variable=variable)
  variables = model.trainable_variables
  # DTensor has no ResourceApplyAdam.
  slots = [[variable(np.zeros(v.shape, np.float32), v.name[:-2]) for _ in "mv"] for v in variables]

  def apply(grads: list[tf.Tensor]) -> list[tf.Operation]:
    done = []
    for x, (m, v), grad in zip(variables, slots, grads):
      mean = sizes.BETA1 * m + (1 - sizes.BETA1) * grad
      square = sizes.BETA2 * v + (1 - sizes.BETA2) * tf.square(grad)
      step = sizes.LEARNING_RATE * mean / (tf.sqrt(square) + sizes.ADAM_EPSILON)
      done += [
        y.assign(new, read_value=False) for y, new in ((m, mean), (v, square), (x, x - step))
      ]
    return done

  @tf.function(autograph=False)
  def train_step(tokens: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
      loss = model.loss(tokens)
    with tf.control_dependencies(apply(tape.gradient(loss, variables))):
      return tf.identity(loss)

  batch = dtensor.Layout(["batch", dtensor.UNSHARDED], mesh)

  def step(tokens: np.ndarray) -> tf.Tensor:
    whole = dtensor.copy_to_mesh(tokens, dtensor.Layout.replicated(mesh, rank=2))
    loss = train_step(dtensor.relayout(whole, batch))
    return dtensor.unpack(loss)[0]

  return step
