"""Finds the gin files that come with the package."""

from __future__ import annotations

import os

from mesh_tensorflow import errors

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def gin_dir() -> str:
  """The folder that holds `defaults.gin`, `models/`, `layouts/` and the other gin files.

  A wheel has it inside the package (`mesh_tensorflow/transformer/gin`); an editable install uses
  the folder of the repository, which stands next to `transformer/`.

  Returns:
    An absolute path, made for `gin.add_config_file_search_path`.

  Raises:
    errors.ConfigError: `defaults.gin` is in neither place.
  """
  candidates = [os.path.join(_PACKAGE, "gin"), os.path.join(os.path.dirname(_PACKAGE), "gin")]
  for folder in candidates:
    if os.path.isfile(os.path.join(folder, "defaults.gin")):
      return folder
  raise errors.ConfigError(
    "the gin files of mesh_tensorflow are missing: no defaults.gin in "
    f"{candidates[0]} (installed wheel) nor in {candidates[1]} (editable install); "
    "reinstall the package"
  )
