"""The text of a report: its tables, its units, and what it says of a layout."""

from __future__ import annotations

import types

import pytest

from mesh_tensorflow.planning import text
from mesh_tensorflow.planning.evaluation import Held, Memory


@pytest.mark.parametrize(("rows", "shown"), [(2, 2), (100, 5)])
def test_the_table_of_the_peak_has_at_most_five_rows(rows, shown):
  memory = Memory(inputs=0)
  memory.peak_operation = "dense/einsum"
  memory.largest = [Held(f"{name}/out:0", 1024) for name in "abcdefgh"]
  peak = text._memory(
    types.SimpleNamespace(memory=memory, pipeline=None, processors_of_devices=[1]), rows
  ).split("The peak is at")[1]
  assert len([line for line in peak.splitlines() if "/out" in line]) == shown
  assert f"and {8 - shown} more" in peak


@pytest.mark.parametrize(
  ("number", "written"),
  [
    (0, "0 B"), (5, "5 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"),
    (1000 * 2**10, "1000 KiB"), (2**20, "1 MiB"), (2**50, "1 PiB"), (2**60, "1024 PiB"),
  ],
)  # fmt: skip
def test_bytes(number, written):
  assert text.format_bytes(number) == written


@pytest.mark.parametrize(
  ("number", "written"),
  [
    (0, "0 FLOP"), (999, "999 FLOP"), (1000, "1 kFLOP"), (1.5e9, "1.5 GFLOP"),
    (1e18, "1 EFLOP"), (2e21, "2e+03 EFLOP"),
  ],
)  # fmt: skip
def test_flops(number, written):
  assert text.format_flops(number) == written


@pytest.mark.parametrize(
  ("seconds", "written"),
  [
    (120, "120 s"), (1, "1 s"), (0.25, "250 ms"), (1e-3, "1 ms"), (2.5e-4, "250 us"),
    (1e-9, "0.001 us"), (0, "0 us"),
  ],
)  # fmt: skip
def test_seconds(seconds, written):
  assert text.format_seconds(seconds) == written


def test_shapes():
  assert text.shape_text((), ()) == "scalar"
  assert text.shape_text([("a", 8), ("b", 4)], ["rows", None]) == "a=8/rows, b=4"


def test_a_table_is_aligned_and_says_what_it_leaves_out():
  rows = [["first", "1", "22"], ["2nd", "333", "4"], ["third", "5", "6"]]
  assert text.table(["name", "n", "bytes"], rows, 2).splitlines() == [
    "  name     n  bytes",
    "  first    1     22",
    "  2nd    333      4",
    "  ... and 1 more",
  ]
  assert len(text.table(["name", "n", "bytes"], rows, 3).splitlines()) == 4


def test_a_line_has_at_most_100_columns_and_names_lose_their_middle():
  name = "".join(str(i % 10) for i in range(120))
  _, line = text.table(["name", "n"], [[name, "12345"]], 1).splitlines()
  # Two blanks, 91 of the name, two blanks and five digits; a third of the name from its front.
  assert line == f"  {name[:29]}..{name[-60:]}  12345" and len(line) == 100
  assert text._shorten("abcdefgh", 8) == "abcdefgh"
  assert text._shorten("abcdefghi", 8) == "ab..fghi"


def _operation(name, **fields):
  return types.SimpleNamespace(
    **{"name": name, "times": 1, "flops": 0, "collectives": (), **fields}
  )


def test_alike_items_of_names_that_differ_in_numbers_are_one_row():
  items = [
    _operation("layer_0/dense", flops=10), _operation("layer_1/dense", flops=10),
    _operation("layer_2/dense", flops=30), _operation("out_7", flops=15),
  ]  # fmt: skip
  found = text._grouped(items, lambda op: op.flops, lambda op: op.flops)
  assert [(name, count, cost) for name, count, _, cost in found] == [
    ("layer_2/dense", 1, 30), ("layer_*/dense", 2, 20), ("out_7", 1, 15)
  ]  # fmt: skip


def test_names_say_how_often_an_operation_runs():
  assert text._name(_operation("a")) == "a"
  assert text._name(_operation("a", times=3)) == "a (x 3)"
  assert text._name(_operation("a", in_unbounded_loop=True)) == "a (each iteration)"
  assert text._name(types.SimpleNamespace(name="a variable")) == "a variable"


def test_layout_rules_and_what_is_wrong_with_them():
  def rule(dimension, problem="", sizes=(8,)):
    return types.SimpleNamespace(
      tensor_dimension=dimension, mesh_dimension="rows", sizes=sizes, mesh_size=2, variables=3,
      tensors=4, problem=problem,
    )  # fmt: skip

  rules = [rule("a", sizes=(1000, 2000, 3000, 4000, 5)), rule("b", "no tensor has it")]
  report = types.SimpleNamespace(rules=rules, idle_mesh_dimensions=["cols"])
  assert text._rules(report).splitlines() == [
    "Layout rules",
    "  rule                 sizes split  in parts  variables  other tensors",
    "  a:rows  1000, 2.., 3000, 4000, 5         2          3              4",
    "  ! b:rows matches nothing: no tensor has it",
    "  ! mesh dimension cols splits nothing: its devices repeat the same work",
  ]
  for alone in ({"rules": rules[:1]}, {"rules": rules[1:]}):
    report = types.SimpleNamespace(**alone, idle_mesh_dimensions=[])
    assert text._rules(report).startswith("Layout rules\n  ")
  empty = types.SimpleNamespace(rules=[], idle_mesh_dimensions=[])
  assert text._rules(empty) == "Layout rules: none"


def test_what_every_device_holds():
  def placed(name, bytes_):
    return types.SimpleNamespace(
      name=name, shape=[("a", 8)], split=["rows"], bytes_per_device=bytes_, copies=2
    )

  placements = [placed("small", 16), placed("w_0", 1024), placed("w_1", 1024)]
  assert text._placements("Variables", placements, 5).splitlines() == [
    "Variables: 3, 2.02 KiB",
    "  name   number  dimensions  bytes  copies",
    "  w_*         2    a=8/rows  2 KiB       2",
    "  small       1    a=8/rows   16 B       2",
  ]
  assert text._placements("Variables", [], 5) == ""


def test_bytes_over_each_mesh_dimension():
  def exchange(name, kinds, **moved):
    collectives = [types.SimpleNamespace(kind=k) for k in kinds]
    return _operation(name, collectives=collectives, moved={"r": 0, "s": 0, "t": 0, **moved})

  operations = [
    exchange("h_0", ["allreduce", "allreduce"], r=512), exchange("gather", ["allconcat"], s=100),
    exchange("h_1", ["allreduce", "allreduce"], r=512), _operation("alone"),
  ]  # fmt: skip

  def moved(op=None):
    one = [op] if op else operations[:3]
    return {m: sum(o.moved[m] for o in one) for m in "rst"}

  report = types.SimpleNamespace(operations=operations, bytes_moved=moved)
  assert text._communication(report, 5).splitlines() == [
    "Bytes that one device sends over each mesh dimension: r 1 KiB, s 100 B",
    "  operation  number    each does      r      s",
    "  h_*             2  2 allreduce  1 KiB      -",
    "  gather          1    allconcat      -  100 B",
  ]
  report.bytes_moved = lambda op=None: {"r": 0}
  assert text._communication(report, 5) == "No bytes move between devices"


@pytest.mark.parametrize(
  ("needed", "alike"),
  [(800, "no part is computed twice"), (797, "no part"), (400, "each on 2 devices alike")],
)
def test_work_that_is_repeated(needed, alike):
  operations = [
    _operation("h_0", flops=100, repeated=1), _operation("h_1", flops=100, repeated=1),
    _operation("loop", flops=50, times=4, repeated=2), _operation("alone", repeated=1),
  ]  # fmt: skip
  report = types.SimpleNamespace(
    flops_per_device=400, flops_needed=needed, operations=operations,
    mesh_shape=types.SimpleNamespace(size=2),
  )  # fmt: skip
  first, *lines = text._work(report, 5).splitlines()
  assert first.startswith("Matrix products and convolutions: 400 FLOP on each device; ")
  assert alike in first
  assert lines == [
    "  operation   number      each  share  repeated",
    "  h_*              2  100 FLOP  50.0%         1",
    "  loop (x 4)       1  200 FLOP  50.0%         2",
  ]


@pytest.mark.parametrize("shared", [False, True])
def test_where_the_predicted_time_goes(shared):
  """A product at half of the peak, of devices that have it each or share it."""
  device = types.SimpleNamespace(peak=lambda dtype: 1e12)
  work = types.SimpleNamespace(
    products={("float32", 6): 0.003 * (4 if shared else 1)}, flops={("float32", 6): 1.5e9}
  )
  parts = {"exchanges": 0.25, "products": 0.75}
  time = types.SimpleNamespace(
    seconds=1.0, parts=lambda: parts, work=work, devices=4,
    machine=types.SimpleNamespace(shared=shared, device=device),
  )  # fmt: skip
  report = types.SimpleNamespace(
    time=time,
    machine=types.SimpleNamespace(name="some"),
    utilisation=0.125,
    tokens_per_second=8e3,
    pipeline=None,
    processors_of_devices=[1],
    seconds=time.seconds,
  )
  assert text._time(report, 5).splitlines() == [
    "Predicted for some: 1 s a step, 12.5% of the devices' peak, 8000 tokens/s",
    "  part       seconds  share",
    "  products    750 ms  75.0%",
    "  exchanges   250 ms  25.0%",
    "  products                         FLOPs  seconds  of the peak",
    f"  float32, up to 1 MFLOP each  1.5 GFLOP    {'12' if shared else ' 3'} ms        50.0%",
  ]
  time.seconds, parts["products"] = 0.0, 0.0
  assert "products      0 us   0.0%" in text._time(report, 5)
  report.time = None
  assert text._time(report, 5) == ""
