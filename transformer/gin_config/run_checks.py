"""Checks of the bindings of `run` together: contradictions that would show late, or never."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError, LayoutError, MeshError, ShapeError
from mesh_tensorflow.transformer.gin_config import names as gin_names
from mesh_tensorflow.transformer.gin_config import value_checks
from mesh_tensorflow.transformer.gin_config.contradictions import RUN
from mesh_tensorflow.transformer.gin_config.names import Reference, did_you_mean
from mesh_tensorflow.transformer.gin_config.settings import Setting, Settings, parts_of, short
from mesh_tensorflow.transformer.meshes import mesh_setup

_TRANSFORMER = "mesh_tensorflow.transformer.transformer"
_LAYERS = "mesh_tensorflow.transformer.transformer_layers"
_LAYER_LISTS = f"{_TRANSFORMER}.make_layer_stack"
_UNITRANSFORMER = f"{_TRANSFORMER}.Unitransformer"
_UTILS = "mesh_tensorflow.transformer.utils"
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
  value_checks.check_settings(settings)
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

  def _literal(self, argument: str, default: Any = None) -> tuple[Any, str]:
    """The value of an argument of `run`, and where it is bound."""
    bound = self._bound(argument)
    if bound is None:
      return default, "default of run"
    return self._settings.literal(bound.value), self._place(bound)

  def _place(self, setting: Setting) -> str:
    return value_checks.place_of(self._settings, setting)

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
    if size % parts:
      axis = next(m for t, m in rules.pairs if t == name)
      raise LayoutError(
        f"gin: {name}:{size} ({what}, {place}) cannot be split over mesh dimension "
        f"{axis}:{parts} (run.mesh_shape, {self._literal('mesh_shape')[1]}) as the layout rule "
        f"{name}:{axis} says ({self._literal('layout_rules')[1]}): {parts} does not divide {size}"
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
