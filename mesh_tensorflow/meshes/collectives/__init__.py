"""Collectives of one per-device program.

A backend exchanges tensors between the members of a group of processors (`base`). All take tensors
of static shape, of any dtype that can be exchanged exactly.

    runtime     TensorFlow's collective operations, between any devices
    queues      between the CPU devices of one process, several times cheaper
    mixed       queues inside a worker, TensorFlow's operations between workers
    threads     between the threads of eager execution
    tpu         the operations of TPUs
    placement   all slices in one program: no exchange, but sums and copies between devices

`run_guard` ends a run in which a processor waits in vain, and says what happened.
"""
