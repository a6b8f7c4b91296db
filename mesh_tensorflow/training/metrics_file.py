"""`metrics.jsonl` in the folder of a model: a JSON object for each report of its training."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from mesh_tensorflow.checkpoint import folder as folder_lib
from mesh_tensorflow.training import model_files
from mesh_transformer_cli import untrusted

NAME = "metrics.jsonl"


class MetricsFile:
  """The reports of all runs in one folder, in the order of their steps.

  A run that goes on from a checkpoint does again the steps after it that an earlier run has done:
  what that one has reported of them is left out when the file is opened, and so is a line that it
  did not finish. Where the file cannot be written, training goes on without it.

  Args:
    model_dir: the folder; None: nothing is written.
    step: number of steps done when the run begins.
  """

  def __init__(self, model_dir: str | None, step: int):
    self._folder = model_dir or ""
    self._path = os.path.join(self._folder, NAME)
    self._open = bool(model_dir)
    if self._open and not model_files.optional(
      self._folder, NAME, lambda: _begin(self._folder, self._path, step)
    ):
      self._open = False

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Appends a report, with the time, in seconds since 1970.

    Args:
      step: of the values.
      values: by name; numbers, or texts.
    """
    if not self._open:
      return
    report = {"step": step, "time": round(time.time(), 3)}
    line = json.dumps(report | {k: _plain(v) for k, v in values.items()})
    self._open = model_files.optional(
      self._folder, NAME, lambda: _append(self._folder, self._path, f"{line}\n")
    )


def read(model_dir: str) -> list[dict[str, Any]]:
  """The reports in a folder; none if there are none, or they cannot be read.

  Args:
    model_dir: the folder.
  """
  return list(_reports(os.path.join(model_dir, NAME)))


def _begin(directory: str, path: str, step: int) -> None:
  """Drops reports of steps that the run repeats; replaces a link by a copy of the file."""
  reports = [r for r in _reports(path) if r["step"] <= step]
  text = "".join(f"{json.dumps(r)}\n" for r in reports)
  folder_lib.write(directory, path, text.encode())


def _append(directory: str, path: str, text: str) -> None:
  with tf.io.gfile.GFile(folder_lib.inside(directory, path), "a") as f:
    f.write(text)


def _reports(path: str) -> Iterator[dict[str, Any]]:
  """The complete lines."""
  try:
    with tf.io.gfile.GFile(path, "rb") as f:
      lines = f.read().decode("utf-8", errors="replace").splitlines()
  except tf.errors.OpError:  # It is not there, or is no file.
    return
  for line in lines:
    try:
      report = untrusted.parse(line)
    except ValueError:  # It ends in the middle: the run was killed, or the disk was full.
      continue
    if isinstance(report, dict) and isinstance(report.get("step"), int):
      yield report


def _plain(value: Any) -> Any:
  """Converts a value for JSON: floats to 7 significant digits, NaN and infinities to None."""
  if isinstance(value, (str, bool, int)) or value is None:
    return value
  number = float(value)
  return float(f"{number:.7g}") if math.isfinite(number) else None
