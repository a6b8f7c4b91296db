"""Gin files that contradict each other or themselves.

A later file overrides an earlier one, and `--gin_param` overrides files: that is how gin is used,
and the operative configuration tells it. What can only be a mistake is an error that names both
places:

  - one file that binds a parameter twice, to different values;
  - a file that includes another after it has bound what that one binds, to another value;
  - a file that is read twice and sets back what was changed in between;
  - two files of one kind: two models, two data sets, two layouts or two schedules;
  - files that say different model types.

A `--gin_param` for the parameter settles it.
"""

from __future__ import annotations

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.gin_config.names import Macro
from mesh_tensorflow.transformer.gin_config.reader import COMMAND_LINE
from mesh_tensorflow.transformer.gin_config.settings import Key, Setting, Settings, parts_of, short

_UTILS = "mesh_tensorflow.transformer.utils"
RUN = f"{_UTILS}.run"
MODEL_TYPE = ("", RUN, "model_type")
_ON_PURPOSE = "to change it on purpose, use --gin_param, or include the one file in the other"

_DATA = (("", RUN, "train_dataset_fn"),)
_LAYOUT = (("", RUN, "mesh_shape"), ("", RUN, "layout_rules"))
_SCHEDULE = (("", RUN, "learning_rate_schedule"),)

# What makes a file one of a kind: the first of these that it binds; and, for the kinds of files
# that hold nothing else, what else they may bind.
_KINDS = (
  ("data set", _DATA, None),
  ("model", (MODEL_TYPE,), None),
  (
    "layout",
    _LAYOUT,
    (f"{_UTILS}.get_variable_dtype", f"{_UTILS}.serialize_num_", f"{_UTILS}.tpu_mesh_shape"),
  ),
  ("learning rate schedule", _SCHEDULE, ("mesh_tensorflow.transformer.learning_rate_schedules.",)),
)


def check_statements(settings: Settings) -> None:
  """Raises `ConfigError` for statements that contradict each other within and across files."""
  of_params = {s.key for s in settings.all if s.place.source in COMMAND_LINE}
  for key in settings.keys():
    if key not in of_params:
      _check_key(settings.history(key))
  _check_kinds(settings, of_params)


def _check_key(history: list[Setting]) -> None:
  """Checks the bindings of one key in their order."""
  in_file: dict[str, Setting] = {}
  in_force: Setting | None = None
  read = set()
  for s in history:
    twice = in_file.get(s.place.source)
    if twice is not None and twice.place != s.place and twice.value != s.value:
      raise ConfigError(
        f"gin: {s.place}: {s.name} = {short(s.value)}, but {twice.place} of the same file binds it "
        f"to {short(twice.value)}; keep one of them"
      )
    if in_force is not None and in_force.value != s.value:
      if in_force.place.source in s.files[:-1]:
        raise ConfigError(
          f"gin: {in_force.place}: {in_force.name} = {short(in_force.value)} has no effect: "
          f"{s.place}, which that file includes afterwards, binds it to {short(s.value)}; write "
          "the include first"
        )
      if s.place in read:
        raise ConfigError(
          f"gin: {s.place}: {s.place.source} is read a second time ({_how(s)}) and would set "
          f"{s.name} back to {short(s.value)}, over {short(in_force.value)} of {in_force.place}; "
          "read it once, before what changes it"
        )
    in_file[s.place.source] = in_force = s
    read.add(s.place)


def _how(s: Setting) -> str:
  return f"included by {s.files[-2]}" if len(s.files) > 1 else "--gin_file"


def _check_kinds(settings: Settings, of_params: set[Key]) -> None:
  """Compares each pair of given files, includes added, for contradictory bindings."""
  given: list[dict[Key, Setting]] = []
  for level in sorted({s.level for s in settings.all if s.level > 0}):
    bound = {s.key: s for s in settings.all if s.level == level}
    first = next(iter(bound.values()))
    if first.place.source not in COMMAND_LINE and not first.is_of_a_run:
      given.append(bound)
  for i, later in enumerate(given):
    for earlier in given[:i]:
      _check_two(earlier, later, of_params)


def _check_two(earlier: dict[Key, Setting], later: dict[Key, Setting], of_params: set[Key]) -> None:
  kind = _kind(earlier)
  both = [k for k in later if k in earlier and k not in of_params]
  different = [k for k in both if later[k].value != earlier[k].value]
  if kind and kind == _kind(later) and different:
    marks = next(m for k, m, _ in _KINDS if k == kind)
    key = next((k for k in marks if k in different), different[0])
    old, new = earlier[key], later[key]
    more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
    raise ConfigError(
      f"gin: two {kind} files: {old.place}: {old.name} = {short(old.value)}, and "
      f"{new.place}: {new.name} = {short(new.value)}{more}; give one of {old.files[0]} and "
      f"{new.files[0]}; {_ON_PURPOSE}"
    )
  if MODEL_TYPE in different:
    old, new = earlier[MODEL_TYPE], later[MODEL_TYPE]
    raise ConfigError(
      f"gin: {old.place} is for model_type {old.value!r}, and {new.place} for {new.value!r}; give "
      f"files of one model type; {_ON_PURPOSE}"
    )


def _kind(bound: dict[Key, Setting]) -> str | None:
  for kind, marks, others in _KINDS:
    if not any(mark in bound for mark in marks):
      continue
    if others is None or all(k in marks or k[1].startswith(others) for k in bound):
      return kind
  return None


def unused_macros(settings: Settings) -> list[Setting]:
  """Macros bound by given files or `--gin_param` that no value uses: misspelt, mostly."""
  used = {m.name for s in settings.all for m in parts_of(s.value, Macro)}
  return [
    s
    for s in settings.in_force()
    if s.is_macro and s.level > 0 and s.scope not in used and not s.is_of_a_run
  ]
