"""Check that all workers run the same program, before they wait for each other in vain."""

from __future__ import annotations

import hashlib
import json
import pathlib
import platform
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.workers import texts

_MOST_TOLD = 8  # Lines, of each worker.
_LONGEST_TOLD = 200  # Characters of a line.


def check_same(lines: Sequence[str]) -> None:
  """Checks that all workers have the same lines; all call it at the same place of their programs.

  Args:
    lines: settings and versions that the program depends on, as "run.seed = 1"; in any order.

  Raises:
    ConfigError: in all workers, if they differ: it has the lines that do.
  """
  cluster = workers.current()
  own = sorted(set(lines))
  digest = hashlib.sha256(json.dumps(own).encode()).digest()
  digests = workers.gather(np.frombuffer(digest, np.int32))
  different = [i for i in range(cluster.size) if (digests[i] != digests[0]).any()]
  if not different:
    return
  all_lines = [set(json.loads(x)) for x in texts.gather_texts(json.dumps(own))]
  workers.all_have_heard()
  common = set.intersection(*all_lines)
  told = []
  for worker in [0, *different]:
    mine = sorted(all_lines[worker] - common)
    shown = "; ".join(line[:_LONGEST_TOLD] for line in mine[:_MOST_TOLD]) or "none of that"
    more = f"; and {len(mine) - _MOST_TOLD} more" if len(mine) > _MOST_TOLD else ""
    told.append(f"{cluster.name(worker)} has {shown}{more}")
  raise ConfigError(
    f"the workers must run the same program with the same settings, but {', but '.join(told)}. "
    "Start the same command, from the same files, on all machines"
  )


def versions(*packages: str) -> list[str]:
  """Lines for `check_same`: versions of what computes, and a digest of the code of packages.

  Args:
    packages: their folders.
  """
  code = hashlib.sha256()
  for folder in packages:
    for file in sorted(pathlib.Path(folder).rglob("*.py")):
      code.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
  return [
    f"Python {platform.python_version()}",
    f"TensorFlow {tf.__version__}",
    f"code of mesh_tensorflow {code.hexdigest()[:12]}",
  ]
