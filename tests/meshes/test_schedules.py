"""Schedules of pipelines: what runs when, how long meshes are idle, what they hold."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mesh_tensorflow as mtf
from mesh_tensorflow.meshes import schedules

COUNTS = [(2, 4), (4, 4), (4, 8), (8, 16)]


@given(
  st.integers(1, 5),
  st.integers(1, 3),
  st.integers(1, 9),
  st.sampled_from(schedules.SCHEDULES),
)
@settings(deadline=None, max_examples=100)
def test_everything_runs_once_and_after_what_it_needs(meshes, rounds, microbatches, schedule):
  tasks = schedules.chain(meshes * rounds, meshes, split=schedule == "zero_bubble")
  table = schedules.table(tasks, microbatches, schedule)
  ends = {}
  for mesh, row in enumerate(table.actions):
    free = 0.0
    for a in row:
      assert tasks[a.task].mesh == mesh
      assert a.start >= free
      assert a.end - a.start == tasks[a.task].seconds
      free = ends[a.task, a.microbatch] = a.end
  assert len(ends) == len(tasks) * microbatches
  assert sum(map(len, table.actions)) == len(ends)
  for _, a in table.in_order:
    assert all(ends[i, a.microbatch] <= a.start for i in tasks[a.task].after)


@pytest.mark.parametrize("stages,microbatches", COUNTS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_the_papers(schedule, stages, microbatches):
  """(S - 1) / (M + S - 1), as Huang et al. and Narayanan et al. have it."""
  table = schedules.table(schedules.chain(stages), microbatches, schedule)
  assert table.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize("stages,microbatches", COUNTS)
def test_bubble_of_several_stages_on_a_mesh(stages, microbatches):
  """Narayanan et al., 2021: of v stages on each mesh the idle time is the v-th part."""
  table = schedules.table(schedules.chain(2 * stages, stages), microbatches, "1f1b")
  idle = (stages - 1) / 2
  assert table.bubble == pytest.approx(idle / (microbatches + idle))


@pytest.mark.parametrize("stages,microbatches", COUNTS)
def test_bubble_of_zb_h1(stages, microbatches):
  """Qi et al., 2023: 2 (S - 1) / (3 M + 2 (S - 1)), where all three parts take equally long."""
  tasks = schedules.chain(stages, split=True)
  table = schedules.table(tasks, microbatches, "zero_bubble")
  idle = 2 * (stages - 1)
  assert table.bubble == pytest.approx(idle / (3 * microbatches + idle))


def test_microbatches_under_way():
  tasks = schedules.chain(4)
  held = {s: schedules.table(tasks, 8, s) for s in ("gpipe", "1f1b")}
  assert [held["gpipe"].under_way(m) for m in range(4)] == [8, 8, 8, 8]
  assert [held["1f1b"].under_way(m) for m in range(4)] == [4, 3, 2, 1]
  split = schedules.table(schedules.chain(4, split=True), 8, "zero_bubble")
  assert [split.under_way(m) for m in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize("stages,microbatches", COUNTS)
def test_microbatches_under_way_of_several_stages_on_a_mesh(stages, microbatches):
  """Narayanan et al., 2021: mesh r of S, with v stages, warms up with 2 (S - r - 1) + (v - 1) S."""
  table = schedules.table(schedules.chain(2 * stages, stages), microbatches, "1f1b")
  most = [min(2 * (stages - r - 1) + stages + 1, 2 * microbatches) for r in range(stages)]
  assert [table.under_way(r) for r in range(stages)] == [n / 2 for n in most]


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
@pytest.mark.parametrize("stages,microbatches", COUNTS)
def test_most_bytes_at_a_time(stages, microbatches, schedule):
  """Counted at the middle of each span in which nothing begins or ends."""
  draw = random.Random(stages * microbatches)
  tasks = schedules.chain(stages, split=schedule == "zero_bubble")
  tasks = [dataclasses.replace(t, seconds=draw.choice([0.5, 1, 3])) for t in tasks]
  table = schedules.table(tasks, microbatches, schedule)
  needs = [(before, i) for i, t in enumerate(tasks) for before in t.after]
  spans = [schedules.Span(*pair, draw.randint(1, 9)) for pair in needs]
  running = {i: draw.randint(0, 9) for i in range(0, len(tasks), 2)}
  at = {(a.task, a.microbatch): a for row in table.actions for a in row}
  times = sorted({time for a in at.values() for time in (a.start, a.end)})

  def is_held(span, m, time):
    if tasks[span.made].mesh == tasks[span.read].mesh:
      return at[span.made, m].start < time < at[span.read, m].end
    return at[span.made, m].end < time < at[span.read, m].start

  for mesh, found in enumerate(table.most_held(spans, running)):
    expected = [0]
    for time in map(statistics.mean, itertools.pairwise(times)):
      own = [x for x in spans if tasks[x.read].mesh == mesh]
      held = [x.bytes for x in own for m in range(microbatches) if is_held(x, m, time)]
      held += [running.get(a.task, 0) for a in table.actions[mesh] if a.start < time < a.end]
      expected.append(sum(held))
    assert found == max(expected)


def test_picture():
  table = schedules.table(schedules.chain(2), 3, "1f1b")
  assert schedules.drawn(table, {0: "first", 1: "last"}).splitlines() == [
    "     first |0011....aaaa22bbbb..cccc|",
    "      last |..00aaaa11bbbb22cccc....|",
  ]


def test_an_unknown_schedule():
  with pytest.raises(mtf.errors.ArgumentError, match="gpipe, 1f1b, zero_bubble, got '2f2b'"):
    schedules.table(schedules.chain(2), 3, "2f2b")
