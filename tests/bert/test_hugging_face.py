"""Equal results with Hugging Face's BERT on the same weights, in both directions."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mesh_tensorflow import checkpoint
from mesh_tensorflow.bert import convert, initial_weights
from tests.bert import models

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra: bench)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors")

pytestmark = pytest.mark.slow


def theirs(folder, batch):
  model = transformers.BertForPreTraining.from_pretrained(folder).eval()
  names = {
    "input_ids": "input_ids",
    "attention_mask": "input_mask",
    "token_type_ids": "segment_ids",
  }
  inputs = {k: torch.tensor(batch[v], dtype=torch.long) for k, v in names.items()}
  with torch.no_grad():
    body = model.bert(**inputs)
    out = model(**inputs)
  positions = batch["masked_lm_positions"][:, :, None]
  return [
    body.last_hidden_state.numpy(),
    body.pooler_output.numpy(),
    np.take_along_axis(out.prediction_logits.numpy(), positions, 1),
    out.seq_relationship_logits.numpy(),
  ]


def ours(cpu_devices, folder, config, batch):
  impl = models.one_device(cpu_devices)
  run = models.function(impl, config)
  run(*batch.values())  # Makes the variables.
  store = impl.variable_store
  initial_weights.initialize(store, folder, store.names)
  return [x.numpy() for x in run(*batch.values())[:4]]


def compare(found, wanted, vocab_size):
  found[2] = found[2][..., :vocab_size]
  for a, b in zip(found, wanted):
    np.testing.assert_allclose(a, b, atol=1e-4)
    assert np.abs(b).max() > 0.1


@pytest.mark.parametrize("act", ["gelu", "gelu_new"])
def test_theirs_to_ours(cpu_devices, tmp_path, act):
  config = transformers.BertConfig(
    vocab_size=100,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=11,
    type_vocab_size=2,
    hidden_act=act,
    initializer_range=0.3,
  )
  torch.manual_seed(0)
  model = transformers.BertForPreTraining(config)
  with torch.no_grad():
    model.cls.predictions.bias.normal_()
  model.save_pretrained(tmp_path / "hf")
  convert.convert(str(tmp_path / "hf"), str(tmp_path / "mesh"), "mesh")
  mine = convert.BertConfig.from_json_file(tmp_path / "mesh" / "bert_config.json")
  assert mine.layer_norm_epsilon == 1e-12
  batch = models.batch()
  wanted = theirs(tmp_path / "hf", batch)
  # By way of our checkpoint, and straight.
  for folder in ("mesh", "hf"):
    compare(ours(cpu_devices, str(tmp_path / folder), mine, batch), wanted, 100)


@pytest.mark.parametrize("act", ["gelu", "gelu_erf", "relu"])
def test_ours_to_theirs(cpu_devices, tmp_path, act):
  config = models.config(feedforward_intermediate_act=act, layer_norm_epsilon=1e-5)
  impl = models.one_device(cpu_devices)
  run = models.function(impl, config)
  batch = models.batch()
  run(*batch.values())
  models.scatter(impl.variable_store)
  found = [x.numpy() for x in run(*batch.values())[:4]]
  with checkpoint.Checkpointer(tmp_path / "mesh", impl.variable_store) as saver:
    saver.save(7)
  (tmp_path / "config.json").write_text(config.to_json_string())
  convert.convert(str(tmp_path / "mesh"), str(tmp_path / "hf"), "hf", str(tmp_path / "config.json"))
  assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 100
  compare(found, theirs(tmp_path / "hf", batch), 100)
