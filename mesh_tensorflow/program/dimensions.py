"""Named dimensions and shapes. No TensorFlow here."""

from __future__ import annotations

import collections
import difflib
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, SupportsIndex, TypeAlias, overload

from mesh_tensorflow.arguments import kinds
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import ShownWhole
from mesh_tensorflow.errors import DimensionError, DimensionTypeError, ShapeError

__all__ = [
  "Dimension",
  "Shape",
  "anonymous_shape",
  "combined_dimension",
  "convert_to_dimension",
  "convert_to_shape",
  "is_subsequence",
  "list_product",
  "verify_no_new_dims",
]


class Dimension(NamedTuple):
  """A named dimension: `Dimension("batch", 8)`.

  Equality, hash and order are those of the pair (name, size): two dimensions of
  equal name and different size are different dimensions.
  """

  name: str
  size: int


DimensionLike: TypeAlias = Dimension | tuple[str, int]


@overload
def convert_to_dimension(d: None) -> None: ...
@overload
def convert_to_dimension(d: DimensionLike) -> Dimension: ...


def convert_to_dimension(d: DimensionLike | None) -> Dimension | None:
  """Turns a `Dimension` or a (name, size) pair into a `Dimension`.

  Integers of other types (NumPy's) become Python integers.

  Args:
    d: a `Dimension`, a pair (str, int), or None.

  Returns:
    A `Dimension`, or None for None.

  Raises:
    DimensionTypeError: `d` is not iterable; also a TypeError.
    DimensionError: `d` is not a pair of a string and an integer.
  """
  if d is None:
    return None
  try:
    parts: tuple[Any, ...] = tuple(d)
  except TypeError:
    raise DimensionTypeError(f"expected a Dimension or a pair (name, size), got {d!r}") from None
  if len(parts) != 2:
    raise DimensionError(f"expected a Dimension or a pair (name, size), got {d!r}")
  name, size = parts
  if not isinstance(name, str):
    raise DimensionError(f"the name of a dimension must be a string, got {name!r} in {d!r}")
  if not isinstance(size, int):
    if isinstance(size, float):
      raise DimensionError(f"the size of dimension {name!r} must be an integer, got {size!r}")
    try:
      size = operator.index(size)
    except TypeError:
      raise DimensionError(
        f"the size of dimension {name!r} must be an integer, got {size!r}"
      ) from None
    d = Dimension(name, size)  # With a Python int: NumPy's do not go into JSON, say.
  if size < 0:
    raise DimensionError(f"the size of dimension {name!r} must not be negative, got {size}")
  return d if isinstance(d, Dimension) else Dimension(name, size)


def parse_pairs(text: str, what: str) -> list[tuple[str, str]]:
  """Splits "a:b;c:d" (also with , . or blanks between pairs) into pairs of strings.

  A dot ends a pair only behind its colon: there are names with dots in them ("dense.units").
  """
  pairs = []
  for token in re.split(r"[,;\s]+", re.sub(r":([^:.,;\s]*)\.+", r":\1 ", text.strip())):
    if not token:
      continue
    parts = token.split(":")
    if len(parts) != 2 or not parts[0] or not parts[1]:
      raise DimensionError(
        f'{what} {text!r}: expected name:value, got {token!r}; write it as "batch:rows,d_ff:cols" '
        'for a layout, "rows:2,cols:2" for a shape'
      )
    pairs.append((parts[0], parts[1]))
  return pairs


class Shape(ShownWhole):
  """An ordered list of dimensions; treated as immutable.

  Args:
    dims: a list or tuple of `Dimension`s or (name, size) pairs, or a `Shape`.

  Raises:
    DimensionError: an element is no dimension, or a dimension stands twice.
    DimensionTypeError: `dims` is no list (a generator, say); also a TypeError.
  """

  def __init__(self, dims: Sequence[DimensionLike] | Shape):
    if isinstance(dims, Dimension):
      raise DimensionError(f"a Shape is made from a list of dimensions; write Shape([{dims!r}])")
    if not hasattr(dims, "__len__"):
      raise DimensionTypeError(
        f"a Shape is made from a list of dimensions, got {type(dims).__name__} {dims!r}; "
        "write Shape(list(...))"
      )
    self._dims = [convert_to_dimension(d) for d in dims]
    if None in self._dims:
      raise DimensionError(f"None is not a dimension: {dims!r}")
    if len(set(self._dims)) != len(self._dims):
      twice = [d for d, n in collections.Counter(self._dims).items() if n > 1]
      raise DimensionError(
        f"dimension {twice[0].name}={twice[0].size} stands twice in "
        f"[{_dims_to_string(self._dims)}]; rename one of the two (mtf.rename_dimension)"
      )

  @property
  def dims(self) -> list[Dimension]:
    """A copy of the list of dimensions."""
    return list(self._dims)

  @property
  def ndims(self) -> int:
    """Number of dimensions."""
    return len(self._dims)

  @property
  def to_integer_list(self) -> list[int]:
    """The sizes of the dimensions."""
    return [d.size for d in self._dims]

  @property
  def size(self) -> int:
    """Number of elements (1 for the shape of a scalar)."""
    return list_product(self.to_integer_list)

  @property
  def dimension_names(self) -> list[str]:
    """The names of the dimensions."""
    return [d.name for d in self._dims]

  @property
  def to_string(self) -> str:
    """Names and sizes as text."""
    return f"Shape[{_dims_to_string(self._dims)}]"

  @property
  def cumprod(self) -> list[int]:
    """Entry i is the product of the sizes of the dimensions before i."""
    result, product = [], 1
    for d in self._dims:
      result.append(product)
      product *= d.size
    return result

  @checked
  def cumprod_to_tensor_axis(self, cumprod: float) -> int | None:
    """The last axis i with `self.cumprod[i] == cumprod`, or None."""
    positions = [i for i, c in enumerate(self.cumprod) if c == cumprod]
    # Axes of size 1 have the value of the axis behind them, which is the one that can be split.
    return positions[-1] if positions else None

  @checked
  def get_dim_by_name(self, name: str) -> Dimension:
    """The dimension of that name; `DimensionError` if there is none."""
    for d in self._dims:
      if d.name == name:
        return d
    raise no_such_dimension("", name, self)

  @checked
  def rename_dimension(self, old_name: str, new_name: str) -> Shape:
    """The shape with a dimension renamed; `DimensionError` if it has none of the old name."""
    old = self.get_dim_by_name(old_name)
    return Shape([Dimension(new_name, d.size) if d == old else d for d in self._dims])

  @checked
  def resize_dimension(self, name: str, new_size: int) -> Shape:
    """The shape with another size of the dimension of that name."""
    old = self.get_dim_by_name(name)
    return Shape([Dimension(name, new_size) if d == old else d for d in self._dims])

  def __len__(self) -> int:
    return len(self._dims)

  @overload
  def __getitem__(self, key: SupportsIndex) -> Dimension: ...
  @overload
  def __getitem__(self, key: slice) -> list[Dimension]: ...

  def __getitem__(self, key: SupportsIndex | slice) -> Dimension | list[Dimension]:
    return self._dims[key]

  def __iter__(self) -> Iterator[Dimension]:
    return iter(self._dims)

  def __contains__(self, d: object) -> bool:
    return d in self._dims

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Shape) and self._dims == other._dims

  def __ne__(self, other: object) -> bool:
    return not self == other

  def __hash__(self) -> int:
    return hash(tuple(self._dims))

  def __add__(self, other: Shape | Dimension | list[Dimension]) -> Shape:
    if isinstance(other, Shape):
      other = other.dims
    elif isinstance(other, Dimension):
      other = [other]
    elif not isinstance(other, list):
      raise DimensionTypeError(
        f"{self} + {other!r}: add a Shape, a Dimension or a list of dimensions, not "
        f"{type(other).__name__}"
      )
    return Shape(self._dims + other)

  def __sub__(self, other: Shape | Dimension | Iterable[Dimension] | None) -> Shape:
    if other is None:
      return self
    if not isinstance(other, Iterable) or hasattr(other, "dtype"):
      raise DimensionTypeError(
        f"{self} - {other!r}: subtract a Shape, a Dimension or a list of dimensions, not "
        f"{type(other).__name__}"
      )
    if isinstance(other, Dimension):
      if other not in self._dims:
        raise no_such_dimension(f"{self} - {other.name}={other.size}", other, self)
      other = [other]
    others = list(other)
    return Shape([d for d in self._dims if d not in others])

  def __repr__(self) -> str:
    return self.to_string


class _HasShape(Protocol):
  """Structural type: a tensor, which is defined in a higher package."""

  @property
  def shape(self) -> Shape: ...


def no_such_dimension(what: str, dim: Dimension | str, owner: Shape | _HasShape) -> DimensionError:
  """Builds the error for a dimension that a shape or tensor does not have.

  Args:
    what: name of the operation or function, or "".
    dim: the `Dimension`, or its name.
    owner: the `Shape`, or the tensor, that does not have it.
  """
  shape = owner if isinstance(owner, Shape) else owner.shape
  asked = repr(dim) if isinstance(dim, str) else f"{dim.name}={dim.size}"
  name = dim if isinstance(dim, str) else dim.name
  close = difflib.get_close_matches(name, shape.dimension_names, 1)
  found = [f"{d.name}={d.size}" for d in shape if d.name in close]
  hint = f"; did you mean {found[0]}?" if found else ""
  prefix = f"{what}: " if what else ""
  return DimensionError(f"{prefix}there is no dimension {asked} in {owner}{hint}")


ShapeLike: TypeAlias = Shape | Sequence[DimensionLike] | str


def _dims_to_string(dims: Iterable[Dimension]) -> str:
  return ", ".join(f"{d.name}={d.size}" for d in dims)


@overload
def convert_to_shape(x: None) -> None: ...
@overload
def convert_to_shape(x: ShapeLike) -> Shape: ...


def convert_to_shape(x: ShapeLike | None) -> Shape | None:
  """Turns a `Shape`, a list of dimensions, or text like "rows:2,cols:4" into a `Shape`.

  Args:
    x: any of these; None stays None.
  """
  if x is None or isinstance(x, Shape):
    return x
  if isinstance(x, str):
    pairs = []
    for name, size in parse_pairs(x, "shape"):
      try:
        pairs.append((name, int(size)))
      except ValueError:
        raise DimensionError(
          f"shape {x!r}: the size of {name!r} must be an integer, got {size!r}"
        ) from None
    return Shape(pairs)
  return Shape(x)


@overload
def list_product(l: Iterable[int]) -> int: ...
@overload
def list_product(l: Iterable[float]) -> float: ...


def list_product(l: Iterable[float]) -> float:
  """Product of the numbers in `l`, 1 for none."""
  product: float = 1
  for v in l:
    product *= v
  return product


def is_subsequence(short_seq: kinds.AnySequence, long_seq: kinds.AnySequence) -> bool:
  """True if `short_seq` occurs in `long_seq` in order, not necessarily contiguously."""
  rest = iter(long_seq)
  return all(any(s == x for x in rest) for s in short_seq)


def verify_no_new_dims(
  input_shapes: Iterable[Shape], output_shape: Shape | Sequence[DimensionLike]
) -> None:
  """Raises `ShapeError` if the output has a dimension that no input has.

  Args:
    input_shapes: a list of `Shape`s.
    output_shape: a `Shape`.
  """
  input_shapes = list(input_shapes)
  known = {d for s in input_shapes for d in s}
  for d in output_shape:
    if d not in known:
      d = convert_to_dimension(d)
      shapes = ", ".join(s.to_string for s in input_shapes)
      raise ShapeError(
        f"output dimension {d.name}={d.size} of {output_shape} is in none of the inputs' shapes: "
        f"{shapes}"
      )


def combined_dimension(dims: Sequence[Dimension], name: str | None = None) -> Dimension:
  """A dimension as large as all of `dims` together, named as the first by default.

  Args:
    dims: a list of dimensions.
    name: name of the result.
  """
  if not dims:
    raise DimensionError("combined_dimension needs at least one dimension")
  return Dimension(dims[0].name if name is None else name, list_product(d.size for d in dims))


def anonymous_shape(shape: ShapeLike) -> Shape:
  """The shape with its dimensions renamed to `_anonymous_0`, `_anonymous_1`, ..."""
  shape = convert_to_shape(shape)
  return Shape([Dimension(f"_anonymous_{i}", d.size) for i, d in enumerate(shape)])


def shape_union(shapes: Iterable[Shape]) -> Shape:
  """All distinct dimensions of the shapes, in order of first appearance."""
  dims: list[Dimension] = []
  for shape in shapes:
    for d in shape:
      if d not in dims:
        dims.append(d)
  return Shape(dims)
