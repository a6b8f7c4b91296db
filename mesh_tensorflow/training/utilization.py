"""Model FLOP utilization of a training."""

from __future__ import annotations

import functools
import time

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.tpu.mesh_impl import StrategyMeshImpl
from mesh_tensorflow.operations.conditional import ConditionalOperation
from mesh_tensorflow.operations.convolution import FEATURES, FILTER, Convolution
from mesh_tensorflow.operations.einsum import EinsumOperation
from mesh_tensorflow.operations.loops import WhileLoopOperation
from mesh_tensorflow.planning.machine import convert_to_machine
from mesh_tensorflow.planning.program import machine_of
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Graph, Operation

# On a CPU larger products are tried, which keep more cores busy, until one takes long enough to be
# timed well. On a GPU of 100 TFLOP/s a product takes a hundredth of a second.
_CPU_SIZES, _GPU_SIZES, _REPEATS = (512, 1024, 2048), (8192,), 5
_LONG_ENOUGH = 0.005  # Seconds.


def step_flops(graph: Graph) -> int:
  """FLOPs of the matrix products and convolutions of a program, two for each multiply-add.

  Each product counts once, not on each device that does it again. What recomputation does again
  counts: the devices do it. A loop counts as often as it may run, if that is known, else once; of a
  condition the branch of more FLOPs.

  Args:
    graph: of a training step, complete.
  """
  return _flops(graph.operations)


def _flops(operations: list[Operation]) -> int:
  total = 0
  for op in operations:
    if isinstance(op, EinsumOperation) and len(op.inputs) > 1:
      total += 2 * _size_of_product(op)
    elif isinstance(op, Convolution):
      # Each element of the features is a sum over all of the filter but its output channels.
      kernel = op.shape_of(FILTER)
      total += 2 * op.shape_of(FEATURES).size * kernel.size // max(1, kernel[-1].size)
    elif isinstance(op, WhileLoopOperation):
      most = op.maximum_iterations
      total += (most if isinstance(most, int) else 1) * _flops(op.inner_operations)
    elif isinstance(op, ConditionalOperation):
      total += max(_flops(block.operations) for block in op.branches)
  return total


def _size_of_product(op: EinsumOperation) -> int:
  return Shape(list(dict.fromkeys(d for x in op.inputs for d in x.shape))).size


def peak_flops(given: float | str | None, mesh_impl: MeshImpl, dtype: tf.DType) -> float:
  """FLOP/s of all devices of a mesh together, and of its stages.

  Args:
    given: see `TrainerSettings.peak_flops`.
    mesh_impl: the mesh.
    dtype: of activations.

  Returns:
    The number; 0 if it is not known: TPUs are not measured.
  """
  meshes = mesh_impl.stages.values() or [mesh_impl]
  if isinstance(given, str):
    machine = convert_to_machine(given)
    assert machine is not None
    machine = machine_of(machine, mesh_impl, mesh_impl.shape.size)
    peak = machine.device.peak(dtype.name)
    return peak if machine.shared else peak * sum(impl.shape.size for impl in meshes)
  if given is not None:
    return float(given)
  if isinstance(mesh_impl, StrategyMeshImpl):
    return 0.0
  found = {impl.processor_device(p) or "CPU:0" for impl in meshes for p in impl.local_processors}
  devices = sorted(found)
  gpus = sum("CPU" not in d.upper() for d in devices)
  # CPU devices of one process share its cores, which a product on one of them uses all. A CPU
  # without units for a narrow dtype is slower in it than in float32, in which it may compute, too.
  dtypes = {dtype} if gpus else {dtype, tf.float32}
  sizes = _GPU_SIZES if gpus else _CPU_SIZES
  of_device = max(_measured(devices[0], d, sizes) for d in dtypes)
  return of_device * (gpus or 1) * workers.current().size


@functools.cache
def _measured(device: str, dtype: tf.DType, sizes: tuple[int, ...]) -> float:
  """FLOP/s of products of square matrices, the best of some; measured once in a process."""
  best = 0.0
  for size in sizes:
    with tf.device(device):
      x = tf.cast(tf.fill([size, size], 1e-3), dtype)
      seconds = []
      for _ in range(_REPEATS + 1):  # The first is warmed up by.
        started = time.perf_counter()
        # To have the number is to have waited for the product.
        float(tf.cast(tf.matmul(x, x)[0, 0], tf.float32))
        seconds.append(time.perf_counter() - started)
    shortest = min(seconds[1:])
    best = max(best, 2.0 * size**3 / shortest)
    if shortest > _LONG_ENOUGH:
      break
  return best
