"""The mode "search": the best layout of a model, written as a gin file."""

from __future__ import annotations

import os
import re

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.planning.auto_layout import LayoutChoice
from mesh_tensorflow.planning.text import format_bytes, format_seconds
from mesh_tensorflow.training import model_files
from mesh_tensorflow.transformer.modes import automatic_layout, layout_rounds, variants
from mesh_tensorflow.transformer.modes.job import Job, mode
from mesh_tensorflow.transformer.modes.planned_steps import StepMaker

_HEAD = "# Found by run.mode = 'search'"


@gin.configurable(module="mesh_tensorflow.transformer.plan", allowlist=["path"])
@affects("report")
def write_layout(choice: LayoutChoice, model: str, path: str | None = None) -> str:
  """Writes a layout as a gin file, to be given with `--gin_file`.

  Args:
    choice: the layout.
    model: what it was searched for, in words.
    path: the file; by default "layouts/auto_MACHINE_SIZES.gin" in the working folder. A file that
      was not written by a search is not overwritten.

  Returns:
    The path.

  Raises:
    ConfigError: there is another file of that name.
    StorageError: it cannot be written.
  """
  if path is None:
    sizes = "x".join(str(m.size) for m in choice.mesh_shape) or "1"
    name = re.sub("[^A-Za-z0-9_-]+", "_", choice.machine.name).strip("_")
    path = f"layouts/auto_{name}_{sizes}.gin"
  if tf.io.gfile.exists(path):
    with tf.io.gfile.GFile(path) as f:
      if not f.read().startswith(_HEAD):
        raise ConfigError(
          f"write_layout.path: {path} is there, and no search has written it; bind another name"
        )
  proven = "no layout is faster" if choice.proven else "the best found: the search was not complete"
  built = variants.gin_lines(variants.of_choice(choice))
  text = (
    f"{_HEAD} for {model}.\n"
    f"# Predicted for {choice.machine.name}: {format_seconds(choice.seconds)} a step, "
    f"{format_bytes(choice.memory)} a device; {proven}.\n\n"
    f'utils.run.mesh_shape = "{layout_rounds.mesh_text(choice.mesh_shape)}"\n'
    f'utils.run.layout_rules = "{layout_rounds.rules_text(choice.layout)}"\n'
    + "".join(f"{line}\n" for line in built)
  )
  folder = os.path.dirname(path)
  if folder:
    model_files.make_folder(folder)
  model_files.write(folder, path, text.encode())
  return path


@mode("search", on_devices=False)
def run_search(job: Job) -> LayoutChoice:
  """Searches mesh shape and layout; a bound mesh shape is kept where the rules are "auto"."""
  make = StepMaker(job.settings, job.sequence_length, job.batch_size, needs_data=False)
  choice = automatic_layout.search(job.settings, make, bool(job.tpu))
  print(choice, flush=True)
  model = f"a {job.model_type} of {job.batch_size} sequences a batch"
  path = write_layout(choice, model)
  print(f"written: {path} (give --gin_file={path})", flush=True)
  return choice
