"""docs/settings.md: every setting of the trainer, from the signatures and docstrings that say them.

python -m docs.tools.settings     writes the page; a test keeps it equal to what this makes
"""

from __future__ import annotations

import functools
import inspect
import json
import pathlib
import re
import subprocess
import sys
from typing import Any, NamedTuple

from docs.tools import docstrings, reference, signatures

PAGE = pathlib.Path(__file__).resolve().parent.parent / "settings.md"
DEFAULTS = PAGE.parent.parent / "gin" / "defaults.gin"

_INTRO = """\
# Settings of the trainer

Each line can be bound in a gin file, or by `--gin_param="NAME = VALUE"`. The default is that of the
program; "defaults.gin" before a value says that `defaults.gin`, which is always read, binds it.
`REQUIRED` has to be bound, which models, problems and layouts do. How files are found and what
overrides what: [configuration.md](configuration.md). What models are made of (`make_layer_stack`,
`SelfAttention`, ...) is not here: all that gin can bind is in the reference of the site, and
`operative_config.gin` in the folder of a run has each value that it used.

This page is made from the program by `python -m docs.tools.settings`.
"""

# Title, and which configurables: gin modules (their last word), or names of methods.
GROUPS = [
  ("The run", ["utils.run"]),
  ("Decoding, scoring, evaluating, starting weights", ["utils"]),
  ("How sequences are made", ["Bitransformer", "Unitransformer"]),
  ("Data", ["dataset", "training_data", "text_files"]),
  ("Vocabularies", ["vocabulary", "subword_vocabulary", "t2t_vocabulary"]),
  ("Learning rates", ["learning_rate_schedules"]),
  ("Optimizers", ["optimize"]),
  ("Plans, and layouts that are found", ["plan"]),
  ("Checkpoints, signals, memory, workers", ["checkpoint", "stopping", "memory_check", "workers"]),
]


def page() -> str:
  """The page, as Markdown."""
  lines = [_INTRO]
  configurables, given = reference.configurables(), _defaults_gin()
  done: set[reference.Configurable] = set()
  for title, wanted in GROUPS:
    rows = []
    for c in configurables:
      module = c.module.rpartition(".")[2]
      if c in done or not {module, f"{module}.{c.name}"} & set(wanted):
        continue
      done.add(c)
      rows += _rows(c, given)
    lines += [f"## {title}", "", "| setting | default | meaning |", "|---|---|---|", *rows, ""]
  lines += ["## Flags", "", "| flag | default | meaning |", "|---|---|---|", *_flags()]
  return "\n".join(lines) + "\n"


def _rows(c: reference.Configurable, given: dict[str, str]) -> list[str]:
  """A row for each parameter that gin decides: one without a default is given by the caller."""
  said = _meanings(c)
  # Methods are told by their class.
  name = c.name if "." in c.module or c.module == reference.PACKAGE else f"{c.module}.{c.name}"
  rows = []
  for parameter, default in c.parameters.items():
    if default is inspect.Parameter.empty:
      continue
    setting = f"{name}.{parameter}"
    text = signatures.default_text(default)
    required = text == "gin.REQUIRED"
    shown = "REQUIRED" if required else f"`{text}`"
    if setting in given:
      shown = f"{'' if required else shown + '; '}defaults.gin: `{given[setting]}`"
    rows.append(_row(setting, shown, said[parameter]))
  return rows


def _meanings(c: reference.Configurable) -> dict[str, str]:
  """What the docstring says of each parameter; where it says "see there", what is said there."""
  own, there, found = docstrings.arguments(c.value), None, {}
  for parameter in c.parameters:
    meaning = own.get(parameter, "")
    see = re.match(r"see `([\w.]+)`", meaning)
    there = _found(see[1]) if see else there
    if there is not None and (see or meaning == "see there."):
      said = docstrings.arguments(there)
      # `run.train_dataset_fn` is the `dataset_fn` of what it is given to.
      name = next((n for n in (parameter, parameter.partition("_")[2]) if n in said), None)
      meaning = said[name] if name else meaning
    elif meaning == "see above.":
      meaning = f"see `{c.name}` in the reference."
    found[parameter] = meaning or docstrings.summary(inspect.getdoc(c.value))
  return found


def _found(name: str) -> Any:
  """What a docstring names: a public name of the Transformer, or a part of one; else None."""
  first, *parts = name.split(".")
  value = _public_names().get(first)
  for part in parts:
    value = getattr(value, part, None)
  return value


@functools.cache
def _public_names() -> dict[str, Any]:
  return {n.name: n.value for n in reference.all_names() if reference.TRANSFORMER in n.module}


def _row(name: str, default: str, meaning: str) -> str:
  cells = [f"`{name}`", default, docstrings.escaped(meaning)]
  return "| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in cells) + " |"


def _defaults_gin() -> dict[str, str]:
  """What stands in a line of its own in defaults.gin, by the last two words of its name."""
  text = DEFAULTS.read_text(encoding="utf-8")
  found = re.findall(r"^((?:\w+[./])*\w+\.\w+) = (.+)$", text, re.MULTILINE)
  return {
    ".".join(re.split(r"[./]", name)[-2:]): value.strip()
    for name, value in found
    if "/" not in name and value.count("[") == value.count("]")
  }


_FLAGS_OF_THE_TRAINER = """
import json
import mesh_tensorflow.transformer.main
from absl import flags
print(json.dumps([
  [flag.name, flag.default, flag.help]
  for module, defined in flags.FLAGS.flags_by_module_dict().items()
  if module.startswith("mesh_tensorflow.") for flag in defined
]))
"""


class _Flag(NamedTuple):
  default: Any
  help: str


def _flags() -> list[str]:
  """The flags that the trainer defines.

  In a process of its own: other programs of the package share flags with it, and in this one they
  may have been imported first.
  """
  told = subprocess.run(
    [sys.executable, "-c", _FLAGS_OF_THE_TRAINER], capture_output=True, text=True, check=True
  )
  found = {name: _Flag(*rest) for name, *rest in json.loads(told.stdout.splitlines()[-1])}
  return [
    _row(
      f"--{name}",
      f"`{flag.default}`" if flag.default else "",
      flag.help.split(";\n    repeat this option")[0],
    )
    for name, flag in sorted(found.items())
  ]


if __name__ == "__main__":
  PAGE.write_text(page(), encoding="utf-8")
  print(f"written: {PAGE}")
