"""TensorFlow's name scopes around variables: they name no mtf variable, as ported code may think.

A `tf.compat.v1.variable_scope` that was left in a program opens a name scope, as `tf.name_scope`
does; TensorFlow tells no more. So two layers whose variables it kept apart would share one.
"""

from __future__ import annotations

import logging
import threading

import tensorflow as tf

from mesh_tensorflow.errors import VariableError

_LOG = logging.getLogger("mesh_tensorflow")
_LOCK = threading.Lock()
_told: set[str] = set()


class ScopesOfVariables:
  """Records of TensorFlow's name scopes in which the variables of one graph are created.

  Only scopes opened since the graph was created count: those around it belong to a Keras layer, a
  strategy's replica or a TensorFlow loop that contains the whole program.
  """

  def __init__(self) -> None:
    self._around: str = tf.get_current_name_scope()
    self._made_in: dict[str, str] = {}

  def _inside(self) -> str:
    """Current name scope relative to the one around the graph; "" if there is none."""
    scope: str = tf.get_current_name_scope()
    if scope == self._around:
      return ""
    return scope.removeprefix(self._around + "/") if self._around else scope

  def made(self, name: str, trainable: bool) -> None:
    """Records the scope of a new variable; warns of the first one inside a scope.

    Args:
      name: its full name.
      trainable: whether it is trained; the others have their names from these, as slots have.
    """
    self._made_in[name] = scope = self._inside()
    if scope and trainable and _first_time("made in a scope"):
      _LOG.warning(
        "variable %s is made inside TensorFlow's scope %r (tf.compat.v1.variable_scope or "
        "tf.name_scope), which gives mtf variables no names; where names shall have it, write: "
        "with mtf.variable_scope(%r):",
        name,
        scope,
        scope,
      )

  def found(self, name: str) -> None:
    """Checks that a variable is requested in the scope in which it was created.

    Args:
      name: its full name.

    Raises:
      VariableError: it is; in TensorFlow 1 it might have been another variable.
    """
    first, now = self._made_in.get(name, ""), self._inside()
    if first != now:
      raise VariableError(
        f"variable {name} was made {_where(first)} and is asked for {_where(now)}: TensorFlow's "
        "scopes (tf.compat.v1.variable_scope, tf.name_scope) give mtf variables no names, so both "
        f'would be one. Write in their place: with mtf.variable_scope("{now or first}"): or, to '
        "share it: with mtf.variable_scope(mtf.get_variable_scope(), reuse=True):"
      )


def _where(scope: str) -> str:
  return f"inside TensorFlow's scope {scope!r}" if scope else "outside TensorFlow's scopes"


def _first_time(what: str) -> bool:
  with _LOCK:
    if what in _told:
      return False
    _told.add(what)
    return True
