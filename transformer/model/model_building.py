"""From settings to a model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.run import MODEL_TYPES as MODEL_TYPES
from mesh_settings.run import PAIRED as PAIRED
from mesh_tensorflow.arguments.declared import Rule, affects, takes
from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.numerics.precision import faster
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.transformer.model.bitransformer import Bitransformer, make_bitransformer
from mesh_tensorflow.transformer.model.layer_stack import make_layer_stack
from mesh_tensorflow.transformer.model.student_teacher import (
  StudentTeacher,
  make_bi_student_teacher,
)
from mesh_tensorflow.transformer.model.unitransformer import Unitransformer

_LOG = logging.getLogger("mesh_tensorflow")

# What `build_model` builds.
Model: TypeAlias = Unitransformer | Bitransformer | StudentTeacher


def _is_floating(x: object) -> bool:
  try:
    return bool(tf.as_dtype(x).is_floating)
  except TypeError:
    return False


_DTYPES = ("float32", "bfloat16", "float16", "float64")
_DTYPE = Rule(f"one of {', '.join(map(repr, _DTYPES))}, or such a tf.DType", _is_floating, _DTYPES)


@gin.configurable(module="mesh_tensorflow.transformer.utils")
@affects("report")
@takes(master_dtype=_DTYPE, slice_dtype=_DTYPE, activation_dtype=_DTYPE)
def get_variable_dtype(
  master_dtype: DTypeLike = tf.bfloat16,
  slice_dtype: DTypeLike = tf.float32,
  activation_dtype: DTypeLike = tf.float32,
) -> mtf.VariableDType:
  """The dtypes of the model's variables: in checkpoints, in training, in computations."""
  return mtf.VariableDType(
    tf.as_dtype(master_dtype), tf.as_dtype(slice_dtype), tf.as_dtype(activation_dtype)
  )


def dtype_of_precision(precision: str | None) -> mtf.VariableDType:
  """The dtypes of variables for `run.precision`.

  Args:
    precision: "float32", "bfloat16", "float16", "auto"; None: what `get_variable_dtype` says.
  """
  if precision is None:
    dtype: mtf.VariableDType = get_variable_dtype()
    return dtype
  if precision == "auto":
    precision = by_chief(faster)  # All workers compute in one.
    _LOG.info("run.precision = 'auto': %s is computed faster here", precision)
  return mtf.VariableDType(tf.float32, tf.float32, tf.as_dtype(precision))


def build_model(
  model_type: str = "bitransformer",
  input_vocab_size: int = gin.REQUIRED,
  output_vocab_size: int = gin.REQUIRED,
  layout_rules: LayoutLike | None = None,
  mesh_shape: ShapeLike | None = None,
) -> Any:
  """Builds the model that `model_type` names.

  Args:
    model_type: "bitransformer": an encoder-decoder; "bi_student_teacher": one that learns from
      another; "lm": a language model of targets; "delimited_lm": of inputs and targets, joined;
      "aligned": targets as long as inputs, not autoregressive.
    input_vocab_size: number of input ids.
    output_vocab_size: number of output ids.
    layout_rules: layout rules.
    mesh_shape: mesh shape.

  Returns:
    A `Unitransformer`, `Bitransformer` or `StudentTeacher`.

  Raises:
    ConfigError: an unknown model type.
  """
  if model_type in ("lm", "delimited_lm", "aligned"):
    return Unitransformer(
      autoregressive=model_type != "aligned",
      layer_stack=make_layer_stack(),
      input_vocab_size=input_vocab_size,
      output_vocab_size=output_vocab_size,
      mesh_shape=mesh_shape,
      layout=layout_rules,
    )
  if model_type not in MODEL_TYPES:
    known = ", ".join(map(repr, MODEL_TYPES))
    raise ConfigError(f"unknown model_type {model_type!r}; use one of {known}")
  makers: dict[str, Callable[..., Any]] = {
    "bitransformer": make_bitransformer,
    "bi_student_teacher": make_bi_student_teacher,
  }
  return makers[model_type](
    input_vocab_size=input_vocab_size,
    output_vocab_size=output_vocab_size,
    mesh_shape=mesh_shape,
    layout=layout_rules,
  )
