"""From strings to ids and back in a SavedModel, as the modes "infer" and "score" do it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mesh_tensorflow.transformer.data.encoding import vocabulary_of, with_eos
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID, PAD_ID

_LOG = logging.getLogger("mesh_tensorflow")

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

  def __init__(self, name: str, vocabulary: Any, length: int, kind: str):
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


def decoder(name: str, vocabulary: Any, to_end: bool) -> Callable[[tf.Tensor], tf.Tensor] | None:
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
