"""Lets writing a checkpoint take a while, for --module_import: a signal comes inside of one."""

from __future__ import annotations

import time

from mesh_tensorflow.checkpoint import writer

SECONDS = 0.3

_write_parts = writer.Job._write_parts


def _slowly(job: writer.Job):
  records = _write_parts(job)
  time.sleep(SECONDS)
  return records


writer.Job._write_parts = _slowly
