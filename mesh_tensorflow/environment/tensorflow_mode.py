"""TensorFlow must behave as version 2: programs for version 1 switch that off by a line."""

from __future__ import annotations

import threading

import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError


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
