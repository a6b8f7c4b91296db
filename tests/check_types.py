"""Checks the types of the package with mypy: `make types`.

The package's parts lie in several folders of the repository, which an editable install maps to one
package in a way that mypy does not follow. So it is shown them in one folder, of links.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "types"
# A program that says which types it sees.
PROGRAM = "face_types"
# Packages of their own.
OTHERS = ("mesh_settings", "mesh_transformer_cli")


def linked_package() -> pathlib.Path:
  """A folder with a package `mesh_tensorflow` that has all parts, as links."""
  package = FOLDER / "mesh_tensorflow"
  package.mkdir(parents=True, exist_ok=True)
  parts = {path.name: path for path in (ROOT / "mesh_tensorflow").iterdir()}
  parts["transformer"] = ROOT / "transformer"
  for old in package.iterdir():
    if old.is_symlink() and old.name not in parts:
      old.unlink()
  for name, path in parts.items():
    link = package / name
    if name != "__pycache__" and not link.exists():
      link.unlink(missing_ok=True)
      link.symlink_to(path)
  for link, path in (
    (FOLDER / f"{PROGRAM}.py", ROOT / "tests" / f"{PROGRAM}.py"),
    *((FOLDER / other, ROOT / other) for other in OTHERS),
  ):
    if not link.exists():
      link.unlink(missing_ok=True)
      link.symlink_to(path)
  return FOLDER


def main(arguments: list[str]) -> int:
  """Runs mypy; its messages name the files as they lie in the repository.

  Args:
    arguments: further ones of mypy's, or parts of paths: only messages about these are shown.
  """
  folder = linked_package()
  wanted = [a for a in arguments if not a.startswith("-")]
  options = [a for a in arguments if a.startswith("-")]
  config = ROOT / "pyproject.toml"
  command = [sys.executable, "-m", "mypy", "--config-file", str(config)]
  command += ["-p", "mesh_tensorflow", *(f"-p{other}" for other in OTHERS), "-m", PROGRAM]
  result = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)
  for line in (result.stdout + result.stderr).splitlines():
    line = line.replace("mesh_tensorflow/transformer/", "transformer/")
    line = line.replace(f"{PROGRAM}.py:", f"tests/{PROGRAM}.py:")
    if not wanted or any(w in line for w in wanted) or not line.split(":")[0].endswith(".py"):
      print(line)
  return result.returncode


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
