"""Parses the flags of one command: its help, and one line for what is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from mesh_settings import hints
from mesh_transformer_cli.flags import Flag

# By its name alone: an import of it would import TensorFlow, before it is known to be needed.
TRAINER = "mesh_tensorflow.transformer.main"

# Of `mesh_tensorflow.exit_codes`: flags and settings can cure it.
WRONG = 2

_WIDTH = 98
_COLUMN = 30  # Column at which the descriptions of flags begin.


@dataclasses.dataclass(frozen=True)
class Command:
  """A command of `mesh-transformer`.

  Attributes:
    name: its name on the command line.
    summary: its description in a line.
    text: its full description.
    flags: its flags.
    run: does it, with the values of its flags; returns what its program is given, or None
      where there is nothing left to do. It may call `Parser.error`.
    gin: further names that gin binds and that matter here, each with what it is.
    examples: command lines.
    place: what it takes without a flag: the name in the help, and what it is; None: nothing.
    program: the module that does it, as `python -m` would.
  """

  name: str
  summary: str
  text: str
  flags: Sequence[Flag]
  run: Callable[[argparse.Namespace, Parser], list[str] | None]
  gin: Sequence[tuple[str, str]]
  examples: Sequence[str]
  place: tuple[str, str] | None = None
  program: str = TRAINER


class Parser(argparse.ArgumentParser):
  """Parses the flags of a command.

  Args:
    program: the name of the program.
    command: the command.
  """

  def __init__(self, program: str, command: Command):
    # Abbreviations would make each new flag a danger for scripts that were there before.
    super().__init__(prog=f"{program} {command.name}", add_help=False, allow_abbrev=False)
    self.command = command
    self.add_argument("-h", "--help", action="store_true")
    for flag in command.flags:
      # Nothing is "given" that was not: what a flag is left at, gin files say.
      how = "append" if flag.repeated else "store"
      if flag.kind is None:
        self.add_argument(flag.name, action="store_const", const=True)
      else:
        names = (flag.name, *flag.aliases)
        self.add_argument(*names, action=how, type=flag.kind, metavar=flag.metavar)
    self.add_argument("places", nargs="*")

  def values(self, arguments: Sequence[str]) -> argparse.Namespace:
    """The values of all flags, None for those that were not given.

    Ends the process for `--help` (0) and for what is wrong (2).

    Args:
      arguments: the arguments after the command.
    """
    words = [_with_underscores(a) for a in arguments]
    if any(w in ("-h", "--help", "-help") for w in words):
      # Also where something besides is wrong: it is what the help is asked for.
      print(self.help())
      sys.exit(0)
    found, rest = self.parse_known_args(words)
    places = [*found.places, *rest]
    # To argparse what has a blank in it is no flag, whatever it begins with.
    unknown = [p for p in places if p.startswith("-")]
    if unknown:
      name = unknown[0].partition("=")[0]
      self.error(f"there is no flag {name}{did_you_mean(name, self.names())}")
    most = 1 if self.command.place else 0
    if len(places) > most:
      self.error(self._unexpected(places[most]))
    found.place = places[0] if places else None
    return found

  def names(self) -> list[str]:
    """The flags."""
    return [name for f in self.command.flags for name in (f.name, *f.aliases)]

  def error(self, message: str) -> NoReturn:
    """Ends the process with one line, and exit code 2."""
    text = message.removeprefix("argument ")
    if text.endswith(": expected one argument"):
      name = text.split(":")[0]
      text = f"{name} needs a value; one that begins with a dash is written {name}=-VALUE"
    elif "ignored explicit argument" in text:
      text = f"{text.split(':')[0]} takes no value"
    # Arguments may hold newlines, and bytes that are no text.
    line = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    print(f"{self.prog}: {line} ({self.prog} --help lists the flags)", file=sys.stderr)
    sys.exit(WRONG)

  def _unexpected(self, word: str) -> str:
    if word.endswith(".gin"):
      return f"{word}: a gin file is given as --config={word}"
    if "=" in word:
      return f"{word}: a setting is given as --set {word}"
    return f"{word!r} is no flag, and a text with blanks stands in quotes"

  def help(self) -> str:
    """The help of the command."""
    c = self.command
    place = f" {c.place[0]}" if c.place else ""
    lines = [f"usage: {self.prog}{place} [flags]", "", *_wrapped(c.text, 0), ""]
    if c.place:
      lines += _row(c.place[0], c.place[1]) + [""]
    own = [f for f in c.flags if not f.advanced]
    further = [f for f in c.flags if f.advanced]
    for title, flags in (("flags", own), ("flags of all commands that gin configures", further)):
      if flags:
        lines += [f"{title}:", *_rows(flags), ""]
    if c.gin:
      lines += [
        'gin names (--gin_param="NAME = VALUE", --set NAME=VALUE, or a line of a gin file):'
      ]
      for name, meaning in c.gin:
        lines += _row(name, meaning)
      lines.append("")
    lines += ["examples:", *(f"  {self._prompt(e)}" for e in c.examples)]
    return "\n".join(lines)

  def _prompt(self, example: str) -> str:
    program = self.prog.rpartition(" ")[0]
    return f"{program} {example}".replace("\n", "\n      ")


def did_you_mean(name: str, legal: Iterable[str]) -> str:
  """The end of an error that names what resembles `name`; nothing if nothing does."""
  known = sorted(legal)
  word = name.strip("-")
  having = [k for k in known if len(word) > 2 and word in k][:2]
  return hints.did_you_mean(name, known, 2, 0.7) or hints.hint(having)


def _with_underscores(argument: str) -> str:
  """--model-dir=a-b is --model_dir=a-b: many programs write their flags so."""
  if not argument.startswith("--"):
    return argument
  name, equals, value = argument.partition("=")
  return f"--{name[2:].replace('-', '_')}{equals}{value}" if name[2:] else argument


def _rows(flags: Sequence[Flag]) -> list[str]:
  lines = []
  for flag in flags:
    said = ", ".join((flag.name, *flag.aliases)) + (
      f" {flag.metavar}" if flag.kind is not None else ""
    )
    bound = flag.gin or (f"--set {flag.short}" if flag.short else "")
    again = " Repeatable." if flag.repeated else ""
    lines += _row(said, f"{flag.help}{again}" + (f" [{bound}]" if bound else ""))
  return lines


def _row(name: str, meaning: str) -> list[str]:
  """A name, and its meaning beside it, or below if the name is long."""
  first, *others = _wrapped(meaning, _COLUMN) or [""]
  head = f"  {name}"
  if len(head) + 2 > _COLUMN:
    return [head, first, *others]
  return [head.ljust(_COLUMN) + first.lstrip(), *others]


def _wrapped(text: str, indent: int) -> list[str]:
  blank = " " * indent
  return [
    line
    for part in text.split("\n")
    for line in textwrap.wrap(
      part, _WIDTH, initial_indent=blank, subsequent_indent=blank, break_on_hyphens=False
    )
    or [""]
  ]
