"""Settings that are declared once: what follows from a field, and that all of it agrees."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import subprocess
import sys

import gin
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_settings import records, rules
from mesh_settings.records import setting
from mesh_settings.run import POSITIONAL, RunSettings
from mesh_settings.sample import SampleSettings
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import errors
from mesh_tensorflow.arguments import declared
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.gin_config import checks
from mesh_transformer_cli import flags
from mesh_transformer_cli.table import COMMANDS

OWNERS = {"run": RunSettings, "sample": SampleSettings}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine:
  place: str = setting("where it is.")
  most: int = setting("how many, at most.", 3, rules.COUNT, flag="--most", affects="model")
  rate: float | None = setting("parts of it; None: all.", None, rules.BELOW_ONE, flag="--rate")
  loud: bool = setting("noise.", False, flag="--loud")


@records.takes_settings(Mine, ("place",), {"most": 4})
def mine(given: dict) -> Mine:
  """Makes one.

  {settings}
  """
  return Mine(**given)


def test_a_function_has_the_signature_the_defaults_and_the_docstring_of_its_record():
  assert str(inspect.signature(mine)) == (
    "(place: 'str', *, most: 'int' = 4, rate: 'float | None' = None, loud: 'bool' = False) "
    "-> 'Mine'"
  )
  assert mine("here") == Mine(place="here", most=4)
  assert mine(place="here", rate=0.5) == Mine(place="here", most=4, rate=0.5)
  with pytest.raises(TypeError, match="missing a required argument: 'place'"):
    mine()
  assert "    place: where it is.\n    most: how many, at most.\n    rate: parts" in mine.__doc__


def test_illegal_values_of_a_record():
  assert not list(records.illegal(Mine(place="here", rate=None)))
  found = list(records.illegal(Mine(place=3, most=0, rate=2.0, loud="yes")))
  assert [name for name, _, _ in found] == ["place", "most", "rate", "loud"]
  assert found[1][1:] == (0, rules.COUNT)


def test_a_part_of_a_record_is_a_record_of_the_class_that_it_extends():
  run = RunSettings(**_required(RunSettings), report_every=7)
  part = records.part(TrainerSettings, run)
  assert type(part) is TrainerSettings and part.report_every == 7


def test_flags_of_a_record():
  found = {f.name: f for f in flags.of_settings(Mine, "mine", "train")}
  assert list(found) == ["--most", "--rate", "--loud"]
  assert found["--most"].help == "How many, at most." and found["--most"].metavar == "N"
  assert list(found["--rate"].arguments(0.5)) == ["--gin_param=mine.rate = 0.5"]
  assert found["--loud"].kind is None
  with pytest.raises(argparse.ArgumentTypeError, match="'0' is no whole number of at least 1"):
    found["--most"].kind("0")
  with pytest.raises(argparse.ArgumentTypeError, match="'1' is no number from 0 to below 1"):
    found["--rate"].kind("1")


def test_declarations_of_a_function_of_a_record():
  own = declared.declaration(declared.declares(Mine)(lambda **_: None))
  assert own.arguments["most"] == "model" and own.arguments["rate"] == "report"
  assert own.values == {"most": rules.COUNT, "rate": rules.BELOW_ONE}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_default_is_legal(owner):
  for name, told in records.settings_of(OWNERS[owner]).items():
    if told.values is not None and told.default is not inspect.Parameter.empty:
      legal = told.default is None or told.values.is_legal(told.default)
      assert legal, name


def test_positions_of_run_are_those_of_the_tf1_library_and_all_else_goes_by_name():
  parameters = inspect.signature(utils.run).parameters
  kinds = [(n, p.kind is p.KEYWORD_ONLY) for n, p in parameters.items()]
  assert kinds == [
    *((n, False) for n in POSITIONAL),
    *((n, True) for n in records.settings_of(RunSettings) if n not in POSITIONAL),
  ]


def _flagged() -> list[tuple[str, str, str]]:
  return [
    (owner, told.name, command)
    for owner, record in OWNERS.items()
    for command in COMMANDS
    for told in records.flagged(record, command)
  ]


@pytest.mark.parametrize(("owner", "name", "command"), _flagged())
@settings(max_examples=15, deadline=None)
@given(
  text=st.one_of(
    st.integers(-3, 10**7).map(str),
    st.floats(width=32).map(str),
    st.sampled_from(["", "auto", "batch:2,model:2", "None", "1e3", "inf", "True", "path/to"]),
  )
)
def test_what_a_flag_takes_gin_takes_too(owner, name, command, text):
  """Each flag that binds a setting, with drawn texts: a value that it makes is a legal one."""
  flag = next(f for f in COMMANDS[command].flags if f.gin == f"{owner}.{name}")
  try:
    value = True if flag.kind is None else flag.kind(text)
  except argparse.ArgumentTypeError:
    return
  checks.check_arguments(owner, getattr(utils, owner), {name: value})


@pytest.mark.parametrize(
  ("owner", "name"),
  [(o, n) for o, r in OWNERS.items() for n, t in records.settings_of(r).items() if t.values],
)
@settings(max_examples=12, deadline=None)
@given(
  value=st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(-2, 2), st.text(max_size=3),
    st.lists(st.integers(-2, 3), max_size=3), st.dictionaries(st.text(max_size=2), st.integers()),
  )
)  # fmt: skip
def test_a_value_is_checked_as_its_rule_says(owner, name, value):
  """Drawn values: the check of arguments raises exactly where the declared rule says so."""
  told = records.settings_of(OWNERS[owner])[name]
  # Some defaults are functions, which a record without TensorFlow cannot name.
  default = inspect.signature(getattr(utils, owner)).parameters[name].default
  may_be_none = default is None or "None" in told.annotation
  whole = isinstance(value, float) and value.is_integer() and told.values.is_legal(int(value))
  legal = told.values.is_legal(value) or value is None and may_be_none or value is default
  if whole and owner != "run":
    legal = True  # 1e5 for a count.
  try:
    checks.check_arguments(owner, getattr(utils, owner), {name: value})
  except errors.ConfigError as e:
    assert not legal, e
    assert f"{owner}.{name} = " in str(e) and "it must be" in str(e)
  else:
    assert legal, value


def test_a_bound_setting_gets_there_and_its_name_is_checked():
  with gin.unlock_config():
    gin.parse_config("sample.top_k = 3")
  assert utils.sample().top_k == 3
  gin.clear_config()
  with pytest.raises(errors.ConfigError, match="sample.top_k = 0: it must be a whole number"):
    utils.sample(top_k=0)


def test_nothing_of_it_imports_tensorflow():
  code = (
    "import sys, mesh_settings.run, mesh_settings.sample, mesh_transformer_cli.table; "
    "print([m for m in sys.modules if m.split('.')[0] in ('tensorflow', 'mesh_tensorflow')])"
  )
  result = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
  )
  assert result.stdout.strip() == "[]"


def _required(record: type) -> dict[str, object]:
  return {
    n: None
    for n, told in records.settings_of(record).items()
    if told.default is inspect.Parameter.empty
  }
