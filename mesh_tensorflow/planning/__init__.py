"""Planning: effects and costs of a layout without running it, and search for the best layout.

`describe` lowers a program onto a mesh that is not there; a `Machine` makes seconds of what it
counts; `auto_layout` searches. From below:

    flops, work         what a TensorFlow node does
    variables, mesh_impl, liveness, costs   a program lowered symbolically, and what it costs
    machine (of machine_parts, read by machine_reading), seconds
                         machines, and the time that a cost takes on one
    text, picture, time_picture, describe   the report
    alike, probing, pieces   one operation lowered alone, for all that are like it
    loops, chains, held  a program as a sum of such pieces, loops opened: its time, and its memory
    search, task, auto_layout  the best layouts, by branch and bound
    measure             `python -m mesh_tensorflow.planning.measure`: this machine, as a file; its
                        exchanges are in measure_exchanges, those of workers in measure_workers
"""

from mesh_tensorflow.planning.machine import Machine, shipped_machines
from mesh_tensorflow.planning.machine_parts import Device, Link, Speed, Workers

__all__ = ["Device", "Link", "Machine", "Speed", "Workers", "shipped_machines"]
