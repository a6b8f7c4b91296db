"""The encoder-decoder that the decoding benchmark runs, and the weights every side starts from.

It is T5 v1.0 as in "Exploring the Limits of Transfer Learning" (Raffel et al., 2020): RMS norm
before each layer, ReLU, relative position biases of the first layer shared by all, one embedding
for inputs, targets and softmax, float32.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class T5Size:
  """The size of one model, and of what it decodes."""

  name: str
  d_model: int
  d_ff: int
  heads: int
  d_kv: int
  layers: int
  vocab: int
  batch: int
  input_length: int
  output_length: int
  beam: int = 4
  buckets: int = 32

  @property
  def tokens(self) -> int:
    """Tokens that one decoding returns."""
    return self.batch * self.output_length


T5_SMALL = T5Size(
  "t5",
  d_model=512,
  d_ff=2048,
  heads=8,
  d_kv=64,
  layers=6,
  vocab=32128,
  batch=16,
  input_length=64,
  output_length=64,
)
T5_HALF = dataclasses.replace(
  T5_SMALL, name="t5_half", d_model=256, d_ff=1024, d_kv=32, layers=4, vocab=8192
)
# All that are measured; a beam of 1 is greedy.
DECODED = tuple(
  dataclasses.replace(model, name=f"{model.name}_{batch}x{beam}", batch=batch, beam=beam)
  for model in (T5_HALF, T5_SMALL)
  for batch in (1, 16, 64)
  for beam in (1, 4)
)
T5_TINY = T5Size(
  "t5_tiny",
  d_model=32,
  d_ff=64,
  heads=4,
  d_kv=8,
  layers=2,
  vocab=48,
  batch=3,
  input_length=9,
  output_length=11,
)
T5_SIZES = {size.name: size for size in (*DECODED, T5_TINY)}


def initial_values(size: T5Size, seed: int = 0) -> dict[str, np.ndarray]:
  """Returns random weights under the checkpoint names of the Transformer package.

  Matrices are [inputs, outputs], relative biases [heads, buckets], the embedding
  [vocab, d_model].

  Args:
    size: the model's size.
    seed: the seed of the draw.
  """
  rng = np.random.default_rng(seed)

  def normal(*shape: int, stddev: float) -> np.ndarray:
    return (rng.standard_normal(shape) * stddev).astype(np.float32)

  def scale() -> np.ndarray:
    return rng.uniform(0.5, 1.5, size.d_model).astype(np.float32)

  inner = size.heads * size.d_kv
  stack_layers = {
    "encoder": ("SelfAttention", "DenseReluDense"),
    "decoder": ("SelfAttention", "EncDecAttention", "DenseReluDense"),
  }
  # Smaller embeddings than T5's, larger outputs of layers and larger final scales: what the layers
  # compute decides the next token, so that the beams differ. Else it is the last token again.
  values = {"shared/embedding": normal(size.vocab, size.d_model, stddev=0.2)}
  for stack, layers in stack_layers.items():
    for block in range(size.layers):
      for number, layer in enumerate(layers):
        scope = f"{stack}/block_{block:03d}/layer_{number:03d}"
        values[f"{scope}/rms_norm/scale"] = scale()
        prefix = f"{scope}/{layer}"
        if layer == "DenseReluDense":
          values[f"{prefix}/wi/kernel"] = normal(size.d_model, size.d_ff, stddev=size.d_model**-0.5)
          values[f"{prefix}/wo/kernel"] = normal(
            size.d_ff, size.d_model, stddev=3 * size.d_ff**-0.5
          )
          continue
        # The 1/sqrt(d_kv) of attention is in q.
        q_stddev = (size.d_model * size.d_kv) ** -0.5
        values[f"{prefix}/q"] = normal(size.d_model, inner, stddev=q_stddev)
        for name in "kv":
          values[f"{prefix}/{name}"] = normal(size.d_model, inner, stddev=size.d_model**-0.5)
        values[f"{prefix}/o"] = normal(inner, size.d_model, stddev=3 * inner**-0.5)
        if layer == "SelfAttention" and block == 0:
          bias = normal(size.heads, size.buckets, stddev=1.0)
          values[f"{prefix}/relative_attention_bias"] = bias
    values[f"{stack}/rms_norm/scale"] = scale() * (10.0 if stack == "decoder" else 1.0)
  return values


def random_inputs(size: T5Size, seed: int = 0) -> np.ndarray:
  """Returns token ids without padding, int32 [batch, input_length], from 2 to vocab - 1."""
  shape = [size.batch, size.input_length]
  return np.random.default_rng(seed).integers(2, size.vocab, shape, dtype=np.int32)
