"""Careful parsing of untrusted JSON, from files and the environment, without TensorFlow.

`parse` is the only place where such JSON is read: whatever the text is, it returns a value of a
bounded size, or raises `JsonError`. `expect` says which of its values is of a wrong kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Limits of one text: characters (or bytes), values, and nested brackets.
MOST_CHARACTERS = 1 << 28
MOST_VALUES = 1_000_000
DEEPEST = 100

# So long is the longest message of an error about what is read.
LONGEST_MESSAGE = 1000

# A string, or what begins a value. One that is not closed goes to the end: else each quote in it
# would be tried as the beginning of another.
_STRING_OR_BEGIN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[,\[{]', re.DOTALL)
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_WORDS = {
  str: "text",
  int: "a whole number",
  float: "a number",
  bool: "true or false",
  dict: "an object",
  list: "a list",
  type(None): "null",
}


class JsonError(ValueError):
  """A text is no JSON, too large, or of another form than needed; the message is one line."""


def parse(
  text: str | bytes,
  *,
  finite: bool = True,
  surrogates: bool = False,
  values: int = MOST_VALUES,
) -> Any:
  """The value of a text of JSON.

  Args:
    text: any text; bytes in UTF-8, UTF-16 or UTF-32.
    finite: whether NaN, Infinity and numbers beyond float64 (1e999) are refused.
    surrogates: whether halves of a pair of UTF-16 by themselves, which are no text, are taken.
    values: how many values, those within others included, it may have.

  Raises:
    JsonError: it is no JSON, or has too many values, or brackets too deep within each other.
  """
  if len(text) > MOST_CHARACTERS:
    raise JsonError(f"it has {len(text):,} characters, and at most {MOST_CHARACTERS:,} are read")
  try:
    if isinstance(text, (bytes, bytearray)):
      text = text.decode(json.detect_encoding(text))
    _check_count(text, values)
    found = json.loads(text, **(_FINITE if finite else {}))
  except RecursionError:
    raise JsonError(f"its brackets are more than {DEEPEST} deep within each other") from None
  except JsonError:
    raise
  except (ValueError, OverflowError) as e:
    raise JsonError(shortened(str(e), 200)) from None
  _check_depth(found)
  if not surrogates and _has_half_pairs(text, found):
    raise JsonError("it has half a pair of UTF-16 by itself (such as \\ud800), which is no text")
  return found


def _has_half_pairs(text: str, found: object) -> bool:
  if not _ESCAPED.search(text):
    return False
  try:
    # Whole pairs of escapes are one character by now.
    json.dumps(found, ensure_ascii=False).encode()
  except UnicodeEncodeError:
    return True
  return False


def check_size(content: bytes, most: int) -> None:
  """Raises `JsonError` if there are more bytes than that."""
  if len(content) > most:
    raise JsonError(f"it has more than {most:,} bytes")


def _check_count(text: str, most: int) -> None:
  """Raises `JsonError` for more than `most` values, before parsing; strings are skipped."""
  if sum(text.count(c) for c in ",[{") > most:
    count = sum(text[m.start()] != '"' for m in _STRING_OR_BEGIN.finditer(text))
    if count > most:
      raise JsonError(f"it has {count:,} values, and at most {most:,} are read")


def _check_depth(value: object) -> None:
  if is_deep(value):
    raise JsonError(f"its brackets are more than {DEEPEST} deep within each other")


def is_deep(value: object) -> bool:
  """True if dicts, lists and tuples are nested more than `DEEPEST` levels deep."""
  level = [value]
  for _ in range(DEEPEST):
    level = [c for v in level for c in _children(v) if isinstance(c, (dict, list, tuple))]
    if not level:
      return False
  return True


def _children(value: object) -> Any:
  if isinstance(value, dict):
    return value.values()
  return value if isinstance(value, (list, tuple)) else ()


def _finite(text: str) -> float:
  number = float(text)
  if number in (float("inf"), -float("inf")):
    raise JsonError(f"the number {shortened(text, 40)} is too large")
  return number


def _whole(text: str) -> int:
  number = int(text)
  _finite(text)
  return number


def _constant(text: str) -> float:
  raise JsonError(f"{text} is no number of JSON")


_FINITE: dict[str, Any] = {
  "parse_float": _finite,
  "parse_int": _whole,
  "parse_constant": _constant,
}


def expect(value: object, shape: Any) -> Any:
  """The value, if it has a form.

  Args:
    value: as `parse` returns it.
    shape: a type (`int` takes no true and no 1.0, `float` takes whole numbers, too; `object` takes
      anything); `None`, null; a tuple of shapes, any of which will do; `[shape]`, a list of such
      values; `{"key": shape, "key?": shape}`, an object with these keys, those with "?" may be
      missing, and with any others; `{str: shape}`, an object with such values.

  Raises:
    JsonError: it has another form: "key 'file' must be text, got int 7".
  """
  problem = next(_problems(value, shape, ""), None)
  if problem is not None:
    raise JsonError(problem)
  return value


def _problems(value: object, shape: Any, at: str) -> Iterator[str]:
  if isinstance(shape, tuple):
    if all(next(_problems(value, s, at), None) is not None for s in shape):
      yield _wrong(value, at, " or ".join(dict.fromkeys(_word(s) for s in shape)))
  elif isinstance(shape, list):
    if not isinstance(value, list):
      yield _wrong(value, at, _word(shape))
      return
    for i, item in enumerate(value):
      yield from _problems(item, shape[0], f"{at}[{i}]")
  elif isinstance(shape, dict):
    if not isinstance(value, dict):
      yield _wrong(value, at, _word(shape))
      return
    for key, inner in shape.items():
      if key is str:
        for k, item in value.items():
          yield from _problems(item, inner, f"{at}.{k}".lstrip("."))
        continue
      name = key.removesuffix("?")
      place = f"{at}.{name}".lstrip(".")
      if name in value:
        yield from _problems(value[name], inner, place)
      elif name == key:
        yield f"key {place!r} is missing"
  elif not _is_a(value, type(None) if shape is None else shape):
    yield _wrong(value, at, _word(shape))


def _is_a(value: object, kind: Any) -> bool:
  if kind in (int, float) and isinstance(value, bool):
    return False
  return isinstance(value, (int, float) if kind is float else kind)


def _word(shape: object) -> str:
  return _WORDS.get(shape if isinstance(shape, type) else type(shape), "something else")


def _wrong(value: object, at: str, wanted: str) -> str:
  what = f"key {shortened(at, 100)!r}" if at else "it"
  return f"{what} must be {wanted}, got {described(value)}"


def described(value: object) -> str:
  """The class and the value, shortened: "int 7"."""
  kind = type(value).__name__
  if value is None:
    return "null"
  if isinstance(value, (dict, list)):
    return f"{kind} of {len(value)}"
  if isinstance(value, int) and value.bit_length() > 256:
    return f"{kind} of {value.bit_length()} bits"  # Python writes no number of any length.
  return f"{kind} {shortened(repr(value), 60)}"


def shortened(text: str, most: int = LONGEST_MESSAGE) -> str:
  """Shortens a text to at most `most` characters by leaving out its middle."""
  if len(text) <= most:
    return text
  head = (most - 5) * 2 // 3
  return f"{text[:head]} ... {text[len(text) - (most - 5 - head) :]}"
