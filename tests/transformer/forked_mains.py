"""Runs the trainer's command several times, each in a fork: TensorFlow is imported once.

Argument: a file of JSON, a list of cases: {"arguments": [...], "lock": folder or null, "damage":
folder or null, "largest_file": bytes or null}. Prints, as JSON, exit code, stdout and stderr of
each.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import sys
import tempfile
import traceback

from mesh_tensorflow.training import run_lock
from mesh_tensorflow.transformer import main


def _as_command(arguments: list[str], largest_file: int | None) -> None:
  """In the child: what `mesh-transformer` does, to its end."""
  if largest_file:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
  sys.argv = ["mesh-transformer", *arguments]
  code = 0
  try:
    main.console_main()
  except SystemExit as e:
    code = e.code or 0
  except BaseException:  # noqa: BLE001 - as Python does at the end of a program.
    traceback.print_exc()
    code = 1
  with contextlib.suppress(OSError):
    sys.stdout.flush()
    sys.stderr.flush()
  os._exit(code)


def run(case: dict) -> list:
  """Exit code, stdout and stderr."""
  for file in pathlib.Path(case.get("damage") or "/nowhere").glob("model.ckpt-*.data-*"):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
  with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    with run_lock.training_lock(case.get("lock")):
      child = os.fork()
      if not child:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        _as_command(case["arguments"], case.get("largest_file"))
      code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = []
    for file in (out, err):
      file.seek(0)
      texts.append(file.read().decode(errors="replace"))
  return [code, *texts]


if __name__ == "__main__":
  results = [run(case) for case in json.loads(pathlib.Path(sys.argv[1]).read_text())]
  print(json.dumps(results))
