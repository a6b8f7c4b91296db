"""Every block of the README does what it says."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def blocks() -> list[tuple[str, str]]:
  text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
  return BLOCK.findall(text)


def test_every_kind_of_block_is_run_by_a_test(blocks):
  assert {kind for kind, _ in blocks} == {"python", "sh", "text"}
  assert sum(kind == "python" for kind, _ in blocks) == 3


def test_python_blocks(blocks, run_subprocess):
  """The programs, in one process: the one that makes the devices comes first there."""
  python = [code for kind, code in blocks if kind == "python"]
  devices = next(code for code in python if "virtual_cpu_devices" in code)
  program = "\n".join([devices] + [code for code in python if code != devices])
  result = run_subprocess(program + "\nprint(mtf.describe(train_step))\n", timeout=280)
  losses = [float(x) for x in re.search(r"\[([\d., e-]+)\]", result.stdout).group(1).split(",")]
  assert losses[-1] < losses[0]
  assert "(8, 16)" in result.stdout
  assert "batch:rows" in result.stdout or "batch" in result.stdout


def test_make_targets_exist(blocks, repository):
  makefile = (repository / "Makefile").read_text()
  commands = [c for kind, code in blocks if kind == "sh" for c in code.splitlines()]
  targets = [c.split()[1] for c in commands if c.startswith("make ")]
  assert targets == ["demo", "test"]
  for target in targets:
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_training_command(blocks, run_subprocess, tmp_path):
  """The trainer's command line, as it stands but for the folder, the text and the steps."""
  code = next(c for kind, c in blocks if kind == "sh" and "transformer.main" in c)
  command = shlex.split(code.replace("\\\n", " "))
  assert command[0] == "python"
  text = tmp_path / "input.txt"
  text.write_text("All the world's a stage, and all the men and women merely players. " * 40)
  small = ["num_layers = 1", "d_model = 32", "d_ff = 32", "run.report_every = 1"]
  small += ["run.train_steps = 4", "run.iterations_per_loop = 2"]
  arguments = [
    a.replace("/tmp/shakespeare", str(tmp_path / "m")).replace("input.txt", str(text))
    for a in command[1:]
  ]
  result = run_subprocess(
    arguments + [f"--gin_param={b}" for b in small], timeout=280, cwd=tmp_path
  )
  assert "step       4/4  loss" in result.stdout


def test_example_commands(blocks, run_subprocess, tmp_path, repository):
  """The examples' command lines, as they stand but for fewer steps and less data."""
  lines = [c for kind, code in blocks if kind == "sh" for c in code.splitlines()]
  commands = [shlex.split(c, comments=True) for c in lines if c.startswith("python examples/")]
  small = {
    "examples/toy_model.py": ["--train_steps", "200"],
    "examples/mnist.py": [
      *("--made_examples", "400", "--hidden_size", "16", "--train_epochs", "1"),
      *("--model_dir", str(tmp_path / "model"), "--data_dir", str(tmp_path)),
    ],
  }
  assert [c[1] for c in commands] == list(small)
  for command in commands:
    result = run_subprocess(command[1:] + small[command[1]], timeout=150, cwd=repository)
    assert "loss" in result.stdout


def test_layout_that_the_examples_section_names(blocks, run_subprocess, repository):
  text = (repository / "README.md").read_text()
  flags = shlex.split(re.search(r"`(--mesh_shape .*?)`", text).group(1))
  result = run_subprocess(
    ["examples/toy_model.py", *flags, "--train_steps", "20", "--iterations", "10"],
    timeout=150,
    cwd=repository,
  )
  assert "layout batch:rows,hidden_odd:cols" in result.stdout
