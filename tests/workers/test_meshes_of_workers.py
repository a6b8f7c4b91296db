"""Meshes of one program in different workers: values, gradients and variables are the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests import worker_group
from tests.workers import meshes_program


@pytest.fixture(scope="module")
def of_workers():
  """What each of two workers prints."""
  codes, texts = worker_group.run(2, ["-m", "tests.workers.meshes_program"])
  assert codes == [0, 0], "\n".join(texts)
  return [json.loads(next(t for t in text.splitlines() if t.startswith("{"))) for text in texts]


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
@pytest.mark.parametrize("case", list(meshes_program.CASES))
def test_every_worker_has_the_results_of_one_process(case, of_workers, expected):
  for found in of_workers:
    tf.nest.assert_same_structure(found[case], expected)
    for ours, theirs in zip(tf.nest.flatten(found[case]), tf.nest.flatten(expected)):
      np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


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
