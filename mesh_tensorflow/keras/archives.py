"""`.keras` files of large models, written and read by way of a folder.

Keras holds the weights of such a file in memory once more (or twice, when it reads) where they take
less than half of what is free. A folder of the same files is written and read weight by weight.
"""

from __future__ import annotations

import inspect
import math
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any

import keras

from mesh_tensorflow import workers

# Bytes of weights from which on a folder is worth its time.
LARGE = 2**26
_WEIGHTS = "model.weights.h5"
# Keras before 3.6 saves no folders.
_HAS_FOLDERS = "zipped" in inspect.signature(keras.saving.save_model).parameters


def save(
  plain: Callable[..., None],
  model: keras.Model,
  filepath: Any,
  overwrite: bool = True,
  zipped: bool | None = None,
  **kwargs: Any,
) -> None:
  """Saves a model as Keras does; a large file that is there is replaced when the new one is whole.

  Args:
    plain: `keras.saving.save_model`, as the other arguments are its own.
    model: the model.
    filepath: where to.
    overwrite: whether a file may be replaced without asking.
    zipped: whether it is to be one file; None for where that is usual.
    **kwargs: what else Keras takes.

  Raises:
    OSError: the disk is full, say.
  """
  if zipped is not None:
    kwargs["zipped"] = zipped
  size = sum(v.value.dtype.size * math.prod(v.shape) for v in model.variables)
  path = _local_archive(filepath)
  by_folder = _HAS_FOLDERS and path is not None and size >= LARGE and set(kwargs) <= {"zipped"}
  asks = not overwrite and path is not None and path.exists()
  if path is None or not by_folder or zipped is False or asks:
    plain(model, filepath, overwrite=overwrite, **kwargs)
    return
  try:
    _save_by_folder(plain, model, path)
  except OSError:  # No room for a folder and an archive, say. Keras needs less, but what is there.
    if path.exists() or workers.current().size > 1:  # Others would not read variables once more.
      raise
    plain(model, filepath, overwrite=overwrite, **kwargs)


def _save_by_folder(plain: Callable[..., None], model: keras.Model, path: pathlib.Path) -> None:
  with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as name:
    folder, archive = pathlib.Path(name) / "model", pathlib.Path(name) / path.name
    plain(model, folder, zipped=False)
    with zipfile.ZipFile(archive, "w") as to:
      for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        to.write(file, file.relative_to(folder))
    os.replace(archive, path)


def load(plain: Callable[..., Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
  """Loads a model as Keras does.

  Args:
    plain: `keras.saving.load_model`.
    filepath: what to load.
    *args: the other arguments of `plain`.
    **kwargs: likewise.
  """
  path = _local_archive(filepath)
  if not _HAS_FOLDERS or path is None or not _is_large(path):
    return plain(filepath, *args, **kwargs)
  with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:
    try:
      with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    except OSError:  # No room: then in memory.
      return plain(filepath, *args, **kwargs)
    return plain(folder, *args, **kwargs)


def _local_archive(filepath: Any) -> pathlib.Path | None:
  """Path of a `.keras` file in a folder that can be written; None for anything else."""
  if not isinstance(filepath, (str, os.PathLike)) or not str(filepath).endswith(".keras"):
    return None
  path = pathlib.Path(os.path.realpath(filepath))
  return path if os.access(path.parent, os.W_OK) and not path.is_dir() else None


def _is_large(path: pathlib.Path) -> bool:
  """True of an archive whose weights are large; one that is compressed might unpack to any size."""
  try:
    with zipfile.ZipFile(path) as archive:
      files = archive.infolist()
  except (OSError, zipfile.BadZipFile):
    return False  # Keras says what is wrong.
  is_plain = all(f.compress_type == zipfile.ZIP_STORED for f in files)
  return is_plain and any(f.filename == _WEIGHTS and f.file_size >= LARGE for f in files)
