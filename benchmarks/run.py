"""`make bench`: one table of ratios, all sides measured in turn in the same run.

Every side is a process of its own. They are started one after the other, warmed up, and then
take turns of a few steps each, so that a slow moment of the machine hits all of them. A ratio is
the median over the rounds of (median step of ours) / (median step of theirs); for decoding, of the
tokens per second.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence

import tqdm

from benchmarks import checkpoint
from benchmarks.t5_sizes import DECODED, T5_SIZES


@dataclasses.dataclass(frozen=True)
class Side:
  """What a worker process measures."""

  side: str
  size: str
  mesh: str = ""
  implementation: str = "placement"
  sharding: str = ""
  precision: str = "float32"
  stages: int = 1
  microbatches: int = 1
  compiler: str = ""

  def arguments(self) -> list[str]:
    options = [f.name for f in dataclasses.fields(self)][2:]
    given = [argument for name in options for argument in (f"--{name}", str(getattr(self, name)))]
    return [self.side, self.size, *given]


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table: ours / theirs, in time, or of decoding in tokens per second."""

  label: str
  ours: Side
  theirs: Side
  target: float

  @property
  def tokens(self) -> int:
    """Tokens that a step decodes; 0: it trains."""
    size = T5_SIZES.get(self.ours.size)
    return size.tokens if size else 0


@dataclasses.dataclass(frozen=True)
class Group:
  """Sides of one size, which are measured together; a round is a turn of each."""

  size: str
  rounds: int
  steps: int


GROUPS = (
  Group("small", 15, 4),
  Group("bench", 15, 4),
  *(Group(size.name, 7, 1) for size in DECODED),
  Group("moe", 15, 4),
  Group("unet", 9, 1),
)
# Seconds for which threads of a side may spin after its turn: OpenMP's do so for 0.2.
_SPIN = 0.3
MESH_2X2, MESH_2X4, BATCH_2 = "batch:2,model:2", "batch:2,model:4", "batch:2"


def rows(missing: Collection[str] = ()) -> list[Row]:
  """The comparisons, in the order of the table.

  Args:
    missing: sides of which there are no rows: what they need is not installed.
  """
  result = []
  for size in ("small", "bench"):
    one = Side("ours", size)
    plain = Side("plain", size)
    result.append(Row(f"(a) {size}: one device / plain TensorFlow 2", one, plain, 1.05))
    result.append(Row(f"(b) {size}: one device / PyTorch", one, Side("torch", size), 1.0))
    result.append(Row(f"(b) {size}: one device / JAX", one, Side("jax", size), 1.0))
  for size in ("small", "bench"):
    half = Side("ours", size, precision="bfloat16")
    plain = Side("plain", size, precision="bfloat16")
    result.append(Row(f"(j) {size}, bfloat16: one device / plain TensorFlow 2", half, plain, 0.9))
    label = f"(j) {size}: one device, bfloat16 / float32"
    result.append(Row(label, half, Side("ours", size), float("nan")))
  one = Side("ours", "bench")
  for mesh, label, implementation, target in (
    (MESH_2X2, "2x2", "placement", 1.05),
    (MESH_2X4, "2x4", "placement", 1.05),
    (MESH_2X2, "2x2", "simd", 1.10),
    (MESH_2X4, "2x4", "simd", 1.10),
    ("batch:4", "batch:4", "placement", 1.05),
    ("batch:4", "batch:4", "simd", 1.06),
  ):
    ours = Side("ours", "bench", mesh, implementation)
    result.append(Row(f"(c) bench: {label} {implementation} / one device", ours, one, target))
  for mesh, label, theirs, name in (
    (MESH_2X2, "2x2", "dtensor", "DTensor"),
    (MESH_2X4, "2x4", "dtensor", "DTensor"),
    (MESH_2X2, "2x2", "jax", "JAX"),
    (MESH_2X4, "2x4", "jax", "JAX"),
    ("batch:4", "batch:4", "mirrored", "MirroredStrategy"),
    ("batch:4", "batch:4", "jax", "JAX"),
  ):
    for implementation in ("placement", "simd"):
      ours = Side("ours", "bench", mesh, implementation)
      row_label = f"(m) bench: {label} {implementation} / {name}"
      result.append(Row(row_label, ours, Side(theirs, "bench", mesh), 1.0))
  for mesh, label in ((MESH_2X2, "2x2"), (MESH_2X4, "2x4"), ("batch:4", "batch:4")):
    for implementation in ("placement", "simd"):
      whole = Side("ours", "bench", mesh, implementation)
      for sharding, target in (("state", 1.05), ("all", 1.25)):
        ours = dataclasses.replace(whole, sharding=sharding)
        what = f"bench: {label} {implementation}, {sharding} in shards / without"
        result.append(Row(f"(i) {what}", ours, whole, target))
  for stages in (2, 4):
    ours = Side("ours", "bench", stages=stages, microbatches=8)
    whole = Side("ours", "bench", f"batch:{stages}")
    label = f"(k) bench: {stages} stages, 8 microbatches / batch:{stages}"
    result.append(Row(label, ours, whole, 1.25))
  for size in DECODED:
    one = Side("ours_t5", size.name)
    search = f"beam {size.beam}" if size.beam > 1 else "greedy"
    what = f"(e) d_model {size.d_model}, {search}, {size.batch} sequences: one device"
    target = 1.3 if size.beam > 1 else 1.5
    compiled = dataclasses.replace(one, compiler="xla")
    for side, name in (("ct2_t5", "CTranslate2"), ("hf_t5", "Hugging Face T5")):
      theirs = Side(side, size.name)
      result.append(Row(f"{what} / {name}", one, theirs, target))
      result.append(Row(f"{what}, XLA / {name}", compiled, theirs, target))
    if size.batch > 1:
      # Two threads, of which each decodes half of the sequences, on both sides.
      theirs = Side("ct2_t5", size.name, BATCH_2)
      for implementation in ("placement", "simd"):
        ours = Side("ours_t5", size.name, BATCH_2, implementation)
        halves = what.replace("one device", f"{BATCH_2} {implementation}")
        result.append(Row(f"{halves} / CTranslate2", ours, theirs, target))
  one = Side("ours", "moe")
  for implementation in ("placement", "simd"):
    ours = Side("ours", "moe", MESH_2X4, implementation)
    label = f"(f) 8 experts: 2x4 {implementation} / one device"
    result.append(Row(label, ours, one, float("nan")))
  one = Side("unet", "unet")
  for implementation in ("placement", "simd"):
    ours = Side("unet", "unet", "d:2,h:2", implementation)
    label = f"(h) U-Net of 64 x 64 x 64 voxels: 2x2 {implementation} / one device"
    result.append(Row(label, ours, one, 1.25))
  return [row for row in result if row.theirs.side not in missing]


# What a side needs beside TensorFlow, if it is a comparison with something else.
NEEDED = {
  "torch": ["torch"],
  "jax": ["jax"],
  "hf_t5": ["torch", "transformers"],
  "ct2_t5": ["ctranslate2"],
}


# (d): a table row's name, its side, its implementation and its meshes.
FIRST_STEPS = [
  ("placement", "ours", "placement", ("batch:2", MESH_2X2, MESH_2X4)),
  ("SIMD", "ours", "simd", ("batch:2", MESH_2X2, MESH_2X4)),
  ("DTensor", "dtensor", "", ("batch:2", MESH_2X2, MESH_2X4)),
  ("JAX", "jax", "", ("batch:2", MESH_2X2, MESH_2X4)),
  ("MirroredStrategy", "mirrored", "", ("batch:2", "batch:4")),  # 12 rows are not 8 equal parts.
]


class Worker:
  """A running side."""

  def __init__(self, side: Side):
    self.side = side
    # The start-up notices of libraries are nobody's business, unless it fails.
    self._log = tempfile.TemporaryFile("w+")
    self._process = subprocess.Popen(
      [sys.executable, "-m", "benchmarks.worker", *side.arguments()],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
    )
    ready = self._read()
    self.first_step_seconds = ready["first_step_seconds"]
    self.losses = ready["losses"]

  def milliseconds(self, steps: int) -> list[float]:
    """Runs some steps and returns the time of each."""
    self._process.stdin.write(f"{steps}\n")
    self._process.stdin.flush()
    return self._read()["ms"]

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait(timeout=60)
    self._log.close()

  def _read(self) -> dict:
    line = self._process.stdout.readline()
    if not line:
      code = self._process.wait()
      self._log.seek(0)
      raise RuntimeError(f"{self.side} ended with code {code}:\n{self._log.read()}")
    return json.loads(line)


def measure(sides: Sequence[Side], rounds: int, steps: int) -> tuple[dict, dict]:
  """Medians of every round for every side, and the first losses."""
  workers = {}
  try:
    for side in tqdm.tqdm(sides, desc="starting", unit="side"):
      workers[side] = Worker(side)
    medians = {side: [] for side in sides}
    for _ in tqdm.tqdm(range(rounds), desc="measuring", unit="round"):
      for side, worker in workers.items():
        time.sleep(_SPIN)
        medians[side].append(statistics.median(worker.milliseconds(steps)))
    return medians, {side: w.losses for side, w in workers.items()}
  finally:
    for worker in workers.values():
      worker.close()


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rounds", type=int, default=0, help="turns of each side; 0: as usual")
  parser.add_argument("--steps", type=int, default=0, help="steps in a turn; 0: as usual")
  parser.add_argument("--only", default="", help="rows whose label has this text, such as (a)")
  args = parser.parse_args()
  missing = {
    side: absent
    for side, modules in NEEDED.items()
    if (absent := [m for m in modules if importlib.util.find_spec(m) is None])
  }
  chosen = [r for r in rows(missing) if args.only in r.label]
  lines = []
  for group in GROUPS:
    members = [r for r in chosen if r.ours.size == group.size]
    if members:
      sides = list(dict.fromkeys(s for r in members for s in (r.ours, r.theirs)))
      medians, losses = measure(sides, args.rounds or group.rounds, args.steps or group.steps)
      check_losses(losses)
      lines += [table_line(r, medians) for r in members]
  print(f"\nMeasured on {machine()}.\n")
  if lines:
    print("| comparison | ours | other | ratio | wanted |\n|---|---|---|---|---|")
    print("\n".join(lines))
  for side, absent in missing.items():
    print(f"\n{side} is left out, as this is not installed: {', '.join(absent)}.")
  if not args.only or "(d)" in args.only:
    print_first_steps(missing)
  if not args.only or "(g)" in args.only:
    checkpoint.print_table()
  if not args.only or "(l)" in args.only:
    print("\n(l) Stages of pipelines: idle time if slowed on purpose, and memory.\n")
    subprocess.run([sys.executable, "-m", "benchmarks.pipelines"], check=True)


def table_line(row: Row, medians: dict) -> str:
  """One line of the table."""
  ours, theirs = medians[row.ours], medians[row.theirs]
  if row.tokens:
    # More is better.
    ratio = statistics.median(b / a for a, b in zip(ours, theirs))
    cells = [f"{row.tokens / statistics.median(x) * 1e3:.0f} tokens/s" for x in (ours, theirs)]
    wanted = f"at least {row.target:.2f}"
  else:
    ratio = statistics.median(a / b for a, b in zip(ours, theirs))
    cells = [f"{statistics.median(x):.1f} ms" for x in (ours, theirs)]
    wanted = "" if row.target != row.target else f"at most {row.target:.2f}"
  return f"| {row.label} | {cells[0]} | {cells[1]} | **{ratio:.2f}** | {wanted} |"


def check_losses(losses: dict) -> None:
  """All sides have the same weights: their first losses must agree, and what they decoded too.

  Adam without a warm-up amplifies rounding about tenfold a step, so only the first few do.
  """
  reference_side = next(iter(losses))
  for side, values in losses.items():
    pairs = list(zip(values, losses[reference_side]))[:3]
    # PyTorch's Adam has a bias correction: the same work, but other losses after a step.
    pairs = pairs[:1] if "torch" in (side.side, reference_side.side) else pairs
    # Rounding moves tokens to other experts, too.
    pairs = pairs[:2] if side.size == "moe" else pairs
    is_half = "bfloat16" in (side.precision, reference_side.precision)
    pairs = pairs[:1] if is_half else pairs
    difference = max(abs(x - y) / abs(y) for x, y in pairs)
    if difference > (1e-2 if is_half else 1e-4):
      raise RuntimeError(
        f"{side} computes other values than {reference_side} (relative difference "
        f"{difference:.1e}): they do not do the same work"
      )


def print_first_steps(missing: Collection[str]) -> None:
  """(d): time from an empty program to the end of the first step."""
  chosen = [row for row in FIRST_STEPS if row[1] not in missing]
  print("\n| (d) small: time to first step | 2 devices | 4 devices | 8 devices |")
  print("|---|---|---|---|")
  for name, side, implementation, meshes in tqdm.tqdm(chosen, desc="first steps", unit="row"):
    cells = []
    for mesh in meshes:
      worker = Worker(Side(side, "small", mesh, implementation))
      cells.append(f"{worker.first_step_seconds:.1f} s")
      worker.close()
    cells += [""] * (3 - len(cells))
    tqdm.tqdm.write(f"| {name} | {' | '.join(cells)} |")


def machine() -> str:
  """What the figures were measured on."""
  import os

  import tensorflow as tf

  versions = [f"TensorFlow {tf.__version__}"]
  for module in sorted({m for modules in NEEDED.values() for m in modules}):
    if importlib.util.find_spec(module) is not None:
      versions.append(f"{module} {importlib.metadata.version(module)}")
  model = platform.processor() or platform.machine()
  try:
    with open("/proc/cpuinfo") as f:
      model = next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
  except (OSError, StopIteration):
    pass
  return f"{os.cpu_count()} cores of {model}, {', '.join(versions)}"


if __name__ == "__main__":
  main()
