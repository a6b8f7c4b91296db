"""Conversion by way of Google's names: every head both ways, by the names that are documented."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import bert, checkpoint_names, convert, initial_weights

numpy_files = pytest.importorskip("safetensors.numpy")

HIDDEN, INNER, VOCAB, POSITIONS, LAYERS = 16, 24, 50, 12, 2
GOOGLE = {
  "vocab_size": VOCAB,
  "hidden_size": HIDDEN,
  "num_hidden_layers": LAYERS,
  "num_attention_heads": 2,
  "intermediate_size": INNER,
  "max_position_embeddings": POSITIONS,
  "type_vocab_size": 2,
}
POOLER = {"bert.pooler.dense.weight": [HIDDEN, HIDDEN], "bert.pooler.dense.bias": [HIDDEN]}
PREDICTIONS = {
  "cls.predictions.transform.dense.weight": [HIDDEN, HIDDEN],
  "cls.predictions.transform.dense.bias": [HIDDEN],
  "cls.predictions.transform.LayerNorm.weight": [HIDDEN],
  "cls.predictions.transform.LayerNorm.bias": [HIDDEN],
  "cls.predictions.bias": [VOCAB],
}
RELATION = {"cls.seq_relationship.weight": [2, HIDDEN], "cls.seq_relationship.bias": [2]}


def classifier(labels: int) -> dict[str, list[int]]:
  return {"classifier.weight": [labels, HIDDEN], "classifier.bias": [labels]}


# Of each class of Hugging Face's: its variables beside the encoder's, and the classes it has.
HEADS = {
  "BertModel": (POOLER, 0),
  "BertForPreTraining": ({**POOLER, **PREDICTIONS, **RELATION}, 0),
  "BertForMaskedLM": (PREDICTIONS, 0),
  "BertForNextSentencePrediction": ({**POOLER, **RELATION}, 0),
  "BertForSequenceClassification": ({**POOLER, **classifier(3)}, 3),
  "BertForTokenClassification": (classifier(5), 5),
  "BertForMultipleChoice": ({**POOLER, **classifier(1)}, 0),
  "BertForQuestionAnswering": (
    {"qa_outputs.weight": [2, HIDDEN], "qa_outputs.bias": [2]},
    0,
  ),
}


def encoder() -> dict[str, list[int]]:
  found = {
    "bert.embeddings.word_embeddings.weight": [VOCAB, HIDDEN],
    "bert.embeddings.position_embeddings.weight": [POSITIONS, HIDDEN],
    "bert.embeddings.token_type_embeddings.weight": [2, HIDDEN],
    "bert.embeddings.LayerNorm.weight": [HIDDEN],
    "bert.embeddings.LayerNorm.bias": [HIDDEN],
  }
  for i in range(LAYERS):
    layer = f"bert.encoder.layer.{i}"
    for part, shape in (
      ("attention.self.query", [HIDDEN, HIDDEN]),
      ("attention.self.key", [HIDDEN, HIDDEN]),
      ("attention.self.value", [HIDDEN, HIDDEN]),
      ("attention.output.dense", [HIDDEN, HIDDEN]),
      ("attention.output.LayerNorm", [HIDDEN]),
      ("intermediate.dense", [INNER, HIDDEN]),
      ("output.dense", [HIDDEN, INNER]),
      ("output.LayerNorm", [HIDDEN]),
    ):
      found[f"{layer}.{part}.weight"], found[f"{layer}.{part}.bias"] = shape, shape[:1]
  return found


def write(folder, architecture, rename=lambda name: name, dtype=np.float32, **more):
  """A folder of Hugging Face's with drawn weights."""
  shapes, labels = HEADS[architecture]
  rng = np.random.default_rng(len(architecture))
  tensors = {n: rng.normal(size=s).astype(dtype) for n, s in {**encoder(), **shapes}.items()}
  folder.mkdir()
  numpy_files.save_file({rename(n): x for n, x in tensors.items()}, folder / "model.safetensors")
  content = {**GOOGLE, "model_type": "bert", "architectures": [architecture], "hidden_act": "gelu"}
  if labels:
    names = [f"KIND {i}" for i in range(labels)]
    content["id2label"] = {str(i): name for i, name in enumerate(names)}
    content["label2id"] = {name: i for i, name in enumerate(names)}
  content.update(more)
  (folder / "config.json").write_text(json.dumps(content))
  return tensors, content


@pytest.mark.parametrize("by", ["mesh", "google"])
@pytest.mark.parametrize("architecture", list(HEADS))
def test_there_and_back(tmp_path, architecture, by):
  tensors, content = write(
    tmp_path / "hf", architecture, problem_type="single_label_classification"
  )
  convert.convert(str(tmp_path / "hf"), str(tmp_path / by), by)
  convert.convert(str(tmp_path / by), str(tmp_path / "back"), "hf")
  found = numpy_files.load_file(tmp_path / "back" / "model.safetensors")
  # The bias of the output layer is there under its two names.
  found.pop("cls.predictions.decoder.bias", None)
  assert set(found) == set(tensors)
  for name, x in tensors.items():
    np.testing.assert_array_equal(found[name], x, err_msg=name)
  again = json.loads((tmp_path / "back" / "config.json").read_text())
  assert again["layer_norm_eps"] == 1e-12
  if architecture == "BertForMultipleChoice":
    assert again.pop("id2label") == {"0": "LABEL_0"}
  assert {k: again[k] for k in content} == content


@pytest.mark.parametrize("architecture", list(HEADS))
def test_what_a_model_is_for_is_told_by_its_variables(tmp_path, architecture):
  """Of a checkpoint that was trained here the configuration says nothing of a task."""
  write(tmp_path / "hf", architecture)
  convert.convert(str(tmp_path / "hf"), str(tmp_path / "mesh"), "mesh")
  config = tmp_path / "ours.json"
  config.write_text(json.dumps(GOOGLE))
  convert.convert(str(tmp_path / "mesh"), str(tmp_path / "back"), "hf", str(config))
  found = json.loads((tmp_path / "back" / "config.json").read_text())
  # A choice among several is a classifier of one class.
  like = {"BertForMultipleChoice": "BertForSequenceClassification"}
  assert found["architectures"] == [like.get(architecture, architecture)]
  shapes, _ = HEADS[architecture]
  count = shapes.get("classifier.bias", [0])[0]
  names = {str(i): f"LABEL_{i}" for i in range(count)}
  assert found.get("id2label", {}) == names
  assert found.get("label2id", {}) == {name: int(i) for i, name in names.items()}


def test_a_configuration_of_another_task_is_not_believed(tmp_path):
  """A classifier that was tuned from a model for pretraining, of two classes once."""
  write(tmp_path / "hf", "BertForSequenceClassification")
  convert.convert(str(tmp_path / "hf"), str(tmp_path / "mesh"), "mesh")
  stale = {
    **json.loads((tmp_path / "hf" / "config.json").read_text()),
    "architectures": ["BertForMaskedLM"],
    "id2label": {"0": "no", "1": "yes"},
  }
  (tmp_path / "stale.json").write_text(json.dumps(stale))
  arguments = str(tmp_path / "mesh"), str(tmp_path / "back"), "hf", str(tmp_path / "stale.json")
  convert.convert(*arguments)
  found = json.loads((tmp_path / "back" / "config.json").read_text())
  assert found["architectures"] == ["BertForSequenceClassification"]
  assert list(found["id2label"].values()) == ["LABEL_0", "LABEL_1", "LABEL_2"]
  convert.convert(*arguments, labels=["a", "b", "c"])
  found = json.loads((tmp_path / "back" / "config.json").read_text())
  assert found["label2id"] == {"a": 0, "b": 1, "c": 2}
  with pytest.raises(mtf.ConfigError, match="--labels=a,b: the model has 3 classes"):
    convert.convert(*arguments, labels=["a", "b"])


@pytest.mark.parametrize("dtype", [np.float16, tf.bfloat16.as_numpy_dtype, np.float32])
def test_first_names_of_norms_and_small_floats_are_read(tmp_path, dtype):
  """`bert-base-uncased` has LayerNorm.gamma and beta, as Google."""

  def rename(name):
    if "LayerNorm" in name:
      name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
    return name

  tensors, _ = write(tmp_path / "hf", "BertForPreTraining", rename, dtype)
  weights = initial_weights.Weights(str(tmp_path / "hf"))
  found = weights.value("bert/encoder/layer_1/output/LayerNorm/gamma")
  np.testing.assert_array_equal(found, tensors["bert.encoder.layer.1.output.LayerNorm.weight"])
  assert len(weights.names) == len(tensors) and found.dtype == np.float32
  convert.convert(str(tmp_path / "hf"), str(tmp_path / "mesh"), "mesh")
  ours = initial_weights.Weights(str(tmp_path / "mesh"))
  name = "bert/encoder/block_1/feedforward/layer_norm/scale"
  np.testing.assert_array_equal(ours.value(name), found)
  assert checkpoint_names.google_name(name) == "bert/encoder/layer_1/output/LayerNorm/gamma"


@pytest.mark.parametrize("number", ["x", "0n", "", "9" * 5000, "-1"])
def test_a_layer_that_has_no_number_is_not_there(tmp_path, number):
  rename = lambda name: name.replace("encoder.layer.1.", f"encoder.layer.{number}.")  # noqa: E731
  write(tmp_path / "hf", "BertModel", rename, np.float32)
  weights = initial_weights.Weights(str(tmp_path / "hf"))
  assert {n.split("/")[2] for n in weights.names if "/layer_" in n} == {"layer_0"}
  with pytest.raises(mtf.CheckpointError, match="has no bert/encoder/block_1"):
    convert.convert(str(tmp_path / "hf"), str(tmp_path / "mesh"), "mesh")


def test_defaults_of_other_configurations(tmp_path):
  read = bert.BertConfig.from_dict
  assert read(GOOGLE).layer_norm_epsilon == 1e-12
  assert read({"vocab_size": 50, "d_model": 16}).layer_norm_epsilon == 1e-6
  assert read({**GOOGLE, "layer_norm_epsilon": 1e-6}).layer_norm_epsilon == 1e-6
  assert read({**GOOGLE, "layer_norm_eps": 1e-5}).layer_norm_epsilon == 1e-5
  # What is not said: Google's defaults are ours, Hugging Face's not all.
  google, ours = read({"hidden_size": 768}), bert.BertConfig(None)
  ours.layer_norm_epsilon = 1e-12
  assert google.to_dict() == ours.to_dict()
  hugging_face = read({"model_type": "bert"})
  assert (hugging_face.vocab_size, hugging_face.type_vocab_size) == (30522, 2)
  assert hugging_face.feedforward_intermediate_act == "gelu_erf"
  assert hugging_face.layer_norm_epsilon == 1e-12
  # A configuration is read back as it was written.
  for config in (google, hugging_face, read({**GOOGLE, "architectures": ["BertModel"]})):
    assert read(json.loads(config.to_json_string())).to_dict() == config.to_dict()
  with pytest.raises(mtf.ConfigError, match="not model_type 'roberta'"):
    read({**GOOGLE, "model_type": "roberta"})
  with pytest.raises(mtf.ConfigError, match="not a decoder"):
    read({**GOOGLE, "model_type": "bert", "is_decoder": True})
