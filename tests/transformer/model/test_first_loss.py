"""The first loss of a language model is about the logarithm of the number of its tokens."""

from __future__ import annotations

import math
import pathlib
import re

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import gin_config, gin_paths, moe, utils  # noqa: F401
from mesh_tensorflow.transformer.model import model_building
from mesh_transformer_cli import front
from tests.transformer import lm_program as lm

GIN = pathlib.Path(gin_paths.gin_dir())
SMALL = [
  *("num_layers = 2", "d_model = 64", "d_ff = 96", "num_heads = 4", "d_kv = 16"),
  *("Unitransformer.max_length = 16", "MoE1D.num_experts = 4", "MoE1D.hidden_size = 32"),
]
# No multiple of the 128 to which a vocabulary is padded, nor of the devices of a mesh.
TOKENS = 65
SPLIT = ("rows:2,cols:2", "batch:rows,vocab:cols,heads:cols,d_ff:cols,experts:rows")


def _language_models() -> list[str]:
  """The files of the package that make a language model, but for what others include."""
  found = []
  for path in sorted(GIN.rglob("*.gin")):
    if re.search(
      r"model_type = ['\"]lm['\"]|include 'models/(llama|mesh_ladder/lm)", path.read_text()
    ):
      found.append(path.relative_to(GIN).as_posix())
  return found


def _first_loss(cpu_devices, mesh="all:1", layout="", mode="train", tokens=TOKENS):
  impl = mtf.PlacementMeshImpl(mesh, layout, cpu_devices[: mtf.convert_to_shape(mesh).size])
  model = model_building.build_model("lm", tokens, tokens, layout, mesh)

  @mtf.function(impl, input_signature=[mtf.TensorSpec([("batch", 8), ("length", 16)], "int32")])
  def forward(targets):
    inputs = mtf.shift(targets, 1, targets.shape[1], wrap=False)
    return model.call_simple(inputs, targets, compute_loss=True, mode=mode)

  targets = np.random.default_rng(0).integers(2, tokens, [8, 16]).astype(np.int32)
  with lm.eagerly():
    logits, loss = forward(targets, seed=1)
  return np.asarray(logits), float(loss), targets


def test_there_are_language_models():
  assert {"models/lm_base.gin", "models/llama_1b.gin", "problems/own_text.gin"} <= set(
    _language_models()
  )


@pytest.mark.parametrize("name", _language_models())
def test_of_every_file(name, cpu_devices):
  more = ["num_memory_heads = 2"] if "llama" in name or "mixtral" in name else []
  bindings = [*SMALL, *more, "get_variable_dtype.activation_dtype = 'float32'"]
  gin_config.parse_gin([name], bindings)
  _, loss, _ = _first_loss(cpu_devices)
  assert abs(loss - math.log(TOKENS)) < 0.2


def test_of_what_init_writes(tmp_path, cpu_devices):
  (tmp_path / "a.txt").write_text("To be, or not to be, that is the question.\n" * 400)
  arguments = ["init", str(tmp_path / "new"), f"--text={tmp_path / 'a.txt'}"]
  assert front.command_line("mesh-transformer", arguments)[1] is None
  gin_config.parse_gin([str(tmp_path / "new" / "train.gin")], SMALL)
  _, loss, _ = _first_loss(cpu_devices)
  assert abs(loss - math.log(TOKENS)) < 0.2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", [("all:1", ""), SPLIT])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_padded_ids_have_no_probability(tied, layout, smoothing, cpu_devices):
  """The loss is that of the tokens alone; with smoothing, too, which spreads over them."""
  gin_config.parse_gin(
    ["models/lm_base.gin"],
    [
      *SMALL,
      "Unitransformer.logits_init_scale = 1.0",
      f"Unitransformer.shared_embedding_and_softmax_weights = {tied}",
      f"Unitransformer.label_smoothing = {smoothing}",
    ],
  )
  logits, loss, targets = _first_loss(cpu_devices, *layout, mode="eval")
  assert logits.shape[-1] == 128
  known = logits[..., :TOKENS].astype(np.float64)
  log_p = known - np.log(np.sum(np.exp(known), -1, keepdims=True))
  right = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
  expected = -np.mean((1 - smoothing) * right + smoothing * np.mean(log_p, -1))
  assert loss == pytest.approx(expected, rel=1e-5)
  assert np.sum(np.exp(logits[..., TOKENS:] - logits.max(-1, keepdims=True))) == 0.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision(dtype, cpu_devices):
  gin_config.parse_gin(
    ["models/lm_base.gin"], [*SMALL, "decoder/Unitransformer.label_smoothing = 0.1"]
  )
  impl = mtf.PlacementMeshImpl("all:1", "", cpu_devices[:1])
  model = model_building.build_model("lm", TOKENS, TOKENS, "", "")
  variable_dtype = utils.get_variable_dtype("float32", "float32", dtype)

  @mtf.function(impl, input_signature=[mtf.TensorSpec([("batch", 2), ("length", 8)], "int32")])
  def step(targets):
    _, loss = model.call_simple(targets, targets, True, "train", variable_dtype)
    mtf.optimize.SgdOptimizer(learning_rate=0.0).minimize(loss)
    return loss

  with lm.eagerly():
    assert np.isfinite(float(step(np.full([2, 8], 5, np.int32), seed=1)))


@pytest.mark.parametrize("layout", [("all:1", ""), ("rows:2,cols:2", "batch:rows,vocab:cols")])
def test_none_is_drawn(layout, cpu_devices):
  """At a temperature at which all ids of equal logits are about as likely; and by beams."""
  gin_config.parse_gin(["models/lm_base.gin"], SMALL)
  mesh, rules = layout
  impl = mtf.PlacementMeshImpl(mesh, rules, cpu_devices[: mtf.convert_to_shape(mesh).size])
  model = model_building.build_model("lm", 9, 9, rules, mesh)

  @mtf.function(impl, input_signature=[mtf.TensorSpec([("batch", 8), ("length", 16)], "int32")])
  def sample(given):
    return model.sample_autoregressive(given, temperature=10.0, stop_at_token=None)

  with lm.eagerly():
    ids = np.asarray(sample(np.zeros([8, 16], np.int32), seed=1))
  assert ids.max() < 9 and len(np.unique(ids)) > 4


def test_an_embedding_of_ones_own_needs_no_new_argument(cpu_devices):
  """Classes have the arguments of the library of TensorFlow 1."""
  gin_config.parse_gin(
    ["models/lm_base.gin"],
    [
      *SMALL,
      "import mesh_tensorflow.transformer.vocab_embeddings",
      "get_vocab_embedding_cls.cls = @FactorizedVocabEmbedding",
      "FactorizedVocabEmbedding.inner_dimension_size = 8",
    ],
  )
  logits, loss, _ = _first_loss(cpu_devices)
  assert np.isfinite(loss) and logits[..., TOKENS:].max() < -1e8
