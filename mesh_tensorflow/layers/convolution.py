"""Convolution layers: a filter variable and a convolution; no bias.

`..._with_blocks` are of images whose space is split over the mesh. An axis of such an image is two
dimensions: blocks, which may be split, and the positions in a block, which may not. Before a
convolution each block gets the margins of its neighbours that the filter reaches; then the blocks
are independent, like images of a batch. The result is that of the convolution of the whole image
with "SAME" padding.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments import families
from mesh_tensorflow.errors import DimensionError, ShapeError, SizeError, UnsupportedError
from mesh_tensorflow.numerics.initializers import InitializerLike
from mesh_tensorflow.operations.convolution import (
  Conv2dOperation,
  Conv2dTransposeOperation,
  Conv3dOperation,
  Conv3dTransposeOperation,
)
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.operations.shift import halo_exchange
from mesh_tensorflow.operations.slicing import mtf_slice, pad
from mesh_tensorflow.operations.variables import VariableDType, VariableDTypeLike, get_variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.dimensions import Dimension, DimensionLike, Shape, convert_to_dimension
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = [
  "conv1d",
  "conv2d",
  "conv2d_transpose",
  "conv2d_transpose_with_blocks",
  "conv2d_with_blocks",
  "conv3d",
  "conv3d_transpose",
  "conv3d_transpose_with_blocks",
  "conv3d_with_blocks",
]


def conv1d(
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: int = 3,
  stride: int = 1,
  **kw_args: Any,
) -> Tensor:
  """Convolution along one dimension: a `conv2d` of an image of height 1.

  Variable: `{name}/kernel` [fh=1, fw, in, out].

  Args:
    x: a `Tensor` [batch..., length, in].
    output_dim: the new last dimension.
    filter_size: along the length.
    stride: along the length.
    **kw_args: for `conv2d`: padding, filter_initializer, variable_dtype, name.

  Returns:
    A `Tensor` [batch..., length, out].

  Raises:
    ShapeError: x has no length and channels.
  """
  if x.shape.ndims < 2:
    raise ShapeError(f"conv1d needs dimensions [batch..., length, channels], got {x}")
  *batch, length, channels = x.shape.dims
  # A filter of height 1 sees this one row, and padding adds none.
  height = Dimension("fake_height", 1)
  image = reshape(x, Shape([*batch, height, length, channels]))
  y = conv2d(image, output_dim, (1, filter_size), (1, stride), **kw_args)
  return reshape(y, Shape([*batch, *y.shape[-2:]]))


def spatial_numbers(what: str, rank: int, numbers: Sequence[int]) -> list[int]:
  """The numbers, one for each spatial dimension.

  Raises:
    ShapeError: there are more or fewer, or one is less than 1.
  """
  numbers = [operator.index(n) for n in numbers]
  if len(numbers) != rank or min(numbers) < 1:
    raise ShapeError(f"{what} must be {rank} numbers of at least 1, got {numbers}")
  return numbers


@dataclasses.dataclass(frozen=True)
class _Family(families.Family):
  """Layers of two or three spatial dimensions, `rank`."""

  rank: int

  @property
  def transposed(self) -> bool:
    return "transpose" in self.name

  @property
  def defaults(self) -> Mapping[str, Any]:
    filter_size, strides = (2, 2) if self.transposed else (3, 1)
    return {"filter_size": (filter_size,) * self.rank, "strides": (strides,) * self.rank}

  @property
  def words(self) -> Mapping[str, str]:
    words = {"space": ("h, w", "d, h, w")[self.rank - 2]}
    words["sizes"] = ("height, width", "depth, height, width")[self.rank - 2]
    words["strides"] = ("along h, along w", "along d, along h, along w")[self.rank - 2]
    words["filter_space"] = ("fh, fw", "fd, fh, fw")[self.rank - 2]
    words["channels"] = "out, in" if self.transposed else "in, out"
    number = ("two", "three")[self.rank - 2]
    words["summary"] = f"Convolution in {number} dimensions"
    words["size"] = "sizes are TensorFlow's"
    words["parity"], words["block_strides"] = "odd", "; divisors of the block sizes"
    if self.transposed:
      words["summary"] = (
        f"Transposed convolution in {number} dimensions: these are multiplied by the strides"
      )
      words["size"] = (
        "with the latter, an output of a filter that is larger than the stride is larger by their "
        "difference"
      )
      words["parity"], words["block_strides"] = "even", ""
    return words


@dataclasses.dataclass(frozen=True)
class _Layer(_Family):
  """A layer of one filter, for a convolution."""

  operation: Callable[..., Operation]

  def apply(
    self,
    x: Tensor,
    output_dim: DimensionLike,
    filter_size: Sequence[int] = (),
    strides: Sequence[int] = (),
    padding: str = "SAME",
    filter_initializer: InitializerLike = None,
    variable_dtype: VariableDTypeLike | None = None,
    name: str | None = None,
  ) -> Tensor:
    """{summary}.

    Variable: `{{name}}/kernel` [{filter_space}, {channels}].

    Args:
      x: a `Tensor` [batch..., {space}, in], any number of batch dimensions. All dimensions may be
        split over the mesh; of those of space processors exchange what the filter reaches.
      output_dim: the new last dimension; not the dimension `in` itself.
      filter_size: ({sizes}).
      strides: ({strides}).
      padding: "SAME" or "VALID"; {size}.
      filter_initializer: what `mtf.get_variable` takes; Glorot-uniform by default.
      variable_dtype: dtypes of the variable; float32 with x's activation dtype by default.
      name: name of the scope; by default that of this function, made unique.

    Returns:
      A `Tensor` [batch..., {space}, out]; {space} keep their names and get new sizes.

    Raises:
      DimensionError: `output_dim` is the input's channel dimension.
      ShapeError: x has too few dimensions, or the image is smaller than a "VALID" filter.
      DTypeError: the variable's activation dtype is not x's.
    """
    output_dim = convert_to_dimension(output_dim)
    rank = self.rank
    filter_size = spatial_numbers(f"{self.name} of {x}: filter_size", rank, filter_size)
    strides = spatial_numbers(f"{self.name} of {x}: strides", rank, strides)
    if x.shape.ndims and output_dim == x.shape[-1]:
      raise DimensionError(
        f"{self.name}: the output dimension {output_dim.name}={output_dim.size} is the channel "
        f"dimension of {x}, and a filter cannot have it twice; give it another name"
      )
    if x.shape.ndims < rank + 1:
      raise ShapeError(
        f"{self.name} needs {rank} spatial dimensions and one of channels, after those of the "
        f"batch, got {x}"
      )
    channels = x.shape[-1]
    space = [Dimension(n, k) for n, k in zip(("fd", "fh", "fw")[-rank:], filter_size)]
    made = [output_dim, channels] if self.transposed else [channels, output_dim]
    if variable_dtype is None:
      variable_dtype = VariableDType(tf.float32, tf.float32, x.dtype)
    with scope.variable_scope(name, default_name=self.name, graph=x.graph):
      kernel = get_variable(
        x.mesh, "kernel", Shape(space + made), dtype=variable_dtype, initializer=filter_initializer
      )
      return self.operation(x, kernel, [1, *strides, 1], padding).outputs[0]


conv2d = families.member(_Layer("conv2d", 2, Conv2dOperation).apply)
conv3d = families.member(_Layer("conv3d", 3, Conv3dOperation).apply)
conv2d_transpose = families.member(_Layer("conv2d_transpose", 2, Conv2dTransposeOperation).apply)
conv3d_transpose = families.member(_Layer("conv3d_transpose", 3, Conv3dTransposeOperation).apply)


# A spatial dimension, the dimension of its blocks, its filter size and its stride.
_Axis = tuple[Dimension, Dimension | None, int, int]


def _with_margins(layer: str, x: Tensor, axes: Sequence[_Axis]) -> Tensor:
  """Blocks with the margins that a "SAME" convolution of the whole image reads, or zeros."""
  # Zeros are added last, so that processors do not exchange them.
  for d, b, k, s in sorted(axes, key=lambda axis: axis[1] is None):
    if b is not None and d.size % s:
      raise ShapeError(
        f"{layer} of {x}: the stride {s} does not divide the block size "
        f"{d.name}={d.size} of the blocks {b.name}={b.size}"
      )
    # TensorFlow's "SAME": the larger half of the zeros lies behind the image.
    whole = d.size if b is None else d.size * b.size
    zeros = max((-(-whole // s) - 1) * s + k - whole, 0)
    before, after = zeros // 2, zeros - zeros // 2
    if b is None:
      x = pad(x, [before, after], d.name) if zeros else x
      continue
    # Both sides get the larger half; what is too much in front is cut off.
    x = halo_exchange(x, b, d, after)
    if before < after:
      x = mtf_slice(x, after - before, d.size + zeros, d.name)
  return x


def _with_halos(
  x: Tensor, axes: Sequence[_Axis]
) -> tuple[Tensor, list[tuple[Dimension, int, int]]]:
  """Blocks with halos, and what to keep of the transposed convolution: dimension, begin, size."""
  cuts: list[tuple[Dimension, int, int]] = []
  for d, b, k, s in axes:
    # Position i of x makes the positions i * s - cut to i * s - cut + k - 1 of the output.
    cut = max(k - s, 0) // 2
    # Number of positions before a block, and behind it, that contribute to outputs in it.
    halo = max((k - 1 - cut) // s, -(-cut // s))
    if b is not None and halo:
      x = halo_exchange(x, b, d, halo)
      cuts.append((d, halo * s, d.size * s))
  return x, cuts


@dataclasses.dataclass(frozen=True)
class _LayerOfBlocks(_Family):
  """A layer of images that are cut into blocks."""

  layer: Callable[..., Tensor]

  @property
  def words(self) -> Mapping[str, str]:
    of_images = self.name.replace("3d", "2d")
    return {**super().words, "layer": self.layer.__name__, "layer_of_images": of_images}

  def of_images(
    self,
    x: Tensor,
    output_dim: DimensionLike,
    filter_size: Sequence[int] = (),
    strides: Sequence[int] = (),
    padding: str = "SAME",
    h_blocks_dim: DimensionLike | None = None,
    w_blocks_dim: DimensionLike | None = None,
    filter_initializer: Any = None,
    variable_dtype: VariableDTypeLike | None = None,
    name: str | None = None,
  ) -> Tensor:
    """`{layer}` of an image that is cut into blocks, which may be split over the mesh.

    A transposed convolution multiplies the sizes of the blocks by the strides. What the filter
    reaches of the neighbours is fetched from them.

    Args:
      x: a `Tensor` [batch, h_blocks, w_blocks, h, w, in]; the dimensions of blocks may stand
        anywhere before h.
      output_dim: the new last dimension.
      filter_size: ({sizes}), {parity}.
      strides: ({strides}){block_strides}.
      padding: "SAME".
      h_blocks_dim: the blocks along h; None if h is the whole height.
      w_blocks_dim: the blocks along w; None if w is the whole width.
      filter_initializer: see `conv2d`.
      variable_dtype: see `conv2d`.
      name: name of the scope; `{layer}`, made unique, by default.

    Returns:
      A `Tensor` like x with blocks of another size, if there are strides, and the channels
      `output_dim`. Without any dimension of blocks that of `{layer}` with the given padding.

    Raises:
      UnsupportedError: there are blocks and `padding` is not "SAME".
      SizeError: there are blocks and a filter size is not {parity}.
      ShapeError: a stride does not divide a block.
      DimensionError: x has no such dimension of blocks.
    """
    return self._apply(
      x, output_dim, filter_size, strides, padding, [h_blocks_dim, w_blocks_dim],
      filter_initializer, variable_dtype, name,
    )  # fmt: skip

  def of_volumes(
    self,
    x: Tensor,
    output_dim: DimensionLike,
    filter_size: Sequence[int] = (),
    strides: Sequence[int] = (),
    padding: str = "SAME",
    d_blocks_dim: DimensionLike | None = None,
    h_blocks_dim: DimensionLike | None = None,
    filter_initializer: Any = None,
    variable_dtype: VariableDTypeLike | None = None,
    name: str | None = None,
  ) -> Tensor:
    """`{layer}` of [batch, `d_blocks_dim`, `h_blocks_dim`, d, h, w, in]; w is whole.

    Otherwise as `{layer_of_images}`; strides are ({strides}).
    """
    return self._apply(
      x, output_dim, filter_size, strides, padding, [d_blocks_dim, h_blocks_dim, None],
      filter_initializer, variable_dtype, name,
    )  # fmt: skip

  def _apply(
    self,
    x: Tensor,
    output_dim: DimensionLike,
    filter_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    blocks: Sequence[DimensionLike | None],
    initializer: InitializerLike,
    dtype: VariableDTypeLike | None,
    name: str | None,
  ) -> Tensor:
    """Applies the layer to blocks: adds margins from neighbours, and crops their surplus results.

    Args:
      x: a `Tensor` [batch, dimensions of blocks, spatial dimensions, in]; see `conv2d_with_blocks`.
      output_dim: the new last dimension.
      filter_size: size of the filter along each spatial dimension.
      strides: stride along each spatial dimension.
      padding: "SAME" if there are blocks.
      blocks: for each spatial dimension the dimension of its blocks, or None.
      initializer: initializer of the filter.
      dtype: dtypes of the filter.
      name: name of the scope.
    """
    block_dims = [None if b is None else convert_to_dimension(b) for b in blocks]
    if not any(block_dims):
      return self.layer(x, output_dim, filter_size, strides, padding, initializer, dtype, name)
    space = self._check(x, filter_size, strides, padding, block_dims)
    axes = list(zip(space, block_dims, filter_size, strides))
    if not self.transposed:
      x = _with_margins(self.name, x, axes)
      # The margins are the padding.
      return self.layer(x, output_dim, filter_size, strides, "VALID", initializer, dtype, name)
    x, cuts = _with_halos(x, axes)
    y = self.layer(x, output_dim, filter_size, strides, "SAME", initializer, dtype, name)
    for d, begin, size in cuts:
      y = mtf_slice(y, begin, size, d.name)
    return y

  def _check(
    self,
    x: Tensor,
    filter_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    blocks: Sequence[Dimension | None],
  ) -> list[Dimension]:
    """The spatial dimensions of x, if the arguments are right."""
    what, rank = f"{self.name} of {x}", len(blocks)
    if padding != "SAME":
      raise UnsupportedError(f"{what}: padding must be 'SAME' with blocks, got {padding!r}")
    remainder = 0 if self.transposed else 1
    spatial_numbers(f"{what}: strides", rank, strides)
    for k in spatial_numbers(f"{what}: filter_size", rank, filter_size):
      if k % 2 != remainder:
        raise SizeError(
          f"{what}: filter sizes must be {'odd' if remainder else 'even'} with blocks, got "
          f"{list(filter_size)}"
        )
    if x.shape.ndims < rank + 1:
      raise ShapeError(f"{what}: {rank} spatial dimensions and one of channels are needed")
    return x.shape[-rank - 1 : -1]


conv2d_with_blocks = families.member(_LayerOfBlocks("conv2d_with_blocks", 2, conv2d).of_images)
conv3d_with_blocks = families.member(_LayerOfBlocks("conv3d_with_blocks", 3, conv3d).of_volumes)
conv2d_transpose_with_blocks = families.member(
  _LayerOfBlocks("conv2d_transpose_with_blocks", 2, conv2d_transpose).of_images
)
conv3d_transpose_with_blocks = families.member(
  _LayerOfBlocks("conv3d_transpose_with_blocks", 3, conv3d_transpose).of_volumes
)
