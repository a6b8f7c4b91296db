"""Keras' recurrent layers without cuDNN, whatever devices TensorFlow sees."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

_LOCK = threading.Lock()
_inside = 0


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
  """Context manager: `keras.layers.LSTM` and `GRU` are traced as loops, also with a GPU.

  On a GPU they would be one cuDNN operation for all steps, which no layout can split. The values
  are the same.
  """
  global _inside
  keras = sys.modules.get("keras")
  layers = getattr(keras, "layers", None)
  classes = [c for c in (getattr(layers, n, None) for n in ("LSTM", "GRU")) if c is not None]
  with _LOCK:
    _inside += 1
    for cls in classes:
      cls.use_cudnn = property(_never, _keep)
  try:
    yield
  finally:
    with _LOCK:
      _inside -= 1
      for cls in classes if not _inside else ():
        del cls.use_cudnn  # Each layer has its own setting again.


def _never(layer: Any) -> bool:
  return False


def _keep(layer: Any, value: Any) -> None:
  vars(layer)["use_cudnn"] = value
