"""Gin settings: read with their source locations, checked, bound, and shown with their origin.

The files, each importing only from those below it:

    model_config   what decides a model: kept with each checkpoint, compared when one is read
    parsing        the face: gin files and flags, in order, checked
    assignments    `--set`
    checks         values, contradictions, and what a run can tell before it begins
    operative      the file that shows every value
    reader         files and command line, with places
    bindings       settings with their places, and the names in them
"""

from mesh_tensorflow.transformer.gin_config.parsing import (
  check_run,
  missing_binding,
  operative_config_str,
  parse_gin,
  parse_gin_defaults_and_flags,
  warn_of_unused_scopes,
  write_operative_config,
)

__all__ = [
  "check_run",
  "missing_binding",
  "operative_config_str",
  "parse_gin",
  "parse_gin_defaults_and_flags",
  "warn_of_unused_scopes",
  "write_operative_config",
]
