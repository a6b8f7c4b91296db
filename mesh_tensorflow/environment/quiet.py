"""Starts TensorFlow without its start-up notices, and with its fast kernels on CPUs.

TensorFlow's C++ code writes a few lines to stderr while it is imported and when it looks for
GPUs, of which there may be none, whatever the log level is. They are held back; everything else
that is written meanwhile, and any error, comes through, when TensorFlow is there. Setting
TF_CPP_MIN_LOG_LEVEL to 0 brings the notices back.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import BinaryIO

# A line of TensorFlow's log begins with "I0000 00:00:12.3" or "2026-01-31 00:00:12.3: I".
_LOGGED = rb"(?:[IWE]\d{4} |\d{4}-\d\d-\d\d [\d:.]+: [IWE] )"
_NOTICES = re.compile(
  rb"WARNING: All log messages before absl::InitializeLog|To enable the following instructions|"
  + _LOGGED
  + rb".*(?:oneDNN custom operations|cpu_feature_guard|computation_placer|cuda_drivers|cudart_stub|"
  rb"Could not find (?:cuda drivers|TensorRT)|Unable to register cu|oneDNN supports DT_BOOL only)"
)
_NO_DRIVER = re.compile(_LOGGED + rb".*failed call to cuInit")

# Files that exist if a driver of NVIDIA is loaded; the last is that of WSL.
_GPU_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")


@contextlib.contextmanager
def held_back_notices() -> Iterator[int]:
  """Holds back the start-up notices that are written to stderr inside the block.

  Yields:
    The descriptor of the real stderr: what is written to it is seen at once.
  """
  if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
    yield 2
    return
  try:
    stderr = os.dup(2)
  except OSError:
    yield 2  # There is no stderr to keep clean.
    return
  try:
    file = _hidden_file()
  except OSError:
    os.close(stderr)
    yield 2  # There is no place to write to.
    return
  with file as held_back:
    os.dup2(held_back.fileno(), 2)
    try:
      with _crashes_told(stderr):
        yield stderr
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
      held_back.seek(0)
      for line in held_back:
        if not _is_notice(line):
          os.write(2, line)


def _hidden_file() -> BinaryIO:
  """A file without a name; in memory where there are such, since folders may not be writable."""
  if hasattr(os, "memfd_create"):
    return open(os.memfd_create("held back"), "w+b")
  return tempfile.TemporaryFile()


@contextlib.contextmanager
def _crashes_told(stderr: int) -> Iterator[None]:
  """Enables faulthandler inside the block: a crash prints its traceback to the real stderr.

  What C++ said before it stays held back: TF_CPP_MIN_LOG_LEVEL=0 shows it.
  """
  if faulthandler.is_enabled():
    yield  # As the user wants it.
    return
  faulthandler.enable(stderr)
  try:
    yield
  finally:
    faulthandler.disable()


def _is_notice(line: bytes) -> bool:
  # With a driver, a failed call to it is an error.
  return bool(_NOTICES.match(line) or (_NO_DRIVER.match(line) and not _has_gpu_driver()))


def _has_gpu_driver() -> bool:
  return any(map(os.path.exists, _GPU_DRIVERS))


def import_tensorflow() -> str | None:
  """Imports TensorFlow, if it is not imported yet.

  Returns:
    Its version; None if there is no TensorFlow.
  """
  if "tensorflow" not in sys.modules:
    # Later informational messages (of devices, say) are not for users either.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    # oneDNN's kernels and its pool of memory, which TensorFlow by itself takes on processors with
    # AVX-512 only: with AVX2 a Transformer's training step takes less than half the time with them.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
  with held_back_notices():
    try:
      import tensorflow as tf
    except ModuleNotFoundError as e:
      if e.name != "tensorflow":
        raise
      return None
    _look_for_gpus(tf)
  return getattr(tf, "__version__", None)


def first_operation() -> None:
  """Starts TensorFlow's runtime, less a line that it writes then on booleans.

  On processors without AVX-512 (of the kind that oneDNN wants) it is an error line, once a process,
  in the middle of whatever is printed then.
  """
  import tensorflow as tf

  with held_back_notices(), tf.init_scope(), tf.device("CPU:0"):
    tf.transpose(tf.constant([[True, False]]))


def _look_for_gpus(tf: ModuleType) -> None:
  """Makes TensorFlow search for GPUs where there are none now: once, with an error line.

  Its build for GPUs writes "failed call to cuInit" on a machine without a driver, and would do so
  amid the output of the first program that runs anything. Where there is a driver it is left to
  look when it needs to: until then the program can choose what it shall see.
  """
  if not sys.platform.startswith("linux") or _has_gpu_driver():
    return
  if tf.test.is_built_with_cuda():
    tf.config.list_physical_devices("GPU")
