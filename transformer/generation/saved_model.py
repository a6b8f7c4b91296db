"""SavedModels of trained models: strings in, strings or scores out, without this package."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.running.lowering import RUN_COUNTER
from mesh_tensorflow.training import model_files
from mesh_tensorflow.transformer.data.encoding import vocabulary_of, with_eos
from mesh_tensorflow.transformer.data.vocabularies.base import EOS_ID, PAD_ID, Vocabularies
from mesh_tensorflow.transformer.generation import predict
from mesh_tensorflow.transformer.model.model_steps import ModelSteps

_LOG = logging.getLogger("mesh_tensorflow")


def save(
  steps: ModelSteps,
  folder: str,
  vocabulary: Vocabularies,
  batch_size: int = 1,
  score: bool = False,
  predict_fn: Callable[..., mtf.Tensor] | None = None,
) -> str:
  """Writes a SavedModel with the signature `serving_default`.

  It takes strings [n], any number of them: `inputs`, or to score `targets` (model type "lm") or
  both, and returns `inputs` and `outputs`; or `scores`, float32 [n], and `targets`. What it makes
  of a text is what the modes "infer" and "score_from_strings" make of that line of a file: a model
  of type "lm" continues it, and `outputs` begin with it; else `outputs` are what is made of it. As
  there, blanks at the ends do not count; too long inputs are cut, and a prompt of an "lm" that
  leaves no room is a tf.errors.InvalidArgumentError when it is run.

  What is text is strings [n] if the vocabulary has a `decode_tf` that is made of TensorFlow
  operations, with the ids, int32 [n, length], as `inputs_ids` and so on; else these names are of
  the ids themselves. If the vocabulary encodes in Python, the signature takes ids, int32 [n, any
  length], with or without an end of sequence; a warning says so.

  The model is for one device, whatever the mesh it was trained on.

  Args:
    steps: the programs of the model; its variables hold what is to be exported.
    folder: the SavedModel goes into a new folder in here, named by the time in seconds.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    batch_size: rows that the model takes at a time.
    score: whether given targets are scored.
    predict_fn: see `predict`.

  Returns:
    The path of the SavedModel.

  Raises:
    ConfigError: there is no folder, or the model does not generate text.
  """
  if not folder:
    raise ConfigError("export: there is no folder for the SavedModel to go to")
  names = ["inputs"]
  if score:
    names = ["targets"] if steps.model_type == "lm" else ["inputs", "targets"]
  # A mesh of one device: a program with collectives runs only in the process that has the mesh.
  mesh_impl = mtf.PlacementMeshImpl("", "", [""], variable_store=mtf.VariableStore())
  lengths, kinds = _rows(steps, names, score, predict_fn)
  # Not every machine that serves it has XLA.
  settings = dataclasses.replace(steps.settings, jit_compile=False)
  steps_here = steps.on_mesh(mesh_impl).with_settings(settings)
  if kinds.get("inputs") == "prompt":
    program = predict.continuation(steps_here, lengths["inputs"], batch_size)
  else:
    program = predict.predictor(steps_here, names, score, predict_fn, batch_size)
  one_batch = tf.function(program, autograph=False)
  # Makes the variables.
  traced = one_batch.get_concrete_function(
    *(tf.TensorSpec([batch_size, lengths[n]], tf.int32) for n in names)
  )
  _copy_variables(steps.mesh_impl.variable_store, mesh_impl.variable_store)
  shapes = {k: tf.TensorSpec(v.shape, v.dtype) for k, v in traced.structured_outputs.items()}
  encoders = {n: TextEncoder(n, vocabulary, lengths[n], kinds[n]) for n in names}
  decoders = {n: decoder(n, vocabulary, to_end=not score) for n in shapes if n != "scores"}

  def serve(**features: tf.Tensor) -> dict[str, tf.Tensor]:
    count = tf.shape(features[names[0]])[0]
    ids = tuple(_batches(encoders[n](features[n]), batch_size) for n in names)
    results = tf.map_fn(lambda xs: one_batch(*xs), ids, fn_output_signature=shapes)
    results = {k: tf.reshape(v, [-1, *shapes[k].shape[1:]])[:count] for k, v in results.items()}
    for name, decode in decoders.items():
      if decode is not None:
        results[f"{name}_ids"] = results[name]
        results[name] = decode(results[name])
    return results

  module = tf.Module()
  # Found by the saving, which keeps the variables of what it can reach.
  module.model_variables = [
    v for stored in mesh_impl.variable_store for v in stored.different_slices
  ]
  module.serve = tf.function(serve, autograph=False)
  signature = module.serve.get_concrete_function(**{n: encoders[n].spec for n in names})
  return _write(folder, module, signature)


def _rows(
  steps: ModelSteps, names: Sequence[str], score: bool, predict_fn: Callable[..., mtf.Tensor] | None
) -> tuple[dict[str, int], dict[str, str]]:
  """Row length and kind ("prompt", "input", ...) of each feature, for `TextEncoder`."""
  if steps.model_type == "lm" and not score and predict_fn is None:
    return {"inputs": predict.row_length(steps.sequence_length)}, {"inputs": "prompt"}
  lengths = {n: steps.feature_shape(n)[-1] for n in names}
  if not score:
    return lengths, dict.fromkeys(names, "input")
  return lengths, dict.fromkeys(names, "text" if steps.model_type == "lm" else "target")


def _copy_variables(whole: mtf.VariableStore, here: mtf.VariableStore) -> None:
  for stored in here:
    # The counter of runs that draw random numbers begins anew.
    if not stored.name.startswith(RUN_COUNTER):
      stored.assign(whole[stored.name].numpy())


def _write(folder: str, module: tf.Module, signature: Callable[..., object]) -> str:
  path = _new_folder(folder)
  with model_files.errors_of_writing(folder, "a SavedModel", "run.export_path"):
    tf.io.gfile.makedirs(path)
    tf.saved_model.save(module, path, signatures=signature)
  return path


def _batches(ids: tf.Tensor, batch_size: int) -> tf.Tensor:
  """Rows [n, length] as [batches, batch_size, length]; the last is filled up with the first row."""
  count = tf.shape(ids)[0]
  row = tf.range(count + -count % batch_size)
  # Empty rows would go on to the full length.
  filled = tf.gather(ids, tf.where(row < count, row, 0))
  return tf.reshape(filled, [-1, batch_size, ids.shape[1]])


def _new_folder(base: str) -> str:
  """A folder in `base` that is not there yet, named by the time in seconds."""
  number = int(time.time())
  while tf.io.gfile.exists(os.path.join(base, str(number))):
    number += 1
  return os.path.join(base, str(number))


# ------------------------------------------------------------------ strings in, strings out

# Operations that call Python, which a SavedModel does not hold.
_PYTHON_OPS = frozenset(("PyFunc", "PyFuncStateless", "EagerPyFunc"))
# What `str.strip` takes for blanks.
_BLANKS = "".join(chr(c) for c in range(0x3001) if chr(c).isspace())


class TextEncoder:
  """Converts the argument of a SavedModel's signature to rows of ids.

  Args:
    name: feature, "inputs" or "targets".
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    length: ids of a row.
    kind: what the rows are: "prompt": continued by a language model, without EOS, refused if they
      leave no room; "input": of an encoder or in front of targets, cut so that EOS is the last;
      "target": to be scored, EOS is cut with them; "text": likewise, without EOS.
  """

  def __init__(self, name: str, vocabulary: Vocabularies, length: int, kind: str):
    self._vocabulary = vocabulary_of(name, vocabulary)
    self._name, self._length, self._kind = name, length, kind
    encode = self._vocabulary.encode_tf
    self._takes_text = is_tensorflow(encode, tf.TensorSpec([], tf.string))
    if not self._takes_text:
      _LOG.warning(
        "export: %s encodes in Python, which a SavedModel cannot; its signature takes ids "
        "[n, length] for %s, with or without end of sequence",
        type(self._vocabulary).__name__,
        name,
      )

  @property
  def spec(self) -> tf.TensorSpec:
    """Spec of the signature's argument: strings [n], or int32 ids [n, any length]."""
    if self._takes_text:
      return tf.TensorSpec([None], tf.string, self._name)
    return tf.TensorSpec([None, None], tf.int32, self._name)

  def __call__(self, values: tf.Tensor) -> tf.Tensor:
    """Rows of ids, int32 [n, length], zeros at their ends."""
    row = self._row_of_text if self._takes_text else self._row
    values = self._stripped(values) if self._takes_text else values
    return tf.map_fn(row, values, fn_output_signature=tf.TensorSpec([self._length], tf.int32))

  def _stripped(self, texts: tf.Tensor) -> tf.Tensor:
    # Lines of prompts lose the blanks at their ends when the file is read.
    texts = tf.strings.regex_replace(texts, f"[{_BLANKS}]+$", "")
    return (
      texts if self._kind == "prompt" else tf.strings.regex_replace(texts, f"^[{_BLANKS}]+", "")
    )

  def _row_of_text(self, text: tf.Tensor) -> tf.Tensor:
    return self._row(tf.cast(self._vocabulary.encode_tf(text), tf.int32))

  def _row(self, ids: tf.Tensor) -> tf.Tensor:
    """Ids [any length] cut or padded to a row."""
    length = self._length
    if self._kind in ("input", "target"):
      ids = ids[: _first(ids, (PAD_ID, EOS_ID))]
      # Room for the EOS.
      ids = ids[: length - 1] if self._kind == "input" else ids
      ids = tf.cast(with_eos(ids), tf.int32)
    else:
      ids = ids[: _first(ids, (PAD_ID,))]
    if self._kind == "prompt":
      check = tf.debugging.Assert(
        tf.size(ids) < length,
        [
          "a prompt leaves no room in sequences of",
          length,
          "ids; shorten it. Its length:",
          tf.size(ids),
        ],
      )
      with tf.control_dependencies([] if check is None else [check]):
        ids = tf.identity(ids)
    ids = ids[:length]
    return tf.ensure_shape(tf.pad(ids, [[0, length - tf.size(ids)]]), [length])


def _first(ids: tf.Tensor, ends: tuple[int, ...]) -> tf.Tensor:
  """The number of ids in front of the first one of `ends`."""
  is_end = tf.reduce_any(tf.equal(ids[:, tf.newaxis], tf.constant(ends, ids.dtype)), axis=1)
  return tf.reduce_sum(tf.cast(tf.equal(tf.cumsum(tf.cast(is_end, tf.int32)), 0), tf.int32))


def decoder(
  name: str, vocabulary: Vocabularies, to_end: bool
) -> Callable[[tf.Tensor], tf.Tensor] | None:
  """From ids [n, length] to strings [n]: the `decode_tf` of a vocabulary.

  Args:
    name: feature.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    to_end: whether only the ids in front of the first padding or end of sequence count.

  Returns:
    A function; None if the vocabulary has none that a SavedModel can hold.
  """
  decode = getattr(vocabulary_of(name, vocabulary), "decode_tf", None)
  if decode is None or not is_tensorflow(decode, tf.TensorSpec([None, 8], tf.int32)):
    return None
  return (lambda ids: decode(_without_end(ids))) if to_end else decode


def _without_end(ids: tf.Tensor) -> tf.Tensor:
  """Replaces ids from the first padding or EOS on by 0; keeps negative ids (not scored)."""
  is_end = tf.cast(tf.equal(ids, PAD_ID) | tf.equal(ids, EOS_ID), tf.int32)
  return tf.where(tf.equal(tf.cumsum(is_end, axis=-1), 0), ids, PAD_ID)


def is_tensorflow(function: Callable[..., tf.Tensor], spec: tf.TensorSpec) -> bool:
  """True if a function is implemented and traces to a graph without Python callbacks."""
  try:
    traced = tf.function(function, autograph=False).get_concrete_function(spec)
  except NotImplementedError:
    return False
  definition = traced.graph.as_graph_def()
  nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
  return not any(n.op in _PYTHON_OPS for n in nodes)
