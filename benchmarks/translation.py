"""What a translator gains and loses by each setting: trainings that differ in one, scored alike.

  python -m benchmarks.translation --data_dir multi30k --folder runs [--row base --row sinusoids]

Each row is the small published model of gin/problems/multi30k_tiny.gin with the gin lines of
`ROWS`, trained by the real program on fewer steps than its recipe has (`--steps`; rates rise over a
fifth of them and fall to 0), and scored on the validation texts: BLEU of Moses tokens, and
sacreBLEU's own, both in lower case. A row that is done is not done again: its files stay in the
folder. Nothing else should run, if the seconds are to mean something.

The table has the loss of the last steps, BLEU after equal steps, the seconds from the first step to
the last, and BLEU after equal seconds: of a row that is slower than the first one that of its last
checkpoint within the time of that, when its rate was not down yet.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

PROBLEM = "problems/multi30k_tiny.gin"
_FINAL = "transformer.LayerStack.sublayers_final"
# One thing at a time, against the recipe as it is.
ROWS: dict[str, tuple[str, ...]] = {
  "base": (),
  "embeddings of variance 1": ("VocabEmbedding.scale_variable_like_classifier_weights = False",),
  "queries that start smaller": ("SelfAttention.fold_scaling_into_initializer = True",),
  "a dropout mask for all positions": ("dropout_broadcast_dims.per_position = False",),
  "dropout on attention weights": ("SelfAttention.dropout_rate = 0.3",),
  "dropout inside feed-forward layers": ("DenseReluDense.dropout_rate = 0.3",),
  "dropout on the last output": (
    f"{_FINAL} = [@transformer.sublayer_rms_norm, @transformer.sublayer_dropout]",
  ),
  "dropout 0.1": ("dropout_rate = 0.1",),
  "pieces sampled at 0.1": ("dataset.parallel_text_dataset.sampled_pieces = 0.1",),
  "unigram pieces": ("vocabulary.get_subword_vocabulary.model_type = 'unigram'",),
  "mixed case": ("vocabulary.get_subword_vocabulary.normalization = 'nmt_nfkc'",),
  "pieces of texts, not of Moses' words": (
    "vocabulary.get_subword_vocabulary.moses_language = ''",
  ),
  "10,000 pieces": ("vocabulary.get_subword_vocabulary.vocab_size = 9984",),
  "3,000 pieces": ("vocabulary.get_subword_vocabulary.vocab_size = 3072",),
  "sinusoids": ("Unitransformer.sinusoid_positional_embedding = True",),
  "norms after": (
    "transformer.LayerStack.sublayers_per_layer = [@transformer.sublayer_call_layer, "
    "@transformer.sublayer_dropout, @transformer.sublayer_residual, "
    "@transformer.sublayer_output_rms_norm]",
    f"{_FINAL} = []",
  ),
  "one pair a row": (
    "dataset.parallel_text_dataset.pack = False",
    "utils.run.batch_size = ('sequences_per_batch', 400)",
  ),
  "Adafactor, relative": (
    "VocabEmbedding.scale_variable_like_classifier_weights = False",
    "utils.run.optimizer = @optimize.AdafactorOptimizer",
    "rate = 0.02",
  ),
  "no label smoothing": ("decoder/Unitransformer.label_smoothing = 0.0",),
  "rate 0.0025": ("rate = 0.0025",),
  "rate 0.01": ("rate = 0.01",),
}
_SCORES = (
  "dataset.parallel_text_eval_datasets.metric_fns = [@bleu.bleu, @bleu.moses_bleu]",
  "bleu.bleu.lowercase = True",
  "bleu.moses_bleu.language = 'fr'",
  "run.mode = 'eval'",
)


def schedule(steps: int) -> tuple[str, ...]:
  """Gin lines of a training of so many steps, with ten checkpoints."""
  return (
    f"utils.run.train_steps = {steps}",
    f"utils.run.save_checkpoints_steps = {max(1, steps // 10)}",
    "utils.run.keep_checkpoint_max = 12",
    "rate = 0.005",
    "utils.run.learning_rate_schedule = @learning_rate_schedules.linear_warmup_decay",
    "learning_rate_schedules.linear_warmup_decay.peak = %rate",
    "learning_rate_schedules.linear_warmup_decay.warmup = 0.2",
  )


def _slug(row: str) -> str:
  return re.sub(r"\W+", "_", row)


class Runs:
  """Trainings of rows, in a folder.

  Args:
    args: the command's arguments.
  """

  def __init__(self, args: argparse.Namespace):
    self._args = args
    self._folder = pathlib.Path(args.folder)

  def _program(self, row: str, seed: int, more: Sequence[str]) -> str:
    """Runs the trainer with a row's settings; what it prints."""
    args = self._args
    own = [*schedule(args.steps), *args.gin_param, *ROWS[row]]
    # A vocabulary is of the settings that begin so.
    pieces = _slug("_".join(re.findall(r"subword_vocabulary\.(\w+ = '?\w*)", " ".join(own))))
    bindings = [
      f"data_dir = '{os.path.abspath(args.data_dir)}'",
      f"vocabulary_file = '{(self._folder / f'pieces_{pieces}.model').absolute()}'",
      *own,
      f"run.seed = {seed}",
      *more,
    ]
    command = [
      sys.executable, "-m", "mesh_tensorflow.transformer.main",
      f"--model_dir={self.model_dir(row, seed)}", f"--gin_file={PROBLEM}",
      *(f"--gin_file={f}" for f in args.gin_file), *(f"--gin_param={b}" for b in bindings),
    ]  # fmt: skip
    print(f"{row}, seed {seed}: {shlex.join(command)}", file=sys.stderr, flush=True)
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
      raise SystemExit(f"{row}, seed {seed}: the trainer ended with {ended.returncode}")
    return ended.stdout

  def model_dir(self, row: str, seed: int) -> pathlib.Path:
    """The folder of a training."""
    return self._folder / f"{_slug(row)}_{seed}"

  def _reports(self, row: str, seed: int) -> list[dict[str, float]]:
    lines = (self.model_dir(row, seed) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

  def result(self, row: str, seed: int) -> dict[str, float]:
    """Loss, seconds and scores; trains and evaluates first, unless that is done."""
    file = self.model_dir(row, seed) / "row.json"
    if file.exists():
      return json.loads(file.read_text())
    self._program(row, seed, [])
    reports = self._reports(row, seed)
    done = {
      "loss": reports[-1]["loss"],
      "seconds": reports[-1]["time"] - reports[0]["time"],
      **self.scores(row, seed, self._args.steps),
    }
    file.write_text(json.dumps(done))
    return done

  def step_at(self, row: str, seed: int, seconds: float) -> int | None:
    """The row's last checkpoint within so many seconds of its first step, or None."""
    reports = self._reports(row, seed)
    within = [r["step"] for r in reports if r["time"] - reports[0]["time"] <= seconds]
    every = max(1, self._args.steps // 10)
    return max((int(s) for s in within if s % every == 0), default=None)

  def scores(self, row: str, seed: int, step: int) -> dict[str, float]:
    """The scores of a checkpoint, by their names."""
    split = f"run.dataset_split = '{self._args.split}'"
    said = self._program(row, seed, [*_SCORES, split, f"run.eval_checkpoint_step = {step}"])
    return {name: float(x) for name, x in re.findall(r"\b(\w*bleu) (\d+\.\d+)", said)}

  def line(self, row: str, seed: int) -> str:
    """A row of the table."""
    one, first = self.result(row, seed), self.result(next(iter(self._args.rows)), seed)
    equal = one["moses_bleu"]
    if one["seconds"] > first["seconds"]:
      step = self.step_at(row, seed, first["seconds"])
      equal = self.scores(row, seed, step)["moses_bleu"] if step else float("nan")
    return (
      f"| {row} | {seed} | {one['loss']:.3f} | {one['moses_bleu']:.2f} | {one['bleu']:.2f} | "
      f"{one['seconds']:.0f} | {equal:.2f} |"
    )


def main() -> int:
  """The command."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--data_dir", required=True, help="folder of the pairs")
  parser.add_argument("--folder", required=True, help="for the trainings, which are kept there")
  parser.add_argument(
    "--row",
    action="append",
    choices=list(ROWS),
    dest="rows",
    metavar="ROW",
    help=f"several may be given; the first is compared with (default: all): {'; '.join(ROWS)}",
  )
  parser.add_argument("--steps", type=int, default=1500)
  parser.add_argument("--seeds", default="1", help="with commas between")
  parser.add_argument("--split", default="validation", help="which texts are scored")
  parser.add_argument("--gin_file", action="append", default=[], help="of all rows")
  parser.add_argument("--gin_param", action="append", default=[], help="of all rows")
  args = parser.parse_args()
  args.rows = args.rows or list(ROWS)
  runs = Runs(args)
  lines = [runs.line(row, int(seed)) for row in args.rows for seed in args.seeds.split(",")]
  print("| row | seed | loss | BLEU, Moses | BLEU, 13a | seconds | Moses, equal seconds |")
  print("|---|---|---|---|---|---|---|")
  print("\n".join(lines))
  return 0


if __name__ == "__main__":
  sys.exit(main())
