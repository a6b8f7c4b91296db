"""Runs a program of the package as its command does: module and arguments.

With MTF_FULL_DISK set every checkpoint meets a full disk.
"""

from __future__ import annotations

import errno
import os
import runpy
import sys

from mesh_tensorflow.checkpoint import writer


def _no_space(job: writer.Job) -> None:
  raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if __name__ == "__main__":
  if os.environ.get("MTF_FULL_DISK"):
    writer.Job._write_parts = _no_space
  del sys.argv[0]
  runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
