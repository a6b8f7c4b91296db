"""The mesh of a BERT program, with the layout that the flags say or that is found; its runner."""

from __future__ import annotations

from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import records, settings, training
from mesh_tensorflow.bert.model_function import BertProgram
from mesh_tensorflow.bert.program_flags import AUTO


def mesh_for(
  model_fn: training.TrainableModel,
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
  if mode == training.TRAIN:
    function = BertProgram(model_fn, specs, unsplit).train_step(settings.trainer_settings())
  else:
    function = training.make_function(model_fn, mode, specs, unsplit)
  choice = mtf.auto_layout(function, mesh_shape=unsplit.shape)
  print(choice)
  return settings.make_mesh_impl(layout=",".join(f"{d}:{m}" for d, m in choice.layout.pairs))


def runner_for(
  model_fn: training.TrainableModel,
  input_fn: records.InputFn,
  batch_size: int,
  mode: str = training.TRAIN,
  **changes: Any,
) -> training.Runner:
  """A `training.Runner` as the flags say.

  Args:
    model_fn: see `mesh_for`.
    input_fn: likewise.
    batch_size: likewise.
    mode: likewise.
    **changes: other settings of the training loop than those of the flags.
  """
  return training.Runner(
    model_fn,
    mesh_for(model_fn, input_fn, batch_size, mode),
    settings.value("output_dir"),
    settings=settings.trainer_settings(**changes),
  )
