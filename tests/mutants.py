"""Mutants: random single changes of the package, and whether the tests notice them.

  python tests/mutants.py                      40 of mesh_tensorflow/, 40 of transformer/
  python tests/mutants.py -n 10 --seed 7 transformer/modes
  python tests/mutants.py --only transformer/modes/chosen_checkpoints.py:148
  python tests/mutants.py --list transformer/modes/chosen_checkpoints.py

A change is one of: a sign, a comparison, `and` for `or`, a number larger by one, `min` for `max`,
True for False. What only words messages, types or the length of a cache is left as it is; see
`_Sites`. The tree is copied as it lies; the checkout is never touched. Each mutant has two
minutes of processor time, and of time in which all its threads sleep, so that a busy machine
changes no verdict: the tests of its room and those that name what was changed run, the likeliest
first, until one fails. A test that fails without the change, too, does not count, nor does one that
ran out of time and does not again.

A mutant that no test notices is either a test that is missing, or code that nobody needs. The
exit code is 1 if more than a tenth is not noticed.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("mesh_tensorflow", "transformer", "mesh_transformer_cli")
_TESTS_OF = {"transformer": ["transformer"], "mesh_transformer_cli": ["transformer", "commands"]}
SECONDS = 120
OTHER_FILES = 12  # Test files outside of the room that are run, too.
_OF_THE_ROOM = 30.0  # What it counts that descriptors are of the same room.
_FIRST = 6  # Of the room that are run before the others.
_LATE = re.compile("[Tt]imed ?out|TIMED_OUT|Timeout|not finished after|DEADLINE_EXCEEDED")

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
  ast.Lt: ("<", "<="),
  ast.LtE: ("<=", "<"),
  ast.Gt: (">", ">="),
  ast.GtE: (">=", ">"),
  ast.Eq: ("==", "!="),
  ast.NotEq: ("!=", "=="),
  ast.Is: ("is", "is not"),
  ast.IsNot: ("is not", "is"),
  ast.In: ("in", "not in"),
  ast.NotIn: ("not in", "in"),
}
_SAID = {"print", "warn", "warning", "info", "debug", "getLogger"}
_NO_MEANING = {"stacklevel", "maxsize", "daemon", "indent"}
_NAMESAKES = 3
_LARGE = 100  # Limits and budgets above: one more or less is no other program.


# ------------------------------------------------------------------------------- what is changed
@dataclasses.dataclass(frozen=True, order=True)
class Mutant:
  """A change: `old` stands at the place (line from 1, column in bytes), `new` comes there."""

  path: str
  line: int
  column: int
  old: str
  new: str
  inside: str

  def __str__(self) -> str:
    return f"{self.path}:{self.line}:{self.column} {self.old} -> {self.new} in {self.inside}"

  def applied(self, source: bytes) -> bytes:
    lines = source.splitlines(keepends=True)
    line, old = lines[self.line - 1], self.old.encode()
    assert line[self.column :].startswith(old), self
    rest = line[self.column + len(old) :]
    lines[self.line - 1] = line[: self.column] + self.new.encode() + rest
    return b"".join(lines)


class _Sites(ast.NodeVisitor):
  """Finds the mutants of a file."""

  def __init__(self, path: str, source: bytes):
    self.path, self.lines = path, source.splitlines()
    self.inside: list[str] = []
    self.found: list[Mutant] = []
    self.visit(ast.parse(source))

  def _add(self, line: int, column: int, old: str, new: str) -> None:
    inside = ".".join(self.inside) or "the module"
    self.found.append(Mutant(self.path, line, column, old, new, inside))

  def _add_between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
    """A change of the operator that stands between two expressions."""
    pattern = re.compile(rb"\s+".join(re.escape(w).encode() for w in old.split()))
    for line in range(left.end_lineno or 0, right.lineno + 1):
      text = self.lines[line - 1]
      start = (left.end_col_offset or 0) if line == left.end_lineno else 0
      end = right.col_offset if line == right.lineno else len(text)
      code = text[:end].split(b"#")[0] if line < right.lineno else text[:end]
      match = pattern.search(code, start)
      if match:
        self._add(line, match.start(), match.group().decode(), new)
        return

  def _visit_definition(self, node: Any) -> None:
    if node.name in ("__repr__", "__str__"):
      return
    self.inside.append(node.name)
    if not isinstance(node, ast.ClassDef):
      for default in [*node.args.defaults, *node.args.kw_defaults]:
        if default is not None:
          self.visit(default)
    for statement in node.body:
      self.visit(statement)
    self.inside.pop()

  visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_definition

  def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
    if node.value is not None:
      self.visit(node.value)

  def visit_Raise(self, node: ast.Raise) -> None:
    """A message."""

  def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
    """Text; and Python 3.11 does not say where its parts are."""

  def visit_Assert(self, node: ast.Assert) -> None:
    self.visit(node.test)

  def visit_If(self, node: ast.If) -> None:
    if isinstance(node.test, ast.Compare) and getattr(node.test.left, "id", "") == "__name__":
      return
    self.generic_visit(node)

  def visit_Call(self, node: ast.Call) -> None:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in _SAID:
      return
    if isinstance(node.func, ast.Name) and name in ("min", "max"):
      other = {"min": "max", "max": "min"}[name]
      self._add(node.func.lineno, node.func.col_offset, name, other)
    self.generic_visit(node)

  def visit_keyword(self, node: ast.keyword) -> None:
    if node.arg not in _NO_MEANING:
      self.visit(node.value)

  def visit_Compare(self, node: ast.Compare) -> None:
    for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators):
      self._add_between(left, right, *_COMPARISONS[type(operator)])
    self.generic_visit(node)

  def visit_BoolOp(self, node: ast.BoolOp) -> None:
    # Of three, one change would leave `a or b and c`: what Python reads as something else again.
    if len(node.values) == 2:
      old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
      self._add_between(*node.values, old, new)
    self.generic_visit(node)

  def visit_BinOp(self, node: ast.BinOp) -> None:
    if _is_text(node):
      return
    if isinstance(node.op, (ast.Add, ast.Sub)):
      old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
      self._add_between(node.left, node.right, old, new)
    self.generic_visit(node)

  def visit_AugAssign(self, node: ast.AugAssign) -> None:
    if isinstance(node.op, (ast.Add, ast.Sub)) and not _is_text(node.value):
      old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
      self._add_between(node.target, node.value, old, new)
    self.generic_visit(node)

  def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
    if isinstance(node.op, ast.USub):
      self._add(node.lineno, node.col_offset, "-", "+")
      if isinstance(node.operand, ast.Constant):
        return
    elif isinstance(node.op, ast.Not):
      self._add(node.lineno, node.col_offset, "not ", "")
    self.generic_visit(node)

  def visit_Constant(self, node: ast.Constant) -> None:
    if isinstance(node.value, bool):
      self._add(node.lineno, node.col_offset, str(node.value), str(not node.value))
    elif isinstance(node.value, int) and node.value < _LARGE:
      old = self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
      self._add(node.lineno, node.col_offset, old, str(node.value + 1))


def _is_text(node: ast.AST) -> bool:
  if isinstance(node, ast.BinOp):
    return _is_text(node.left) or _is_text(node.right)
  return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def mutants(root: pathlib.Path, under: str) -> list[Mutant]:
  """All mutants of a file, or of the files in a folder."""
  top = root / under
  files = [top] if top.is_file() else sorted(top.rglob("*.py"))
  return [
    mutant
    for path in files
    for mutant in _Sites(path.relative_to(root).as_posix(), path.read_bytes()).found
  ]


def _is_program(mutant: Mutant) -> bool:
  """Whether Python can read the file with the change."""
  try:
    ast.parse(mutant.applied((ROOT / mutant.path).read_bytes()))
  except SyntaxError:
    return False
  return True


def _drawn(found: Sequence[Mutant], number: int, rng: random.Random) -> list[Mutant]:
  candidates = rng.sample(found, len(found))
  return list(itertools.islice(filter(_is_program, candidates), number))


# ------------------------------------------------------------------------------- which tests
def _words(node: ast.AST) -> set[str]:
  """The names in a piece of program, also those in its strings (lines of descriptors)."""
  words: set[str] = set()
  for n in ast.walk(node):
    if isinstance(n, ast.Name):
      words.add(n.id)
    elif isinstance(n, ast.Attribute):
      words.add(n.attr)
    elif isinstance(n, ast.alias):
      words.update(n.name.split("."))
    elif isinstance(n, ast.keyword) and n.arg:
      words.add(n.arg)
    elif isinstance(n, ast.Constant) and isinstance(n.value, str) and len(n.value) < 400:
      words.update(re.findall(r"[A-Za-z_]\w+", n.value))
  return words


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Choice:
  """Which tests are the likeliest to notice a change: those that name what was changed.

  Args:
    root: the tree.
  """

  def __init__(self, root: pathlib.Path):
    self.root = root
    # Who uses a name: the names of functions and classes of the packages.
    self.users: dict[str, set[str]] = collections.defaultdict(set)
    self.defined: collections.Counter[str] = collections.Counter()
    for package in PACKAGES:
      for path in sorted((root / package).rglob("*.py")):
        for name, node in self._definitions(ast.parse(path.read_bytes())):
          self.defined[name] += 1
          for word in _words(node):
            self.users[word].add(name)
    # Of each test file the names in it, and in each of its tests (with what the test calls there).
    self.of_file: dict[str, set[str]] = {}
    self.of_test: dict[tuple[str, str], set[str]] = {}
    for path in sorted((root / "tests").rglob("*.py")):
      self._read_tests(path)
    self.files_with = collections.Counter(w for words in self.of_file.values() for w in words)

  @staticmethod
  def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
      if isinstance(node, _Definition):
        yield node.name, node
        if isinstance(node, ast.ClassDef):
          for method in node.body:
            if isinstance(method, _Definition) and not method.name.startswith("__"):
              yield method.name, method

  def _read_tests(self, path: pathlib.Path) -> None:
    file, tree = path.relative_to(self.root).as_posix(), ast.parse(path.read_bytes())
    own = {name: _words(node) for name, node in self._definitions(tree)}
    self.of_file[file] = _words(tree)
    for name, words in own.items():
      reached = set(words)
      for word in words & own.keys():
        reached |= own[word]
      self.of_test[file, name] = reached

  def weights(self, mutant: Mutant) -> dict[str, float]:
    """What to look for: the names around the change, and of those that use them."""
    module = pathlib.PurePosixPath(mutant.path)
    found = {name: 4.0 for name in mutant.inside.split(".") if self._says_something(name)}
    edge, weight = set(found), 1.0
    for _ in range(3):
      users = {user for name in edge for user in self.users[name]}
      edge = {user for user in users if user not in found and self._says_something(user)}
      edge = set(sorted(edge)[:60])
      found |= dict.fromkeys(edge, weight)
      weight /= 3
    if mutant.inside == "the module":
      text = (self.root / mutant.path).read_text().splitlines()[mutant.line - 1]
      found |= dict.fromkeys(re.findall(r"[A-Za-z_]\w+", text), 2.0)
    found[module.stem] = 2.0
    count = len(self.of_file)
    return {n: w * math.log(count / (1 + self.files_with[n])) ** 2 for n, w in found.items()}

  def _says_something(self, name: str) -> bool:
    """Not so `lower`, `gradient`, `call`: methods of many classes."""
    return 1 <= self.defined[name] <= _NAMESAKES

  def tests(self, mutant: Mutant) -> tuple[list[str], list[str], dict[str, float]]:
    """Files of the room, other ones, and weights: of words, files, and tests ("file::test")."""
    weights = self.weights(mutant)

    def weigh(words: set[str]) -> float:
      return sum(sorted((weights[w] for w in words if w in weights), reverse=True)[:12])

    room = self._room(mutant.path)
    score = dict(weights)
    for file, words in self.of_file.items():
      score[file] = 0.2 * weigh(words)
    for (file, test), words in self.of_test.items():
      score[f"{file}::{test}"] = weigh(words) + score[file]
    # The suite of the descriptors is as likely to notice as they are.
    for key, value in list(score.items()):
      file, _, name = key.partition("::")
      if name and "/descriptors_" in file:
        score[file] = max(score[file], value)
        suite = f"{file.rpartition('/')[0]}/test_{self._suite(file)}.py::any"
        own = _OF_THE_ROOM * (bool(room) and file.startswith(room))
        score[suite] = max(score.get(suite, 0.0), value + own)
    # A family of operations often has the name of the file that defines them.
    for file in score:
      if file.endswith(f"/descriptors_{pathlib.PurePosixPath(mutant.path).stem}.py"):
        score[file] += _OF_THE_ROOM
    inside: list[str] = []
    outside: list[str] = []
    for file in self.of_file:
      if pathlib.PurePosixPath(file).name.startswith("test_"):
        (inside if room and file.startswith(room) else outside).append(file)
    best = {file: score[file] for file in outside}
    for key, value in score.items():
      file, _, test = key.partition("::")
      if file in best and test.startswith(("test", "Test", "any")):
        best[file] = max(best[file], value)
    outside.sort(key=lambda file: -best[file])
    return inside, [f for f in outside[:OTHER_FILES] if best[f] > 0], score

  @staticmethod
  def _suite(file: str) -> str:
    return "layers_conformance" if "/model/layers/" in file else "conformance"

  def _room(self, path: str) -> str:
    """The folder of tests, with a slash; "" if there is none."""
    package, *folders = pathlib.PurePosixPath(path).parts[:-1]
    parts = ["tests", *_TESTS_OF.get(package, []), *folders]
    while len(parts) > 1 and not (self.root / "/".join(parts)).is_dir():
      parts.pop()
    return "/".join(parts) + "/" if len(parts) > 1 else ""


class _Plugin:
  """Runs the likeliest tests first, and notes what happens in a file.

  Args:
    room: the files of the room; their likely tests come first.
    score: as `Choice.tests` makes it.
    skipped: the tests that fail without a change.
    notes: file to write to: one JSON list a line.
    only: the tests to run; all if there are none.
  """

  def __init__(
    self,
    room: Sequence[str],
    score: Mapping[str, float],
    skipped: Sequence[str],
    notes: pathlib.Path,
    only: Sequence[str] = (),
  ):
    self.room = set(room)
    self.score, self.skipped, self.notes, self.only = score, set(skipped), notes, set(only)

  def _note(self, *what: Any) -> None:
    with self.notes.open("a") as f:
      f.write(json.dumps([*what]) + "\n")

  def pytest_collection_modifyitems(self, items: list[Any]) -> None:
    first = {id(item): self._score(item) for item in items}
    best: dict[str, float] = {}
    for item in items:
      file = item.nodeid.split("::")[0]
      best[file] = max(best.get(file, 0.0), first[id(item)])
    items[:] = [i for i in items if i.nodeid not in self.skipped]
    if self.only:
      items[:] = [i for i in items if i.nodeid in self.only]

    def place(item: Any) -> tuple[Any, ...]:
      file, own = item.nodeid.split("::")[0], first[id(item)]
      likely = own > 0.3 * best[file]
      return not likely, file not in self.room, -best[file], file, -own

    items.sort(key=place)

  pytest_collection_modifyitems.hookimpl = {"trylast": True}  # type: ignore[attr-defined]

  def _score(self, item: Any) -> float:
    file, *names = item.nodeid.split("[")[0].split("::")
    own = max(self.score.get(f"{file}::{name}", 0.0) for name in names)
    # What it is about may be a parameter: an operation or layer, or a file of descriptors of them.
    folder = file.rpartition("/")[0]
    for value in getattr(getattr(item, "callspec", None), "params", {}).values():
      name = getattr(value, "name", value)
      if isinstance(name, str):
        own += self.score.get(f"{folder}/descriptors_{name}.py", 0.0)
        own += self.score.get(name, 0.0)
    starts = {"run_subprocess", "run_workers"} & set(getattr(item, "fixturenames", ()))
    return own * (0.4 if starts or item.get_closest_marker("slow") else 1.0)

  def pytest_runtest_logstart(self, nodeid: str) -> None:
    self._note("start", nodeid, time.time())

  def pytest_runtest_logreport(self, report: Any) -> None:
    if report.failed:
      last = str(report.longrepr).strip().splitlines()
      self._note("failed", report.nodeid, next((x for x in last if x.startswith("E ")), "")[:200])
    elif report.when == "call":
      self._note("passed", report.nodeid, report.duration)

  def pytest_collectreport(self, report: Any) -> None:
    if report.failed:
      self._note("failed", report.nodeid, "cannot be imported")


# ------------------------------------------------------------------------------- running them
@dataclasses.dataclass
class Run:
  """What came of running tests: the one that failed, those that passed, the one that was cut.

  Seconds are those of processors, but for those of the one that was cut.
  """

  failed: str = ""
  why: str = ""
  passed: list[str] = dataclasses.field(default_factory=list)
  cut: str = ""
  cut_seconds: float = 0.0
  code: int | None = None
  seconds: float = 0.0


class _Family:
  """A process and its descendants.

  Args:
    pid: of the process.
  """

  def __init__(self, pid: int):
    self.pid, self.pids = pid, [pid]
    self.used = self.slept = 0.0
    self._looked = time.time()

  def look(self) -> float:
    """Seconds of processors so far, and those of the clock in which all threads slept."""
    children, seconds = collections.defaultdict(list), {}
    for entry in pathlib.Path("/proc").iterdir():
      if entry.name.isdigit():
        with contextlib.suppress(OSError):
          stat = self._stat(entry)
          children[int(stat[1])].append(int(entry.name))
          # With those of the children that ended.
          seconds[int(entry.name)] = sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    self.pids, edge = [], [self.pid]
    while edge:
      self.pids += edge
      edge = [c for p in edge for c in children[p]]
    used = sum(seconds.get(p, 0.0) for p in self.pids)
    now, before = time.time(), self._looked
    self._looked = now
    # Who waits for a processor, or was stopped, does not sleep.
    if used <= self.used and self._sleeps():
      self.slept += now - before
    self.used = max(used, self.used)
    return self.used + self.slept

  @staticmethod
  def _stat(folder: pathlib.Path) -> list[str]:
    return (folder / "stat").read_text().rpartition(")")[2].split()

  def _sleeps(self) -> bool:
    for pid in self.pids:
      with contextlib.suppress(OSError):
        if any(self._stat(t)[0] not in "SZ" for t in pathlib.Path(f"/proc/{pid}/task").iterdir()):
          return False
    return True

  def kill(self) -> None:
    self.look()
    for pid in self.pids:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Copy:
  """A copy of the tree, in which mutants live.

  Args:
    folder: where it is made.
  """

  def __init__(self, folder: pathlib.Path):
    self.root, self.notes = folder / "tree", folder / "notes"
    listed = subprocess.run(
      ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
      cwd=ROOT, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.decode().split("\0")):
      source, target = ROOT / name, self.root / name
      if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    self.count = 0

  @contextlib.contextmanager
  def changed(self, mutant: Mutant) -> Iterator[None]:
    path = self.root / mutant.path
    source, times = path.read_bytes(), path.stat()
    self.count += 1
    path.write_bytes(mutant.applied(source))
    # Compiled files are known by the second of the change and the size.
    os.utime(path, (times.st_atime, times.st_mtime + 10 * self.count))
    try:
      yield
    finally:
      path.write_bytes(source)
      os.utime(path, (times.st_atime, times.st_mtime))

  def run(
    self,
    room: Sequence[str],
    others: Sequence[str],
    score: Mapping[str, float],
    skipped: Sequence[str],
    seconds: float,
    only: Sequence[str] = (),
  ) -> Run:
    """Runs tests in a fork of this process, which has imported TensorFlow and not the package."""
    self.notes.write_text("")
    used, code = 0.0, None
    pid = os.fork()
    if not pid:
      plugin = _Plugin(room, score, skipped, self.notes, only)
      self._run_here([*room, *others], plugin)
    family = _Family(pid)
    while used < seconds:
      used = family.look()
      done, status, usage = os.wait4(pid, os.WNOHANG)
      if done:
        code = os.waitstatus_to_exitcode(status)
        used = max(used, usage.ru_utime + usage.ru_stime + family.slept)
        break
      time.sleep(0.3)
    else:
      family.kill()
      os.waitpid(pid, 0)
    return self._result(code, used)

  def _result(self, code: int | None, seconds: float) -> Run:
    run = Run(code=code, seconds=seconds)
    started: tuple[str, float] = ("", 0.0)
    for kind, node, value in map(json.loads, self.notes.read_text().splitlines()):
      if kind == "start":
        started = (node, value)
      elif kind == "passed":
        run.passed.append(node)
        started = ("", 0.0)
      elif not run.failed:
        run.failed, run.why = node, value
    if not run.failed and started[0]:
      run.cut, run.cut_seconds = started[0], time.time() - started[1]
    return run

  def _run_here(self, files: Sequence[str], plugin: _Plugin) -> None:
    code = 70
    try:
      signal.signal(signal.SIGTERM, signal.SIG_DFL)
      os.setsid()
      os.chdir(self.root)
      sys.path[:0] = [str(self.root)]
      with open(os.devnull, "r+") as nothing:
        for number in range(3):
          os.dup2(nothing.fileno(), number)
      import pytest

      flags = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
      code = int(pytest.main([*flags, f"--rootdir={self.root}", *files], plugins=[plugin]))
    finally:
      os._exit(code)


class Judge:
  """Tries mutants.

  Args:
    copy: of the tree.
    seconds: for each.
  """

  def __init__(self, copy: Copy, seconds: float):
    self.copy, self.seconds = copy, seconds
    self.choice = Choice(copy.root)
    self.passed: set[str] = set()
    self.failing: set[str] = set()
    self.spent = 0.0  # By the last mutant.
    self.late: set[str] = set()  # Tests that ran out of time of their own; of one mutant.

  def judge(self, mutant: Mutant) -> tuple[str, str]:
    """("noticed" or "not noticed", by which test or why not)."""
    room, others, score = self.choice.tests(mutant)

    def best(file: str) -> float:
      return max((v for k, v in score.items() if k.startswith(f"{file}::")), default=0.0)

    room = sorted(room, key=best, reverse=True)
    # To import all files of a large room takes longer than most mutants live.
    stages = [(room[:_FIRST], others[: _FIRST // 2]), (room[_FIRST:], others[_FIRST // 2 :])]
    left, passed = self.seconds, 0
    self.late.clear()
    self.spent = 0.0
    while (stages := [s for s in stages if any(s)]) and left > 5:
      with self.copy.changed(mutant):
        run = self.copy.run(*stages[0], score, sorted(self.failing | self.late), left)
      self.passed.update(run.passed)
      left, passed = left - run.seconds, passed + len(run.passed)
      self.spent += run.seconds
      suspect = run.failed or run.cut
      if run.code is None and not run.failed:
        if run.cut_seconds > 20 and self._hangs(mutant, run.cut):
          return "noticed", f"{suspect} hangs"
      elif not suspect:
        if run.code not in (0, 5):
          return "noticed", f"pytest ended with code {run.code}"
        stages.pop(0)
      elif _LATE.search(run.why) and not self._again(mutant, suspect, self.seconds).failed:
        self.late.add(suspect)
        stages[0] = self._without(stages[0], suspect)
      elif suspect in self.passed or self._passes(suspect, 2 * self.seconds):
        return "noticed", f"{suspect}: {run.why or f'ended with code {run.code}'}"
      else:  # It fails without the change, too: the others have the time that is left.
        self.failing.add(suspect)
        stages[0] = self._without(stages[0], suspect)
    return "not noticed", f"{passed} tests passed in {self.seconds - left:.0f} s"

  @staticmethod
  def _without(stage: tuple[list[str], list[str]], suspect: str) -> tuple[list[str], list[str]]:
    """Files without one that cannot be imported; tests are skipped."""
    room, others = ([f for f in files if f != suspect] for files in stage)
    return room, others

  def _alone(self, test: str, seconds: float) -> Run:
    """Runs a test, or imports a file."""
    file, _, name = test.partition("::")
    return self.copy.run([file], [], {}, [], seconds, only=[test] if name else ["none of them"])

  def _again(self, mutant: Mutant, test: str, seconds: float) -> Run:
    with self.copy.changed(mutant):
      return self._alone(test, seconds)

  def _passes(self, test: str, seconds: float) -> bool:
    """Whether it goes well without a change."""
    run = self._alone(test, seconds)
    return not run.failed and run.code in ((0,) if "::" in test else (0, 5))

  def _hangs(self, mutant: Mutant, test: str) -> bool:
    """Whether a test that was cut does not end by itself, either; it does without the change."""
    without = self._alone(test, self.seconds)
    if without.failed or without.code != 0:
      return False
    return self._again(mutant, test, max(30.0, 4 * without.seconds)).code is None


def main(arguments: Sequence[str] | None = None) -> int:
  """Tries mutants, prints a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("under", nargs="*", default=list(PACKAGES[:2]), help="folders or files")
  parser.add_argument("-n", type=int, default=40, help="mutants of each of them")
  parser.add_argument("--seed", type=int, default=0, help="of the choice")
  parser.add_argument("--seconds", type=float, default=SECONDS, help="of processors, for each")
  parser.add_argument("--skip", type=int, default=0, help="of the mutants drawn: were tried before")
  parser.add_argument("--until", type=float, default=math.inf, help="minutes for all of them")
  parser.add_argument("--only", nargs="*", default=[], help="path:line: the mutants of these lines")
  parser.add_argument("--list", action="store_true", help="print the mutants, do not try them")
  args = parser.parse_args(arguments)
  rng = random.Random(args.seed)
  drawn = []
  for under in [] if args.only else args.under:
    found = mutants(ROOT, under)
    drawn.append(found if args.list else _drawn(found, args.n, rng))
  for place in args.only:
    path, _, line = place.partition(":")
    drawn.append([m for m in mutants(ROOT, path) if not line or m.line == int(line)])
  # In turns, so that a run that ends early has tried as many of each.
  rows = [m for i in range(max(map(len, drawn))) for d in drawn for m in d[i : i + 1]][args.skip :]
  if args.list:
    print(*sorted(rows), sep="\n")
    return 0
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the copy is removed.
  return _try(rows, args.skip, args.seconds, time.time() + 60 * args.until)


def _try(rows: Sequence[Mutant], skip: int, seconds: float, end: float) -> int:
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
  os.environ.setdefault("MTF_TEST_DATA", str(ROOT.parent / "shared" / "data"))
  # Else each fork would compile anew what it imports.
  os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
  sys.dont_write_bytecode = False
  # What each fork would import anew; not the package itself.
  import gin  # noqa: F401
  import hypothesis  # noqa: F401
  import pytest  # noqa: F401
  import tensorflow  # noqa: F401

  counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
  with tempfile.TemporaryDirectory(prefix="mtf_mutants_") as folder:
    judge = Judge(Copy(pathlib.Path(folder)), seconds)
    for number, mutant in enumerate(rows, skip + 1):
      if time.time() > end:
        break
      verdict, by = judge.judge(mutant)
      counts[mutant.path.split("/")[0]][verdict] += 1
      text = f"{number:3} {verdict:<11} {judge.spent:4.0f} s  {mutant}"
      print(f"{text}\n{'':24}{by}", flush=True)
    if judge.failing:
      print("Fail without a change, too:", *sorted(judge.failing), sep="\n  ")
  for package, count in counts.items():
    print(f"{package}: {count['noticed']} of {count.total()} noticed")
  total = sum(counts.values(), collections.Counter())
  return int(10 * total["not noticed"] > total.total())


if __name__ == "__main__":
  sys.exit(main())
