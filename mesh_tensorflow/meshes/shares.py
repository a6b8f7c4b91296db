"""Shares of a mesh dimension for devices of unequal speed.

All processors of a mesh do equal work. A device that is three times as fast as another one gets
three processors where that gets one: `{"batch": [3, 1]}` of the mesh "batch:4". Values, random
numbers and checkpoints are those of any mesh of that shape.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from mesh_settings.hints import did_you_mean
from mesh_tensorflow.errors import MeshShapeError
from mesh_tensorflow.program.dimensions import Dimension, Shape

_T = TypeVar("_T")

SharesLike: TypeAlias = Mapping[str, Sequence[int]]


def device_grid(shape: Shape, shares: SharesLike) -> Shape:
  """The number of devices along each mesh dimension.

  Args:
    shape: the mesh shape.
    shares: by name of a mesh dimension the numbers of its coordinates that devices get, in their
      order. Along other mesh dimensions each coordinate has a device of its own.

  Raises:
    MeshShapeError: there is no such mesh dimension, or its shares are not whole numbers of at least
      1 that add up to its size.
  """
  if not isinstance(shares, Mapping):
    raise MeshShapeError(
      "shares: give a dict from the name of a mesh dimension to a number of processors for each "
      f"device along it, such as {{'batch': [3, 1]}}; got {shares!r}"
    )
  known = {m.name: int(m.size) for m in shape}
  for name, parts in shares.items():
    if name not in known:
      hint = did_you_mean(str(name), known, shown=repr) or f"; it has {', '.join(known) or 'none'}"
      raise MeshShapeError(f"shares: the mesh has no dimension {name!r}{hint}")
    _check_parts(name, known[name], parts)
  return Shape([Dimension(n, len(shares[n]) if n in shares else s) for n, s in known.items()])


def _check_parts(name: str, size: int, parts: Any) -> None:
  listed = isinstance(parts, Sequence) and not isinstance(parts, str)
  if not listed or not parts or not all(_is_share(n) for n in parts):
    raise MeshShapeError(
      f"shares of mesh dimension {name}:{size} must be whole numbers of at least 1, one for each "
      f"device along it, got {parts!r}; a device that shall get nothing is left out of the mesh"
    )
  total = sum(parts)
  if total != size:
    raise MeshShapeError(
      f"shares {[int(n) for n in parts]} of mesh dimension {name}:{size} add up to {total}: make "
      f"it {name}:{total}, or give shares that add up to {size}"
    )


def _is_share(n: object) -> bool:
  return isinstance(n, numbers.Integral) and not isinstance(n, bool) and int(n) >= 1


def assign_processors(shape: Shape, devices: Sequence[_T], shares: SharesLike) -> list[_T]:
  """The device of each processor of a mesh with shares.

  Args:
    shape: the mesh shape.
    devices: names, or numbers, of different devices, row-major in the `device_grid`.
    shares: see `device_grid`.

  Returns:
    The device of each processor, row-major in the mesh.

  Raises:
    MeshShapeError: the shares do not suit the mesh, the number of devices is not that of the grid,
      or a device is named twice.
  """
  grid = device_grid(shape, shares)
  if len(devices) != grid.size:
    mesh = ",".join(f"{m.name}:{m.size}" for m in shape)
    sides = " x ".join(str(d.size) for d in grid)
    of_sides = f"{sides} = {grid.size}" if len(grid) > 1 else sides
    raise MeshShapeError(
      f"shares {_text(shares)} of mesh {mesh} are for {of_sides} devices, "
      f"got {len(devices)}: {list(devices)}"
    )
  twice = [d for i, d in enumerate(devices) if d in devices[:i]]
  if twice:
    raise MeshShapeError(
      f"shares {_text(shares)}: device {twice[0]!r} is named twice; name each device once, and let "
      "its share say how many processors it gets"
    )
  # For each coordinate along a mesh dimension the place of its device.
  places = []
  for m, g in zip(shape, grid):
    parts = shares.get(m.name, [1] * g.size)
    places.append([i for i, n in enumerate(parts) for _ in range(n)])
  result = []
  for place in itertools.product(*places):
    number = 0
    for i, g in zip(place, grid):
      number = number * g.size + i
    result.append(devices[number])
  return result


def _text(shares: SharesLike) -> str:
  return str({name: [int(n) for n in parts] for name, parts in shares.items()})
