"""The mode "infer": texts made of the lines of a file, of prompts, or of what `decode_fn` reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gin

from mesh_settings.run import RunSettings
from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.transformer.generation.settings import Sampling, sample
from mesh_tensorflow.transformer.modes.chosen_checkpoints import restored_checkpoints
from mesh_tensorflow.transformer.modes.infer_files import decode_lines
from mesh_tensorflow.transformer.modes.infer_prompts import decode_prompts
from mesh_tensorflow.transformer.modes.job import Job
from mesh_tensorflow.transformer.modes.registry import mode


@gin.configurable(module="mesh_tensorflow.transformer.utils")
@affects("report")
@takes(batch_size=COUNT, repeats=COUNT)
def decode_from_file(
  estimator: Any,
  vocabulary: Any,
  model_type: str,
  batch_size: int,
  sequence_length: dict[str, int],
  checkpoint_path: str | None = None,
  input_filename: str = gin.REQUIRED,
  output_filename: str = gin.REQUIRED,
  eos_id: int = 1,
  repeats: int = 1,
) -> list[str]:
  """Decodes each line of a file and writes the results, one a line.

  Args:
    estimator: a `Trainer`, with variables restored.
    vocabulary: a vocabulary or a pair.
    model_type: "lm" continues each line, which stays in front of what is generated; others write
      what they make of it.
    batch_size: rows at a time.
    sequence_length: dict: of "inputs" and "targets"; for "lm" a row has
      `sequence_length["targets"]` ids at most, those of the line included.
    checkpoint_path: a checkpoint to restore; None: the variables as they are. The step goes into
      the output's name.
    input_filename: a text file, one input per line; or JSON lines, see `prompts.read_prompts`.
    output_filename: the results go to `<output_filename>-<step>`, as they come; a run that was
      interrupted goes on there.
    eos_id: the end-of-sequence id.
    repeats: samples for each line; 1: `sample.num_samples`.

  Returns:
    The lines written.

  Raises:
    DataError: the file is missing or empty, or for "lm" a line is too long.
  """
  if checkpoint_path is not None:
    estimator.restore_for_inference(checkpoint_path)
  return decode_lines(
    estimator,
    vocabulary,
    model_type,
    batch_size,
    sequence_length,
    input_filename,
    output_filename,
    eos_id,
    repeats,
  )


@gin.configurable(module="mesh_tensorflow.transformer.utils")
@affects("report")
@takes(batch_size=COUNT)
def infer_model(
  estimator: Any,
  vocabulary: Any,
  sequence_length: dict[str, int],
  batch_size: int,
  model_type: str,
  model_dir: str,
  eval_checkpoint_step: Any,
  checkpoint_paths: list[str] | None = None,
  decode_fn: Callable[..., Any] = decode_from_file,
) -> None:
  """Decodes with each of the chosen checkpoints.

  Args:
    estimator: a `Trainer`.
    vocabulary: a vocabulary or a pair.
    sequence_length: dict from feature to number of tokens.
    batch_size: rows at a time.
    model_type: see `build_model`.
    model_dir: folder of checkpoints.
    eval_checkpoint_step: see `get_checkpoint_iterator`.
    checkpoint_paths: paths to use in place of those.
    decode_fn: called for each checkpoint.

  Raises:
    ConfigError: there is no checkpoint.
    DamagedCheckpointError: see `restored_checkpoints`.
  """
  for path in restored_checkpoints(estimator, eval_checkpoint_step, model_dir, checkpoint_paths):
    decode_fn(
      estimator,
      vocabulary=vocabulary,
      model_type=model_type,
      batch_size=batch_size,
      sequence_length=sequence_length,
      checkpoint_path=path,
    )


def _check(settings: RunSettings) -> None:
  """Bad settings are told before a model is made."""
  del settings
  sample()


@mode("infer", check=_check)
def run_infer(job: Job) -> None:
  """Continues the prompts of `sample`, if it has any; else decodes with `infer_model.decode_fn`."""
  settings = sample()
  others: dict[str, Any] = {}
  if settings.prompts_given:
    others["decode_fn"] = functools.partial(_decode_prompts, settings=settings)
  infer_model(
    job.make_estimator(),
    job.vocabulary,
    job.sequence_length,
    job.batch_size,
    job.model_type,
    job.model_dir,
    job.eval_checkpoint_step,
    **others,
  )


def _decode_prompts(
  estimator: Any, *, checkpoint_path: str | None, settings: Sampling, **others: Any
) -> list[str]:
  """`decode_prompts` as a `decode_fn`."""
  del checkpoint_path  # It is restored.
  return decode_prompts(estimator, settings=settings, **others)
