"""The flags that all commands share which gin configures, and what they become for the trainer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from mesh_settings.rules import PATH, at_least
from mesh_transformer_cli import flags
from mesh_transformer_cli.flags import Flag, of_rule
from mesh_transformer_cli.parser import Parser

# File with all bindings of a training, in the folder of its model.
OPERATIVE = "operative_config.gin"

CONFIG = (
  Flag(
    "--config",
    "Gin file: a path, or one of the package's (problems/stdlib_lm.gin, layouts/cpu_2x2.gin). A "
    "later file overrides an earlier one.",
    of_rule(PATH),
    "FILE",
    passed=True,
    repeated=True,
    aliases=("--gin_file",),
  ),
  Flag(
    "--set",
    "One setting by a short name (d_model=512, steps=1000, optimizer=AdamW, data=my.txt) or a "
    "whole one (run.seed=3); words need no quotes. Overrides files and --gin_param.",
    flags.setting,
    "NAME=VALUE",
    passed=True,
    repeated=True,
  ),
)
MODEL_DIR = Flag(
  "--model_dir",
  "Folder for checkpoints, summaries and the configuration. By default run.model_dir of the gin "
  "files.",
  of_rule(PATH),
  "DIR",
  passed=True,
)
TRAINED_DIR = Flag(
  "--model_dir",
  "Folder of the trained model. Without --config it says the settings, too: "
  f"its {OPERATIVE}. By default run.model_dir of the gin files.",
  of_rule(PATH),
  "DIR",
  passed=True,
)
FURTHER = (
  Flag(
    "--gin_param",
    'One gin binding, such as "run.train_steps = 100". Overrides the files.',
    flags.binding,
    '"NAME = VALUE"',
    passed=True,
    repeated=True,
    advanced=True,
  ),
  Flag(
    "--gin_location_prefix",
    "Folders to look for gin files in, separated by commas; after the working folder, before the "
    "package's.",
    metavar="DIRS",
    passed=True,
    advanced=True,
  ),
  Flag(
    "--module_import",
    "Python module to import first, to register gin names.",
    metavar="MODULE",
    passed=True,
    repeated=True,
    advanced=True,
  ),
  Flag(
    "--allow_config_change",
    "Go on with checkpoints of another model or vocabulary than that of the gin files.",
    None,
    passed=True,
    advanced=True,
  ),
  Flag(
    "--verbosity",
    "How much is logged; from 1 on errors show where they come from.",
    of_rule(at_least(-3)),
    "N",
    passed=True,
    advanced=True,
  ),
  Flag("--tpu", "A TPU: local, a name or an address.", passed=True, advanced=True),
  Flag("--tpu_job_name", "Name of the TPU worker job.", passed=True, advanced=True),
  Flag("--tpu_zone", "Zone of a TPU that is given by name.", passed=True, advanced=True),
  Flag("--gcp_project", "Project of a TPU that is given by name.", passed=True, advanced=True),
)


def trainer_arguments(
  values: argparse.Namespace, all_flags: Sequence[Flag], *bindings: str
) -> list[str]:
  """The command line of the trainer.

  Args:
    values: of the flags.
    all_flags: of the command.
    *bindings: of gin, which the command makes; they override `--gin_param`.
  """
  found = [a for f in all_flags for a in f.arguments(getattr(values, f.dest))]
  return [*found, *(f"--gin_param={b}" for b in bindings)]


def of_trained_model(values: argparse.Namespace, parser: Parser, *bindings: str) -> list[str]:
  """As `trainer_arguments`, of a command that takes a trained model.

  Without gin files they are those that the model was trained with.
  """
  arguments = trainer_arguments(values, parser.command.flags, *bindings)
  if values.config or values.module_import:
    return arguments
  if not values.model_dir:
    parser.error(
      "no model is given: add --model_dir=DIR, the folder of a training, or --config=FILE, its gin "
      "file"
    )
  path = os.path.join(values.model_dir, OPERATIVE)
  if "://" not in path and not os.path.exists(path):
    what = "is no folder" if not os.path.isdir(values.model_dir) else f"has no {OPERATIVE}"
    parser.error(
      f"--model_dir={values.model_dir} {what}, so it is not known what was trained: give the "
      "folder of a training, or its gin file by --config=FILE"
    )
  return [f"--gin_file={path}", *arguments]
