"""Predicted beside published: runs on machines that the package ships figures of.

  python -m benchmarks.published [--rows mesh,megatron,search]

mesh: the models of "Mesh-TensorFlow: Deep Learning for Supercomputers" (Shazeer et al., 2018,
arXiv:1811.02084): 7 language models and 6 translation models, 256 sequences of 256 tokens in a
batch, on 512 TPU v2 cores, each model on the mesh that its gin file has. Published: they fit in the
8 GB of a core; the largest language model took 13 hours for 136,000 steps, that is 344 ms a step,
"over 50 % of peak". (Sizes from the paper; a core of TPU v2 has 22.5 TFLOP/s.)

megatron: "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(Narayanan et al., 2021, arXiv:2104.04473), table 1 and figure 13, as gin/models/megatron plans
them. TFLOP/s are FLOPs that are done: the published ones with whole layers computed again, the
predicted ones without their last products, which are not computed again here. Seconds of a step
that are not published follow from the FLOPs.

search: what `mtf.auto_layout` finds for the largest language model on 512 cores, the mesh free,
beside the layout of its authors; processor time and memory of the search.

Nothing runs on devices; each row takes seconds to a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import sys
import time
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import gin

from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.gin_paths import gin_dir
from mesh_tensorflow.transformer.modes import planned_steps

_LADDER = (
  "lm_143m lm_218m lm_369m lm_671m lm_1275m lm_2483m lm_4899m "
  "nmt_155m nmt_243m nmt_419m nmt_772m nmt_1476m nmt_2886m"
).split()
# Seconds a step: 13 hours for 136,000 steps.
_PUBLISHED_SECONDS = {"lm_4899m": 13 * 3600 / 136_000}


class MegatronRow(NamedTuple):
  """A row of the table.

  Attributes:
    file: in gin/models/megatron.
    parameters: billions.
    width: d_model.
    layers: number of blocks.
    gpus: all of them.
    batch: sequences.
    teraflops: published, of a GPU.
  """

  file: str
  parameters: float
  width: int
  layers: int
  gpus: int
  batch: int
  teraflops: float = 0.0

  @property
  def counted(self) -> float:
    """FLOPs of a step, as the paper counts them: whole layers computed again."""
    of_others = 1 + _LENGTH / (6 * self.width) + _VOCABULARY / (16 * self.layers * self.width)
    return 96 * self.batch * _LENGTH * self.layers * self.width**2 * of_others


_MEGATRON = (
  MegatronRow("gpt_1_7b", 1.7, 2304, 24, 32, 512, 137),
  MegatronRow("gpt_3_6b", 3.6, 3072, 30, 64, 512, 138),
  MegatronRow("gpt_7_5b", 7.5, 4096, 36, 128, 512, 142),
  MegatronRow("gpt_18b", 18.4, 6144, 40, 256, 1024, 135),
  MegatronRow("gpt_39b", 39.1, 8192, 48, 512, 1536, 138),
  MegatronRow("gpt_76b", 76.1, 10240, 60, 1024, 1792, 140),
  MegatronRow("gpt_146b", 145.6, 12288, 80, 1536, 2304, 148),
  MegatronRow("gpt_310b", 310.1, 16384, 96, 1920, 2160, 155),
  MegatronRow("gpt_530b", 529.6, 20480, 105, 2520, 2520, 163),
  MegatronRow("gpt_1t", 1008.0, 25600, 128, 3072, 3072, 163),
)
_CUTS = ((2, 32), (4, 16), (8, 8), (16, 4), (32, 2))  # Tensor, stages: of figure 13.
_LENGTH, _VOCABULARY = 2048, 51_200


def mesh_step(name: str) -> mtf.Function:
  """A training step of a model of the ladder, on the mesh and with the layout of its gin file.

  Args:
    name: of a file in gin/models/mesh_ladder.
  """
  gin.clear_config()
  gin.add_config_file_search_path(gin_dir())
  files = [os.path.join(gin_dir(), f) for f in ("defaults.gin", f"models/mesh_ladder/{name}.gin")]
  gin.parse_config_files_and_bindings(files, [])
  bound = {
    key: gin.query_parameter(f"utils.run.{key}")
    for key in ("model_type", "mesh_shape", "layout_rules", "batch_size", "sequence_length")
  }
  steps = planned_steps.make_steps(
    bound["model_type"],
    mtf.convert_to_shape(bound["mesh_shape"]),
    mtf.convert_to_layout_rules(bound["layout_rules"]),
    bound["batch_size"],
    bound["sequence_length"],
  )
  return steps.train_step(steps.required_features, mtf.optimize.AdafactorOptimizer)


def megatron_report(row: MegatronRow, *bindings: str) -> mtf.Report:
  """The plan of a training step of a row.

  Args:
    row: of the table.
    bindings: further ones of gin.
  """
  gin.clear_config()
  gin.add_config_file_search_path(gin_dir())
  files = [os.path.join(gin_dir(), f) for f in ("defaults.gin", f"models/megatron/{row.file}.gin")]
  gin.parse_config_files_and_bindings(files, ["print_best_layouts.search = False", *bindings])
  with contextlib.redirect_stdout(io.StringIO()):
    return utils.run(
      **dict.fromkeys(("tpu_job_name", "tpu", "gcp_project", "tpu_zone", "model_dir"))
    )


def _seconds(report: mtf.Report) -> float:
  """Of one mesh a plan's report has no time."""
  machine = mtf.planning.Machine.load(gin.query_parameter("choose_layout.machine"))
  return report.seconds or report.timed(machine).seconds


def print_mesh() -> None:
  """The models of the Mesh-TensorFlow paper."""
  print("Mesh-TensorFlow, TPU v2: predicted for a step; published where the paper says it")
  print(f"{'model':<10}{'mesh':<20}{'GB a core':>10}{'ms':>8}{'of peak':>9}   published")
  for name in _LADDER:
    start = time.perf_counter()
    report = mtf.describe(mesh_step(name), machine="tpu-v2")
    told = report.to_dict()
    mesh = ",".join(f"{d.name}:{d.size}" for d in report.mesh_shape)
    memory = told["memory_per_device"]["total"] / 1e9
    published = f"{1e3 * s:.0f} ms" if (s := _PUBLISHED_SECONDS.get(name)) else "fits in 8 GB"
    print(
      f"{name:<10}{mesh:<20}{memory:>10.2f}{1e3 * (report.seconds or 0):>8.0f}"
      f"{100 * (report.utilisation or 0):>8.0f}%   {published}"
      f"  ({time.perf_counter() - start:.0f} s to plan)",
      flush=True,
    )


def print_search() -> None:
  """The layout that is found for the largest language model."""
  name = _LADDER[6]
  step = mesh_step(name)
  bound = mtf.describe(step, machine="tpu-v2")
  start, clock = time.process_time(), time.perf_counter()
  choice = mtf.auto_layout(step, devices=512, machine="tpu-v2", time_limit=600)
  spent, clock = time.process_time() - start, time.perf_counter() - clock
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  print(f"Search for {name} on 512 cores of TPU v2, the mesh free")
  print(choice)
  print(
    f"{'proven' if choice.proven else 'not proven'}, {spent:.0f} s of processor time, "
    f"{clock:.0f} s by the clock, {peak / 2**30:.1f} GiB; predicted {1e3 * choice.seconds:.0f} ms "
    f"a step, with the authors' layout {1e3 * (bound.seconds or 0):.0f} ms"
  )


def print_megatron() -> None:
  """The Megatron-LM table, and what is predicted of its figure 13."""
  print("| 10^9 | GPUs | memory a device | a step | published | TFLOP/s a GPU | published | |")
  print("|---|---|---|---|---|---|---|---|")
  for row in _MEGATRON:
    report = megatron_report(row)
    seconds = _seconds(report)
    memory = report.memory.total if report.pipeline is None else report.pipeline.memory
    published = row.counted / row.gpus / row.teraflops / 1e12
    done = report.flops_needed / row.gpus / seconds / 1e12
    off = 100 * (done / row.teraflops - 1)
    print(
      f"| {row.parameters} | {row.gpus} | {memory / 2**30:.0f} GiB | {seconds:.1f} s "
      f"| {published:.1f} s | {done:.0f} | {row.teraflops} | {off:+.0f} % |",
      flush=True,
    )
  print("\n| tensor, stages | batch 32: a step | TFLOP/s | batch 128: a step | TFLOP/s |")
  print("|---|---|---|---|---|")
  for tensor, stages in _CUTS:
    cells = []
    for batch in (32, 128):
      report = megatron_report(
        MegatronRow("gpt_162b", 162.2, 20480, 32, 64, batch),
        f"utils.run.mesh_shape = 'model:{tensor}'",
        f"utils.run.pipeline_stages = {stages}",
        f"utils.run.batch_size = ('sequences_per_batch', {batch})",
        f"utils.run.gradient_accumulation_steps = {batch}",
      )
      seconds = _seconds(report)
      cells.append(f"{seconds:.1f} s | {report.flops_needed / 64 / seconds / 1e12:.0f}")
    print(f"| {tensor}, {stages} | {' | '.join(cells)} |", flush=True)


def main() -> int:
  """The command."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rows", default="mesh,megatron,search", help="which tables")
  rows = parser.parse_args().rows.split(",")
  if "mesh" in rows:
    print_mesh()
  if "megatron" in rows:
    print_megatron()
  if "search" in rows:
    print_search()
  return 0


if __name__ == "__main__":
  sys.exit(main())
