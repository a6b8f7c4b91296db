"""Keeps AutoGraph out of the package's functions.

A tf.function of the user's translates every Python function that it calls. Ours build a
graph of named operations, in which there is nothing to translate, and that would take seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import tensorflow as tf

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
