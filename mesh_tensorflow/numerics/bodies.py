"""Bodies of many operations that are traced once, and called wherever they are needed.

A program has the same few functions of slices hundreds of times: the noise of each dropout, the
update of each weight, for each device of a placement mesh. Most of what starting a training takes
is Python that makes TensorFlow operations one by one. What is traced once as a TensorFlow function
costs each further use one operation; TensorFlow inlines it before it runs, so that steps are the
same. Tracing costs more than a few operations, so what a graph has once is not traced.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import tensorflow as tf

from mesh_tensorflow.numerics import constants

# The bodies that were used last, as many as large programs have.
_MOST = 1024

# By graph what it has once, or more often.
_used: weakref.WeakKeyDictionary[Any, set[Hashable]] = weakref.WeakKeyDictionary()
_bodies: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
_lock = threading.RLock()
_inline: contextvars.ContextVar[bool] = contextvars.ContextVar("inline", default=False)


@contextlib.contextmanager
def inlined() -> Iterator[None]:
  """Context in which functions are called as they are: for whoever counts their operations."""
  token = _inline.set(True)
  try:
    yield
  finally:
    _inline.reset(token)


def shared(fn: Callable[..., Any], *args: Any) -> Any:
  """`fn(*args)`, traced once for all calls but a graph's first with the like of these arguments.

  Args:
    fn: a function of a module, which depends on its arguments alone. No gradient flows through it.
    *args: tf.Tensors of known shapes; and hashable values, for each of which it is another body.

  Returns:
    What fn returns: a tf.Tensor, or a tuple or list of them.
  """
  tensors = [x for x in args if tf.is_tensor(x)]
  # Of eager tensors alone, which a function captures, there is nothing to share.
  graphs = [x.graph for x in tensors if hasattr(x, "graph")]
  if tf.executing_eagerly() or _inline.get() or not graphs:
    return fn(*args)
  kinds = tuple((tuple(x.shape), x.dtype) if tf.is_tensor(x) else (type(x), x) for x in args)
  key = (fn, kinds)
  with _lock:
    used = _used.setdefault(graphs[0], set())
    if key not in used:
      used.add(key)
      return fn(*args)
    body = _bodies.get(key)
    if body is None:
      body = _bodies[key] = _traced(fn, args)
      if len(_bodies) > _MOST:
        _bodies.popitem(last=False)
    _bodies.move_to_end(key)
  outputs = tf.raw_ops.PartitionedCall(args=tensors, Tout=[x.dtype for x in body.outputs], f=body)
  for made, x in zip(outputs, body.outputs):
    made.set_shape(x.shape)
  return tf.nest.pack_sequence_as(body.structured_outputs, outputs)


def _traced(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
  """The function of the tensors among the arguments, for any device."""

  def body(*tensors: tf.Tensor) -> Any:
    remaining = iter(tensors)
    with constants.of_one_graph(), constants.on_device(""):
      return fn(*(next(remaining) if tf.is_tensor(x) else x for x in args))

  specs = [tf.TensorSpec(x.shape, x.dtype) for x in args if tf.is_tensor(x)]
  with tf.init_scope(), tf.device(None):
    return tf.function(body, autograph=False).get_concrete_function(*specs)
