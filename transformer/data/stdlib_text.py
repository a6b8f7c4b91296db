"""Text that every machine with Python has: the sources of the standard library."""

from __future__ import annotations

import gzip
import os
import sysconfig

import gin

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import DataError

# Folders that are no part of the library proper, or differ from one installation to the next.
_LEFT_OUT = frozenset(
  ["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"]
)
_HELD_OUT_ONE_IN = 25


@gin.configurable(module="mesh_tensorflow.transformer.dataset")
@affects("training")
def python_stdlib_files(
  dataset_split: str = "train", max_bytes: int = 300_000, max_files: int | None = None
) -> list[str]:
  """Source files of Python's standard library, split by file.

  Every 25th file, in the order of their names, is held out.

  Args:
    dataset_split: "train", or any other name for the held-out files.
    max_bytes: larger files (tables, mostly) are left out.
    max_files: the first so many of them only; None: all.

  Returns:
    Sorted paths.

  Raises:
    DataError: this Python has no library sources on disk.
  """
  root = sysconfig.get_paths()["stdlib"]
  paths = []
  for folder, subfolders, names in os.walk(root):
    subfolders[:] = sorted(d for d in subfolders if d not in _LEFT_OUT)
    for name in sorted(names):
      path = os.path.join(folder, name)
      if name.endswith(".py") and 1000 <= os.path.getsize(path) <= max_bytes:
        paths.append(path)
  # Of the library alone, not of where it is: machines with one version hold the same files out.
  paths.sort(key=lambda p: os.path.relpath(p, root))
  if len(paths) < 2 * _HELD_OUT_ONE_IN:
    raise DataError(
      f"the Python standard library in {root} has {len(paths)} source files, too few to learn "
      "from (is it an installation without sources?); use text files of your own with "
      "dataset.text_lm_dataset"
    )
  train = dataset_split == "train"
  return [p for i, p in enumerate(paths) if (i % _HELD_OUT_ONE_IN != 7) == train][:max_files]


def gzip_bits_per_byte(paths: list[str]) -> float:
  """Bits per byte of `gzip -9` on the files, each compressed by itself."""
  plain = packed = 0
  for path in paths:
    with open(path, "rb") as f:
      content = f.read()
    plain += len(content)
    packed += len(gzip.compress(content, 9, mtime=0))
  return 8.0 * packed / plain
