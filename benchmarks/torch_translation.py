"""The published small translator in PyTorch, on the batches that the trainer here sees.

  python -m benchmarks.torch_translation --data_dir multi30k --pieces pieces.model --steps 600

A Transformer as `transformer_tiny` of fairseq: norms behind the residual, biases, sinusoids,
Xavier's weights, embeddings of variance 1 / d_model that are scaled up, dropout on embeddings and
on what layers add. Each step has the packed rows of the step of the trainer here, and masks keep
their pairs apart. Rates are those of `linear_warmup_decay`. The printed loss is, as the
trainer's, the smoothed cross entropy over the number of positions of the rows. With --translate the
validation texts are translated at the end, by five beams and the mean of log probabilities: a file
with a target in each line.
"""

from __future__ import annotations

import argparse
import gzip
import math
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

try:
  import sentencepiece
  import torch
  import torch.nn.functional as F
  from torch import nn
except ImportError:
  sys.exit("this needs PyTorch and sentencepiece: pip install torch sentencepiece")

LENGTHS = {"inputs": 56, "targets": 64}
# Of another process: PyTorch and TensorFlow in one crash here.
_WRITE = """
import sys
import numpy as np
from mesh_tensorflow.transformer import dataset
from mesh_tensorflow.transformer.subword_vocabulary import SentencePieceVocabulary
data_dir, pieces, inputs, targets, seed, rows, steps, file = sys.argv[1:]
batches = dataset.parallel_text_dataset(
  {"inputs": int(inputs), "targets": int(targets)}, SentencePieceVocabulary.load(pieces), "train",
  files={"train": ("train.en.gz", "train.fr.gz")}, data_dir=data_dir, seed=int(seed),
).batch(int(rows) * int(steps)).take(1)
np.savez(file, **{k: v.astype(np.int16) for k, v in next(batches.as_numpy_iterator()).items()})
"""
PAD, EOS = 0, 1


class Attention(nn.Module):
  """Multi-head attention with biases, Xavier's weights, and no dropout on its weights."""

  def __init__(self, size: int, heads: int):
    super().__init__()
    self.heads = heads
    self.q, self.k, self.v, self.o = (nn.Linear(size, size) for _ in range(4))
    for part in (self.q, self.k, self.v):
      nn.init.xavier_uniform_(part.weight, gain=2**-0.5)
    nn.init.xavier_uniform_(self.o.weight)
    nn.init.zeros_(self.o.bias)

  def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    def split(t: torch.Tensor) -> torch.Tensor:
      return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    y = F.scaled_dot_product_attention(
      split(self.q(x)), split(self.k(memory)), split(self.v(memory)), attn_mask=mask
    )
    return self.o(y.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
  """Self-attention, in a decoder attention to the memory, and two dense layers; norms last."""

  def __init__(self, size: int, hidden: int, heads: int, dropout: float, of_decoder: bool):
    super().__init__()
    self.attend = Attention(size, heads)
    self.cross = Attention(size, heads) if of_decoder else None
    self.wide, self.narrow = nn.Linear(size, hidden), nn.Linear(hidden, size)
    for part in (self.wide, self.narrow):
      nn.init.xavier_uniform_(part.weight)
      nn.init.zeros_(part.bias)
    self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(3 if of_decoder else 2))
    self.dropout = nn.Dropout(dropout)

  def forward(self, x, mask, memory=None, memory_mask=None):
    norms = iter(self.norms)
    x = next(norms)(x + self.dropout(self.attend(x, x, mask)))
    if self.cross is not None:
      x = next(norms)(x + self.dropout(self.cross(x, memory, memory_mask)))
    return next(norms)(x + self.dropout(self.narrow(F.relu(self.wide(x)))))


class Translator(nn.Module):
  """Encoder and decoder with one embedding for inputs, targets and logits."""

  def __init__(self, tokens: int, size=128, hidden=256, heads=4, layers=4, dropout=0.3):
    super().__init__()
    self.size = size
    self.embedding = nn.Embedding(tokens, size)
    nn.init.normal_(self.embedding.weight, std=size**-0.5)
    angles = torch.arange(128)[:, None] * torch.exp(
      torch.arange(size // 2) * (-math.log(10000) / (size // 2 - 1))
    )
    self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1))
    self.encoder, self.decoder = (
      nn.ModuleList(Layer(size, hidden, heads, dropout, d) for _ in range(layers))
      for d in (False, True)
    )
    self.dropout = nn.Dropout(dropout)

  def embed(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return self.dropout(self.embedding(ids) * self.size**0.5 + self.positions[places])

  def encode(self, inputs: torch.Tensor, places: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Hidden states of ids at their places: [rows, length, size]."""
    x = self.embed(inputs, places)
    for layer in self.encoder:
      x = layer(x, mask)
    return x

  def decode(
    self,
    before: torch.Tensor,
    places: torch.Tensor,
    mask: torch.Tensor,
    memory: torch.Tensor,
    memory_mask: torch.Tensor,
  ) -> torch.Tensor:
    """Hidden states: of each position, from the ids before it."""
    x = self.embed(before, places)
    mask = mask & torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    for layer in self.decoder:
      x = layer(x, mask, memory, memory_mask)
    return x

  def forward(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Hidden states of packed rows: a pair sees itself only."""
    of_inputs, of_targets = rows["inputs_segmentation"], rows["targets_segmentation"]
    memory = self.encode(rows["inputs"], rows["inputs_position"], same(of_inputs, of_inputs))
    places = rows["targets_position"]
    before = F.pad(rows["targets"][:, :-1], (1, 0)) * (places > 0)
    in_targets, in_inputs = same(of_targets, of_targets), same(of_targets, of_inputs)
    return self.decode(before, places, in_targets, memory, in_inputs)


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
  """Which positions belong to one pair: [rows, 1, length of a, length of b]."""
  return (a[:, :, None] == b[:, None, :])[:, None]


def padded(rows: list[np.ndarray]) -> torch.Tensor:
  result = np.zeros([len(rows), max(map(len, rows))], np.int64)
  for row, ids in zip(result, rows):
    row[: len(ids)] = ids
  return torch.from_numpy(result)


@torch.no_grad()
def translate(model: Translator, inputs: torch.Tensor, beams: int, alpha: float) -> list[list[int]]:
  """The best targets by score / length ** alpha, EOS counted in the length."""
  model.eval()
  mask = inputs.ne(PAD)[:, None, None, :]
  memory = model.encode(inputs, torch.arange(inputs.shape[1]), mask)
  n, limit = len(inputs), min(int(inputs.ne(PAD).sum(1).max()) + 20, 64)
  memory, mask = memory.repeat_interleave(beams, 0), mask.repeat_interleave(beams, 0)
  ids = torch.zeros(n * beams, 1, dtype=torch.long)
  scores = torch.full([n, beams], -math.inf)
  scores[:, 0] = 0.0
  best: list[tuple[float, list[int]]] = [(-math.inf, []) for _ in range(n)]
  for length in range(1, limit + 1):
    all_seen = torch.ones(1, 1, length, length, dtype=torch.bool)
    x = model.decode(ids, torch.arange(length), all_seen, memory, mask)[:, -1]
    log_p = F.log_softmax(x @ model.embedding.weight.T, -1).view(n, beams, -1)
    log_p[..., PAD] = -math.inf
    total = scores[..., None] + log_p
    ended = total[..., EOS] / length**alpha
    for i in range(n):
      top = int(ended[i].argmax())
      if float(ended[i, top]) > best[i][0]:
        best[i] = float(ended[i, top]), ids[i * beams + top, 1:].tolist()
    total[..., EOS] = -math.inf
    scores, chosen = total.flatten(1).topk(beams)
    source = chosen // total.shape[-1] + torch.arange(n)[:, None] * beams
    ids = torch.cat([ids[source.flatten()], (chosen % total.shape[-1]).flatten()[:, None]], 1)
    if all(float(scores[i, 0]) / limit**alpha < best[i][0] for i in range(n)):
      break
  return [found for _, found in best]


def main() -> int:
  """The command."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--data_dir", required=True)
  parser.add_argument("--pieces", required=True, help="SentencePiece model")
  parser.add_argument("--steps", type=int, default=1500, help="of the schedule")
  parser.add_argument("--stop", type=int, help="stop after so many steps")
  parser.add_argument("--rows", type=int, default=64, help="packed rows of 64 tokens in a batch")
  parser.add_argument("--rate", type=float, default=0.005)
  parser.add_argument("--warmup", type=float, default=0.2)
  parser.add_argument("--dropout", type=float, default=0.3)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--threads", type=int, default=torch.get_num_threads())
  parser.add_argument("--translate", help="file for translations of the validation texts")
  args = parser.parse_args()
  torch.manual_seed(args.seed)
  torch.set_num_threads(args.threads)
  vocabulary = sentencepiece.SentencePieceProcessor(model_file=args.pieces)
  stop = args.stop or args.steps
  with tempfile.TemporaryDirectory() as folder:
    written = [args.data_dir, args.pieces, *LENGTHS.values(), args.seed, args.rows, stop]
    file = pathlib.Path(folder, "batches.npz")
    subprocess.run([sys.executable, "-c", _WRITE, *map(str, [*written, file])], check=True)
    with np.load(file) as arrays:
      batches = {k: v.reshape(stop, args.rows, -1) for k, v in arrays.items()}
  model = Translator(vocabulary.get_piece_size(), dropout=args.dropout)
  print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
  adam = torch.optim.Adam(model.parameters(), lr=args.rate, betas=(0.9, 0.98))
  rise = args.warmup * args.steps
  losses, started = [], time.perf_counter()
  for step in range(1, stop + 1):
    model.train()
    for group in adam.param_groups:
      fall = 1 - max(0.0, step - rise) / (args.steps - rise)
      group["lr"] = args.rate * min(step / rise, fall)
    rows = {k: torch.from_numpy(v[step - 1].astype(np.int64)) for k, v in batches.items()}
    targets = rows["targets"]
    real = targets != PAD
    logits = model(rows)[real] @ model.embedding.weight.T
    loss = F.cross_entropy(logits, targets[real], reduction="sum", label_smoothing=0.1)
    loss = loss / (args.rows * LENGTHS["targets"])
    adam.zero_grad(set_to_none=True)
    loss.backward()
    adam.step()
    losses.append(loss.item())
    if step % 50 == 0:
      seconds = time.perf_counter() - started
      print(f"step {step:5}  loss {np.mean(losses[-100:]):.3f}  ({seconds:.0f} s)", flush=True)
  if args.translate:
    with gzip.open(pathlib.Path(args.data_dir, "val.en.gz"), "rt", encoding="utf-8") as lines:
      texts = [line.strip() for line in lines]
    found = []
    for first in range(0, len(texts), 100):
      rows = [np.append(vocabulary.encode(a), EOS) for a in texts[first : first + 100]]
      found += translate(model, padded(rows), 5, 1.0)
    lines = "".join(vocabulary.decode(ids) + "\n" for ids in found)
    pathlib.Path(args.translate).write_text(lines, encoding="utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main())
