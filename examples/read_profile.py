"""Prints where the time of a profile went: the costliest operations, under their mtf names.

  python -m mesh_tensorflow.examples.read_profile FOLDER --steps 5

FOLDER is what `tf.profiler.experimental.start(FOLDER)` was given; the newest profile in it is read,
or the `.xplane.pb` file that is named. Neither TensorBoard nor a plugin of it is needed; they show
the same file as a time line. How to make and read a profile: docs/performance.md.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from mesh_tensorflow.training.profiling import (
  ProfileError,
  find_profile,
  read,
  table,
)


def main(argv: list[str]) -> None:
  """Prints the two tables."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("path", type=pathlib.Path, help="folder of a profile, or an .xplane.pb file")
  parser.add_argument("--steps", type=int, default=1, help="steps in the profile")
  parser.add_argument("--rows", type=int, default=15, help="rows of each table")
  flags = parser.parse_args(argv)
  path = find_profile(flags.path)
  if path is None:
    raise SystemExit(f"no profile (*.xplane.pb) in {flags.path}")
  try:
    by_name, by_type = read(path)
  except ProfileError as e:
    raise SystemExit(str(e)) from e
  print(table("operations", by_name, flags.steps, flags.rows))
  print()
  print(table("types of operations", by_type, flags.steps, flags.rows))


if __name__ == "__main__":
  main(sys.argv[1:])
