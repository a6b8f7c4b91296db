"""Programs of 5 to 30 operations drawn at random: values and gradients on any legal layout.

A long run, of 500 programs: set MTF_HYPOTHESIS_PROFILE=long. Programs over two meshes: as many as
MTF_DRAWN_PROGRAMS says in `make long`.
"""

from __future__ import annotations

import os
import zlib

import hypothesis
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance import framework
from tests.operations.whole_programs import (
  ONE_DEVICE,
  implementations,
  programs,
  programs_over_two_meshes,
)

LONG = os.environ.get("MTF_HYPOTHESIS_PROFILE") == "long"
EXAMPLES = {"eager": 125 if LONG else 10, "function": 125 if LONG else 4}


def _run(program, mode, devices):
  kind, execution = mode.split("_")
  impl = framework.make_impl(kind, program.layout, devices)

  def lower(arrays):
    mesh = mtf.Mesh(mtf.Graph(), "program")
    tensors = program.build(mesh, arrays)
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    return [lowering.export_to_tf_tensor(t) for t in tensors]

  run = lambda arrays: impl.run(lower, (arrays,))  # noqa: E731
  if execution == "function":
    run = tf.function(run, autograph=False)
  return [y.numpy() for y in run([tf.constant(a) for _, a in program.inputs])]


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("mode", framework.MODES)
@pytest.mark.slow
def test_whole_program(mode, cpu_devices, record_property):
  checked = 0

  @hypothesis.seed(zlib.crc32(mode.encode()))
  # Making a failing program smaller means tracing hundreds: left to who looks into it.
  @hypothesis.settings(
    max_examples=EXAMPLES[mode.split("_")[1]], phases=[hypothesis.Phase.generate]
  )
  @hypothesis.given(programs())
  def check(program):
    nonlocal checked
    expected = program.expected()
    got = _run(program, mode, cpu_devices)
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected)):
      scale = np.abs(b).max(initial=1.0)
      what = f"value {i} of {len(program.steps)} (then gradients)"
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * scale, err_msg=what)
    checked += len(got)

  check()
  record_property("conformance_cases", checked)


def run_over_meshes(program, meshes, execution, devices):
  """Values, gradients, and the variables afterwards."""
  impls = implementations(meshes, devices)

  def run(arrays):
    return program.run(impls, arrays)

  if execution == "function":
    run = tf.function(run, autograph=False)
  results = [y.numpy() for y in run([tf.constant(a) for _, a in program.inputs])]
  store = next(iter(impls.values())).variable_store
  return results + [store[f"v{i}"].numpy() for i in range(len(program.variables))]


def check_over_meshes(program, execution, devices):
  """Checks a program over several meshes; returns the number of values."""
  found = run_over_meshes(program, program.meshes, execution, devices)
  alone = dict.fromkeys(program.meshes, ONE_DEVICE)
  on_one = run_over_meshes(program, alone, "eager", devices)
  for i, (a, b, c) in enumerate(zip(found, on_one, program.expected(), strict=True)):
    scale = np.abs(c).max(initial=1.0)
    what = f"result {i} of {len(found)}"
    np.testing.assert_allclose(b, c, rtol=1e-4, atol=1e-4 * scale, err_msg=f"{what}, one device")
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * scale, err_msg=what)
  return len(found)


MANY = int(os.environ.get("MTF_DRAWN_PROGRAMS", "50"))


@pytest.mark.parametrize(
  "execution,examples",
  [
    ("eager", 8),
    ("function", 3),
    pytest.param("eager", MANY, marks=[pytest.mark.long, pytest.mark.timeout(36000)]),
    pytest.param("function", MANY, marks=[pytest.mark.long, pytest.mark.timeout(36000)]),
  ],
)
def test_over_two_meshes(execution, examples, cpu_devices, record_property):
  checked = 0

  @hypothesis.seed(zlib.crc32(f"{execution} {examples}".encode()))
  @hypothesis.settings(max_examples=examples, phases=[hypothesis.Phase.generate])
  @hypothesis.given(programs_over_two_meshes())
  def check(program):
    nonlocal checked
    checked += check_over_meshes(program, execution, cpu_devices)

  check()
  record_property("conformance_cases", checked)
