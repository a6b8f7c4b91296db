"""Google docstrings: their parts, and as Markdown."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import Any

_SECTIONS = {
  "Args": "Arguments",
  "Attributes": "Attributes",
  "Returns": "Returns",
  "Yields": "Yields",
  "Raises": "Raises",
  "Warns": "Warns",
  "Example": "Example",
  "Examples": "Examples",
}
_HEAD = re.compile(rf"^({'|'.join(_SECTIONS)}):$")
_ENTRY = re.compile(
  r"^(\*{0,2}[A-Za-z_][\w.]*(?:, \*{0,2}[A-Za-z_][\w.]*)*)(?: \([^)]*\))?: ?(.*)$"
)


def sections(docstring: str | None) -> dict[str, str]:
  """The text of each section, dedented; that before the first one under ""."""
  found: dict[str, list[str]] = {"": []}
  name = ""
  for line in inspect.cleandoc(docstring or "").splitlines():
    head = _HEAD.match(line)
    if head:
      name = head[1]
      found.setdefault(name, [])
    else:
      # What stands at the margin again after a section is of the text.
      name = "" if name and line and not line.startswith(" ") else name
      found[name].append(line)
  return {k: textwrap.dedent("\n".join(v)).strip("\n") for k, v in found.items()}


def summary(docstring: str | None) -> str:
  """The first paragraph, as one line."""
  return " ".join(sections(docstring)[""].split("\n\n")[0].split())


def entries(section: str) -> dict[str, str]:
  """What is said of each name in a section such as Args, as one line each."""
  found: dict[str, str] = {}
  name = ""
  for line in section.splitlines():
    entry = _ENTRY.match(line)
    if entry:
      name = entry[1]
      found[name] = entry[2]
    elif name:
      found[name] = f"{found[name]} {line.strip()}".strip()
  return found


def arguments(function: Any) -> dict[str, str]:
  """What the docstring of a function, or of a class, says of each argument."""
  said: dict[str, str] = {}
  for names, text in entries(sections(inspect.getdoc(function)).get("Args", "")).items():
    for name in names.split(", "):
      said[name.lstrip("*")] = text
  return said


def escaped(text: str) -> str:
  """Markdown in which what stands outside of code is no HTML."""
  parts = re.split(r"(`[^`]*`)", text)
  return "".join(p if p.startswith("`") else p.replace("<", "&lt;") for p in parts)


def _prose(text: str) -> Iterable[str]:
  for line in text.splitlines():
    yield line if line.startswith("    ") else escaped(line)


def markdown(docstring: str | None) -> str:
  """A docstring as Markdown: text, then a list for each section."""
  parts = sections(docstring)
  lines = list(_prose(parts.pop("")))
  for name, text in parts.items():
    lines += ["", f"**{_SECTIONS[name]}**", ""]
    said = entries(text) if name in ("Args", "Attributes", "Raises") else {}
    if said:
      lines += [f"- `{entry}`: {escaped(what)}" for entry, what in said.items()]
    else:
      lines += list(_prose(text))
  return "\n".join(lines).strip() + "\n"
