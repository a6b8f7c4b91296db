"""Collectives between the CPU devices of one process, through queues in memory.

Each member of a group hands its tensor to another one through a queue, without a
copy. This costs a fraction of TensorFlow's collective operations, which wake
several threads for each message. A queue is a resource: the program, traced once,
holds the queues of one processor, and each processor's call gets its own.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.collectives.base import Collectives, Groups, check_static, fold
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.program.dimensions import list_product

_NETWORKS = itertools.count()

# Queues that are of no more use and still exist.
_DISCARDED: list[tf.Tensor] = []

# From this size of a tensor (bytes) on, each member of a large group reduces a part for all.
SHARD_BYTES = 1 << 20

# From this size of a tensor (bytes) on, one member reduces for all of its group, where that can be.
ONCE_BYTES = 1 << 18

# Up to this size of a message (bytes) sums are exchanged as one vector: scales and biases, of which
# the exchange costs more than the copies.
JOINED_BYTES = 1 << 13


class QueueNetwork:
  """The queues between the processors of a mesh, made when they are needed.

  Args:
    devices: device of every processor; may repeat.
    processors: the processors that have links, in this order; by default all.
  """

  def __init__(self, devices: Sequence[str], processors: Sequence[int] | None = None):
    self._devices = list(devices)
    self.processors = range(len(self._devices)) if processors is None else list(processors)
    self._name = f"mtf_exchange_{next(_NETWORKS)}"
    self._links: dict[Any, list[tf.Tensor]] = {}
    self._receivers: list[tuple[tf.Tensor, tf.DType]] = []
    # The garbage collector may come while a graph is built, where nothing can be run: what it
    # discards is destroyed when the next network makes its queues.
    weakref.finalize(self, _discard, self._receivers).atexit = False

  def link(
    self,
    relation: Hashable,
    slot: Hashable,
    dtype: tf.DType,
    peer: Callable[[int], int],
    sending: bool,
  ) -> list[tf.Tensor]:
    """Resource handles: for each local processor, its end of the queue to (or from) its peer.

    Args:
      relation: key of the queues; those of different relations are different.
      slot: key of this link among those of one relation.
      dtype: dtype of the elements.
      peer: function from a processor's number to that of its peer.
      sending: whether this end enqueues.
    """
    key = (relation, slot, dtype, sending)
    if key not in self._links:
      handles = []
      # Out of the tf.function that is being traced: a queue serves all runs.
      with tf.init_scope():
        _destroy_discarded()
        for pnum in self.processors:
          a, b = (pnum, peer(pnum)) if sending else (peer(pnum), pnum)
          name = f"{self._name}/{relation}/{dtype.name}/{a}_to_{b}"
          # The two ends are two tensors: automatic control dependencies follow tensors, and
          # would run the processors one after another if they shared any.
          with tf.device(self._devices[b]):
            # Both ends find one queue by its name. It has no limit: a sender never waits, so no
            # order of the exchanges can lock up.
            handle = tf.raw_ops.FIFOQueueV2(
              component_types=[dtype], shapes=[], capacity=-1, shared_name=name
            )
          handles.append(handle)
          if not sending:
            self._receivers.append((handle, dtype))
      self._links[key] = handles
    return self._links[key]

  def own_link(
    self,
    pnum: int,
    relation: Hashable,
    slot: Hashable,
    dtype: tf.DType,
    peer: Callable[[int], int],
    sending: bool,
  ) -> tf.Tensor:
    """The end of one local processor; arguments as of `link`."""
    handles = self.link(relation, slot, dtype, peer, sending)
    return handles[self.processors.index(pnum)]

  def reset(self) -> None:
    """Empties the queues after a failed run."""
    for handle, dtype in self._receivers:
      for _ in range(int(tf.raw_ops.QueueSizeV2(handle=handle))):
        tf.raw_ops.QueueDequeueV2(handle=handle, component_types=[dtype])

  def close(self) -> None:
    """Makes every processor that waits fail, now and in future."""
    for handle, _ in list(self._receivers):
      tf.raw_ops.QueueCloseV2(handle=handle, cancel_pending_enqueues=True)


def _discard(receivers: Sequence[tuple[tf.Tensor, tf.DType]]) -> None:
  _DISCARDED.extend(handle for handle, _ in receivers)


def _destroy_discarded() -> None:
  while _DISCARDED and tf.executing_eagerly():
    handle = _DISCARDED.pop()
    with tf.device(handle.device):
      tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


class QueueCollectives(Collectives):
  """The collectives of a program that is traced once for all processors.

  Args:
    network: the `QueueNetwork`.
    pnum: the processor number, an int32 scalar.
    own: `own(per_processor)` is the element of this program's processor in a list of
      resource handles, one for each processor.
    show_progress: called with the result of each exchange.
    run_once: see `TracedProgram.run_once`.
  """

  def __init__(
    self,
    network: QueueNetwork,
    pnum: int | tf.Tensor,
    own: Callable[[Sequence[tf.Tensor]], tf.Tensor],
    show_progress: Callable[[tf.Tensor], None],
    run_once: Callable[[tf.Graph, Callable[[], list[tf.Tensor]]], bool],
  ):
    super().__init__(pnum)
    self._network = network
    self._own = own
    self._show_progress = show_progress
    self._run_once = run_once
    self._reductions = 0

  def _send(
    self, relation: Hashable, slot: Hashable, x: tf.Tensor, peer: Callable[[int], int]
  ) -> None:
    handles = self._network.link(relation, slot, x.dtype, peer, sending=True)
    tf.raw_ops.QueueEnqueueV2(handle=self._own(handles), components=[x])

  def _receive(
    self, relation: Hashable, slot: Hashable, like: tf.Tensor, peer: Callable[[int], int]
  ) -> tf.Tensor:
    handles = self._network.link(relation, slot, like.dtype, peer, sending=False)
    y = tf.raw_ops.QueueDequeueV2(handle=self._own(handles), component_types=[like.dtype])[0]
    y.set_shape(like.shape)
    self._show_progress(y)
    return y

  def _exchange(self, parts: Sequence[tf.Tensor], groups: Groups) -> list[tf.Tensor]:
    """Member k gets part k of every member, in order of rank.

    A member also sends to itself, so that the order needs no arithmetic with its rank.
    """
    relation = ("all", groups.axes)
    for k, part in enumerate(parts):
      self._send(relation, k, part, groups.member(k))
    return [self._receive(relation, k, parts[0], groups.member(k)) for k in range(groups.size)]

  def all_gather(self, x: tf.Tensor, groups: Groups) -> list[tf.Tensor]:
    return self._exchange([x] * groups.size, groups)

  def all_to_all(self, parts: Sequence[tf.Tensor], groups: Groups) -> list[tf.Tensor]:
    return self._exchange(parts, groups)

  def joined_bytes(self, groups: Groups) -> int:
    return JOINED_BYTES

  def all_reduce(self, x: tf.Tensor, groups: Groups, reduction: str) -> tf.Tensor:
    check_static(x, f"allreduce over {groups.name}")
    n = groups.size
    elements = list_product(x.shape.as_list())
    # Each member receives 2 (n - 1) / n of the tensor; by the swaps below it would be log2(n) times
    # all of it, in fewer messages.
    if n > 4 and elements % n == 0 and elements * x.dtype.size >= SHARD_BYTES:
      parts = tf.split(tf.reshape(x, [-1]), n)
      part = fold(self.all_to_all(parts, groups), reduction)
      return tf.reshape(tf.concat(self.all_gather(part, groups), 0), x.shape)
    if elements * x.dtype.size >= ONCE_BYTES:
      total = self._reduce_once(x, groups, reduction)
      if total is not None:
        return total
    # Not a power of two. All add up in the order of ranks, and so get the same bits.
    if n & (n - 1):
      return fold(self.all_gather(x, groups), reduction)
    # Partners at distance 1, 2, 4 ... A sum of two is the same on both sides, bit by bit.
    step = 1
    while step < n:
      relation = ("swap", groups.axes, step)

      def partner(p: int, step: int = step) -> int:
        return groups.group(p)[groups.rank(p) ^ step]

      self._send(relation, 0, x, partner)
      x = fold([x, self._receive(relation, 0, x, partner)], reduction)
      step *= 2
    return x

  def _reduce_once(self, x: tf.Tensor, groups: Groups, reduction: str) -> tf.Tensor | None:
    """The reduction by one member of each group, for all; None where x may be computed repeatedly.

    That member works in a function beside the program, which is the same on all. The members take
    turns, one reduction after another.
    """
    network, dtype = self._network, x.dtype
    root = self._reductions % groups.size
    parts, totals = ("parts", groups.axes), ("totals", groups.axes)

    def ends(relation: Hashable, pnum: int, sending: bool) -> list[tf.Tensor]:
      return [
        network.own_link(pnum, relation, k, dtype, groups.member(k), sending)
        for k in range(groups.size)
      ]

    def reduce(pnum: int) -> tf.Tensor:
      received = []
      for handle in ends(parts, pnum, sending=False):
        with tf.device(handle.device):
          y = tf.raw_ops.QueueDequeueV2(handle=handle, component_types=[dtype])[0]
        y.set_shape(x.shape)
        received.append(y)
      with tf.device(received[0].device):
        total = fold(received, reduction)
      for handle in ends(totals, pnum, sending=True):
        with tf.device(handle.device):
          tf.raw_ops.QueueEnqueueV2(handle=handle, components=[total])
      return total

    roots = [p for p in network.processors if groups.rank(p) == root]
    here = tf.no_op().graph  # That of x may be around the branch that needs the reduction.
    if not self._run_once(here, lambda: [reduce(p) for p in roots]):
      return None
    self._reductions += 1
    self._send(parts, root, x, groups.member(root))
    return self._receive(totals, root, x, groups.member(root))

  def reduce_scatter(self, x: tf.Tensor, groups: Groups, axis: int) -> tf.Tensor:
    n = groups.size
    if n <= 4 or n & (n - 1):
      return super().reduce_scatter(x, groups, axis)
    # Partners at distance n/2, n/4 ... 1 give each other the half that the other one needs.
    step = n // 2
    while step:
      relation = ("swap", groups.axes, step)

      def partner(p: int, step: int = step) -> int:
        return groups.group(p)[groups.rank(p) ^ step]

      size = x.shape.as_list()
      size[axis] //= 2
      begins = ([i == axis and size[axis] for i in range(len(size))], [0] * len(size))
      upper = [groups.rank(p) & step > 0 for p in range(len(groups.members) * n)]
      give, keep = (
        self.choose([[int(b) for b in begins[u ^ k]] for u in upper]) for k in (False, True)
      )
      self._send(relation, 0, kernels.cut(x, give, size), partner)
      mine = kernels.cut(x, keep, size)
      x = mine + self._receive(relation, 0, mine, partner)
      step //= 2
    return x

  def permute(self, x: tf.Tensor, groups: Groups, source: Sequence[int | None]) -> tf.Tensor:
    named = [s for s in source if s is not None]
    if len(set(named)) < len(named):
      values = self.all_gather(x, groups)
      if len(set(source)) == 1:
        return values[named[0]]
      # Members without a source read the first row, which is replaced by zeros below.
      wanted = groups.table(lambda p: source[groups.rank(p)] or 0)
      y = tf.gather(kernels.stack(values), self.choose(wanted))
    else:
      # Every member sends once and receives once; those that get zeros drop what they receive.
      spare = (r for r in range(groups.size) if r not in named)
      full = [next(spare) if s is None else s for s in source]
      target = [full.index(r) for r in range(groups.size)]
      relation = ("permute", groups.axes, tuple(full))
      self._send(relation, 0, x, lambda p: groups.group(p)[target[groups.rank(p)]])
      y = self._receive(relation, 0, x, lambda p: groups.group(p)[full[groups.rank(p)]])
    return self.zeros_where_none(y, groups, source)
