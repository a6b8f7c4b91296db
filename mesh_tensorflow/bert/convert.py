"""Converts the weights of a BERT model between this package, Google's BERT and Hugging Face's.

  python -m mesh_tensorflow.bert.convert --input=uncased_L-12_H-768_A-12 --output=model --to=mesh
  python -m mesh_tensorflow.bert.convert --input=model --bert_config_file=model/bert_config.json \
    --output=hf_model --to=hf

What --input is, is found out. `mesh` writes model.ckpt-0 and bert_config.json; `google`
bert_model.ckpt and bert_config.json; `hf` model.safetensors and config.json, which
`transformers.BertModel.from_pretrained` and its kind read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import checkpoint_names, settings
from mesh_tensorflow.bert.bert import BertConfig, BertModel
from mesh_tensorflow.bert.config import (
  ACTIVATIONS,
  KEPT,
  SETTINGS,
  config_from_hugging_face,
  read_json_object,
)
from mesh_tensorflow.bert.initial_weights import SAFETENSORS, Weights
from mesh_tensorflow.bert.program_flags import Flag, ProgramFlags
from mesh_tensorflow.errors import CheckpointError, ConfigError, InstallationError

KINDS = ("mesh", "google", "hf")
CONFIG_FILES = {"mesh": "bert_config.json", "google": "bert_config.json", "hf": "config.json"}


FLAGS = ProgramFlags(
  (
    Flag(
      flags.DEFINE_string,
      "input",
      None,
      "A checkpoint or its folder, or a folder of Hugging Face's.",
    ),
    Flag(flags.DEFINE_string, "output", None, "Folder to write."),
    Flag(flags.DEFINE_string, "to", None, f"What to write: {', '.join(KINDS)}."),
    Flag(
      flags.DEFINE_string,
      "bert_config_file",
      None,
      "The model's configuration; by default the file that lies beside the weights.",
    ),
    Flag(
      flags.DEFINE_string,
      "labels",
      None,
      "Names of a classifier's classes, with commas, for --to=hf; by default LABEL_0, LABEL_1, ...",
    ),
    Flag(
      flags.DEFINE_string, "vocab_file", None, "A vocabulary to copy to vocab.txt of the output."
    ),
  ),
)
FLAGS.define(__name__)


# For each class of Hugging Face's, the variables that it has beside BERT's, by Google's names. A
# model whose configuration names no class gets the first that suits.
_POOLER, _CLASSIFIER = "bert/pooler/", "output_weights"
_PREDICTIONS, _RELATION, _ANSWERS = "cls/predictions/", "cls/seq_relationship/", "cls/squad/"
_ARCHITECTURES = {
  "BertForQuestionAnswering": {_ANSWERS},
  "BertForSequenceClassification": {_CLASSIFIER, _POOLER},
  "BertForTokenClassification": {_CLASSIFIER},
  "BertForMultipleChoice": {_CLASSIFIER, _POOLER},
  "BertForPreTraining": {_PREDICTIONS, _RELATION, _POOLER},
  "BertForMaskedLM": {_PREDICTIONS},
  "BertForNextSentencePrediction": {_RELATION, _POOLER},
  "BertModel": set[str](),
}


def _architecture(config: BertConfig, names: Sequence[str]) -> str:
  """Name of the Hugging Face class for a model with these variables.

  The one that the configuration names, if the variables suit it; a model that was fine-tuned for
  another task since has other variables, which decide then.
  """
  parts = (_POOLER, _CLASSIFIER, _PREDICTIONS, _RELATION, _ANSWERS)
  there = {part for part in parts if any(n.startswith(part) for n in names)}
  suiting = [name for name, needed in _ARCHITECTURES.items() if needed <= there]
  known = [a for a in _kept(config).get("architectures") or () if a in suiting]
  plain = there <= {_POOLER}
  return known[0] if known and (plain or known[0] != "BertModel") else suiting[0]


def _kept(config: BertConfig) -> dict[str, Any]:
  """Hugging Face settings kept in a converted configuration; {} if there are none."""
  return dict(getattr(config, KEPT, None) or {})


def config_for_hugging_face(
  config: BertConfig, names: Sequence[str] = (), labels: int | Sequence[str] = 0
) -> dict[str, Any]:
  """The config.json of a model of ours for Hugging Face.

  Args:
    config: ours.
    names: Google's names of the variables, which tell what the model is for.
    labels: names of a classifier's classes, or how many there are: their names are those of the
      configuration then, if it was one of Hugging Face's, or LABEL_0, LABEL_1, ...

  Raises:
    ConfigError: their model has no such setting.
  """
  _check_original(config)
  activations = dict(ACTIVATIONS)
  act = str(config.feedforward_intermediate_act).lower()
  if act not in activations:
    raise ConfigError(
      f"feedforward_intermediate_act {act!r} has no counterpart; use {', '.join(activations)}"
    )
  content = {theirs: getattr(config, ours) for ours, theirs in SETTINGS}
  kept = _kept(config)
  if labels:
    ids = kept.get("id2label") or {}
    if not isinstance(labels, int):
      ids = {str(i): name for i, name in enumerate(labels)}
    elif len(ids) != labels:
      ids = {str(i): f"LABEL_{i}" for i in range(labels)}
    kept.update(id2label=ids, label2id={name: int(i) for i, name in ids.items()})
  return {
    "pad_token_id": 0,
    **kept,
    **content,
    "model_type": "bert",
    "architectures": [_architecture(config, names)],
    "hidden_act": activations[act],
    "layer_norm_eps": config.layer_norm_epsilon,
  }


def _check_original(config: BertConfig) -> None:
  """Raises `ConfigError` for settings that the original BERT does not have."""
  size = config.attention_head_size
  for setting, wanted in (
    ("position_signal", "embedding"),
    ("residual_structure", "original"),
    ("use_bias", True),
    ("block_layers", ["attention", "feedforward"]),
  ):
    if getattr(config, setting) != wanted:
      raise ConfigError(
        f"the original BERT has {setting} {wanted!r} only, this model has "
        f"{getattr(config, setting)!r}: there is no such model of Google's or Hugging Face's"
      )
  if size and size * config.attention_num_heads != config.d_model:
    raise ConfigError(
      f"attention_head_size (={size}) x attention_num_heads (={config.attention_num_heads}) is not "
      f"d_model (={config.d_model}), which the original BERT needs"
    )


def variable_shapes(config: BertConfig) -> dict[str, list[int]]:
  """The shapes of the variables of a model with both heads of pretraining, by our names."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "shapes")
  one = mtf.Shape([("batch", 1), ("seq", 1)])
  model = BertModel(config, False, mtf.zeros(mesh, one, tf.int32))
  positions = mtf.zeros(mesh, mtf.Shape([("batch", 1), ("max_pred_seq", 1)]), tf.int32)
  model.get_masked_lm_output(positions, positions, mtf.ones_like(positions))
  model.get_next_sentence_output(mtf.zeros(mesh, one[:1], tf.int32))
  return {v.full_name: v.shape.to_integer_list for v in graph.all_variables}


def to_google(weights: Weights, config: BertConfig) -> dict[str, np.ndarray]:
  """The variables of a model by Google's names, shaped as Google's.

  Args:
    weights: the weights, of any of the three kinds.
    config: the model.

  Raises:
    ConfigError: Google's BERT is no such model.
    CheckpointError: a variable has another shape than the configuration says, or is missing.
  """
  _check_original(config)
  found = {}
  shapes = variable_shapes(config)
  for name in filter(checkpoint_names.is_of_model, sorted(weights.names)):
    if weights.kind != "mesh":
      found[name] = weights.value(name)
      continue
    google = checkpoint_names.google_name(name)
    if google is None:
      raise CheckpointError(f"{weights.path}: the original BERT has no variable like {name}")
    value = weights.value(name)
    if name in shapes and list(value.shape) != shapes[name]:
      raise CheckpointError(
        f"{weights.path}: {name} has shape {list(value.shape)}, the configuration says "
        f"{shapes[name]}"
      )
    found[google] = checkpoint_names.to_google(name, value, int(config.vocab_size or 0))
  missing = [
    n for n in shapes if n.startswith("bert/") and checkpoint_names.google_name(n) not in found
  ]
  # A model for a task of its own may come without the pooler.
  missing = [n for n in missing if not n.startswith("bert/pooler/")]
  if missing:
    raise CheckpointError(f"{weights.path} has no {', '.join(missing[:3])} of the configuration")
  return found


def from_google(
  values: Mapping[str, np.ndarray], config: BertConfig, source: str
) -> dict[str, np.ndarray]:
  """The variables of a model by our names, shaped as ours.

  Args:
    values: by Google's names.
    config: the model.
    source: where they are from, for errors.

  Raises:
    CheckpointError: a variable has another shape than the configuration says.
  """
  found = {}
  shapes = variable_shapes(config)
  for name in ("cls/squad/output/kernel", "cls/squad/output/bias", "output_weights", "output_bias"):
    value = values.get(str(checkpoint_names.google_name(name)))
    if value is not None:
      shapes[name] = list(value.T.shape if name.endswith("/kernel") else value.shape)
  for name, shape in shapes.items():
    value = values.get(str(checkpoint_names.google_name(name)))
    if value is not None:
      found[name] = checkpoint_names.from_google(name, value, shape)
  if not found:
    raise CheckpointError(f"{source} has no variable of a BERT model")
  return found


def write_checkpoint(path: str, values: Mapping[str, np.ndarray]) -> None:
  """Writes a checkpoint of TensorFlow's.

  Args:
    path: without suffix.
    values: by name.
  """
  names = sorted(values)
  tensors = [tf.constant(np.asarray(values[n], order="C")) for n in names]
  tf.raw_ops.SaveV2(
    prefix=path, tensor_names=names, shape_and_slices=[""] * len(names), tensors=tensors
  )


def write_hugging_face(
  folder: str,
  values: Mapping[str, np.ndarray],
  config: BertConfig,
  labels: Sequence[str] | None = None,
) -> None:
  """Writes a folder for Hugging Face's BERT models.

  Args:
    folder: it is there.
    values: by Google's names.
    config: the model.
    labels: names of a classifier's classes.

  Raises:
    ConfigError: their model has no such setting; or names of classes are not as many as these.
    InstallationError: the library safetensors is not installed.
  """
  count = len(values[_CLASSIFIER]) if _CLASSIFIER in values else 0
  if labels and len(labels) != count:
    raise ConfigError(f"--labels={','.join(labels)}: the model has {count} classes")
  content = config_for_hugging_face(config, list(values), labels or count)
  try:
    from safetensors.numpy import save_file
  except ImportError as e:
    raise InstallationError(
      "writing weights for Hugging Face needs the library safetensors: pip install safetensors"
    ) from e
  tensors = {
    checkpoint_names.hugging_face_name(name): np.ascontiguousarray(
      checkpoint_names.hugging_face_value(name, value)
    )
    for name, value in values.items()
  }
  if "cls.predictions.bias" in tensors:
    # Their output layer is the embedding's matrix, and has the bias under two names.
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].copy()
  save_file(tensors, os.path.join(folder, SAFETENSORS), metadata={"format": "pt"})
  _write_json(os.path.join(folder, CONFIG_FILES["hf"]), content)


def _write_json(path: str, content: Mapping[str, object]) -> None:
  with tf.io.gfile.GFile(path, "w") as f:
    f.write(json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_config(weights: Weights, file: str | None = None) -> BertConfig:
  """Reads the configuration that belongs to some weights.

  Args:
    weights: see `Weights`.
    file: by default the one beside them.

  Raises:
    ConfigError: there is none, or it is of another kind of model.
  """
  file = file or os.path.join(os.path.dirname(weights.path), CONFIG_FILES[weights.kind])
  config = BertConfig.from_json_file(file)
  if weights.kind == "hf":
    config = config_from_hugging_face(read_json_object(file))
  if not config.vocab_size:
    raise ConfigError(f"BERT configuration {file}: vocab_size is missing")
  return config


def convert(
  source: str,
  folder: str,
  to: str,
  bert_config_file: str | None = None,
  labels: Sequence[str] | None = None,
) -> int:
  """Converts weights; see the module.

  Args:
    source: a checkpoint or folder.
    folder: to write; made if it is not there.
    to: "mesh", "google" or "hf".
    bert_config_file: the model's configuration; by default the one beside the weights.
    labels: names of a classifier's classes, for "hf".

  Returns:
    The number of variables written.

  Raises:
    ConfigError: an unknown kind, or a model that there is not of that kind.
    CheckpointError: the weights cannot be read, or are not those of the configuration.
  """
  if to not in KINDS:
    raise ConfigError(f"cannot convert to {to!r}; use one of {', '.join(KINDS)}")
  weights = Weights(source)
  config = read_config(weights, bert_config_file)
  google = to_google(weights, config)
  settings.make_folder(folder)
  if to == "hf":
    write_hugging_face(folder, google, config, labels)
    return len(google)
  values: dict[str, Any] = dict(google)
  content = config.to_dict()
  path = os.path.join(folder, "bert_model.ckpt")
  if to == "mesh":
    values = dict(from_google(google, config, weights.path), global_step=np.int64(0))
    path = os.path.join(folder, "model.ckpt-0")
  else:
    content = {theirs: getattr(config, ours) for ours, theirs in SETTINGS}
    content["hidden_act"] = config.feedforward_intermediate_act
    content["layer_norm_eps"] = config.layer_norm_epsilon
    if _kept(config):
      content[KEPT] = _kept(config)
  write_checkpoint(path, values)
  _write_json(os.path.join(folder, CONFIG_FILES[to]), content)
  return len(google)


def main(_: Sequence[str]) -> None:
  """Does what the flags say."""
  labels = [name.strip() for name in FLAGS.labels.split(",")] if FLAGS.labels else None
  if labels and FLAGS.to != "hf":
    raise ConfigError(f"--labels is for --to=hf, not --to={FLAGS.to}")
  count = convert(FLAGS.input, FLAGS.output, FLAGS.to, FLAGS.bert_config_file, labels)
  if FLAGS.vocab_file:
    tf.io.gfile.copy(FLAGS.vocab_file, os.path.join(FLAGS.output, "vocab.txt"), overwrite=True)
  print(f"{count} variables written to {FLAGS.output}")


if __name__ == "__main__":
  settings.run_program(main, __doc__, ["input", "output", "to"])
