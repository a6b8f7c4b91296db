"""Whole programs, as mesh-tensorflow-port rewrites them, and the lines that it lists."""

from __future__ import annotations

import ast
import re

import pytest

from mesh_transformer_cli import port

# Name of the case: the program, the rewritten one, number of changes, and "line what" of each note.
PROGRAMS = {}
PROGRAMS["a whole program"] = (
  '''"""Trains."""
from tensorflow_estimator import estimator
import mesh_tensorflow as mtf
import numpy as np
import tensorflow.compat.v1 as tf


def model_fn(features, labels, mode, params):
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "my_mesh")
  step = tf.train.get_global_step()
  with tf.variable_scope("main", reuse=tf.AUTO_REUSE, dtype=tf.float32), \\
      tf.variable_scope("inner"):
    x = mtf.dropout(features, 0.9)
    y = mtf.dropout(
      x,
      keep_prob=0.5,
    )
  if mode == estimator.ModeKeys.TRAIN:
    saver = tf.train.Saver(tf.global_variables(), max_to_keep=3)
    return tf.estimator.EstimatorSpec(mode, loss=y)
  it = data.make_one_shot_iterator()
  return mtf.MtfRestoreHook(lowering)


def main(_):
  tf.disable_v2_behavior()
  tf.logging.info("x")
  tf.enable_resource_variables(); print("so")


tf.disable_eager_execution()
tf.app.run(main)''',
  '''"""Trains."""
import mesh_tensorflow as mtf
import numpy as np
import tensorflow.compat.v1 as tf


def model_fn(features, labels, mode, params):
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "my_mesh")
  step = mtf.optimize.get_global_step(mesh)
  with mtf.variable_scope("main", reuse=None, dtype=tf.float32), \\
      mtf.variable_scope("inner"):
    x = mtf.dropout(features, is_training=True, keep_prob=0.9)
    y = mtf.dropout(
      x, is_training=True,
      keep_prob=0.5,
    )
  if mode == "train":
    saver = tf.train.Saver(tf.global_variables(), max_to_keep=3)
    return tf.estimator.EstimatorSpec(mode, loss=y)
  it = data.make_one_shot_iterator()
  return mtf.MtfRestoreHook(lowering)


def main(_):
  tf.logging.info("x")
  None; print("so")


tf.app.run(main)''',
  12,
  """4 tensorflow.compat.v1
10 tf.train.get_global_step
11 variable_scope(dtype=)
13 mtf.dropout
14 mtf.dropout
19 tf.global_variables
19 tf.train.Saver
20 tf.estimator.EstimatorSpec
21 .make_one_shot_iterator
22 mtf.MtfRestoreHook
26 tf.logging.info
30 tf.app.run""",
)
PROGRAMS["names that both have"] = (
  """import mesh_tensorflow as mtf
from tensorflow.compat import v1 as tf1
import tensorflow.compat.v1 as tf
a = tf1.cast(tf.math.log(x), tf1.float32)
b = tf.io.gfile.exists("x")
""",
  """import mesh_tensorflow as mtf
import tensorflow as tf1
import tensorflow as tf
a = tf1.cast(tf.math.log(x), tf1.float32)
b = tf.io.gfile.exists("x")
""",
  2,
  """""",
)
PROGRAMS["names that one has"] = (
  """import mesh_tensorflow as mtf
from tensorflow.compat import v1
import tensorflow.compat.v1 as tf
a = v1.placeholder(v1.float32)
b = [tf.to_int32(a), tf.nothing(a), tf.other(a), tf.third(a), tf.fourth(a), tf.fifth(a), tf.six(a)]
""",
  """import mesh_tensorflow as mtf
from tensorflow.compat import v1
import tensorflow.compat.v1 as tf
a = v1.placeholder(v1.float32)
b = [tf.to_int32(a), tf.nothing(a), tf.other(a), tf.third(a), tf.fourth(a), tf.fifth(a), tf.six(a)]
""",
  0,
  """2 tensorflow.compat.v1
3 tensorflow.compat.v1
4 tf.placeholder
5 tf.to_int32""",
)
PROGRAMS["private"] = (
  """import mesh_tensorflow
from tensorflow.python.ops import array_ops
import tensorflow.contrib as c, os
import tensorflow
if x:
  from tensorflow_estimator import estimator
else:
  from tensorflow.compat.v1 import estimator as e
m = e.ModeKeys.EVAL
n = estimator.RunConfig()
with tensorflow.variable_scope("s"):
  pass
""",
  """import mesh_tensorflow
from tensorflow.python.ops import array_ops
import tensorflow.contrib as c, os
import tensorflow
if x:
  from tensorflow_estimator import estimator
else:
  pass
m = "eval"
n = estimator.RunConfig()
with mesh_tensorflow.variable_scope("s"):
  pass
""",
  3,
  """2 from tensorflow.python.ops import array_ops
3 import tensorflow.contrib as c, os
6 from tensorflow_estimator import estimator
10 tf.estimator.RunConfig""",
)
PROGRAMS["only a part of the library"] = (
  """import os
from mesh_tensorflow.transformer import utils
import tensorflow as tf
s = tf.get_variable_scope()
def f(mesh, other):
  third = mtf.Mesh(graph, "x")
  def g(x):
    return tf.train.get_or_create_global_step()
  return tf.train.get_global_step()
def g(x):
  return tf.train.get_global_step()
async def h(a, *, mesh):
  return tf.train.get_global_step()
""",
  """import os
import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import utils
import tensorflow as tf
s = mtf.get_variable_scope()
def f(mesh, other):
  third = mtf.Mesh(graph, "x")
  def g(x):
    return mtf.optimize.get_global_step(third)
  return mtf.optimize.get_global_step(third)
def g(x):
  return tf.train.get_global_step()
async def h(a, *, mesh):
  return mtf.optimize.get_global_step(mesh)
""",
  5,
  """9 tf.train.get_or_create_global_step
10 tf.train.get_global_step
12 tf.train.get_global_step
14 tf.train.get_global_step""",
)
PROGRAMS["not of the library"] = (
  """import tensorflow.compat.v1 as tf
with tf.variable_scope("s"):
  tf.disable_v2_behavior()
""",
  """import tensorflow.compat.v1 as tf
with tf.variable_scope("s"):
  tf.disable_v2_behavior()
""",
  0,
  """""",
)
PROGRAMS["blocks"] = (
  """import mesh_tensorflow as mtf
import tensorflow as tf
try:
  tf.disable_v2_behavior()
except ValueError:
  tf.enable_v2_behavior()  # so
finally:
  x = 1; tf.disable_v2_behavior()
for i in y:
  tf.disable_v2_behavior()
  z = tf.estimator.ModeKeys.PREDICT
else:
  tf.disable_v2_behavior() or 3
tf.enable_eager_execution()""",
  """import mesh_tensorflow as mtf
import tensorflow as tf
try:
  pass
except ValueError:
  pass  # so
finally:
  x = 1; None
for i in y:
  z = "infer"
else:
  tf.disable_v2_behavior() or 3
""",
  6,
  """""",
)
PROGRAMS["dropouts"] = (
  """import mesh_tensorflow as mtf
a = mtf.dropout(x, rate)
b = mtf.dropout(x, keep, name="n")
c = mtf.dropout(x, self.is_training, 0.5)
d = mtf.dropout(*args)
e = mtf.dropout(keep_prob=0.5, x=x)
f = mtf.dropout(x, 1, None, s, "n")
g = mtf.dropout(x, None)
h = mtf.dropout(x, False, 0.1)
i = mtf.dropout(x)
j = mtf.dropout(x, 1.0 - p)
k = mtf.layers.dropout(x, 0.5)
""",
  """import mesh_tensorflow as mtf
a = mtf.dropout(x, is_training=True, keep_prob=rate)
b = mtf.dropout(x, is_training=True, keep_prob=keep, name="n")
c = mtf.dropout(x, self.is_training, 0.5)
d = mtf.dropout(*args)
e = mtf.dropout(keep_prob=0.5, x=x)
f = mtf.dropout(x, 1, None, s, "n")
g = mtf.dropout(x, is_training=True, keep_prob=None)
h = mtf.dropout(x, False, 0.1)
i = mtf.dropout(x, is_training=True)
j = mtf.dropout(x, is_training=True, keep_prob=1.0 - p)
k = mtf.layers.dropout(x, 0.5)
""",
  9,
  """2 mtf.dropout
3 mtf.dropout
8 mtf.dropout
10 mtf.dropout
11 mtf.dropout""",
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, tmp_path, capsys):
  old, new, changes, notes = PROGRAMS[name]
  ast.parse(new)
  path = tmp_path / "program.py"
  path.write_text(old)
  port.main([str(path)])
  shown = capsys.readouterr().out
  assert path.read_text() == old
  added = [line[1:] for line in shown.splitlines() if re.match(r"\+(?!\+\+)", line)]
  assert set(added) <= set(new.splitlines()) and set(new.splitlines()) - set(
    old.splitlines()
  ) <= set(added)
  port.main([str(path), "--write"])
  *listed, last = capsys.readouterr().out.splitlines()
  assert path.read_text() == new
  found = [
    re.sub(rf"{re.escape(str(path))}:(\d+): ([^:]*(?:\(.*?=\))?): .+", r"\1 \2", x) for x in listed
  ]
  assert "\n".join(found) == notes
  assert (
    last == f"{changes} places rewritten, {len(listed)} to look at; docs/porting.md explains each"
  )


def test_what_stays_of_compat_v1_is_named():
  result = port.port(PROGRAMS["names that one has"][0])
  assert result.notes[0].advice.startswith(
    "stays while these are used: tf.fifth, tf.fourth, tf.nothing, tf.other, tf.placeholder, ...;"
  )
  few = port.port(
    "import mesh_tensorflow as mtf\nimport tensorflow.compat.v1 as tf\ntf.a1()\ntf.a2.b(tf.a2)\n"
  )
  assert few.notes[0].advice.startswith("stays while these are used: tf.a1, tf.a2.b; TensorFlow's")


@pytest.mark.parametrize(
  "line",
  ["from tensorflow import keras", "from tensorflow import keras, estimator",
  "import tensorflow_text",
   "from tensorflow.compat import v2", "from tensorflow import data as estimator"],
)  # fmt: skip
def test_other_imports_stay(line):
  source = f"import mesh_tensorflow as mtf\n{line}\n"
  assert port.port(source) == port.Ported(source, 0, ())


def test_files_and_folders(tmp_path, capsys):
  """Folders are looked through; what cannot be read is told, and counts; the exit code is 0."""
  (tmp_path / "a" / "b").mkdir(parents=True)
  plain = "import mesh_tensorflow as mtf\nimport tensorflow.compat.v1 as tf\n"
  (tmp_path / "a" / "one.py").write_text(plain + "tf.disable_v2_behavior()\n")
  (tmp_path / "a" / "b" / "two.py").write_text(plain + "x = tf.placeholder(1)\n")
  (tmp_path / "a" / "b" / "three.txt").write_text("tf.disable_v2_behavior()\n")
  (tmp_path / "a" / "bad.py").write_text("print 'x'\n")
  (tmp_path / "a" / "latin.py").write_bytes(b"# \xff\n")
  port.main([str(tmp_path / "a")])
  out, err = capsys.readouterr()
  assert f"--- {tmp_path}/a/one.py\n+++ {tmp_path}/a/one.py (ported)\n" in out
  assert "-tf.disable_v2_behavior()\n" in out and "three.txt" not in out
  lines = err.splitlines()
  assert len(lines) == 2 and all(
    "not Python 3: " in x and x.endswith("; run 2to3 first") for x in lines
  )
  assert lines[0].startswith(f"{tmp_path}/a/bad.py:1: ")
  last = "2 places to be rewritten (--write does it), 4 to look at; docs/porting.md explains each"
  assert out.splitlines()[-1] == last
  (tmp_path / "empty").mkdir()
  for path, says in (
    (tmp_path / "empty", "no Python file in"),
    (tmp_path / "x.py", "no file or folder"),
  ):
    with pytest.raises(SystemExit) as e:
      port.main([str(path)])
    assert e.value.code == 2 and says in capsys.readouterr().err
