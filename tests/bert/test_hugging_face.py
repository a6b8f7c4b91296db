"""Equal results with Hugging Face's BERT on the same weights, in both directions."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint
from mesh_tensorflow.bert import convert, initial_weights, run_classifier, run_squad
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


HEADS = [
  "BertModel", "BertForPreTraining", "BertForMaskedLM", "BertForNextSentencePrediction",
  "BertForSequenceClassification", "BertForTokenClassification", "BertForMultipleChoice",
  "BertForQuestionAnswering",
]  # fmt: skip


def logits_of(model, batch):
  """The first outputs of one of their models."""
  ids, mask, types = (
    torch.tensor(batch[name], dtype=torch.long)
    for name in ("input_ids", "input_mask", "segment_ids")
  )
  if isinstance(model, transformers.BertForMultipleChoice):
    ids, mask, types = ids[:, None], mask[:, None], types[:, None]
  with torch.no_grad():
    out = model.eval()(input_ids=ids, attention_mask=mask, token_type_ids=types)
  return [x.numpy() for x in out.to_tuple()[:2]]


@pytest.mark.parametrize("by", ["mesh", "google"])
@pytest.mark.parametrize("head", HEADS)
def test_every_head_there_and_back(tmp_path, head, by):
  names = {i: f"KIND {i}" for i in range(3)}
  labels = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
  config = transformers.BertConfig(
    vocab_size=100,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=11,
    initializer_range=0.3,
    **(labels if head.endswith("Classification") else {}),
  )
  torch.manual_seed(0)
  model = getattr(transformers, head)(config)
  model.save_pretrained(tmp_path / "hf")
  convert.convert(str(tmp_path / "hf"), str(tmp_path / by), by)
  convert.convert(str(tmp_path / by), str(tmp_path / "back"), "hf")
  content = json.loads((tmp_path / "back" / "config.json").read_text())
  assert content["architectures"] == [head]
  again, told = getattr(transformers, head).from_pretrained(
    tmp_path / "back", output_loading_info=True
  )
  assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
  if head.endswith("Classification"):
    assert again.config.num_labels == 3
    assert again.config.id2label == model.config.id2label
    assert again.config.label2id == model.config.label2id
  batch = models.batch()
  for a, b in zip(logits_of(again, batch), logits_of(model, batch)):
    np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("head", ["BertForSequenceClassification", "BertForQuestionAnswering"])
def test_our_task_for_them(cpu_devices, tmp_path, head):
  """A classifier of three classes, and answers, trained here (as it were), by their classes."""
  config = models.config(layer_norm_epsilon=1e-12)
  impl = models.one_device(cpu_devices)
  classes = mtf.Dimension("seq", 3)

  @mtf.function(impl, models.specs()[:3])
  def run(ids, mask, types):
    if head == "BertForQuestionAnswering":
      return run_squad.create_model(config, False, ids, mask, types)
    labels = mtf.zeros(ids.mesh, ids.shape[:1], tf.int32)
    args = ids, mask, types, labels, classes, "", ""
    return run_classifier.create_model(config, False, *args)[2:3]

  batch = models.batch()
  inputs = [batch[name] for name in ("input_ids", "input_mask", "segment_ids")]
  run(*inputs)
  models.scatter(impl.variable_store)
  found = [x.numpy() for x in run(*inputs)]
  with checkpoint.Checkpointer(tmp_path / "mesh", impl.variable_store) as saver:
    saver.save(7)
  (tmp_path / "config.json").write_text(config.to_json_string())
  convert.convert(str(tmp_path / "mesh"), str(tmp_path / "hf"), "hf", str(tmp_path / "config.json"))
  theirs_config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
  assert theirs_config.architectures == [head]
  model, told = getattr(transformers, head).from_pretrained(
    tmp_path / "hf", output_loading_info=True
  )
  # Theirs has no pooler for answers.
  assert not told["missing_keys"] and not told["mismatched_keys"]
  if head == "BertForSequenceClassification":
    assert theirs_config.num_labels == 3
  for a, b in zip(found, logits_of(model, batch)):
    np.testing.assert_allclose(a, b, atol=1e-4)
    assert np.abs(b).max() > 0.1
