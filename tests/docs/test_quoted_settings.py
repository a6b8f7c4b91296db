"""What the pages quote of settings can be read: JSON by Python, gin by the trainer."""

from __future__ import annotations

import importlib
import json
import re

import gin
import pytest

from mesh_tensorflow.transformer.gin_config import parsing
from tests.docs.test_docs import PAGES, blocks_of

# What the trainer's modes and data import, and what bindings in the pages name.
MODULES = ("dataset", "learning_rate_schedules", "moe", "utils", "vocabulary", "vocab_embeddings")

BLOCKS = [
  pytest.param(block, id=f"{page}:{block.lines_above}")
  for page in PAGES
  for block in blocks_of(page)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_json_is_marked_as_such_and_parsed(block):
  looks_like_json = re.match(r'\s*[{\[]\s*"', block.text) is not None
  if block.kind in ("py", "python no-run"):
    assert not looks_like_json, "a block of JSON is fenced as ```json"
  if block.kind == "json":
    json.loads(block.text)


@pytest.mark.parametrize("block", BLOCKS)
def test_json_in_commands_is_parsed(block):
  """TF_CONFIG, say: the quoted words of a command that begin as an object does."""
  if block.kind == "sh":
    for text in re.findall(r"'(\{.*?\})'", block.text, re.DOTALL):
      json.loads(text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.values[0].kind == "gin"])
def test_gin_is_parsed_behind_the_defaults(block, tmp_path):
  for name in MODULES:
    importlib.import_module(f"mesh_tensorflow.transformer.{name}")
  importlib.import_module("mesh_tensorflow.optimize")
  file = tmp_path / "block.gin"
  file.write_text(block.text)
  gin.clear_config()
  try:
    parsing.parse_gin([str(file)], [])
  finally:
    gin.clear_config()


def test_faults_are_found(tmp_path):
  with pytest.raises(ValueError):
    json.loads('{"initializer_range": 0.1,\n}')
