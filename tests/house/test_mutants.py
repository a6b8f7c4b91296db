"""What tests/mutants.py changes, what it leaves as it is, and which tests it takes for a change."""

from __future__ import annotations

import ast

import pytest

from tests import mutants

SOURCE = b'''"""A file: not 1 < 2."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Pair:
  a: int = 1

  def __repr__(self):
    return str(self.a + 1)


def f(x: Literal[3], flag=True) -> Literal[4]:
  if not flag and x is not None:
    raise ValueError("x is larger than 5" if x > 5 else f"{x + 1}")
  logging.warning("no %d", x - 1)
  text = f"{x - 1}" + "more"
  x -= min(
    x, -2  # Not - 3.
  )
  return x == 1000 or x in text
'''


def test_what_is_changed():
  found = mutants._Sites("f.py", SOURCE).found
  assert [(m.line, m.old, m.new, m.inside) for m in found] == [
    (7, "1", "2", "Pair"),
    (13, "True", "False", "f"),
    (14, "and", "or", "f"),
    (14, "not ", "", "f"),
    (14, "is not", "is", "f"),
    (18, "-=", "+=", "f"),
    (18, "min", "max", "f"),
    (19, "-", "+", "f"),
    (21, "or", "and", "f"),
    (21, "==", "!=", "f"),
    (21, "in", "not in", "f"),
  ]
  lines = SOURCE.splitlines()
  for m in found:
    changed = m.applied(SOURCE)
    ast.parse(changed)
    differing = [i for i, (a, b) in enumerate(zip(lines, changed.splitlines()), 1) if a != b]
    assert differing == [m.line]


@pytest.fixture(scope="module")
def choice(repository):
  return mutants.Choice(repository)


@pytest.mark.slow
@pytest.mark.parametrize(
  "path,inside,room,test",
  [
    ("mesh_tensorflow/operations/top_k.py", "TopKOperation.lower", "tests/operations/",
     "tests/operations/test_top_k.py"),
    ("mesh_tensorflow/training/nonfinite.py", "find", "tests/training/",
     "tests/training/test_nonfinite.py"),
  ],
)  # fmt: skip
def test_tests_of_the_room_that_name_what_is_changed_come_first(choice, path, inside, room, test):
  inner, others, score = choice.tests(mutants.Mutant(path, 1, 0, "a", "b", inside))
  assert inner and all(file.startswith(room) for file in inner)
  assert others and not any(file.startswith(room) for file in others)
  best = {file: max(v for k, v in score.items() if k.startswith(file + "::")) for file in inner}
  assert test in sorted(best, key=lambda file: -best[file])[:2]
