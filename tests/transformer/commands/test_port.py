"""mesh-tensorflow-port: what it rewrites, what it lists, what it leaves alone."""

from __future__ import annotations

import ast
import random
import re

import pytest

from mesh_transformer_cli import port
from mesh_transformer_cli.port import Note

HEAD = "import mesh_tensorflow as mtf\nimport tensorflow.compat.v1 as tf\n"


def ported(body: str, head: str = HEAD) -> tuple[str, list[str]]:
  """The program without its imports, and what was listed."""
  result = port.port(head + body)
  ast.parse(result.text)
  text = result.text.split("as tf\n", 1)[-1]
  return text, [n.what for n in result.notes if n.what != "tensorflow.compat.v1"]


@pytest.mark.parametrize(
  ("old", "new"),
  [
    ('with tf.variable_scope("a"):\n  f()\n', 'with mtf.variable_scope("a"):\n  f()\n'),
    (
      "s = tf.variable_scope('a', reuse=tf.AUTO_REUSE)\n",
      "s = mtf.variable_scope('a', reuse=None)\n",
    ),
    ("s = tf.compat.v1.variable_scope('a')\n", "s = mtf.variable_scope('a')\n"),
    ("s = tf.get_variable_scope()\n", "s = mtf.get_variable_scope()\n"),
    ("m = mode == tf.estimator.ModeKeys.TRAIN\n", 'm = mode == "train"\n'),
    (
      "m = [tf.estimator.ModeKeys.EVAL, mtf.tf_estimator.ModeKeys.PREDICT]\n",
      'm = ["eval", "infer"]\n',
    ),
    ("tf.disable_v2_behavior()\nx = 1\n", "x = 1\n"),
    ("if x:\n  tf.disable_v2_behavior()  # so\n", "if x:\n  pass  # so\n"),
    (
      "é = 'ü'; s = tf.get_variable_scope()  # größer\n",
      "é = 'ü'; s = mtf.get_variable_scope()  # größer\n",
    ),
    (
      "y = mtf.dropout(x, is_training=t, rate=0.1)\n",
      "y = mtf.dropout(x, is_training=t, rate=0.1)\n",
    ),
    ("y = mtf.dropout(x, train, 0.9)\n", "y = mtf.dropout(x, train, 0.9)\n"),
    ("y = mtf.dropout(x, True, 0.9)\n", "y = mtf.dropout(x, True, 0.9)\n"),
    ("y = mtf.dropout(x, **kw)\n", "y = mtf.dropout(x, **kw)\n"),
  ],
)
def test_rewritten_without_a_word(old, new):
  assert ported(old) == (new, [])


@pytest.mark.parametrize(
  ("old", "new"),
  [
    (
      "y = mtf.dropout(x, keep_prob=0.9)\n",
      "y = mtf.dropout(x, is_training=True, keep_prob=0.9)\n",
    ),
    ("y = mtf.dropout(x, 0.9)\n", "y = mtf.dropout(x, is_training=True, keep_prob=0.9)\n"),
    (
      "y = mtf.dropout(x, None, 1.0 - keep, s)\n",
      "y = mtf.dropout(x, is_training=True, keep_prob=None, rate=1.0 - keep, noise_shape=s)\n",
    ),
    (
      "y = mtf.dropout(f(\n  x), hparams.keep_prob)\n",
      "y = mtf.dropout(f(\n  x), is_training=True, keep_prob=hparams.keep_prob)\n",
    ),
  ],
)
def test_dropout_of_0_1_18_is_rewritten_and_listed(old, new):
  assert ported(old) == (new, ["mtf.dropout"])


def test_the_global_step_is_that_of_the_mesh_where_one_is_known():
  body = "def f(x):\n  m = mtf.Mesh(g, 'm')\n  return tf.train.get_global_step()\n"
  text, notes = ported(body)
  assert "return mtf.optimize.get_global_step(m)" in text
  assert notes == ["tf.train.get_global_step"]
  text, notes = ported("def f(x):\n  return tf.train.get_or_create_global_step()\n")
  assert "tf.train.get_or_create_global_step()" in text
  assert notes == ["tf.train.get_or_create_global_step"]


def test_imports():
  plain = "import mesh_tensorflow as mtf\nimport tensorflow as tf\n"
  assert (
    port.port(HEAD + "x = tf.cast(y, tf.float32)\n").text == plain + "x = tf.cast(y, tf.float32)\n"
  )
  kept = port.port(HEAD + "x = tf.to_float(y)\n")
  assert kept.text == HEAD + "x = tf.to_float(y)\n"
  assert [n.line for n in kept.notes] == [2, 3]
  assert "tf.to_float" in kept.notes[0].advice
  estimator = "from tensorflow_estimator import estimator\n"
  modes = port.port(HEAD + "from tensorflow import estimator\nm = estimator.ModeKeys.TRAIN\n")
  assert modes.text == plain + 'm = "train"\n'
  private = port.port(HEAD + "from tensorflow.python.framework import ops\nops.f()\n")
  assert [n.what for n in private.notes if "import" in n.what] == [
    "from tensorflow.python.framework import ops"
  ]
  unused = port.port(HEAD + estimator + "x = 1\n")
  assert "estimator" not in unused.text
  other = port.port(
    "from mesh_tensorflow import layers\nimport tensorflow as tf\ntf.get_variable_scope()\n"
  )
  assert other.text.startswith(
    "import mesh_tensorflow as mtf\nfrom mesh_tensorflow import layers\n"
  )


def test_lines_are_those_of_the_rewritten_program():
  result = port.port(HEAD + "tf.disable_v2_behavior()\n\nx = tf.placeholder(tf.float32)\n")
  lines = result.text.splitlines()
  note = next(n for n in result.notes if n.what == "tf.placeholder")
  assert isinstance(note, Note)
  assert "tf.placeholder" in lines[note.line - 1]


STATEMENTS = [
  "with tf.variable_scope('s{}', reuse=tf.AUTO_REUSE):\n  y{} = 1\n",
  "mode{} = tf.estimator.ModeKeys.TRAIN\n",
  "y{} = mtf.dropout(x, keep_prob=0.5)  # größe {}\n",
  "y{} = mtf.dropout(x, 0.5, None, x.shape)\n",
  "def f{}(mesh):\n  return tf.train.get_global_step()\n",
  "def g{}():\n  tf.disable_eager_execution()\n",
  "saver{} = tf.train.Saver(tf.global_variables())\n",
  "it{} = data.make_one_shot_iterator()\n",
  "z{} = tf.reshape(tf.cast(x, tf.float32), [2, 3]); q = 'ü'\n",
  "spec{} = tf.estimator.EstimatorSpec(mode, loss=x)\n",
  "mtf.MtfRestoreHook(lowering{})\n",
]


def test_drawn_programs_are_still_programs_and_a_second_run_changes_nothing():
  for seed in range(200):
    draw = random.Random(seed)
    chosen = [draw.choice(STATEMENTS) for _ in range(draw.randint(1, 12))]
    source = HEAD + "".join(s.format(i, i) for i, s in enumerate(chosen))
    once = port.port(source)
    ast.parse(once.text)
    again = port.port(once.text)
    assert again.text == once.text, source
    for note in once.notes:
      if note.what.startswith("tf.") and "global_step" not in note.what:
        assert note.what in once.text.splitlines()[note.line - 1], (note, once.text)


def test_programs_for_this_library_are_left_alone(repository):
  for path in sorted((repository / "examples").glob("*.py")):
    source = path.read_text()
    assert port.port(source).text == source, path.name


def test_a_ported_program_runs(tmp_path, run_forked):
  old = """
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf
from tensorflow_estimator import estimator as unused

tf.disable_v2_behavior()
graph = mtf.Graph()
mesh = mtf.Mesh(graph, "mesh")
mode = tf.estimator.ModeKeys.TRAIN
x = mtf.import_tf_tensor(mesh, tf.ones([4, 6]), shape=[("batch", 4), ("io", 6)])
with tf.variable_scope("net", reuse=tf.AUTO_REUSE):
  w = mtf.get_variable(mesh, "w", [("io", 6)])
  y = mtf.dropout(x * w, keep_prob=0.5)
impl = mtf.PlacementMeshImpl("r:2", "batch:r", [""] * 2)
lowering = mtf.Lowering(graph, {mesh: impl})
print(mode, lowering.export_to_tf_tensor(y).shape, impl.variable_store.names)
"""
  program = tmp_path / "old.py"
  program.write_text(old)
  port.main([str(program), "--write"])
  assert "compat" not in program.read_text()
  assert "train (4, 6) ['net/w'" in run_forked([str(program)], timeout=120).stdout


def test_the_command(tmp_path, capsys):
  program = tmp_path / "folder" / "old.py"
  program.parent.mkdir()
  program.write_text(HEAD + "s = tf.get_variable_scope()\nx = tf.placeholder(tf.float32)\n")
  before = program.read_text()
  port.main([str(program.parent)])
  out = capsys.readouterr().out
  assert "+s = mtf.get_variable_scope()" in out
  assert f"{program}:4: tf.placeholder: an argument of the function" in out
  assert program.read_text() == before
  port.main([str(program), "--write"])
  assert "+s" not in capsys.readouterr().out
  assert program.read_text() != before
  (program.parent / "two.py").write_text("print 'hello'\n")
  port.main([str(program.parent)])
  assert re.search(r"two.py:1: not Python 3", capsys.readouterr().err)
  for wrong in (["nowhere.py"], [], [str(tmp_path / "folder"), "--what"]):
    with pytest.raises(SystemExit) as e:
      port.main(wrong)
    assert e.value.code == 2
