"""The worker processes that a mesh spans, as TF_CONFIG names them.

`join` is called first in every worker, before TensorFlow runs anything. A `SimdMeshImpl` then takes
the devices of all workers, and each worker runs the processors that are on its own devices.

    membership   this process among the others: joins, meets, leaves
    joining, joining_watch   waiting for each other at the start, within bounds
    texts        what workers tell each other
    agreement    that all run the same program
    loss_watch, parent_watch   a process ends when another worker, or its launcher, is gone
    cluster      who there is
    launching    several on one machine, as a cluster would start them
    launcher_reports   what they tell the launcher: progress, saved steps
    own_network  a network of their own, which nobody else reaches
"""

from mesh_tensorflow.exit_codes import WORKER_LOST as EXIT_WORKER_LOST  # its old name
from mesh_tensorflow.workers.cluster import Cluster, cluster_from_environment, listens
from mesh_tensorflow.workers.membership import (
  all_have_heard,
  any_worker,
  barrier,
  check,
  current,
  gather,
  host_device,
  join,
  leave,
  worker_errors,
)

__all__ = [
  "EXIT_WORKER_LOST",
  "Cluster",
  "all_have_heard",
  "any_worker",
  "barrier",
  "check",
  "cluster_from_environment",
  "current",
  "gather",
  "host_device",
  "join",
  "leave",
  "listens",
  "worker_errors",
]
