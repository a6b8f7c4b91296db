"""Checks of bindings: values, contradictions among files, and what a run needs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_settings import hints
from mesh_settings.rules import CALLABLE, Rule, rule_for
from mesh_tensorflow.arguments.declared import declaration
from mesh_tensorflow.errors import ConfigError, LayoutError, MeshError, ShapeError
from mesh_tensorflow.transformer.gin_config import bindings as gin_names
from mesh_tensorflow.transformer.gin_config.bindings import (
  Key,
  Macro,
  Reference,
  Setting,
  Settings,
  did_you_mean,
  parts_of,
  short,
)
from mesh_tensorflow.transformer.gin_config.reader import COMMAND_LINE
from mesh_tensorflow.transformer.model import mesh_setup

_PACKAGE = "mesh_tensorflow"


def is_of_package(selector: str) -> bool:
  """True if a configurable is defined in this package, under whatever module gin registers it."""
  return _is_ours(gin_names.configurable_of(selector)) if _is_known(selector) else False


def whole_effect(selector: str) -> str:
  """Default effect of a configurable's arguments, for those without a declared effect."""
  return _whole(gin_names.configurable_of(selector)) if _is_known(selector) else "model"


def _whole(target: object) -> str:
  # A class of the package is of its base class's kind; one of a user need not be.
  owners = inspect.getmro(target) if inspect.isclass(target) and _is_ours(target) else (target,)
  return next(filter(None, (declaration(o).affects for o in owners)), "model")


def effect_of(selector: str, name: str) -> str:
  """Effect of an argument: "model", "precision", "training" or "report".

  Arguments of a user's class affect the model, except those that it inherits from or passes on to
  constructors which declare them.
  """
  found = _declaring(selector, name)
  if found is None:
    return whole_effect(selector)
  return declaration(found).arguments.get(name) or _whole(found)


def declared_values(selector: str, name: str) -> Rule | None:
  """The declared rule for an argument's values; None if there is none."""
  return declaration(_declaring(selector, name)).values.get(name)


def declared_parameter(selector: str, name: str) -> inspect.Parameter | None:
  """The parameter of a configurable, or of the base class whose constructor declares it."""
  found = _declaring(selector, name)
  return None if found is None else inspect.signature(found).parameters.get(name)


def rule_of_function(target: Callable[..., object], name: str) -> Rule | None:
  """Like `values`, for a class or function instead of a selector."""
  return declaration(inspect.unwrap(target)).values.get(name)


def _declaring(selector: str, name: str) -> Any:
  """The function, or the class in the MRO, that declares the argument; None if there is none."""
  # Gin wraps inherited constructors, too: the last class that has one has written it.
  written = {}
  for owner in _owners(selector):
    function = vars(owner).get("__init__") if inspect.isclass(owner) else owner
    if inspect.isroutine(function):
      written[inspect.unwrap(function)] = owner
  for function, owner in written.items():
    try:
      parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
      continue
    if name in parameters:
      return owner
  return None


def _owners(selector: str) -> Iterator[Any]:
  """Yields a configurable function, or a configurable class and its base classes."""
  if not _is_known(selector):
    return
  configurable = gin_names.configurable_of(selector)
  yield from inspect.getmro(configurable) if inspect.isclass(configurable) else (configurable,)


def _is_known(selector: str) -> bool:
  return bool(gin_names.whole_selectors(selector))


def _is_ours(target: object) -> bool:
  return f"{getattr(target, '__module__', '')}.".startswith(f"{_PACKAGE}.")


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
  return f"included by {s.files[-2]}" if len(s.files) > 1 else hints.as_written("--gin_file")


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


_OURS = "mesh_tensorflow."


def check_settings(settings: Settings) -> None:
  """Raises an error for the first setting whose value its parameter cannot have.

  Args:
    settings: all bindings.

  Raises:
    ConfigError: it names the setting, its value, its place, and what is legal.
  """
  for setting in settings.in_force():
    key = setting.key
    if setting.is_macro or not key[1].startswith(_OURS):
      continue
    value = settings.literal(setting.value)
    if any(True for kind in (Reference, Macro) for _ in parts_of(value, kind)):
      continue  # What gin makes of it is known later.
    parameter = parameter_of(key[1], key[2])
    if parameter is None:
      continue
    declared = declared_values(key[1], key[2])
    place = f"gin: {place_of(settings, setting)}: "
    _check(parameter, value, place, setting.name, declared, exact=key[1] == RUN)
    if key[1:] == (RUN, "mesh_shape"):
      check_mesh_shape(value, place)


def check_arguments(
  owner: str, function: Callable[..., object], given: Mapping[str, object]
) -> None:
  """Raises an error for the first argument of a call that its parameter cannot have.

  Args:
    owner: name of the function, for the error.
    function: for its signature.
    given: arguments by name; others than the function's are left out.

  Raises:
    ConfigError: it names the argument, its value, and what is legal.
  """
  for parameter in inspect.signature(function).parameters.values():
    if parameter.name in given:
      declared = rule_of_function(function, parameter.name)
      name = f"{owner}.{parameter.name}"
      _check(parameter, given[parameter.name], "", name, declared, exact=owner == "run")


def check_mesh_shape(value: object, place: str = "") -> None:
  """Raises an error for a mesh dimension without processors."""
  try:
    shape = mtf.convert_to_shape(value) if isinstance(value, (str, mtf.Shape)) else None
  except MeshError:
    return  # Told with the others of its kind; see `run_checks`.
  for dim in shape or []:
    if dim.size < 1:
      raise ConfigError(
        f"{place}run.mesh_shape = {str(value)!r}: the mesh dimension {dim.name}:{dim.size} has no "
        "processors; its size must be a whole number of at least 1"
      )


def place_of(settings: Settings, setting: Setting) -> str:
  """Source locations of a setting and of the macros in its value."""
  places = [str(setting.place)]
  for macro in parts_of(setting.value, Macro):
    bound = settings.macro(macro.name)
    if bound is not None:
      places.append(f"{macro!r} of {bound.place}")
  return ", ".join(places)


def _check(
  parameter: inspect.Parameter,
  value: object,
  place: str,
  name: str,
  declared: Rule | None,
  exact: bool,
) -> None:
  rule = rule_for(parameter.annotation, parameter.default, declared)
  if rule is None or value is parameter.default or rule.is_legal(value):
    return
  # Sizes and times are often written as 1e5.
  if isinstance(value, float) and value.is_integer() and rule.is_legal(int(value)):
    if not exact:
      return
    hint = f"; write {int(value)}"
  else:
    hint = _hint(value, rule)
  raise ConfigError(f"{place}{name} = {short(value)}: it must be {rule.legal}{hint}")


def _hint(value: object, rule: Rule) -> str:
  """A "did you mean" hint for a text: a similar choice, or a similar function that gin knows."""
  if not isinstance(value, str):
    return ""
  if rule.choices or not rule.legal.startswith(CALLABLE.legal):
    return did_you_mean(value, rule.choices)
  near = [f"@{name}" for name in gin_names.similar_names(value)]
  return hints.hint(near)


def parameter_of(selector: str, argument: str) -> inspect.Parameter | None:
  """The parameter of a configurable; if a class passes it on, that of the base class."""
  try:
    configurable = gin_names.configurable_of(selector)
  except ValueError:
    return None
  for owner in inspect.getmro(configurable) if inspect.isclass(configurable) else [configurable]:
    try:
      found = inspect.signature(owner).parameters.get(argument)
    except (TypeError, ValueError):
      continue
    if found is not None:
      return found
  return None


_TRANSFORMER = "mesh_tensorflow.transformer.transformer"
_LAYERS = "mesh_tensorflow.transformer.transformer_layers"
_LAYER_LISTS = f"{_TRANSFORMER}.make_layer_stack"
_UNITRANSFORMER = f"{_TRANSFORMER}.Unitransformer"
_MODEL_FN = f"{_UTILS}.tpu_estimator_model_fn"
# What decodes if nothing else is bound.
_DECODE = Reference("decode_from_file", False, "", f"{_UTILS}.decode_from_file")

_LOG = logging.getLogger("mesh_tensorflow")

# The gin scopes in which a model type makes its layers, and the feature that each is for.
_SCOPES = {
  "bitransformer": {"encoder": "inputs", "decoder": "targets"},
  "lm": {"": "targets"},
  "aligned": {"": "inputs"},
}
# The parameters of layers that are sizes of dimensions which a layout may split.
_SIZES = (
  (f"{_LAYERS}.DenseReluDense", "hidden_size", "d_ff"),
  (f"{_LAYERS}.SelfAttention", "num_heads", "heads"),
  ("mesh_tensorflow.transformer.moe.MoE1D", "num_experts", "experts"),
)
# What the trainer gives to the functions that make data sets.
_GIVEN = {"sequence_length", "vocabulary", "dataset_split", "skip", "batch_size", "shuffle"}


def check_run(settings: Settings) -> None:
  """Raises an error that names the places if the bindings of `run` cannot work together.

  Args:
    settings: all bindings.

  Raises:
    ConfigError: a value that its parameter cannot have, a required parameter is not bound, or a
      layer list is for another model type.
    LayoutError: layout rules and mesh shape do not fit, or a size cannot be split.
    ShapeError: sequences longer than the table of positions.
  """
  check_settings(settings)
  run = _Run(settings)
  run.check_required()
  run.check_layer_lists()
  run.check_mesh()
  run.check_lengths()
  run.check_sizes()


class _Run:
  def __init__(self, settings: Settings):
    self._settings = settings
    self._model_type, self._model_type_place = self._literal("model_type", "bitransformer")
    self._scopes = _SCOPES.get(self._model_type, {})

  def _bound(self, argument: str) -> Setting | None:
    return self._settings.exact(("", RUN, argument))

  def _literal(self, argument: str, default: object = None) -> tuple[Any, str]:
    """The value of an argument of `run`, and where it is bound."""
    bound = self._bound(argument)
    if bound is None:
      return default, "default of run"
    return self._settings.literal(bound.value), self._place(bound)

  def _place(self, setting: Setting) -> str:
    return place_of(self._settings, setting)

  # ------------------------------------------------------- required parameters

  def check_required(self) -> None:
    """Checks that the functions which gin will call have their required arguments bound."""
    mode, _ = self._literal("mode", "train")
    for bound in self._settings.in_force():
      key = bound.key
      if key[:2] != ("", RUN):
        continue
      value = self._settings.literal(bound.value)
      for reference in parts_of(value, Reference):
        if reference.evaluate:
          self._check_call(reference, bound, frozenset(), ())
        elif (mode, key[2]) in (("train", "train_dataset_fn"), ("eval", "eval_dataset_fn")):
          self._check_call(reference, bound, frozenset(_GIVEN), ())
    if mode == "infer" and not self._has_prompts():
      decode = self._settings.find("", f"{_UTILS}.infer_model", "decode_fn")
      value = self._settings.literal(decode.value) if decode else _DECODE
      user = decode or self._bound("mode")
      if user is not None:  # Bound it is: the default is "train".
        for reference in parts_of(value, Reference):
          self._check_call(reference, user, frozenset(_GIVEN), ())

  def _has_prompts(self) -> bool:
    """True if the mode "infer" has prompts that do not come from a file."""
    names = ("prompt", "interactive")
    found = [self._settings.find("", f"{_UTILS}.sample", name) for name in names]
    return any(self._settings.literal(bound.value) for bound in found if bound is not None)

  def _check_call(
    self, reference: Reference, user: Setting, given: frozenset[str], within: tuple[str, ...]
  ) -> None:
    if not reference.selector or reference.selector in within:
      return
    if inspect.isclass(gin_names.configurable_of(reference.selector)):
      return  # A class takes the bindings of its base classes, too.
    within_scope = "/".join(p for p in (reference.scope, reference.selector) if p)
    for name in gin_names.required_parameters(reference.selector):
      if name in given or self._settings.find(reference.scope, reference.selector, name):
        continue
      if name in gin.get_bindings(within_scope, resolve_references=False):
        continue  # Python code has bound it.
      short_name = reference.name.split("/")[-1].removeprefix("mesh_tensorflow.transformer.")
      hint = f'bind it, such as --gin_param="{short_name}.{name} = ..."'
      if reference.selector.endswith("utils.tpu_mesh_shape"):
        hint = f"give a layout file, such as --gin_file=layouts/cpu_1.gin, or {hint}"
      raise ConfigError(
        f"gin: {user.place}: {user.name} = {short(user.value)} needs {short_name}.{name}, which "
        f"nothing binds; {hint}"
      )
    for name in gin_names.parameters(reference.selector):
      inner = self._settings.find(reference.scope, reference.selector, name)
      if inner is not None and name not in given:
        for other in parts_of(self._settings.literal(inner.value), Reference):
          if other.evaluate:
            self._check_call(other, inner, frozenset(), (*within, reference.selector))

  # --------------------------------------------------------------- model type

  def check_layer_lists(self) -> None:
    """Checks that no given file lists layers for another model type than that of the run."""
    if not self._scopes:
      return
    for bound in self._settings.in_force():
      scope, selector, argument = bound.key
      if (selector, argument) != (_LAYER_LISTS, "layers") or bound.level == 0 or bound.is_of_a_run:
        continue
      if scope in self._scopes or (scope == "" and not self._all_bound_elsewhere(bound)):
        continue
      if self._is_of_several_types(bound):
        continue
      what = f"of the {scope}" if scope else "without a scope"
      uses = " and ".join(f"{s}/" if s else "no scope" for s in self._scopes)
      raise ConfigError(
        f"gin: {bound.place} lists the layers {what}, but model_type {self._model_type!r} "
        f"({self._model_type_place}) takes those of {uses}: they would not be used"
      )

  def _is_of_several_types(self, bound: Setting) -> bool:
    """True if the source of a layer list (as defaults.gin) also has one for this model type."""
    return any(
      s.level == bound.level and s.key in [(scope, *bound.key[1:]) for scope in self._scopes]
      for s in self._settings.all
    )

  def _all_bound_elsewhere(self, bound: Setting) -> bool:
    """True if every scope of the model binds a layer list of its own, which takes precedence."""
    return all(self._settings.exact((s, _LAYER_LISTS, "layers")) for s in self._scopes)

  # ------------------------------------------------------------- mesh and layout

  def check_mesh(self) -> None:
    """Checks that layout rules name mesh dimensions; warns of a mesh dimension without a rule."""
    shape, rules = self._mesh_and_layout()
    if shape is None or rules is None:
      return
    shape_place, rules_place = self._literal("mesh_shape")[1], self._literal("layout_rules")[1]
    for tensor_name, mesh_name in rules.check_mesh(shape):
      if mesh_name in mesh_setup.STANDARD_MESH_NAMES:
        continue
      names = shape.dimension_names
      raise LayoutError(
        f"gin: layout rule {tensor_name}:{mesh_name} ({rules_place}): the mesh {_mesh_text(shape)} "
        f"({shape_place}) has no dimension {mesh_name!r}; it has {', '.join(names) or 'none'}"
        f"{did_you_mean(mesh_name, names)}"
      )
    for dim in shape:
      if dim.size > 1 and dim.name not in [mesh_name for _, mesh_name in rules.pairs]:
        _LOG.warning(
          "gin: mesh dimension %s:%d (%s) splits nothing, as no layout rule names it (%s): the "
          "processors along it do the same work%s",
          *(dim.name, dim.size, shape_place, rules_place),
          did_you_mean(dim.name, [m for _, m in rules.check_mesh(shape)]),
        )
    outer = self._settings.find("", _MODEL_FN, "outer_batch_size")
    size = self._settings.literal(outer.value) if outer else 1
    if isinstance(size, int):
      where = str(outer.place) if outer else "default"
      self._check_split("outer_batch", size, where, "tpu_estimator_model_fn.outer_batch_size")

  def _mesh_and_layout(self) -> tuple[Any, Any]:
    """The mesh shape and the layout rules, None for what is no text."""
    made = []
    for argument, convert in (
      ("mesh_shape", mtf.convert_to_shape),
      ("layout_rules", mtf.convert_to_layout_rules),
    ):
      value, place = self._literal(argument)
      try:
        is_text = isinstance(value, str) and not mesh_setup.is_auto(value)
        made.append(convert(value) if is_text else None)
      except MeshError as e:
        raise type(e)(f"gin: {place}: run.{argument} = {value!r}: {e}") from e
    return made[0], made[1]

  def _check_split(self, name: str, size: int, place: str, what: str) -> None:
    """Raises if a layout rule splits a dimension of this size into unequal parts."""
    shape, rules = self._mesh_and_layout()
    if shape is None or rules is None:
      return
    parts = mtf.tensor_dim_to_mesh_dim_size(rules, shape, mtf.Dimension(name, size))
    axis = next((m for t, m in rules.pairs if t == name), None)
    if size % parts and (name, axis) not in rules.uneven:
      raise LayoutError(
        f"gin: {name}:{size} ({what}, {place}) cannot be split over mesh dimension "
        f"{axis}:{parts} (run.mesh_shape, {self._literal('mesh_shape')[1]}) as the layout rule "
        f"{name}:{axis} says ({self._literal('layout_rules')[1]}): {parts} does not divide {size}; "
        f"the rule {name}:{axis}~ splits it all the same"
      )

  # -------------------------------------------------------------------- sizes

  def check_lengths(self) -> None:
    """Checks that no sequence is longer than the table of learned positions."""
    lengths, place = self._literal("sequence_length")
    if isinstance(lengths, int):
      lengths = {"inputs": lengths, "targets": lengths}
    if not isinstance(lengths, dict):
      return
    for scope, feature in self._scopes.items():
      table = self._settings.find(scope, _UNITRANSFORMER, "max_length")
      learned = self._settings.find(scope, _UNITRANSFORMER, "positional_embedding")
      if table is None:
        continue
      longest = self._settings.literal(table.value)
      length = lengths.get(feature)
      if learned is not None and not self._settings.literal(learned.value):
        continue
      if isinstance(longest, int) and isinstance(length, int) and length > longest:
        raise ShapeError(
          f"gin: run.sequence_length has {feature} of length={length} ({place}), more than the "
          f"learned positions of Unitransformer.max_length={longest} ({self._place(table)}); bind "
          "a smaller run.sequence_length or, before training (it is a size of the weights), "
          f"Unitransformer.max_length = {length}"
        )

  def check_sizes(self) -> None:
    """Checks that mesh dimensions divide the sizes that the layout splits over them."""
    batch, place = self._literal("batch_size")
    if isinstance(batch, (list, tuple)) and len(batch) == 2 and batch[0] == "sequences_per_batch":
      batch = batch[1]
    if isinstance(batch, int) and not self._settings.find("", _MODEL_FN, "outer_batch_size"):
      self._check_split("batch", batch, place, "run.batch_size")
    for scope in self._scopes:
      model_dim = self._settings.find(scope, _UNITRANSFORMER, "d_model")
      if model_dim is not None:
        self._check_size(model_dim, "d_model")
      for layer in self._layers(scope):
        for owner, argument, name in _SIZES:
          if not _is_subclass(layer.selector, owner):
            continue
          around = f"{scope}/{layer.scope}".strip("/")
          find = self._settings.find
          if name == "heads" and find(around, owner, "num_memory_heads"):
            continue  # The dimensions of its heads have other names.
          bound = find(around, layer.selector, argument) or find(around, owner, argument)
          if bound is not None:
            self._check_size(bound, name)

  def _check_size(self, bound: Setting, name: str) -> None:
    size = self._settings.literal(bound.value)
    if isinstance(size, int) and size > 0:
      self._check_split(name, size, self._place(bound), bound.name)

  def _layers(self, scope: str) -> list[Reference]:
    """The layers of the model in a scope, each once."""
    bound = self._settings.find(scope, _LAYER_LISTS, "layers")
    if bound is None:
      return []
    return list(dict.fromkeys(parts_of(self._settings.literal(bound.value), Reference)))


def _mesh_text(shape: mtf.Shape) -> str:
  return ",".join(f"{d.name}:{d.size}" for d in shape) or "of one device"


def _is_subclass(selector: str, owner: str) -> bool:
  if not selector:
    return False
  try:
    layer, base = gin_names.configurable_of(selector), gin_names.configurable_of(owner)
  except ValueError:  # The module of the owner is not imported: then no layer is one.
    return False
  return inspect.isclass(layer) and issubclass(layer, base)
