"""The mode "average": the mean of the weights of several checkpoints, as a model folder of its own.

The mean is that of `run.average_checkpoints` of other modes; see `ModelState.restore`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import tensorflow as tf

from mesh_settings.run import RunSettings
from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.checkpoint import folder as folder_lib
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.training import manifest, model_files
from mesh_tensorflow.training.manifest import Manifest
from mesh_tensorflow.training.state import checkpoints_up_to
from mesh_tensorflow.transformer.data.vocabularies import kept
from mesh_tensorflow.transformer.gin_config import model_config
from mesh_tensorflow.transformer.modes.chosen_checkpoints import named_checkpoints
from mesh_tensorflow.transformer.modes.job import Job, mode
from mesh_tensorflow.transformer.training.trainer import Trainer

_CONFIG = "operative_config.gin"
# Settings that ask for a mean of what is in the folder: of this folder it is taken already.
_TAKEN = re.compile(r"^((?:[\w.]+\.)?run\.)(average_checkpoints|use_ema) = [^\n]*$", re.MULTILINE)
_DEFAULTS = {"average_checkpoints": "1", "use_ema": "False"}


def _check(settings: RunSettings) -> None:
  if not settings.export_path:
    raise ConfigError(
      "run.export_path is not bound: say where the average should go, by --output=DIR of the "
      "command average or run.export_path = 'DIR'"
    )
  if settings.average_checkpoints < 2:
    raise ConfigError(
      f"run.average_checkpoints is {settings.average_checkpoints}: say how many checkpoints to "
      "average, at least 2, by --last=5 of the command average or run.average_checkpoints = 5"
    )
  _check_output(settings.export_path, settings.model_dir)


def _check_output(output: str, model_dir: str) -> None:
  """Raises `ConfigError` for a folder that holds something already."""
  if model_dir and _same_folder(output, model_dir):
    raise ConfigError(
      f"run.export_path (--output) is {output}, the folder of the model itself: name a new folder"
    )
  if tf.io.gfile.exists(output) and (not tf.io.gfile.isdir(output) or tf.io.gfile.listdir(output)):
    raise ConfigError(
      f"run.export_path (--output): {output} exists, and nothing in it is overwritten: name a new "
      "folder"
    )


def _same_folder(a: str, b: str) -> bool:
  local = [folder_lib.local_path(path) for path in (a, b)]
  if None in local:
    return a.rstrip("/") == b.rstrip("/")
  first, second = (os.path.realpath(str(path)) for path in local)
  return first == second


@mode("average", one_process=True, check=_check)
def run_average(job: Job) -> str:
  """Writes the mean of the weights of the last `run.average_checkpoints` checkpoints."""
  estimator = job.make_estimator()
  if job.export_checkpoint_step:
    path = next(iter(named_checkpoints(job.export_checkpoint_step, job.model_dir)))
  else:
    path = estimator.latest_checkpoint()
  if path is None:
    raise ConfigError(f"there is no checkpoint in {job.model_dir}; train first")
  written = average_model(
    estimator, path, job.average_checkpoints, job.export_path, use_ema=job.use_ema
  )
  print(f"step {estimator.global_step} written: {written}", flush=True)
  return written


def average_model(
  estimator: Trainer, checkpoint_path: str, count: int, output: str, *, use_ema: bool = False
) -> str:
  """Writes a model folder whose weights are the mean of those of several checkpoints.

  It has the weights and no state of an optimizer: modes that do not train take it, and a training
  as its `run.init_checkpoint`. Beside them are the configuration, the vocabularies and the manifest
  of the model, which says of which steps it is the mean. The model's own folder stays as it is.

  Args:
    estimator: a `Trainer`, made with `average_checkpoints` = `count`.
    checkpoint_path: the last of the checkpoints to average.
    count: how many.
    output: the new folder.
    use_ema: whether the estimator takes moving averages of the weights; for the manifest.

  Returns:
    The path of the checkpoint in it, which has the step of the last one averaged.

  Raises:
    ConfigError: `output` is not empty.
    CheckpointError: there are fewer checkpoints; or one has weights of other shapes, or is damaged.
    StorageError: it cannot be written.
  """
  model_dir = os.path.dirname(checkpoint_path)
  _check_output(output, model_dir)
  paths = checkpoints_up_to(checkpoint_path, count)
  estimator.restore_for_inference(checkpoint_path)
  state = estimator.state
  of_run = manifest.of_checkpoint(checkpoint_path)
  if of_run is None:
    of_run = manifest.capture(state.mesh_impl, state.record, (), {})
  averaged = {
    "folder": model_dir,
    "steps": [checkpoint_lib.get_step_from_path(p) for p in paths],
    "use_ema": use_ema,
  }
  of_run = Manifest({**of_run.record, "average_of": averaged})
  _copy_vocabularies(model_dir, output)
  of_run.write_into(output)
  saver = checkpoint_lib.Checkpointer(output, state.store, asynchronous=False)
  with saver:
    written = saver.save(
      estimator.global_step,
      attachments={**_config(estimator, checkpoint_path), manifest.ATTACHMENT: of_run.write},
    )
  # At last: a folder without it is not taken for a model.
  _copy_configuration(model_dir, output)
  return written


def _config(estimator: Trainer, path: str) -> dict[str, Callable[[str], None]]:
  """The writer of what decides the model: as the checkpoint has it, else as it is here."""
  content = _read(f"{checkpoint_lib.attachment(path, model_config.ATTACHMENT)}.json")
  if content is None:
    record = estimator.state.record
    return dict(record.attachments()) if record is not None else {}

  def write(to: str) -> None:
    with tf.io.gfile.GFile(f"{to}.json", "wb") as f:
      f.write(content)

  return {model_config.ATTACHMENT: write}


def _copy_vocabularies(model_dir: str, output: str) -> None:
  place = os.path.join(model_dir, kept.FOLDER)
  for name in tf.io.gfile.listdir(place) if tf.io.gfile.isdir(place) else ():
    content = _read(os.path.join(place, name))
    if content is not None:
      _write(output, os.path.join(kept.FOLDER, name), content)


def _copy_configuration(model_dir: str, output: str) -> None:
  content = _read(os.path.join(model_dir, _CONFIG))
  if content is not None:
    text = _TAKEN.sub(
      lambda m: f"{m[1]}{m[2]} = {_DEFAULTS[m[2]]}", content.decode("utf-8", "surrogateescape")
    )
    _write(output, _CONFIG, text.encode("utf-8", "surrogateescape"))


def _read(path: str) -> bytes | None:
  """A file; None if there is none."""
  if not tf.io.gfile.exists(path) or tf.io.gfile.isdir(path):
    return None
  with tf.io.gfile.GFile(path, "rb") as f:
    content: bytes = f.read()
  return content


def _write(output: str, name: str, content: bytes) -> None:
  with model_files.errors_of_writing(output, name, "--output"):
    folder_lib.write(output, os.path.join(output, name), content)
