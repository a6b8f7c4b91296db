"""Costs of operations under any assignment, from as few lowerings as possible.

Operations that are alike are lowered once, so that one layer of a model stands for all. A piece
without exchanges is the same computation whatever the sizes of the mesh axes, on slices of other
sizes. Each of its figures (FLOPs, bytes) is then a sum of products of 1 / (parts of a dimension),
and follows from the pieces in which each dimension is whole or split. The first one that was
lowered checks that it does; if not, and where there are exchanges, every one is lowered. What
computes each element alike does as much for each, on slices of any shape: such operations share
two pieces, and one more of each kind checks that they do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.operations.broadcasting import BinaryOpWithBroadcasting
from mesh_tensorflow.operations.elementwise import CastBeforeSumOperation
from mesh_tensorflow.operations.reshape import ReshapeOperation
from mesh_tensorflow.operations.scalar import ScalarOperation
from mesh_tensorflow.operations.slicewise import GenericGradOperation, SlicewiseOperation
from mesh_tensorflow.operations.variables import Variable, VariableDType
from mesh_tensorflow.planning.cost_model import Work
from mesh_tensorflow.planning.lowering import (
  PendingSum,
  Piece,
  Prober,
  State,
  inner_operations,
)
from mesh_tensorflow.planning.mesh_impl import Collective
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor, is_of_one_shape, reads

# Attributes that identify an operation, and do not say what it does.
_NAMES = frozenset(
  "_name full_name _mesh _inputs _outputs _initializer _stored _life _trainable _splittable_dims"
  " _unsplittable_dims".split()
)
# Attributes whose number no cost depends on: a factor, a summand, the value of a constant.
_AMOUNTS = frozenset(["_scalar", "_value"])


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


def _is_elementwise(op: Operation) -> bool:
  """True if an operation computes each element from those in its place, and from scalars."""
  if not is_of_one_shape(op):
    return False
  if isinstance(op, SlicewiseOperation):
    names = op.outputs[0].shape.dimension_names
    return not isinstance(op, GenericGradOperation) and set(names) <= op.splittable_dims
  return isinstance(op, (BinaryOpWithBroadcasting, CastBeforeSumOperation, ScalarOperation))


def _without_shape(key: Any, shape: Shape) -> Hashable:
  """The key of a kind, with marks in place of a shape, its sizes and its dimensions."""
  dims = tuple(("Dimension", d) for d in shape)
  marks: dict[Hashable, str] = {
    ("Shape", shape): "its shape",
    ("tuple", *(("int", n) for n in shape.to_integer_list)): "its sizes",
    ("list", *dims): "its dimensions",
    ("tuple", *dims): "its dimensions",
    ("set", frozenset(dims)): "its dimensions, in any order",
  }

  def marked(key: Any) -> Hashable:
    if isinstance(key, Shape):
      return "its shape" if key == shape else key
    if type(key) not in (tuple, frozenset):  # A `Dimension` is a tuple, too.
      return key  # type: ignore[no-any-return]
    return marks.get(key) or type(key)(map(marked, key))

  return marked(key)


# (dimension name, mesh axis) pairs, by name.
Assignment = tuple[tuple[str, int], ...]


@dataclasses.dataclass(eq=False)
class Kind:
  """Operations that are alike.

  Attributes:
    operation: one of them.
    dims: sizes of the dimensions of the tensors it reads, makes, and has inside, and of its
      variables, by name.
    number: of the kind.
    in_loop: whether they draw random numbers anew in each iteration of a loop.
    shared: whether other operations read their inputs, too, where that matters.
    on_all_axes: whether they exchange over mesh axes that split nothing of them, too.
    elementwise: those that compute elements in the same way, of any shape; None if it is not so.
  """

  operation: Operation
  dims: dict[str, set[int]]
  number: int
  in_loop: bool
  shared: bool = False
  on_all_axes: bool = False
  elementwise: Elementwise | None = None

  @functools.cached_property
  def names(self) -> tuple[str, ...]:
    """The names of `dims`, sorted."""
    return tuple(sorted(self.dims))

  def smallest_factor(self, names: Sequence[str]) -> int:
    """Smallest number of parts above 1 that all sizes of some dimensions divide into; 0 if none."""
    common = math.gcd(*(n for d in names for n in self.dims[d]))
    return next((p for p in range(2, common + 1) if common % p == 0), 0)


@dataclasses.dataclass(eq=False)
class Elementwise:
  """Kinds that do the same with each element of a slice, whatever its shape.

  Attributes:
    leader: the first of them that has a dimension which can be split.
    lines: by states of the tensors read two pieces of the leader, with the elements of a slice;
      None where figures are not linear in these.
    checked: the kinds, with states, that were compared with them.
  """

  leader: Kind | None = None
  lines: dict[tuple[State, ...], tuple[tuple[int, Piece], tuple[int, Piece]] | None] = (
    dataclasses.field(default_factory=dict)
  )
  checked: set[Hashable] = dataclasses.field(default_factory=set)


def _variables_of(op: Operation) -> list[Variable]:
  """The variables that an operation has, whose layout it depends on without reading them whole."""
  held = [v for x in vars(op).values() for v in (x if isinstance(x, (list, tuple)) else [x])]
  return [v for v in held if isinstance(v, Variable)]


class Pieces:
  """The pieces of the operations of a program."""

  def __init__(self) -> None:
    self.prober = Prober()
    # Names of dimensions that may be split unevenly.
    self.uneven: frozenset[str] = frozenset()
    self.kinds: dict[Hashable, Kind] = {}
    self._lowered: dict[Hashable, Piece] = {}
    # By kind, pattern and states: the sizes and the piece that was lowered first; None where
    # sizes do not follow from others.
    self._first: dict[Hashable, tuple[tuple[int, ...], Piece] | None] = {}
    self._checked: set[Hashable] = set()
    # By kind and states: whether the sums that are pending are executed, and nothing else differs.
    self._sums_first: dict[Hashable, bool] = {}
    self._found: dict[Hashable, Piece] = {}
    self._elementwise: dict[Hashable, Elementwise] = {}
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
      for one in every:
        shapes = [x.shape for x in reads(one) + one.outputs]
        for shape in [*shapes, *(v.shape for v in _variables_of(one))]:
          for d in shape:
            dims.setdefault(d.name, set()).add(int(d.size))
      self.kinds[key] = kind = Kind(op, dims, len(self.kinds), in_loop, shared, everywhere)
      if _is_elementwise(op):
        group = self._elementwise.setdefault(
          _without_shape(key[0], op.outputs[0].shape), Elementwise()
        )
        kind.elementwise = group
        if group.leader is None and any(kind.smallest_factor([d]) for d in kind.dims):
          group.leader = kind
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
    if kind.elementwise is not None:
      piece = self._of_elements(kind, kind.elementwise, assignment, sizes, states)
      if piece is not None:
        return piece
    if any(states):
      piece = self._of_sums(kind, assignment, sizes, states, used)
      if piece is not None:
        return piece
    # Without exchanges the order of the mesh axes does not matter.
    order: list[int] = []
    for a in [a for _, a in assignment] + [a for s in states if s for a in s.axes] + used:
      if a not in order:
        order.append(a)
    pattern, given = _renumber(assignment, states, order)
    key = (kind.number, pattern, given)
    n = tuple(sizes[a] for a in order)
    if key not in self._first:
      piece = self._lower(kind, pattern, n, given)
      self._first[key] = (n, piece) if piece.is_local else None
      if piece.problem:
        return piece
    first = self._first[key]
    if first is not None and first[0] != n:
      if key not in self._checked:
        self._checked.add(key)
        if not self._follows(kind, pattern, given, n, *first):
          first = self._first[key] = None
      if first is not None:
        result = self._interpolate(kind, pattern, n, given)
        assert result is not None
        return _numbered(result, order)
    if first is not None:
      return _numbered(first[1], order)
    return self._lower_on(kind, assignment, sizes, states, used)

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
    return _numbered(self._lower(kind, pattern, tuple(sizes[a] for a in used), given), used)

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
    axes = list(dict.fromkeys(a for s in states if s for a in s.axes))
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

  def _of_elements(
    self,
    kind: Kind,
    group: Elementwise,
    assignment: Assignment,
    sizes: Sequence[int],
    states: tuple[State, ...],
  ) -> Piece | None:
    """The piece of an elementwise operation, from two of another; None if it does not follow."""
    split, pending = [a for _, a in assignment], {a for s in states if s for a in s.axes}
    if group.leader is None or len(set(split)) < len(split) or pending & set(split):
      return None
    order = list(dict.fromkeys(a for s in states if s for a in s.axes))
    _, given = _renumber((), states, order)
    if given not in group.lines:
      group.lines[given] = self._line(group.leader, given, len(order))
    if (line := group.lines[given]) is None:
      return None
    parts = math.prod(sizes[a] for a in split)
    elements = int(kind.operation.outputs[0].shape.size)
    # Of the leader are the two pieces: what checks it is a slice of another size.
    is_end = kind is group.leader and elements // parts in (line[0][0], line[1][0])
    if not is_end and (kind.number, given) not in group.checked:
      group.checked.add((kind.number, given))
      pattern: Assignment = ()
      into: tuple[int, ...] = (2,) * len(order)
      if kind is group.leader:
        pattern = tuple((d, len(order) + i) for i, (d, _) in enumerate(assignment))
        into = (*into, *(sizes[a] for a in split))
      lowered = self._lower(kind, pattern, into, given)
      if not _agree(_at(line, elements // (parts if pattern else 1)), lowered):
        group.lines[given] = None
        return None
    return _numbered(_at(line, elements // parts), order)

  def _line(
    self, leader: Kind, given: tuple[State, ...], axes: int
  ) -> tuple[tuple[int, Piece], tuple[int, Piece]] | None:
    """Two pieces of the leader of elementwise kinds, whole and split, if they are alike."""
    name, parts = next((d, n) for d in leader.dims if (n := leader.smallest_factor([d])))
    whole = self._lower(leader, (), (2,) * axes, given)
    split = self._lower(leader, ((name, axes),), (*(2,) * axes, parts), given)
    if not (whole.is_local and split.is_local and _structure(whole) == _structure(split)):
      return None
    elements = int(leader.operation.outputs[0].shape.size)
    return (elements, whole), (elements // parts, split)

  def _follows(
    self,
    kind: Kind,
    pattern: Assignment,
    given: tuple[State, ...],
    n: tuple[int, ...],
    lowered: tuple[int, ...],
    piece: Piece,
  ) -> bool:
    """True if interpolation from smaller mesh sizes predicts this piece exactly."""
    axes = sorted({a for _, a in pattern})
    if all(lowered[a] == _smallest_factor(kind, pattern, a) for a in axes):
      # One of those that others are computed from checks nothing.
      lowered, piece = n, self._lower(kind, pattern, n, given)
    check = self._interpolate(kind, pattern, lowered, given)
    return piece.is_local and check is not None and _agree(check, piece)

  def _lower(
    self, kind: Kind, pattern: Assignment, sizes: tuple[int, ...], states: tuple[State, ...]
  ) -> Piece:
    key = (kind.number, pattern, sizes, states)
    if key not in self._lowered:
      self._lowered[key] = self.prober.piece(
        kind.operation, sizes, pattern, states, kind.in_loop, kind.shared
      )
    return self._lowered[key]

  def _interpolate(
    self, kind: Kind, pattern: Assignment, sizes: tuple[int, ...], states: tuple[State, ...]
  ) -> Piece | None:
    """The piece for other sizes, from those with each axis of dimensions whole or split."""
    axes = sorted({a for _, a in pattern})
    pending = {a for s in states if s for a in s.axes}
    small = [_smallest_factor(kind, pattern, a) for a in axes]
    corners: list[tuple[tuple[bool, ...], Piece]] = []
    for split in itertools.product((False, True), repeat=len(axes)):
      kept = [a for a, is_split in zip(axes, split) if is_split]
      # A mesh axis over which a sum is pending is there also where it splits nothing.
      others = sorted(pending - set(kept))
      order = [*kept, *others]
      part = tuple((d, a) for d, a in pattern if a in kept)
      renumbered, given = _renumber(part, states, order)
      factors = [small[axes.index(a)] for a in kept] + [2] * len(others)
      piece = self._lower(kind, renumbered, tuple(factors), given)
      if not piece.is_local:
        return None
      corners.append((split, piece))
    weights = [
      math.prod(_weight(sizes[a], small[i], split[i]) for i, a in enumerate(axes))
      for split, _ in corners
    ]
    return _combine([piece for _, piece in corners], weights)


def _weight(size: int, small: int, split: bool) -> float:
  """Interpolation weight, linear in 1 / size, of the corner with (or without) a split."""
  t = (1 - 1 / size) / (1 - 1 / small)
  return t if split else 1 - t


def _smallest_factor(kind: Kind, pattern: Assignment, axis: int) -> int:
  return kind.smallest_factor([d for d, a in pattern if a == axis]) or 2


def _renumber(
  assignment: Assignment, states: tuple[State, ...], order: Sequence[int]
) -> tuple[Assignment, tuple[State, ...]]:
  new = {a: i for i, a in enumerate(order)}
  return (
    tuple((d, new[a]) for d, a in assignment),
    tuple(s and s._replace(axes=tuple(new[a] for a in s.axes)) for s in states),
  )


def _numbered(piece: Piece, order: Sequence[int]) -> Piece:
  """The piece with mesh axis i named `order[i]`."""
  if all(a == i for i, a in enumerate(order)):
    return piece
  return dataclasses.replace(
    piece,
    states=[s and s._replace(axes=tuple(order[a] for a in s.axes)) for s in piece.states],
    costs=[
      dataclasses.replace(cost, collectives=[_on_axes(c, order) for c in cost.collectives])
      for cost in piece.costs
    ],
  )


def _on_axes(c: Collective, order: Sequence[int]) -> Collective:
  return dataclasses.replace(
    c,
    mesh_axes=tuple(order[a] for a in c.mesh_axes),
    bytes_over={order[a]: n for a, n in c.bytes_over.items()},
  )


def _figures(piece: Piece) -> list[float]:
  """All figures of a piece that depend on sizes, in a fixed order."""
  result: list[float] = []
  for cost in piece.costs:
    for p in cost.work.products:
      result += [p.flops, p.bytes]
    result.append(cost.work.traffic)
  result += [n for kind, n in piece.buffers if kind == "new"]
  result += [n for _, n in sorted(piece.executed.items())]
  result += [*piece.pending, piece.inside, piece.inputs]
  return result


def _structure(piece: Piece) -> Hashable:
  works = tuple(
    (c.times, c.work.launches, tuple((p.dtype, p.channels) for p in c.work.products))
    for c in piece.costs
  )
  buffers = tuple((kind, None if kind == "new" else n) for kind, n in piece.buffers)
  return (works, buffers, tuple(sorted(piece.executed)), tuple(piece.same))


def _combine(corners: Sequence[Piece], weights: Sequence[float]) -> Piece | None:
  last = corners[-1]  # Where all are split.
  if any(_structure(piece) != _structure(last) for piece in corners):
    return None
  columns = zip(*(_figures(piece) for piece in corners))
  figures = iter([round(sum(w * f for w, f in zip(weights, column))) for column in columns])
  costs = []
  for cost in last.costs:
    products = [p._replace(flops=next(figures), bytes=next(figures)) for p in cost.work.products]
    work = Work(products, next(figures), cost.work.launches)
    costs.append(dataclasses.replace(cost, work=work))
  return Piece(
    costs=costs,
    members=last.members,
    buffers=[(kind, next(figures)) if kind == "new" else (kind, n) for kind, n in last.buffers],
    executed={i: next(figures) for i in sorted(last.executed)},
    states=last.states,
    same=last.same,
    pending=[next(figures) for _ in last.pending],
    inside=next(figures),
    inputs=next(figures),
  )


def _at(line: tuple[tuple[int, Piece], tuple[int, Piece]], elements: int) -> Piece:
  """The piece for a number of elements, from those for two other numbers."""
  (n, a), (m, b) = line
  t = (elements - m) / (n - m)
  piece = _combine([a, b], [t, 1 - t])
  assert piece is not None
  return piece


def _agree(a: Piece, b: Piece) -> bool:
  return _structure(a) == _structure(b) and a.states == b.states and _figures(a) == _figures(b)
