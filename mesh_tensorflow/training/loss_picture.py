"""`loss.png` in the folder of a model: its losses over the steps, drawn by matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
from typing import Any

from mesh_tensorflow.training import metrics_file, model_files

NAME = "loss.png"
HINT = "pip install matplotlib; then they are drawn as a picture"


def can_draw() -> bool:
  """True if matplotlib is installed."""
  return importlib.util.find_spec("matplotlib") is not None


def draw(model_dir: str) -> str | None:
  """Draws what `metrics.jsonl` tells of losses.

  Args:
    model_dir: the folder of the model.

  Returns:
    The path of the picture; None if there is nothing to draw, or it cannot be written.
  """
  curves = _curves(metrics_file.read(model_dir))
  if not any(len(steps) > 1 for steps, _ in curves.values()):
    return None
  path = os.path.join(model_dir, NAME)
  picture = _picture(curves)
  if model_files.optional(model_dir, NAME, lambda: model_files.write(model_dir, path, picture)):
    return path
  return None


def _curves(reports: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
  """Steps and values of the losses: of training, and of evaluations."""
  curves: dict[str, tuple[list[int], list[float]]] = {}
  for report in reports:
    for name, value in report.items():
      is_loss = name == "loss" or (name.startswith("eval/") and name.endswith("/loss"))
      if (is_loss or name == "eval/loss") and isinstance(value, (int, float)):
        steps, values = curves.setdefault(name, ([], []))
        steps.append(report["step"])
        values.append(value)
  return curves


def _picture(curves: dict[str, tuple[list[int], list[float]]]) -> bytes:
  """The picture, as PNG. Without pyplot: it would look for a screen."""
  figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 4.5), dpi=120)
  axes = figure.subplots()
  for name, (steps, values) in sorted(curves.items()):
    style = "o-" if name.startswith("eval/") else "-"
    axes.plot(steps, values, style, linewidth=1.2, markersize=3, label=name)
  axes.set_xlabel("step")
  axes.set_ylabel("loss (nats)")
  axes.grid(alpha=0.3)
  axes.legend()
  file = io.BytesIO()
  figure.savefig(file, format="png", bbox_inches="tight")
  return file.getvalue()
