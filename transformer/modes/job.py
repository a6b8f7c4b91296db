"""The request of one call of `run`, and the declaration of its mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow import workers
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.tpu import mesh as tpu_mesh
from mesh_tensorflow.training.seeds import Seeds
from mesh_tensorflow.transformer.gin_config import operative
from mesh_tensorflow.transformer.meshes import mesh_setup
from mesh_tensorflow.transformer.meshes.batching import compute_batch_size
from mesh_tensorflow.transformer.modes import automatic_layout, layout_rounds
from mesh_tensorflow.transformer.modes.make_estimator import get_estimator
from mesh_tensorflow.transformer.training.trainer import Trainer

# The arguments of `run` that `get_estimator` takes by the same names.
_OF_ESTIMATOR = (
  "model_type vocabulary mesh_shape layout_rules model_dir batch_size sequence_length autostack "
  "keep_checkpoint_max save_checkpoints_steps optimizer predict_fn variable_filter tpu_job_name "
  "iterations_per_loop init_checkpoint mesh_devices mesh_implementation seed report_every "
  "nonfinite allow_config_change max_grad_norm ema_decay use_ema gradient_accumulation_steps"
).split()


@dataclasses.dataclass(frozen=True)
class Mode:
  """A mode of `run`; `registry.mode` makes it.

  Attributes:
    name: what `run.mode` is bound to.
    run: does it; what it returns, `run` returns.
    check: raises `ConfigError` for what is missing or contradicts the mode, before anything is
      done; for what all modes need see `Job`.
    trains: whether it changes the model: it may make the folder and keep a vocabulary there.
    scores: whether `Trainer.predict` scores given targets in place of making outputs.
    finds_lengths: whether it can do without `run.sequence_length`, if there are data sets to
      evaluate on.
    one_process: whether it cannot be done by several workers.
    on_devices: whether it computes on the mesh; else it needs no vocabulary and no folder either.
  """

  name: str
  run: Callable[[Job], Any]
  check: Callable[[Job], None] | None = None
  trains: bool = False
  scores: bool = False
  finds_lengths: bool = False
  one_process: bool = False
  on_devices: bool = True

  def join_workers(self, mesh_shape: Any, mesh_implementation: str) -> None:
    """Joins the workers that TF_CONFIG names, if it names several.

    Raises:
      ConfigError: the mode cannot be done by several.
    """
    count = workers.cluster_from_environment().size
    if count > 1 and self.one_process:
      raise ConfigError(
        f"run.mode {self.name!r} runs in one process, but TF_CONFIG names {count} workers: unset "
        "it, and give a mesh of this machine; any mesh restores any checkpoint"
      )
    mesh_setup.join_workers(mtf.convert_to_shape(mesh_shape), mesh_implementation)


class Job:
  """The arguments of one call of `run`, checked, as attributes of the same names.

  Those that are not listed here are as they were given; for their meanings see `run`.

  Args:
    mode: the mode.
    arguments: of `run`, by their names.

  Attributes:
    mode: the `Mode`.
    mesh_shape: an `mtf.Shape`.
    layout_rules: an `mtf.LayoutRules`.
    batch_size: number of sequences.
    sequence_length: a dict from feature to number of tokens; None only for a mode that
      `finds_lengths`.
    tpu: a TPU that is connected, or None.

  Raises:
    ConfigError: an argument is missing, or several contradict each other.
  """

  def __init__(self, mode: Mode, arguments: Mapping[str, Any]):
    self._arguments = arguments
    self.mode = mode
    if mode.check is not None:
      mode.check(self)
    if self.vocabulary is None and mode.on_devices:
      raise ConfigError(
        "run.vocabulary is not bound: bind @vocabulary.get_byte_vocabulary(), or give a problem "
        "file"
      )
    self.tpu = arguments["tpu"]
    if self.tpu and mode.on_devices:
      # Before TensorFlow runs anything.
      self.tpu = tpu_mesh.connect(
        self.tpu, zone=self.tpu_zone, project=self.gcp_project, job_name=self.tpu_job_name
      )
    # None only for a mode that `finds_lengths`.
    self.sequence_length: Any = self._lengths(arguments["sequence_length"])
    mesh_shape, layout_rules = self._mesh_and_layout(arguments)
    self.mesh_shape = mtf.convert_to_shape(mesh_shape)
    self.layout_rules = mtf.convert_to_layout_rules(layout_rules)
    self.batch_size = self._number_of_sequences(arguments["batch_size"])
    if mode.on_devices and not self.tpu:
      mode.join_workers(self.mesh_shape, self.mesh_implementation)

  def __getattr__(self, name: str) -> Any:
    try:
      # Not `self._arguments`: where that is missing yet, it would be looked for here, without end.
      return self.__dict__["_arguments"][name]
    except KeyError:
      raise AttributeError(f"`run` has no argument {name!r}") from None

  def _mesh_and_layout(self, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """Mesh shape and layout rules; where they are "auto" they are searched for."""
    operative.forget_found()
    to_join = automatic_layout.mesh_to_join(
      arguments["mesh_shape"], arguments["num_devices"], arguments["mesh_devices"]
    )
    if not automatic_layout.is_asked(arguments):
      return arguments["mesh_shape"], arguments["layout_rules"]
    if not self.mode.on_devices:
      # Such a mode searches by itself, and tells more of it.
      return to_join, ""
    if not self.tpu:
      # The search runs TensorFlow, after which no worker could join, nor virtual devices be made.
      self.mode.join_workers(to_join, self.mesh_implementation)
      if not self.mesh_devices:
        mesh_setup.find_devices(to_join.size)
    found = automatic_layout.find(arguments, self.sequence_length, bool(self.tpu))
    self._arguments = found.variant.arguments(arguments)
    rules = layout_rounds.rules_text(found.layout_rules)
    if workers.current().is_chief:
      mesh = layout_rounds.mesh_text(found.mesh_shape) or "''"
      built = f", built with {found.variant.name}" if found.variant.name else ""
      print(
        f"layout {rules or '(nothing is split)'} on mesh {mesh}{built} ({found.why})", flush=True
      )
    return found.mesh_shape, found.layout_rules

  @property
  def arguments(self) -> Mapping[str, Any]:
    """All arguments as they were given."""
    return self._arguments

  def _lengths(self, given: Any) -> dict[str, int] | None:
    if given is None and not (self.mode.finds_lengths and self.eval_dataset_fn is not None):
      raise ConfigError("run.sequence_length is not bound")
    return {"inputs": given, "targets": given} if isinstance(given, int) else given

  def _number_of_sequences(self, batch_size: Any) -> int:
    """The size of a batch, which may be given in tokens or for each replica."""
    if isinstance(batch_size, int):
      return batch_size
    if not self.mode.on_devices and automatic_layout.is_asked(self._arguments):
      return automatic_layout.whole_batch(batch_size, self.sequence_length)
    if self.sequence_length is None and batch_size[0] != "sequences_per_batch":
      raise ConfigError(
        f"run.sequence_length is not bound, so run.batch_size must be a number, not {batch_size}"
      )
    return compute_batch_size(self.sequence_length, self.mesh_shape, self.layout_rules, batch_size)

  def make_estimator(self, **others: Any) -> Trainer:
    """The model on its devices, with its folder.

    Args:
      **others: arguments of `get_estimator`, in place of those of the job. A mode that does not
        train needs no `learning_rate_schedule` and no `ensemble_inputs`: they are None.
    """
    given = {name: getattr(self, name) for name in _OF_ESTIMATOR}
    defaults = dict(
      learning_rate_schedule=None,
      ensemble_inputs=None,
      use_tpu=self.tpu,
      cluster=None,
      score_in_predict_mode=self.mode.scores,
    )
    seeds = self.seeds_by_purpose
    given["seed"] = seeds.weights
    estimator = get_estimator(**(given | defaults | others))
    estimator.use_seeds(
      noise=seeds.dropout if self.mode.trains else seeds.sampling, data=seeds.data
    )
    return estimator

  @property
  def seeds_by_purpose(self) -> Seeds:
    """The seeds that `run.seed` and `run.seeds` give for each purpose."""
    return Seeds.of_run(self.seed, self.seeds)

  def make_estimator_of_lengths(self) -> Any:
    """The estimator; without `sequence_length` a function of it, with devices ready for it."""
    if self.sequence_length is not None:
      return self.make_estimator()
    # When data is read, virtual devices cannot be made any more.
    if not self.mesh_devices:
      mesh_setup.find_devices(self.mesh_shape.size)
    return lambda lengths: self.make_estimator(sequence_length=lengths)
