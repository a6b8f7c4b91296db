"""Sparse features: embedding tables too large for a device, of which a step touches few rows.

What stands in the `__all__` of a file is public by its line here.
"""

import typing as _typing

from mesh_tensorflow.sparse.lookup import *
from mesh_tensorflow.sparse.optimizers import *
from mesh_tensorflow.sparse.table import *

if not _typing.TYPE_CHECKING:  # A type checker reads an __all__ that is a plain list only.
  __all__ = [n for n, value in [*globals().items()] if callable(value) and not n.startswith("_")]
