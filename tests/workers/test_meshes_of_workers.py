"""Meshes of one program in different workers: values, gradients and variables are the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from docs.tools.resharding import SOURCES, TARGETS
from tests import worker_group
from tests.kinds import kept
from tests.workers import meshes_program


def printed(*arguments, timeout=240):
  """What each of two workers prints."""
  program = ["-m", "tests.workers.meshes_program", *arguments]
  codes, texts = worker_group.run(2, program, timeout)
  assert codes == [0, 0], "\n".join(texts)
  return [json.loads(next(t for t in text.splitlines() if t.startswith("{"))) for text in texts]


# In `make test`; of one device beside several there is a case in `make long`.
KEPT = [case for case in meshes_program.CASES if case != "one device and four"]


@pytest.fixture(scope="module")
def of_workers():
  return printed(*KEPT)


@pytest.fixture(scope="module")
def of_all_cases():
  return printed(*meshes_program.CASES)


@pytest.fixture(scope="module")
def expected(cpu_devices):
  """The same in one process, on two devices."""
  store = mtf.VariableStore()
  impls = {
    name: mtf.PlacementMeshImpl("", "", [device], variable_store=store)
    for name, device in zip("ab", cpu_devices)
  }
  return meshes_program.results(impls, store)


@pytest.mark.subprocess
@pytest.mark.parametrize("case", kept(list(meshes_program.CASES), KEPT))
def test_every_worker_has_the_results_of_one_process(case, expected, request):
  for found in request.getfixturevalue("of_workers" if case in KEPT else "of_all_cases"):
    tf.nest.assert_same_structure(found[case], expected)
    for ours, theirs in zip(tf.nest.flatten(found[case]), tf.nest.flatten(expected)):
      np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def check_bytes(of_each, tensors):
  """Each worker has compared its values with NumPy."""
  for checked, received, least in of_each:
    assert checked == tensors
    assert received == least


@pytest.mark.subprocess
@pytest.mark.parametrize("case", ["drawn", "drawn, across"])
def test_each_element_comes_to_each_worker_once(case, of_workers):
  check_bytes([found[case] for found in of_workers], 12)


@pytest.mark.long
@pytest.mark.subprocess
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_pair_of_drawn_layouts(source, target):
  first, second = printed("drawn", source, target, timeout=3600)
  assert list(first) == ["drawn", "drawn, across"]
  for case in first:
    check_bytes([first[case], second[case]], 144)


@pytest.mark.subprocess
def test_wrong_use(of_workers):
  first, second = of_workers
  for found in of_workers:
    different = found["different programs"]
    assert different.startswith("ConfigError: the workers must run the same program")
    assert "a program of" in different
    assert found["with a mesh of its own"].startswith("UnsupportedError: Mesh('b')")
    assert "a mesh that each worker has for itself" in found["with a mesh of its own"]
  assert first["alone"].startswith("UnsupportedError: SimdMeshImpl")
  assert "has none of its devices" in first["alone"]
  assert second["alone"] == "no error"
  there, here = second["devices"]
  assert here == "no error"
  assert there.startswith("VariableError: variable u has no slice in this process: Mesh('a')")
