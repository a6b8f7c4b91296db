"""Lets a clone of the repository be imported as it lies, installed or not.

A wheel holds `transformer/`, `gin/` and `examples/` inside the package. In a clone they lie beside
`mesh_tensorflow/`, and Python, started in the clone, imports this package from there whatever is
installed. So the package itself knows where its other parts are: those beside it, and never those
of another clone or of an installed wheel, which may be of another version.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# Each lies in the root of the repository, in a folder of its last name; as in setup.py.
_PARTS = (
  "mesh_tensorflow.transformer",
  "mesh_tensorflow.transformer.gin",
  "mesh_tensorflow.examples",
)


class SourceTreeFinder:
  """Finds the parts of the package that lie beside it; stands in `sys.meta_path`.

  Args:
    root: the root folder of a clone.
  """

  def __init__(self, root: str):
    self.root = root

  def find_spec(
    self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
  ) -> ModuleSpec | None:
    """Finds a module that is one of the parts; see `importlib.abc.MetaPathFinder`."""
    if name not in _PARTS or not any(os.path.dirname(p) == self.root for p in path or []):
      return None  # Another module, or part of a package that came from elsewhere.
    return PathFinder.find_spec(name, [self.root], target)

  def invalidate_caches(self) -> None:
    """Does nothing: there are no caches here; PathFinder has those of folders."""


def find_parts_beside(package_path: Sequence[str]) -> None:
  """Installs a finder for the parts of the package that lie beside it, unless they are inside.

  Args:
    package_path: the `__path__` of the package.
  """
  if PathFinder.find_spec(_PARTS[0], package_path) is not None:
    return
  root = os.path.dirname(next(iter(package_path)))
  # By the name of the class: another clone has one of its own.
  finders = [f for f in sys.meta_path if type(f).__name__ == SourceTreeFinder.__name__]
  known = [getattr(f, "root", None) for f in finders]
  if root not in known and PathFinder.find_spec(_PARTS[0], [root]) is not None:
    # Before the finder of an editable install, which may be that of another clone.
    sys.meta_path.insert(0, SourceTreeFinder(root))
