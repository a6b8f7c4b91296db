"""Checks of the environment that the package is installed in.

An older Python, too, can read this file, and those that `start` imports: one that says what is
wrong must not be wrong itself.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence

from mesh_tensorflow.errors import InstallationError

# As in setup.py. The builds for CPUs and TPUs have the same numbers.
OLDEST_TENSORFLOW = (2, 16)
TENSORFLOW = "tensorflow>=2.16,<2.22"
_BUILDS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")

# Stack level of the user's import: warn_of_conflicts is called in start.py, from __init__.py.
_AT_IMPORT = 4


def check_python(version: Sequence[int | str]) -> None:
  """Raises `InstallationError` for a Python that is too old.

  Args:
    version: version of Python, in the form of `sys.version_info`.
  """
  if tuple(version[:2]) < (3, 10):
    raise InstallationError(
      f"mesh_tensorflow needs Python 3.10 or later; this is {'.'.join(map(str, version[:3]))}"
    )


def check_tensorflow(version: str | None) -> None:
  """Raises `InstallationError` for a TensorFlow that is too old.

  Args:
    version: its `__version__`; None if there is no TensorFlow.
  """
  needed = f"mesh_tensorflow needs TensorFlow {TENSORFLOW.removeprefix('tensorflow')}"
  cure = f"`pip install '{TENSORFLOW}'`, or tensorflow-cpu of the same versions"
  if version is None:
    raise InstallationError(f"{needed}, and there is none: {cure}")
  numbers = version.split(".")[:2]
  if all(n.isdecimal() for n in numbers) and tuple(map(int, numbers)) < OLDEST_TENSORFLOW:
    raise InstallationError(f"{needed}; this is {version}: {cure}")


def warn_of_conflicts(package_path: Iterable[str]) -> None:
  """Warns where the archived package is installed as well, or two builds of TensorFlow are.

  Packages that import `mesh_tensorflow` bring the archived one with them (0.1.21 and before, for
  TensorFlow 1) where this one is not installed: in the folder of the user's or of the system's
  packages, say. Then the working folder and the order of folders decide what is imported.

  Args:
    package_path: the `__path__` of the package.
  """
  here = os.path.realpath(os.path.dirname(next(iter(package_path))))
  for version, folder in _installed("mesh-tensorflow"):
    if version.startswith("0."):
      among = " (among the files of this package)" if os.path.realpath(folder) == here else ""
      warnings.warn(
        f"the archived mesh-tensorflow {version}, for TensorFlow 1, is installed as well, in "
        f"{folder}{among}; which of the two is imported depends on the folder that Python starts "
        "in. Remove both with `python -m pip uninstall -y mesh-tensorflow`, once for each, and "
        "install this one again",
        stacklevel=_AT_IMPORT,
      )
  builds: dict[str, dict[str, str]] = {}  # Folder -> name -> version.
  for name in _BUILDS:
    for version, folder in _installed(name):
      builds.setdefault(folder, {})[name] = version
  for folder, versions in builds.items():
    if len(set(versions.values())) > 1:
      names = [f"{name} {version}" for name, version in versions.items()]
      warnings.warn(
        f"{' and '.join(names)} are both installed in {folder} and write the same files. "
        f"Remove them with `pip uninstall -y {' '.join(versions)}`, and install one again",
        stacklevel=_AT_IMPORT,
      )


def _installed(name: str) -> list[tuple[str, str]]:
  """Versions and folders of the distributions of a name, in the order of `sys.path`."""
  import importlib.metadata  # Not before Python's version is checked: it came with 3.8.

  found: list[tuple[str, str]] = []
  for distribution in importlib.metadata.distributions(name=name):
    # Remains of an interrupted installation have no version.
    version = distribution.metadata["Version"] or ""
    folder = str(distribution.locate_file(""))
    if (version, folder) not in found:
      found.append((version, folder))
  return found
