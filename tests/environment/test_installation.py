"""What the package says of the environment that it finds itself in."""

from __future__ import annotations

import ast
import builtins
import importlib.metadata
import sys
import warnings

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.environment import installation, quiet


def install(folder, name: str, version: str) -> None:
  info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
  info.mkdir(parents=True)
  (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def only_path(monkeypatch, tmp_path):
  """Distributions are looked for in folders of the test alone."""

  def use(*folders):
    monkeypatch.setattr(sys, "path", [str(tmp_path / f) for f in folders])
    importlib.invalidate_caches()

  return use


def told(package_path) -> list[str]:
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    installation.warn_of_conflicts([str(package_path)])
  return [str(w.message) for w in caught]


def test_archived_package_in_another_folder(only_path, tmp_path):
  install(tmp_path / "user", "mesh-tensorflow", "1.0.0.dev0")
  install(tmp_path / "system", "mesh_tensorflow", "0.1.21")
  only_path("user", "system")
  (text,) = told(tmp_path / "user" / "mesh_tensorflow")
  assert "archived mesh-tensorflow 0.1.21" in text and str(tmp_path / "system") in text
  assert "pip uninstall -y mesh-tensorflow" in text and "among" not in text


def test_archived_package_among_the_own_files(only_path, tmp_path):
  install(tmp_path / "site", "Mesh.TensorFlow", "0.1.19")
  only_path("site")
  (text,) = told(tmp_path / "site" / "mesh_tensorflow")
  assert "0.1.19" in text and "among the files of this package" in text


def test_two_builds_of_tensorflow(only_path, tmp_path):
  install(tmp_path / "site", "tensorflow", "2.21.0")
  install(tmp_path / "site", "tensorflow-cpu", "2.20.0")
  only_path("site")
  (text,) = told(tmp_path / "site" / "mesh_tensorflow")
  assert "tensorflow 2.21.0 and tensorflow-cpu 2.20.0 are both installed in" in text
  assert "pip uninstall -y tensorflow tensorflow-cpu" in text


def test_usual_environments_are_silent(only_path, tmp_path):
  install(tmp_path / "site", "mesh-tensorflow", "1.0.0.dev0")
  install(tmp_path / "site", "tensorflow-cpu", "2.21.0")
  install(tmp_path / "system", "tensorflow", "2.16.1")  # Another folder: the first one counts.
  install(tmp_path / "clone", "mesh-tensorflow", "1.0.0.dev0")
  (tmp_path / "site" / "mesh_tensorflow-0.0.dist-info").mkdir()  # What pip left when it was killed.
  only_path("site", "clone", "system")
  assert told(tmp_path / "clone" / "mesh_tensorflow") == []


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 7, 0), (2, 7, 18)])
def test_old_python(version):
  with pytest.raises(errors.InstallationError, match=r"3\.10 or later; this is (3|2)\.\d+\.\d+"):
    installation.check_python(version)
  assert issubclass(errors.InstallationError, (ImportError, errors.MeshError))


@pytest.mark.parametrize(
  "name",
  [
    "__init__",
    "errors",
    "version",
    *[f"environment/{n}" for n in ("__init__", "start", "installation", "quiet", "source_tree")],
  ],
)
def test_old_python_gets_as_far_as_the_check(repository, name):
  """Its syntax, and no generic types (list[str]) outside annotations, which it does not know."""
  text = (repository / "mesh_tensorflow" / f"{name}.py").read_text()
  tree = ast.parse(text, feature_version=(3, 7))
  lines = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
  subscripted = [n for line in lines for n in ast.walk(line.value) if isinstance(n, ast.Subscript)]
  generic = [n for n in subscripted if getattr(n.value, "id", "") in dir(builtins)]
  assert generic == []
  assert name.endswith(("__init__", "version")) or "from __future__ import annotations" in text


def test_python_that_will_do():
  for version in [(3, 10, 0), (3, 13, 1), (4, 0, 0)]:
    installation.check_python(version)


@pytest.mark.parametrize("version", ["2.15.1", "1.15.5", "2.9.0-rc1", None])
def test_old_or_no_tensorflow(version):
  with pytest.raises(errors.InstallationError) as error:
    installation.check_tensorflow(version)
  assert f"pip install '{installation.TENSORFLOW}'" in str(error.value)
  assert (version or "there is none") in str(error.value)


def test_tensorflow_that_will_do():
  for version in ["2.16.1", "2.21.0", "2.22.0-dev20260101", "3.0.0", "unknown"]:
    installation.check_tensorflow(version)


def test_no_tensorflow_is_told(run_subprocess, tmp_path):
  """In one line that says what to do; before Python's version is looked at it is not."""
  program = (
    "import sys\n"
    "sys.modules['tensorflow'] = None\n"
    "try:\n  import mesh_tensorflow\n"
    "except ImportError as e:\n  print(type(e).__name__, e)\n"
    "for name in [n for n in sys.modules if 'mesh_tensorflow' in n]:\n  del sys.modules[name]\n"
    "sys.version_info = (3, 8, 2)\n"
    "try:\n  import mesh_tensorflow\n"
    "except ImportError as e:\n  print(type(e).__name__, e)\n"
  )
  out = run_subprocess(program, timeout=60).stdout.splitlines()
  assert out[0].startswith("InstallationError mesh_tensorflow needs TensorFlow >=2.16,<2.22, and")
  assert out[1] == "InstallationError mesh_tensorflow needs Python 3.10 or later; this is 3.8.2"


def test_version_has_one_source():
  assert mtf.__version__ == importlib.metadata.version("mesh-tensorflow")


# -------------------------------------------------------------------- start-up notices

NOTICES = [
  "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
  "I0000 00:00:1795341629.3 10065 port.cc:153] oneDNN custom operations are on. You may see",
  "2024-03-10 12:00:00.1: I tensorflow/core/util/port.cc:113] oneDNN custom operations are on.",
  "I0000 00:00:1.3 10065 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use",
  "To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild",
  "I0000 00:00:1.3 1 cudart_stub.cc:31] Could not find cuda drivers on your machine",
  "2024-03-10 12:00:00.1: E external/cuda_dnn.cc:9261] Unable to register cuDNN factory: Attemp",
  "W0000 00:00:1.3 1 computation_placer.cc:177] computation placer already registered.",
  "E0000 00:00:1.3 1 util.cc:131] oneDNN supports DT_BOOL only on platforms with AVX-512. Falling",
  "2024-03-10 12:00:00.1: W tensorflow/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT",
]
CUINIT = [
  "E0000 00:00:1.4 10065 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: 303",
  "2026-11-22 10:00:00.1: E external/cuda_driver.cc:1] failed call to cuInit: UNKNOWN ERROR (303)",
]
OTHERS = [
  "W0000 00:00:1.4 1 gpu_device.cc:52] Cannot dlopen some GPU libraries. Please make sure",
  "E0000 00:00:1.4 1 cuda_executor.cc:1] CUDA_ERROR_OUT_OF_MEMORY",
  "F0000 00:00:1.4 1 x.cc:1] Check failed: port.cc",
  "Traceback (most recent call last):",
  "a program's own line about cpu_feature_guard",
]


@pytest.mark.parametrize("driver", [False, True])
def test_which_lines_are_notices(monkeypatch, tmp_path, driver):
  """Without a driver a failed call to it is nothing; with one it is an error."""
  there = [str(tmp_path)] if driver else []
  monkeypatch.setattr(quiet, "_GPU_DRIVERS", (str(tmp_path / "none"), *there))
  held = [line for line in (*NOTICES, *CUINIT, *OTHERS) if quiet._is_notice(line.encode())]
  assert held == [*NOTICES, *([] if driver else CUINIT)]


def test_import_and_first_operation_say_nothing(run_subprocess):
  """At the usual log level; the setting of a user wins; a crash shows where it was."""
  program = (
    "import os, sys\n"
    "import mesh_tensorflow as mtf\n"
    "import tensorflow as tf\n"
    "mtf.virtual_cpu_devices(2)\n"
    "tf.transpose(tf.constant([[True]])); tf.config.list_physical_devices()\n"
    "sys.stderr.write('end')\n"
    "from mesh_tensorflow.environment import quiet\n"
    "with quiet.held_back_notices():\n"
    "  os.abort()\n"
  )
  env = {"TF_CPP_MIN_LOG_LEVEL": "", "CUDA_VISIBLE_DEVICES": ""}
  result = run_subprocess(program, env=env, check=False, timeout=120)
  said, _, crash = result.stderr.partition("end")
  assert said == ""
  assert result.returncode < 0 and "Fatal Python error: Aborted" in crash
