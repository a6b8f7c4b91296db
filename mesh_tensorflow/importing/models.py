"""A function for arguments of certain shapes: traced, its axes followed and named."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.kinds import shown
from mesh_tensorflow.errors import ArgumentError, ShapeError
from mesh_tensorflow.importing import families  # noqa: F401 - it registers rules
from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.building import Dimensioned, full_shape
from mesh_tensorflow.importing.naming import (
  OwnNames,
  Places,
  callable_of,
  give_names,
  name_factors,
  named_leaves,
  parameter_names,
  variable_paths,
)
from mesh_tensorflow.importing.nodes import Program, Wire
from mesh_tensorflow.importing.replicating import relate_program
from mesh_tensorflow.importing.tracing import Result, Traced, trace
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor
from mesh_tensorflow.running.function import TensorSpec


@dataclasses.dataclass(frozen=True)
class Model:
  """A function, traced for arguments of certain shapes, with dimensions."""

  traced: Traced
  places: Places
  dimensioned: Dimensioned
  arguments: tuple[Wire, ...]


def make_model(
  original: Any,
  title: str,
  specs: list[Any],
  dims: Mapping[str, Sequence[str | None]],
  fallback: bool,
) -> Model:
  """Traces a function, follows its axes and names them.

  Args:
    original: what the user gave.
    title: its name, for messages.
    specs: for each argument a structure of tf.TensorSpec, `mtf.TensorSpec`, Python values.
    dims: names of the axes of arguments, results and variables; see `mtf.from_tensorflow`.
    fallback: whether operations without a rule may be computed whole on each device.
  """
  dims = dict(dims)
  names = parameter_names(original, len(specs))
  leaves = [leaf for n, s in zip(names, specs) for leaf in named_leaves(n, s)]
  for name, spec in leaves:
    if isinstance(spec, TensorSpec):
      dims.setdefault(name, spec.shape.dimension_names)
  if not any(is_tensor(spec) for _, spec in leaves):
    raise ArgumentError(
      f"from_tensorflow: the input_signature of {title} has a tf.TensorSpec, or an mtf.TensorSpec, "
      f"for each tensor; got {shown(specs)}"
    )
  _check_binding(title, original, specs)
  tf_specs = tf.nest.map_structure(_tf_spec, specs)
  _check_static(title, [(n, s) for (n, _), s in zip(leaves, tf.nest.flatten(tf_specs))])
  own = OwnNames(original)
  paths = variable_paths(original, own)
  traced = trace(callable_of(original), tf_specs, {}, paths, fallback, own.of)
  tensors = [(n, s) for n, s in leaves if is_tensor(s)]
  arguments = traced.program.inputs
  for (name, _), wire in zip(tensors, arguments):
    wire.name = name
  results = {
    name: traced.program.outputs[leaf.number]
    for name, leaf in named_leaves("output", traced.structure)
    if isinstance(leaf, Result)
  }
  places = Places(
    {n: w for (n, _), w in zip(tensors, arguments)},
    results,
    {w.variable.path: w for w in traced.program.wires if w.variable is not None},
  )
  return Model(traced, places, _dimensioned(traced.program, places, dims), arguments)


def _dimensioned(
  program: Program, places: Places, dims: Mapping[str, Sequence[str | None]]
) -> Dimensioned:
  """Follows the axes through a program, and names them."""
  axes = Axes()
  for wire in (*places.variables.values(), *places.arguments.values()):
    axes.add(wire, pinned=True)
  give_names(axes, places, dims)
  relate_program(program, axes)
  named = name_factors(axes, program, places)
  dimensioned = Dimensioned(axes, named, {})
  given = {path: names for p, names in dims.items() for path in places.matching(p)}
  variables = {}
  for path, wire in places.variables.items():
    assert wire.variable is not None
    shape = full_shape(dimensioned.of(wire))
    names = given.get(path, [None] * wire.rank)
    # A name that the user gave to an axis of size 1 joins nothing, but it is shown.
    variables[wire.variable] = Shape(
      [Dimension(n or d.name, 1) if d.size == 1 else d for d, n in zip(shape, names)]
    )
  return Dimensioned(axes, named, variables)


def is_tensor(x: object) -> bool:
  """True if it is a tensor, or the specification of one."""
  return isinstance(x, (Tensor, TensorSpec, tf.TensorSpec)) or tf.is_tensor(x)


def spec_of(x: object) -> Any:
  """The specification of a tensor or array; Python values as they are."""
  if isinstance(x, Tensor):
    return TensorSpec(x.shape, x.dtype)
  if is_tensor(x) or hasattr(x, "__array__"):
    value = tf.convert_to_tensor(x)
    return tf.TensorSpec(value.shape, value.dtype)
  return x


def _tf_spec(x: object) -> Any:
  if isinstance(x, TensorSpec):
    return tf.TensorSpec(x.shape.to_integer_list, x.dtype)
  return x


def key_of(specs: object) -> str:
  """Cache key of a traced function: arguments of different keys need separate traces."""
  return repr(tf.nest.map_structure(_key, specs))


def _key(x: object) -> Any:
  spec = _tf_spec(x)
  return (str(spec.shape), spec.dtype.name) if isinstance(spec, tf.TensorSpec) else repr(x)


def own_signature(fn: object) -> Sequence[Any] | None:
  """Input signature of a tf.function; None without one, or if a size is unknown."""
  specs = getattr(fn, "input_signature", None)
  if specs is None or not all(s.shape.is_fully_defined() for s in tf.nest.flatten(specs)):
    return None
  return list(specs)


def _check_binding(title: str, original: Any, specs: Sequence[object]) -> None:
  """Raises `ArgumentError` if the function cannot be called with these arguments."""
  try:
    signature = inspect.signature(getattr(original, "call", original))
  except (TypeError, ValueError):
    return  # A function of C.
  try:
    signature.bind(*specs)
  except TypeError as e:
    raise ArgumentError(
      f"from_tensorflow: {title}{signature} cannot be called with the {len(specs)} arguments of "
      f"input_signature: {e}"
    ) from None


def _check_static(name: str, specs: Sequence[tuple[str, object]]) -> None:
  for argument, spec in specs:
    if isinstance(spec, tf.TensorSpec) and not spec.shape.is_fully_defined():
      raise ShapeError(
        f"from_tensorflow: the argument {argument} of {name} has the shape {spec.shape}; on a mesh "
        "all shapes are static: give its sizes in input_signature"
      )
