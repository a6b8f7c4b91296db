"""Every gin file parses on top of defaults.gin, says what it is, and fits itself."""

from __future__ import annotations

import importlib
import pathlib

import gin
import pytest
from gin import config_parser

GIN = pathlib.Path(__file__).resolve().parent.parent / "gin"
FILES = sorted(path.relative_to(GIN).as_posix() for path in GIN.rglob("*.gin"))
LAYOUTS = [name for name in FILES if name.startswith("layouts/")]

# The files that the TF1 library had, in its wheel or in its repository.
ORIGINAL_FILES = """
  defaults 8x8_dp_r4 transparent_attention
  layouts/16x16_m8 layouts/2x2_dp layouts/2x2_dp_mp layouts/2x2_mp layouts/4x4_dp layouts/8x16_m2
  layouts/8x16_m8 layouts/8x8_dp layouts/8x8_m4 layouts/8x8_mp layouts/single
  learning_rate_schedules/constant learning_rate_schedules/slanted_triangular
  models/aiayn_base models/aiayn_large models/bi_base models/bi_l12 models/bi_l12_w1
  models/bi_l12_w2 models/bi_l12_w3 models/bi_moe models/bi_w1 models/lm_base models/lm_moe
  models/lm_w1 models/tiny
  problems/lm1b problems/lm1b_untok problems/t2t_ende problems/t2t_enfr problems/t2t_lm1b
""".split()


def import_trainer() -> None:
  try:
    importlib.import_module("mesh_tensorflow.transformer.utils")
  except ModuleNotFoundError as error:
    if not (error.name or "").startswith("mesh_tensorflow"):
      raise
    pytest.skip(f"{error.name} is not written yet")


def parse(name: str) -> None:
  """Parses one file."""
  gin.add_config_file_search_path(str(GIN))  # For files that include others.
  gin.parse_config_file(str(GIN / name))


class _Literals(config_parser.ParserDelegate):
  """Reads references and macros as text, so that no configurable needs to exist."""

  def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> str:
    return f"@{scoped_configurable_name}" + ("()" if evaluate else "")

  def macro(self, macro_name: str) -> str:
    return f"%{macro_name}"


def bindings(name: str) -> dict[str, object]:
  """The bindings of one file as written: "scope/selector.argument" or "macro" to value."""
  result = {}
  for statement in config_parser.ConfigParser((GIN / name).read_text(), _Literals()):
    if isinstance(statement, config_parser.BindingStatement):
      target = ".".join(part for part in (statement.selector, statement.arg_name) if part)
      key = f"{statement.scope}/{target}" if statement.scope else target
      assert key not in result, f"{name} binds {key} twice"
      result[key] = statement.value
  return result


@pytest.mark.parametrize("name", FILES)
def test_parses_on_top_of_defaults(name: str):
  import_trainer()
  parse("defaults.gin")
  if name != "defaults.gin":
    parse(name)
  gin.finalize()


@pytest.mark.parametrize("name", FILES)
def test_binds_something_once_and_says_what_it_is(name: str):
  assert bindings(name)
  first = (GIN / name).read_text().splitlines()[0]
  assert first.startswith("# ") and len(first) > 10


def test_all_original_files_are_here():
  assert {f"{name}.gin" for name in ORIGINAL_FILES} <= set(FILES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_rules_use_axes_of_the_mesh(name: str):
  bound = bindings(name)
  axes = [item.split(":")[0] for item in bound["utils.run.mesh_shape"].split(",")]
  used = [item.split(":")[1] for item in bound["utils.run.layout_rules"].split(",") if item]
  assert set(used) <= set(axes)


def test_only_layouts_for_one_device_or_cpus_set_the_activation_dtype():
  dtype = "utils.get_variable_dtype.activation_dtype"
  assert bindings("defaults.gin")[dtype] == "bfloat16"
  changed = {name: bindings(name)[dtype] for name in LAYOUTS if dtype in bindings(name)}
  names = ("cpu_1", "cpu_2x2", "cpu_2x4", "single")
  assert changed == {f"layouts/{name}.gin": "float32" for name in names}


def test_lm1b_binds_the_vocabulary_where_it_is_registered():
  # The TF1 library's file named a module that has no such function, and did not parse.
  bound = bindings("problems/lm1b.gin")
  assert bound["vocabulary.get_tfds_vocabulary.dataset_name"] == "%dataset_name"
  assert "dataset.get_tfds_vocabulary.dataset_name" not in bound
