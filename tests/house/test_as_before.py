"""`tests/as_before.py`: equal checkouts are equal to it, and what differs is told."""

from __future__ import annotations

import numpy as np
import pytest

from tests import as_before, as_before_cases
from tests.as_before import Masks, Outcome, difference
from tests.conftest import ROOT


def outcome(arrays=None, **texts):
  return Outcome({"exit code": ["0"], **{k: [v] for k, v in texts.items()}}, arrays or {})


def test_masks():
  masks = Masks([("/tmp/x", "<folder>")])
  assert masks("in /tmp/x/m, 1795613739.479, after 2.5 s, 1,200 tokens/s  left  \n") == (
    "in <folder>/m, <time>, after <time> s, <speed> tokens/s left\n"
  )
  trace = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    x\nValueError: 3\n'
  assert masks(trace) == "<traceback>\nValueError: 3\n"
  assert masks("loss 3.0970  step 12") == "loss 3.0970 step 12"
  assert masks("step 12, loss 3.09", loosely=True) == "step N loss N"


@pytest.mark.parametrize(
  ("new", "says"),
  [
    (outcome(stdout="loss 3.0970"), ""),
    (outcome(stdout="loss 3.0971"), "stdout:1: 'loss 3.0970' | 'loss 3.0971'"),
    (outcome(stdout="loss 3.0970", stderr="x"), "stderr:1: nothing | 'x'"),
    (None, "only OLD came to it"),
  ],
)
def test_difference_of_texts(new, says):
  assert difference(outcome(stdout="loss 3.0970"), new) == says


@pytest.mark.parametrize(
  ("old", "new", "same"),
  [
    ('{"loss": 1.0000001}', '{"loss": 1.0}', True),
    ('{"loss": 1.00001}', '{"loss": 1.0}', False),
    ('{"loss": 1.0}', '{"lots": 1.0}', False),
    ("v1 3", "v2 3", False),
  ],
)
def test_numbers_in_files_may_differ_in_rounding(old, new, same):
  assert (not difference(outcome(metrics=old), outcome(metrics=new))) == same


@pytest.mark.parametrize(
  ("array", "says"),
  [
    (np.array([1.0, 2.0], "f"), ""),
    (np.array([1.0, 2.0 + 2e-7], "f"), ""),
    (np.array([1.0, 2.001], "f"), "w: values differ by up to 0.001"),
    (np.array([1.0, 2.0]), "w: float32 [2] | float64 [2]"),
    (np.array([[1.0, 2.0]], "f"), "w: float32 [2] | float32 [1, 2]"),
  ],
)
def test_difference_of_arrays(array, says):
  old = {"w": np.array([1.0, 2.0], "f")}
  assert difference(outcome(old), outcome({"w": array})) == says
  assert difference(outcome(old), outcome()) == "w: only of OLD"


def test_every_flag_of_a_help_is_tried():
  text = (
    "flags:\n  --config, --gin_file FILE x\n  --dry_run Build A model\n  --steps N Train\n  --x\n"
  )
  found = dict(as_before_cases._flags_of_help(text))
  assert found == {"--config": "FILE", "--dry_run": "", "--steps": "N", "--x": ""}


@pytest.mark.long
@pytest.mark.subprocess
def test_a_checkout_is_as_itself(tmp_path, capsys, monkeypatch):
  """And what a program does otherwise on one side is a row."""

  def chain(run):
    words = as_before_cases.small(run)
    run.cli("typo", "train", "--stpes=3")
    run.cli("train", "train", "--model_dir=m", *words, "--steps=2")
    more = 4 if run.side.name == "new" else 2
    run.cli("longer", "infer", "--model_dir=m", "--prompt=To", f"--max_tokens={more}")

  sides = [as_before.Side(name, ROOT).checked(tmp_path) for name in ("old", "new")]
  assert as_before.compare(*sides, {"few": chain}, tmp_path) == 1
  out = capsys.readouterr().out
  assert "few: typo | same\n" in out and "few: train | same\n" in out
  assert "few: longer | differs: stdout:" in out and "2 same, 0 expected, 1 differs" in out
  monkeypatch.setitem(as_before.EXPECTED, "few: long*", "of a wish")
  assert as_before.compare(*sides, {"few again": chain, "few": chain}, tmp_path / "x") == 1
  out = capsys.readouterr().out
  assert "few: longer | expected: " in out and "(of a wish)" in out
