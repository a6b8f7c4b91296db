"""Costs of operations under any assignment, from as few lowerings as possible.

Operations that are alike are lowered once, so that one layer of a model stands for all. A piece
that exchanges nothing but sums is the same computation whatever the sizes of the mesh axes and of
dimensions, on slices of other sizes, and whatever the names of dimensions. Its figures (FLOPs,
bytes) are linear in the numbers of elements of the slices that it reads, makes and sums: they
follow from examples that were lowered. Of each operation that is not alike to others, and of each
way to split it, one piece is lowered, which is an example or checks that the figures do follow; if
not, and where there are other exchanges, every one is lowered.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.operations.reshape import ReshapeOperation
from mesh_tensorflow.operations.variables import Variable, VariableDType
from mesh_tensorflow.planning.cost_model import Work
from mesh_tensorflow.planning.lowering import (
  PendingSum,
  Piece,
  Prober,
  State,
  inner_operations,
)
from mesh_tensorflow.planning.mesh_impl import Collective, allreduce_bytes
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor, reads

# Attributes that identify an operation, and do not say what it does.
_NAMES = frozenset(
  "_name full_name _mesh _inputs _outputs _initializer _stored _life _trainable _splittable_dims"
  " _unsplittable_dims".split()
)
# Attributes whose number no cost depends on: a factor, a summand, the value of a constant.
_AMOUNTS = frozenset(["_scalar", "_value"])

# Of slices with fewer elements along a dimension others do not tell.
_FEW = 16


def kind_of(op: Operation) -> Hashable:
  """Key that is equal for operations whose lowerings cost the same.

  It has the class, shapes and dtypes, which inputs are the same tensor, and every attribute, but
  for amounts. An attribute that cannot be compared by value makes the key unique to the operation.

  Args:
    op: an operation.
  """
  places: dict[Tensor, int] = {}
  for x in reads(op) + op.outputs:
    places.setdefault(x, len(places))
  tensors = tuple((places[x], x.shape, x.dtype) for x in reads(op) + op.outputs)
  attributes = tuple(
    (name, type(value) if _is_amount(name, value) else _value(value, places))
    for name, value in sorted(vars(op).items())
    if name not in _NAMES
  )
  return (type(op), len(op.inputs), tensors, attributes)


def _is_amount(name: str, value: Any) -> bool:
  return name in _AMOUNTS and isinstance(value, (int, float, complex, np.generic))


def _value(value: Any, places: Mapping[Tensor, int], depth: int = 0) -> Hashable:
  if value is None or isinstance(
    value, (bool, int, float, complex, str, bytes, Dimension, Shape, tf.DType, VariableDType, type)
  ):
    return (type(value).__name__, value)
  if depth > 8:
    return ("object", id(value))
  inside = functools.partial(_value, places=places, depth=depth + 1)
  if isinstance(value, Tensor):
    return ("tensor", places.get(value, -1), value.shape, value.dtype)
  if isinstance(value, Variable):
    return ("variable", value.shape, value.dtype)
  if isinstance(value, Mesh):
    return ("mesh",)
  if isinstance(value, (list, tuple)):
    return (type(value).__name__, *map(inside, value))
  if isinstance(value, (set, frozenset)):
    return ("set", frozenset(map(inside, value)))
  if isinstance(value, Mapping):
    return ("dict", frozenset((inside(k), inside(v)) for k, v in value.items()))
  if isinstance(value, np.ndarray):
    return (
      "array",
      value.shape,
      value.dtype.str,
      value.tobytes() if value.size < 100 else id(value),
    )
  if tf.is_tensor(value) and isinstance(getattr(value, "shape", None), tf.TensorShape):
    return ("tf", tuple(value.shape), value.dtype)  # No cost depends on what is in it.
  if isinstance(value, functools.partial):
    return ("partial", inside(value.func), inside(value.args), inside(value.keywords))
  if isinstance(value, types.MethodType):
    return ("method", inside(value.__func__), id(value.__self__))
  alike_by = getattr(type(value), "alike_by", None)
  if alike_by is not None:
    return (type(value).__name__, *(inside(getattr(value, name)) for name in alike_by))
  if isinstance(value, types.FunctionType):
    # One by one: a list made here is another object each time, which nothing is alike to.
    cells = [inside(c.cell_contents) for c in value.__closure__ or () if _is_filled(c)]
    defaults = [inside(x) for x in value.__defaults__ or ()]
    keywords = [(name, inside(x)) for name, x in (value.__kwdefaults__ or {}).items()]
    return ("function", value.__code__, tuple(cells), tuple(defaults), tuple(keywords))
  return ("object", id(value))


def _is_filled(cell: types.CellType) -> bool:
  try:
    return cell.cell_contents is not cell
  except ValueError:  # A name that is not bound yet.
    return False


def _of_other_names(
  key: Any, places: Mapping[str, int], sizes: Mapping[Dimension, int]
) -> Hashable:
  """The key of a kind, with numbers in place of the names and sizes of dimensions."""
  again = functools.partial(_of_other_names, places=places, sizes=sizes)
  if isinstance(key, Shape):
    return ("shape", *map(again, key.dims))
  if isinstance(key, Dimension):  # A tuple, too.
    return ("dimension", places.get(key.name, key.name), sizes.get(key, key.size))
  if type(key) in (tuple, frozenset):
    return type(key)(map(again, key))  # type: ignore[no-any-return]
  return places.get(key, key) if isinstance(key, str) else key


# (dimension name, mesh axis) pairs, by name.
Assignment = tuple[tuple[str, int], ...]


class Examples:
  """Figures that are linear in amounts, as far as examples tell.

  All numbers are integers, and nothing is rounded.
  """

  def __init__(self) -> None:
    self._figures: list[Sequence[int]] = []
    # Amounts of linearly independent examples after elimination: the column that the rows below
    # have zeros in, the row, and the multiples of the examples that it is the sum of.
    self._rows: list[tuple[int, list[int], list[int]]] = []
    # Whether figures that follow from an example were found to be right.
    self._trusted: list[bool] = []

  def _eliminated(self, amounts: Sequence[int]) -> tuple[list[int], list[int], int]:
    """A multiple of some amounts less multiples of the examples, these, and the multiple."""
    left, multiples, scale = list(amounts), [0] * len(self._rows), 1
    for column, row, combined in self._rows:
      if factor := left[column]:
        unit = row[column]
        left = [unit * x - factor * y for x, y in zip(left, row)]
        multiples = [
          unit * x + factor * y for x, y in itertools.zip_longest(multiples, combined, fillvalue=0)
        ]
        scale *= unit
    return left, multiples, scale

  def _combined(self, multiples: Sequence[int], scale: int) -> list[int] | None:
    sums = [sum(map(operator.mul, multiples, column)) for column in zip(*self._figures)]
    return None if any(n % scale for n in sums) else [n // scale for n in sums]

  def at(self, amounts: Sequence[int]) -> list[int] | None:
    """The figures at some amounts; None if they do not follow, or from what was never checked."""
    left, multiples, scale = self._eliminated(amounts)
    used = [trusted for n, trusted in zip(multiples, self._trusted) if n]
    if any(left) or not (all(used) or len(used) == 1):
      return None
    return self._combined(multiples, scale)

  def add(self, amounts: Sequence[int], figures: Sequence[int]) -> bool:
    """Adds an example; returns whether it agrees with the others."""
    left, multiples, scale = self._eliminated(amounts)
    if not any(left):
      agrees = self._combined(multiples, scale) == list(figures)
      if agrees and sum(map(bool, multiples)) > 1:
        self._trusted = [t or n != 0 for t, n in zip(self._trusted, multiples)]
      return agrees
    column = next(i for i, n in enumerate(left) if n)
    combined = [*(-n for n in multiples), scale]
    common = math.gcd(*left, *combined)
    self._rows.append((column, [n // common for n in left], [n // common for n in combined]))
    self._figures.append(figures)
    self._trusted.append(False)
    return True


class Family:
  """Kinds that do the same on slices of other sizes, of dimensions of other names.

  Attributes:
    members: numbers of the kinds of which a piece has shown that they do.
    first: by assignment, and states of the tensors read, the piece that was lowered first; None
      where those of other sizes do not follow from examples.
    ordered: those of the same that depend on the order of the mesh axes: they exchange something.
  """

  def __init__(self) -> None:
    self.members: set[int] = set()
    self.first: dict[Hashable, Piece | None] = {}
    self.ordered: set[Hashable] = set()
    self._examples: collections.defaultdict[Hashable, Examples] = collections.defaultdict(Examples)

  def examples_for(self, first: Piece, key: Hashable) -> Examples:
    """The figures of the pieces of an assignment: where nothing is exchanged, of all alike."""
    return self._examples[_structure(first), None if first.is_local else key]


@dataclasses.dataclass(eq=False)
class Kind:
  """Operations that are alike.

  Attributes:
    operation: one of them.
    dims: sizes of the dimensions of the tensors it reads, makes, and has inside, and of its
      variables, by name; in an order that is the same for all of a family.
    number: of the kind.
    in_loop: whether they draw random numbers anew in each iteration of a loop.
    shared: whether other operations read their inputs, too, where that matters.
    on_all_axes: whether they exchange over mesh axes that split nothing of them, too.
    amounts: sets of dimensions: what they compute may have the elements of a slice of these.
    family: the kinds whose figures tell those of this one.
  """

  operation: Operation
  dims: dict[str, set[int]]
  number: int
  in_loop: bool
  shared: bool
  on_all_axes: bool
  amounts: list[frozenset[Dimension]]
  family: Family

  @functools.cached_property
  def names(self) -> tuple[str, ...]:
    """The names of `dims`, sorted."""
    return tuple(sorted(self.dims))

  @functools.cached_property
  def places(self) -> dict[str, int]:
    """The number of each dimension, by name."""
    return {name: i for i, name in enumerate(self.dims)}

  def smallest_factor(self, names: Sequence[str]) -> int:
    """Smallest number of parts above 1 that all sizes of some dimensions divide into; 0 if none."""
    common = math.gcd(*(n for d in names for n in self.dims[d]))
    return next((p for p in range(2, common + 1) if common % p == 0), 0)

  def key(self, pattern: Assignment, states: tuple[State, ...]) -> Hashable:
    """Key of an assignment, and states of the tensors read, for all of the family."""
    return tuple(sorted((self.places[d], a) for d, a in pattern)), states

  def elements(self, parts: Mapping[str, int]) -> list[int]:
    """The number of elements of each of the `amounts`.

    Args:
      parts: by name of a dimension into how many it is split.
    """
    return [math.prod(d.size // parts.get(d.name, 1) for d in dims) for dims in self.amounts]


def _shapes_of(op: Operation) -> list[Shape]:
  """The shapes of the tensors that an operation reads and makes, and of its variables.

  On the layout of the latter it depends without reading them whole.
  """
  held = [v for x in vars(op).values() for v in (x if isinstance(x, (list, tuple)) else [x])]
  return [x.shape for x in reads(op) + op.outputs] + [
    v.shape for v in held if isinstance(v, Variable)
  ]


def _amounts(op: Operation, shapes: Sequence[Shape]) -> list[frozenset[Dimension]]:
  """The dimensions of what an operation may compute: of one element, of tensors, of all of them.

  Where it has attributes that are dimensions, tensors without these are among them: sums, say.
  Random numbers are made of indices along some of their dimensions; updates take means of some.
  """
  whole = [frozenset(shape.dims) for shape in shapes]
  parts = list[frozenset[Dimension]]()
  if getattr(op, "draws_random_numbers", False) or not op.outputs:
    counts = range(1, max((len(dims) for dims in whole), default=0))
    # Of shapes, not sets: in an order that is the same for all of a family, and in every process.
    some = (itertools.combinations(x.dims, n) for x in shapes for n in counts)
    parts += [frozenset(c) for of_shape in some for c in of_shape]
  for value in vars(op).values():
    apart = frozenset([value] if isinstance(value, Dimension) else _dimensions_in(value))
    parts += [dims - apart for dims in whole] if apart else []
  every = frozenset[Dimension]().union(*whole)
  return list(dict.fromkeys([frozenset(), *whole, every, *parts]))


def _dimensions_in(value: Any) -> list[Dimension]:
  is_list = isinstance(value, (list, tuple, Shape)) and all(isinstance(d, Dimension) for d in value)
  return list(value) if is_list else []


class Pieces:
  """The pieces of the operations of a program."""

  def __init__(self) -> None:
    self.prober = Prober()
    # Names of dimensions that may be split unevenly.
    self.uneven: frozenset[str] = frozenset()
    self.kinds: dict[Hashable, Kind] = {}
    self._lowered: dict[Hashable, Piece] = {}
    self._families: dict[Hashable, Family] = {}
    # By kind and states: whether the sums that are pending are executed, and nothing else differs.
    self._sums_first: dict[Hashable, bool] = {}
    self._checked: set[Hashable] = set()
    self._found: dict[Hashable, Piece] = {}
    self._found_to_resume: dict[tuple[int, int], bool] = {}

  def kind(self, op: Operation, in_loop: bool = False, shared: bool = False) -> Kind:
    """The kind of an operation.

    Args:
      op: an operation.
      in_loop: whether it is inside of a loop that is opened.
      shared: whether other operations read its inputs, too.
    """
    in_loop = in_loop and getattr(op, "draws_random_numbers", False)
    # A reshape sums only the part of a pending sum that it needs, if nobody needs the rest.
    shared = shared and isinstance(op, ReshapeOperation)
    key = (kind_of(op), in_loop, shared)
    kind = self.kinds.get(key)
    if kind is None:
      dims: dict[str, set[int]] = {}
      every = [op, *inner_operations(op)]
      everywhere = any(getattr(one, "exchanges_over_whole_mesh", False) for one in every)
      shapes = [shape for one in every for shape in _shapes_of(one)]
      for d in itertools.chain.from_iterable(shapes):
        dims.setdefault(d.name, set()).add(int(d.size))
      self.kinds[key] = kind = Kind(
        *(op, dims, len(self.kinds), in_loop, shared, everywhere),
        *(_amounts(op, shapes), Family()),
      )
      # To a reshape, places of elements matter, whose numbers depend on all sizes.
      if not isinstance(op, ReshapeOperation):
        kind.family = self._families.setdefault(_family_key(key, kind), kind.family)
    return kind

  def piece(
    self, kind: Kind, assignment: Assignment, sizes: Sequence[int], states: tuple[State, ...]
  ) -> Piece:
    """The piece of an operation of a kind.

    Args:
      kind: the kind.
      assignment: of its dimensions; sorted.
      sizes: of all mesh axes.
      states: of the tensors that it reads, whose mesh axes are numbered as those of `sizes`.

    Returns:
      The piece; its mesh axes are numbered likewise.
    """
    if any(s and s.executed for s in states):
      # To most operations a sum that has been executed is a tensor like others.
      states = tuple(
        None if s and s.executed and not self._resumes(kind, i) else s for i, s in enumerate(states)
      )
    used = sorted({a for _, a in assignment} | {a for s in states if s for a in s.axes})
    if kind.on_all_axes:
      used = sorted({*used, *(a for a, n in enumerate(sizes) if n > 1)})
    if any(n % sizes[a] for d, a in assignment if d in self.uneven for n in kind.dims[d]):
      return self._split_unevenly(kind, assignment, sizes, states)
    key = (kind.number, assignment, tuple(sizes[a] for a in used), states)
    if key not in self._found:
      self._found[key] = self._find(kind, assignment, sizes, states, used)
    return self._found[key]

  def _split_unevenly(
    self, kind: Kind, assignment: Assignment, sizes: Sequence[int], states: tuple[State, ...]
  ) -> Piece:
    """As `piece`. Nothing follows from other sizes here: each piece is lowered."""
    key = ("uneven", kind.number, assignment, tuple(sizes), states)
    if key not in self._found:
      self._found[key] = self.prober.piece(
        kind.operation, sizes, assignment, states, kind.in_loop, kind.shared, self.uneven
      )
    return self._found[key]

  def _resumes(self, kind: Kind, i: int) -> bool:
    """True if the operations take slices before their sum from a tensor that is summed already.

    Args:
      kind: of the operations.
      i: number of the tensor that they read.
    """
    key = (kind.number, i)
    if key not in self._found_to_resume:
      count = len(reads(kind.operation))
      alone = tuple(PendingSum((0,), True) if j == i else None for j in range(count))
      among = tuple(PendingSum((0,), j == i) for j in range(count))
      self._found_to_resume[key] = any(
        piece.problem is not None
        or any(piece.states)
        or any(k == "reduced" and n == i for k, n in piece.buffers)
        for piece in (self._lower(kind, (), (2,), given) for given in (alone, among))
      )
    return self._found_to_resume[key]

  def _find(
    self,
    kind: Kind,
    assignment: Assignment,
    sizes: Sequence[int],
    states: tuple[State, ...],
    used: list[int],
  ) -> Piece:
    if any(states):
      piece = self._of_sums(kind, assignment, sizes, states, used)
      if piece is not None:
        return piece
    # Without exchanges other than sums the order of the mesh axes does not matter.
    split = dict(assignment)
    order = list(dict.fromkeys([split[d] for d in kind.dims if d in split] + _axes(states) + used))
    pattern, given = _renumber(assignment, states, order)
    if kind.key(pattern, given) in kind.family.ordered:
      order = used
      pattern, given = _renumber(assignment, states, order)
    piece = self._of_family(kind, pattern, tuple(sizes[a] for a in order), given)
    if piece.problem is None and not _only_sums(piece) and order != used:
      kind.family.ordered.add(kind.key(pattern, given))
      return self._find(kind, assignment, sizes, states, used)
    return _numbered(piece, order, sizes)

  def _of_family(
    self, kind: Kind, pattern: Assignment, sizes: tuple[int, ...], states: tuple[State, ...]
  ) -> Piece:
    """The piece: from examples, or lowered."""
    parts = {d: sizes[a] for d, a in pattern}
    family, amounts = kind.family, kind.elements(parts)
    # Some products of few rows or columns are computed otherwise.
    few = [i for d, i in kind.places.items() if min(kind.dims[d]) // parts.get(d, 1) < _FEW]
    key = (kind.key(pattern, states), tuple(few))
    first = family.first.get(key)
    if pattern and first is not None and kind.number in family.members:
      figures = family.examples_for(first, key).at(amounts)
      if figures is not None:
        return _with_figures(first, figures)
    piece = self._lower(kind, pattern, sizes, states)
    if key not in family.first:
      family.first[key] = first = None if kind.on_all_axes or not _only_sums(piece) else piece
    if first is None:
      return piece
    examples = family.examples_for(first, key)
    if _structure(piece) == _structure(first) and examples.add(amounts, _figures(piece)):
      family.members.add(kind.number)
    elif family.members - {kind.number}:
      kind.family = Family()
      return self._of_family(kind, pattern, sizes, states)
    else:
      family.first[key] = None
    return piece

  def _lower_on(
    self,
    kind: Kind,
    assignment: Assignment,
    sizes: Sequence[int],
    states: tuple[State, ...],
    used: list[int],
  ) -> Piece:
    """The piece as it is lowered, on the mesh axes that are used alone."""
    pattern, given = _renumber(assignment, states, used)
    return _numbered(self._lower(kind, pattern, tuple(sizes[a] for a in used), given), used, sizes)

  def _of_sums(
    self,
    kind: Kind,
    assignment: Assignment,
    sizes: Sequence[int],
    states: tuple[State, ...],
    used: list[int],
  ) -> Piece | None:
    """The piece of an operation that executes the sums it reads, from that without sums.

    Returns:
      The piece; None if the operation does something else with them.
    """
    axes = _axes(states)
    executed = any(s and s.executed for s in states)
    if executed or kind.on_all_axes or any(sizes[a] == 1 for a in axes):
      return None
    _, given = _renumber((), states, axes)
    key = (kind.number, given)
    if key not in self._sums_first:
      on_pending = (2,) * len(axes)
      lowered = self._lower(kind, (), on_pending, given)
      self._sums_first[key] = lowered == self._with_sums(kind, (), on_pending, given)
    if not self._sums_first[key]:
      return None
    piece = self._with_sums(kind, assignment, sizes, states)
    if assignment and key not in self._checked:
      self._checked.add(key)
      if piece != self._lower_on(kind, assignment, sizes, states, used):
        self._sums_first[key] = False
        return None
    return piece

  def _with_sums(
    self, kind: Kind, assignment: Assignment, sizes: Sequence[int], states: tuple[State, ...]
  ) -> Piece:
    """The piece without sums, and the execution of those that are pending."""
    plain = self.piece(kind, assignment, sizes, (None,) * len(states))
    if plain.problem is not None:
      return plain
    split, read = dict(assignment), reads(kind.operation)
    executed = {}
    for i, (x, state) in enumerate(zip(read, states)):
      if state and read.index(x) == i:
        parts = math.prod(sizes[split[d.name]] for d in x.shape if d.name in split)
        # Booleans travel as int32.
        element = 4 if x.dtype == tf.bool else x.dtype.size
        executed[i] = int(x.shape.size) // parts * element
    buffers = [
      ("reduced", n) if (k, n in executed) == ("input", True) else (k, n) for k, n in plain.buffers
    ]
    return dataclasses.replace(plain, executed=executed, buffers=buffers)

  def _lower(
    self, kind: Kind, pattern: Assignment, sizes: tuple[int, ...], states: tuple[State, ...]
  ) -> Piece:
    key = (kind.number, pattern, sizes, states)
    if key not in self._lowered:
      self._lowered[key] = self.prober.piece(
        kind.operation, sizes, pattern, states, kind.in_loop, kind.shared
      )
    return self._lowered[key]


def _family_key(key: tuple[Hashable, ...], kind: Kind) -> Hashable:
  """Key that is equal for kinds that do the same on slices of other sizes, of other names."""
  sizes = {Dimension(d, n): i for d in kind.dims for i, n in enumerate(sorted(kind.dims[d]))}
  splittable = frozenset(kind.operation.splittable_dims)
  whole = (*key, splittable, tuple(kind.amounts))
  return _of_other_names(whole, kind.places, sizes)


def _axes(states: Sequence[State]) -> list[int]:
  """The mesh axes of pending sums."""
  return list(dict.fromkeys(a for s in states if s for a in s.axes))


def _only_sums(piece: Piece) -> bool:
  """True if a piece suits its layout and exchanges nothing but sums."""
  return piece.problem is None and all(
    c.kind == "allreduce" for cost in piece.costs for c in cost.collectives
  )


def _renumber(
  assignment: Assignment, states: tuple[State, ...], order: Sequence[int]
) -> tuple[Assignment, tuple[State, ...]]:
  new = {a: i for i, a in enumerate(order)}
  return (
    tuple((d, new[a]) for d, a in assignment),
    tuple(s and s._replace(axes=tuple(new[a] for a in s.axes)) for s in states),
  )


def _numbered(piece: Piece, order: Sequence[int], sizes: Sequence[int]) -> Piece:
  """The piece with mesh axis i named `order[i]`.

  Args:
    piece: the piece.
    order: for each of its mesh axes the number of one of the mesh.
    sizes: of all axes of the mesh.
  """

  def on_axes(c: Collective) -> Collective:
    axes = tuple(order[a] for a in c.mesh_axes)
    over = {order[a]: n for a, n in c.bytes_over.items()}
    if c.kind == "allreduce":
      over = allreduce_bytes(c.slice_bytes, axes, sizes)
    return dataclasses.replace(c, mesh_axes=axes, bytes_over=over)

  if piece.is_local and all(a == i for i, a in enumerate(order)):
    return piece
  return dataclasses.replace(
    piece,
    states=[s and s._replace(axes=tuple(order[a] for a in s.axes)) for s in piece.states],
    costs=[
      dataclasses.replace(cost, collectives=[on_axes(c) for c in cost.collectives])
      for cost in piece.costs
    ],
  )


def _figures(piece: Piece) -> list[int]:
  """All figures of a piece that depend on sizes, in a fixed order."""
  result: list[int] = []
  for cost in piece.costs:
    for p in cost.work.products:
      result += [p.flops, p.bytes]
    result.append(cost.work.traffic)
    result += [c.slice_bytes for c in cost.collectives]
  result += [n for kind, n in piece.buffers if kind == "new"]
  result += [n for _, n in sorted(piece.executed.items())]
  result += [*piece.pending, piece.inside, piece.inputs]
  return result


def _structure(piece: Piece) -> Hashable:
  """All of a piece that does not depend on sizes."""
  works = tuple(
    (
      c.times,
      c.work.launches,
      tuple((p.dtype, p.channels) for p in c.work.products),
      tuple((x.kind, x.reduction, x.mesh_axes) for x in c.collectives),
    )
    for c in piece.costs
  )
  buffers = tuple((kind, None if kind == "new" else n) for kind, n in piece.buffers)
  return (works, buffers, tuple(sorted(piece.executed)), tuple(piece.same))


def _with_figures(piece: Piece, of_sizes: Sequence[int]) -> Piece:
  """The piece with other figures; what sums send over each mesh axis is still that of its own."""
  figures = iter(of_sizes)
  costs = []
  for cost in piece.costs:
    products = [p._replace(flops=next(figures), bytes=next(figures)) for p in cost.work.products]
    work = Work(products, next(figures), cost.work.launches)
    collectives = [dataclasses.replace(c, slice_bytes=next(figures)) for c in cost.collectives]
    costs.append(dataclasses.replace(cost, work=work, collectives=collectives))
  return dataclasses.replace(
    piece,
    costs=costs,
    buffers=[(kind, next(figures)) if kind == "new" else (kind, n) for kind, n in piece.buffers],
    executed={i: next(figures) for i in sorted(piece.executed)},
    pending=[next(figures) for _ in piece.pending],
    inside=next(figures),
    inputs=next(figures),
  )
