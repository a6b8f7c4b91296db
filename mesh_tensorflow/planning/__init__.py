"""Planning: costs of a layout without running it, and search for the best layout.

`describe` reports one layout of a program, evaluated operation by operation on a mesh that is not
there; a `Machine` makes seconds of it; `auto_layout` evaluates many. From below:

    machine       machines: devices, links, and their files
    cost_model    work of TensorFlow nodes; seconds of work and of exchanges on a machine
    mesh_impl     a mesh without devices, whose slices are symbolic
    lowering      one operation lowered on it: its work, exchanges, buffers
    pieces        one lowering for all operations that are alike, and for other mesh sizes
    evaluation    a layout of a program, as the sum of its pieces: costs and memory
    program       what is planned: a graph or a function, and the machine of its mesh
    text, pictures, describe   the report
    shares                     shares for devices of unequal speed, beside the equal split
    search, auto_layout        the best layouts, by branch and bound
    measure       `python -m mesh_tensorflow.planning.measure`: this machine, as a file
"""

from mesh_tensorflow.planning.machine import Device, Link, Machine, Speed, Workers, shipped_machines
from mesh_tensorflow.planning.shares import SharesChoice, best_shares, propose_shares

__all__ = [
  "Device",
  "Link",
  "Machine",
  "SharesChoice",
  "Speed",
  "Workers",
  "best_shares",
  "propose_shares",
  "shipped_machines",
]
