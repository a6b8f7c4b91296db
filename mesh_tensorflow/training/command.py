"""The frame of programs that train: flags, errors in one line, exit codes, signals, workers."""

from __future__ import annotations

import contextlib
import logging as python_logging
import os
import signal
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from mesh_settings.records import settings_of
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import exit_codes, workers
from mesh_tensorflow.errors import CheckpointError, ConfigError, MeshError, WorkerLostError
from mesh_tensorflow.training.stopping import BeforeTraining
from mesh_tensorflow.workers import loss_watch

_HELP = ("--help", "-help", "-h", "-?", "--helpshort", "-helpshort")


# Settings of the training loop that are flags of all these programs.
_TRAINER_FLAGS = (
  "save_checkpoints_steps",
  "report_every",
  "gradient_accumulation_steps",
  "nonfinite",
)


def trainer_flags(**defaults: Any) -> list[tuple[Callable[..., Any], str, Any, str]]:
  """The flags of a program for settings of the training loop, by the settings' names.

  Args:
    **defaults: values if not given, where the program's are not the settings'; or of settings that
      are flags of this program only: numbers or texts.

  Returns:
    For each the function of `absl.flags` that defines it, name, default and help.
  """
  definers: dict[str, Callable[..., Any]] = {
    "int": flags.DEFINE_integer,
    "str": flags.DEFINE_string,
    "float": flags.DEFINE_float,
  }
  known, found = settings_of(TrainerSettings), []
  for name in dict.fromkeys((*_TRAINER_FLAGS, *defaults)):
    told = known[name]
    text = told.short or told.help
    definer = definers[told.annotation.split(" | ")[0]]
    found.append((definer, name, defaults.get(name, told.default), text[0].upper() + text[1:]))
  return found


def guarded(
  main: Callable[[], object],
  prefix: str = "",
  *,
  verbose: bool = False,
  explain: Callable[[RuntimeError], MeshError | None] = lambda e: None,
) -> int:
  """Calls a program; the package's own errors are told in one line.

  Args:
    main: the program.
    prefix: of lines about errors.
    verbose: raises errors, with their tracebacks.
    explain: finds the error of the package that another library's stands for.

  Returns:
    The exit code.
  """
  try:
    main()
  except MeshError as e:
    if verbose:
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
    explained = None if verbose else explain(e)
    if explained is None:
      raise
    print(f"{prefix}{_class_name(explained)}: {explained}", file=sys.stderr)
    return exit_codes.of_error(explained)
  except KeyboardInterrupt as e:
    print("interrupted; the newest checkpoint is kept", file=sys.stderr)
    return exit_codes.of_error(e)
  return exit_codes.DONE


def as_worker(run: Callable[[str], int]) -> int:
  """Calls a program in a process that may be one of several workers.

  Args:
    run: called with a prefix of messages, returns an exit code.

  Returns:
    The exit code; of several workers the process may be ended with it.
  """
  try:
    cluster = workers.cluster_from_environment()
  except ConfigError as e:
    print(f"{_class_name(e)}: {e}", file=sys.stderr)
    return exit_codes.of_error(e)
  if cluster.size == 1:
    return run("")
  prefix = f"worker {cluster.index}/{cluster.size}: "
  loss_watch.start(workers.check, prefix)
  python_logging.setLogRecordFactory(_records_with(prefix, python_logging.getLogRecordFactory()))
  with contextlib.ExitStack() as stack:
    if not cluster.is_chief:
      # The chief's reports are everybody's.
      nowhere = stack.enter_context(open(os.devnull, "w"))  # noqa: PTH123
      stack.enter_context(contextlib.redirect_stdout(nowhere))
    try:
      code = run(prefix)
    except BaseException as e:  # noqa: BLE001 - the process ends, as below.
      lines = traceback.format_exc().splitlines()
      print("\n".join(prefix + line for line in lines), file=sys.stderr)
      code = exit_codes.of_error(e)
    if code in (exit_codes.DONE, exit_codes.STOPPED):
      _end_at_a_signal(code)
      try:
        workers.leave(flush, code)  # Ends the process, if it has joined others.
      except WorkerLostError as e:
        print(f"{prefix}WorkerLostError: {e}", file=sys.stderr)
        code = code or exit_codes.WORKER_LOST
  if code:
    # At its usual end a process of TensorFlow's would wait for the other workers.
    flush()
    os._exit(code)
  return 0


def _end_at_a_signal(code: int) -> None:
  """Lets a signal end this process with its code: its work is done, and it only takes leave."""

  def end(number: int, frame: types.FrameType | None) -> None:
    del number, frame
    flush()
    os._exit(code)

  for s in (signal.SIGTERM, signal.SIGINT):
    if signal.getsignal(s) is not signal.SIG_IGN:
      signal.signal(s, end)


def flush() -> None:
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


def leave(code: int) -> None:
  """Ends the process if there was an error; otherwise it ends as usual.

  An error leaves iterators of data sets behind. Python's end may wait for ever for the thread of
  one that calls Python (`tf.data.Dataset.from_generator`).
  """
  if code:
    flush()
    os._exit(code)


# ------------------------------------------------------------- programs with absl's flags


def run_program(
  main: Callable[[Sequence[str]], object],
  description: str | None,
  required: Sequence[str] = (),
  own: str = "",
  *,
  trains: bool = False,
) -> NoReturn:
  """Runs a program and ends the process: with 0, or with a line of what is wrong and its exit code.

  Args:
    main: takes the arguments that are no flags.
    description: description of the program, for --help.
    required: flags without which it cannot do anything.
    own: beginning of the names of modules whose flags are the program's, for --help.
    trains: whether it trains: a signal before its first step ends it as one after that does.
  """

  def parse(argv: Sequence[str]) -> list[str]:
    if any(a in _HELP for a in argv[1:]):
      print(f"{description}\n{_flags_of(argv[0], own)}")
      sys.exit(exit_codes.DONE)
    try:
      rest = list(flags.FLAGS(list(argv)))
    except flags.Error as e:
      _end_by_wrong_flags(str(e))
    missing = [f"--{name}" for name in required if flags.FLAGS[name].value in (None, "")]
    if missing:
      _end_by_wrong_flags(f"{', '.join(missing)} must be given")
    if len(rest) > 1:
      _end_by_wrong_flags(f"unknown arguments: {' '.join(rest[1:])}")
    return rest

  def run(argv: Sequence[str]) -> int:
    def as_one(prefix: str) -> int:
      with BeforeTraining(prefix) if trains else contextlib.nullcontext():
        return guarded(lambda: main(argv), prefix, verbose=flags.FLAGS.verbosity > 0)

    code = as_worker(as_one)
    leave(code)
    return code

  logging.set_verbosity(logging.WARNING)  # --verbosity says otherwise.
  app.run(run, flags_parser=parse)
  sys.exit(exit_codes.DONE)  # app.run has ended the process before.


def _end_by_wrong_flags(what: str) -> NoReturn:
  print(f"{what}\n--help lists the flags.", file=sys.stderr)
  sys.exit(exit_codes.CONFIGURATION)


def _flags_of(program: str, own: str) -> str:
  """The flags of a program, with what they mean."""
  found = [
    flag
    for module, of_module in flags.FLAGS.flags_by_module_dict().items()
    if module == program or (own and module.startswith(own))
    for flag in of_module
  ]
  lines = ["flags:"]
  for flag in sorted(found, key=lambda flag: str(flag.name)):
    default = "" if flag.default is None else f" (default: {flag.default})"
    lines.append(f"  --{flag.name}{default}")
    lines += textwrap.wrap(flag.help, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
  return "\n".join(lines)
