"""Packages of the face that are imported when they are asked for first."""

import subprocess
import sys

import pytest

_LATE = {
  "bert": "bert.bert.BertConfig",
  "checkpoint": "checkpoint.Checkpointer",
  "keras": "keras.parallelize",
  "transformer": "transformer.transformer.Unitransformer",
}


def in_fresh_process(code):
  result = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
  )
  assert result.returncode == 0, result.stderr
  return result.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(_LATE))
def test_package_is_imported_when_it_is_asked_for(package):
  assert (
    in_fresh_process(
      "import sys, mesh_tensorflow as mtf\n"
      f"name = 'mesh_tensorflow.{package}'\n"
      f"before = [m for m in sys.modules if m == name and '{package}' != 'checkpoint']\n"
      f"print(before, {package!r} in dir(mtf), mtf.{_LATE[package]}.__name__)"
    )
    == f"[] True {_LATE[package].split('.')[-1]}"
  )


@pytest.mark.slow
def test_files_of_bert_are_imported_when_they_are_asked_for():
  assert (
    in_fresh_process(
      "import sys, mesh_tensorflow as mtf\n"
      "before = 'run_squad' in dir(mtf.bert), 'mesh_tensorflow.bert.run_squad' in sys.modules\n"
      "print(before, hasattr(mtf.bert, 'run_nothing'), mtf.bert.run_squad.__name__)"
    )
    == "(True, False) False mesh_tensorflow.bert.run_squad"
  )
