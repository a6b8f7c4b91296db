"""The scripts for TPU VMs, with a `gcloud` that notes its arguments; and the notebooks, on CPU."""

import importlib.machinery
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import types

import pytest

from tests.conftest import ROOT

SCRIPTS = ROOT / "tpu_scripts"
NAMES = sorted(p.name for p in SCRIPTS.glob("*.sh"))
VM = ["--name", "vm 1", "--zone", "us-central1-b"]


@pytest.fixture
def run_script(tmp_path):
  """Runs a script; returns the finished process and the calls of gcloud."""
  fake = tmp_path / "bin" / "gcloud"
  fake.parent.mkdir()
  log = tmp_path / "calls"
  fake.write_text(f'#!/usr/bin/env bash\nprintf "%s\\0" "$@" END >> {shlex.quote(str(log))}\n')
  fake.chmod(0o755)

  def run(name, *arguments):
    done = subprocess.run(
      ["bash", str(SCRIPTS / name), *arguments],
      env={**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"},
      capture_output=True,
      text=True,
      timeout=120,
      cwd=tmp_path,
    )
    calls = log.read_text().split("END\0")[:-1] if log.exists() else []
    return done, [c.split("\0")[:-1] for c in calls]

  return run


def test_scripts_are_found():
  assert NAMES == ["create_vm.sh", "delete_vm.sh", "install.sh", "train.sh"]


@pytest.mark.parametrize("name", NAMES)
def test_each_script(name, run_script):
  text = (SCRIPTS / name).read_text()
  assert "\nset -euo pipefail\n" in text
  assert os.access(SCRIPTS / name, os.X_OK)
  assert subprocess.run(["bash", "-n", str(SCRIPTS / name)], timeout=120).returncode == 0
  done, calls = run_script(name, "--help")
  assert done.returncode == 0 and done.stdout.startswith(name) and not calls
  for option in re.findall(r"--[a-z][a-z_-]+", text.split("usage() {")[1].split("\nTEXT")[0]):
    assert option in done.stdout
  done, calls = run_script(name)
  assert done.returncode == 2 and f"{name}: give a --name" in done.stderr and not calls
  done, _ = run_script(name, "--name", "x")
  assert done.returncode == 2 and "give a --zone" in done.stderr
  done, _ = run_script(name, "--nmae", "x")
  assert done.returncode == 2 and "unknown argument --nmae" in done.stderr
  done, _ = run_script(name, "--name")
  assert done.returncode == 2 and "--name needs a value" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_variables_are_quoted(name):
  """Every expansion outside of [[ ]], (( )) and a text for the VM is in quotes."""
  for line in (SCRIPTS / name).read_text().splitlines():
    bare = re.sub(r"\[\[.*?\]\]|\(\(.*?\)\)", "", line)
    bare = re.sub(r'\$\{\w+\[@\]\+"\$\{\w+\[@\]\}"\}', "", bare)
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", bare)
    if "$" in bare:
      # Of a command of several lines in double quotes, or an assignment, which does not split.
      assert re.match(r"\s*(~/mesh-venv|\w+=|tmux new-session)", bare) or bare.startswith("'"), line


def test_create(run_script):
  done, calls = run_script(
    "create_vm.sh", *VM, "--type", "v2-8", "--project", "my project", "--spot"
  )
  assert done.returncode == 0, done.stderr
  create, ssh = calls
  assert create == [
    *("compute", "tpus", "tpu-vm", "create", "vm 1", "--zone", "us-central1-b"),
    *("--accelerator-type", "v2-8", "--version", "tpu-ubuntu2204-base"),
    *("--project", "my project", "--spot"),
  ]
  assert ssh[3:7] == ["ssh", "vm 1", "--zone", "us-central1-b"]


def test_install(run_script):
  done, calls = run_script("install.sh", *VM, "--tensorflow", "2.19.1")
  assert done.returncode == 0, done.stderr
  copy, ssh = calls
  assert copy[3] == "scp" and copy[5] == "vm 1:mesh_tensorflow.tar.gz"
  assert not os.path.exists(copy[4]), "the archive is removed"
  program = ssh[ssh.index("--command") + 1]
  assert "'tensorflow-tpu==2.19.1'" in program and "--no-deps ~/mesh_tensorflow" in program
  assert subprocess.run(["bash", "-n", "-c", program], timeout=120).returncode == 0
  done, _ = run_script("install.sh", *VM, "--tensorflow", "2.18; rm -rf /")
  assert done.returncode == 2


def test_train(run_script, tmp_path):
  binding = "run.layout_rules = 'batch:batch'"
  done, calls = run_script(
    *("train.sh", *VM, "--model-dir", "gs://bucket/a folder", "--cores", "1"),
    *("--gin_param", binding, "models/tiny.gin", "layouts/2x2_dp.gin"),
  )
  assert done.returncode == 0, done.stderr
  [ssh] = calls
  program = ssh[ssh.index("--command") + 1]
  # What tmux is given, run with a python that only notes its arguments.
  (tmp_path / "home" / "mesh-venv" / "bin").mkdir(parents=True)
  tools = {
    "home/mesh-venv/bin/python": 'printf "%s\\n" "$@"',
    "bin/tmux": '[[ "$1" == new-session ]] && bash -c "$5"',
    "bin/tail": "cat mesh.log",
  }
  for path, text in tools.items():
    (tmp_path / path).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (tmp_path / path).chmod(0o755)
  vm = subprocess.run(
    ["bash", "-c", program],
    env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
    cwd=tmp_path / "home",
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert vm.returncode == 0, vm.stderr
  expected = [
    *("-m", "mesh_tensorflow.transformer.main", "--tpu=local", "--logical_cores_per_chip=1"),
    *("--model_dir=gs://bucket/a folder", "--gin_file=models/tiny.gin"),
    *("--gin_file=layouts/2x2_dp.gin", f"--gin_param={binding}"),
  ]
  assert (tmp_path / "home" / "mesh.log").read_text().splitlines() == expected
  done, _ = run_script("train.sh", *VM, "--model-dir", "d")
  assert done.returncode == 2 and "give at least one gin file" in done.stderr


def code_cells(name):
  """The sources of the cells that run, after a look at the form of the notebook."""
  notebook = json.loads((SCRIPTS / name).read_text())
  assert notebook["nbformat"] == 4
  assert notebook["metadata"].get("accelerator") == ("TPU" if "_tpu" in name else None)
  ids = [c["id"] for c in notebook["cells"]]
  assert len(set(ids)) == len(ids)
  cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
  for cell in cells:
    assert cell["outputs"] == [] and cell["execution_count"] is None
    compile("".join(cell["source"]), cell["id"], "exec")
  assert cells[0]["metadata"]["tags"] == ["install"]
  return ["".join(cell["source"]) for cell in cells]


def run_notebook(name, steps, run_forked, folder):
  """Runs the cells as one program, with fewer steps; what it prints."""
  program = "\n".join(code_cells(name))
  assert program.count("\nSTEPS = 300\n") == 1
  (folder / "notebook.py").write_text(program.replace("STEPS = 300\n", f"STEPS = {steps}\n"))
  return run_forked([folder / "notebook.py"], cwd=folder).stdout


def test_the_tpu_notebook_on_cpu(run_forked, tmp_path):
  printed = run_notebook("mesh_tensorflow_tpu.ipynb", 12, run_forked, tmp_path)
  assert "no TPU was found on this machine" in printed
  assert "Going on with 4 virtual devices of the CPU" in printed
  losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]
  assert len(losses) == 7 and losses[-1] < losses[0] - 0.5
  assert (tmp_path / "mesh_tpu_checkpoints" / "checkpoint").exists()


def test_the_cpu_notebook(run_forked, tmp_path):
  printed = run_notebook("mesh_tensorflow_cpu.ipynb", 6, run_forked, tmp_path)
  assert "batch:rows" in printed and "Bytes that one device sends" in printed
  rows = re.findall(
    r"^(?:batch|hidden|one device)\S* +((?:\d\.\d{5} ?){5})$", printed, re.MULTILINE
  )
  assert len(rows) == 4
  first, *others = [[float(x) for x in row.split()] for row in rows]
  assert first[-1] < first[0]
  assert all(abs(a - b) < 2e-5 for other in others for a, b in zip(first, other))
  assert "step       6/6  loss" in printed and "2 lines decoded" in printed
  assert (tmp_path / "texts.txt-6").read_text(errors="replace").startswith("def main")


@pytest.fixture
def install_cell(monkeypatch, tmp_path):
  """Runs the cell that installs, with other versions installed; returns what pip is given."""

  def run(versions):
    def version(package):
      if package in versions:
        return versions[package]
      raise importlib.metadata.PackageNotFoundError(package)

    calls = []
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command[5:]))
    monkeypatch.chdir(tmp_path)
    exec(code_cells("mesh_tensorflow_cpu.ipynb")[0], {})
    return calls

  return run


def test_both_notebooks_install_alike():
  tpu, cpu = (code_cells(f"mesh_tensorflow_{kind}.ipynb")[0] for kind in ("tpu", "cpu"))
  assert tpu == cpu
  pinned = re.findall(r'"([a-z-]+)(==)?[\d.]*"', cpu)
  assert ("tensorflow-tpu", "==") in pinned and ("gin-config", "==") in pinned


def test_the_notebooks_install_nothing_where_the_package_is(install_cell):
  assert install_cell({"mesh-tensorflow": "1.0.0.dev0"}) == []


def test_the_notebooks_take_the_wheel_beside_them(install_cell, tmp_path):
  (tmp_path / "mesh_tensorflow-1.0-py3-none-any.whl").write_text("")
  wheel = ["--no-deps", "mesh_tensorflow-1.0-py3-none-any.whl"]
  old, others, last = install_cell({"mesh-tensorflow": "0.1.21", "tensorflow": "1.15.0"})
  assert old == ["tensorflow==2.18.0"] and last == wheel
  assert "gin-config==0.5.0" in others
  # A TensorFlow that suits stays.
  assert install_cell({"tensorflow": "2.19.1"}) == [others, wheel]


def test_the_notebooks_ask_for_a_wheel_on_colab(install_cell, monkeypatch):
  with pytest.raises(RuntimeError, match="set SOURCE above"):
    install_cell({"tensorflow": "2.19.1"})
  colab, google = types.ModuleType("google.colab"), types.ModuleType("google")
  colab.files = types.SimpleNamespace(upload=lambda: {"chosen.whl": b""})
  for module in (google, colab):
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
  google.colab = colab
  assert install_cell({"tensorflow": "2.19.1"})[-1] == ["--no-deps", "chosen.whl"]
