"""Gin settings: read with their source locations, checked, bound, and shown with their origin.

The rooms, each importing only from those after it: `parsing` (the face), `assignments` (`--set`),
`run_checks` (what a run can tell before it begins), `contradictions`, `operative` (the file that
shows every value), `reader` (files and command line, with places), `settings`, `names`.
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
