"""Every block of the README does what it says: by itself, and all of them in their order.

Here in this installation; `tests/packaging/fresh_install.py` runs them in a new one, of a wheel.
"""

from __future__ import annotations

import re
import shlex

import pytest

from tests.conftest import ROOT
from tests.packaging import fresh_install

pytestmark = pytest.mark.subprocess

README = (ROOT / "README.md").read_text()
BLOCKS = fresh_install.blocks_of_readme()
PROGRAMS = [b for b in BLOCKS if b.kind == "python"]
COMMANDS = [
  command
  for block in BLOCKS
  if block.kind == "sh"
  for command in block.smaller.replace("\\\n", " ").splitlines()
]


def test_every_kind_of_block_is_run_by_a_test():
  assert {kind for kind, _ in fresh_install.BLOCK.findall(README)} == {"python", "sh"}
  assert {b.kind for b in BLOCKS} == {"python", "sh"} and len(PROGRAMS) == 3


def check_program(text: str, output: str) -> None:
  """That losses fall, and that shapes and a table are what the README says."""
  assert "train_step" in text or "Lowering" in text or "keras" in text
  if "keras" in text:
    said = README.split("how the weights lie:")[1].partition("| `set_distribution")[0]
    printed = {" ".join(line.split()) for line in output.splitlines()}
    table = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
    assert len(table) == 4 and printed.issuperset(table)
  if "train_step" in text:
    losses = [float(x) for x in re.search(r"\[([\d., e-]+)\]", output).group(1).split(",")]
    assert len(losses) == 5 and losses[-1] < losses[0]
  if "Lowering" in text:
    assert "(8, 16)" in output


@pytest.mark.long  # `make fresh` runs each alone, too, and the commands.
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda b: str(b.number))
def test_program_alone(block, run_subprocess, tmp_path):
  result = run_subprocess(block.text, timeout=280, cwd=tmp_path)
  check_program(block.text, result.stdout)
  assert result.stderr == ""


def test_programs_in_their_order(run_forked, tmp_path):
  """In one process, as in a notebook; then what the README says of `describe`."""
  program = "\n".join(b.text for b in PROGRAMS)
  described = re.search(r"`(print\(mtf\.describe\(.*?\)\))`", README).group(1)
  result = run_forked(f"{program}\n{described}\n", timeout=280, cwd=tmp_path)
  check_program(program, result.stdout)
  assert "batch:rows" in result.stdout and "hidden:cols" in result.stdout
  assert result.stderr == ""


def test_make_targets_exist(repository):
  makefile = (repository / "Makefile").read_text()
  targets = [c.split()[2] for c in COMMANDS if c.startswith("make -n ")]
  assert targets == ["demo", "test"]
  for target in targets:
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize(
  ("program", "says"),
  [
    ("mesh_tensorflow.transformer.main", "step       4/4  loss"),
    ("mesh_tensorflow.examples.toy_model", "eval loss"),
    ("mesh_tensorflow.examples.mnist", "accuracy on"),
  ],
)
def test_command(program, says, run_subprocess, tmp_path):
  """As it stands, but for `fresh_install.SMALLER`, and in an empty folder."""
  (command,) = (c for c in COMMANDS if program in c)
  words = shlex.split(command, comments=True)
  assert words[:3] == ["python", "-m", program]
  result = run_subprocess(words[1:], timeout=280, cwd=tmp_path)
  assert says in result.stdout
  assert not any(text in result.stderr for text in fresh_install.NOISE)


def test_every_python_command_is_run():
  assert len([c for c in COMMANDS if c.startswith("python ")]) == 3


def test_layout_that_the_examples_section_names(run_forked, repository):
  flags = shlex.split(re.search(r"`(--mesh_shape .*?)`", README).group(1))
  result = run_forked(
    ["examples/toy_model.py", *flags, "--train_steps", "20", "--iterations", "10"],
    timeout=150,
    cwd=repository,
  )
  assert "layout batch:rows,hidden_odd:cols" in result.stdout


def test_gin_files_that_the_readme_names(repository):
  named = re.findall(r"--gin_file=([\w/]+\.gin)", README)
  assert len(named) >= 3
  for name in named:
    assert (repository / "gin" / name).is_file(), name
