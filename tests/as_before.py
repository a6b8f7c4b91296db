"""The same commands with two checkouts: do they still print, write and end as before?

  python tests/as_before.py OLD NEW                      all chains, some twenty minutes
  python tests/as_before.py OLD NEW --only train bert    those whose names contain one of these
  python tests/as_before.py OLD NEW --values             exit codes and variables, whatever is said
  python tests/as_before.py --list                       the names

A chain of `tests/as_before_cases.py` is a list of commands in a fresh folder, of which each finds
what those before it left. It is run with either checkout, by the Python of its .venv. Of each
command these are compared: exit code, lines of stdout and stderr, the names of the files that it
wrote, and what is in them: text; scalars of event files; names, dtypes, shapes and values of the
variables of checkpoints. Paths, times, speeds and process numbers are masked (`Masks`); numbers in
files may differ by 1e-6 of themselves.

The table has a row for each command: "same", or the first line that differs, or, for rows of
`EXPECTED`, why it does. The exit code is 1 if another one differs. Programs are forks of processes
that have imported TensorFlow (`tests/fork_server.py`), two at a time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1])]

from tests import fork_server  # noqa: E402

# Rows, as patterns of names, that may differ, and why.
EXPECTED = {
  "unet: *": "up to 1063bbe the program ended with an error on more than one CPU device",
  "signals, bert: *": "today a signal ends it at once; the trainer's own saves and ends with 74",
  "signals, unet: *": "today a signal ends it at once; the trainer's own saves and ends with 74",
}

SECONDS = 300  # For a command.
_TOLERANCE = 1e-6
_BROKEN = "the chain"  # Of a chain that cannot go on.

# ----------------------------------------------------------------------------- what is masked

_NUMBER = re.compile(r"(?<![\w.])-?\d+\.?\d*(?:e[-+]?\d+)?(?![\w.])")
_TIMED = (
  *("time", "tokens_per_second", "steps_per_second", "flops_utilization", "memory_bytes"),
  *("seconds", "examples_per_second", "input_wait"),
)


class Masks:
  """Puts the same text in place of what differs from run to run.

  Args:
    places: (path, what to write for it); longer paths first.
  """

  _PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.MULTILINE), text)
    for pattern, text in (
      # Of a traceback only the last line: where an error comes from is nobody's business.
      (r"^\S*Traceback \(most recent call last\):\n(?:[ ]+.*\n|\n)*", "<traceback>\n"),
      (r"^([IWEF])\d{4} [\d:.]+\s+\d+ \S+?:\d+\]", r"\1 <log>]"),
      (r"^\S+\.py:\d+: (\w*Warning)", r"<file>: \1"),
      (r"events\.out\.tfevents\.[\w.-]*?(\.scalars|\.v2|\.profile-empty)", r"events\1"),
      (r"\d{4}_\d\d_\d\d_\d\d_\d\d_\d\d(/[\w.-]+?\.)", r"<time>\1"),
      (r"\b1[5-9]\d{8}(?:\.\d+)?\b", "<time>"),
      (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?", "<date>"),
      (r"0x[0-9a-f]{6,}", "<address>"),
      # Of what has times and paths in it.
      (r"\.parts/[0-9a-f]{16}", ".parts/<hash>"),
      (r'"sha256": "[0-9a-f]{64}"', '"sha256"'),
      (r"^# crc32 [0-9a-f]{8}$", "# crc32"),
      (r'"(crc32|bytes)": ("[0-9a-f]{8}"|\d+)', r'"\1"'),
      # Of TensorFlow's profiler: which operations took longest.
      (r"^ +[\d.]+ ms +[\d.]+% +\d+ x .*$", "<operation>"),
      (r"\b(pid|process) \d+", r"\1 <pid>"),
      (r"\b[\d.,]+ ?(s|ms|min|minutes?|seconds?|h|hours?)\b", r"<time> \1"),
      (r"\b[\d.,]+ (tokens|steps|examples|scans|inputs|lines|texts)/s", r"<speed> \1/s"),
      (r"\b[\d.,]+ ?% of (the )?peak", "<part> of the peak"),
      (
        r'"(memory_bytes|tokens_per_second|input_wait|flops_utilization)": [\d.e+-]+',
        r'"\1": <speed>',
      ),
      (r"[\d.,]+ [kMGT]?FLOP/s", "<speed> FLOP/s"),
      (r"[ \t]+$", ""),
      (r"(?<=\S) {2,}", " "),
    )
  )

  def __init__(self, places: Sequence[tuple[str, str]]):
    self._places = places

  def __call__(self, text: str, loosely: bool = False) -> str:
    """The text with masks; `loosely`: without any number."""
    for path, name in self._places:
      text = text.replace(path, name)
    for pattern, name in self._PATTERNS:
      text = pattern.sub(name, text)
    text = "\n".join(map(_in_order, text.split("\n")))
    # Names that are legal stand in the order in which files are imported.
    text = re.sub(r"'\w+'(?:, '\w+'){2,}", lambda m: ", ".join(sorted(m[0].split(", "))), text)
    text = _LISTED.sub(lambda m: "\n".join(sorted(m[0].replace(",\n", "\n").split("\n"))), text)
    return re.sub(r"\d[\d,.]*", "N", text) if loosely else text

  def lines(self, text: str, loosely: bool = False) -> list[str]:
    return self(text, loosely).splitlines()


# Bindings of a command line in a file of JSON, a line each.
_BOUND = r'^ *"--(?:gin_param|set)=.*'
_LISTED = re.compile(rf'{_BOUND}(?:\n *"--(?:gin_param|set)=.*)*', re.MULTILINE)


def _in_order(line: str) -> str:
  """A command line whose bindings are sorted: their order in it changes nothing."""
  if line.count("--gin_param=") < 2:
    return line
  try:
    words = shlex.split(line)
  except ValueError:
    return line
  bound = sorted(w for w in words if w.startswith("--gin_param="))
  return shlex.join([w for w in words if not w.startswith("--gin_param=")] + bound)


# ----------------------------------------------------------------------------- what a command did


@dataclasses.dataclass
class Outcome:
  """What is compared of a command: texts, by what they are of, and arrays, by file and name."""

  texts: dict[str, list[str]] = dataclasses.field(default_factory=dict)
  arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  @property
  def out(self) -> str:
    """Its stdout, masked."""
    return "\n".join(self.texts["stdout"])


# Reads checkpoints and event files, where TensorFlow is: FILES OUTPUT.
_READER = """
import json, sys
import numpy as np
import tensorflow as tf
from tensorflow.core.util import event_pb2
with open(sys.argv[1]) as f:
  checkpoints, events = json.load(f)
arrays, scalars = {}, {}
for path in checkpoints:
  try:
    reader = tf.train.load_checkpoint(path)
    for name in reader.get_variable_to_shape_map():
      arrays[f"{path}\\n{name}"] = np.asarray(reader.get_tensor(name))
  except Exception as e:
    arrays[f"{path}\\ncannot be read"] = np.zeros(0)
for path in events:
  scalars[path] = []
  try:
    for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
      event = event_pb2.Event.FromString(record)
      for value in event.summary.value:
        if value.HasField("tensor"):
          found = tf.make_ndarray(value.tensor)
          shown = found.tolist() if found.size == 1 else str(found.shape)
        else:
          shown = value.simple_value
        shown = shown.decode(errors="replace") if isinstance(shown, bytes) else shown
        scalars[path].append(f"{event.step} {value.tag} {shown}")
  except Exception as e:
    scalars[path].append("cannot be read")
np.savez(sys.argv[2] + ".npz", **{f"a{i}": a.astype("S") if a.dtype == object else a
                                  for i, a in enumerate(arrays.values())})
with open(sys.argv[2] + ".json", "w") as f:
  json.dump([list(arrays), scalars], f)
"""
# What is in them does not count, or counts elsewhere.
_OPAQUE = re.compile(r"\.(png|pb|gz|zip|lock|model|safetensors|data-\d+-of-\d+)$|\.data-\d+")
_TEXT_BYTES = 400_000


# What is imported: programs that have flags of the same names share no process with the trainer.
_SERVERS = {
  "trainer": ("tensorflow", "mesh_tensorflow.transformer.utils"),
  "bare": ("tensorflow", "mesh_tensorflow"),
}


class Side:
  """A checkout, and processes that have imported what its programs need.

  Args:
    name: "old" or "new".
    root: the checkout.
    server: makes a process that has imported what programs of a kind need.
  """

  def __init__(
    self,
    name: str,
    root: pathlib.Path,
    server: Callable[[str], fork_server.Server] | None = None,
  ):
    self.name, self.root = name, root.resolve()
    python = self.root / ".venv" / "bin" / "python"
    own = python if python.exists() else pathlib.Path(sys.executable)
    self._server = server or functools.cache(
      lambda kind: fork_server.Server(_SERVERS[kind], own, self.root)
    )

  def checked(self, folder: pathlib.Path) -> Side:
    """This side, if what its programs import is of its checkout."""
    program = "import mesh_tensorflow, mesh_transformer_cli as c; print(mesh_tensorflow.__file__)"
    code, out, err = self.run(["-c", f"{program}; print(c.__file__)"], folder, "trainer")
    found = out.split()
    if code or not all(pathlib.Path(p).resolve().is_relative_to(self.root) for p in found):
      raise SystemExit(f"the programs of {self.root} import {' and '.join(found) or err}")
    return self

  def run(
    self,
    arguments: Sequence[str],
    folder: pathlib.Path,
    server: str,
    stdin: str = "",
    stop: Callable[[str], bool] | None = None,
    number: int = signal.SIGTERM,
  ) -> tuple[int | str, str, str]:
    """Runs a program to its end: exit code, stdout, stderr."""
    with (
      tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err,
      tempfile.TemporaryFile() as given,
    ):  # fmt: skip
      given.write(stdin.encode())
      given.seek(0)
      env = {**os.environ, "PYTHONPATH": str(self.root)}
      process = self._server(server).start(arguments, out, err, env, folder, given)
      end = time.time() + SECONDS
      code: int | str = "time is over"
      try:
        while time.time() < end:
          with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(0.05 if stop else SECONDS)
            break
          if stop and stop(_text(out) + _text(err)):
            process.send_signal(number)
            stop = None
      finally:
        if process.poll() is None:
          with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
          process.wait()
      return code, _text(out), _text(err)


def _text(file: Any) -> str:
  """What a process wrote so far; its place in the file stays."""
  size = os.fstat(file.fileno()).st_size
  return os.pread(file.fileno(), size, 0).decode(errors="replace")


class Run:
  """A chain on one side: runs commands in a folder, and keeps what they did.

  Args:
    side: the side.
    old: the other one, or the same: that of OLD.
    folder: an empty folder.
    contents: whether files are read, too, or only their names.
  """

  def __init__(self, side: Side, old: Side, folder: pathlib.Path, *, contents: bool = True):
    self.side, self.old, self.folder, self.contents = side, old, folder, contents
    self.outcomes: dict[str, Outcome] = {}
    self.seconds = 0.0
    self._before: dict[str, tuple[int, int]] = {}

  def __call__(
    self,
    case: str,
    *arguments: str | os.PathLike[str],
    server: str = "trainer",
    by_old: bool = False,
    stdin: str = "",
    stop: Callable[[str], bool] | None = None,
    number: int = signal.SIGTERM,
    loosely: bool = False,
  ) -> Outcome:
    """Runs `python ARGUMENTS`.

    Args:
      case: the name of the row; it is there once in a chain.
      *arguments: the arguments.
      server: "trainer", or "bare" for programs with flags of their own.
      by_old: whether it is run by OLD on both sides.
      stdin: its input.
      stop: after what output a signal is sent.
      number: the signal.
      loosely: when it ends is a matter of time: numbers and contents of files are not compared.
    """
    if case in self.outcomes:
      raise ValueError(f"there are two cases {case!r}")
    side = self.old if by_old else self.side
    self._before = self._stats()
    words = [os.fspath(a) for a in arguments]
    code, out, err = side.run(words, self.folder, server, stdin, stop, number)
    masks = Masks([(f"{self.folder.resolve()}", "<folder>"), (f"{side.root}", "<root>")])
    found = Outcome({"exit code": [str(code)]})
    for name, text in (("stdout", out), ("stderr", err)):
      lines = masks.lines(text, loosely)
      # How often it reports is a matter of time, too.
      found.texts[name] = sorted(x for x in lines if "<speed>" not in x) if loosely else lines
    self._read_files(found, masks, loosely)
    self.outcomes[case] = found
    return found

  def cli(self, case: str, *words: str, **options: Any) -> Outcome:
    """Runs `mesh-transformer WORDS`."""
    return self(case, "-m", "mesh_transformer_cli", *words, **options)

  def trainer(self, case: str, *words: str, **options: Any) -> Outcome:
    """Runs `python -m mesh_tensorflow.transformer.main WORDS`."""
    return self(case, "-m", "mesh_tensorflow.transformer.main", *words, **options)

  def write(self, name: str, content: str | bytes) -> str:
    """Writes a file of the folder; returns its name."""
    path = self.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return name

  def copy(self, source: str, target: str) -> str:
    """Copies a folder of the folder; returns the name of the copy."""
    shutil.copytree(self.folder / source, self.folder / target)
    return target

  def _stats(self) -> dict[str, tuple[int, int]]:
    paths = [p for p in self.folder.rglob("*") if p.is_file() or p.is_symlink()]
    stats = {str(p.relative_to(self.folder)): p.lstat() for p in paths}
    return {name: (s.st_size, s.st_mtime_ns) for name, s in stats.items()}

  def _read_files(self, found: Outcome, masks: Masks, loosely: bool) -> None:
    now = self._stats()
    changed = sorted(n for n, s in now.items() if self._before.get(n) != s)
    gone = sorted(set(self._before) - set(now))
    names = [f"writes {masks(n, loosely)}" for n in changed]
    names += [f"removes {masks(n, loosely)}" for n in gone]
    # A process that is killed may leave half of a file.
    finished = {n for n in names if ".unfinished-" not in n}
    found.texts["files"] = sorted(finished if loosely else names)
    if loosely or not self.contents:
      return
    checkpoints = [n.removesuffix(".index") for n in changed if n.endswith(".index")]
    events = [n for n in changed if "tfevents" in n]
    if checkpoints or events:
      self._read_binaries(found, masks, checkpoints, events)
    for name in changed:
      data = (self.folder / name).read_bytes()
      if name.endswith(".npy"):
        found.arrays[masks(name)] = np.load(self.folder / name, allow_pickle=False)
      elif not (_OPAQUE.search(name) or name.endswith(".index") or name in events):
        found.texts[masks(name)] = _content(name, data, masks)

  def _read_binaries(
    self, found: Outcome, masks: Masks, checkpoints: Sequence[str], events: Sequence[str]
  ) -> None:
    with tempfile.TemporaryDirectory() as folder:
      given = pathlib.Path(folder) / "given"
      given.write_text(json.dumps([checkpoints, events]))
      out = f"{folder}/found"
      code, _, err = self.side.run(["-c", _READER, str(given), out], self.folder, "bare")
      if code:
        raise RuntimeError(err)
      names, scalars = json.loads(pathlib.Path(f"{out}.json").read_text())
      with np.load(f"{out}.npz") as arrays:
        for i, name in enumerate(names):
          found.arrays[masks(name.replace("\n", ": "))] = arrays[f"a{i}"]
    for name, lines in scalars.items():
      kept = [line for line in lines if line.split()[1].split("/")[-1] not in _TIMED]
      # Several of one folder have one name when times are masked.
      text = found.texts.setdefault(masks(name), [])
      text += masks.lines("\n".join(kept))
      text.sort(key=lambda line: line.split()[:2])  # Several threads write.


def _content(name: str, data: bytes, masks: Masks) -> list[str]:
  """The lines of a text; a hash of other files."""
  try:
    text = data[:_TEXT_BYTES].decode()
  except UnicodeDecodeError:
    return [f"SHA-256 {hashlib.sha256(data).hexdigest()}"]
  if name.endswith(".jsonl"):
    rows = [line for line in text.splitlines() if line]
    with contextlib.suppress(ValueError):
      plain = [{k: v for k, v in json.loads(r).items() if k not in _TIMED} for r in rows]
      return masks.lines("\n".join(map(json.dumps, plain)))
  if name.endswith(".json"):
    with contextlib.suppress(ValueError):
      text = json.dumps(json.loads(text), indent=1)
  return masks.lines(text)


# ----------------------------------------------------------------------------- comparing


def difference(old: Outcome | None, new: Outcome | None) -> str:
  """The first difference of two outcomes, in a line; "" if there is none."""
  if old is None or new is None:
    return f"only {'NEW' if old is None else 'OLD'} came to it"
  for side, found in (("OLD", old), ("NEW", new)):
    if _BROKEN in found.texts:
      return f"of {side}: {found.texts[_BROKEN][0]}"
  for name in [*old.texts, *(n for n in new.texts if n not in old.texts)]:
    exact = name in ("exit code", "stdout", "stderr", "files")
    of_old, of_new = old.texts.get(name, []), new.texts.get(name, [])
    for i in range(max(len(of_old), len(of_new))):
      a, b = (lines[i] if i < len(lines) else None for lines in (of_old, of_new))
      if a != b and (exact or a is None or b is None or not _close(a, b)):
        return f"{name}:{i + 1}: {_shown(a, b)} | {_shown(b, a)}"
  for name in [*old.arrays, *(n for n in new.arrays if n not in old.arrays)]:
    x, y = old.arrays.get(name), new.arrays.get(name)
    if x is None or y is None:
      return f"{name}: only of {'OLD' if y is None else 'NEW'}"
    if (x.dtype, x.shape) != (y.dtype, y.shape):
      return f"{name}: {x.dtype} {list(x.shape)} | {y.dtype} {list(y.shape)}"
    if not np.array_equal(x, y):
      if not np.issubdtype(x.dtype, np.inexact):
        return f"{name}: other values"
      if not np.allclose(x, y, rtol=_TOLERANCE, atol=1e-7, equal_nan=True):
        with np.errstate(all="ignore"):
          return f"{name}: values differ by up to {np.nanmax(np.abs(x - y)):.3g}"
  return ""


def _close(a: str, b: str) -> bool:
  """Whether two lines differ only in numbers, and those hardly."""
  if _NUMBER.sub("", a) != _NUMBER.sub("", b):
    return False
  pairs = zip(map(float, _NUMBER.findall(a)), map(float, _NUMBER.findall(b)))
  return all(abs(x - y) <= _TOLERANCE * max(abs(x), abs(y)) for x, y in pairs)


def _shown(line: str | None, other: str | None) -> str:
  """A line, or of a long one the part where it differs from another one."""
  if line is None:
    return "nothing"
  start = max(len(os.path.commonprefix([line, other or ""])) - 60, 0)
  part = line[start : start + 300]
  return repr(("..." if start else "") + part + ("..." if start + 300 < len(line) else ""))


Chain = Callable[[Run], None]


def _run_chain(chain: Chain, name: str, side: Side, old: Side, folder: pathlib.Path) -> Run:
  # The same length on both sides: lines may be wrapped.
  own = folder / side.name / re.sub(r"\W", "_", name)
  own.mkdir(parents=True)
  run = Run(side, old, own)
  began = time.time()
  try:
    chain(run)
  except Exception as e:  # noqa: BLE001 - of a file, say, that a command did not write.
    run.outcomes["the rest"] = Outcome({_BROKEN: [f"{type(e).__name__}: {e}"]})
  run.seconds = time.time() - began
  shutil.rmtree(own, ignore_errors=True)
  return run


def compare(
  old: Side, new: Side, chains: Mapping[str, Chain], folder: pathlib.Path, values: bool = False
) -> int:
  """Runs chains, prints rows; returns how many differ that are not expected to.

  Args:
    old: a checkout.
    new: the other one.
    chains: by name.
    folder: an empty one.
    values: whether words do not count, but exit codes and the variables of checkpoints.
  """
  count = {"same": 0, "expected": 0, "differs": 0}
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    started = {
      name: [pool.submit(_run_chain, chain, name, s, old, folder) for s in (old, new)]
      for name, chain in chains.items()
    }
    for name, futures in started.items():
      runs = [f.result() for f in futures]
      one, other = (r.outcomes for r in runs)
      for found in (*one.values(), *other.values()) if values else ():
        found.texts = {n: t for n, t in found.texts.items() if n in ("exit code", _BROKEN)}
        # The one loop saves where a training began, which BERT's own did not.
        found.arrays = {n: a for n, a in found.arrays.items() if "began_at_step" not in n}
      print(f"--- {name}, {' and '.join(f'{r.seconds:.0f}' for r in runs)} seconds")
      for case in [*one, *(c for c in other if c not in one)]:
        row = f"{name}: {case}".replace("\n", "; ")
        differs = difference(one.get(case), other.get(case))
        why = next((w for p, w in EXPECTED.items() if fnmatch.fnmatch(row, p)), "")
        verdict = "same" if not differs else "expected" if why else "differs"
        count[verdict] += 1
        more = f": {differs}" + (f" ({why})" if why else "") if differs else ""
        print(f"{row} | {verdict}{more}", flush=True)
  print(", ".join(f"{n} {verdict}" for verdict, n in count.items()))
  return count["differs"]


def _chosen(chains: Mapping[str, Chain], words: Iterable[str]) -> dict[str, Chain]:
  words = list(words)
  return {n: c for n, c in chains.items() if not words or any(w in n for w in words)}


@contextlib.contextmanager
def _folder(kept: str | None) -> Iterator[pathlib.Path]:
  if kept:
    yield pathlib.Path(kept).resolve()
    return
  with tempfile.TemporaryDirectory(prefix="mtf_as_before_") as folder:
    yield pathlib.Path(folder).resolve()


def main(arguments: Sequence[str] | None = None) -> int:
  """Compares two checkouts."""
  from tests import as_before_cases

  # They are read when TensorFlow starts.
  os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
  for name in ("TF_CONFIG", "XLA_FLAGS", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONWARNINGS"):
    os.environ.pop(name, None)
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("checkouts", nargs="*", type=pathlib.Path, metavar="OLD NEW")
  parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="parts of names")
  parser.add_argument("--list", action="store_true", help="print the names of the chains")
  parser.add_argument(
    "--values", action="store_true", help="compare exit codes and variables of checkpoints only"
  )
  args = parser.parse_args(arguments)
  chains = _chosen(as_before_cases.CHAINS, args.only)
  if args.list:
    print(*chains, sep="\n")
    return 0
  if len(args.checkouts) != 2 or not chains:
    parser.error("two checkouts are compared" if chains else f"no chain is named {args.only}")
  began = time.time()
  with _folder(None) as folder:
    old, new = (
      Side(name, root).checked(folder) for name, root in zip(("old", "new"), args.checkouts)
    )
    differ = compare(old, new, chains, folder, args.values)
  print(f"{(time.time() - began) / 60:.1f} minutes")
  return int(differ > 0)


if __name__ == "__main__":
  sys.exit(main())
