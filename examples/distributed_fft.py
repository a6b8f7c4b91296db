"""A Fourier transform over three dimensions of which the mesh splits two.

It shows how a program adds an operation to the language: docs/own_operation.md explains it step
by step. Run it with `python -m mesh_tensorflow.examples.distributed_fft`.
"""

from __future__ import annotations

import argparse

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf

from mesh_tensorflow.examples import mesh_flags


class SquaredMagnitude(mtf.Operation):
  """|x|^2 of a complex tensor, as a real one."""

  has_gradient = True

  def __init__(self, x: mtf.Tensor, name: str = "squared_magnitude"):
    super().__init__([x], name=name)
    self._outputs = [mtf.Tensor(self, x.shape, x.dtype.real_dtype)]

  def lower(self, lowering):
    result = lowering.mesh_impl(self).slicewise(
      lambda t: tf.square(tf.math.real(t)) + tf.square(tf.math.imag(t)),
      lowering.tensors[self.inputs[0]],
    )
    lowering.set_tensor_lowering(self.outputs[0], result)

  def gradient(self, grad_ys):
    x = self.inputs[0]
    return [x * mtf.cast(2.0 * grad_ys[0], x.dtype)]


class FFT3D(mtf.Operation):
  """The discrete Fourier transform over three dimensions, or its inverse.

  A mesh may split two of the three dimensions ("pencils"). Forward, the input [x, y, z] has z
  whole, and the output [kx, ky, kz] has kx whole: kz is split as y was, ky as x was. The inverse
  goes the way back, so that it begins where the transform ends.

  Args:
    x: a complex `Tensor` of three dimensions.
    new_dims: the three dimensions of the output, of the same sizes.
    inverse: the inverse transform, divided by the number of elements.
    name: of the operation.

  Raises:
    DTypeError: x is not complex.
    ShapeError: the dimensions are not three, or the new ones have other sizes.
  """

  has_gradient = True

  def __init__(
    self,
    x: mtf.Tensor,
    new_dims: list[mtf.Dimension],
    inverse: bool = False,
    name: str = "fft3d",
  ):
    super().__init__([x], name=name)
    new_shape = mtf.convert_to_shape(new_dims)
    if not x.dtype.is_complex:
      raise mtf.DTypeError(f"{self.name}: the input must be complex, got {x}; cast it")
    if x.shape.ndims != 3 or x.shape.to_integer_list != new_shape.to_integer_list:
      raise mtf.ShapeError(
        f"{self.name}: {x} must have three dimensions, and the new ones the same sizes; they are "
        f"{new_shape}"
      )
    self._inverse = inverse
    self._outputs = [mtf.Tensor(self, new_shape, x.dtype)]

  def _space_and_frequencies(self):
    """The dimensions on either side of the forward transform."""
    before, after = self.inputs[0].shape.dims, self.outputs[0].shape.dims
    return (after, before) if self._inverse else (before, after)

  def verify_layout(self, mesh_impl):
    super().verify_layout(mesh_impl)
    (x, y, z), (kx, ky, kz) = self._space_and_frequencies()
    for dim in (z, kx):
      if _mesh_axis(mesh_impl, dim) is not None:
        raise mtf.LayoutError(
          f"{self.name}: {_split(mesh_impl, dim)}, but {z.name} and {kx.name} must be whole; "
          f"drop the rule for {dim.name}"
        )
    for dim, frequencies in ((x, ky), (y, kz)):
      if _mesh_axis(mesh_impl, dim) != _mesh_axis(mesh_impl, frequencies):
        raise mtf.LayoutError(
          f"{self.name}: {_split(mesh_impl, dim)}, {_split(mesh_impl, frequencies)}; split both "
          "over the same mesh dimension, or neither"
        )

  def lower(self, lowering):
    impl = lowering.mesh_impl(self)
    slices = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
    (x, y, _), _ = self._space_and_frequencies()
    over_x, over_y = _mesh_axis(impl, x), _mesh_axis(impl, y)

    def transform(slices, axis):
      fft = tf.signal.ifft if self._inverse else tf.signal.fft
      return impl.slicewise(lambda t: _along(fft, t, axis), slices)

    def move(slices, mesh_axis, split_axis, concat_axis):
      if mesh_axis is None:
        return slices
      return impl.alltoall(slices, mesh_axis, split_axis, concat_axis)

    if self._inverse:
      slices = move(transform(slices, 0), over_x, split_axis=0, concat_axis=1)
      slices = move(transform(slices, 1), over_y, split_axis=1, concat_axis=2)
      slices = transform(slices, 2)
    else:
      slices = move(transform(slices, 2), over_y, split_axis=2, concat_axis=1)
      slices = move(transform(slices, 1), over_x, split_axis=1, concat_axis=0)
      slices = transform(slices, 0)
    lowering.set_tensor_lowering(self.outputs[0], slices)

  def gradient(self, grad_ys):
    x = self.inputs[0]
    adjoint = FFT3D(grad_ys[0], x.shape.dims, inverse=not self._inverse).outputs[0]
    size = float(x.shape.size)
    return [adjoint / size if self._inverse else adjoint * size]


def _mesh_axis(mesh_impl, dim: mtf.Dimension) -> int | None:
  """The number of the mesh axis that splits the dimension, or None."""
  axis = mesh_impl.tensor_dimension_to_mesh_axis(dim)
  return None if axis is None or mesh_impl.shape[axis].size == 1 else axis


def _split(mesh_impl, dim: mtf.Dimension) -> str:
  """For messages: how a dimension is split."""
  axis = _mesh_axis(mesh_impl, dim)
  if axis is None:
    return f"{dim.name}={dim.size} is whole"
  over = mesh_impl.shape[axis]
  return f"{dim.name}={dim.size} is split over {over.name}={over.size}"


def _along(fft, t: tf.Tensor, axis: int) -> tf.Tensor:
  """A one-dimensional transform along any axis: TensorFlow's are along the last one."""
  order = [i for i in range(3) if i != axis] + [axis]
  if axis == 2:
    return fft(t)
  return tf.transpose(fft(tf.transpose(t, order)), [order.index(i) for i in range(3)])


def fft3d(x: mtf.Tensor, new_dims: list[mtf.Dimension]) -> mtf.Tensor:
  """The Fourier transform of a complex [x, y, z] to frequencies; see `FFT3D`."""
  return FFT3D(x, new_dims).outputs[0]


def ifft3d(x: mtf.Tensor, new_dims: list[mtf.Dimension]) -> mtf.Tensor:
  """The inverse of `fft3d`."""
  return FFT3D(x, new_dims, inverse=True, name="ifft3d").outputs[0]


def main() -> None:
  """Transforms a random field on a 2x4 mesh, and compares with `tf.signal.fft3d`."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--size", type=int, default=64, help="of each dimension")
  parser.add_argument("--implementation", default="simd", choices=["placement", "simd"])
  args = parser.parse_args()

  kinds = {"placement": mtf.PlacementMeshImpl, "simd": mtf.SimdMeshImpl}
  layout = "x:rows,y:cols,ky:rows,kz:cols"
  impl = kinds[args.implementation]("rows:2,cols:4", layout, mtf.virtual_cpu_devices(8))
  n = args.size
  space = [mtf.Dimension(name, n) for name in ("x", "y", "z")]
  frequencies = [mtf.Dimension(name, n) for name in ("kx", "ky", "kz")]

  @mtf.function(impl, input_signature=[mtf.TensorSpec(space, tf.complex64)])
  def energy(field):
    spectrum = fft3d(field, frequencies)
    total = mtf.reduce_sum(SquaredMagnitude(spectrum).outputs[0])
    (gradient,) = mtf.gradients([total], [field])
    return spectrum, gradient

  rng = np.random.default_rng(0)
  field = (rng.normal(size=[n] * 3) + 1j * rng.normal(size=[n] * 3)).astype(np.complex64)
  spectrum, gradient = energy(field)
  want = tf.signal.fft3d(field)
  print(mtf.describe(energy))
  print(f"largest difference to tf.signal.fft3d: {np.max(np.abs(spectrum - want)):.1e} ", end="")
  print(f"(values up to {np.max(np.abs(want)):.0f})")
  # The sum of the spectrum's squares is n^3 times that of the field's (Parseval).
  error = np.max(np.abs(gradient / (2 * n**3) - field))
  print(f"largest relative error of the gradient: {error:.1e}")


if __name__ == "__main__":
  mesh_flags.run(main)
