"""Programs of 5 to 30 operations drawn at random: values and gradients on any legal layout.

A long run, of 500 programs: set MTF_HYPOTHESIS_PROFILE=long.
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
from tests.operations.whole_programs import programs

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
