"""docs/session.md is what `docs.tools.session` records: the commands, and what each must say."""

from __future__ import annotations

import re

import pytest

from docs.tools import session

BLOCK = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def recorded() -> list[tuple[str, str, int]]:
  """Of each block of the page: the command, what it showed, and its exit code."""
  found = []
  for text in BLOCK.findall(session.PAGE.read_text("utf-8")):
    first, _, output = text.removeprefix("$ ").replace(" \\\n    ", " ").partition("\n")
    output, _, code = output.partition("$ echo $?\n")
    found.append((first, output, int(code or 0)))
  return found


def test_the_page_has_the_commands_of_the_script():
  assert [command for command, _, _ in recorded()] == [s.command for s in session.STEPS]


@pytest.mark.parametrize("number", range(len(session.STEPS)))
def test_each_command_said_what_it_must(number):
  """Lines of their form; which numbers stand in them is the machine's."""
  _, output, code = recorded()[number]
  assert session.problems(session.STEPS[number], code, output) == []


def test_the_page_is_made_by_the_script():
  """All around the outputs."""
  page = session.PAGE.read_text("utf-8")
  assert page.startswith(session._INTRO)
  for step in session.STEPS:
    assert f"\n\n{step.text}\n\n```text\n$ mesh-transformer " in page
  assert not re.search(r"/(tmp|work|root)/", page)


def test_a_missing_line_is_noticed():
  step = session.STEPS[0]
  good = recorded()[0][1]
  assert session.problems(step, 0, good) == []
  assert session.problems(step, 1, good) == [f"{step.command}: exit code 1, not 0"]
  assert len(session.problems(step, 0, good.replace("written", "wrote"))) == 1
  step = session.Step("", "c", ("x",))
  block = session.block(step, "\n".join(f"line {i} x" for i in range(100)))
  assert "line 0 x" in block and "line 99 x" in block and "... 72 more lines" in block


@pytest.mark.long
@pytest.mark.subprocess
def test_the_session_again():
  """`tests/transformer/commands/test_session.py` does a small one."""
  page = session.page()
  assert page.count("```text") == len(session.STEPS)
