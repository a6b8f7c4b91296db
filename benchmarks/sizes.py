"""The model sizes that the benchmarks compare, and the values every side starts from.

All sides train the same decoder-only language model: token embedding shared with the softmax,
learned positions, pre-norm blocks of causal self-attention and a ReLU feed-forward network,
float32, Adam.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3
BETA1 = 0.9
BETA2 = 0.999
ADAM_EPSILON = 1e-6
NORM_EPSILON = 1e-6
Z_LOSS = 1e-4


@dataclasses.dataclass(frozen=True)
class Size:
  """The size of one model and of one batch."""

  name: str
  d_model: int
  d_ff: int
  heads: int
  d_kv: int
  layers: int
  batch: int
  length: int
  vocab: int
  # With experts, every second feed-forward layer is a mixture of so many, each of size d_ff.
  experts: int = 0

  @property
  def positions(self) -> int:
    """Positions in a batch: the divisor of the loss."""
    return self.batch * self.length


SMALL = Size(
  "small", d_model=128, d_ff=512, heads=4, d_kv=32, layers=4, batch=12, length=64, vocab=128
)
BENCH = Size(
  "bench", d_model=256, d_ff=1024, heads=8, d_kv=32, layers=4, batch=8, length=128, vocab=8192
)
# Only our side has experts; its initial values are those of its own layers.
MOE = dataclasses.replace(BENCH, name="moe", experts=8)
SIZES = {size.name: size for size in (SMALL, BENCH, MOE)}
# On a mesh with a dimension "model": the axis of each weight that is split over it.
MODEL_AXIS = {"embedding": 0, "q": 1, "k": 1, "v": 1, "o": 0, "wi": 1, "wo": 0}


def initial_values(size: Size, seed: int = 0) -> dict[str, np.ndarray]:
  """Returns the weights every side starts from, so that their losses can be compared step by step.

  Matrices are [inputs, outputs]. `q` starts with the 1/sqrt(d_kv) of attention in it.

  Args:
    size: the model's size.
    seed: the seed of the draw.

  Returns:
    A dict from name to float32 array: `embedding` [vocab, d_model], `positions` [length, d_model],
    `final_scale` [d_model], and for block i `block_i/{attention_scale,q,k,v,o,ffn_scale,wi,wo}`.
  """
  rng = np.random.default_rng(seed)

  def normal(shape: tuple[int, ...], stddev: float) -> np.ndarray:
    return (rng.standard_normal(shape) * stddev).astype(np.float32)

  inner = size.heads * size.d_kv
  values = {
    "embedding": normal((size.vocab, size.d_model), 1.0),
    "positions": normal((size.length, size.d_model), 1.0),
    "final_scale": np.ones([size.d_model], np.float32),
  }
  for i in range(size.layers):
    block = {
      "attention_scale": np.ones([size.d_model], np.float32),
      "q": normal((size.d_model, inner), (size.d_model * size.d_kv) ** -0.5),
      "k": normal((size.d_model, inner), size.d_model**-0.5),
      "v": normal((size.d_model, inner), size.d_model**-0.5),
      "o": normal((inner, size.d_model), inner**-0.5),
      "ffn_scale": np.ones([size.d_model], np.float32),
      "wi": normal((size.d_model, size.d_ff), size.d_model**-0.5),
      "wo": normal((size.d_ff, size.d_model), size.d_ff**-0.5),
    }
    values.update({f"block_{i}/{name}": value for name, value in block.items()})
  return values


def random_tokens(size: Size, seed: int = 0) -> np.ndarray:
  """Returns one batch of token ids, int32 [batch, length], from 1 (0 is padding) to vocab - 1."""
  return np.random.default_rng(seed).integers(
    1, size.vocab, [size.batch, size.length], dtype=np.int32
  )


def median_ms(
  step: Callable[[np.ndarray], Any], size: Size, steps: int = 50, warmup: int = 10
) -> float:
  """Returns the median time of a training step in milliseconds.

  Args:
    step: takes a batch of tokens and returns a loss that `float` accepts; `float` also waits
      for the step to end.
    size: the size that the batches have.
    steps: how many steps are timed.
    warmup: how many steps run before that, tracing and compilation among them.
  """
  tokens = random_tokens(size)
  times = []
  for i in range(warmup + steps):
    start = time.perf_counter()
    float(step(tokens))
    if i >= warmup:
      times.append(time.perf_counter() - start)
  return float(np.median(times)) * 1e3
