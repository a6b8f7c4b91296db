"""Encodes texts into token files, once: what `mesh-transformer tokenize` runs.

python -m mesh_tensorflow.transformer.commands.tokenize --text=PATH --output=DIR --vocabulary=NAME
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_tensorflow import exit_codes
from mesh_tensorflow.errors import MeshError
from mesh_tensorflow.transformer.data import tokenizing


def main(arguments: Sequence[str] | None = None) -> int:
  """Encodes, and tells what to bind for training; returns the exit code.

  Args:
    arguments: flags; by default those of the process. What they mean: `mesh_transformer_cli`.
  """
  parser = argparse.ArgumentParser(prog="mesh-transformer tokenize", allow_abbrev=False)
  parser.add_argument("--text", action="append", required=True)
  parser.add_argument("--output", required=True)
  parser.add_argument("--vocabulary", required=True)
  parser.add_argument("--validation_fraction", type=float)
  parser.add_argument("--processes", type=int)
  # A number is that of a column.
  parser.add_argument("--field", type=lambda x: int(x) if x.isdecimal() else x)
  for name in ("format", "document", "separator", "encoding"):
    parser.add_argument(f"--{name}")
  values = vars(parser.parse_args(arguments))
  text, output, vocabulary = (values.pop(n) for n in ("text", "output", "vocabulary"))
  # What was not given is left to the defaults of the function.
  options = {name: value for name, value in values.items() if value is not None}
  try:
    path = text[0] if len(text) == 1 else text
    print(tokenizing.summary(tokenizing.tokenize(path, output, vocabulary, **options)), flush=True)
  except MeshError as e:
    print(f"{type(e).__name__}: {e}", file=sys.stderr)
    return exit_codes.of_error(e)
  except KeyboardInterrupt as e:
    print("interrupted; the same command goes on from here", file=sys.stderr)
    return exit_codes.of_error(e)
  return exit_codes.DONE


if __name__ == "__main__":
  sys.exit(main())
