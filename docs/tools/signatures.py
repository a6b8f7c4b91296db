"""Signatures as a reader wants them: annotations as written, functions by their names."""

from __future__ import annotations

import enum
import functools
import inspect
import types
from typing import Any

import gin

_WIDTH = 88


class _Written:
  """Something whose `repr` is a given text."""

  def __init__(self, text: str):
    self._text = text

  def __repr__(self) -> str:
    return self._text


def default_text(value: Any) -> str:
  """A default value in one line, without addresses in memory."""
  if value is gin.REQUIRED:
    return "gin.REQUIRED"
  if isinstance(value, enum.Enum):
    return f"{type(value).__name__}.{value.name}"
  if isinstance(value, functools.partial):
    return f"{default_text(value.func)}(...)"
  if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
    return value.__name__
  if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
    inside = ", ".join(default_text(v) for v in value)
    if isinstance(value, list):
      return f"[{inside}]"
    return f"({inside},)" if len(value) == 1 else f"({inside})"
  text = repr(value)
  if getattr(value, "name", None) and text.startswith(("tf.", "<dtype")):
    return f"tf.{value.name}"
  return f"{type(value).__name__}(...)" if " at 0x" in text else " ".join(text.split())


def signature_of(obj: Any) -> inspect.Signature | None:
  """The signature of a function or of a constructor; None where there is none to be known."""
  try:
    return inspect.signature(obj)
  except (TypeError, ValueError):
    return None


def signature_text(name: str, obj: Any, *, is_method: bool = False) -> str:
  """`name(arguments) -> result`, in several lines where it is long; "" without a signature."""
  signature = signature_of(obj)
  if signature is None:
    return ""
  parameters = list(signature.parameters.values())
  if is_method and parameters and parameters[0].name in ("self", "cls"):
    parameters = parameters[1:]
  parameters = [_readable(p) for p in parameters]
  returns = signature.return_annotation
  end = "" if returns is inspect.Signature.empty else f" -> {_annotation(returns)}"
  text = f"{name}{inspect.Signature(parameters)}{end}"
  if len(text) <= _WIDTH:
    return text
  lines, star = [], False
  for p in parameters:
    if p.kind is p.KEYWORD_ONLY and not star:
      lines.append("  *,")
    star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
    lines.append(f"  {p},")
  return "\n".join([f"{name}(", *lines, f"){end}"])


def _readable(p: inspect.Parameter) -> inspect.Parameter:
  annotation, default = p.annotation, p.default
  if annotation is not p.empty:
    annotation = _Written(_annotation(annotation))
  if default is not p.empty:
    default = _Written(default_text(default))
  return p.replace(annotation=annotation, default=default)


def _annotation(annotation: Any) -> str:
  return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
