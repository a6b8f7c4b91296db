"""Runs a program with TPU collectives on virtual CPUs, by rewriting its GraphDef.

The three operations of a TPU have no CPU kernels. Here each of their nodes, also in the bodies of
loops and functions, becomes a call of a function that does what TensorFlow's documentation of the
operation says, with collectives that CPUs have. The rest of the traced program stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import unittest.mock
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

_OPS = ("CrossReplicaSum", "AllToAll", "CollectivePermute")
_KEYS = itertools.count(900_000, 64)
# The name of the variable, on each device, with the id of its replica.
_REPLICA = "test_replica_id"

# How dtypes travel that CollectiveGatherV2 does not take.
_WIDER = {
  **{t: tf.int32 for t in (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16)},
  tf.uint32: tf.int64,
  tf.bfloat16: tf.float32,
}


def counts(trace) -> dict[str, int]:
  """How many nodes of each TPU operation a traced program has, in bodies of loops too."""
  graph_def = trace.function.graph.as_graph_def()
  found = [n.op for nodes in _node_lists(graph_def) for n in nodes if n.op in _OPS]
  return {op: found.count(op) for op in _OPS}


def run(
  impl, trace, devices: Sequence[str], timeout: float = 60, times: int = 1
) -> list[list[tf.Tensor]]:
  """Runs a traced program, one instance for each processor.

  Args:
    impl: the `StrategyMeshImpl`; replica i runs on device i.
    trace: what `impl.trace` gave.
    devices: one device for each replica.
    timeout: seconds until the instances are given up.
    times: how often each instance runs.

  Returns:
    For each processor, in order of numbers, the outputs of the last run of its instance.
  """
  if sum(counts(trace).values()):
    graph_def = trace.function.graph.as_graph_def()
    rewrite(graph_def, functools.partial(_on_hosts, impl.size))
    program = compiled(trace, graph_def)
  else:
    # Traced with the operations `replaced`.
    program = lambda pnum, *captures: trace.function(pnum)  # noqa: E731
  handle = []
  for replica, device in enumerate(devices[: impl.size]):
    with tf.device(device):
      handle.append(_replica_variable())
      tf.raw_ops.AssignVariableOp(resource=handle[-1], value=tf.constant(replica))
  results, errors = {}, []

  def work(pnum):
    try:
      with tf.device(devices[impl.l2p(pnum)]):
        for _ in range(times):
          outputs = program(*inputs_of(trace, pnum))
        results[pnum] = outputs
    except Exception as e:  # noqa: BLE001 - raised below, in the caller's thread.
      errors.append(e)

  threads = [threading.Thread(target=work, args=(p,), daemon=True) for p in range(impl.size)]
  for t in threads:
    t.start()
  for t in threads:
    t.join(timeout)
  if errors:
    raise errors[0]
  assert len(results) == impl.size, f"processors {sorted(results)} ended, the others hang"
  return [results[p] for p in range(impl.size)]


@contextlib.contextmanager
def replaced(size: int) -> Iterator[None]:
  """Traces made in here have collectives of CPUs from the start.

  For programs with loops: their bodies are functions, which a rewritten GraphDef cannot replace.

  Args:
    size: the number of replicas.
  """

  def stand_in(op):
    def call(input, **kwargs):  # noqa: A002 - the name of the operation's argument.
      (name,) = kwargs.keys() & {"group_assignment", "source_target_pairs"}
      table = tf.get_static_value(kwargs.pop(name))
      return _on_hosts(size, op, table, kwargs)(input, next(_KEYS))

    return call

  with contextlib.ExitStack() as stack:
    for op in _OPS:
      stack.enter_context(unittest.mock.patch.object(tf.raw_ops, op, stand_in(op)))
    yield


def compiled(trace, graph_def, **options):
  """The (rewritten) program as a tf.function of what `trace.function` takes."""
  function = trace.function
  # The placeholders of the inputs are replaced, and XLA refuses them even so.
  inner = type(graph_def)()
  inner.CopyFrom(graph_def)
  del inner.node[:]
  names = [t.op.name for t in function.inputs]
  inner.node.extend(n for n in graph_def.node if n.name not in names)

  def call(*inputs):
    outputs = tf.graph_util.import_graph_def(
      inner,
      {t.name: tf.identity(x) for t, x in zip(function.inputs, inputs)},
      [t.name for t in function.outputs],
      name="",
    )
    for out, t in zip(outputs, function.outputs):
      out.set_shape(t.shape)
    return outputs

  # All on the device that calls it.
  with tf.device(None):
    return tf.function(call, autograph=False, **options).get_concrete_function(
      *[tf.TensorSpec(t.shape, t.dtype) for t in function.inputs]
    )


def inputs_of(trace, pnum: int) -> list[tf.Tensor]:
  """The arguments of one processor's instance."""
  return [tf.constant(pnum), *(_own(trace, c, pnum) for c in trace.captures)]


def _own(trace, captured, pnum):
  mine = trace.program.captured_by(captured, pnum)
  return captured if mine is None else mine


# ------------------------------------------------------------------ rewriting


def rewrite(graph_def, replacement: Callable[..., Callable[..., tf.Tensor]]) -> None:
  """Replaces the TPU operations of a GraphDef, in place.

  Args:
    graph_def: a GraphDef that has none of them in the body of a loop.
    replacement: called with the operation's name, the value of its second input, and its
      attributes as a dict; returns the function of its first input, and of the number of the
      exchange, that takes its place.
  """
  for f in graph_def.library.function:
    assert not any(n.op in _OPS for n in f.node_def), f"{f.signature.name} has TPU operations"
  constants = {n.name: n for n in graph_def.node if n.op == "Const"}
  replaced = [n for n in graph_def.node if n.op in _OPS]
  bodies = {}
  for node in replaced:
    x, groups = node.input[:2]
    table = tf.make_ndarray(constants[groups].attr["value"].tensor).astype(np.int32)
    names = ("split_dimension", "concat_dimension", "split_count")
    attributes = {k: node.attr[k].i for k in names if k in node.attr}
    dtype = tf.as_dtype(node.attr["T"].type)
    # One function for all nodes that are alike, but for the number of the exchange.
    kind = (node.op, table.tobytes(), table.shape, *sorted(attributes.items()), dtype)
    if kind not in bodies:
      bodies[kind] = tf.function(
        replacement(node.op, table, attributes), autograph=False
      ).get_concrete_function(tf.TensorSpec(None, dtype), tf.TensorSpec([], tf.int32))
    _put_in_place(graph_def, node, x, bodies[kind])


def _put_in_place(graph_def, node, x: str, body) -> None:
  """The operations of a function, of `x` and a new number, take the place of a node."""
  assert not body.captured_inputs and not body.graph.as_graph_def().library.function
  x_name, number_name = (t.op.name for t in body.inputs)

  def renamed(name: str) -> str:
    control, name = "^" * name.startswith("^"), name.lstrip("^")
    if name == x_name:
      return x
    return f"{control}{node.name}/as/{name}"

  for n in body.graph.as_graph_def().node:
    if n.name == x_name:
      continue
    new = graph_def.node.add()
    new.CopyFrom(n)
    new.name = renamed(n.name)
    if n.name == number_name:
      new.op = "Const"
      new.attr.clear()
      new.attr["dtype"].type = tf.int32.as_datatype_enum
      new.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(next(_KEYS), tf.int32))
    del new.input[:]
    new.input.extend(renamed(i) for i in n.input)
  [output] = body.outputs
  node.op = "Identity"
  del node.input[:]
  node.input.append(renamed(output.name.removesuffix(":0")))
  dtype = node.attr["T"].type
  node.attr.clear()
  node.attr["T"].type = dtype


def _node_lists(graph_def):
  return [graph_def.node, *(f.node_def for f in graph_def.library.function)]


def _replica_variable() -> tf.Tensor:
  return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=_REPLICA)


def _on_hosts(count, op, table, attributes):
  """The operation, by its documentation, with collectives of the host."""
  if op == "CollectivePermute":
    return lambda x, key: _permute(x, key, table, count)
  exchange = _sum if op == "CrossReplicaSum" else _all_to_all
  return lambda x, key: exchange(x, key, table, **attributes)


def _collective(op, x, key, groups, **kwargs):
  replica = tf.raw_ops.ReadVariableOp(resource=_replica_variable(), dtype=tf.int32)
  first = next(_KEYS)
  which = {r: i for i, group in enumerate(groups) for r in group}
  number = tf.gather(tf.constant([which.get(r, -1) for r in range(max(which) + 1)]), replica)
  y = op(
    input=x,
    group_size=len(groups[0]),
    group_key=first + number,
    instance_key=key,
    ordering_token=[],
    **kwargs,
  )
  return y, tf.gather(tf.constant(groups), number), replica


def _sum(x, key, groups):
  assert x.dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.uint32)
  y, _, _ = _collective(
    tf.raw_ops.CollectiveReduceV2, x, key, groups, merge_op="Add", final_op="Id"
  )
  return y


def _rows_of_all(x, key, groups):
  """The tensors of the group's replicas, stacked; their ids, in the same order; and the own id."""
  dtype = x.dtype
  if dtype in _WIDER:
    rows, group, replica = _rows_of_all(tf.cast(x, _WIDER[dtype]), key, groups)
    return tf.cast(rows, dtype), group, replica
  if dtype.is_complex:
    part = tf.float32 if dtype == tf.complex64 else tf.float64
    rows, group, replica = _rows_of_all(tf.bitcast(x, part), key, groups)
    return tf.bitcast(rows, dtype), group, replica
  if dtype == tf.uint64:
    rows, group, replica = _rows_of_all(tf.bitcast(x, tf.int64), key, groups)
    return tf.bitcast(rows, dtype), group, replica
  flat, group, replica = _collective(
    tf.raw_ops.CollectiveGatherV2, tf.reshape(x, [-1]), key, groups
  )
  rows = tf.reshape(flat, tf.concat([[len(groups[0])], tf.shape(x)], 0))
  return rows, tf.sort(group), replica  # The runtime sorts by device.


def _all_to_all(x, key, groups, split_dimension, concat_dimension, split_count):
  """Each replica splits its input; block j goes to the j-th replica of the group's list."""
  assert split_count == len(groups[0])
  rows, order, replica = _rows_of_all(x, key, groups)
  which = {r: group for group in groups.tolist() for r in group}
  table = tf.constant([which.get(r, groups[0].tolist()) for r in range(max(which) + 1)])
  group = tf.gather(table, replica)
  rank = tf.argmax(tf.equal(group, replica))
  blocks = []
  for j in range(split_count):
    sender = rows[tf.argmax(tf.equal(order, group[j]))]
    blocks.append(tf.gather(tf.stack(tf.split(sender, split_count, split_dimension)), rank))
  return tf.concat(blocks, concat_dimension)


def _permute(x, key, pairs, count):
  """Along (source, target) pairs, each source and each target once; zeros for the others."""
  for column in pairs.T.tolist():
    assert len(set(column)) == len(column), f"CollectivePermute with pairs {pairs.tolist()}"
  assert x.dtype in (tf.float32, tf.bfloat16, tf.int32, tf.complex64)
  rows, _, replica = _rows_of_all(x, key, np.arange(count, dtype=np.int32)[np.newaxis])
  source = dict(zip(pairs[:, 1].tolist(), pairs[:, 0].tolist()))
  mine = tf.gather(tf.constant([source.get(r, -1) for r in range(count)]), replica)
  return tf.where(mine >= 0, rows[tf.maximum(mine, 0)], tf.zeros_like(x))


def alone(op, table, attributes):
  """In place of an exchange what a replica does that keeps its own data: for XLA on CPU."""
  del table
  if op != "AllToAll":
    return lambda x, key: tf.identity(x)
  n, split, concat = (attributes[k] for k in ("split_count", "split_dimension", "concat_dimension"))
  return lambda x, key: tf.concat(tf.split(x, n, split), concat)
