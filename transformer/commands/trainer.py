r"""Trains, evaluates and samples from Transformers, as gin files say.

  mesh-transformer --model_dir=my_model --gin_file=problems/stdlib_lm.gin \
    --gin_param="run.train_steps = 2000"

defaults.gin is read first, then every --gin_file (from the working folder, or the package's own:
models/, layouts/, problems/, learning_rate_schedules/), then every --gin_param, then every --set,
which is a shorter way to write one: --set steps=2000. The mode is run.mode: train (default), eval,
score_eval, perplexity_eval, infer, score_from_strings, score_from_dataset, export_infer,
export_score, plan or dry_run. The commands of `mesh-transformer` (train, eval, infer, ...; see
docs/commands.md) write such command lines.

With TF_CONFIG set, each process is one of several workers; see docs/distributed.md. Exit codes: see
`mesh_tensorflow.exit_codes` and docs/operating.md.
"""

from __future__ import annotations

import contextlib
import copy
import logging as python_logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import gin
import tensorflow as tf
from absl import app, flags, logging

from mesh_tensorflow import exit_codes, workers
from mesh_tensorflow.checkpoint import folder
from mesh_tensorflow.errors import (
  CheckpointError,
  ConfigError,
  MeshError,
  StorageError,
  WorkerLostError,
)
from mesh_tensorflow.training import model_files, stopping
from mesh_tensorflow.transformer import gin_config
from mesh_tensorflow.transformer.commands import command_line
from mesh_tensorflow.transformer.gin_config import parsing
from mesh_tensorflow.transformer.modes import job
from mesh_tensorflow.transformer.modes.run import run
from mesh_tensorflow.workers import loss_watch, parent_watch

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(parsing)
flags.DEFINE_string("tpu_job_name", None, "Name of the TPU worker job.")
flags.DEFINE_string(
  "model_dir",
  None,
  "Folder for checkpoints, summaries and the configuration; by default run.model_dir of the gin "
  "files. Needed by every mode but plan and dry_run.",
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
  try:
    main(argv)
  except MeshError as e:
    if FLAGS.verbosity > 0:
      raise
    # Gin adds a line for each configurable that the error passed through.
    text = str(e).split("\n  In call to configurable")[0]
    print(f"{prefix}{_class_name(e)}: {text}", file=sys.stderr)
    if isinstance(e, CheckpointError) and not getattr(e, "told_to_all", False):
      try:
        workers.check()  # A checkpoint may have failed because another worker was lost.
      except WorkerLostError as lost:
        print(f"{prefix}WorkerLostError: {lost}", file=sys.stderr)
        return exit_codes.WORKER_LOST
    return exit_codes.of_error(e)
  except RuntimeError as e:
    missing = gin_config.missing_binding(e)
    if missing is None or FLAGS.verbosity > 0:
      raise
    print(f"{prefix}{_class_name(missing)}: {missing}", file=sys.stderr)
    return exit_codes.of_error(missing)
  except KeyboardInterrupt as e:
    print("interrupted; the newest checkpoint is kept", file=sys.stderr)
    return exit_codes.of_error(e)
  return exit_codes.DONE


def _as_worker(argv: Sequence[str]) -> int:
  """`_guarded` in a process that may be one of several workers."""
  try:
    cluster = workers.cluster_from_environment()
  except ConfigError as e:
    print(f"{_class_name(e)}: {e}", file=sys.stderr)
    return exit_codes.of_error(e)
  if cluster.size == 1:
    return _guarded(argv)
  prefix = f"worker {cluster.index}/{cluster.size}: "
  loss_watch.start(workers.check, prefix)
  python_logging.setLogRecordFactory(_records_with(prefix, python_logging.getLogRecordFactory()))
  with contextlib.ExitStack() as stack:
    if not cluster.is_chief:
      # The chief's reports are everybody's.
      nowhere = stack.enter_context(open(os.devnull, "w"))  # noqa: PTH123
      stack.enter_context(contextlib.redirect_stdout(nowhere))
    try:
      code = _guarded(argv, prefix)
    except BaseException as e:  # noqa: BLE001 - the process ends, as below.
      lines = traceback.format_exc().splitlines()
      print("\n".join(prefix + line for line in lines), file=sys.stderr)
      code = exit_codes.of_error(e)
    if code in (exit_codes.DONE, exit_codes.STOPPED):
      _end_at_a_signal(code)
      try:
        workers.leave(_flush, code)  # Ends the process, if it has joined others.
      except WorkerLostError as e:
        print(f"{prefix}WorkerLostError: {e}", file=sys.stderr)
        code = code or exit_codes.WORKER_LOST
  if code:
    # At its usual end a process of TensorFlow's would wait for the other workers.
    _flush()
    os._exit(code)
  return 0


def _end_at_a_signal(code: int) -> None:
  """Lets a signal end this process with its code: its work is done, and it only takes leave."""

  def end(number: int, frame: Any) -> None:
    del number, frame
    _flush()
    os._exit(code)

  for s in (signal.SIGTERM, signal.SIGINT):
    if signal.getsignal(s) is not signal.SIG_IGN:
      signal.signal(s, end)


def _flush() -> None:
  """Shuts logging down and flushes the standard streams, which `os._exit` does not do."""
  python_logging.shutdown()
  for stream in (sys.stdout, sys.stderr, sys.__stdout__):
    with contextlib.suppress(OSError, ValueError):
      if stream is not None:  # A process without a console has none.
        stream.flush()


def _records_with(
  prefix: str, make: Callable[..., python_logging.LogRecord]
) -> Callable[..., python_logging.LogRecord]:
  """A factory of log records whose texts begin with a prefix."""

  def make_record(*args: Any, **kwargs: Any) -> python_logging.LogRecord:
    record = make(*args, **kwargs)
    record.msg = prefix + str(record.msg)
    return record

  return make_record


def _class_name(error: MeshError) -> str:
  """The name of the error's class, without the proxy class that gin puts around it."""
  return next(c.__name__ for c in type(error).__mro__ if c.__module__ == MeshError.__module__)


def console_main() -> None:
  """The command `mesh-transformer`."""
  parent_watch.end_with_launcher()
  logging.set_verbosity(logging.WARNING)
  command_line.find_modules_here()
  try:
    app.run(_as_worker, flags_parser=lambda argv: command_line.parse_flags(argv, __doc__ or ""))
  except SystemExit as e:
    if isinstance(e.code, int) and e.code:
      # An error leaves iterators of data sets behind. Python's end may wait for ever for the thread
      # of one that calls Python (`tf.data.Dataset.from_generator`).
      _flush()
      os._exit(e.code)
    raise
