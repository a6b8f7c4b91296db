"""Memory available to this process, and typed out-of-memory errors."""

from __future__ import annotations

import contextlib
import pathlib
import re
import resource
from collections.abc import Iterator

import tensorflow as tf

from mesh_tensorflow.errors import OutOfMemoryError

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
# Where the numbers of a cgroup are: of version 2, and of version 1.
_FILES = (
  ("memory.max", "memory.current", "inactive_file"),
  ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
# TensorFlow's text of how large the tensor was that it had no memory for.
_TENSOR = re.compile(r"OOM when allocating tensor with shape\s*(\[[\d,]*\]) and type (\w+)")


def available_bytes() -> int | None:
  """Bytes that this process can still get on this machine; None if the system does not tell.

  The least of what the machine has free, swap included, of what its container may have (cgroups),
  and of the process's own limit (`ulimit -v`).
  """
  found = [n for n in (_of_machine(), _of_container(), _of_process()) if n is not None]
  return max(0, min(found)) if found else None


def _of_machine() -> int | None:
  numbers = _numbers("/proc/meminfo")
  if "MemAvailable" not in numbers:
    return None
  return 1024 * (numbers["MemAvailable"] + numbers.get("SwapFree", 0))


def _of_container() -> int | None:
  for limit, usage, cache in _FILES:
    try:
      most = int((_CGROUPS / limit).read_text())
      used = int((_CGROUPS / usage).read_text())
    except (OSError, ValueError):  # Not there, or "max".
      continue
    # The page cache is released when memory is requested.
    kept = _numbers(str((_CGROUPS / limit).parent / "memory.stat")).get(cache, 0)
    return most - used + kept
  return None


def _of_process() -> int | None:
  limit, _ = resource.getrlimit(resource.RLIMIT_AS)
  used = _numbers("/proc/self/status").get("VmSize")
  return None if limit == resource.RLIM_INFINITY or used is None else limit - 1024 * used


def _numbers(path: str) -> dict[str, int]:
  """Parses the numbers of lines like "name: 12 kB" or "name 12"."""
  try:
    lines = pathlib.Path(path).read_text().splitlines()
  except OSError:
    return {}
  pairs = (re.match(r"(\w+):?\s+(\d+)", line) for line in lines)
  return {m.group(1): int(m.group(2)) for m in pairs if m}


def text(size: float) -> str:
  """Formats a number of bytes: "21.3 GB"."""
  units = ["bytes", "KB", "MB", "GB", "TB"]
  while size >= 1000 and len(units) > 1:
    size /= 1000
    units.pop(0)
  return f"{size:.0f} bytes" if units[0] == "bytes" else f"{size:,.1f} {units[0]}"


@contextlib.contextmanager
def errors(what: str = "") -> Iterator[None]:
  """Context manager: converts TensorFlow's out-of-memory errors to `OutOfMemoryError`.

  Args:
    what: what needs it, for the message.
  """
  try:
    yield
  except tf.errors.ResourceExhaustedError as e:
    if not re.search(r"OOM|alloc|memory", e.message):
      raise  # Of another resource: of how long a message between machines may be, say.
    told = _TENSOR.search(e.message)
    cause = f"for a tensor {told.group(1)} of {told.group(2)}" if told else e.message.split("\n")[0]
    left = available_bytes()
    has = "" if left is None else f"; {text(left)} of the machine's memory are free now"
    raise OutOfMemoryError(
      f"{what or 'the program'} is out of memory: there is none {cause}{has}. Use a smaller batch, "
      "microbatches, recomputation, or a layout that splits more; mtf.describe and run.mode = "
      "'plan' show what each processor needs"
    ) from e
