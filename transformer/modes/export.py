"""The modes "export_infer" and "export_score": a SavedModel of a trained model."""

from __future__ import annotations

from collections.abc import Mapping

from mesh_settings.run import RunSettings
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies
from mesh_tensorflow.transformer.generation import saved_model
from mesh_tensorflow.transformer.modes.chosen_checkpoints import named_checkpoints
from mesh_tensorflow.transformer.modes.job import Job, mode
from mesh_tensorflow.transformer.training.trainer import Trainer


def _check(settings: RunSettings) -> None:
  if not settings.export_path:
    raise ConfigError(
      "run.export_path is not bound: say where the SavedModel should go, by --output=DIR of the "
      "command export or run.export_path = 'DIR'"
    )


@mode("export", one_process=True, check=_check)  # Its old name.
@mode("export_infer", one_process=True, check=_check)
@mode("export_score", one_process=True, scores=True, check=_check)
def run_export(job: Job) -> str:
  """Writes a SavedModel that makes outputs, or scores."""
  estimator = job.make_estimator()
  path = None
  if job.export_checkpoint_step:
    path = next(iter(named_checkpoints(job.export_checkpoint_step, job.model_dir)))
  exported = export_model(
    estimator,
    job.export_path,
    job.vocabulary,
    job.sequence_length,
    job.model_type,
    eval_with_score=job.mode.scores,
    batch_size=job.batch_size,
    checkpoint_path=path,
  )
  print(f"step {estimator.global_step} exported: {exported}", flush=True)
  return exported


def export_model(
  estimator: Trainer,
  export_dir: str,
  vocabulary: Vocabularies,
  sequence_length: int | Mapping[str, int],
  model_type: str,
  eval_with_score: bool = False,
  batch_size: int = 1,
  checkpoint_path: str | None = None,
) -> str:
  """Writes a SavedModel of a trained model; see `saved_model.save`.

  Args:
    estimator: a `Trainer`.
    export_dir: the SavedModel goes into a new folder in here, named by the time in seconds.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    sequence_length: must be that of the estimator.
    model_type: must be that of the estimator.
    eval_with_score: whether it scores given targets.
    batch_size: rows that the model takes at a time.
    checkpoint_path: a checkpoint to export; None: the newest.

  Returns:
    The path of the SavedModel.

  Raises:
    ConfigError: there is no checkpoint; or an argument is not what the estimator was made with.
  """
  steps = estimator.steps
  made_with = {"model_type": steps.model_type, "sequence_length": dict(steps.sequence_length)}
  given = {"model_type": model_type, "sequence_length": _as_dict(sequence_length)}
  for what, value in given.items():
    if value != made_with[what]:
      raise ConfigError(
        f"export_model: {what} is {value}, but the estimator was made with {made_with[what]}"
      )
  if checkpoint_path is None and estimator.latest_checkpoint() is None:
    raise ConfigError(f"there is no checkpoint in {estimator.model_dir}; train first")
  estimator.restore_for_inference(checkpoint_path)
  return saved_model.save(
    steps, export_dir, vocabulary, batch_size, eval_with_score, estimator.predict_fn
  )


def _as_dict(sequence_length: int | Mapping[str, int]) -> dict[str, int]:
  if isinstance(sequence_length, int):
    return {"inputs": sequence_length, "targets": sequence_length}
  return dict(sequence_length)
