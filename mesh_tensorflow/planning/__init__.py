"""What a layout matches and costs, found out without running, and which layout is best.

`describe` lowers a program onto a mesh that is not there; a `Machine` makes seconds of what it
counts; `auto_layout` searches. From below:

    flops, work         what a TensorFlow node does
    variables, mesh_impl, liveness, costs   a program lowered symbolically, and what it costs
    machine, seconds    machines, and the time that a cost takes on one
    text, picture, time_picture, describe   the report
    alike, probing, pieces   one operation lowered alone, for all that are like it
    loops, chains, held  a program as a sum of such pieces, loops opened: its time, and its memory
    search, task, auto_layout  the best layouts, by branch and bound
    measure             `python -m mesh_tensorflow.planning.measure`: this machine, as a file
"""

from mesh_tensorflow.planning.machine import Device, Link, Machine, shipped_machines

__all__ = ["Device", "Link", "Machine", "shipped_machines"]
