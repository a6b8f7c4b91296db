"""Set-up and fixtures of all tests: folders, subprocesses, what is quick, what is told in the end.

What needs TensorFlow is in `tests/in_process.py`: the process that only hands tests to others
(pytest-xdist) never imports it, which takes five seconds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The tests are about virtual CPUs; test processes would also fight over the memory of a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import pytest  # noqa: E402

from tests import fork_server  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Settings of the surrounding run that must not reach the programs under test.
_NOT_INHERITED = ("TF_CONFIG", "XLA_FLAGS", "PYTHONPATH", "PYTHONSTARTUP")


def pytest_configure(config: pytest.Config) -> None:
  hands_out = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
  if not hands_out:
    # Imports and collection leave no garbage; `tests/in_process.py` switches it on for the tests.
    gc.disable()
    with _without_start_up_noise():
      in_process = importlib.import_module("tests.in_process")
    config.pluginmanager.register(in_process)


@contextlib.contextmanager
def _without_start_up_noise() -> Iterator[None]:
  """TensorFlow says that there is no GPU before it knows its log level: not on our terminal."""
  stderr = os.dup(2)
  try:
    with open(os.devnull, "w") as nowhere:
      os.dup2(nowhere.fileno(), 2)
    yield
  finally:
    os.dup2(stderr, 2)
    os.close(stderr)


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
  """The root folder of the repository."""
  return ROOT


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
  """The folder of text data sets, which the repository does not hold."""
  named = os.environ.get("MTF_TEST_DATA")
  folder = pathlib.Path(named) if named else ROOT.parent / "shared" / "data"
  if not folder.is_dir():
    pytest.skip(
      f"no test data: MTF_TEST_DATA={named} is no folder"
      if named
      else "no test data: set MTF_TEST_DATA to a folder with tinyshakespeare/ and multi30k/"
    )
  return folder


@pytest.fixture
def ctrl_c() -> Iterator[None]:
  """SIGINT as in a terminal: tests that run in the background ignore it."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def run_subprocess() -> Callable[..., subprocess.CompletedProcess[str]]:
  """A function that runs Python in another process; see `_run_subprocess`."""
  return _run_subprocess


@pytest.fixture(scope="session")
def run_forked() -> Callable[..., subprocess.CompletedProcess[str]]:
  """As `run_subprocess`, of a process that has imported TensorFlow; see `tests/fork_server.py`."""
  return functools.partial(_run_subprocess, forked=True)


def _run_subprocess(
  args: str | Sequence[str | os.PathLike[str]],
  *,
  timeout: float = 240,
  env: Mapping[str, str] | None = None,
  cwd: str | os.PathLike[str] | None = None,
  check: bool = True,
  forked: bool = False,
) -> subprocess.CompletedProcess[str]:
  """Runs Python with `args`, and fails the test with its output if that goes wrong.

  Args:
    args: a program text for `python -c`, or the arguments after `python`.
    timeout: seconds after which the process and its children are killed and the test fails.
    env: environment variables to add to the inherited ones.
    cwd: the folder it starts in; the root of the repository if not given.
    check: whether an exit code other than 0 fails the test.
    forked: whether it is a fork of `tests/fork_server.py`.

  Returns:
    The finished process, with `stdout`, `stderr` and `returncode`.
  """
  arguments = ["-c", args] if isinstance(args, str) else [os.fspath(a) for a in args]
  command = [sys.executable, *arguments]
  inherited = {
    name: value
    for name, value in os.environ.items()
    if name not in _NOT_INHERITED and not name.startswith("PYTEST_")
  }
  environ, folder = {**inherited, **(env or {})}, cwd or ROOT
  problem = None
  with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    if forked:
      process = fork_server.start(arguments, out, err, environ, folder)
    else:
      process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=environ,
        cwd=folder,
        start_new_session=True,
      )
    try:
      process.wait(timeout)
      if check and process.returncode != 0:
        problem = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
      problem = f"not finished after {timeout} s, killed"
    finally:
      # Also reached when the test itself is interrupted: leave no process behind.
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    stdout, stderr = (_text(file) for file in (out, err))
  if problem:
    pytest.fail(
      f"{problem}: {shlex.join(command)}\n"
      f"in {folder}\n"
      f"--- stdout (end) ---\n{stdout[-4000:]}\n"
      f"--- stderr (end) ---\n{stderr[-8000:]}",
      pytrace=False,
    )
  return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _text(file: IO[bytes]) -> str:
  file.seek(0)
  return file.read().decode(errors="replace")


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
    "--quick",
    type=int,
    nargs="?",
    const=1,
    metavar="N",
    help="run one case each of at most N (1) quick test functions of a file, and a part of each "
    "family of the conformance suite (a 24th; all from N=24 on)",
  )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """Tests that start processes come first: while they wait, the others have the cores."""
  if config.getoption("quick"):
    items[:] = _sample(items, config.getoption("quick"))
  items.sort(key=lambda item: not _starts_processes(item))


def _sample(items: list[pytest.Item], functions: int) -> list[pytest.Item]:
  """Of each file so many functions that are neither slow nor start processes, a case of each.

  They are the same ones in every run. Of the conformance suite it is a case of each family, in
  another mode than that of the family before it.
  """
  cases: dict[pathlib.Path, dict[str, list[pytest.Item]]] = {}
  for item in items:
    slow = item.get_closest_marker("slow") or item.get_closest_marker("long")
    if not slow and not _starts_processes(item):
      name = item.nodeid.partition("[")[0]
      if "draw" in item.fixturenames:
        name += item.callspec.params["family"]
      cases.setdefault(item.path, {}).setdefault(name, []).append(item)
  chosen: set[pytest.Item] = set()
  for of_file in cases.values():
    families = [name for name, found in of_file.items() if "draw" in found[0].fixturenames]
    others = sorted(set(of_file) - set(families), key=lambda name: zlib.crc32(name.encode()))
    chosen.update(of_file[name][0] for name in others[:functions])
    for i, name in enumerate(families):
      modes = list(dict.fromkeys(item.callspec.params["mode"] for item in of_file[name]))
      mode = modes[i % len(modes)]
      chosen.add(next(x for x in of_file[name] if x.callspec.params["mode"] == mode))
  return [i for i in items if i in chosen]


def _starts_processes(item: pytest.Item) -> bool:
  fixtures = {"run_subprocess", "run_forked"}
  return bool(item.get_closest_marker("subprocess") or fixtures.intersection(item.fixturenames))


def pytest_terminal_summary(terminalreporter) -> None:
  """Tells how many cases the conformance suite checked: one test of it checks many."""
  reports = [r for group in terminalreporter.stats.values() for r in group]
  found = [p for r in reports if getattr(r, "when", "") == "call" for p in r.user_properties]
  families = [value for name, value in found if name == "conformance"]
  others = sum(value for name, value in found if name == "conformance_cases")
  _tell_further_ways(terminalreporter, [v for name, v in found if name == "conformance_way"])
  _tell_wrong_arguments(terminalreporter, [v for name, v in found if name == "wrong_arguments"])
  if not families and not others:
    return
  kinds = ("values", "gradients", "refusals")
  row = "{:<18} {:>11} {:>8} {:>9} {:>10} {:>9}".format
  write = terminalreporter.write_line
  write(row("conformance", "descriptors", "layouts", *kinds))
  for family in sorted({f["family"] for f in families}):
    of_family = [f for f in families if f["family"] == family]
    by_mode = [{f["layout"] for f in of_family if f["mode"] == m} for m in _modes(of_family)]
    sums = [sum(f[kind] for f in of_family) for kind in kinds]
    write(row(family, of_family[0]["descriptors"], min(map(len, by_mode)), *sums))
  checked = sum(f[kind] for f in families for kind in kinds) + others
  write(f"conformance: {checked} values, gradients and refusals checked, in up to 4 modes.")
  write("Layouts: the (mesh, layout) pairs of the mode that has fewest; in each mode an operation")
  write("runs on one of them, or on all if MTF_CONFORMANCE_DRAWS is set.")


def _tell_further_ways(terminalreporter, ran: Sequence[Mapping[str, Any]]) -> None:
  """The further ways to run a descriptor: how many cases of each."""
  for way in sorted({r["way"] for r in ran}):
    cases = {r["family"]: r["cases"] for r in ran if r["way"] == way}
    each = ", ".join(f"{family} {n}" for family, n in sorted(cases.items()) if n)
    terminalreporter.write_line(f"conformance, {way}: {sum(cases.values())} cases ({each})")


def _tell_wrong_arguments(terminalreporter, ran: Sequence[Mapping[str, int]]) -> None:
  """What came of calls with wrong arguments."""
  for counts in ran:
    terminalreporter.write_line(
      "wrong arguments: {functions} functions, {arguments} arguments, {values} wrong values: "
      "{typed} refused when the graph is built, {late} when it is lowered, {accepted} accepted, "
      "{untyped} answered by another error".format(**counts)
    )


def _modes(families: Sequence[Mapping[str, str]]) -> set[str]:
  return {f["mode"] for f in families}
