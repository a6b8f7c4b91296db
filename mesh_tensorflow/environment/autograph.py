"""Keeps AutoGraph out of the package's functions.

A tf.function of the user's translates every Python function that it calls. Ours build a
graph of named operations, in which there is nothing to translate, and that would take seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import tensorflow as tf


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
      namespace[name] = tf.autograph.experimental.do_not_convert(value)
