"""Programs that switch TensorFlow 2 off are told which line to delete."""

from __future__ import annotations

import pytest
import tensorflow as tf

from mesh_tensorflow.environment.tensorflow_mode import check_tensorflow2

# Each kind of program in a process: what is switched off cannot be switched on again.
PROGRAM = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow.compat.v1 as tf
import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import utils

impl = mtf.PlacementMeshImpl("", "", [""])
a = mtf.Dimension("a", 2)
graph = mtf.Graph()
mesh = mtf.Mesh(graph, "mesh")
mtf.ones(mesh, [a])

def lower():
  return mtf.Lowering(graph, {mesh: impl})

def call():
  return mtf.function(impl, [mtf.TensorSpec([a])])(lambda x: x)([1.0, 2.0])

def train():
  return utils.run(None, None, None, None, "model")

LINE
for entry in (lower, train, call):
  try:
    entry()
    print(entry.__name__, "done")
  except mtf.MeshError as e:
    print(entry.__name__, type(e).__name__, "delete the line" in str(e), LINE_TEXT in str(e))
  except Exception as e:
    print(entry.__name__, "raw", type(e).__name__, e)
"""


@pytest.mark.parametrize(
  "line",
  [
    "tf.disable_v2_behavior()",
    pytest.param("tf.disable_eager_execution()", marks=pytest.mark.long),
    pytest.param("tf.disable_v2_tensorshape()", marks=pytest.mark.long),
  ],
)
def test_the_line_is_named(line, run_subprocess):
  name = line.removeprefix("tf.")
  program = PROGRAM.replace("LINE_TEXT", repr(name)).replace("LINE", line)
  told = [x for x in run_subprocess(program).stdout.splitlines() if "True" in x or "raw" in x]
  assert [x.split()[1:] for x in told] == [["UnsupportedError", "True", "True"]] * 3


def test_a_graph_for_a_while_is_no_fault():
  with tf.Graph().as_default():
    check_tensorflow2()
  tf.function(check_tensorflow2)()
