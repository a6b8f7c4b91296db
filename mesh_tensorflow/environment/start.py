"""First steps of the package's import: checks, its other parts, and TensorFlow."""

from __future__ import annotations

import sys

from mesh_tensorflow.environment import installation, quiet, source_tree

_PATH = sys.modules[__name__.rsplit(".", 2)[0]].__path__

installation.check_python(sys.version_info)
source_tree.find_parts_beside(_PATH)
installation.check_tensorflow(quiet.import_tensorflow())
installation.warn_of_conflicts(_PATH)
