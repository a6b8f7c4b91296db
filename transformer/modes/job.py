"""The settings of a run as its mode takes them; what a mode is, and the registry of modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import mesh_tensorflow as mtf
from mesh_settings.records import part, settings_of
from mesh_settings.run import MODES, RunSettings
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import workers
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.meshes.tpu import mesh as tpu_mesh
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.training.seeds import Seeds
from mesh_tensorflow.transformer.gin_config import operative
from mesh_tensorflow.transformer.model import mesh_setup
from mesh_tensorflow.transformer.model.batching import compute_batch_size
from mesh_tensorflow.transformer.modes import automatic_layout, layout_rounds
from mesh_tensorflow.transformer.modes.make_estimator import get_estimator
from mesh_tensorflow.transformer.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Mode:
  """A mode of `run`; `mode` makes it.

  Attributes:
    name: what `run.mode` is bound to.
    run: does it; what it returns, `run` returns.
    check: raises `ConfigError` for settings that are missing or contradict the mode, before
      anything is done; what all modes need is checked by `Job.of`.
    trains: whether it changes the model: it may make the folder and keep a vocabulary there.
    scores: whether `Trainer.predict` scores given targets in place of making outputs.
    finds_lengths: whether it can do without `run.sequence_length`, if there are data sets to
      evaluate on.
    one_process: whether it cannot be done by several workers.
    on_devices: whether it computes on the mesh; else it needs no vocabulary and no folder either.
  """

  name: str
  run: Callable[[Job], Any]
  check: Callable[[RunSettings], None] | None = None
  trains: bool = False
  scores: bool = False
  finds_lengths: bool = False
  one_process: bool = False
  on_devices: bool = True

  def join_workers(
    self, mesh_shape: ShapeLike, mesh_implementation: str, pipeline_stages: int
  ) -> None:
    """Joins the workers that TF_CONFIG names, if it names several.

    Args:
      mesh_shape: as of `run`.
      mesh_implementation: likewise.
      pipeline_stages: likewise.

    Raises:
      ConfigError: the mode cannot be done by several.
    """
    count = workers.cluster_from_environment().size
    if count > 1 and self.one_process:
      raise ConfigError(
        f"run.mode {self.name!r} runs in one process, but TF_CONFIG names {count} workers: unset "
        "it, and give a mesh of this machine; any mesh restores any checkpoint"
      )
    mesh_setup.join_workers(mtf.convert_to_shape(mesh_shape), mesh_implementation, pipeline_stages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(RunSettings):
  """The settings of a run as its mode takes them: those listed here are resolved.

  Attributes:
    mode: the `Mode`.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    mesh_shape: an `mtf.Shape`.
    layout_rules: an `mtf.LayoutRules`.
    batch_size: number of sequences.
    sequence_length: a dict from feature to number of tokens; None only for a mode that
      `finds_lengths`.
    tpu: a TPU that is connected, or None.
    settings: the settings as they were given, with what was found for "auto".
  """

  settings: RunSettings
  mode: Mode  # type: ignore[assignment]
  mesh_shape: mtf.Shape
  layout_rules: mtf.LayoutRules
  batch_size: int
  train_model_fn: Callable[..., Any]

  @classmethod
  def of(cls, mode: Mode, settings: RunSettings) -> Job:
    """Resolves the settings of a run, and joins the workers or the TPU that it needs.

    Args:
      mode: the mode.
      settings: as given, checked one by one.

    Raises:
      ConfigError: a setting is missing, or several contradict each other.
    """
    if mode.check is not None:
      mode.check(settings)
    if settings.vocabulary is None and mode.on_devices:
      raise ConfigError(
        "run.vocabulary is not bound: bind @vocabulary.get_byte_vocabulary(), or give a problem "
        "file"
      )
    tpu: Any = settings.tpu
    if tpu and mode.on_devices:
      # Before TensorFlow runs anything.
      tpu = tpu_mesh.connect(
        tpu,
        zone=settings.tpu_zone,
        project=settings.gcp_project,
        job_name=settings.tpu_job_name,
      )
    lengths = _lengths(mode, settings)
    mesh_shape, layout_rules, settings = _mesh_and_layout(mode, settings, bool(tpu), lengths)
    # In a plan and a dry run, too, for which no mesh is made, unless they search for one.
    if mode.on_devices or not mesh_setup.is_auto(settings.mesh_shape):
      with mesh_setup.naming_setting("run.shard_state", mesh_shape):
        mtf.MeshImpl(mesh_shape, "").with_sharded_state(settings.shard_state)
    given = {name: getattr(settings, name) for name in settings_of(RunSettings)}
    resolved = {
      "settings": settings,
      "mode": mode,
      "tpu": tpu,
      "sequence_length": lengths,
      "mesh_shape": mesh_shape,
      "layout_rules": layout_rules,
      "batch_size": _number_of_sequences(mode, settings, lengths, mesh_shape, layout_rules),
    }
    if mode.on_devices and not tpu:
      mode.join_workers(mesh_shape, settings.mesh_implementation, settings.pipeline_stages)
    return cls(**given | resolved)

  def make_estimator(self, **others: Any) -> Trainer:
    """The model on its devices, with its folder.

    Args:
      **others: arguments of `get_estimator`, in place of those of the job. A mode that does not
        train needs no `learning_rate_schedule` and no `ensemble_inputs`: they are None.
    """
    seeds = Seeds.of_run(self.seed, self.seeds)
    given = dict(
      model_type=self.model_type,
      vocabulary=self.vocabulary,
      mesh_shape=self.mesh_shape,
      layout_rules=self.layout_rules,
      model_dir=self.model_dir,
      batch_size=self.batch_size,
      sequence_length=self.sequence_length,
      autostack=self.autostack,
      learning_rate_schedule=None,
      keep_checkpoint_max=self.keep_checkpoint_max,
      save_checkpoints_steps=self.save_checkpoints_steps,
      optimizer=self.optimizer,
      predict_fn=self.predict_fn,
      variable_filter=self.variable_filter,
      ensemble_inputs=None,
      use_tpu=self.tpu,
      tpu_job_name=self.tpu_job_name,
      iterations_per_loop=self.iterations_per_loop,
      cluster=None,
      init_checkpoint=self.init_checkpoint,
      mesh_devices=self.mesh_devices,
      score_in_predict_mode=self.mode.scores,
      mesh_implementation=self.mesh_implementation,
      shard_state=self.shard_state,
      reshard_after_forward=self.reshard_after_forward,
      pipeline_stages=self.pipeline_stages,
      pipeline_schedule=self.pipeline_schedule,
      device_shares=self.device_shares,
      pipeline_cut=self.pipeline_cut,
      pipeline_chunks=self.pipeline_chunks,
      precision=self.precision,
      settings=dataclasses.replace(part(TrainerSettings, self), seed=seeds.weights),
    )
    estimator = get_estimator(**(given | others))
    estimator.use_seeds(
      noise=seeds.dropout if self.mode.trains else seeds.sampling, data=seeds.data
    )
    return estimator

  def make_estimator_of_lengths(self) -> Any:
    """The estimator; without `sequence_length` a function of it, with devices ready for it."""
    if self.sequence_length is not None:
      return self.make_estimator()
    # When data is read, virtual devices cannot be made any more.
    if not self.mesh_devices:
      mesh_setup.find_devices(
        mesh_setup.number_of_devices(self.mesh_shape, self.pipeline_stages, self.device_shares)
      )
    return lambda lengths: self.make_estimator(sequence_length=lengths)


def _lengths(mode: Mode, settings: RunSettings) -> dict[str, int] | None:
  given = settings.sequence_length
  if given is None and not (mode.finds_lengths and settings.eval_dataset_fn is not None):
    raise ConfigError("run.sequence_length is not bound")
  return {"inputs": given, "targets": given} if isinstance(given, int) else given


def _mesh_and_layout(
  mode: Mode, settings: RunSettings, on_tpu: bool, lengths: dict[str, int] | None
) -> tuple[mtf.Shape, mtf.LayoutRules, RunSettings]:
  """Mesh shape and layout rules, searched for where they are "auto"; the settings with the rest."""
  operative.forget_found()
  if settings.device_shares is not None:
    if mesh_setup.is_auto(settings.mesh_shape):
      raise ConfigError(
        f"run.device_shares is {settings.device_shares}, and run.mesh_shape is 'auto': shares are "
        "of a dimension of a mesh that is given, such as run.mesh_shape = 'batch:4'"
      )
    # Checks them, before anything is searched or read.
    mesh_setup.number_of_devices(
      mtf.convert_to_shape(settings.mesh_shape),
      settings.pipeline_stages,
      settings.device_shares,
    )
  to_join = automatic_layout.mesh_to_join(
    settings.mesh_shape, settings.num_devices, settings.mesh_devices
  )
  mesh_shape, layout_rules = settings.mesh_shape, settings.layout_rules
  if automatic_layout.is_asked(settings):
    # A mode without devices searches by itself, and tells more of it.
    mesh_shape, layout_rules = to_join, ""
    if mode.on_devices:
      if not on_tpu:
        # The search runs TensorFlow, after which no worker could join, nor virtual devices be made.
        mode.join_workers(to_join, settings.mesh_implementation, settings.pipeline_stages)
        if not settings.mesh_devices:
          mesh_setup.find_devices(automatic_layout.all_devices(settings, to_join))
      found = automatic_layout.find(settings, lengths, on_tpu)
      settings = found.variant.applied(settings)
      mesh_shape, layout_rules = found.mesh_shape, found.layout_rules
      _tell(found)
  return (
    mtf.convert_to_shape(mesh_shape),
    mtf.convert_to_layout_rules(layout_rules),
    settings,
  )


def _tell(found: automatic_layout.Found) -> None:
  if workers.current().is_chief:
    rules = layout_rounds.rules_text(found.layout_rules)
    mesh = layout_rounds.mesh_text(found.mesh_shape) or "''"
    built = f", built with {found.variant.name}" if found.variant.name else ""
    print(f"layout {rules or '(nothing is split)'} on mesh {mesh}{built} ({found.why})", flush=True)


def _number_of_sequences(
  mode: Mode,
  settings: RunSettings,
  lengths: dict[str, int] | None,
  mesh_shape: mtf.Shape,
  layout_rules: mtf.LayoutRules,
) -> int:
  """The size of a batch, which may be given in tokens or for each replica."""
  batch_size = settings.batch_size
  if isinstance(batch_size, int):
    return batch_size
  if not mode.on_devices and automatic_layout.is_asked(settings):
    return automatic_layout.whole_batch(batch_size, lengths or {})
  if lengths is None and batch_size[0] == "sequences_per_batch":
    lengths = {}  # It does not depend on them.
  if lengths is None:
    raise ConfigError(
      f"run.sequence_length is not bound, so run.batch_size must be a number, not {batch_size}"
    )
  return compute_batch_size(lengths, mesh_shape, layout_rules, batch_size)


_MODES: dict[str, Mode] = {}

_Run = TypeVar("_Run", bound=Callable[[Job], Any])


def mode(name: str, **properties: Any) -> Callable[[_Run], _Run]:
  """Makes a function of a `Job` a mode of `run`.

  A module of --module_import may do so, too: it is imported before gin files are read.

  Args:
    name: what `run.mode` is then bound to.
    **properties: of `Mode`.

  Returns:
    A decorator, which returns the function as it is.

  Raises:
    ConfigError: there is such a mode.
  """

  def register(run: _Run) -> _Run:
    there = _MODES.get(name)
    # A module may be imported twice: a notebook's cell, or by another name.
    if there is not None and there.run.__qualname__ != run.__qualname__:
      raise ConfigError(f"a mode {name!r} is there already: {there.run.__module__}")
    _MODES[name] = Mode(name, run, **properties)
    MODES[:] = mode_names()
    return run

  return register


def mode_names() -> tuple[str, ...]:
  """The names of all modes; the default, "train", first."""
  return tuple(sorted(_MODES, key=lambda name: not _MODES[name].trains))


def find_mode(name: object) -> Mode | None:
  """The mode of this name; None if there is none."""
  return _MODES.get(name) if isinstance(name, str) else None


def get_mode(name: object) -> Mode:
  """The mode of this name.

  Raises:
    ConfigError: there is none.
  """
  found = find_mode(name)
  if found is None:
    raise ConfigError(f"run.mode {name!r} is unknown; use {', '.join(mode_names())}")
  return found
