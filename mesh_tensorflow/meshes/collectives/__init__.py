"""Collectives of one per-device program.

A backend exchanges tensors between the members of a group of processors (`base`). All take tensors
of static shape, of any dtype that can be exchanged exactly.

    runtime     TensorFlow's collective operations, between any devices
    queues      between the CPU devices of one process, several times cheaper
    mixed       queues inside a worker, TensorFlow's operations between workers
    threads     between the threads of eager execution

`run_guard` ends a run in which a processor waits in vain, and says what happened. The operations of
TPUs are in `meshes/tpu`. Where one program has all slices nothing is exchanged: sums and copies
between devices do it, in `meshes/placement`.
"""
