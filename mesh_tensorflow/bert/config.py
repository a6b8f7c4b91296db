"""The configuration of a BERT model."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from mesh_tensorflow.environment import untrusted_files
from mesh_tensorflow.errors import ConfigError

POSITION_SIGNALS = ("embedding", "relative_attention_bias")
RESIDUAL_STRUCTURES = ("original", "direct")

# Layer norm epsilon of Google's and Hugging Face's models whose configuration has none.
_THEIR_EPSILON = 1e-12

# Settings: (ours, Google's and Hugging Face's).
SETTINGS = (
  ("vocab_size", "vocab_size"),
  ("d_model", "hidden_size"),
  ("num_blocks", "num_hidden_layers"),
  ("attention_num_heads", "num_attention_heads"),
  ("feedforward_intermediate_size", "intermediate_size"),
  ("layer_output_dropout_prob", "hidden_dropout_prob"),
  ("attention_probs_dropout_prob", "attention_probs_dropout_prob"),
  ("max_position_embeddings", "max_position_embeddings"),
  ("type_vocab_size", "type_vocab_size"),
  ("initializer_range", "initializer_range"),
)
# Our names of Google's and Hugging Face's settings that have another name there.
_RENAMED = {theirs: ours for ours, theirs in SETTINGS if ours != theirs} | {
  "hidden_act": "feedforward_intermediate_act",
  "layer_norm_eps": "layer_norm_epsilon",
}
# Activations: (ours, Hugging Face's). Google's are called as ours.
ACTIVATIONS = (("gelu", "gelu_new"), ("gelu_erf", "gelu"), ("relu", "relu"), ("tanh", "tanh"))
_SAME_AS_OURS = {"gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu"}
# Keys by which a configuration of Hugging Face's is recognized.
_HUGGING_FACE = ("model_type", "architectures", "transformers_version")
# The attribute that keeps what they say of a model's task, and what it keeps.
KEPT = "hugging_face"
_KEPT_SETTINGS = (
  "architectures", "id2label", "label2id", "problem_type", "classifier_dropout", "pad_token_id",
  "finetuning_task",
)  # fmt: skip


class BertConfig:
  """Hyperparameters of a BERT model. Arguments are attributes of the same names.

  Args:
    vocab_size: number of WordPieces; the model has a multiple of 128 of them.
    d_model: size of the vectors that layers pass on.
    position_signal: how positions enter: "embedding" (a vector for each is added to the input) or
      "relative_attention_bias" (a number for each bucket of distances is added to attention
      logits; Raffel et al., 2019, arXiv:1910.10683).
    max_position_embeddings: number of position vectors, hence the longest sequence.
    num_blocks: how many times the layers of `block_layers` are stacked.
    block_layers: "attention", "feedforward" and "moe", separated by commas; kept as a list.
    layer_output_dropout_prob: dropout of each layer's output, and of the embeddings.
    residual_structure: "original" (normalize the sum) or "direct" (normalize a layer's input).
    use_bias: whether dense layers have biases; without, norms neither shift nor subtract the mean.
    attention_num_heads: number of attention heads.
    attention_head_size: size of a head; by default d_model / attention_num_heads.
    attention_num_key_heads: read by `BertModel.key_heads_dims` only.
    attention_key_head_size: read by `BertModel.key_dim` only.
    attention_num_value_heads: read by `BertModel.value_heads_dims` only.
    attention_value_head_size: read by `BertModel.value_dim` only.
    attention_probs_dropout_prob: has no effect, as in the archived library: what trained there
      trained without.
    feedforward_intermediate_size: size of the hidden layer of "feedforward".
    feedforward_intermediate_act: its activation; see `get_activation`.
    feedforward_intermediate_dropout_prob: has no effect, likewise.
    moe_num_experts: number of experts of "moe".
    moe_intermediate_size: size of the hidden layer of each.
    type_vocab_size: number of token types (segments).
    initializer_range: standard deviation of the initial kernels and embeddings; falsy: variance
      scaling.
    layer_norm_epsilon: what layer norms add to the variance. Google's models were trained with
      1e-12 (see `from_dict`), which matters for small activations only.

  Raises:
    ConfigError: a position signal or residual structure that does not exist.
  """

  def __init__(
    self,
    vocab_size: int | None,
    d_model: int = 768,
    position_signal: str = "embedding",
    max_position_embeddings: int = 512,
    num_blocks: int = 12,
    block_layers: str = "attention,feedforward",
    layer_output_dropout_prob: float = 0.1,
    residual_structure: str = "original",
    use_bias: bool = True,
    attention_num_heads: int = 12,
    attention_head_size: int | None = None,
    attention_num_key_heads: int | None = None,
    attention_key_head_size: int | None = None,
    attention_num_value_heads: int | None = None,
    attention_value_head_size: int | None = None,
    attention_probs_dropout_prob: float = 0.1,
    feedforward_intermediate_size: int = 3072,
    feedforward_intermediate_act: Any = "gelu",
    feedforward_intermediate_dropout_prob: float = 0.0,
    moe_num_experts: int = 32,
    moe_intermediate_size: int = 6144,
    type_vocab_size: int = 16,
    initializer_range: float | None = 0.02,
    *,
    layer_norm_epsilon: float = 1e-6,
  ):
    self.vocab_size = vocab_size
    self.d_model = d_model
    self.position_signal = position_signal
    self.max_position_embeddings = max_position_embeddings
    self.num_blocks = num_blocks
    self.block_layers = block_layers.split(",")
    self.layer_output_dropout_prob = layer_output_dropout_prob
    self.residual_structure = residual_structure
    self.use_bias = use_bias
    self.attention_num_heads = attention_num_heads
    self.attention_head_size = attention_head_size
    self.attention_num_key_heads = attention_num_key_heads
    self.attention_key_head_size = attention_key_head_size
    self.attention_num_value_heads = attention_num_value_heads
    self.attention_value_head_size = attention_value_head_size
    self.attention_probs_dropout_prob = attention_probs_dropout_prob
    self.feedforward_intermediate_size = feedforward_intermediate_size
    self.feedforward_intermediate_act = feedforward_intermediate_act
    self.feedforward_intermediate_dropout_prob = feedforward_intermediate_dropout_prob
    self.moe_num_experts = moe_num_experts
    self.moe_intermediate_size = moe_intermediate_size
    self.type_vocab_size = type_vocab_size
    self.initializer_range = initializer_range
    self.layer_norm_epsilon = layer_norm_epsilon
    check_choice("position_signal", position_signal, POSITION_SIGNALS)
    check_choice("residual_structure", residual_structure, RESIDUAL_STRUCTURES)

  @classmethod
  def from_dict(cls, json_object: dict[str, Any]) -> BertConfig:
    """The configuration of a dict, by our names, or of Google's or Hugging Face's BERT.

    Args:
      json_object: settings by name; others have their defaults. Unknown ones become attributes. If
        one has Google's name, such as `hidden_size`, the model is Google's, whose layer norms have
        an epsilon of 1e-12 unless it says otherwise (`layer_norm_eps`, `layer_norm_epsilon`).
        With `model_type` or `architectures` it is Hugging Face's, whose "gelu" is exact.

    Raises:
      ConfigError: a model of Hugging Face's that is no BERT encoder; or a name that is no setting.
    """
    if any(name in json_object for name in _HUGGING_FACE):
      return config_from_hugging_face(json_object)
    config = BertConfig(vocab_size=None)
    if any(name in json_object for name in _RENAMED):
      config.layer_norm_epsilon = _THEIR_EPSILON
    for key, value in json_object.items():
      if hasattr(BertConfig, key):
        raise ConfigError(f"{key!r} is no setting of a BERT configuration, but a method of ours")
      config.__dict__[_RENAMED.get(key, key)] = value
    if isinstance(config.block_layers, str):
      config.block_layers = config.block_layers.split(",")
    return config

  @classmethod
  def from_json_file(cls, json_file: str | os.PathLike[str]) -> BertConfig:
    """The configuration of a JSON file; see `from_dict`.

    Raises:
      ConfigError: there is no such file, or it is no JSON object.
    """
    return cls.from_dict(read_json_object(json_file))

  def to_dict(self) -> dict[str, Any]:
    """The settings by our names, a deep copy."""
    return copy.deepcopy(self.__dict__)

  def to_json_string(self) -> str:
    """The settings as a JSON object, sorted, with a line break at its end."""
    return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"


def read_json_object(file: str | os.PathLike[str]) -> dict[str, Any]:
  """The settings that the JSON file of a configuration has.

  Raises:
    ConfigError: there is no such file, or it is no JSON object, or a setting is of a wrong kind.
  """
  try:
    content: dict[str, Any] = untrusted_files.read_json(file, _kinds())
    return content
  except (tf.errors.OpError, ValueError) as e:
    reason = "there is no such file" if isinstance(e, tf.errors.NotFoundError) else e
    raise ConfigError(f"BERT configuration {file}: {reason}") from e


def _kinds() -> dict[str, Any]:
  """The form of a configuration, for `untrusted.expect`."""
  found: dict[str, Any] = {
    "architectures?": (list, None), "id2label?": (dict, None), "label2id?": (dict, None),
    "model_type?": str, "layer_norm_eps?": float, "hidden_act?": str,
  }  # fmt: skip
  for name, parameter in inspect.signature(BertConfig).parameters.items():
    default = parameter.default
    kind: Any = type(default)
    if default is None or default is inspect.Parameter.empty:
      kind = (int, None)
    elif name == "block_layers":
      kind = (str, [str])
    elif name == "initializer_range":
      kind = (float, None)
    for key in {name, *(theirs for ours, theirs in SETTINGS if ours == name)}:
      found[f"{key}?"] = kind
  return found


def check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
  """Raises `ConfigError` unless the value is one of the choices."""
  if value not in choices:
    raise ConfigError(f"BertConfig.{what} is {value!r}; use one of {', '.join(choices)}")


def config_from_hugging_face(content: Mapping[str, Any]) -> BertConfig:
  """Our configuration of a model of Hugging Face's.

  Args:
    content: of its config.json. What it says of the model's task is kept in `hugging_face`.

  Raises:
    ConfigError: it is another kind of model, or has an activation that there is not here.
  """
  kind = content.get("model_type", "bert")
  position = content.get("position_embedding_type", "absolute")
  if kind != "bert" or position != "absolute" or content.get("is_decoder"):
    what = "a decoder"
    if kind != "bert":
      what = f"model_type {kind!r}"
    elif position != "absolute":
      what = f"position_embedding_type {position!r}"
    raise ConfigError(f"only BERT encoders with absolute positions are converted, not {what}")
  theirs = content.get("hidden_act", "gelu")
  activations = {hf: ours for ours, hf in ACTIVATIONS} | _SAME_AS_OURS
  if theirs not in activations:
    raise ConfigError(f"hidden_act {theirs!r} has no counterpart; use {', '.join(activations)}")
  config = BertConfig(
    **{
      "vocab_size": 30522,
      "type_vocab_size": 2,
      **{ours: content[name] for ours, name in SETTINGS if name in content},
    }
  )
  config.feedforward_intermediate_act = activations[theirs]
  config.layer_norm_epsilon = content.get("layer_norm_eps", _THEIR_EPSILON)
  kept = {name: content[name] for name in _KEPT_SETTINGS if content.get(name) is not None}
  if kept:
    setattr(config, KEPT, kept)
  return config
