"""Predicted beside published: runs on machines that the package ships figures of.

  python -m benchmarks.published [--rows mesh,megatron,search]

mesh: the models of "Mesh-TensorFlow: Deep Learning for Supercomputers" (Shazeer et al., 2018,
arXiv:1811.02084): 7 language models and 6 translation models, 256 sequences of 256 tokens in a
batch, on 512 TPU v2 cores, each model on the mesh that its gin file has. Published: they fit in the
8 GB of a core; the largest language model took 13 hours for 136,000 steps, that is 344 ms a step,
"over 50 % of peak". (Sizes from the paper; a core of TPU v2 has 22.5 TFLOP/s.)

megatron: "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(Narayanan et al., 2021, arXiv:2104.04473), table 1, the rows without pipelining: sequences of 2048
tokens, a vocabulary of 51,200, layers computed again in the backward pass, A100 with 80 GB. The
published utilisation counts that recomputation, and so does the prediction beside it.

search: what `mtf.auto_layout` finds for the largest language model on 512 cores, the mesh free,
beside the layout of its authors; processor time and memory of the search.

Nothing runs on devices; each row takes seconds to a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import sys
import time

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


@dataclasses.dataclass(frozen=True)
class MegatronRow:
  """A row of the table.

  Attributes:
    parameters: billions.
    heads: of attention.
    hidden: d_model.
    layers: number of blocks.
    tensor: GPUs that share a layer.
    gpus: all of them.
    batch: sequences.
    teraflops: published, of a GPU.
  """

  parameters: float
  heads: int
  hidden: int
  layers: int
  tensor: int
  gpus: int
  batch: int
  teraflops: float


_MEGATRON = (
  MegatronRow(1.7, 24, 2304, 24, 1, 32, 512, 137),
  MegatronRow(3.6, 32, 3072, 30, 2, 64, 512, 138),
  MegatronRow(7.5, 32, 4096, 36, 4, 128, 512, 142),
  MegatronRow(18.4, 48, 6144, 40, 8, 256, 1024, 135),
)
_LENGTH, _VOCABULARY, _A100_PEAK = 2048, 51_200, 312e12


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


def megatron_report(row: MegatronRow) -> mtf.Report:
  """The plan of a training step of a row, one microbatch of all sequences of a GPU.

  Args:
    row: of the table.
  """
  gin.clear_config()
  gin.parse_config(f"""
    import mesh_tensorflow.transformer.transformer_layers
    transformer.LayerStack.sublayers_initial = []
    transformer.LayerStack.sublayers_per_layer = [
      @transformer.sublayer_rms_norm, @transformer.sublayer_call_layer,
      @transformer.sublayer_residual]
    transformer.LayerStack.sublayers_final = [@transformer.sublayer_rms_norm]
    transformer.LayerStack.recompute_grads = True
    transformer.make_layer_stack.layers = [
      @transformer_layers.SelfAttention, @transformer_layers.DenseReluDense]
    transformer.make_layer_stack.num_layers = {row.layers}
    Unitransformer.d_model = {row.hidden}
    Unitransformer.shared_embedding_and_softmax_weights = True
    Unitransformer.max_length = {_LENGTH}
    DenseReluDense.hidden_size = {4 * row.hidden}
    SelfAttention.num_heads = {row.heads}
    SelfAttention.key_value_size = {row.hidden // row.heads}
    get_variable_dtype.master_dtype = 'float32'
    get_variable_dtype.activation_dtype = 'bfloat16'
  """)
  layout = "batch:data,d_ff:tensor,heads:tensor,vocab:tensor"
  mesh = mtf.convert_to_shape(f"data:{row.gpus // row.tensor},tensor:{row.tensor}")
  rules = mtf.convert_to_layout_rules(layout)
  model = utils.build_model("lm", _VOCABULARY, _VOCABULARY, rules, mesh)
  impl, lengths = mtf.MeshImpl(mesh, rules), {"targets": _LENGTH}
  steps = utils.ModelSteps(model, impl, "lm", row.batch, lengths)
  step = steps.train_step(["targets"], mtf.optimize.AdamWeightDecayOptimizer)
  return mtf.describe(step, machine="a100")


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
  """The rows of the Megatron-LM table without pipelining."""
  print("Megatron-LM, A100: predicted and published TFLOP/s of a GPU, recomputation counted")
  print(f"{'billions':>8}{'GPUs':>6}{'tensor':>8}{'seconds':>9}{'predicted':>15}{'published':>15}")
  for row in _MEGATRON:
    report = megatron_report(row)
    done = report.flops_needed / row.gpus / (report.seconds or 1)
    print(
      f"{row.parameters:>8}{row.gpus:>6}{row.tensor:>8}{report.seconds:>9.2f}"
      f"{done / 1e12:>8.0f} ({100 * done / _A100_PEAK:.0f} %)"
      f"{row.teraflops:>8} ({100e12 * row.teraflops / _A100_PEAK:.0f} %)",
      flush=True,
    )


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
