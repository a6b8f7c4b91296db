"""`mesh_tensorflow.ops`, and the five names that shadow Python's builtins."""

from mesh_tensorflow import ops as _ops
from mesh_tensorflow import removed_names as _removed_names
from mesh_tensorflow.ops import *  # noqa: F403

abs = _ops.mtf_abs  # noqa: A001
complex = _ops.mtf_complex  # noqa: A001
pow = _ops.mtf_pow  # noqa: A001
range = _ops.mtf_range  # noqa: A001
slice = _ops.mtf_slice  # noqa: A001

__getattr__ = _removed_names.attribute_hook(__name__)
