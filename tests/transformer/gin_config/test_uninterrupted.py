"""While gin reads a value nothing else of the process runs, as a collection would."""

from __future__ import annotations

import ast
import gc

import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import gin_config, transformer
from mesh_tensorflow.transformer.gin_config import operative, parsing


@pytest.fixture
def collections(monkeypatch):
  """Whether the collector was on at each value that gin read; it would begin at once."""
  found: list[bool] = []
  read = ast.literal_eval
  monkeypatch.setattr(ast, "literal_eval", lambda text: found.append(gc.isenabled()) or read(text))
  assert gc.isenabled()
  yield found
  assert gc.isenabled()


def test_reading_and_the_operative_configuration(collections):
  gin_config.parse_gin(["models/lm_base.gin"], ["d_model = 64"])
  assert collections and not any(collections)
  transformer.make_layer_stack()
  for tell in (
    gin_config.operative_config_str,
    operative.operative_values,
    parsing.warn_of_unused_scopes,
    lambda: parsing.places_of([]),
  ):
    collections.clear()
    tell()
    assert collections and not any(collections), tell


def test_after_an_error_and_where_it_was_off(collections):
  with pytest.raises(errors.ConfigError):
    gin_config.parse_gin([], ["d_model = = 3"])
  assert gc.isenabled()
  gc.disable()
  try:
    gin_config.parse_gin([], ["d_model = 64"])
    assert not gc.isenabled()
  finally:
    gc.enable()
