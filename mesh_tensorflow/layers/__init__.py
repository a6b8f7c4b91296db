"""Layers: functions of `mtf.Tensor`s that own variables, losses, masks and norms.

What stands in the `__all__` of a file is public by its line here.
"""

import typing as _typing

from mesh_tensorflow.arguments import checking
from mesh_tensorflow.environment import tensorflow_mode
from mesh_tensorflow.layers.attention import *
from mesh_tensorflow.layers.clip_activation_gradient import *
from mesh_tensorflow.layers.convolution import *
from mesh_tensorflow.layers.dense import *
from mesh_tensorflow.layers.embedding import *
from mesh_tensorflow.layers.local_attention import *
from mesh_tensorflow.layers.losses import *
from mesh_tensorflow.layers.masks import *
from mesh_tensorflow.layers.noise import *
from mesh_tensorflow.layers.norm import *
from mesh_tensorflow.layers.pooling import *
from mesh_tensorflow.layers.recurrent import *
from mesh_tensorflow.layers.reversible import *
from mesh_tensorflow.layers.scaling import *
from mesh_tensorflow.layers.separable_conv import *
from mesh_tensorflow.layers.separable_conv import (
  _depthwise_conv1d_hack as _depthwise_conv1d_hack,  # Used by clients.
)
from mesh_tensorflow.layers.spatial_resize import *
from mesh_tensorflow.layers.statistics import *
from mesh_tensorflow.operations.norms import *

checking.check_functions(globals())
tensorflow_mode.exempt(globals())

if not _typing.TYPE_CHECKING:  # A type checker reads an __all__ that is a plain list only.
  __all__ = [n for n, value in [*globals().items()] if callable(value) and not n.startswith("_")]
