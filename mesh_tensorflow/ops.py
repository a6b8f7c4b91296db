"""Every operation and name of the language, flat: `mesh_tensorflow.ops`.

A family of operations is a file of `operations`; what stands in its `__all__` is public by its line
here.
"""

import typing as _typing

from mesh_tensorflow import removed_names
from mesh_tensorflow.arguments import checking
from mesh_tensorflow.environment import tensorflow_mode
from mesh_tensorflow.errors import *  # noqa: F403
from mesh_tensorflow.meshes.devices import *
from mesh_tensorflow.meshes.laid_out import *
from mesh_tensorflow.meshes.layout import *
from mesh_tensorflow.meshes.mesh_impl import MeshImpl as MeshImpl
from mesh_tensorflow.operations import extremes  # noqa: F401 - it adds gradients
from mesh_tensorflow.operations.binary import *
from mesh_tensorflow.operations.broadcasting import *
from mesh_tensorflow.operations.comparison import *
from mesh_tensorflow.operations.complex import *
from mesh_tensorflow.operations.conditional import *
from mesh_tensorflow.operations.constants import *
from mesh_tensorflow.operations.control import *
from mesh_tensorflow.operations.convolution import *
from mesh_tensorflow.operations.cross_mesh import *
from mesh_tensorflow.operations.custom_gradient import *
from mesh_tensorflow.operations.einsum import *
from mesh_tensorflow.operations.elementwise import *
from mesh_tensorflow.operations.fourier import *
from mesh_tensorflow.operations.gradients import *
from mesh_tensorflow.operations.halo_reduce import *
from mesh_tensorflow.operations.indexing import *
from mesh_tensorflow.operations.linear_algebra import *
from mesh_tensorflow.operations.loops import *
from mesh_tensorflow.operations.microbatches import *
from mesh_tensorflow.operations.one_hot import *
from mesh_tensorflow.operations.pooling import *
from mesh_tensorflow.operations.random import *
from mesh_tensorflow.operations.ranges import *
from mesh_tensorflow.operations.reduction import *
from mesh_tensorflow.operations.reshape import *
from mesh_tensorflow.operations.scalar import *
from mesh_tensorflow.operations.scatter import *
from mesh_tensorflow.operations.shift import *
from mesh_tensorflow.operations.slicewise import *
from mesh_tensorflow.operations.slicing import *
from mesh_tensorflow.operations.softmax import *
from mesh_tensorflow.operations.sorting import *
from mesh_tensorflow.operations.stacked_variable import *
from mesh_tensorflow.operations.stacking import *
from mesh_tensorflow.operations.top_k import *
from mesh_tensorflow.operations.variables import *
from mesh_tensorflow.operations.where import *
from mesh_tensorflow.program.dimensions import *
from mesh_tensorflow.program.graph import *
from mesh_tensorflow.program.scope import *
from mesh_tensorflow.running.hooks import MtfCheckpointSaverListener as MtfCheckpointSaverListener
from mesh_tensorflow.running.hooks import MtfRestoreHook as MtfRestoreHook
from mesh_tensorflow.running.lowering import Lowering as Lowering
from mesh_tensorflow.running.lowering import log_variable_sizes as log_variable_sizes
from mesh_tensorflow.running.lowering import pretty_print_counters as pretty_print_counters

# They take slices of variables, and are compared by identity.
_OF_SLICES = ("assign_slice", "assign_add_slice", "assign_sub_slice")
checking.check_functions(globals(), left_alone=_OF_SLICES)
tensorflow_mode.exempt(globals(), left_alone=_OF_SLICES)

# A type checker reads an __all__ that is a plain list only, and a __getattr__ would let it take
# every name for one that is there.
if not _typing.TYPE_CHECKING:
  __all__ = [n for n, value in [*globals().items()] if callable(value) and not n.startswith("_")]
  __getattr__ = removed_names.attribute_hook(__name__)
