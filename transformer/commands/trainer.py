r"""Trains, evaluates and samples from Transformers, as gin files say.

  mesh-transformer --model_dir=my_model --gin_file=problems/stdlib_lm.gin \
    --gin_param="run.train_steps = 2000"

defaults.gin is read first, then every --gin_file (from the working folder, or the package's own:
models/, layouts/, problems/, learning_rate_schedules/), then every --gin_param, then every --set,
which is a shorter way to write one: --set steps=2000. The mode is run.mode: train (default), eval,
score_eval, perplexity_eval, infer, score_from_strings, score_from_dataset, export_infer,
export_score, average, plan, search or dry_run. The commands of `mesh-transformer` (train, eval,
infer, ...; see docs/commands.md) write such command lines.

With TF_CONFIG set, each process is one of several workers; see docs/distributed.md. Exit codes: see
`mesh_tensorflow.exit_codes` and docs/operating.md.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shlex
import sys
from collections.abc import Sequence

import gin
import tensorflow as tf
from absl import app, flags, logging

from mesh_tensorflow import exit_codes, workers
from mesh_tensorflow.checkpoint import folder
from mesh_tensorflow.errors import (
  CheckpointError,
  ConfigError,
  StorageError,
)
from mesh_tensorflow.training import command, model_files, stopping
from mesh_tensorflow.transformer import gin_config
from mesh_tensorflow.transformer.commands import command_line
from mesh_tensorflow.transformer.gin_config import parsing
from mesh_tensorflow.transformer.modes import job
from mesh_tensorflow.transformer.modes.run import run
from mesh_tensorflow.workers import parent_watch

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(parsing)
flags.DEFINE_string("tpu_job_name", None, "Name of the TPU worker job.")
flags.DEFINE_string(
  "model_dir",
  None,
  "Folder for checkpoints, summaries and the configuration; by default run.model_dir of the gin "
  "files. Needed by every mode but plan, search and dry_run.",
)
flags.DEFINE_string("tpu", None, "A TPU to run on: local, a name or an address.")
flags.DEFINE_string("gcp_project", None, "Project of a TPU that is given by name.")
flags.DEFINE_string("tpu_zone", None, "Zone of a TPU that is given by name.")
flags.DEFINE_bool(
  "allow_config_change",
  False,
  "Go on with checkpoints of another model or vocabulary than that of the gin files; without it "
  "they are refused. Also as run.allow_config_change.",
)
flags.DEFINE_multi_string(
  "module_import", None, "Python module to import first, to register gin names (repeatable)."
)


def main(argv: Sequence[str]) -> None:
  """Runs what the flags and gin files say."""
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}", exit_codes.CONFIGURATION)
  for module in FLAGS.module_import or []:
    command_line.import_module(module)
  gin_config.parse_gin_defaults_and_flags()
  gin_config.check_run()
  cluster = workers.cluster_from_environment()
  # Without the values of references: the vocabulary may be made only when it is known where it is.
  # A copy of a macro is its value.
  bindings = gin.get_bindings("run", resolve_references=False)
  mode = job.get_mode(copy.deepcopy(bindings.get("mode", "train")))
  if cluster.is_evaluator and mode.trains:
    raise ConfigError(
      "TF_CONFIG says that this process is the evaluator of the cluster, which does not train: "
      "bind run.mode = 'perplexity_eval', 'eval' or 'score_eval' for it"
    )
  model_dir = FLAGS.model_dir or copy.deepcopy(bindings.get("model_dir"))
  if mode.on_devices:
    model_dir = command_line.checked_model_dir(model_dir)
    if not FLAGS.model_dir:
      command_line.check_not_moved(model_dir, FLAGS.gin_file or ())
  if cluster.is_chief and model_dir and mode.trains:
    model_files.make_folder(model_dir)
    write_command(model_dir, sys.argv)
  notes: list[str] = []
  if cluster.is_chief and model_dir and mode.on_devices and not mode.trains:
    if tf.io.gfile.isdir(model_dir):
      write = lambda: notes.append(write_command(model_dir, sys.argv))  # noqa: E731
      model_files.optional(model_dir, "command", write)
  prefix = f"worker {cluster.index}/{cluster.size}: " if cluster.size > 1 else ""
  try:
    with stopping.BeforeTraining(prefix) if mode.trains else contextlib.nullcontext():
      run(
        tpu_job_name=FLAGS.tpu_job_name,
        tpu=FLAGS.tpu,
        gcp_project=FLAGS.gcp_project,
        tpu_zone=FLAGS.tpu_zone,
        model_dir=model_dir,
        **({"allow_config_change": True} if FLAGS.allow_config_change else {}),
      )
  except (ConfigError, StorageError, CheckpointError):
    # What was refused did nothing that its note would tell of.
    for name in notes:
      folder.remove_if_possible(model_dir, name)
    raise


def write_command(model_dir: str, argv: Sequence[str]) -> str:
  """Keeps the command line, as a shell takes it, in `model_dir/command`, `command.1`, ...

  Returns:
    The name of the file.

  Raises:
    StorageError: the folder cannot be written to.
  """
  name, i = os.path.join(model_dir, "command"), 0
  while tf.io.gfile.exists(name):
    i += 1
    name = os.path.join(model_dir, f"command.{i}")
  model_files.write(model_dir, name, shlex.join(argv).encode())
  return name


def _guarded(argv: Sequence[str], prefix: str = "") -> int:
  """`main`, with the package's own errors as one line and an exit code."""
  return command.guarded(
    lambda: main(argv),
    prefix,
    verbose=FLAGS.verbosity > 0,
    explain=gin_config.missing_binding,
  )


def _as_worker(argv: Sequence[str]) -> int:
  """`_guarded` in a process that may be one of several workers."""
  return command.as_worker(lambda prefix: _guarded(argv, prefix))


def console_main() -> None:
  """The command `mesh-transformer`."""
  parent_watch.end_with_launcher()
  logging.set_verbosity(logging.WARNING)
  command_line.find_modules_here()
  try:
    app.run(_as_worker, flags_parser=lambda argv: command_line.parse_flags(argv, __doc__ or ""))
  except SystemExit as e:
    command.leave(e.code if isinstance(e.code, int) else 0)
    raise
