"""The models of the Mesh-TensorFlow paper, as gin files: counted and planned, not allocated."""

from __future__ import annotations

import gin
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import (
  gin_paths,
  utils,
)
from mesh_tensorflow.transformer.modes import planned_steps
from tests.kinds import kept

# Billions of parameters, heads, d_ff.
LADDER = {
  "lm_143m": (0.143, 4, 4096),
  "lm_218m": (0.218, 8, 8192),
  "lm_369m": (0.369, 16, 16384),
  "lm_671m": (0.671, 32, 32768),
  "lm_1275m": (1.275, 64, 65536),
  "lm_2483m": (2.483, 128, 131072),
  "lm_4899m": (4.899, 256, 262144),
  "nmt_155m": (0.155, 4, 2048),
  "nmt_243m": (0.243, 8, 4096),
  "nmt_419m": (0.419, 16, 8192),
  "nmt_772m": (0.772, 32, 16384),
  "nmt_1476m": (1.476, 64, 32768),
  "nmt_2886m": (2.886, 128, 65536),
}


def load(name):
  gin.add_config_file_search_path(gin_paths.gin_dir())
  gin.parse_config_files_and_bindings(
    ["defaults.gin", f"models/mesh_ladder/{name}.gin"],
    ["run.mode = 'plan'", "print_best_layouts.search = False"],
  )


@pytest.mark.parametrize("name", LADDER)
def test_parameters(name):
  load(name)
  billions, heads, d_ff = LADDER[name]
  model_type, kv = ("lm", 256) if name.startswith("lm") else ("bitransformer", 128)
  mesh_shape, layout = mtf.convert_to_shape("batch:32"), mtf.convert_to_layout_rules("")
  lengths = {"inputs": 256, "targets": 256}
  steps = planned_steps.make_steps(model_type, mesh_shape, layout, 256, lengths)
  assert f"{planned_steps.count_parameters(steps) / 1e9:.3f}" == f"{billions:.3f}"
  graph, _, _ = steps.eval_step(steps.required_features).build_graph()
  sizes = {(d.name, d.size) for v in graph.trainable_variables for d in v.shape}
  assert {("heads", heads * kv), ("d_ff", d_ff)} <= sizes


@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh_shape", kept(["batch:32", "batch:16,model:32"], ["batch:16,model:32"])
)
def test_the_largest_on_meshes_of_the_paper(mesh_shape, capsys):
  load("lm_4899m")
  with gin.unlock_config():
    gin.bind_parameter("utils.run.mesh_shape", mesh_shape)
  report = utils.run(tpu_job_name=None, tpu=None, gcp_project=None, tpu_zone=None, model_dir="")
  model = 32 if "model" in mesh_shape else 1
  kernel = next(v for v in report.variables if v.name.endswith("DenseReluDense/wi/kernel"))
  assert kernel.bytes_per_device == 1024 * 262144 // model * 4
  moved = report.bytes_moved()
  assert moved["batch"] > 0 and (model == 1 or moved["model"] > 0)
  printed = capsys.readouterr().out
  assert "4,899," in printed.splitlines()[0]
  assert "Memory of one device" in printed and "Bytes that one device sends" in printed
