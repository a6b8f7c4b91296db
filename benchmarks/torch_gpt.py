"""The benchmark model in PyTorch.

python -m benchmarks.torch_gpt [--compile]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from benchmarks import sizes
from benchmarks.sizes import Size

try:
  import torch
  import torch.nn.functional as F
  from torch import nn
except ImportError:
  torch = None

NUM_THREADS = 2


def _define_model() -> type:
  """Defines the module classes; in a function, because PyTorch may not be installed."""

  class Block(nn.Module):
    """Pre-norm causal self-attention, then a pre-norm feed-forward network."""

    def __init__(self, size: Size):
      super().__init__()
      inner = size.heads * size.d_kv
      self.heads = size.heads
      self.attention_norm = nn.RMSNorm(size.d_model, eps=sizes.NORM_EPSILON)
      self.qkv = nn.Linear(size.d_model, 3 * inner, bias=False)
      self.o = nn.Linear(inner, size.d_model, bias=False)
      self.ffn_norm = nn.RMSNorm(size.d_model, eps=sizes.NORM_EPSILON)
      self.wi = nn.Linear(size.d_model, size.d_ff, bias=False)
      self.wo = nn.Linear(size.d_ff, size.d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
      x = x + self.attention(self.attention_norm(x))
      return x + self.wo(F.relu(self.wi(self.ffn_norm(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
      batch, length, _ = x.shape
      q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
      y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
      return self.o(y.transpose(1, 2).reshape(batch, length, -1))

  class LanguageModel(nn.Module):
    """The decoder-only language model of `sizes`."""

    def __init__(self, size: Size):
      super().__init__()
      self.size = size
      self.embedding = nn.Embedding(size.vocab, size.d_model)
      self.positions = nn.Parameter(torch.empty(size.length, size.d_model))
      self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
      self.final_norm = nn.RMSNorm(size.d_model, eps=sizes.NORM_EPSILON)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
      size = self.size
      inputs = F.pad(tokens[:, :-1], (1, 0))
      x = self.embedding(inputs) + self.positions
      for block in self.blocks:
        x = block(x)
      x = self.final_norm(x) * size.d_model**-0.5
      logits = F.linear(x, self.embedding.weight).view(-1, size.vocab)
      targets = tokens.reshape(-1)
      # One pass over the logits for both losses: log Z is what log_softmax subtracted.
      index = targets[:, None]
      log_prob = F.log_softmax(logits, -1).gather(-1, index)
      log_z = logits.gather(-1, index) - log_prob
      losses = (sizes.Z_LOSS * log_z.square() - log_prob).squeeze(-1)
      return (losses * (targets > 0)).sum() / size.positions

    @torch.no_grad()
    def set_values(self, values: dict[str, np.ndarray]) -> None:
      """Sets the weights; nn.Linear holds its matrix as [outputs, inputs]."""

      def put(parameter: torch.Tensor, value: np.ndarray) -> None:
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))

      put(self.embedding.weight, values["embedding"])
      put(self.positions, values["positions"])
      put(self.final_norm.weight, values["final_scale"])
      for i, block in enumerate(self.blocks):
        name = f"block_{i}/"
        put(block.attention_norm.weight, values[name + "attention_scale"])
        put(block.qkv.weight, np.concatenate([values[name + w].T for w in "qkv"]))
        put(block.o.weight, values[name + "o"].T)
        put(block.ffn_norm.weight, values[name + "ffn_scale"])
        put(block.wi.weight, values[name + "wi"].T)
        put(block.wo.weight, values[name + "wo"].T)

  return LanguageModel


def make_step(
  size: Size, seed: int = 0, compile_step: bool = False
) -> Callable[[np.ndarray], torch.Tensor]:
  """Returns a function that runs one training step and returns the loss before the update.

  The Adam here is PyTorch's own, with its bias correction, which the other sides do not have;
  its cost is the same.

  Args:
    size: the size of model and batch.
    seed: the seed of the initial weights.
    compile_step: whether `torch.compile` compiles the model.

  Returns:
    A callable from int tokens [batch, length] to a scalar torch.Tensor.

  Raises:
    ImportError: PyTorch is not installed.
  """
  if torch is None:
    raise ImportError("benchmarks.torch_gpt needs PyTorch, which is not installed")
  torch.set_num_threads(NUM_THREADS)
  model = _define_model()(size)
  model.set_values(sizes.initial_values(size, seed))
  optimizer = torch.optim.Adam(
    model.parameters(),
    lr=sizes.LEARNING_RATE,
    betas=(sizes.BETA1, sizes.BETA2),
    eps=sizes.ADAM_EPSILON,
    fused=True,
  )
  loss_fn = torch.compile(model) if compile_step else model

  def train_step(tokens: np.ndarray) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = loss_fn(torch.from_numpy(tokens).long())
    loss.backward()
    optimizer.step()
    return loss.detach()

  return train_step


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
  args = parser.parse_args()
  for size in sizes.SIZES.values():
    step = make_step(size, compile_step=args.compile)
    print(f"PyTorch           {size.name:6} {sizes.median_ms(step, size):8.2f} ms a step")


if __name__ == "__main__":
  main()
