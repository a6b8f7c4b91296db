"""Wrong arguments of everything public are told by a `MeshError`, when the graph is built.

What is accepted all the same stands in accepted_arguments.txt: a number for a tensor of
`mtf.add`, say. After a change that is meant: `MTF_WRITE_ACCEPTED=1 pytest` of this file.
In `make test` wrong values take turns: every eighth one of a function, in the next one others.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib

import pytest

import mesh_tensorflow as mtf
from tests.arguments import wrong_arguments
from tests.arguments.argument_calls import CALLS, NOT_CALLED
from tests.arguments.derived_calls import derived
from tests.kinds import kept

ACCEPTED = pathlib.Path(__file__).parent / "accepted_arguments.txt"
PUBLIC = wrong_arguments.public_names()
LISTED = frozenset(CALLS)
# One in how many wrong values is tried.
STEPS = {"all": 1, "in turns": 8}
WRITE = bool(os.environ.get("MTF_WRITE_ACCEPTED"))
EXCUSED = {name for names in NOT_CALLED for name in names.split()}
# What has no line in argument_calls.py is called as its test line calls it.
CALLS.update({n: call for n in sorted(set(PUBLIC) - LISTED - EXCUSED) if (call := derived(n))})


def test_everything_public_is_called():
  """A new function needs a descriptor that calls it (or a line in argument_calls.py)."""
  assert sorted(set(PUBLIC) - set(CALLS) - EXCUSED) == []
  assert sorted(name for name in CALLS if "." not in name and name not in PUBLIC) == []


@pytest.mark.parametrize(
  ("name", "arguments"),
  [
    ("square", ["x"]),
    ("mtf_abs", ["x"]),
    ("leaky_relu", ["x"]),
    ("layers.rms_normalize", ["x", "dim"]),
    ("optimize.SgdOptimizer", ["learning_rate"]),
  ],
)
def test_a_call_is_derived_from_a_test_line(name, arguments):
  call = derived(name)
  assert list(call(wrong_arguments.World())) == arguments
  wrong_arguments.call_with(wrong_arguments.resolve(name), call(wrong_arguments.World()))


def test_no_call_is_derived_of_what_has_no_line():
  assert derived("optimize.get_global_step") is None


@pytest.fixture(scope="module", params=["all"] if WRITE else kept(list(STEPS), ["in turns"]))
def outcomes(request, tmp_path_factory):
  """Of valid and wrong calls; what they print, and files that they write, are out of the way."""
  step = STEPS[request.param]
  folder = tmp_path_factory.mktemp("written")
  with contextlib.ExitStack() as stack:
    stack.callback(os.chdir, os.getcwd())
    os.chdir(folder)
    f = stack.enter_context((folder / "printed").open("w"))
    stack.enter_context(contextlib.redirect_stderr(f))
    stack.enter_context(contextlib.redirect_stdout(f))
    valid = [wrong_arguments.outcome(name, "", "", None) for name in CALLS]
    wrong = [
      wrong_arguments.outcome(name, argument, what, make)
      for i, name in enumerate(CALLS)
      for argument, what, make in list(wrong_arguments.cases(name))[i % step :: step]
    ]
  return valid, wrong


@pytest.mark.slow
def test_valid_calls_are_valid(outcomes):
  assert [str(o) for o in outcomes[0] if o.error is not None] == []


@pytest.mark.slow
def test_wrong_arguments_are_told_by_typed_errors(outcomes, record_property, request):
  counts = collections.Counter(o.kind for o in outcomes[1])
  record_property(
    "wrong_arguments",
    {
      "functions": len(CALLS),
      "arguments": len({(o.name, o.argument) for o in outcomes[1]}),
      "values": len(outcomes[1]),
      **{kind: counts[kind] for kind in ("typed", "late", "accepted", "untyped")},
    },
  )
  untyped = [str(o) for o in outcomes[1] if o.kind == "untyped"]
  assert not untyped, "\n".join(untyped[:40])
  assert counts["typed"] > 20_000 / STEPS[request.node.callspec.params["outcomes"]]


@pytest.mark.slow
def test_errors_name_function_and_argument(outcomes):
  """Of those that the check of arguments raises; the others are about values."""
  for o in outcomes[1]:
    text = str(o.error)
    if o.kind == "typed" and " must be " in text and "(got" not in text:
      assert len(text.split("\nIn call to")[0]) < 700, text


@pytest.mark.slow
def test_only_what_is_listed_is_accepted(outcomes):
  of_lists = [o for o in outcomes[1] if o.name in LISTED]
  if WRITE:
    ACCEPTED.write_text(wrong_arguments.accepted(of_lists))
  called = {(o.name, o.argument, o.wrong) for o in of_lists}
  accepted = {(o.name, o.argument, o.wrong) for o in of_lists if o.error is None}
  listed = wrong_arguments.listed(ACCEPTED.read_text())
  assert sorted(accepted - listed) == []
  assert sorted((listed & called) - accepted) == []


def test_what_is_listed_can_be_called():
  """No line is left of a function, an argument or a value that is gone."""
  cases = {(n, *case[:2]) for n in LISTED for case in wrong_arguments.cases(n)}
  assert sorted(wrong_arguments.listed(ACCEPTED.read_text()) - cases) == []


def test_signatures_are_those_of_the_functions():
  for name in ("softmax", "einsum", "layers.dense", "get_variable", "Shape.rename_dimension"):
    function = wrong_arguments.resolve(name)
    assert function.__doc__ and function.__name__ == name.split(".")[-1]
    assert "name" in str(wrong_arguments.inspect.signature(function))


def test_first_error_is_the_one_of_the_call():
  """No second error, in whose handling it was raised, and no frame of the function itself."""
  k = wrong_arguments.World()
  with pytest.raises(mtf.MeshError) as caught:
    mtf.softmax(k.x, None)
  assert caught.value.__cause__ is None and caught.value.__context__ is None
  assert str(caught.value).startswith(
    "softmax of Tensor[x:0, Shape[a=4, b=8], tf.float32]: reduced_dim must be a dimension, got None"
  )
  assert {frame.name for frame in caught.traceback} <= {
    "test_first_error_is_the_one_of_the_call",
    "call",
    "check",
    "wrapper",
  }
