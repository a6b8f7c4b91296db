"""Names and shapes of a BERT model's variables in other programs.

Google's BERT has matrices where this model has heads as a dimension, other names for norms and
biases, and a vocabulary that is not rounded up; Hugging Face's has Google's names with dots, and
transposed matrices. Everything here goes by way of Google's names.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.errors import CheckpointError

_LAYER = r"bert/encoder/block_(\d+)"
# From our names to Google's. Both are whole names, so that what is like nothing here has no other.
_TO_GOOGLE = [
  (r"bert/embeddings/(word|token_type|position)_embeddings", r"bert/embeddings/\1_embeddings"),
  (r"bert/embeddings/layer_norm/(\w+)", r"bert/embeddings/LayerNorm/\1"),
  (_LAYER + r"/attention/(query|key|value)/(\w+)", r"bert/encoder/layer_\1/attention/self/\2/\3"),
  (_LAYER + r"/attention/output/(\w+)", r"bert/encoder/layer_\1/attention/output/dense/\2"),
  (_LAYER + r"/attention/layer_norm/(\w+)", r"bert/encoder/layer_\1/attention/output/LayerNorm/\2"),
  (_LAYER + r"/feedforward/dense_1/(\w+)", r"bert/encoder/layer_\1/intermediate/dense/\2"),
  (_LAYER + r"/feedforward/dense_2/(\w+)", r"bert/encoder/layer_\1/output/dense/\2"),
  (_LAYER + r"/feedforward/layer_norm/(\w+)", r"bert/encoder/layer_\1/output/LayerNorm/\2"),
  # A dense layer without a name of its own has its bias in a scope of its own.
  (r"(bert/pooler|cls/predictions/transform)/dense/kernel", r"\1/dense/kernel"),
  (r"(bert/pooler|cls/predictions/transform)/dense_1/bias", r"\1/dense/bias"),
  (r"cls/predictions/transform/layer_norm/(\w+)", r"cls/predictions/transform/LayerNorm/\1"),
  (r"cls/predictions/output_bias", r"cls/predictions/output_bias"),
  (r"cls/seq_relationship/kernel", r"cls/seq_relationship/output_weights"),
  (r"cls/seq_relationship/bias", r"cls/seq_relationship/output_bias"),
  (r"cls/squad/output/kernel", r"cls/squad/output_weights"),
  (r"cls/squad/output/bias", r"cls/squad/output_bias"),
  (r"output_(weights|bias)", r"output_\1"),  # A classifier's.
]
_NORM = {"scale": "gamma", "bias": "beta"}
# The logit of a WordPiece by which a vocabulary was rounded up: none is ever predicted.
ABSENT_LOGIT = -10000.0

_NOT_MODEL = ("global_step", "adam_", "slot_")


def is_of_model(name: str) -> bool:
  """True for a variable of the model, False for one of its training (optimizer, step)."""
  return not any(part in name for part in _NOT_MODEL)


def google_name(name: str) -> str | None:
  """Maps a variable's name here to its name in Google's checkpoints; None if they have none."""
  for ours, theirs in _TO_GOOGLE:
    found = re.fullmatch(ours, name)
    if found:
      theirs = found.expand(theirs)
      if "/LayerNorm/" in theirs:
        scope, _, last = theirs.rpartition("/")
        return f"{scope}/{_NORM[last]}" if last in _NORM else None
      return theirs
  return None


def _is_transposed(name: str) -> bool:
  """True if a variable is [in, classes] here and [classes, in] in Google's checkpoints."""
  return name in ("cls/seq_relationship/kernel", "cls/squad/output/kernel")


def _has_vocabulary(name: str) -> bool:
  return name in ("bert/embeddings/word_embeddings", "cls/predictions/output_bias")


def to_google(name: str, value: np.ndarray, vocab_size: int) -> np.ndarray:
  """A value of ours, shaped as Google's.

  Args:
    name: our name.
    value: the whole variable.
    vocab_size: WordPieces that are kept.
  """
  if _has_vocabulary(name):
    return np.asarray(value[:vocab_size])
  if _is_transposed(name):
    return np.transpose(value)
  if re.search(r"/attention/(query|key|value)/", name):
    # [(hidden,) heads, size of a head]: heads side by side.
    return value.reshape([*value.shape[:-2], -1])
  if name.endswith("/attention/output/kernel"):
    return value.reshape([-1, value.shape[-1]])
  return value


def from_google(name: str, value: np.ndarray, shape: Sequence[int]) -> np.ndarray:
  """A value of Google's, shaped as ours.

  Args:
    name: our name.
    value: the whole variable.
    shape: of ours.

  Raises:
    CheckpointError: the sizes do not go together.
  """
  shape = list(shape)
  if _is_transposed(name):
    value = value.T
  if _has_vocabulary(name) and value.ndim == len(shape) and 0 <= shape[0] - len(value) < 128:
    fill = ABSENT_LOGIT if name.endswith("bias") else 0.0
    padding = [(0, shape[0] - len(value))] + [(0, 0)] * (value.ndim - 1)
    value = np.pad(value, padding, constant_values=fill)
  # Heads are cut out of a matrix; what else has another shape is of another model.
  is_heads = "/attention/" in name and "layer_norm" not in name
  if list(value.shape) != shape and not (is_heads and _is_cut(value.shape, shape)):
    raise CheckpointError(
      f"variable {name} has shape {shape}, the checkpoint has {list(value.shape)} for it: it is of "
      "another model; check the BERT configuration"
    )
  return value.reshape(shape)


def _is_cut(matrix: Sequence[int], shape: Sequence[int]) -> bool:
  """True if `shape` is the shape `matrix` with its first or its last dimension split in two."""
  return math.prod(matrix) == math.prod(shape) and len(shape) == len(matrix) + 1 and (
    matrix[-1] == shape[-1] or list(matrix[:-1]) == list(shape[:-2])
  )  # fmt: skip


def hugging_face_name(name: str) -> str:
  """Maps a variable's name in Google's checkpoints to its name in Hugging Face's models."""
  if name.startswith("output_"):
    name = f"classifier/{name}"
  name = name.replace("cls/squad/", "qa_outputs/")
  name = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name)
  name = re.sub(r"/output_bias$", "/bias", name)
  name = re.sub(r"/(kernel|gamma|output_weights)$", "/weight", name)
  name = re.sub(r"/beta$", "/bias", name)
  return re.sub(r"_embeddings$", "_embeddings/weight", name).replace("/", ".")


def hugging_face_value(name: str, value: np.ndarray) -> np.ndarray:
  """A value of Google's, shaped as Hugging Face's, and the other way round.

  Args:
    name: Google's name.
    value: the whole variable.
  """
  return value.T if name.endswith("/kernel") else value


def name_in_checkpoint(name: str, there: Container[str]) -> str | None:
  """Finds a variable's name in a checkpoint, of this library or Google's; None if it has it not.

  Args:
    name: our name.
    there: names in the checkpoint.
  """
  if name in there:
    return name
  other = google_name(name)
  return other if other is not None and other in there else None


def get_assignment_map_from_checkpoint(
  tvars: Iterable[Any], init_checkpoint: str
) -> tuple[collections.OrderedDict[str, str], dict[str, int]]:
  """Maps names in a checkpoint, of this library or Google's, to names of variables.

  Args:
    tvars: variables: `mtf.Variable` operations, tf.Variables, anything with a name. Those of an
      optimizer do not count.
    init_checkpoint: a checkpoint; shapes in it are not looked at.

  Returns:
    Names in the checkpoint -> names of variables; and a dict whose keys are these names, each
    also with ":0" behind it, as TensorFlow 1 called the tensor.

  Raises:
    CheckpointError: there is no such checkpoint.
  """
  there = set(checkpoint_lib.Values(init_checkpoint))
  assignment: collections.OrderedDict[str, str] = collections.OrderedDict()
  initialized = {}
  for variable in tvars:
    name = re.sub(r":\d+$", "", getattr(variable, "full_name", variable.name))
    found = name_in_checkpoint(name, there) if is_of_model(name) else None
    if found is not None:
      assignment[found] = name
      initialized[name] = initialized[f"{name}:0"] = 1
  return assignment, initialized
