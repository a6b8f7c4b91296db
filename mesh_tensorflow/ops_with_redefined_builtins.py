"""`mesh_tensorflow.ops`, and the four names that shadow Python's builtins."""

from mesh_tensorflow import ops as _ops
from mesh_tensorflow.ops import *  # noqa: F403

abs = _ops.mtf_abs  # noqa: A001
pow = _ops.mtf_pow  # noqa: A001
range = getattr(_ops, "mtf_range", None)  # noqa: A001
slice = getattr(_ops, "mtf_slice", None)  # noqa: A001
