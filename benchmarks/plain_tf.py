"""The benchmark model in plain TensorFlow 2: what one device should cost.

Written as one would write it without this package: a tf.Module, a tf.GradientTape and one
tf.function for the whole step.

    python -m benchmarks.plain_tf [--jit_compile] [--precision bfloat16]

In bfloat16 activations and products are of that dtype, weights are float32 and cast where they are
used, and statistics of norms, softmax and loss are computed in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from benchmarks import sizes
from benchmarks.sizes import Size

MakeVariable = Callable[..., tf.Variable]  # As `tf.Variable(value, name=...)`.


def rms_norm(x: tf.Tensor, scale: tf.Variable) -> tf.Tensor:
  """Scales `x` to a root mean square of one over the last axis."""
  mean_square = tf.reduce_mean(tf.square(tf.cast(x, tf.float32)), axis=-1, keepdims=True)
  factor = tf.math.rsqrt(mean_square + sizes.NORM_EPSILON)
  return x * tf.cast(factor, x.dtype) * tf.cast(scale, x.dtype)


def product(x: tf.Tensor, weight: tf.Variable, transpose_b: bool = False) -> tf.Tensor:
  """A matrix product with a weight, in the dtype of x."""
  return tf.matmul(x, tf.cast(weight, x.dtype), transpose_b=transpose_b)


class Block(tf.Module):
  """Pre-norm causal self-attention, then a pre-norm feed-forward network."""

  def __init__(self, size: Size, values: dict[str, np.ndarray], name: str, variable: MakeVariable):
    super().__init__(name=name)
    self.size = size
    for weight in ("attention_scale", "q", "k", "v", "o", "ffn_scale", "wi", "wo"):
      setattr(self, weight, variable(values[f"{name}/{weight}"], name=weight))

  def __call__(self, x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Maps x [batch * length, d_model] to the same shape.

    Args:
      x: the activations.
      mask: [length, length], added to the attention logits.
    """
    x += self.attention(rms_norm(x, self.attention_scale), mask)
    h = tf.nn.relu(product(rms_norm(x, self.ffn_scale), self.wi))
    return x + product(h, self.wo)

  def attention(self, x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    size = self.size

    def split_heads(y: tf.Tensor) -> tf.Tensor:
      return tf.transpose(tf.reshape(y, [-1, size.length, size.heads, size.d_kv]), [0, 2, 1, 3])

    q = split_heads(product(x, self.q))
    k = split_heads(product(x, self.k))
    v = split_heads(product(x, self.v))
    weights = tf.nn.softmax(tf.cast(tf.matmul(q, k, transpose_b=True), tf.float32) + mask)
    outputs = tf.transpose(tf.matmul(tf.cast(weights, x.dtype), v), [0, 2, 1, 3])
    return product(tf.reshape(outputs, [-1, size.heads * size.d_kv]), self.o)


class LanguageModel(tf.Module):
  """The decoder-only language model of `sizes`; `variable` makes its variables."""

  def __init__(
    self,
    size: Size,
    values: dict[str, np.ndarray],
    precision: str = "float32",
    variable: MakeVariable = tf.Variable,
  ):
    super().__init__(name="language_model")
    self.size = size
    self.dtype = tf.as_dtype(precision)
    self.embedding = variable(values["embedding"], name="embedding")
    self.positions = variable(values["positions"], name="positions")
    self.blocks = [Block(size, values, f"block_{i}", variable) for i in range(size.layers)]
    self.final_scale = variable(values["final_scale"], name="final_scale")

  def embed(self, inputs: tf.Tensor) -> tf.Tensor:
    return tf.gather(tf.cast(self.embedding, self.dtype), inputs)

  def loss(self, tokens: tf.Tensor) -> tf.Tensor:
    """Returns the mean over positions of cross entropy and z-loss, zero for padding targets.

    Args:
      tokens: int32 [batch, length], the targets; the inputs are the targets shifted right by one.
    """
    size = self.size
    inputs = tf.pad(tokens[:, :-1], [[0, 0], [1, 0]])
    x = self.embed(inputs) + tf.cast(self.positions, self.dtype)
    x = tf.reshape(x, [-1, size.d_model])
    mask = (1.0 - tf.linalg.band_part(tf.ones([size.length, size.length]), -1, 0)) * -1e9
    for block in self.blocks:
      x = block(x, mask)
    x = rms_norm(x, self.final_scale)
    logits = product(x * size.d_model**-0.5, self.embedding, transpose_b=True)
    logits = tf.cast(logits, tf.float32)
    targets = tf.reshape(tokens, [-1])
    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
    z_loss = sizes.Z_LOSS * tf.square(tf.reduce_logsumexp(logits, axis=-1))
    weights = tf.cast(targets > 0, tf.float32)
    return tf.reduce_sum((cross_entropy + z_loss) * weights) / size.positions


class Adam(tf.Module):
  """Adam without bias correction: v -= learning_rate * m / (sqrt(v) + epsilon)."""

  def __init__(self, variables: list[tf.Variable]):
    super().__init__(name="adam")
    self.variables_and_slots = [
      (
        v,
        tf.Variable(tf.zeros_like(v), trainable=False),
        tf.Variable(tf.zeros_like(v), trainable=False),
      )
      for v in variables
    ]

  def apply(self, grads: list[tf.Tensor]) -> None:
    for (variable, m, v), grad in zip(self.variables_and_slots, grads):
      tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=m.handle,
        v=v.handle,
        beta1_power=0.0,  # zero powers switch the bias correction off
        beta2_power=0.0,
        lr=sizes.LEARNING_RATE,
        beta1=sizes.BETA1,
        beta2=sizes.BETA2,
        epsilon=sizes.ADAM_EPSILON,
        grad=tf.convert_to_tensor(grad),
      )


def make_step(
  size: Size, seed: int = 0, jit_compile: bool = False, precision: str = "float32"
) -> Callable[[np.ndarray], tf.Tensor]:
  """Returns a function that runs one training step and returns the loss before the update.

  Args:
    size: the size of model and batch.
    seed: the seed of the initial weights.
    jit_compile: whether XLA compiles the whole step.
    precision: the dtype of activations.

  Returns:
    A callable from int32 tokens [batch, length] to a scalar tf.Tensor.
  """
  model = LanguageModel(size, sizes.initial_values(size, seed), precision)
  variables = model.trainable_variables
  adam = Adam(variables)

  @tf.function(
    input_signature=[tf.TensorSpec([size.batch, size.length], tf.int32)],
    autograph=False,
    jit_compile=jit_compile,
  )
  def train_step(tokens: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
      loss = model.loss(tokens)
    adam.apply(tape.gradient(loss, variables))
    return loss

  return train_step


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--jit_compile", action="store_true", help="let XLA compile the whole step")
  parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
  args = parser.parse_args()
  for size in sizes.SIZES.values():
    step = make_step(size, jit_compile=args.jit_compile, precision=args.precision)
    print(f"plain TensorFlow  {size.name:6} {sizes.median_ms(step, size):8.2f} ms a step")


if __name__ == "__main__":
  main()
