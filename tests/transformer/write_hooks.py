"""Things that go wrong with the folder of the checkpoints; for --module_import.

MTF_WRITES="fails": worker 1 cannot write, and worker 2 takes long to write its part;
MTF_WRITES="apart": worker 1 has a folder of its own.
"""

from __future__ import annotations

import errno
import os
import time

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint import writer

# Longer than the others take to miss a worker that has ended.
SLOW_SECONDS = 15.0

_WORKER = workers.cluster_from_environment().index


def _let_writes_fail() -> None:
  write = writer.Job._write_parts

  def write_parts(job):
    if _WORKER == 1:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if _WORKER == 2:
      time.sleep(SLOW_SECONDS)
    return write(job)

  writer.Job._write_parts = write_parts


if os.environ["MTF_WRITES"] == "fails":
  _let_writes_fail()
elif _WORKER == 1:
  os.makedirs("elsewhere")
  os.chdir("elsewhere")
