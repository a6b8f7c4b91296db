"""The scripts for TPU VMs, with a `gcloud` that notes its arguments; and the notebook, on CPU."""

import json
import os
import pathlib
import re
import shlex
import subprocess

import pytest

SCRIPTS = pathlib.Path(__file__).parent.parent / "tpu_scripts"
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


def test_the_notebook_on_cpu(run_subprocess, tmp_path):
  notebook = json.loads((SCRIPTS / "mesh_tensorflow_tpu.ipynb").read_text())
  assert (notebook["nbformat"], notebook["metadata"]["accelerator"]) == (4, "TPU")
  ids = [c["id"] for c in notebook["cells"]]
  assert len(set(ids)) == len(ids)
  sources = []
  for cell in notebook["cells"]:
    if cell["cell_type"] != "code":
      continue
    assert cell["outputs"] == [] and cell["execution_count"] is None
    source = "".join(cell["source"])
    compile(source, cell["id"], "exec")
    if "install" in cell["metadata"].get("tags", ()):
      pinned = re.findall(r'"([a-z-]+)(==)?[\d.]*"', source)
      assert ("tensorflow-tpu", "==") in pinned and ("gin-config", "==") in pinned
    sources.append(source)
  assert "STEPS = 300\n" in sources[4]
  sources[4] = sources[4].replace("STEPS = 300\n", "STEPS = 12\n")
  (tmp_path / "notebook.py").write_text("\n".join(sources))
  done = run_subprocess([tmp_path / "notebook.py"], cwd=tmp_path)
  assert "no TPU was found on this machine" in done.stdout
  assert "Going on with 4 virtual devices of the CPU" in done.stdout
  losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
  assert len(losses) == 7 and losses[-1] < losses[0] - 0.5
  assert (tmp_path / "mesh_tpu_checkpoints" / "checkpoint").exists()
