"""The trainer as one gin-configurable function, `run`: its settings, checked, go to a mode."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import gin

from mesh_settings.records import takes_settings
from mesh_settings.run import POSITIONAL, RunSettings
from mesh_tensorflow import workers
from mesh_tensorflow.arguments.declared import affects, declares
from mesh_tensorflow.environment.tensorflow_mode import check_tensorflow2
from mesh_tensorflow.transformer.data import options
from mesh_tensorflow.transformer.data.vocabularies import named
from mesh_tensorflow.transformer.data.vocabularies.kept import kept_in
from mesh_tensorflow.transformer.gin_config import checks
from mesh_tensorflow.transformer.model import mesh_setup
from mesh_tensorflow.transformer.model.batching import auto_train_steps
from mesh_tensorflow.transformer.modes import automatic_layout, job
from mesh_tensorflow.transformer.modes.job import Job, Mode
from mesh_tensorflow.transformer.modes.train import train_model

_MODULE = "mesh_tensorflow.transformer.utils"
# Defaults that a record without TensorFlow cannot name.
_DEFAULTS = {
  "train_steps": auto_train_steps,
  "train_model_fn": train_model,
  "mesh_shape": gin.REQUIRED,
  "layout_rules": gin.REQUIRED,
}


_T = TypeVar("_T")


def _before_arguments(configured: Callable[..., _T]) -> Callable[..., _T]:
  """Decorator that sets up the process before gin evaluates the arguments of `run`.

  It joins the cluster first: gin's arguments may run TensorFlow, after which no worker can join,
  and only workers that have joined can leave writing a vocabulary to one of them. It also has
  vocabularies read from the folder of the model's checkpoints.
  """

  @functools.wraps(configured)
  def run(*args: Any, **kwargs: Any) -> _T:
    check_tensorflow2()
    given = _as_bound(inspect.signature(configured).bind_partial(*args, **kwargs).arguments)
    mode = job.find_mode(given.get("mode", "train"))
    if workers.cluster_from_environment().size > 1:
      _join_as_bound(mode, given)
    with kept_in(
      given.get("model_dir"),
      may_write=mode is not None and mode.trains,
      allow_change=bool(given.get("allow_config_change")),
    ):
      return configured(*args, **kwargs)

  return run


def _as_bound(arguments: dict[str, Any]) -> dict[str, Any]:
  """Some arguments of `run`: those given, else what gin binds."""
  bound = gin.get_bindings(f"{_MODULE}.run", resolve_references=False)
  # A copy of what refers to a configurable or macro is its value; all at once would be too much.
  names = (
    *("model_dir", "mode", "mesh_shape", "mesh_implementation", "allow_config_change"),
    *("num_devices", "mesh_devices", "device_shares", "pipeline_stages"),
  )
  return {n: copy.deepcopy(bound[n]) for n in names if n in bound} | arguments


def _join_as_bound(mode: Mode | None, given: dict[str, Any]) -> None:
  """Joins the workers with the devices that `run` will need, by its arguments and bindings."""
  if given.get("tpu") or mode is None or not mode.on_devices or "mesh_shape" not in given:
    return  # `run` has no use for workers, or something to complain about.
  mesh_setup.check_one_process(given.get("device_shares"))
  shape = automatic_layout.mesh_to_join(
    given["mesh_shape"], given.get("num_devices"), given.get("mesh_devices")
  )
  mode.join_workers(
    shape, given.get("mesh_implementation", "auto"), given.get("pipeline_stages", 1)
  )


@_before_arguments
@gin.configurable(module=_MODULE)
@affects("report")
@declares(RunSettings)
@takes_settings(RunSettings, POSITIONAL, _DEFAULTS)
def run(given: dict[str, Any]) -> Any:
  """Trains, evaluates or decodes, as gin says.

  The arguments are the settings of `RunSettings`, where each is declared.

  {settings}

  Returns:
    Losses (train), metrics (eval), what the function of the mode returned (scores), the path of
    the SavedModel (export), the report (plan), or None.

  Raises:
    ConfigError: settings that contradict each other.
  """
  checks.check_arguments("run", run, given)
  checks.check_mesh_shape(given["mesh_shape"])
  mode = job.get_mode(given["mode"])
  texts = options.texts_of(given["train_dataset_fn"])
  settings = RunSettings(**given | {"vocabulary": named.resolve(given["vocabulary"], texts)})
  return mode.run(Job.of(mode, settings))
