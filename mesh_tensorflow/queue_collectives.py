"""Collectives between the CPU devices of one process, through queues in memory.

Each member of a group hands its tensor to another one through a queue, without a
copy. This costs a fraction of TensorFlow's collective operations, which wake
several threads for each message. A queue is a resource: the program, traced once,
holds the queues of one processor, and each processor's call gets its own.

Queues know no timeout and keep what a failed run left in them. So each run is
framed by a state variable (odd while a run is going on): a run refuses to start
after one that failed, and a watchdog closes the queues when a run stops moving.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.collectives import Collectives, Groups, check_static, fold, unlifted_variable
from mesh_tensorflow.dimensions import list_product

_LOG = logging.getLogger("mesh_tensorflow")

_NETWORKS = itertools.count()

# From this size of a tensor (bytes) on, a sum is cut into a part for each member.
SHARD_BYTES = 1 << 18


class QueueNetwork:
  """The queues between the processors of a mesh, made when they are needed.

  Args:
    devices: device of every processor; may repeat.
    timeout_seconds: a run (or one iteration of a loop in it) that takes longer
      is broken off.
  """

  def __init__(self, devices: Sequence[str], timeout_seconds: float):
    self._devices = list(devices)
    self._name = f"mtf_exchange_{next(_NETWORKS)}"
    self._links: dict[Any, list[tf.Tensor]] = {}
    self._receivers: list[tuple[tf.Tensor, tf.DType]] = []
    self._progress: list[tf.Variable] | None = None
    self._watchdog: _Watchdog | None = None
    self.timeout_seconds = float(timeout_seconds)
    self.broken = False
    with tf.init_scope(), tf.device(self._devices[0]):
      self.state = unlifted_variable(0, tf.int64, "mtf_run_state")
    weakref.finalize(self, _destroy, self._receivers).atexit = False

  def link(
    self,
    relation: Any,
    slot: Any,
    dtype: tf.DType,
    peer: Callable[[int], int],
    sending: bool,
  ) -> list[tf.Tensor]:
    """For every processor its end of the queue to (or from) its peer: a resource handle.

    Args:
      relation: queues of different relations are different.
      slot: tells the links of one relation apart.
      dtype: of what passes.
      peer: processor number to processor number.
      sending: whether this is the end that puts in.
    """
    key = (relation, slot, dtype, sending)
    if key not in self._links:
      handles = []
      with tf.init_scope():
        for pnum in range(len(self._devices)):
          a, b = (pnum, peer(pnum)) if sending else (peer(pnum), pnum)
          name = f"{self._name}/{relation}/{dtype.name}/{a}_to_{b}"
          # The two ends are two tensors: automatic control dependencies follow tensors, and
          # would run the processors one after another if they shared any.
          with tf.device(self._devices[b]):
            handle = tf.raw_ops.FIFOQueueV2(
              component_types=[dtype], shapes=[], capacity=-1, shared_name=name
            )
          handles.append(handle)
          if not sending:
            self._receivers.append((handle, dtype))
      self._links[key] = handles
    return self._links[key]

  @property
  def progress(self) -> list[tf.Variable]:
    """A counter of every processor, advanced by each iteration of a loop that exchanges."""
    if self._progress is None:
      made = []
      with tf.init_scope():
        for d in self._devices:
          with tf.device(d):
            made.append(unlifted_variable(0, tf.int64, "mtf_progress"))
      self._progress = made
    return self._progress

  def framed(self, calls: Callable[[], list[tf.Tensor]]) -> None:
    """Marks the run that `calls` adds to the graph; it returns a tensor of each call."""
    with tf.device(self._devices[0]):
      idle = tf.equal(tf.bitwise.bitwise_and(self.state.read_value(), 1), 0)
      check = tf.debugging.Assert(idle, ["mtf_run_failed: run state", self.state.read_value()])
      with tf.control_dependencies([check]):
        start = self.state.assign_add(1, read_value=False)
    with tf.control_dependencies([start]):
      done = calls()
    with tf.control_dependencies(done), tf.device(self._devices[0]):
      self.state.assign_add(1, read_value=False)
    if self._watchdog is None:
      self._watchdog = _Watchdog(self)

  def reset(self) -> None:
    """Empties the queues after a failed run."""
    for handle, dtype in self._receivers:
      for _ in range(int(tf.raw_ops.QueueSizeV2(handle=handle))):
        tf.raw_ops.QueueDequeueV2(handle=handle, component_types=[dtype])
    self.state.assign(0)

  def signs_of_life(self) -> tuple[int, ...]:
    """Numbers that change as long as runs go on; the first is odd during a run."""
    counters = [self.state] + (self._progress or [])
    return tuple(int(v.numpy()) for v in counters)

  def close(self) -> None:
    """Makes every processor that waits fail, now and in future."""
    self.broken = True
    for handle, _ in list(self._receivers):
      tf.raw_ops.QueueCloseV2(handle=handle, cancel_pending_enqueues=True)


def _destroy(receivers: Sequence[tuple[tf.Tensor, tf.DType]]) -> None:
  with tf.init_scope():
    for handle, _ in receivers:
      with tf.device(handle.device):
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


class _Watchdog:
  """A thread that closes the queues of a network when a run does not move any more."""

  def __init__(self, network: QueueNetwork):
    self._network = weakref.ref(network)
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch, name="mtf-watchdog", daemon=True)
    weakref.finalize(network, self._stop.set)
    self._thread.start()
    # TensorFlow must not be called while the interpreter shuts down.
    atexit.register(_stop_thread, weakref.ref(self))

  def _watch(self) -> None:
    last, since = None, time.monotonic()
    timeout = self._network().timeout_seconds
    while not self._stop.wait(min(5.0, timeout / 4)):
      network = self._network()
      if network is None or network.broken:
        return
      now = network.signs_of_life()
      if now != last or now[0] % 2 == 0:
        last, since = now, time.monotonic()
      elif time.monotonic() - since > timeout:
        _LOG.error("no processor moved for %g s: the run is broken off", timeout)
        network.close()
        return
      del network

  def stop(self) -> None:
    self._stop.set()
    self._thread.join(10.0)


def _stop_thread(watchdog: weakref.ref) -> None:
  if watchdog() is not None:
    watchdog().stop()


class QueueCollectives(Collectives):
  """The collectives of a program that is traced once for all processors.

  Args:
    network: the `QueueNetwork`.
    pnum: the processor number, an int32 scalar.
    own: `own(per_processor)` is the element of this program's processor in a list of
      resource handles, one for each processor.
    program_graph: the graph of the program; exchanges in other graphs are inside loops.
  """

  def __init__(
    self,
    network: QueueNetwork,
    pnum: Any,
    own: Callable[[Sequence[tf.Tensor]], tf.Tensor],
    program_graph: Any,
  ):
    super().__init__(pnum)
    self._network = network
    self._own = own
    self._graphs_with_progress = {program_graph}

  def _send(self, relation: Any, slot: Any, x: tf.Tensor, peer: Callable[[int], int]) -> None:
    handles = self._network.link(relation, slot, x.dtype, peer, sending=True)
    tf.raw_ops.QueueEnqueueV2(handle=self._own(handles), components=[x])

  def _receive(
    self, relation: Any, slot: Any, like: tf.Tensor, peer: Callable[[int], int]
  ) -> tf.Tensor:
    handles = self._network.link(relation, slot, like.dtype, peer, sending=False)
    y = tf.raw_ops.QueueDequeueV2(handle=self._own(handles), component_types=[like.dtype])[0]
    y.set_shape(like.shape)
    if y.graph not in self._graphs_with_progress:
      self._graphs_with_progress.add(y.graph)
      counter = self._own([v.handle for v in self._network.progress])
      tf.raw_ops.AssignAddVariableOp(resource=counter, value=tf.constant(1, tf.int64))
    return y

  def _exchange(self, parts: Sequence[tf.Tensor], groups: Groups) -> list[tf.Tensor]:
    """Member k gets part k of every member, in order of rank.

    A member also sends to itself, so that the order needs no arithmetic with its rank.
    """
    relation = ("all", groups.axes)
    for k, part in enumerate(parts):
      self._send(relation, k, part, lambda p, k=k: groups.group(p)[k])
    return [
      self._receive(relation, k, parts[0], lambda p, k=k: groups.group(p)[k])
      for k in range(groups.size)
    ]

  def all_gather(self, x, groups):
    return self._exchange([x] * groups.size, groups)

  def all_to_all(self, parts, groups):
    return self._exchange(parts, groups)

  def all_reduce(self, x, groups, reduction):
    check_static(x, f"allreduce over {groups.name}")
    n = groups.size
    elements = list_product(x.shape.as_list())
    if n > 2 and elements * x.dtype.size >= SHARD_BYTES and elements % n == 0:
      parts = tf.split(tf.reshape(x, [-1]), n)
      part = fold(self.all_to_all(parts, groups), reduction)
      return tf.reshape(tf.concat(self.all_gather(part, groups), 0), x.shape)
    if n & (n - 1):
      return fold(self.all_gather(x, groups), reduction)
    # Partners at distance 1, 2, 4 ... A sum of two is the same on both sides, bit by bit.
    step = 1
    while step < n:
      relation = ("swap", groups.axes, step)

      def partner(p, step=step):
        return groups.group(p)[groups.rank(p) ^ step]

      self._send(relation, 0, x, partner)
      x = fold([x, self._receive(relation, 0, x, partner)], reduction)
      step *= 2
    return x

  def permute(self, x, groups, source):
    named = [s for s in source if s is not None]
    if len(set(named)) < len(named):
      values = self.all_gather(x, groups)
      if len(set(source)) == 1:
        return values[source[0]]
      y = tf.gather(tf.stack(values), self.choose(groups.table(lambda p: source[groups.rank(p)] or 0)))
    else:
      # Everyone sends once and receives once; who should get zeros drops what it gets.
      spare = (r for r in range(groups.size) if r not in named)
      full = [next(spare) if s is None else s for s in source]
      target = [full.index(r) for r in range(groups.size)]
      relation = ("permute", groups.axes, tuple(full))
      self._send(relation, 0, x, lambda p: groups.group(p)[target[groups.rank(p)]])
      y = self._receive(relation, 0, x, lambda p: groups.group(p)[full[groups.rank(p)]])
    return self.zeros_where_none(y, groups, source)
