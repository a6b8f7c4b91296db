"""The code in docs/*.md runs.

What a fenced block is told by the words after its fence:

  ```python                 a part of the page's program: the parts of a page run in order, in one
                            process and one namespace, from the root of the repository
  ```python FILE            a quotation: stands in that file, which another test runs
  ```python no-run, ```py   only has to be correct Python: a program for TensorFlow 1, say
  ```text                   lines that the page's program prints
  ```json, ```gin           parsed: test_quoted_settings.py
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import os
import re
import types

import pytest

from tests.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = ("python", "python no-run", "py", "text", "sh", "gin", "json")


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced block: the words after the fence, its text, and the lines above it in the page."""

  kind: str
  text: str
  lines_above: int


def blocks_of(page: str) -> list[Block]:
  text = (DOCS / page).read_text()
  return [Block(m[1].strip(), m[2], text[: m.start(2)].count("\n")) for m in BLOCK.finditer(text)]


def program_of(blocks: list[Block]) -> str:
  """The runnable blocks as one program, on the lines that they have in the page."""
  program = ""
  for block in blocks:
    if block.kind == "python":
      program += "\n" * (block.lines_above - program.count("\n")) + block.text
  return program


def unknown_names(program: str) -> set[str]:
  """Names that a program reads, in functions that it does not call, too, and nowhere defines."""
  read, defined, codes = set[str](), set(vars(builtins)), [compile(program, "page", "exec")]
  for code in codes:
    codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    for instruction in dis.get_instructions(code):
      if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        read.add(instruction.argval)
      elif instruction.opname in ("STORE_GLOBAL", "STORE_NAME"):
        defined.add(instruction.argval)
  return read - defined - {"__name__"}


def words(line: str) -> str:
  return " ".join(line.split())


def test_pages_are_found():
  assert "own_operation.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_known_kind(page, repository):
  for block in blocks_of(page):
    quoted = block.kind.removeprefix("python ")
    assert block.kind in KINDS or (repository / quoted).is_file(), (page, block.kind)


@pytest.mark.parametrize("page", PAGES)
def test_quotations_and_programs_that_are_not_run(page, repository):
  for block in blocks_of(page):
    if block.kind in ("py", "python no-run"):
      compile(block.text, page, "exec")
    elif block.kind.startswith("python ") and block.kind not in KINDS:
      name = block.kind.removeprefix("python ")
      assert block.text in (repository / name).read_text(), f"{page}: not in {name}:\n{block.text}"


@pytest.mark.parametrize("page", PAGES)
def test_every_name_is_one_of_the_page(page):
  """A function that no block calls fails only for the reader who does."""
  assert not unknown_names(program_of(blocks_of(page)))


@pytest.mark.parametrize("page", [p for p in PAGES if program_of(blocks_of(p))])
def test_program(page, run_forked, tmp_path):
  """A traceback shows the lines of the page."""
  blocks = blocks_of(page)
  program = tmp_path / "program.py"
  program.write_text(program_of(blocks))
  # What a page writes lands in a folder of its own, in which the parts of the repository are seen.
  folder = tmp_path / "repository"
  folder.mkdir()
  for part in ROOT.iterdir():
    if not part.name.startswith("."):
      (folder / part.name).symlink_to(part)
  # TensorFlow's graph optimizer runs in the programs of the README; here as in tests/in_process.py.
  off = os.environ.get("MTF_GRAPH_OPTIMIZER") != "1"
  options = f"{{'disable_meta_optimizer': {off}}}"
  run = (
    f"import os; os.chdir({str(folder)!r}); "
    f"import tensorflow; tensorflow.config.optimizer.set_experimental_options({options}); "
    f"exec(compile(open({str(program)!r}).read(), {str(DOCS / page)!r}, 'exec'),"
    " {'__name__': '__main__'})"
  )
  result = run_forked(run, timeout=280)
  printed = {words(line) for line in result.stdout.splitlines()}
  told = {words(line) for b in blocks if b.kind == "text" for line in b.text.splitlines()}
  assert told - {""} <= printed, f"{page} tells other lines than its program prints"


def test_the_mechanism_itself():
  assert unknown_names("def f(x):\n  y = np.ones(x)\n  return tf.cast(y)\nimport np") == {"tf"}
  page = "# T\n\n```python\nx = 1\n```\n\n```py\ny = 2\n```\n```python\nprint(x)\n```\n"
  found = [Block(m[1].strip(), m[2], page[: m.start(2)].count("\n")) for m in BLOCK.finditer(page)]
  assert [b.kind for b in found] == ["python", "py", "python"]
  assert program_of(found).splitlines() == ["", "", "", "x = 1", "", "", "", "", "", "", "print(x)"]
