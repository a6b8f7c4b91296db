"""Parsing of gin files and flags, in order, with checks; and the operative config."""

from __future__ import annotations

import ast
import functools
import logging
import os
import re
from collections.abc import Callable, Sequence

import gin
from absl import flags

from mesh_tensorflow.environment import collector
from mesh_tensorflow.errors import ConfigError, MeshError
from mesh_tensorflow.training import model_files
from mesh_tensorflow.transformer.gin_config import assignments as gin_assignments
from mesh_tensorflow.transformer.gin_config import bindings as gin_names
from mesh_tensorflow.transformer.gin_config import checks as gin_checks
from mesh_tensorflow.transformer.gin_config import operative as gin_operative
from mesh_tensorflow.transformer.gin_config import reader as gin_reader
from mesh_tensorflow.transformer.gin_config.bindings import Key, Settings, parts_of
from mesh_tensorflow.transformer.gin_config.reader import gin_dir

FLAGS = flags.FLAGS

_LOG = logging.getLogger("mesh_tensorflow")


class _Read:
  """Gin statements and files read by this process; global, as gin's own configuration is."""

  settings = Settings()
  paths: list[str] = []


def _define_flags() -> None:
  try:
    flags.DEFINE_multi_string(
      "gin_file",
      None,
      "Gin file: a path, or one of the package's (models/lm_base.gin, layouts/cpu_2x2.gin, ...). "
      "Repeatable; a later file overrides an earlier one, and all override defaults.gin.",
    )
    flags.DEFINE_multi_string(
      "gin_param",
      None,
      "One gin binding, such as \"run.mode = 'eval'\" or 'd_model = 512' (repeatable). Overrides "
      "the files.",
    )
    flags.DEFINE_list(
      "gin_location_prefix",
      [],
      "Folders to look for gin files in, separated by commas; after the working folder, before the "
      "package's.",
    )
    flags.DEFINE_multi_string(
      gin_reader.SET.lstrip("-"),
      None,
      "One setting as NAME=VALUE (repeatable): a short name (steps=1000, optimizer=AdamW), a macro "
      "of the files (d_model=512), or a whole name. Words need no quotes. Overrides --gin_param.",
    )
  except flags.DuplicateFlagError:
    # Another library of the same lineage has defined them, with the same meaning.
    pass


_define_flags()


def parse_gin_defaults_and_flags(skip_unknown: bool = False, finalize_config: bool = True) -> None:
  """Parses defaults.gin, then `--gin_file` in order, then `--gin_param`, then `--set`.

  Args:
    skip_unknown: whether bindings of unknown configurables are skipped; or a list of
      their names.
    finalize_config: whether the configuration is locked afterwards.

  Raises:
    ConfigError: a file is missing, a binding is wrong, or files contradict each other.
  """
  parse_gin(
    FLAGS.gin_file or [],
    FLAGS.gin_param or [],
    FLAGS.gin_location_prefix or [],
    skip_unknown=skip_unknown,
    finalize_config=finalize_config,
    assignments=FLAGS["set"].value or [] if "set" in FLAGS else [],
  )


@collector.paused()
def parse_gin(
  files: list[str],
  bindings: list[str],
  search_paths: list[str] | tuple[str, ...] = (),
  skip_unknown: bool = False,
  finalize_config: bool = True,
  *,
  assignments: Sequence[str] = (),
) -> None:
  """Parses defaults.gin, then files, then bindings, then assignments; later ones win.

  Everything is read and checked before gin binds the first value.

  Args:
    files: names of gin files; in the working folder, in a search path, or among those
      of the package ("models/lm_base.gin").
    bindings: gin bindings.
    search_paths: folders.
    skip_unknown: see `parse_gin_defaults_and_flags`.
    finalize_config: likewise.
    assignments: as `--set` takes them: "NAME=VALUE", with short names; see `assignments`.

  Raises:
    ConfigError: a file is missing, a binding is wrong, or files contradict each other; the text
      names the file and line, and what would be legal.
  """
  folders = [*search_paths, gin_dir()]
  for folder in folders:
    gin.add_config_file_search_path(folder)
  reader = gin_reader.Reader(["", *folders], skip_unknown)
  reader.read_file(os.path.join(gin_dir(), "defaults.gin"))
  for name in files:
    reader.read_file(name)
  reader.read_bindings(bindings)
  gin_assignments.add(reader, assignments)
  if reader.left_out:
    place, name = reader.left_out[0]
    more = len(reader.left_out) - 1
    _LOG.warning(
      "gin: %s: %s is left out%s: it is for parts of the package t5 that are not here (its "
      "vocabularies, and preprocessors that its own tasks use)",
      place,
      name,
      f", and {more} more" if more else "",
    )
  gin_checks.check_statements(reader.settings)
  if finalize_config:
    _check_macros(reader.settings)
  _warn_of_macros(reader.settings)
  if _was_cleared():
    _Read.settings, _Read.paths = Settings(), []
  for given in reader.statements:
    if isinstance(given, gin_reader.Binding):
      _explained(functools.partial(given.bind, skip_unknown))
    else:
      _explained(functools.partial(gin.parse_config, given, skip_unknown=skip_unknown))
  for setting in reader.settings.all:
    _Read.settings.add(setting)
  _Read.paths = [*_Read.paths, *reader.paths]
  if finalize_config:
    _explained(gin.finalize)


def check_run() -> None:
  """Looks for contradictions among what is bound for `utils.run`, before any work is done.

  Raises:
    ConfigError: a required parameter is not bound, or a layer list is for another model type.
    LayoutError: layout rules and mesh shape do not fit, or a size cannot be split.
    ShapeError: sequences longer than the table of positions.
  """
  gin_checks.check_run(_Read.settings)


def missing_binding(error: RuntimeError) -> ConfigError | None:
  """Converts gin's error about an unbound required parameter to a `ConfigError`; else None."""
  told = re.search(r"Required bindings for `([\w.]+)` not provided in config: (\[.*\])", str(error))
  if told is None:
    return None
  name, parameters = told.group(1), ast.literal_eval(told.group(2))
  bindings = " ".join(f'--gin_param="{name}.{p} = ..."' for p in parameters)
  return ConfigError(f"gin: {name} needs {', '.join(parameters)}, which nothing binds: {bindings}")


def operative_config_str() -> str:
  """The operative configuration as a gin file, with the origin of each value in a comment.

  Values are those of all configurables called so far. The text is valid gin: given back as a
  `--gin_file`, it leads to the same run.
  """
  return gin_operative.operative_config_str(_Read.settings, _Read.paths)


def places_of(keys: list[Key]) -> dict[Key, str]:
  """Describes the origin of each value with which configurables were called so far."""
  return gin_operative.places_of(_Read.settings, keys)


def write_operative_config(model_dir: str | None) -> None:
  """Writes `operative_config_str()` beside the checkpoints, as `operative_config.gin`."""
  if not model_dir:
    return
  path = os.path.join(model_dir, "operative_config.gin")
  model_files.write(model_dir, path, operative_config_str().encode())


def warn_of_unused_scopes() -> None:
  """Warns of bindings in scopes that nothing entered; to be called when the program is built."""
  for s, scopes in gin_operative.bound_in_unused_scopes(_Read.settings):
    _LOG.warning(
      "gin: %s: %s has no effect: this run called it in %s, never in the scope %r%s",
      s.place,
      s.name,
      ", ".join(repr(scope) if scope else "no scope" for scope in sorted(scopes)),
      s.scope,
      gin_names.did_you_mean(s.scope, scopes - {""}),
    )


def _was_cleared() -> bool:
  """True if `gin.clear_config()` was called since the last statements were read."""
  # Checking one setting is enough: gin forgets all at once.
  for setting in _Read.settings.all[:1]:
    try:
      gin.query_parameter(f"{setting.scope}/{setting.selector}.{setting.argument}".lstrip("/"))
    except ValueError:
      return True
  return False


def _check_macros(settings: Settings) -> None:
  """Raises for a macro that a value uses and nothing binds."""
  names = [key[0] for key in settings.keys() if key[1:] == gin_names.MACRO]
  for setting in settings.in_force():
    for macro in parts_of(setting.value, gin_names.Macro):
      if macro.name in names or gin_names.is_constant(macro.name):
        continue
      raise ConfigError(
        f"gin: {setting.place}: {setting.name} = {setting.value!r}: no macro {macro.name!r} is "
        f"bound; write {macro.name} = ... in a file or --gin_param"
        f"{gin_names.did_you_mean(macro.name, names)}"
      )


def _warn_of_macros(settings: Settings) -> None:
  used = {m.name for s in settings.all for m in parts_of(s.value, gin_names.Macro)}
  for s in gin_checks.unused_macros(settings):
    _LOG.warning(
      "gin: %s: no value uses the macro %s%s",
      s.place,
      s.scope,
      gin_names.did_you_mean(s.scope, used),
    )


def _explained(parse: Callable[[], object]) -> None:
  """Calls gin and converts its errors to one-line `ConfigError`s."""
  try:
    parse()
  except MeshError:
    raise
  except (
    *(ValueError, TypeError, SyntaxError, RuntimeError, OSError),
    *(KeyError, NameError, AttributeError),  # Of names, with dynamic registration.
  ) as e:
    raise ConfigError(f"gin: {' '.join(str(e).split())}") from e
