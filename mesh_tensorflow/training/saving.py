"""The checkpoints that a training writes: their schedule and their preconditions."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint.files import MANIFEST, attached_sizes
from mesh_tensorflow.checkpoint.restoring import EXTRA
from mesh_tensorflow.errors import CheckpointError, NonFiniteError
from mesh_tensorflow.meshes.store import StoredVariable, VariableStore
from mesh_tensorflow.running.lowering import OF_A_RUN
from mesh_tensorflow.training import manifest
from mesh_tensorflow.training.best_checkpoint import Evaluations
from mesh_tensorflow.training.data import SavedPipeline, TrainingData
from mesh_tensorflow.training.manifest import Manifest
from mesh_tensorflow.training.program import ModelRecord

_BEGAN = "began_at_step"
_EPOCH = "examples_in_epoch"


class TrainingCheckpoints:
  """The checkpoints of one model in its folder.

  Args:
    checkpointer: writes them; None: nothing is saved.
    store: the variables.
    save_every: steps between checkpoints; 0: only the last step is saved.

  Attributes:
    newest: the checkpoint that training goes on from; None at the beginning.
    saved_step: the step of the last checkpoint; 0 if there is none.
    began: the step at which training in this folder began, if it did not begin with initial values;
      it is a part of the checkpoints.
    is_foreign: whether `newest` was written by another program: then training began there.
    examples_in_epoch: how many examples the training data had when `newest` was written, if known.
    data: the training data.
    pipeline: the iterator of the data, if its position is a part of checkpoints.
    record: what decides the model, in the worker that writes it; a part of checkpoints, too.
    manifest: what the run is run with; likewise.
    evaluations: what those during this training have shown; a part of checkpoints, too.
  """

  def __init__(
    self, checkpointer: checkpoint_lib.Checkpointer | None, store: VariableStore, save_every: int
  ):
    self._checkpointer = checkpointer
    self._store = store
    self._save_every = save_every
    self.newest: str | None = None
    self.saved_step = self._found_step = 0
    self.began: int | None = None
    self.is_foreign = False
    self.examples_in_epoch: int | None = None
    self.data: TrainingData | None = None
    self.pipeline: SavedPipeline | None = None
    self.record: ModelRecord | None = None
    self.manifest: Manifest | None = None
    self.evaluations = Evaluations()

  @property
  def has_failed(self) -> bool:
    """True if writing a checkpoint in the background failed and the error was not raised yet."""
    return self._checkpointer is not None and self._checkpointer.has_failed

  def find_newest(self) -> None:
    """Finds the newest good checkpoint, from which to resume, and reads its extra values."""
    self.newest = self._checkpointer.latest() if self._checkpointer is not None else None
    self.saved_step = checkpoint_lib.get_step_from_path(self.newest) if self.newest else 0
    self._found_step = self.saved_step
    self.began = self.examples_in_epoch = None
    self.is_foreign = False
    self.evaluations = Evaluations()
    if self.newest:
      self.evaluations = Evaluations.of_checkpoint(self.newest)
      values = checkpoint_lib.Values(self.newest)
      if EXTRA + _EPOCH in values:
        self.examples_in_epoch = int(values[EXTRA + _EPOCH])
      if EXTRA + _BEGAN in values:
        self.began = int(values[EXTRA + _BEGAN])
      elif not tf.io.gfile.exists(self.newest + MANIFEST):
        # With names that only this package writes it is an older one of ours. Of another program,
        # the data was other data, or in another order.
        own = any(n.startswith((EXTRA, *OF_A_RUN)) for n in values)
        self.is_foreign = not own and not attached_sizes(self.newest)
        self.began = self.saved_step if self.is_foreign else None

  def start(
    self, step_of_init: Callable[[], int | None] | None, say: Callable[[str], None]
  ) -> tuple[int, int]:
    """Finds the step at which to resume.

    Args:
      step_of_init: returns the step of the checkpoint to begin from, if there is one.
      say: gets a line if the newest checkpoint is another program's.

    Returns:
      (the step at which training goes on, the one at which this folder's training began).
    """
    self.find_newest()
    saved, began = self.saved_step, self.began
    if self.is_foreign:
      say(
        f"{self.newest} was written by another program: the training data begins with its first "
        "example (to leave out examples seen before, bind run.skip_seen_data = True and "
        "run.seen_data_init_step, the step at which this data began)"
      )
    if began is None and step_of_init is not None:
      try:
        began = step_of_init()
      except CheckpointError:
        if not saved:
          raise
      if not saved:
        self.began = began
        saved = began or 0
    return saved, min(began or 0, saved)

  def is_due(self, before: int, step: int, last: int) -> bool:
    """True if a checkpoint is to be saved now.

    Args:
      before: the step before the last call of the program.
      step: the step now.
      last: the step at which training ends.
    """
    if self._checkpointer is None:
      return False
    if step >= last:
      return True
    every = self._save_every
    return bool(every) and step // every > before // every

  def keep_best(self, step: int) -> None:
    """Keeps the checkpoint of this step, the best one; saves it if it does not exist.

    Args:
      step: number of steps done; no checkpoint of it is due.
    """
    if self._checkpointer is None:
      return
    if self.saved_step == step:  # Training went on from it.
      self.evaluations.keep(step, counts=True)
    else:
      self.evaluations.keep(step, counts=False)
      self.save(step)

  def save(self, step: int, asynchronous: bool = True) -> None:
    """Writes a checkpoint; see `Trainer.save`.

    Args:
      step: number of steps done.
      asynchronous: whether it may be written in the background.
    """
    # Before anything is written: a checkpoint of NaN would take the place of an older, good one.
    name = next((v.name for v in self._store if not _is_finite(v)), None)
    if workers.any_worker(name is not None):
      raise NonFiniteError(
        f"variable {name or '(of which other workers have slices)'} became NaN or infinite by step "
        f"{step}; training stopped, and nothing was saved after step {self.saved_step}. Lower the "
        "learning rate, or look at the data of the last steps"
      )
    attachments = self.pipeline.attachments() if self.pipeline is not None else {}
    if self.record is not None:
      attachments |= self.record.attachments()
    if self.manifest is not None:
      attachments[manifest.ATTACHMENT] = self.manifest.write
    known = {_BEGAN: self.began, _EPOCH: self.data and self.data.examples_in_epoch}
    extra = {name: value for name, value in known.items() if value is not None}
    if self.evaluations.to_keep(step):
      self.evaluations.keep(step, counts=True)
    extra |= self.evaluations.values()
    if self._checkpointer is None:
      raise CheckpointError("Trainer.save: there is no model_dir to save in")
    self._checkpointer.save(
      step,
      extra,
      asynchronous=asynchronous,
      attachments=attachments,
      best=self.evaluations.best(),
    )
    self.saved_step = step

  def save_before_leaving(self, step: int) -> str:
    """Saves the last checkpoint of a stopped training; returns a text that says what was saved."""
    if self._checkpointer is None:
      return f"step {step} was done, and there is no model_dir to save it in"
    if self.saved_step != step:
      self.save(step, asynchronous=False)
    self._checkpointer.wait()
    return f"step {step} is saved in {self._checkpointer.directory}"

  def whole_step(self) -> int:
    """Step of the newest complete checkpoint, even while the next is written; thread-safe.

    0 if there is none.
    """
    written = self._checkpointer.whole_step if self._checkpointer is not None else None
    return self._found_step if written is None else written

  def last_written(self) -> str | None:
    """The path of the last checkpoint, when it is whole; None if there is none."""
    if self._checkpointer is None:
      return None
    self._checkpointer.wait()
    name = f"model.ckpt-{self.saved_step}"
    return os.path.join(self._checkpointer.directory, name) if self.saved_step else None


def _is_finite(stored: StoredVariable) -> bool:
  """True if all values of a variable in this process's slices are finite."""
  values: Any = stored.distinct()
  return not stored.slice_dtype.is_floating or all(
    tf.reduce_all(tf.math.is_finite(v)) for _, v in values
  )
