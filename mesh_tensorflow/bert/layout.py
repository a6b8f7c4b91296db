"""The mesh of a BERT program, with the layout that the flags say or that is found; its runner."""

from __future__ import annotations

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import records, settings, training
from mesh_tensorflow.bert.program_flags import AUTO


def mesh_for(
  model_fn: training.ModelFn,
  input_fn: records.InputFn,
  batch_size: int,
  mode: str = training.TRAIN,
) -> mtf.MeshImpl:
  """The mesh of the flags; --layout=auto: with the layout that is predicted to be the fastest.

  Args:
    model_fn: the model.
    input_fn: function that reads its batches.
    batch_size: number of examples in a batch.
    mode: mode of the program whose time is minimized.

  Raises:
    LayoutError: the layout does not suit the program; nothing has been made on the devices.
  """
  if settings.value("layout") != AUTO:
    return settings.make_mesh_impl()
  unsplit = settings.make_mesh_impl(layout="")
  element = input_fn({"batch_size": batch_size}).element_spec
  specs = training.batch_specs(element, batch_size, mode)
  function = training.make_function(model_fn, mode, specs, unsplit)
  choice = mtf.auto_layout(function, mesh_shape=unsplit.shape)
  print(choice)
  return settings.make_mesh_impl(layout=",".join(f"{d}:{m}" for d, m in choice.layout.pairs))


def runner_for(
  model_fn: training.ModelFn,
  input_fn: records.InputFn,
  batch_size: int,
  mode: str = training.TRAIN,
) -> training.Runner:
  """A `training.Runner` as the flags say; arguments as of `mesh_for`."""
  return training.Runner(
    model_fn,
    mesh_for(model_fn, input_fn, batch_size, mode),
    settings.value("output_dir"),
    init_checkpoint=settings.value("init_checkpoint"),
    save_checkpoints_steps=settings.value("save_checkpoints_steps"),
    iterations_per_loop=settings.value("iterations_per_loop"),
    seed=settings.value("random_seed"),
  )
