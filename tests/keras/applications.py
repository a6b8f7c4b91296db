"""The models of keras.applications, with the layout that is searched for their training.

`python -m tests.keras.applications DenseNet121 VGG16` prints a table (by default all models), of
the smallest images that each takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.environment.virtual_devices import virtual_cpu_devices
from mesh_tensorflow.keras.batches import batch_of

MODELS = sorted(
  name
  for name, fn in inspect.getmembers(keras.applications, inspect.isfunction)
  if "weights" in inspect.signature(fn).parameters
)
_SMALLEST = {"Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75}


@dataclasses.dataclass(frozen=True)
class Found:
  """What was found for a model.

  Attributes:
    rules: the layout rules.
    error: a typed error in place of a layout.
    seconds: from the model to the layout.
    why_unsplit: what is said where the layout splits nothing.
  """

  rules: Sequence[tuple[str, str]] = ()
  error: str = ""
  seconds: float = 0.0
  why_unsplit: str = ""

  def __str__(self) -> str:
    """The last columns of the table's row."""
    split = self.error or ", ".join(":".join(pair) for pair in self.rules[:4])
    if not self.error and len(self.rules) > 4:
      split += f" and {len(self.rules) - 4} more"
    return f"{split or 'nothing: ' + self.why_unsplit} | {self.seconds:.0f}"


def compiled(name: str) -> tuple[keras.Model, Any]:
  """A model with weights that are drawn, and a batch of eight examples."""
  keras.utils.set_random_seed(0)
  size = _SMALLEST.get(name, 32)
  model = getattr(keras.applications, name)(
    weights=None, input_shape=(size, size, 3), classes=10, classifier_activation="softmax"
  )
  model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy", jit_compile=False)
  x = np.random.default_rng(0).uniform(0, 255, [8, size, size, 3]).astype(np.float32)
  return model, (x, np.arange(8))


def search(name: str, mesh: str) -> Found:
  """Searches the layout of a step of training; nothing is trained."""
  start = time.monotonic()
  model, batch = compiled(name)
  parallel = mtf.keras.parallelize(model, mesh)
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      parallel._programs._make("train", batch_of(batch))
  except mtf.MeshError as e:
    return Found(error=f"{type(e).__name__}: {e}", seconds=time.monotonic() - start)
  choice = parallel._programs.decision.choice
  return Found(
    sorted(parallel.layout.pairs),
    "",
    time.monotonic() - start,
    "no axis divides it" if choice is None else choice.why_unsplit() or "",
  )


def main(arguments: Sequence[str]) -> int:
  """Prints the table; 1 if a model ends in an error."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("models", nargs="*", default=MODELS)
  parser.add_argument("--mesh", default="x:2,y:2")
  flags = parser.parse_args(arguments)
  virtual_cpu_devices(8)
  errors = 0
  print("| model | mesh | layout | seconds |\n|---|---|---|---|")
  for name in flags.models:
    found = search(name, flags.mesh)
    errors += bool(found.error)
    print(f"| {name} | {flags.mesh} | {found} |", flush=True)
    keras.backend.clear_session()
  return 1 if errors else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
