"""Text that others wrote: read, or refused by one kind of error, in bounds."""

from __future__ import annotations

import ast
import json
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import pytest

from mesh_tensorflow.environment import untrusted_files
from mesh_transformer_cli import untrusted
from tests.house import floors

VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=20,
)  # fmt: skip


@hypothesis.given(VALUES)
def test_json_comes_back(value):
  text = json.dumps(value)
  assert untrusted.parse(text) == value
  assert untrusted.parse(text.encode()) == value
  assert untrusted.expect(untrusted.parse(text), object) == value


@hypothesis.given(VALUES, st.data())
def test_mutated_json_is_read_or_refused(value, data):
  text = json.dumps(value).encode()
  at = data.draw(st.integers(0, len(text)))
  until = data.draw(st.integers(at, len(text)))
  put = data.draw(
    st.binary(max_size=4) | st.sampled_from([b"[" * 5000, b"1e999", b"NaN", b"9" * 5000])
  )
  try:
    untrusted.parse(text[:at] + put + text[until:])
  except untrusted.JsonError as e:
    assert len(str(e)) < 400 and "\n" not in str(e)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("[" * 100_000, "more than 100 deep"),
    ("[" * 101 + "]" * 101, "more than 100 deep"),
    ('{"a":' * 100_000, "more than 100 deep"),
    ("1e999", "1e999 is too large"),
    ("[NaN]", "NaN is no number"),
    ("-Infinity", "Infinity is no number"),
    ("9" * 5000, "Exceeds the limit"),
    ("9" * 400, "too large"),
    (b"\xff\xfe\xff", "codec can't decode"),
    ('"\\ud800"', "half a pair"),
    ("[" + "1," * 1_000_001 + "1]", "values, and at most 1,000,000 are read"),
    ("", "Expecting value"),
  ],
)
def test_what_is_refused(text, message):
  with pytest.raises(untrusted.JsonError, match=message):
    untrusted.parse(text)


def test_what_is_not_refused():
  assert untrusted.parse("[" * 100 + "]" * 100)
  assert untrusted.parse("[1e999]", finite=False) == [float("inf")]
  assert untrusted.parse("9" * 400, finite=False) == int("9" * 400)
  assert untrusted.parse("9" * 300) == int("9" * 300)
  assert untrusted.parse('"\\ud83d\\ude00"') == "\U0001f600"
  assert untrusted.parse('"\\ud800"', surrogates=True) == "\ud800"
  text = ",[{" * 1_000_000
  assert untrusted.parse(json.dumps(text)) == text


def test_values_are_counted_in_time_and_memory_of_the_text():
  commas = "," * 1_000_001
  with pytest.raises(untrusted.JsonError, match="Unterminated string"):
    untrusted.parse('["' + '\\"' * 500_000 + commas)
  with pytest.raises(untrusted.JsonError, match="Unterminated string"):
    untrusted.parse('["' + commas + "\\")
  text = '{"a":["b",' * 340_000
  tracemalloc.start()
  try:
    with pytest.raises(untrusted.JsonError, match="it has 1,020,000 values"):
      untrusted.parse(text)
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert peak < 1 << 20


SHAPE = {"files": [{"file": str, "bytes": int}], "more?": (float, None), "names?": {str: str}}


@pytest.mark.parametrize(
  ("value", "message"),
  [
    ([], "it must be an object, got list of 0"),
    ({}, "key 'files' is missing"),
    ({"files": None}, "key 'files' must be a list, got null"),
    ({"files": [{"file": 7, "bytes": 1}]}, r"key 'files\[0\].file' must be text, got int 7"),
    ({"files": [{"file": "", "bytes": True}]}, "must be a whole number, got bool True"),
    ({"files": [{"file": "", "bytes": 1.0}]}, "must be a whole number, got float 1.0"),
    ({"files": [], "more": "1"}, "key 'more' must be a number or null, got str '1'"),
    ({"files": [], "names": {"a": 10**5000}}, "key 'names.a' must be text, got int of 16610 bits"),
  ],
)
def test_wrong_forms(value, message):
  with pytest.raises(untrusted.JsonError, match=message):
    untrusted.expect(value, SHAPE)
  right = {"files": [{"file": "a", "bytes": 1, "other": 2}], "more": 1, "names": {"a": "b"}}
  assert untrusted.expect(right, SHAPE) is right


def test_files_are_read_in_bounds(tmp_path):
  path = tmp_path / "a.json"
  path.write_text('{"a": 1}')
  assert untrusted_files.read_json(path, {"a": int}) == {"a": 1}
  with pytest.raises(untrusted.JsonError, match="key 'b' is missing"):
    untrusted_files.read_json(path, {"b": int})
  with pytest.raises(untrusted.JsonError, match="more than 4 bytes"):
    untrusted_files.read_json(path, most=4)


# Arguments of `json.loads` that this program, or another worker of it, has just written.
OWN = (
  "json.dumps(",
  "texts.gather_texts(",
  "x)) for x in texts.gather_texts(",
  "x)",
  "said[",
  "sys.argv[1]",
)


def test_json_of_files_is_read_in_one_place():
  found = set()
  for module, text in floors.sources().items():
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.load", "json.loads"):
        call = ast.unparse(node)
        if not any(call.startswith(f"json.loads({own}") for own in OWN):
          found.add(f"{module}:{node.lineno}: {call}")
  assert not found, "\n".join(sorted(found))
