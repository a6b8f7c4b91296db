"""TensorFlow behaves as version 2, and AutoGraph stays out of the package's functions."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_converted(function: _Function) -> _Function:
  """Decorator: AutoGraph calls the function as it is."""
  as_it_is: _Function = tf.autograph.experimental.do_not_convert(function)
  return as_it_is


def exempt(namespace: dict[str, Any], left_alone: Collection[str] = ()) -> None:
  """Wraps the functions of a module's namespace, so that AutoGraph calls them as they are.

  Args:
    namespace: `globals()` of a module that users import from.
    left_alone: names of functions that are compared by identity.
  """
  for name, value in list(namespace.items()):
    if (
      inspect.isfunction(value)
      and value.__module__.startswith("mesh_tensorflow")
      and name not in left_alone
    ):
      namespace[name] = not_converted(value)


def is_jit_compiling() -> bool:
  """True inside a `tf.function(jit_compile=True)`, at any depth, while it is traced.

  TensorFlow has no function that tells. But it marks a conditional to be lowered to switches, which
  XLA cannot read, everywhere except there.
  """
  if not tf.inside_function():
    return False
  probe = tf.function(lambda x: tf.cond(x, lambda: 1, lambda: 0), autograph=False)
  # Of a graph of its own, whose outer graph is the one that is traced: it leaves nothing there.
  graph = probe.get_concrete_function(tf.TensorSpec([], tf.bool)).graph
  return not any("_lower_using_switch_merge" in n.attr for n in graph.as_graph_def().node)


def check_tensorflow2() -> None:
  """Refuses to work where the program has switched TensorFlow 2 off; to be called before it runs.

  A `tf.Graph` that is the default for a while is no such thing.

  Raises:
    UnsupportedError: eager execution or the shapes of TensorFlow 2 are off for the whole program.
  """
  with tf.init_scope():
    eager = tf.executing_eagerly()
  if not eager and not _new_threads_are_eager():
    raise UnsupportedError(
      "TensorFlow 2 behavior is switched off, and Mesh TensorFlow needs it: delete the line "
      "tf.disable_v2_behavior() (or tf.compat.v1.disable_v2_behavior(), "
      "tf.compat.v1.disable_eager_execution()) from the program or the module it imports; "
      "tf.compat.v1 itself may stay"
    )
  if not isinstance(tf.TensorShape([1])[0], int):
    raise UnsupportedError(
      "the shapes of TensorFlow 2 are switched off, and Mesh TensorFlow needs them: delete the "
      "line tf.compat.v1.disable_v2_tensorshape() from the program or the module it imports"
    )


def _new_threads_are_eager() -> bool:
  """The default of the program: what a thread finds that has no graph of its own."""
  found: list[bool] = []
  thread = threading.Thread(target=lambda: found.append(tf.executing_eagerly()))
  thread.start()
  thread.join()
  return found[0]
