"""Files of inputs for the mode "infer": lines of text, or JSON lines, whose texts may be any."""

from __future__ import annotations

import json

from mesh_tensorflow.errors import DataError
from mesh_tensorflow.transformer.data.text_io import get_inputs_from_file
from mesh_tensorflow.transformer.files import text_files
from mesh_transformer_cli import untrusted

# Under which a JSON object may have its text.
_KEYS = ("prompt", "inputs", "text")


def is_json_lines(filename: str) -> bool:
  """True if a file name ends in .jsonl or .ndjson, with or without .gz."""
  return filename.removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def read_prompts(filename: str) -> list[str]:
  """The inputs of a file: of JSON lines each text as it is, else see `get_inputs_from_file`.

  Args:
    filename: a text file. In JSON lines each line is a text, or an object with a text under
      "prompt", "inputs" or "text".

  Raises:
    DataError: the file cannot be read, or is empty, or has a line that is not JSON.
  """
  if not is_json_lines(filename):
    return get_inputs_from_file(filename)
  try:
    lines = text_files.read_text_file(filename, "utf-8").text.split("\n")
  except DataError as e:
    raise DataError(f"the input file {filename!r} cannot be read: {e}") from e
  return [_text_of(line, f"{filename}:{i}") for i, line in enumerate(lines, 1) if line.strip()]


def _text_of(line: str, place: str) -> str:
  try:
    value = untrusted.parse(line)
  except ValueError as e:
    raise DataError(f"{place} is not JSON: {e}") from e
  if isinstance(value, dict):
    value = next((value[k] for k in _KEYS if k in value), None)
  if not isinstance(value, str):
    raise DataError(
      f"{place}: a line must be a text in quotes, or an object with one under "
      f"{', '.join(map(repr, _KEYS))}"
    )
  return value


def result_line(filename: str, prompt: str, sample: int, text: str) -> str:
  """A line of a file of results, with its end.

  Args:
    filename: of the file; says of which kind it is.
    prompt: the input.
    sample: number of the sample of it, from 0.
    text: what came of it.

  Returns:
    In JSON lines the texts as they are; else newlines in the text are blanks, so that line and
    input go together.
  """
  if is_json_lines(filename):
    return json.dumps({"prompt": prompt, "sample": sample, "text": text}, ensure_ascii=False) + "\n"
  return text.replace("\n", " ") + "\n"


def text_entry(filename: str, prompt: str, sample: int, text: str) -> str:
  """An entry of `sample.output`: as `result_line`, but a text file has the texts as they are.

  Each ends with a line "---", which also ends the last one.
  """
  if is_json_lines(filename):
    return result_line(filename, prompt, sample, text)
  return f"{text}\n---\n"
