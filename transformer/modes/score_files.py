"""Writers of scores: text files, or TFRecords."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.training import model_files
from mesh_tensorflow.transformer.data.encoding import vocabulary_of
from mesh_tensorflow.transformer.data.text_io import write_lines_to_file
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID, as_text

_MODULE = "mesh_tensorflow.transformer.utils"
_SHOWN = 10  # Scores that are printed.


@gin.configurable(module=_MODULE)
@affects("report")
def save_scores(
  results: Sequence[Mapping[str, Any]],
  vocabulary: Any,
  scores_filename: str | None = None,
  save_example_text: bool = True,
) -> Any:
  """Writes scores to files, one a line.

  Args:
    results: dicts with `scores`, a number, and `targets` and perhaps `inputs`, ids or text.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    scores_filename: None: nothing is written. Else `<scores_filename>.scores`, and, with
      `save_example_text`, `.targets`, `.lengths` (in tokens) and, if there are any, `.inputs`.
    save_example_text: whether texts are written and returned.

  Returns:
    The list of scores; with `save_example_text` a tuple of it, the inputs, if there are any, and
    the targets.

  Raises:
    DataError: there are no results.
  """
  if not results:
    raise DataError("save_scores: there are no results to save; is the data set empty?")
  scores = [float(r["scores"]) for r in results]
  if scores_filename is not None:
    write_lines_to_file([f"{s:g}" for s in scores], f"{scores_filename}.scores")
  if not save_example_text:
    return scores
  features = ["inputs", "targets"] if "inputs" in results[0] else ["targets"]
  texts = {f: [text_of(r[f], vocabulary_of(f, vocabulary)) for r in results] for f in features}
  if scores_filename is not None:
    for feature in features:
      write_lines_to_file(texts[feature], f"{scores_filename}.{feature}")
    lengths = [_length(r["targets"], vocabulary_of("targets", vocabulary)) for r in results]
    write_lines_to_file(lengths, f"{scores_filename}.lengths")
  return (scores, *(texts[f] for f in features))


def show_scores(result: Any) -> None:
  """Prints the first scores and their mean, if no file is bound for them.

  Args:
    result: what `save_scores` returned; nothing is shown of what other functions return.
  """
  bound = gin.get_bindings(f"{_MODULE}.save_scores", resolve_references=False)
  if bound.get("scores_filename") is not None:
    return
  scores, *texts = result if isinstance(result, tuple) else (result,)
  if not isinstance(scores, list) or not scores:
    return
  for i, score in enumerate(scores[:_SHOWN]):
    print(f"{score:g}", *(repr(column[i]) for column in texts), sep="  ")
  if len(scores) > _SHOWN:
    print(f"... and {len(scores) - _SHOWN:,} more")
  print(
    f"{len(scores):,} scores (log-likelihoods in nats), mean {np.mean(scores):g}; nothing is "
    "written: --output=PREFIX of the command score (save_scores.scores_filename) makes files of "
    "all scores and texts",
    flush=True,
  )


@gin.configurable(module=_MODULE)
@affects("report")
def save_scores_to_tfrecords(
  results: Sequence[MutableMapping[str, Any]],
  vocabulary: Any,
  scores_filename: str,
  shard_idx: int = 0,
  save_ids_only: bool = False,
) -> None:
  """Writes scores as tf.Examples to `<scores_filename>_<shard_idx>.tfrecord`.

  Each has `input` (the text of the part of the targets that is not scored, else of the inputs, else
  ""), `target` and `score`.

  Args:
    results: dicts with `targets` and perhaps `inputs`, ids or text, and `scores` (0.0 if missing).
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    scores_filename: first part of the file's name.
    shard_idx: number of the file.
    save_ids_only: of `input`, only what is before the first blank: an identifier.

  Raises:
    StorageError: the file cannot be written.
  """
  if not workers.current().is_chief:
    return
  path = f"{scores_filename}_{shard_idx}.tfrecord"
  folder = path.rpartition("/")[0]
  with (
    model_files.errors_of_writing(folder or ".", os.path.basename(path), "scores_filename"),
    _record_writer(path, folder) as writer,
  ):
    for result in results:
      texts = add_pretokenized(dict(result), vocabulary)
      given = as_text(texts.get("targets_neg_pretokenized", texts.get("inputs_pretokenized", "")))
      if save_ids_only:
        given = given.split(" ")[0]
      features = {
        "input": _bytes(given),
        "target": _bytes(as_text(texts.get("targets_pretokenized", ""))),
        "score": tf.train.Feature(
          float_list=tf.train.FloatList(value=[float(result.get("scores", 0.0))])
        ),
      }
      example = tf.train.Example(features=tf.train.Features(feature=features))
      # Features are a map, which has no order of its own: equal results make equal files.
      writer.write(example.SerializeToString(deterministic=True))


def _record_writer(path: str, folder: str) -> tf.io.TFRecordWriter:
  if folder:
    tf.io.gfile.makedirs(folder)
  return tf.io.TFRecordWriter(path)


def add_pretokenized(examples: Any, vocabulary: Any) -> Any:
  """Adds the texts of the ids `inputs` and `targets`, where they are missing.

  Args:
    examples: a dict of numpy arrays, or several, changed in place: `<f>_pretokenized` becomes what
      the positive ids of `<f>` decode to (a text, as a rule), and, if there are negative ones,
      `<f>_neg_pretokenized` that of their absolute values.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.

  Returns:
    `examples`.
  """
  if not isinstance(examples, MutableMapping):
    for example in examples:
      add_pretokenized(example, vocabulary)
    return examples
  for feature in ("inputs", "targets"):
    if feature in examples and f"{feature}_pretokenized" not in examples:
      own = vocabulary_of(feature, vocabulary)
      value = examples[feature]
      examples[f"{feature}_pretokenized"] = text_of(value, own)
      if not isinstance(value, (str, bytes)) and np.any(np.asarray(value) < 0):
        negative = np.asarray(value)
        examples[f"{feature}_neg_pretokenized"] = text_of(-negative[negative < 0], own)
  return examples


def text_of(ids: Any, vocabulary: Any = None) -> Any:
  """Decodes ids without padding, negative ids and the EOS at the end.

  Args:
    ids: of an example, or its text, which stays as it is (bytes become text).
    vocabulary: may decode to a text, bytes or a list, which is not changed. None: `ids` are what it
      decoded to.
  """
  if isinstance(ids, bytes):
    return as_text(ids)
  if vocabulary is None or isinstance(ids, str):
    return ids
  kept = [int(i) for i in np.asarray(ids).reshape(-1) if i > 0]
  if kept and kept[-1] == EOS_ID:
    kept.pop()
  return vocabulary.decode(kept)


def _length(ids: Any, vocabulary: Any) -> int:
  """Number of ids before the first padding."""
  if isinstance(ids, (str, bytes)):
    ids = vocabulary.encode(text_of(ids, vocabulary))
  zeros = np.flatnonzero(np.asarray(ids) == 0)
  return int(zeros[0]) if zeros.size else len(ids)


def _bytes(text: str) -> tf.train.Feature:
  return tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode("utf-8")]))
