"""Imports TensorFlow without its start-up notices.

TensorFlow's C++ code writes a few informational lines to stderr while it is imported, before
any log level is read. They are held back; everything else that is written meanwhile, and any
error, comes through. Setting TF_CPP_MIN_LOG_LEVEL to 0 brings the notices back.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile

_NOTICES = re.compile(
  rb"^(WARNING: All log messages before absl::InitializeLog|"
  rb"[IW]\d{4} .*(oneDNN custom operations|cpu_feature_guard|computation_placer|cuda_drivers|"
  rb"cudart_stub|port\.cc|Unable to register cu)|To enable the following instructions)"
)


def import_tensorflow() -> None:
  """Imports TensorFlow; does nothing if it is imported, or if its messages are wanted."""
  if "tensorflow" in sys.modules or os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
    return
  # Later informational messages (of devices, say) are not for users either.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
  try:
    stderr = os.dup(2)
  except OSError:
    return  # There is no stderr to keep clean.
  with tempfile.TemporaryFile() as held_back:
    os.dup2(held_back.fileno(), 2)
    try:
      import tensorflow  # noqa: F401
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
      held_back.seek(0)
      for line in held_back:
        if not _NOTICES.match(line):
          os.write(2, line)


import_tensorflow()
