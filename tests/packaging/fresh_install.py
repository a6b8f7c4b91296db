"""Installs a wheel into a fresh environment, and runs what the README says there, as a newcomer.

  .venv/bin/python tests/packaging/fresh_install.py           everything; .ci/run does it
  .venv/bin/python tests/packaging/fresh_install.py --list
  .venv/bin/python tests/packaging/fresh_install.py --only "trainer, clone"

The environment is a new one: the wheel is built from the files that git knows of, as they are now,
and pip installs it with its requirements, which are not fetched again but linked from the
environment that this program runs in: only what the wheel asks for, and what that asks for. Then
each block of README.md runs by itself in an empty folder, and all of them in their order there and
in a clone; and the commands, with and without what they need: two at once, and of those in the
clone one after the other. A line each says what came of it.

What a block asks for is made smaller where it would take minutes (`SMALLER`), and nothing else.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TIMEOUT = 300.0

# What stands in a block, and what is run in its place.
SMALLER = {
  "--train_steps 1000": "--train_steps 200",
  "--train_epochs 3": "--train_epochs 1 --made_examples 400 --hidden_size 16",
  '--gin_param="run.train_steps = 2000"': '--gin_param="run.train_steps = 4" '
  '--gin_param="run.iterations_per_loop = 2" --gin_param="num_layers = 1"',
  # Each makes an environment of its own, from the net; CI has run the second one.
  "make ": "make -n ",
}


@dataclasses.dataclass(frozen=True)
class Block:
  """A block of the README: its number, the word after its fence, and its text."""

  number: int
  kind: str
  text: str

  @property
  def name(self) -> str:
    """Its number, and its first line that says something of its own."""
    lines = (line.strip() for line in self.text.splitlines())
    said = (line for line in lines if line and not line.startswith(("import ", "from ", "#")))
    return f"block {self.number}: {next(said)}"

  @property
  def needs_clone(self) -> bool:
    """Whether it is about files of the repository."""
    return self.text.startswith("make ")

  @property
  def smaller(self) -> str:
    """The text that is run."""
    text = self.text
    for long, short in SMALLER.items():
      text = text.replace(long, short)
    return text


def blocks_of_readme() -> list[Block]:
  """The blocks that somebody may type, in their order."""
  found = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
  typed = [(kind, text) for kind, text in found if kind != "text"]
  return [Block(i, kind, text) for i, (kind, text) in enumerate(typed, start=1)]


@dataclasses.dataclass(frozen=True)
class Trial:
  """Something that is run.

  Attributes:
    name: what it is.
    place: "clone", or "folder": an empty one.
    command: program and arguments; `python` is that of the fresh environment.
    stdin: what is typed.
    files: name to text, of files in the folder beforehand.
    code: the exit code that it must have.
    says: what its output must contain.
  """

  name: str
  place: str
  command: Sequence[str]
  stdin: str = ""
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)
  code: int = 0
  says: Sequence[str] = ()


def trials() -> list[Trial]:
  """All of them."""
  blocks = blocks_of_readme()
  found = []
  for place in ("folder", "clone"):
    typed = [b for b in blocks if place == "clone" or not b.needs_clone]
    found += [_alone(b, place) for b in typed if place == "folder" or b.needs_clone]
    found += _in_order(typed, place)
    found += _commands(place)
  return found


def _alone(block: Block, place: str) -> Trial:
  if block.kind == "sh":
    return Trial(block.name, place, ["bash", "-e", "-c", block.smaller])
  return Trial(block.name, place, ["python", "-"], stdin=block.smaller)


def _in_order(blocks: Sequence[Block], place: str) -> list[Trial]:
  """The programs at one prompt, line by line as they are pasted; the commands in one shell."""
  program = "".join(b.smaller + "\n" for b in blocks if b.kind == "python")
  typed = program + "\nprint(mtf.describe(train_step))\nprint('all', 'typed')\n"
  shell = "".join(b.smaller for b in blocks if b.kind == "sh")
  return [
    Trial("the programs, at one prompt", place, ["python", "-i", "-q"], typed, says=["all typed"]),
    Trial("the commands, in one shell", place, ["bash", "-e", "-c", shell]),
  ]


_STEPS = ["--gin_file=problems/stdlib_lm.gin", "--gin_param=run.train_steps = 1"]
_STEPS += ["--gin_param=num_layers = 1", "--gin_param=run.report_every = 1"]


def _commands(place: str) -> list[Trial]:
  """The installed commands, the two ways to start them, and what they answer to a newcomer."""
  own = {"mymod.py": "import gin\n\n\n@gin.configurable\ndef my_thing(x=1):\n  return x\n"}
  module = ["--module_import=mymod", "--gin_param=my_thing.x = 3"]
  version = _version()
  ways = {
    "mesh-transformer": ["mesh-transformer"],
    "python -m": ["python", "-m", "mesh_tensorflow.transformer.main"],
  }
  made = []
  if place == "folder":
    help_says = ["--model_dir", "--gin_file", "--module_import"]
    made = [
      Trial("--version", place, ["mesh-transformer", "--version"], says=[version, "TensorFlow"]),
      *(Trial(f"{n} --help", place, [*way, "--help"], says=help_says) for n, way in ways.items()),
      Trial("launch --help", place, ["mesh-transformer-launch", "--help"], says=["--workers"]),
      Trial("a command", place, ["mesh-transformer", "infer", "--help"], says=["--prompt"]),
      Trial("init", place, ["bash", "-e", "-c", _INIT], says=["dry run: nothing was trained"]),
      Trial("no flags", place, ["mesh-transformer"], code=2, says=["usage: mesh-transformer"]),
      Trial("no --model_dir", place, ["mesh-transformer", *_STEPS], code=2, says=["--model_dir"]),
    ]
  for name, program in ways.items():
    arguments = [*program, f"--model_dir=m_{name.split()[0]}", *_STEPS, *module]
    made.append(Trial(f"{name}, a module", place, arguments, files=own, says=["step       1/1"]))
  root = "clone" if place == "clone" else "site-packages"
  own_file = f"{root}/mesh_tensorflow/__init__.py"
  made.append(Trial("imports", place, ["python", "-c", _IMPORTS], says=[own_file, version]))
  return made


_INIT = """
python -c "print('To be, or not to be. ' * 400)" > text.txt
mesh-transformer init mine --text=text.txt
mesh-transformer train --config=mine/train.gin --dry_run
"""

_IMPORTS = """
import mesh_tensorflow as mtf
import mesh_tensorflow.transformer.main, mesh_tensorflow.examples.mnist
from mesh_tensorflow.transformer import gin_paths
import importlib.metadata, os, pickle
print(mtf.__file__, mtf.__version__)
assert mtf.__version__ == importlib.metadata.version("mesh-tensorflow")
assert os.path.isfile(os.path.join(gin_paths.gin_dir(), "layouts", "cpu_2x2.gin"))
assert pickle.loads(pickle.dumps(gin_paths.gin_dir)) is gin_paths.gin_dir
"""


def _version() -> str:
  text = (ROOT / "mesh_tensorflow" / "version.py").read_text(encoding="utf-8")
  return re.search(r'"(\d.+)"', text)[1]


# ------------------------------------------------------------------------- the environment


class FreshEnvironment:
  """A clone, and a virtual environment with the wheel that was built from it.

  Args:
    folder: an empty folder to make both in.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.clone = folder / "clone"
    self.venv = folder / "venv"
    copy_clone(self.clone)
    build = "-m pip wheel --quiet --no-index --no-deps --no-build-isolation".split()
    _checked([sys.executable, *build, "-w", str(folder), str(self.clone)])
    (self.wheel,) = folder.glob("*.whl")
    _checked([sys.executable, "-m", "venv", "--without-pip", str(self.venv)])
    (self.site,) = self.venv.glob("lib/python*/site-packages")
    link_requirements(self.wheel, self.site)
    # With its requirements: pip finds all that the wheel asks for, or says what is missing.
    pip = ["-m", "pip", "--python", str(self.venv), "install", "--quiet", "--no-index"]
    _checked([sys.executable, *pip, str(self.wheel)])

  def run(self, trial: Trial) -> tuple[str, float]:
    """Runs a trial; what is wrong with it ("" if nothing is), and how long it took in seconds."""
    started = time.monotonic()
    with self._place(trial) as cwd:
      for name, text in trial.files.items():
        (cwd / name).write_text(text, encoding="utf-8")
      code, output = self._output(trial, cwd)
    return _verdict(trial, code, output), time.monotonic() - started

  def run_all(self, chosen: Sequence[Trial]) -> Iterator[tuple[Trial, str, float]]:
    """Runs trials, two at once; those in the clone, which they share, one after the other.

    Args:
      chosen: the trials.

    Yields:
      Each trial with what `run` returns, as they end.
    """
    in_turn = [[t for t in chosen if t.place == "clone"]]
    in_turn += [[t] for t in chosen if t.place != "clone"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      started = [pool.submit(lambda ts: [(t, *self.run(t)) for t in ts], ts) for ts in in_turn]
      for done in concurrent.futures.as_completed(started):
        yield from done.result()

  @contextlib.contextmanager
  def _place(self, trial: Trial) -> Iterator[pathlib.Path]:
    """The folder to start in. The clone is left as it was: the next one finds no files of this."""
    if trial.place == "folder":
      with tempfile.TemporaryDirectory(dir=self.folder) as empty:
        yield pathlib.Path(empty)
      return
    before = set(self.clone.iterdir())
    yield self.clone
    for path in set(self.clone.iterdir()) - before:
      shutil.rmtree(path) if path.is_dir() else path.unlink()

  def _output(self, trial: Trial, cwd: pathlib.Path) -> tuple[int, str]:
    inherited = {n: os.environ[n] for n in ("LANG", "LC_ALL", "TMPDIR", "TZ") if n in os.environ}
    path = f"{self.venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    home = {"HOME": str(self.folder), "PATH": path, "VIRTUAL_ENV": str(self.venv)}
    program, *arguments = trial.command
    process = subprocess.Popen(
      # By its path: Popen looks in the PATH of this process.
      [shutil.which(program, path=path) or program, *arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      errors="replace",
      cwd=cwd,
      env={**inherited, **home},
      start_new_session=True,
    )
    try:
      output, _ = process.communicate(trial.stdin, timeout=TIMEOUT)
      return process.returncode, output
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      return process.wait(), process.communicate()[0] + f"\nnot finished after {TIMEOUT:g} s"
    finally:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


# Lines of TensorFlow's start-up, and of Python where something went wrong, at the prompt, too.
NOISE = ("oneDNN", "cuInit", "cpu_feature_guard", "computation_placer", "absl::InitializeLog")
_WRONG = ("Traceback (most recent call last)", "SyntaxError", "IndentationError")


def _verdict(trial: Trial, code: int, output: str) -> str:
  problems = [f"exit code {code}, not {trial.code}"] if code != trial.code else []
  problems += [f"says {text!r}" for text in (*NOISE, *_WRONG) if text in output]
  problems += [f"does not say {text!r}" for text in trial.says if text not in output]
  return "; ".join(problems) + "\n" + output[-3000:] if problems else ""


def copy_clone(target: pathlib.Path) -> None:
  """Copies what git knows of, or would, with its present contents; without git, all sources."""
  listed = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT, capture_output=True, text=True, check=False,
  )  # fmt: skip
  if listed.returncode:
    others = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, target, ignore=others)
    return
  for name in filter(None, listed.stdout.split("\0")):
    if (ROOT / name).is_file():
      (target / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / name, target / name)


def link_requirements(wheel: pathlib.Path, site: pathlib.Path) -> None:
  """Links what a wheel requires, and what that requires, from this environment into another.

  Args:
    wheel: the wheel.
    site: the folder site-packages of the other environment.
  """
  (own,) = importlib.metadata.distributions(path=[str(wheel)])
  wanted, seen = _requirements(own, []), set()
  while wanted:
    requirement = wanted.pop()
    key = (requirement.name.lower(), *sorted(requirement.extras))
    if key in seen:
      continue
    seen.add(key)
    try:
      found = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
      continue  # pip says what is missing, and for whom.
    _link(found, site)
    wanted += _requirements(found, requirement.extras)


def _requirements(
  distribution: importlib.metadata.Distribution, extras: Iterable[str]
) -> list[Requirement]:
  """What a distribution requires here, with these extras."""
  found = map(Requirement, distribution.requires or [])
  environments = [{"extra": extra} for extra in ("", *extras)]
  return [r for r in found if r.marker is None or any(map(r.marker.evaluate, environments))]


def _link(distribution: importlib.metadata.Distribution, site: pathlib.Path) -> None:
  for top in {f.parts[0] for f in distribution.files or [] if f.parts[0] != ".."}:
    target = pathlib.Path(str(distribution.locate_file(top)))
    if top != "__pycache__" and target.exists() and not (site / top).exists():
      (site / top).symlink_to(target)


def _checked(command: Sequence[str]) -> None:
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def main() -> int:
  """Runs the trials, and prints a table."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--list", action="store_true", help="only list the trials")
  parser.add_argument("--only", default="", help="only those whose 'name, place' has this text")
  args = parser.parse_args()
  chosen = [t for t in trials() if args.only in f"{t.name}, {t.place}"]
  if args.list:
    print(*(f"{t.name}, {t.place}" for t in chosen), sep="\n")
    return 0
  for long, short in SMALLER.items():
    print(f"made smaller: {long}  ->  {short}")
  failed = []
  with tempfile.TemporaryDirectory() as folder:
    started = time.monotonic()
    environment = FreshEnvironment(pathlib.Path(folder))
    print(f"{environment.wheel.name} built and installed in {time.monotonic() - started:.0f} s")
    row = "{:<72.72} {:<7} {:<6} {:>5}".format
    print(row("what", "place", "result", "s"), flush=True)
    for trial, problem, seconds in environment.run_all(chosen):
      print(
        row(trial.name, trial.place, "failed" if problem else "ok", f"{seconds:.1f}"), flush=True
      )
      if problem:
        failed.append((trial, problem))
  for trial, problem in failed:
    print(f"\n{trial.name}, {trial.place}: {problem}")
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  print(
    f"fresh install: {len(chosen) - len(failed)} of {len(chosen)} ok, "
    f"{used.ru_utime + used.ru_stime:.0f} s of processor time"
  )
  return 1 if failed or not chosen else 0


if __name__ == "__main__":
  sys.exit(main())
