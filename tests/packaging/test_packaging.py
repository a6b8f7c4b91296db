"""The four folders become one package, in a wheel as well as in an editable install."""

from __future__ import annotations

import email
import email.message
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
from packaging.requirements import Requirement

from mesh_tensorflow import errors, version
from mesh_tensorflow.environment import installation
from mesh_tensorflow.transformer.gin_config import reader

pytestmark = pytest.mark.subprocess

# In the wheel <- in the repository.
FOLDERS = {
  "mesh_tensorflow/transformer/gin": "gin",
  "mesh_tensorflow/transformer": "transformer",
  "mesh_tensorflow/examples": "examples",
  "mesh_tensorflow": "mesh_tensorflow",
  "mesh_settings": "mesh_settings",
  "mesh_transformer_cli": "mesh_transformer_cli",
}
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")

# Prints, for each folder among its arguments, what a program finds that starts there;
# runs wherever the package is installed. TensorFlow is imported once for all of them.
REPORT = """
import json, os, sys
import tensorflow
for folder in sys.argv[1:]:
  if not os.fork():
    break
  if os.wait()[1]:
    sys.exit(f"failed in {folder}")
else:
  sys.exit()
os.chdir(folder)  # The empty first element of sys.path is this folder, from now on.
import gin
import mesh_tensorflow
import mesh_tensorflow.transformer
import mesh_tensorflow.examples.mnist
import mesh_transformer_cli.front
from mesh_tensorflow.transformer import gin_paths
folder = gin_paths.gin_dir()
files = [name for _, _, names in os.walk(folder) for name in names if name.endswith(".gin")]
print(json.dumps({
  "package": mesh_tensorflow.__file__,
  "transformer": mesh_tensorflow.transformer.__file__,
  "gin_dir": folder,
  "gin_files": len(files),
  "gin_config": hasattr(gin, "parse_config_file"),
}), flush=True)
"""

Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="module")
def source(repository: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A copy of what goes into a wheel: building leaves files behind where it happens."""
  copy = tmp_path_factory.mktemp("source")
  for name in FOLDERS.values():
    shutil.copytree(repository / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
  for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
    if (repository / name).exists():
      shutil.copy(repository / name, copy)
  return copy


@pytest.fixture(scope="module")
def wheel(source: pathlib.Path, run_subprocess: Run) -> pathlib.Path:
  pytest.importorskip("setuptools", reason="building without isolation needs setuptools")
  out = source / "dist"
  # What `pip install .` of an earlier state left behind.
  stale = source / "build" / "lib" / "mesh_tensorflow" / "layers"
  stale.mkdir(parents=True)
  (stale / "gone_since.py").write_text("")
  build = ["wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", out, source]
  run_subprocess([*PIP, *build], cwd=source)
  (path,) = out.glob("*.whl")
  return path


def reports(run_subprocess: Run, *folders: pathlib.Path, **options: Any) -> list[dict]:
  """What `REPORT` finds in each of the folders."""
  told = run_subprocess(["-c", REPORT, *folders], **options).stdout
  found = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
  assert len(found) == len(folders), told
  return found


def metadata_of(wheel: pathlib.Path) -> email.message.Message:
  with zipfile.ZipFile(wheel) as archive:
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(archive.read(path))


def gin_files(folder: pathlib.Path) -> int:
  return len(list(folder.rglob("*.gin")))


def test_wheel_holds_every_module_and_gin_file(source: pathlib.Path, wheel: pathlib.Path):
  expected = {
    f"{inside}/{path.relative_to(source / folder).as_posix()}"
    for inside, folder in FOLDERS.items()
    for path in (source / folder).rglob("*.gin" if folder == "gin" else "*.py")
  }
  with zipfile.ZipFile(wheel) as archive:
    held = {name for name in archive.namelist() if name.endswith((".py", ".gin"))}
  assert sorted(expected - held) == [], "not in the wheel: a folder without __init__.py?"
  assert sorted(held - expected) == []


def test_installed_wheel_works_from_any_folder(
  source: pathlib.Path, wheel: pathlib.Path, run_subprocess: Run, tmp_path: pathlib.Path
):
  target = tmp_path / "target"
  run_subprocess(
    [*PIP, "install", "--no-index", "--no-deps", "--no-compile", "--target", target, wheel]
  )
  inside = target / "mesh_tensorflow" / "transformer"
  # In `inside` a folder named gin stands next to the program: it must not hide gin-config.
  env = {"PYTHONPATH": str(target)}
  for found in reports(run_subprocess, tmp_path, inside, cwd=tmp_path, env=env):
    assert found == {
      "package": str(target / "mesh_tensorflow" / "__init__.py"),
      "transformer": str(inside / "__init__.py"),
      "gin_dir": str(inside / "gin"),
      "gin_files": gin_files(source / "gin"),
      "gin_config": True,
    }


@pytest.mark.long
def test_this_installation_works_from_any_folder(
  repository: pathlib.Path, run_subprocess: Run, tmp_path: pathlib.Path
):
  folders = (tmp_path, repository, repository / "transformer")
  for folder, found in zip(folders, reports(run_subprocess, *folders, cwd=tmp_path)):
    assert found["gin_config"], folder
    assert found["gin_files"] == gin_files(repository / "gin"), folder


def test_gin_folder_is_data_only(repository: pathlib.Path):
  others = [path for path in (repository / "gin").rglob("*") if path.is_file()]
  assert [path for path in others if path.suffix != ".gin"] == []


def test_missing_gin_files_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
  monkeypatch.setattr(reader, "_PACKAGE", str(tmp_path / "transformer"))
  with pytest.raises(errors.ConfigError) as error:
    reader.gin_dir()
  assert str(tmp_path / "transformer" / "gin") in str(error.value)
  assert str(tmp_path / "gin") in str(error.value)


def test_runtime_dependencies(wheel: pathlib.Path):
  required = [Requirement(line) for line in metadata_of(wheel).get_all("Requires-Dist")]
  always = {requirement.name for requirement in required if requirement.marker is None}
  assert always == {"tensorflow", "tensorflow-datasets", "numpy", "gin-config", "tqdm"}
  (tensorflow,) = (r for r in required if r.name == "tensorflow")
  assert tensorflow == Requirement(installation.TENSORFLOW)


def test_what_asks_for_the_archived_package_finds_this_one(run_subprocess: Run, tmp_path):
  """t5 asks for `mesh-tensorflow[transformer]>=0.1.13`: pip fetches nothing."""
  asks = "install_requires=['mesh-tensorflow[transformer]>=0.1.13']"
  (tmp_path / "setup.py").write_text(f"import setuptools\nsetuptools.setup(name='t', {asks})\n")
  dry_run = ["install", "--no-index", "--no-build-isolation", "--dry-run", tmp_path]
  told = run_subprocess(["-m", "pip", *dry_run], cwd=tmp_path).stdout
  assert re.search(r"already satisfied: mesh-tensorflow(\[transformer\])?>=0\.1\.13", told)
  assert told.splitlines()[-1] == "Would install t-0.0.0"


def test_readme_lists_the_extras(repository: pathlib.Path, wheel: pathlib.Path):
  extras = set(metadata_of(wheel).get_all("Provides-Extra"))
  item = (repository / "README.md").read_text().split("- Extras, as in ")[1].split("\n- ")[0]
  assert {name.replace("_", "-") for name in re.findall(r"`(\w+)`", item)} == extras
  assert "transformer" in extras


def test_wheel_has_the_version_of_the_source(wheel: pathlib.Path):
  assert metadata_of(wheel)["Version"] == version.__version__


@pytest.mark.parametrize("name", ["mesh-transformer", "mesh-transformer-launch"])
def test_console_script_exists(name):
  (script,) = importlib.metadata.entry_points(group="console_scripts", name=name)
  assert callable(script.load())
