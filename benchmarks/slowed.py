"""Virtual devices that are slowed on purpose: their products take a multiple of their time.

After each operation a device waits, and leaves the cores of the host to others meanwhile, as an
accelerator would. The wait follows from the operation's FLOPs, so it is the same in each run; a
device waits for one operation at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import tensorflow as tf

from mesh_tensorflow.meshes.placement.mesh_impl import PlacementMeshImpl
from mesh_tensorflow.planning.cost_model import node_flops


class Wait(NamedTuple):
  """A wait of a device: its name, and begin and end in seconds of `time.perf_counter`."""

  device: str
  begin: float
  end: float


@contextlib.contextmanager
def slowed(seconds_per_flop: Mapping[str, float], log: list[Wait] | None = None) -> Iterator[None]:
  """Context manager: programs that placement meshes trace in it wait on some devices.

  Args:
    seconds_per_flop: by name of a device, as the meshes have it, what it waits after each operation
      for each FLOP of its products.
    log: gets each wait, also after the context has ended.
  """
  plain = PlacementMeshImpl._call_on
  locks = {device: threading.Lock() for device in seconds_per_flop}

  def call_on(
    impl: PlacementMeshImpl, on: str, fn: Callable[..., object], args: Sequence[Any]
  ) -> Any:
    result = plain(impl, on, fn, args)
    seconds = flops_of(result, args) * seconds_per_flop.get(on, 0.0)
    if not seconds:
      return result
    several = isinstance(result, tuple)
    with tf.device(on):
      made = _after(list(result) if several else [result], seconds, on, locks[on], log)
    return tuple(made) if several else made[0]

  with mock.patch.object(PlacementMeshImpl, "_call_on", call_on):
    yield


def flops_of(results: object, args: Sequence[Any]) -> int:
  """FLOPs of the products between arguments and results of a function in a TensorFlow graph.

  Args:
    results: a tf.Tensor, or a structure of them.
    args: its arguments.
  """
  seen = {id(x.op) for x in args if _is_symbolic(x)}
  waiting = [x.op for x in tf.nest.flatten(results) if _is_symbolic(x)]
  total = 0
  while waiting:
    op = waiting.pop()
    if id(op) not in seen:
      seen.add(id(op))
      total += node_flops(op)
      waiting += [x.op for x in op.inputs]
  return total


def _is_symbolic(x: object) -> bool:
  return tf.is_tensor(x) and hasattr(x, "graph")


def _after(
  xs: list[Any], seconds: float, device: str, lock: threading.Lock, log: list[Wait] | None
) -> list[Any]:
  """Tensors after a wait; what is no tensor as it is."""

  def wait(_: np.ndarray) -> np.float32:
    with lock:
      begin = time.perf_counter()
      time.sleep(seconds)
      if log is not None:
        log.append(Wait(device, begin, time.perf_counter()))
    return np.float32(0)

  # It takes an element of the result and returns a zero that is added to it: TensorFlow's optimizer
  # removes what only has to come before. (If stateful, waits of all devices come in one order.)
  floating = [x for x in xs if _is_symbolic(x) and x.dtype.is_floating]
  given = [tf.cast(tf.reshape(floating[0], [-1])[:1], tf.float32)]
  zero = tf.numpy_function(wait, given, tf.float32, stateful=False)
  zero.set_shape([])
  return [x + tf.cast(zero, x.dtype) if any(x is f for f in floating) else x for x in xs]
