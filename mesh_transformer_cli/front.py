"""The command `mesh-transformer`: which command is meant, and the start of the trainer."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from mesh_settings import hints
from mesh_transformer_cli import output
from mesh_transformer_cli.model_flags import CONFIG
from mesh_transformer_cli.parser import TRAINER, WRONG, Parser, did_you_mean
from mesh_transformer_cli.table import COMMANDS

_MODE = "--gin_param=run.mode = "
_HELP = ("--help", "-help", "-h", "-?", "--helpshort", "-helpshort")
_INTERRUPTED = 130


def main() -> None:
  """The entry point."""
  program = _program()
  try:
    with output.until_its_reader_ends():
      module, arguments = command_line(program, sys.argv[1:])
      if arguments is not None:
        _start(program, module, arguments)
  except KeyboardInterrupt:
    # While TensorFlow is imported: later on the trainer says what became of it.
    sys.exit(_INTERRUPTED)


def command_line(program: str, arguments: Sequence[str]) -> tuple[str, list[str] | None]:
  """Parses a command line into the module to run and its arguments.

  Ends the process after a help (0) and for what is wrong (2).

  Args:
    program: the name of the program.
    arguments: the arguments after the program's name.

  Returns:
    The module that is to run, and its arguments; None for these if nothing is left to do.
  """
  if not arguments:
    _refuse(program, f"no command is given: {', '.join(COMMANDS)}")
  for argument in arguments:
    if any("\udc80" <= c <= "\udcff" for c in argument):
      shown = argument.encode("utf-8", "surrogateescape")
      _refuse(program, f"{shown!r} is not of the terminal's encoding, UTF-8")
  first, *others = arguments
  if first.startswith("-"):
    before = arguments[: list(arguments).index("--")] if "--" in arguments else arguments
    if any(a in _HELP for a in before):
      print(overview(program))
      sys.exit(0)
    # As ever: flags of the trainer, with run.mode among the bindings.
    return TRAINER, list(arguments)
  if first == "help":
    first, others = (others[0], ["--help"]) if others else ("--help", [])
    return command_line(program, [first, *others])
  if first not in COMMANDS:
    hint = did_you_mean(first, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
    if first.endswith(".gin"):
      hint = f"; a gin file is given as {program} train --config={first}"
    _refuse(program, f"there is no command {first!r}{hint}")
  parser = Parser(program, COMMANDS[first])
  values = parser.values(others)
  found = parser.command.run(values, parser)
  _check_mode(parser, values, found or [])
  return parser.command.program, found


def _check_mode(parser: Parser, values: argparse.Namespace, found: Sequence[str]) -> None:
  """Refuses a binding of run.mode that is not what the command is."""
  mode = next((a for a in reversed(found) if a.startswith(_MODE)), "")
  own = [f"--set={b}" for b in getattr(values, "set", None) or ()]
  own += [f"--gin_param={b}" for b in getattr(values, "gin_param", None) or ()]
  for binding in own if mode else ():
    name, _, value = binding.partition("=")[2].partition("=")
    if name.strip() == "run.mode" and value.strip(" '\"") != mode.removeprefix(_MODE).strip("'"):
      parser.error(
        f"{binding}: this command is {mode.removeprefix('--gin_param=')}; leave the binding "
        "out, or the name of the command, which then takes --gin_file in place of --config"
      )


def overview(program: str) -> str:
  """The help of the program: one screen."""
  rows = "\n".join(f"  {c.name:<9} {c.summary}" for c in COMMANDS.values())
  return f"""\
Trains Transformers on meshes of devices, and uses them.

usage: {program} COMMAND [flags]         {program} COMMAND --help

{rows}

From a text of your own to samples:
  {program} init my_model --text=input.txt
  {program} train --config=my_model/train.gin
  {program} infer --config=my_model/train.gin --prompt="Once"

Without a command gin bindings say it all, run.mode among them:
  {program} --model_dir=DIR --gin_file=FILE ... [--gin_param="NAME = VALUE" ...]
      [--set NAME=VALUE ...] [--module_import=MODULE ...]

  --helpfull   all flags of the trainer, and of the libraries that it uses
  --version    the version, where it was imported from, that of TensorFlow

Exit codes: 0 done, 2 flags or settings are wrong, 74 stopped and saved; docs/operating.md has the
others. Several workers on this machine: mesh-transformer-launch."""


def _program() -> str:
  name = os.path.basename(sys.argv[0]).removesuffix(".exe")
  return "mesh-transformer" if name == "__main__.py" else name


def _start(program: str, module: str, arguments: Sequence[str]) -> None:
  """Runs a program in this process, as `python -m` does, with its own command line.

  That of the trainer is kept in `model_dir/command`: it says in full what a command stood for.
  """
  given = {a.partition("=")[0] for a in sys.argv}
  names = {flag.aliases[0]: flag.name for flag in CONFIG if flag.aliases and flag.name in given}
  sys.argv = [program, *arguments]
  with hints.written(names):
    runpy.run_module(module, run_name="__main__")


def _refuse(program: str, reason: str) -> NoReturn:
  print(
    f"{program}: {reason} (usage: {program} COMMAND [flags]; {program} --help)", file=sys.stderr
  )
  sys.exit(WRONG)
