"""Scalars of evaluations are read as programs of T5 read them."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.training.progress import write_scalars


def parse_events_files(folder):
  """From each tag to [(step, value)], by `simple_value`."""
  found = {}
  # A name ends with how many files the process has opened: the tenth is longer than the ninth.
  for path in sorted(tf.io.gfile.glob(f"{folder}/events.*"), key=lambda path: (len(path), path)):
    for event in tf.compat.v1.train.summary_iterator(path):
      for value in event.summary.value:
        found.setdefault(value.tag, []).append((event.step, value.simple_value))
  return found


def test_scalars_are_simple_values(tmp_path):
  folder = tmp_path / "validation_eval"  # It is made.
  write_scalars(str(folder), 7, {"eval/fr/bleu": 12.5, "eval/fr/accuracy": 0.25})
  write_scalars(str(folder), 8, {"eval/fr/bleu": 13.5})  # In the same second.
  assert parse_events_files(folder) == {
    "eval/fr/bleu": [(7, 12.5), (8, 13.5)],
    "eval/fr/accuracy": [(7, 0.25)],
  }
