"""docs/session.md: a session of the commands, as a terminal showed it.

python -m docs.tools.session     runs the commands and writes the page: some minutes

A test compares the page with `STEPS`: the commands, and the lines that each of them must have said.
Numbers are those of the machine that recorded it.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "session.md"
PROGRAM = "mesh-transformer"
# What a reader's folder is called in the page.
HOME = "/home/you"

_INTRO = """\
# A session

From a text to samples, as a terminal showed it: `python -m docs.tools.session` runs these commands
and writes this page. The text is what the guides of this repository say, in one file; the numbers
are those of a machine with two cores, which had other work at the time. What the commands can do
besides: [commands.md](commands.md).
"""
_LONGEST = 28  # Lines of an output; of a longer one the middle is left out.
_TIMEOUT = 1200.0


@dataclasses.dataclass(frozen=True)
class Step:
  """A command of the session.

  Attributes:
    text: what the page says of it before.
    command: as it is typed.
    says: patterns of lines that must be in what it shows.
    code: its exit code.
    interrupt: a pattern: Ctrl-C is typed when a line that it matches has been shown.
  """

  text: str
  command: str
  says: Sequence[str]
  code: int = 0
  interrupt: str = ""


STEPS = (
  Step(
    "Settings for the text. Its length decides the sizes of the model:",
    "mesh-transformer init guides --text=guides.txt",
    (r"guides\.txt: [\d,]+ characters", r"^written: guides/train\.gin", r"^next:  mesh-transf"),
  ),
  Step(
    "What training would do, without doing it:",
    "mesh-transformer train --config=guides/train.gin --dry_run",
    (r"^[\d,]+ parameters", r"^Memory of one device", r"targets \(\d+ tokens\): ", r"^dry run: "),
  ),
  Step(
    "Training; after a while somebody types Ctrl-C. The step that is going on is finished and "
    "saved, and the exit code is 74:",
    "mesh-transformer train --config=guides/train.gin --steps=400 --report_every=50",
    (r"^step +\d+/400 +loss \d+\.\d+", r"StoppedError: stopped by SIGINT; step \d+ is saved in "),
    code=74,
    interrupt=r"^step +150/400",
  ),
  Step(
    "The same command goes on from there:",
    "mesh-transformer train --config=guides/train.gin --steps=400 --report_every=50",
    (r"^restored .*model\.ckpt-\d+", r"^step +400/400 +loss \d+\.\d+"),
  ),
  Step(
    "How good it is on the part that was held out:",
    "mesh-transformer eval --config=guides/train.gin",
    (r"^step 400 +validation: loss \d+\.\d+ nats",),
  ),
  Step(
    "It writes. The folder of the model is enough: it has the settings, and the vocabulary:",
    "mesh-transformer infer --model_dir=guides/model --prompt='The mesh ' --num_samples=2 "
    "--max_tokens=120 --seed=1",
    (r"^The mesh ", r"tokens/s"),
  ),
  Step(
    "A SavedModel, which TensorFlow runs without this package:",
    "mesh-transformer export --model_dir=guides/model --output=exported",
    (r"^step 400 exported: exported/\d+",),
  ),
  Step(
    "And what a slip of the finger is answered with, at once:",
    "mesh-transformer infer --model_dir=guides/model --promt='The '",
    (r"^mesh-transformer infer: there is no flag --promt; did you mean --prompt\?",),
    code=2,
  ),
)


def text_of_guides() -> str:
  """The text of the session."""
  return "\n".join(p.read_text("utf-8") for p in sorted((ROOT / "docs").glob("[a-l]*.md")))


def run(step: Step, folder: pathlib.Path, *more: str) -> tuple[int, str]:
  """Runs a command of the session.

  Args:
    step: which.
    folder: to work in.
    *more: further flags.

  Returns:
    The exit code, and what a terminal shows.
  """
  program, *words = shlex.split(step.command)
  assert program == PROGRAM
  environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
  process = subprocess.Popen(
    [sys.executable, "-m", "mesh_transformer_cli", *words, *more],
    cwd=folder,
    env=environ,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors="replace",
  )
  watch = threading.Timer(_TIMEOUT, process.kill)
  watch.start()
  lines = []
  try:
    for line in process.stdout or ():
      lines.append(line.rstrip("\n"))
      if step.interrupt and re.search(step.interrupt, line):
        process.send_signal(signal.SIGINT)
    code = process.wait()
  finally:
    watch.cancel()
    process.kill()
  return code, "\n".join(lines).replace(str(folder), HOME)


def problems(step: Step, code: int, output: str) -> list[str]:
  """What a command should have said, and did not."""
  found = [] if code == step.code else [f"{step.command}: exit code {code}, not {step.code}"]
  return found + [
    f"{step.command}: no line like {pattern!r}"
    for pattern in step.says
    if not re.search(pattern, output, re.MULTILINE)
  ]


def block(step: Step, output: str) -> str:
  """A command with what it showed, as the page has it."""
  lines = output.rstrip().split("\n")
  if len(lines) > _LONGEST:
    half = _LONGEST // 2
    lines = [*lines[:half], f"... {len(lines) - 2 * half} more lines", *lines[-half:]]
  typed = step.command.replace(" --num_samples", " \\\n    --num_samples")
  ended = [f"$ echo $?\n{step.code}"] if step.code else []
  shown = "\n".join([f"$ {typed}", *(line.rstrip() for line in lines), *ended])
  return f"{step.text}\n\n```text\n{shown}\n```\n"


def page() -> str:
  """Runs the session, in a folder of its own.

  Raises:
    RuntimeError: a command did not do what it should.
  """
  parts = [_INTRO]
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name).resolve()
    (folder / "guides.txt").write_text(text_of_guides(), encoding="utf-8")
    for step in STEPS:
      code, output = run(step, folder)
      wrong = problems(step, code, output)
      if wrong:
        raise RuntimeError("\n".join([*wrong, output]))
      print(f"$ {step.command}", flush=True)
      parts.append(block(step, output))
  return "\n".join(parts)


if __name__ == "__main__":
  PAGE.write_text(page(), encoding="utf-8")
  print(f"written: {PAGE}")
