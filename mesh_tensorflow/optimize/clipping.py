"""The norm of all gradients together, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import ConfigError, GraphError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import padding
from mesh_tensorflow.operations.binary import add_n, multiply
from mesh_tensorflow.operations.cross_mesh import reshard, stage
from mesh_tensorflow.operations.elementwise import cast, sqrt, square
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor

__all__ = ["clip_by_global_norm", "global_norm"]


class GlobalNormOperation(Operation):
  """sqrt of the sum of |x|^2 over all elements of several tensors, a float32 scalar.

  Each processor sums the squares of its own slices; one number is exchanged, whatever the
  number of tensors and however they are split.

  Args:
    xs: `Tensor`s of one mesh.
    name: name of the operation.
  """

  lowers_uneven_slices = True
  reads_shards = True

  def __init__(self, xs: Sequence[Tensor], name: str = "global_norm"):
    super().__init__(list(xs), name=name)
    self._outputs = [Tensor(self, Shape([]), tf.float32)]
    self._initialize_all_dimensions_as_splittable()

  @property
  def has_gradient(self) -> bool:
    return False

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    layouts, tensors = [impl] * len(self._inputs), [lowering.tensors[x] for x in self._inputs]
    for i, (x, slices) in enumerate(zip(self._inputs, tensors)):
      if isinstance(slices, LazyAllreduceSum) and not slices.is_reduced:
        # Where shards are updated, none needs the whole sum.
        layouts[i] = impl.stored_layout(x.shape)
        tensors[i] = impl.to_shards(slices, x.shape, layouts[i])
    tensors = [
      layout.without_padding(slices, x.shape, padding.zero)
      for layout, slices, x in zip(layouts, tensors, self._inputs)
    ]
    axes_of = [_split_axes(layout, x.shape) for layout, x in zip(layouts, self._inputs)]
    axes = sorted(set[int]().union(*axes_of))
    # A slice that several processors hold is summed by each of them: it counts in parts.
    shares = [1.0 / _product(impl, set(axes) - own) for own in axes_of]

    def squares(*slices: tf.Tensor) -> tf.Tensor:
      parts = [_sum_of_squares(s) for s in slices]
      return tf.add_n([p if share == 1.0 else p * share for p, share in zip(parts, shares)])

    total = impl.slicewise(squares, *tensors)
    if axes:
      total = impl.allreduce(total, axes, "SUM")
      lowering.add_counter(f"allreduce/{axes}/global_norm", impl.size)
    lowering.set_tensor_lowering(self._outputs[0], impl.slicewise(tf.sqrt, total))


def _sum_of_squares(t: tf.Tensor) -> tf.Tensor:
  """The sum of |t|^2, in float32."""
  if t.dtype.is_complex:
    return _sum_of_squares(tf.math.real(t)) + _sum_of_squares(tf.math.imag(t))
  return 2.0 * tf.nn.l2_loss(tf.cast(t, tf.float32))  # L2Loss halves the sum.


def _split_axes(impl: MeshImpl, shape: Shape) -> set[int]:
  """The mesh axes, of more than one processor, over which a tensor is split."""
  axes = {impl.tensor_dimension_to_mesh_axis(d) for d in shape}
  return {a for a in axes if a is not None and impl.shape[a].size > 1}


def _product(impl: MeshImpl, axes: set[int]) -> int:
  product = 1
  for a in axes:
    product *= impl.shape[a].size
  return product


@checked
def global_norm(xs: Sequence[CastableTensor | None]) -> Tensor:
  """sqrt(sum of |x_i| ** 2 over all elements of all tensors), in float32.

  Of complex tensors real and imaginary parts count. It costs one allreduce of one number on any
  layout. It has no gradient.

  Args:
    xs: `Tensor`s, of one mesh or of several; None are left out.

  Returns:
    A float32 scalar.

  Raises:
    GraphError: there is none.
  """
  given = [x for x in xs if x is not None]
  if not given:
    raise GraphError("global_norm needs at least one tensor")
  of_mesh: dict[Mesh, list[Tensor]] = {}
  for x in given:
    of_mesh.setdefault(x.mesh, []).append(x)
  first, *others = [GlobalNormOperation(xs).outputs[0] for xs in of_mesh.values()]
  if not others:
    return first
  squares = [square(first), *(square(reshard(n, first.mesh)) for n in others)]
  return sqrt(add_n(squares))


@checked
def clip_by_global_norm(
  xs: Sequence[CastableTensor | None], clip_norm: float
) -> tuple[list[Tensor | None], Tensor]:
  """Scales tensors together so that their norm is `clip_norm` at most (Pascanu et al., 2013).

  x_i * clip_norm / max(norm, clip_norm), with `norm = global_norm(xs)`; arXiv:1211.5063. Where
  the norm is not larger, the tensors are what they were. As `tf.clip_by_global_norm`.

  Args:
    xs: `Tensor`s, of one mesh or of several; None stay None.
    clip_norm: a positive number.

  Returns:
    The tensors, of their dtypes, and the norm that they had.

  Raises:
    ConfigError: `clip_norm` is not positive.
    GraphError: there is no tensor.
  """
  if not clip_norm > 0:
    raise ConfigError(f"clip_by_global_norm: clip_norm (={clip_norm}) must be above 0")
  norm = global_norm(xs)
  factor = cwise(
    lambda n: clip_norm / tf.maximum(n, clip_norm), [norm], grad_function=0, name="clip_factor"
  )
  scaled: list[Tensor | None] = []
  for x in xs:
    if x is not None:
      with stage(x.mesh):
        x = multiply(x, cast(factor, x.dtype))
    scaled.append(x)
  return scaled, norm
