"""Calls of mtf.dropout for release 0.1.18, which had no is_training: errors say what to write."""

from __future__ import annotations

import re

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ArgumentError


@pytest.fixture
def x():
  return mtf.ones(mtf.Mesh(mtf.Graph(), "mesh"), [("a", 4), ("b", 3)])


@pytest.mark.parametrize(
  ("args", "kwargs"),
  [
    ((), {"keep_prob": 0.9}),
    ((), {"rate": 0.1}),
    ((0.9,), {}),
    ((None, 0.1), {}),  # As rate: it was taken for keep_prob outside of training, so x came back.
    ((0.9, None, None), {}),
    ((1.0,), {"name": "d"}),
  ],
)
def test_told(x, args, kwargs):
  before = len(x.graph.operations)
  with pytest.raises(ArgumentError, match=r"^dropout of Tensor.*is_training.*release 0\.1\.18"):
    mtf.dropout(x, *args, **kwargs)
  assert len(x.graph.operations) == before


def test_what_the_message_recommends_is_taken(x):
  with pytest.raises(ArgumentError) as told:
    mtf.dropout(x, rate=0.1)
  calls = re.findall(r"dropout\(x, [^)]*\)", str(told.value))
  assert len(calls) == 2
  for call in calls:
    for is_training in (True, False):
      out = eval(call, {"dropout": mtf.dropout, "x": x, "is_training": is_training})
      assert (out is x) != is_training


@pytest.mark.parametrize("is_training", [False, 0, np.bool_(False), np.int32(0)])
def test_truth_values_are_taken(x, is_training):
  assert mtf.dropout(x, is_training, rate=0.5) is x
  assert mtf.dropout(x, type(is_training)(1), rate=0.5) is not x
