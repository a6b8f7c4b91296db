"""Meaning of TensorFlow's errors about a failed exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import tensorflow as tf

from mesh_tensorflow.errors import CollectiveError
from mesh_tensorflow.program.dimensions import Shape


class _MeshImpl(Protocol):
  @property
  def shape(self) -> Shape: ...

  def reset(self) -> None: ...


@contextlib.contextmanager
def collective_errors(mesh_impl: _MeshImpl | None = None, *, what: str = "") -> Iterator[None]:
  """Turns TensorFlow's errors about a failed exchange into `CollectiveError`.

  To be put around the call of a `tf.function` that runs a SIMD mesh: errors of a
  running function are TensorFlow's, and reach only the caller of the function.
  (`mtf.function` does this by itself.)

  Args:
    mesh_impl: a `SimdMeshImpl` to reset after any error of TensorFlow, so that it can go on.
    what: name of the function, for the message.

  Raises:
    CollectiveError: in place of such an error, which is its cause.
  """
  try:
    yield
  except tf.errors.OpError as e:
    if mesh_impl is not None:
      mesh_impl.reset()
    meaning = next((m for sign, m in _SIGNS if sign in str(e)), None)
    if meaning is None:
      raise
    where = "" if mesh_impl is None else f"on mesh {mesh_impl.shape}"
    prefix = f"{' '.join(w for w in (what, where) if w)}: " if what or where else ""
    raise CollectiveError(f"{prefix}{meaning}\n{str(e).strip()}") from e


_VAIN = (
  "a processor waited in vain for another one: their programs took different paths, or one is stuck"
)

# Markers in TensorFlow's messages: names of queues and checks of this package, and the
# words of the collective executor, which gives up everything after one failure.
_SIGNS = (
  (
    "mtf_exchange",
    f"{_VAIN}; make the tf.function anew before the next run (an mtf.function does so by itself)",
  ),
  (
    "mtf_run_failed",
    "an earlier run of this mesh failed midway, or another run is going on; call "
    "mesh_impl.reset() before the next run",
  ),
  (
    "Collective ops is aborted",
    f"{_VAIN}; or it failed. Start the program again: TensorFlow's collectives do not recover",
  ),
)
