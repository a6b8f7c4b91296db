"""Parts of the first Transformers against those of today: loss and time, side by side.

  python -m benchmarks.today --text input.txt

Trains character models of the text of gin/problems/tinyshakespeare.gin, with the batches and the
number of steps of that file, and about as many parameters each:

  classic  learned positions, relu, Adam, a linear warm-up and decay: the problem as it is
  adamw    rotary positions, SwiGLU, query-key norm; AdamW and a cosine
  muon     the same, with Muon
  muon16   the same, whose products are of bfloat16

They take turns, a call of some steps each, so that what else the machine does meets all of them
alike. Then each is evaluated on the whole held-out tenth. The table has nats per character there,
and the median time of a step, also relative to the first model's. Nothing else should run.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.transformer import gin_config, utils
from mesh_tensorflow.transformer.training.trainer import open_data

PROBLEM = "problems/tinyshakespeare.gin"
# SwiGLU has three matrices where relu has two: a d_ff of two thirds.
PARTS = (
  "import mesh_tensorflow.transformer.transformer_layers",
  "transformer.make_layer_stack.layers = "
  "[@transformer_layers.GroupedQueryAttention, @transformer_layers.DenseReluDense]",
  "GroupedQueryAttention.rotary = @Rotary()",
  "GroupedQueryAttention.query_key_norm = True",
  "DenseReluDense.activation = ['swish', 'linear']",
  "d_ff = 344",
  "Unitransformer.positional_embedding = False",
  "run.max_grad_norm = 1.0",
  "run.learning_rate_schedule = @learning_rate_schedules.cosine_decay",
  "cosine_decay.warmup = 100",
  "cosine_decay.final_factor = 0.1",
)
ADAMW = (
  "run.optimizer = @optimize.AdamWOptimizer",
  "AdamWOptimizer.beta_2 = 0.99",
  "AdamWOptimizer.weight_decay_rate = 0.1",
  "cosine_decay.peak = 0.003",
)
MUON = (
  "run.optimizer = @optimize.MuonOptimizer",
  "MuonOptimizer.weight_decay_rate = 0.1",
  "AdamWOptimizer.beta_2 = 0.99",
  "AdamWOptimizer.weight_decay_rate = 0.1",
  "cosine_decay.peak = 0.006",
)
MODELS = {
  "classic": (),
  "adamw": (*PARTS, *ADAMW),
  "muon": (*PARTS, *MUON),
  "muon16": (*PARTS, *MUON, "MuonOptimizer.product_dtype = 'bfloat16'"),
}


class Model:
  """One model in training.

  Args:
    name: in `MODELS`.
    bindings: gin bindings of all models, such as the text.
    own: those of this one.
  """

  def __init__(self, name: str, bindings: Sequence[str], own: Sequence[str]):
    self.name = name
    self.losses: list[float] = []
    self.seconds: list[float] = []
    gin.clear_config()
    gin_config.parse_gin([PROBLEM], [*bindings, *MODELS[name], *own])
    # What `run` has made is taken here, in place of being trained.
    utils.run(None, None, None, None, "", train_model_fn=self._take)
    # Traced now: gin has the bindings of this model.
    self._data = open_data(self._trainer.steps, self._dataset_fn, self._vocabulary, "train")
    self._compiled = self._trainer.loop.compile_steps(self._data.names)
    self._trainer.loop.prepare(self._compiled)
    self._trainer.evaluate(self._held_out(), 1)
    store = self._trainer.mesh_impl.variable_store
    self.parameters = sum(int(np.prod(v.shape.to_integer_list)) for v in store if v.trainable)

  def _take(
    self,
    trainer: Any,
    vocabulary: Any,
    sequence_length: Any,
    batch_size: int,
    dataset_fn: Any,
    train_steps: int,
    *args: Any,
    **kwargs: Any,
  ) -> None:
    del sequence_length, batch_size, args, kwargs
    self._trainer, self._vocabulary, self._dataset_fn = trainer, vocabulary, dataset_fn
    self.steps = train_steps

  def _held_out(self) -> tf.data.Dataset:
    return self._dataset_fn(
      sequence_length=self._trainer.steps.sequence_length,
      vocabulary=self._vocabulary,
      dataset_split="validation",
    )

  def train(self, steps_per_call: int) -> Iterator[int]:
    """Trains; yields the number of steps done after each call of the program."""
    for batches in self._data.calls(self.steps, steps_per_call):
      start = time.perf_counter()
      results = self._compiled(batches, tf.constant(len(self.losses), tf.int64)).numpy()
      self.seconds.append((time.perf_counter() - start) / results.shape[1])
      self.losses += results[0].tolist()
      self._trainer.state.step = len(self.losses)
      yield len(self.losses)

  def nats(self) -> float:
    """The loss on all held-out text."""
    return float(self._trainer.evaluate(self._held_out())["loss"])


def table(models: Sequence[Model]) -> str:
  """Nats and times of trained models, a line for each."""
  first = models[0]
  nats = {m.name: m.nats() for m in models}
  lines = [
    f"{'model':10} {'parameters':>10} {'training':>9} {'held out':>9} {'less':>7} {'step':>9} "
    f"{'ratio':>6}"
  ]
  for m in models:
    # Of calls that stood side by side: what slows the machine for a while slows both.
    ratio = statistics.median(a / b for a, b in zip(m.seconds, first.seconds))
    lines.append(
      f"{m.name:10} {m.parameters:10,} {np.mean(m.losses[-100:]):9.4f} {nats[m.name]:9.4f} "
      f"{nats[first.name] - nats[m.name]:7.4f} {1e3 * statistics.median(m.seconds):6.1f} ms "
      f"{ratio:6.2f}"
    )
  return "\n".join(lines)


def _text() -> str | None:
  """The text in the folder of test data, if that is named."""
  folder = pathlib.Path(os.environ.get("MTF_TEST_DATA", "."), "tinyshakespeare")
  found = [f for f in (folder / "input.txt", folder / "input.txt.gz") if f.is_file()]
  return str(found[0]) if found else None


def main() -> int:
  """The command."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--text", default=_text(), help="plain or .gz")
  parser.add_argument("--models", default=",".join(MODELS), help="the first is compared with")
  parser.add_argument("--steps", type=int, default=2000)
  parser.add_argument("--steps_per_call", type=int, default=50)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--gin_param", action="append", default=[], help="of all but classic")
  args = parser.parse_args()
  if not args.text or not pathlib.Path(args.text).is_file():
    parser.error("give --text, a copy of the text; or set MTF_TEST_DATA, as for the tests")
  bindings = [
    f"text_file = '{args.text}'", f"run.train_steps = {args.steps}", f"run.seed = {args.seed}",
  ]  # fmt: skip
  models = [
    Model(n, bindings, args.gin_param if n != "classic" else ()) for n in args.models.split(",")
  ]
  started = time.perf_counter()
  for done in zip(*[m.train(args.steps_per_call) for m in models]):
    losses = "  ".join(f"{m.name} {np.mean(m.losses[-args.steps_per_call :]):.4f}" for m in models)
    print(f"step {done[0]:5}  {losses}  ({time.perf_counter() - started:.0f} s)", flush=True)
  print(
    f"\n{args.steps} steps of {models[0]._trainer.steps.batch_size} x "
    f"{max(models[0]._trainer.steps.sequence_length.values())} characters, TensorFlow "
    f"{tf.__version__}, mesh_tensorflow {mtf.__version__}; nats a character\n{table(models)}"
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
