"""The tests of the descriptors of a room: on drawn layouts, with one tensor twice, differentiated
again, and in half precision.

A room has its descriptors in `tests/<room>/descriptors_<family>.py`, and in its test_conformance.py

  class TestOperations(suite.Conformance):
    room = "operations"

`make long` runs each family on more layouts, in all modes. A longer run:
`MTF_CONFORMANCE_DRAWS=30 pytest -n 2 tests/operations/test_conformance.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import os
from collections.abc import Sequence

import pytest

from tests.conformance import framework, further_ways
from tests.conftest import ROOT

ROOMS = ("operations", "decoding", "layers")
# If no number is given, an operation is run in each mode on one of the layouts that are legal for
# it, on another one where it can be.
ALL_TRACED = "MTF_CONFORMANCE_DRAWS" in os.environ


@dataclasses.dataclass(frozen=True)
class Draws:
  """How many layouts each family of a room is run on.

  Attributes:
    usual: in every mode; an operation on one of them.
    wild: more, as they come, in the fastest mode: many must be refused.
    long: whole families in every mode in `make long`, the usual ones among them.
    second: the mesh of the second of the usual ones; None: a drawn one.
    further: each of how many operations is run in further ways; `make long` runs all.
  """

  usual: int
  wild: int
  long: int
  second: str | None = None
  further: int = 1


# Layers are made of operations, and take longer. Tracing grows with the mesh, so one of the layouts
# is of four processors.
DRAWS = {
  "operations": Draws(3, 3, 8, "r:2,s:2", 7),
  "decoding": Draws(2, 4, 8),
  "layers": Draws(2, 2, 8, "r:2,s:2", 7),
}
# Families of which a program is large: loops, or complex numbers as their two parts. Tracing is
# most of it: one of their layouts is of two processors.
LARGE = {
  "complex": Draws(2, 2, 8, "r:2", 6),
  "control": Draws(2, 2, 8, "r:2", 6),
  "fft": Draws(2, 2, 8, "r:2", 6),
  "fields": Draws(2, 2, 8, "r:2", 6),
  "recurrent": Draws(2, 1, 8, "r:2", 6),
}
if ALL_TRACED:
  LARGE = {}
  _number = int(os.environ["MTF_CONFORMANCE_DRAWS"])
  DRAWS = {room: Draws(_number, max(6, _number // 3), _number) for room in ROOMS}
# Names (comma-separated) of the only operations to test.
ONLY = [name for name in os.environ.get("MTF_CONFORMANCE_ONLY", "").split(",") if name]


def _families(room: str) -> dict[str, list[framework.Descriptor]]:
  found = {}
  for path in sorted((ROOT / "tests" / room).glob("descriptors_*.py")):
    module = importlib.import_module(f"tests.{room}.{path.stem}")
    chosen = [d for d in module.DESCRIPTORS if not ONLY or d.name in ONLY]
    if chosen:
      found[path.stem.removeprefix("descriptors_")] = chosen
  return found


FAMILIES_OF = {room: _families(room) for room in ROOMS}
FAMILIES = {name: family for families in FAMILIES_OF.values() for name, family in families.items()}
_ROOM_OF = {name: room for room, families in FAMILIES_OF.items() for name in families}

ONE, AGAIN = "one tensor at several inputs", "gradients differentiated again"
HALF = "in half precision"
WAYS = (ONE, AGAIN, HALF)
# TensorFlow has complex numbers of float32 and float64 alone.
_NEVER_IN_HALF = {
  d.name for f in ("complex", "fft") for d in FAMILIES.get(f, ()) if not d.name.endswith("_of_real")
}
# They take turns. What is traced takes longest, so layers, which are made of operations, are not.
_FASTEST = "placement_eager"
_EAGER = (_FASTEST, "simd_eager")
_TRACED = ("placement_function", "simd_function")
_TURNS = (*3 * _EAGER, _TRACED[0], *3 * _EAGER, _TRACED[1], *_EAGER)
WHOLE = framework.Layout("r:1", "")


def draws_of(family: str) -> Draws:
  """How many layouts a family is run on."""
  return LARGE.get(family, DRAWS[_ROOM_OF[family]])


def usual(family: str) -> int:
  """How many layouts a family is run on in every mode."""
  return draws_of(family).usual


@functools.cache
def layouts(family: str) -> list[framework.Layout]:
  """Layouts for all modes; then the wild ones."""
  draws = draws_of(family)
  return framework.draw_layouts(family, FAMILIES[family], draws.usual, draws.wild, draws.second)


@functools.cache
def long_layouts(family: str) -> list[framework.Layout]:
  """Layouts for all modes in `make long`; the first ones are those of `layouts`."""
  draws = draws_of(family)
  return framework.draw_layouts(family, FAMILIES[family], draws.long, second=draws.second)


@functools.cache
def uneven_layouts(family: str) -> list[framework.Layout]:
  """Layouts that split unevenly."""
  count = draws_of(family).long if ALL_TRACED else 2
  return framework.draw_uneven_layouts(family, FAMILIES[family], count)


def _modes_of_uneven(family: str, number: int, draw: int) -> Sequence[str]:
  """Each layout eagerly in one implementation; of every third family, unless it is large, the first
  one traced, too: in turns in the two.
  """
  if ALL_TRACED:
    return framework.MODES
  traced = [] if draw or number % 3 or family in LARGE else [_TRACED[number % 2]]
  return [_EAGER[draw % 2], *traced]


@functools.cache
def _split_usually(family: str) -> set[framework.Descriptor]:
  """What one of the usual layouts splits."""
  usually = layouts(family)[: usual(family)]
  return {
    d
    for d in FAMILIES[family]
    if any(d.split_dimensions(l) and not d.is_illegal(l) for l in usually)
  }


def chosen(family: str, draw: int, mode: str) -> list[framework.Descriptor]:
  """What is run on a layout: what refuses it, and that whose turn it is.

  In the fastest mode an operation is run where most of it is split, in the other eager one
  elsewhere, if it can be; and every other one traced. On a wild layout it is what refuses it, what
  no usual one splits, and one in three of the others.
  """
  if ALL_TRACED:
    return FAMILIES[family]
  if draw >= usual(family):
    wild, split = layouts(family)[draw], _split_usually(family)
    return [
      d
      for i, d in enumerate(FAMILIES[family])
      if i % 3 == draw % 3 or d not in split or d.is_illegal(wild)
    ]
  drawn = layouts(family)[: usual(family)]
  result = []
  for i, descriptor in enumerate(FAMILIES[family], framework.MODES.index(mode)):
    legal = [n for n, layout in enumerate(drawn) if not descriptor.is_illegal(layout)]
    best = _most_split(family, descriptor)
    turns = [best] if mode == _FASTEST else [n for n in legal if n != best] or legal
    if mode in _TRACED:  # What is traced grows with the mesh: where it can be, a small one.
      small = 2 if family in LARGE else 4
      turns = [n for n in legal if drawn[n].size <= small] or legal
    whose = mode not in _TRACED or mode == traced_in(family, descriptor)
    if draw not in legal or (whose and draw == turns[i % len(turns)]):
      result.append(descriptor)
  return result


@functools.cache
def _most_split(family: str, descriptor: framework.Descriptor) -> int | None:
  """Of the usual layouts on which a descriptor is legal, with its gradient, what splits most."""
  legal = {
    n: (descriptor.has_gradient(layout), descriptor.split_dimensions(layout))
    for n, layout in enumerate(layouts(family)[: usual(family)])
    if not descriptor.is_illegal(layout)
  }
  return max(legal, key=lambda n: legal[n], default=None)


def traced_in(family: str, descriptor: framework.Descriptor) -> str | None:
  """In which of the traced modes a descriptor is run: one of two in none, the others in turns.

  `make long` runs all in both.
  """
  turns = (*_TRACED, None, None)
  return turns[FAMILIES[family].index(descriptor) % len(turns)]


def further_case(descriptor: framework.Descriptor, way: str):
  """What is run, and what checks it; None if the descriptor cannot be run in this way."""
  if way == ONE:
    one = further_ways.with_one_tensor(descriptor)
    return one and (one, functools.partial(framework.compare, one))
  if way == HALF:
    refused = descriptor.name in _NEVER_IN_HALF | {*further_ways.NOT_IN_HALF}
    if refused or descriptor.name in further_ways.UNTRIED_IN_HALF:
      return None
    half = further_ways.in_half(descriptor)
    return half and (half, functools.partial(framework.compare, half))
  if not descriptor.differentiable or descriptor.name in further_ways.NOT_TWICE:
    return None
  again = further_ways.differentiated_again(descriptor)
  return again.descriptor, again.check


def _layouts_of_further_case(family: str, index: int) -> list[framework.Layout]:
  """The layouts that a descriptor of a family is run on: one, the next one for the next."""
  descriptor = FAMILIES[family][index]
  legal = [
    layout
    for layout in layouts(family)[: usual(family)]
    if not descriptor.is_illegal(layout)
    and (descriptor.has_gradient(layout) or not descriptor.differentiable)
  ] or [WHOLE]
  return legal if ALL_TRACED else [legal[index % len(legal)]]


class Conformance:
  """What is tested of each family of a room."""

  room: str

  def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
    families = FAMILIES_OF[self.room]
    if "draw" in metafunc.fixturenames:
      cases = []
      for number, family in enumerate(families):
        if metafunc.function.__name__ == "test_family_split_unevenly":
          for n in range(len(uneven_layouts(family))):
            cases += [(family, n, mode) for mode in _modes_of_uneven(family, number, n)]
          continue
        draws = draws_of(family)
        numbers = {mode: range(draws.usual) for mode in framework.MODES}
        if metafunc.function.__name__ == "test_whole_family_on_each_layout":
          numbers = dict.fromkeys(numbers, range(draws.long))
        else:
          numbers[_FASTEST] = range(draws.usual + draws.wild)
        cases += [(family, n, mode) for mode in numbers for n in numbers[mode]]
      metafunc.parametrize("family,draw,mode", cases)
    elif metafunc.function.__name__ == "test_more_of_a_family_in_further_ways":
      metafunc.parametrize("family", [f for f in families if draws_of(f).further > 1])
    elif "family" in metafunc.fixturenames:
      metafunc.parametrize("family", families)

  def test_family(self, family, draw, mode, cpu_devices, record_property, pytestconfig):
    layout, descriptors = layouts(family)[draw], chosen(family, draw, mode)
    descriptors = descriptors[:: max(1, 24 // (pytestconfig.getoption("quick") or 24))]
    # TensorFlow's graph optimizer takes most of the time; smaller families are tested with it.
    with framework.graph_optimizer(draw == 0 and len(FAMILIES[family]) < 40):
      tally, problems = framework.check_family(mode, layout, descriptors, cpu_devices)
    counts = {"family": family, "descriptors": len(FAMILIES[family]), "mode": mode}
    record_property("conformance", {**counts, "layout": str(layout), **dataclasses.asdict(tally)})
    assert not problems, f"{layout}, {mode}:\n  " + "\n  ".join(problems)

  def test_family_split_unevenly(self, family, draw, mode, cpu_devices, record_property):
    """With NaN in the padding of all slices; large families in turns."""
    layout, descriptors = uneven_layouts(family)[draw], FAMILIES[family]
    if not ALL_TRACED and len(descriptors) > 12:
      step = 8 if mode in _TRACED else 3
      descriptors = descriptors[draw % step :: step]
    with framework.graph_optimizer(draw == 0 and len(descriptors) < 40):
      tally, problems = framework.check_family_unevenly(mode, layout, descriptors, cpu_devices)
    counts = {"family": family, "descriptors": len(descriptors), "mode": mode}
    record_property("conformance", {**counts, "layout": str(layout), **dataclasses.asdict(tally)})
    assert not problems, f"{layout}, {mode}:\n  " + "\n  ".join(problems)

  @pytest.mark.long
  def test_whole_family_on_each_layout(self, family, draw, mode, cpu_devices):
    problems = framework.check_family(
      mode, long_layouts(family)[draw], FAMILIES[family], cpu_devices
    )[1]
    assert not problems, f"{long_layouts(family)[draw]}, {mode}:\n  " + "\n  ".join(problems)

  @pytest.mark.parametrize("way", WAYS)
  def test_family_in_further_ways(self, family, way, cpu_devices, record_property):
    """One layout each, in one mode, unless MTF_CONFORMANCE_DRAWS is set."""
    numbers = range(0, len(FAMILIES[family]), draws_of(family).further)
    self._run_in_further_ways(family, way, numbers, cpu_devices, record_property)

  @pytest.mark.long
  @pytest.mark.parametrize("way", WAYS)
  def test_more_of_a_family_in_further_ways(self, family, way, cpu_devices, record_property):
    """The other operations of a large family."""
    step = draws_of(family).further
    numbers = [i for i in range(len(FAMILIES[family])) if i % step]
    self._run_in_further_ways(family, way, numbers, cpu_devices, record_property)

  def _run_in_further_ways(self, family, way, numbers, cpu_devices, record_property):
    programs = collections.defaultdict(list)
    problems = []
    turns = _EAGER if self.room == "layers" and not ALL_TRACED else _TURNS
    count = 0
    for i in numbers:
      case = further_case(FAMILIES[family][i], way)
      for layout in _layouts_of_further_case(family, i) if case else ():
        programs[turns[count % len(turns)], layout].append(case)
        count += 1
    for (mode, layout), cases in programs.items():
      found = further_ways.run(cases, mode, layout, cpu_devices)
      problems += [f"{p} ({layout}, {mode})" for p in found]
    record_property("conformance_way", {"family": family, "way": way, "cases": count})
    assert not problems, "\n  ".join(["", *problems])

  def test_what_is_refused_in_half_precision(self, family):
    refused = _NEVER_IN_HALF | {*further_ways.NOT_IN_HALF}
    problems = [further_ways.refusal_of_half(d) for d in FAMILIES[family] if d.name in refused]
    assert not any(problems), "\n  ".join(["", *filter(None, problems)])

  def test_every_operation_runs_in_both_implementations(self, family):
    """And every other one traced: on a layout that is legal for it, if one of those drawn is."""
    numbers = range(usual(family))
    runs = {m: [chosen(family, n, m) for n in numbers] for m in framework.MODES}
    for d in FAMILIES[family]:
      legal = [n for n in numbers if not d.is_illegal(layouts(family)[n])]
      modes = {mode for mode in framework.MODES if any(d in runs[mode][n] for n in legal)}
      assert not legal or modes >= {*_EAGER, traced_in(family, d)} - {None}, (modes, d.name)

  def test_every_operation_is_split_somewhere(self, family):
    """The drawn layouts shall not leave an operation untested."""
    never = [
      d.name
      for d in FAMILIES[family]
      if d.dimension_names
      and not any(
        d.split_dimensions(l) and not d.is_illegal(l) and d in chosen(family, n, _FASTEST)
        for n, l in enumerate(layouts(family))
      )
    ]
    assert not never
