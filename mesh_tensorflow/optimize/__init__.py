"""Optimizers: update operations made from gradients.

What stands in the `__all__` of a file is public by its line here.
"""

import typing as _typing

from mesh_tensorflow.optimize.adafactor import *
from mesh_tensorflow.optimize.adam import *
from mesh_tensorflow.optimize.averaging import *
from mesh_tensorflow.optimize.base import *
from mesh_tensorflow.optimize.clipping import *
from mesh_tensorflow.optimize.hparams import *
from mesh_tensorflow.optimize.lion import *
from mesh_tensorflow.optimize.multi_lr import *
from mesh_tensorflow.optimize.muon import *
from mesh_tensorflow.optimize.sgd_momentum import *

if not _typing.TYPE_CHECKING:  # A type checker reads an __all__ that is a plain list only.
  __all__ = [n for n, value in [*globals().items()] if callable(value) and not n.startswith("_")]
