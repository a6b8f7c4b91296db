"""Weights that a training starts from: of these programs, of Google's BERT, of Hugging Face's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow import checkpoint
from mesh_tensorflow.bert import checkpoint_names
from mesh_tensorflow.checkpoint.restoring import EXTRA
from mesh_tensorflow.errors import CheckpointError, InstallationError
from mesh_tensorflow.meshes.store import VariableStore

SAFETENSORS = "model.safetensors"
_SHOWN = 5


class Weights:
  """The variables of a BERT model in a file, by Google's names, or by ours.

  Args:
    path: a checkpoint of TensorFlow's or its folder; or a folder with `model.safetensors`, or such
      a file.

  Attributes:
    path: the file.
    kind: "mesh" (this package), "google" or "hf" (Hugging Face).
    names: of the variables there; of a file of Hugging Face's Google's names.

  Raises:
    CheckpointError: there is no such file, or nothing of a BERT model in it.
    InstallationError: it is a file of Hugging Face's, and the library for it is not installed.
  """

  def __init__(self, path: str):
    self.path = _find(path)
    self._read: Callable[[str], np.ndarray]
    if self.path.endswith(".safetensors"):
      self.kind = "hf"
      self._open_safetensors()
      return
    values = checkpoint.Values(self.path)
    self._read = values.__getitem__
    # Beside variables there is what a training keeps with them.
    self.names: set[str] = {name for name in values if not name.startswith(EXTRA)}
    self.kind = "google" if any(n.startswith("bert/encoder/layer_") for n in values) else "mesh"
    if not any(n.startswith("bert/") for n in values):
      raise CheckpointError(f"{self.path} has no variable bert/...: it is not of a BERT model")

  def _open_safetensors(self) -> None:
    file = open_safetensors(self.path)
    there = set(file.keys())
    # A file of `BertModel` by itself leaves the first word out.
    prefix = "" if any(n.startswith("bert.") for n in there) else "bert."
    full = {n if n.startswith(("cls.", "qa_", "classifier.")) else prefix + n: n for n in there}
    # Files of their first years have Google's names of norms.
    full = {re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", n)): full[n] for n in full}
    google = {checkpoint_names.hugging_face_name(n): n for n in _all_google_names(full)}
    found = {google[n]: full[n] for n in full if n in google}
    if not found:
      raise CheckpointError(f"{self.path} has no variable of a BERT model, such as bert.embeddings")
    self.names = set(found)
    self._read = lambda name: checkpoint_names.hugging_face_value(
      name, file.get_tensor(found[name])
    )

  def value(self, name: str) -> np.ndarray:
    """A variable as it is there (of Hugging Face's: as Google has it); small floats as float32."""
    value = np.asarray(self._read(name))
    return value if value.dtype.kind in "iub" else value.astype(np.float32)

  def ours(self, name: str, shape: Any) -> np.ndarray | None:
    """A variable of ours; None if it is not there.

    Args:
      name: our name.
      shape: of ours.

    Raises:
      CheckpointError: it has another shape there.
    """
    found = checkpoint_names.name_in_checkpoint(name, self.names)
    if found is None:
      return None
    return checkpoint_names.from_google(name, self.value(found), shape)


def open_safetensors(path: str) -> Any:
  """The library's file object.

  Raises:
    InstallationError: the library is not installed.
    CheckpointError: the file cannot be read.
  """
  try:
    import safetensors
  except ImportError as e:
    raise InstallationError(
      f"{path}: reading weights of Hugging Face's needs the library safetensors: "
      "pip install safetensors"
    ) from e
  try:
    return safetensors.safe_open(path, framework="numpy")
  except (OSError, safetensors.SafetensorError) as e:
    raise CheckpointError(f"cannot read {path}: {e}") from e


def _find(path: str) -> str:
  path = os.fspath(path)
  if path.endswith(".safetensors") and tf.io.gfile.exists(path):
    return path
  if tf.io.gfile.isdir(path):
    file = os.path.join(path, SAFETENSORS)
    if tf.io.gfile.exists(file):
      return file
    if tf.io.gfile.exists(os.path.join(path, "pytorch_model.bin")):
      raise CheckpointError(
        f"{path} has weights as pytorch_model.bin, which only PyTorch reads; save them there with "
        f"model.save_pretrained(folder), which writes {SAFETENSORS}"
      )
    google = os.path.join(path, "bert_model.ckpt")
    if tf.io.gfile.exists(f"{google}.index"):
      return google
    return checkpoint.resolve(path)
  if not tf.io.gfile.exists(f"{path}.index"):
    raise CheckpointError(f"there is no checkpoint {path}")
  return path


def _all_google_names(hugging_face: Collection[str]) -> list[str]:
  """All names of Google's that variables of Hugging Face's may have."""
  matches = (re.match(r"bert\.encoder\.layer\.([0-9]{1,9})\.", n) for n in hugging_face)
  layers = [m.group(1) for m in matches if m]
  found = []
  for layer in sorted({int(n) for n in layers}):
    for part in ("attention/self/query", "attention/self/key", "attention/self/value"):
      found += [f"bert/encoder/layer_{layer}/{part}/{k}" for k in ("kernel", "bias")]
    for part in ("attention/output", "output"):
      found += [f"bert/encoder/layer_{layer}/{part}/dense/{k}" for k in ("kernel", "bias")]
      found += [f"bert/encoder/layer_{layer}/{part}/LayerNorm/{k}" for k in ("gamma", "beta")]
    found += [f"bert/encoder/layer_{layer}/intermediate/dense/{k}" for k in ("kernel", "bias")]
  found += [f"bert/embeddings/{k}_embeddings" for k in ("word", "token_type", "position")]
  for norm in ("bert/embeddings", "cls/predictions/transform"):
    found += [f"{norm}/LayerNorm/{k}" for k in ("gamma", "beta")]
  for dense in ("bert/pooler", "cls/predictions/transform"):
    found += [f"{dense}/dense/{k}" for k in ("kernel", "bias")]
  found.append("cls/predictions/output_bias")
  for scope in ("cls/seq_relationship/", "cls/squad/", ""):
    found += [f"{scope}output_weights", f"{scope}output_bias"]
  return found


def initialize(store: VariableStore, path: str, names: Collection[str]) -> list[str]:
  """Sets variables to what they are in a file; those that it has not stay as they are.

  Args:
    store: has the variables.
    path: see `Weights`.
    names: of the variables; those of an optimizer do not count.

  Returns:
    Lines that tell what was set and what was not.

  Raises:
    CheckpointError: the file has none of them, or one of another shape.
  """
  weights = Weights(path)
  wanted = [n for n in sorted(names) if checkpoint_names.is_of_model(n)]
  found = {n: checkpoint_names.name_in_checkpoint(n, weights.names) for n in wanted}
  there = [n for n in wanted if found[n] is not None]
  if not there:
    raise CheckpointError(
      f"{weights.path} has none of the {len(wanted)} variables of the model; it has "
      f"{', '.join(sorted(weights.names)[:_SHOWN])}, ..."
    )
  if weights.kind == "mesh":
    # Each device reads its slices: no whole variable is put together.
    chosen = set(there)
    with checkpoint.Checkpointer(os.path.dirname(weights.path), store) as saver:
      saver.restore(weights.path, should_restore=lambda n: n in chosen, ignore_unexpected=True)
  else:
    for name in there:
      store[name].assign(weights.ours(name, store[name].shape.to_integer_list))
  lines = [f"{weights.path}: {len(there)} of the model's {len(wanted)} variables are taken from it"]
  missing = [n for n in wanted if found[n] is None]
  if missing:
    more = f", and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    lines.append(f"not there, and as they start: {', '.join(missing[:_SHOWN])}{more}")
  return lines
