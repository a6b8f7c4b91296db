"""A wheel in a fresh environment; `make fresh` runs all trials, these are three of them."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from tests.packaging import fresh_install

pytestmark = pytest.mark.subprocess

TRIALS = {f"{t.name}, {t.place}": t for t in fresh_install.trials()}


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> fresh_install.FreshEnvironment:
  return fresh_install.FreshEnvironment(tmp_path_factory.mktemp("fresh"))


@pytest.mark.long  # `.ci/run` runs all trials, by `make fresh`.
@pytest.mark.parametrize(
  "name",
  [
    "imports, clone",  # Python finds the package of the clone before that of the wheel.
    "imports, folder",
    "mesh-transformer, a module, folder",
  ],
)
def test_trial(environment, name):
  problem, _ = environment.run(TRIALS[name])
  assert not problem


@pytest.mark.long
def test_environment_has_what_the_wheel_asks_for_and_no_more(environment):
  names = {path.name.lower() for path in environment.site.iterdir()}
  assert {"mesh_tensorflow", "tensorflow", "gin", "tqdm"} <= names
  assert not (environment.site / "mesh_tensorflow").is_symlink()
  assert not {"pytest", "hypothesis", "sacrebleu"} & names
  assert not any(name.startswith("__editable__") for name in names)


def test_every_block_runs_alone_and_in_order_at_both_places():
  for block in fresh_install.blocks_of_readme():
    assert f"{block.name}, {'clone' if block.needs_clone else 'folder'}" in TRIALS
  for together in ("the programs, at one prompt", "the commands, in one shell"):
    assert f"{together}, clone" in TRIALS and f"{together}, folder" in TRIALS


def test_what_is_made_smaller_stands_in_the_readme():
  text = "".join(b.text for b in fresh_install.blocks_of_readme())
  assert [long for long in fresh_install.SMALLER if long not in text] == []


@pytest.mark.parametrize(
  ("code", "output", "problem"),
  [
    (0, "fine: done", ""),
    (1, "done", "exit code 1"),
    (0, "", "does not say 'done'"),
    (0, "done\nTraceback (most recent call last):", "Traceback"),
    (0, "E0000 failed call to cuInit\ndone", "cuInit"),
  ],
)
def test_verdicts(code, output, problem):
  trial = fresh_install.Trial("t", "folder", ["true"], says=["done"])
  told = fresh_install._verdict(trial, code, output)
  assert problem in told and bool(told) == bool(problem)


def test_ci_runs_all_trials(repository: pathlib.Path):
  assert "make fresh" in (repository / ".ci" / "run").read_text()
  recipe = subprocess.run(
    ["make", "--no-print-directory", "-n", "fresh"],
    cwd=repository,
    capture_output=True,
    text=True,
    check=True,
  )
  assert recipe.stdout.strip().endswith("tests/packaging/fresh_install.py")
