"""The names, signatures and flags of the archived library's BERT."""

from __future__ import annotations

import importlib
import inspect
import json
import re

import pytest

ROOM = "mesh_tensorflow.bert"


@pytest.fixture(scope="module")
def reference(shared_data):
  path = shared_data.parent / "reference" / "api.json"
  if not path.is_file():
    pytest.skip(f"no list of the API: {path}")
  modules = json.loads(path.read_text())["modules"]
  found = {name: entry for name, entry in modules.items() if name.startswith(f"{ROOM}.")}
  assert len(found) == 6
  return found


def arguments(signature: str) -> list[str]:
  """The names of the arguments of "(a, b=(1, 2))"."""
  tree = compile(f"def f{signature}: pass", "", "exec", 1024).body[0].args  # 1024: an AST.
  return [a.arg for a in [*tree.posonlyargs, *tree.args]]


def check(value, signature: str) -> None:
  ours = list(inspect.signature(value).parameters.values())
  theirs = arguments(re.sub(r"\((self|cls)(, )?", "(", signature))
  positional = [p.name for p in ours if p.kind is not p.KEYWORD_ONLY and p.name != "self"]
  assert positional == theirs, value
  assert all(p.default is not p.empty for p in ours if p.kind is p.KEYWORD_ONLY)


def test_no_name_is_missing(reference):
  compared = 0
  for name, entry in reference.items():
    module = importlib.import_module(name)
    for function, signature in entry.get("functions", {}).items():
      check(getattr(module, function), signature)
      compared += 1
    for class_name, content in entry.get("classes", {}).items():
      found = getattr(module, class_name)
      check(found, content["signature"])
      for kind in ("methods", "classmethods"):
        for method, signature in content.get(kind, {}).items():
          check(getattr(found, method), signature)
          compared += 1
      for property_name in content.get("properties", {}):
        assert isinstance(inspect.getattr_static(found, property_name), property)
        compared += 1
  assert compared > 80


# In a process of its own: a flag belongs to the program that was imported first.
FLAGS_OF_MODULES = """
import importlib, json, sys
from absl import flags
told = {}
for name in sys.argv[1:]:
  importlib.import_module(name)
  found = flags.FLAGS.flags_by_module_dict().get(name, [])
  told[name] = {f.name: [f.flag_type(), repr(f.default)] for f in found}
print(json.dumps(told))
"""


def test_no_flag_is_missing(reference, run_forked):
  printed = run_forked(["-c", FLAGS_OF_MODULES, *reference]).stdout
  told = json.loads(printed.splitlines()[-1])
  compared = 0
  for name, entry in reference.items():
    for flag, content in entry.get("flags", {}).items():
      compared += 1
      assert flag in told[name], f"{name}: --{flag}"
      kind, default = told[name][flag]
      assert kind == content["type"]
      # Two programs have another default than the one that was imported first.
      if flag not in ("max_seq_length", "eval_batch_size"):
        assert default == content["default"], flag
  assert compared > 70


def test_other_programs_can_be_imported_afterwards(run_forked):
  found = run_forked(
    "from mesh_tensorflow.bert import run_squad, run_classifier, run_pretraining\n"
    "from mesh_tensorflow.transformer import main\n"
    "from absl import flags\n"
    "flags.FLAGS(['x', '--gcp_project=there'])\n"
    "print(run_squad.settings.value('gcp_project'), flags.FLAGS.max_seq_length)"
  )
  assert found.stdout.split() == ["there", "384"]


@pytest.mark.parametrize(
  ("program", "lines"),
  [
    ("run_squad", ["--max_seq_length (default: 384)", "--mesh_shape (default: batch:8)"]),
    ("run_classifier", ["--max_seq_length (default: 128)", "--eval_batch_size (default: 32)"]),
  ],
)
def test_help_of_a_program(run_forked, program, lines):
  found = run_forked(["-m", f"{ROOM}.{program}", "--help"])
  for line in lines:
    assert line in found.stdout
  wrong = run_forked(["-m", f"{ROOM}.{program}", "--bert_config_file=x"], check=False)
  assert wrong.returncode == 2
  assert re.match(r"(--\w+, )*--\w+ must be given\n--help lists the flags.$", wrong.stderr.strip())
