"""The hooks that TF1 programs gave to a session: kept, with next to nothing to do.

Slices are the only copy of a variable, and checkpoints are read and written from
them (`mesh_tensorflow.checkpoint`), so there is nothing to copy after a restore or
before a save. A loop that still calls these methods goes on working.
"""

from __future__ import annotations

import logging

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import GraphError
from mesh_tensorflow.running.lowering import Lowering

_LOG = logging.getLogger("mesh_tensorflow")


def _checked(lowering: object, what: str) -> Lowering:
  if not isinstance(lowering, Lowering):
    raise GraphError(f"{what} takes the mtf.Lowering of the program, got {lowering!r}")
  return lowering


class MtfRestoreHook:
  """Runs `lowering.copy_masters_to_slices()` when a session has been restored.

  It is no TF1 `SessionRunHook`: nothing of TensorFlow 2 takes one. Call its methods, or
  leave it out; `mesh_tensorflow.checkpoint.Checkpointer` restores variables.

  Args:
    lowering: a `Lowering`.

  Raises:
    GraphError: `lowering` is none.
  """

  @checked
  def __init__(self, lowering: Lowering):
    self._lowering = _checked(lowering, "MtfRestoreHook")

  def begin(self) -> None:
    """Does nothing: operations need not be made before they are run."""

  def after_create_session(self, session: object, coord: object) -> None:
    """To be called when variables have been restored.

    Args:
      session: has no meaning; None will do.
      coord: has no meaning; None will do.
    """
    del session, coord
    self._lowering.copy_masters_to_slices()


class MtfCheckpointSaverListener:
  """Runs `lowering.copy_slices_to_masters()` before variables are saved.

  It is no TF1 `CheckpointSaverListener`: nothing of TensorFlow 2 takes one. Call its methods,
  or leave it out; `mesh_tensorflow.checkpoint.Checkpointer` saves variables.

  Args:
    lowering: a `Lowering`.

  Raises:
    GraphError: `lowering` is none.
  """

  @checked
  def __init__(self, lowering: Lowering):
    self._lowering = _checked(lowering, "MtfCheckpointSaverListener")

  def begin(self) -> None:
    """Logs that saving begins."""
    _LOG.info("MtfCheckpointSaverListener: begin")

  def before_save(self, session: object, global_step_value: int) -> None:
    """To be called before a checkpoint is written.

    Args:
      session: has no meaning; None will do.
      global_step_value: number of the step, for the log.
    """
    del session
    _LOG.info("about to save the state of step %d", global_step_value)
    self._lowering.copy_slices_to_masters()

  def after_save(self, session: object, global_step_value: int) -> None:
    """Logs that a checkpoint has been written.

    Args:
      session: has no meaning; None will do.
      global_step_value: number of the step.
    """
    del session
    _LOG.info("saved the state of step %d", global_step_value)

  def end(self, session: object, global_step_value: int) -> None:
    """Logs that training has ended.

    Args:
      session: has no meaning; None will do.
      global_step_value: number of the last step.
    """
    del session
    _LOG.info("MtfCheckpointSaverListener: end at step %d", global_step_value)
