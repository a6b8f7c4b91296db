"""Starts TensorFlow without its start-up notices.

TensorFlow's C++ code writes a few lines to stderr while it is imported and when it looks for
GPUs, of which there may be none, whatever the log level is. They are held back; everything else
that is written meanwhile, and any error, comes through. Setting TF_CPP_MIN_LOG_LEVEL to 0 brings
the notices back.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

_NOTICES = re.compile(
  rb"^(WARNING: All log messages before absl::InitializeLog|"
  rb"[IW]\d{4} .*(oneDNN custom operations|cpu_feature_guard|computation_placer|cuda_drivers|"
  rb"cudart_stub|port\.cc|Unable to register cu)|To enable the following instructions|"
  rb"E\d{4} .*failed call to cuInit)"
)


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
  with tempfile.TemporaryFile() as held_back:
    os.dup2(held_back.fileno(), 2)
    try:
      yield stderr
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
      held_back.seek(0)
      for line in held_back:
        if not _NOTICES.match(line):
          os.write(2, line)


def import_tensorflow() -> None:
  """Imports TensorFlow; does nothing if it is imported."""
  if "tensorflow" in sys.modules:
    return
  # Later informational messages (of devices, say) are not for users either.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
  with held_back_notices():
    import tensorflow  # noqa: F401


import_tensorflow()
