"""Packages of the face that are imported when they are asked for first."""

import json
import subprocess
import sys

import pytest

_LATE = {
  "bert": "bert.bert.BertConfig",
  "checkpoint": "checkpoint.Checkpointer",
  "keras": "keras.parallelize",
  "transformer": "transformer.transformer.Unitransformer",
}


_PACKAGES = {
  package: "import sys\n"
  f"name = 'mesh_tensorflow.{package}'\n"
  f"before = [m for m in sys.modules if m == name and {package!r} != 'checkpoint']\n"
  f"print(before, {package!r} in dir(mtf), mtf.{late}.__name__)"
  for package, late in _LATE.items()
}
_OF_BERT = """
import sys
before = 'run_squad' in dir(mtf.bert), 'mesh_tensorflow.bert.run_squad' in sys.modules
print(before, hasattr(mtf.bert, 'run_nothing'), mtf.bert.run_squad.__name__)
"""
# Each in a fork of a process that has imported the package, and nothing of it besides.
_EACH = """
import json, os, sys
import mesh_tensorflow as mtf
for name, code in json.loads(sys.argv[1]).items():
  sys.stdout.flush()
  child = os.fork()
  if not child:
    print(name, end=": ")
    exec(code)
    sys.stdout.flush()
    os._exit(0)
  os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def told():
  programs = json.dumps({**_PACKAGES, "files of bert": _OF_BERT})
  result = subprocess.run(
    [sys.executable, "-c", _EACH, programs],
    capture_output=True, text=True, timeout=200, check=False,
  )  # fmt: skip
  assert result.returncode == 0, result.stderr
  lines = [line.partition(": ") for line in result.stdout.strip().splitlines()]
  return {name: text for name, _, text in lines}, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(_LATE))
def test_package_is_imported_when_it_is_asked_for(package, told):
  found, stderr = told
  assert found.get(package) == f"[] True {_LATE[package].split('.')[-1]}", stderr


@pytest.mark.slow
def test_files_of_bert_are_imported_when_they_are_asked_for(told):
  found, stderr = told
  assert found.get("files of bert") == "(True, False) False mesh_tensorflow.bert.run_squad", stderr
