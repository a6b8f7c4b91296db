"""Gin files and flags: parsing, and errors that say what would be right."""

from __future__ import annotations

import difflib
import os
import re

import gin
from absl import flags

from mesh_tensorflow.errors import ConfigError, MeshError
from mesh_tensorflow.transformer.gin_paths import gin_dir

FLAGS = flags.FLAGS


def _define_flags() -> None:
  try:
    flags.DEFINE_multi_string(
      "gin_file", None, "Gin file, in the working folder or among the package's (repeatable)."
    )
    flags.DEFINE_multi_string(
      "gin_param", None, "One gin binding, such as 'run.train_steps = 100' (repeatable)."
    )
    flags.DEFINE_list(
      "gin_location_prefix", [], "Folders to look for gin files in, separated by commas."
    )
  except flags.DuplicateFlagError:
    # Another library of the same lineage has defined them, with the same meaning.
    pass


_define_flags()


def parse_gin_defaults_and_flags(skip_unknown: bool = False, finalize_config: bool = True) -> None:
  """Parses defaults.gin, then `--gin_file` in order, then `--gin_param`.

  Args:
    skip_unknown: whether bindings of unknown configurables are skipped; or a list of
      their names.
    finalize_config: whether the configuration is locked afterwards.

  Raises:
    ConfigError: a file is missing, or a binding is wrong.
  """
  parse_gin(
    FLAGS.gin_file or [],
    FLAGS.gin_param or [],
    FLAGS.gin_location_prefix or [],
    skip_unknown=skip_unknown,
    finalize_config=finalize_config,
  )


def parse_gin(
  files: list[str],
  bindings: list[str],
  search_paths: list[str] | tuple[str, ...] = (),
  skip_unknown: bool = False,
  finalize_config: bool = True,
) -> None:
  """Parses defaults.gin, then files, then bindings; later ones win.

  Args:
    files: names of gin files; in the working folder, in a search path, or among those
      of the package ("models/lm_base.gin").
    bindings: gin bindings.
    search_paths: folders.
    skip_unknown: see `parse_gin_defaults_and_flags`.
    finalize_config: likewise.

  Raises:
    ConfigError: a file is missing, or a binding is wrong.
  """
  folders = [*search_paths, gin_dir()]
  for folder in folders:
    gin.add_config_file_search_path(folder)
  # Gin looks for a file too, but logs an error for each folder that does not have it.
  files = [_find_file(name, ["", *folders]) for name in files]
  with_context(
    lambda: gin.parse_config_file(
      os.path.join(gin_dir(), "defaults.gin"), skip_unknown=skip_unknown
    )
  )
  with_context(
    lambda: gin.parse_config_files_and_bindings(
      files, bindings, skip_unknown=skip_unknown, finalize_config=finalize_config
    )
  )


def with_context(parse):
  """Calls `parse()`, turning gin's errors into a `ConfigError` that suggests names."""
  try:
    return parse()
  except MeshError:
    raise
  except (ValueError, TypeError, SyntaxError, RuntimeError, OSError) as e:
    raise ConfigError(_explain(e)) from e


def _find_file(name: str, folders: list[str]) -> str:
  for folder in folders:
    path = os.path.join(folder, name)
    if os.path.isfile(path):
      return path
    if os.path.isdir(path):
      raise ConfigError(f"--gin_file {name} is a folder; give one of the files in it")
  known = sorted(
    os.path.relpath(os.path.join(d, f), gin_dir())
    for d, _, names in os.walk(gin_dir())
    for f in names
    if f.endswith(".gin")
  )
  close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
  hint = f"; did you mean {', '.join(close)}?" if close else ""
  looked = ", ".join(f or "the working folder" for f in folders)
  raise ConfigError(f"gin file {name!r} was not found in {looked}{hint}")


def _explain(error: Exception) -> str:
  """Gin's message in one line, with names that resemble an unknown one."""
  text = " ".join(str(error).split())
  unknown = re.search(r"No configurable matching (?:reference )?'@?([^']*)'", text)
  if unknown:
    name = unknown.group(1).split("/")[-1]
    candidates = {}
    for selector in _selectors():
      for suffix in _suffixes(selector):
        candidates.setdefault(suffix, selector)
    close = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.6)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return f"gin: nothing configurable is called {name!r}{hint} [{_where(text)}]"
  no_argument = re.search(r"'([\w./]+)' doesn't have a parameter named '(\w+)'", text)
  if no_argument:
    return f"gin: {no_argument.group(1)} has no parameter {no_argument.group(2)!r} [{_where(text)}]"
  return f"gin: {text}"


def _where(text: str) -> str:
  found = re.search(r"In file \"([^\"]*)\", line (\d+)", text) or re.search(
    r"In bindings string line (\d+)", text
  )
  if not found:
    return "in a binding"
  return f"{found.group(1)}:{found.group(2)}" if found.lastindex == 2 else "--gin_param"


def _suffixes(selector: str) -> list[str]:
  parts = selector.split(".")
  return [".".join(parts[-n:]) for n in (1, 2)]


def _selectors() -> list[str]:
  # Gin has no public list of what is configurable; without it there are no suggestions.
  registry = getattr(gin.config, "_REGISTRY", None)
  return [] if registry is None else [selector for selector, _ in registry.items()]
