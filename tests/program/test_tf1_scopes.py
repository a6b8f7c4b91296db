"""TensorFlow's scopes left in a ported program, and the arguments that TensorFlow 1's had."""

from __future__ import annotations

import logging

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ArgumentError, VariableError
from mesh_tensorflow.program import tf_scopes
from mesh_tensorflow.program.scope import current_reuse

v1_scope = tf.compat.v1.variable_scope


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
  monkeypatch.setattr(tf_scopes, "_told", set())


@pytest.fixture
def mesh():
  return mtf.Mesh(mtf.Graph(), "m")


def get(mesh, name="w"):
  return mtf.get_variable(mesh, name, "a:4")


@pytest.mark.parametrize("scope", [v1_scope, tf.name_scope])
def test_two_layers_do_not_share_a_variable_without_a_word(mesh, scope):
  with scope("first"):
    get(mesh)
  with (
    scope("second"),
    pytest.raises(VariableError, match=r"(?s)w was made .*'first'.*'second'.*mtf\.variable_scope"),
  ):
    get(mesh)


def test_inside_a_tf_function():
  @tf.function
  def program():
    mesh = mtf.Mesh(mtf.Graph(), "m")
    with v1_scope("layer"):
      get(mesh)
    with v1_scope("layer_2"):
      get(mesh)

  with pytest.raises(VariableError, match=r"inside TensorFlow's scope 'layer_2'"):
    program()


@pytest.mark.parametrize("first,second", [("a", None), (None, "a")])
def test_one_of_the_two_is_outside(mesh, first, second):
  for name in (first, second):
    if name is None and name == first:
      get(mesh)
    elif name == first:
      with v1_scope(name):
        get(mesh)
  with pytest.raises(VariableError, match="outside TensorFlow's scopes"):
    if second is None:
      get(mesh)
    else:
      with v1_scope(second):
        get(mesh)


def test_a_scope_of_ours_inside_names_variables(mesh):
  for name in ("first", "second"):
    with v1_scope(name), mtf.variable_scope(name):
      get(mesh)
  assert [v.full_name for v in mesh.graph.all_variables] == ["first/w", "second/w"]


def test_variables_in_one_scope_are_shared(mesh):
  with v1_scope("a"):
    assert get(mesh) is get(mesh)


def test_what_is_shared_on_purpose(mesh):
  with tf.name_scope("embedding"):
    w = get(mesh)
  with (
    tf.name_scope("logits"),
    mtf.variable_scope(mtf.get_variable_scope(), reuse=True),
  ):
    assert get(mesh) is w


def test_the_step_and_slots_of_optimizers_are_in_any_scope(mesh, caplog):
  w = get(mesh)
  with tf.name_scope("schedule"):
    step = mtf.optimize.get_global_step(mesh)
  with (
    caplog.at_level(logging.WARNING, "mesh_tensorflow"),
    tf.name_scope("train"),
    mtf.variable_scope("net", reuse=False),
  ):
    assert mtf.optimize.get_global_step(mesh) is step
    mtf.optimize.MomentumOptimizer(0.1, 0.9).minimize(mtf.reduce_sum(w))
  assert not caplog.records
  assert step.operation.full_name == "global_step"


def test_a_warning_once(mesh, caplog):
  with caplog.at_level(logging.WARNING, "mesh_tensorflow"), v1_scope("net"):
    get(mesh)
    get(mesh, "b")
  (record,) = caplog.records
  assert "with mtf.variable_scope('net'):" in record.getMessage()


# What opens scopes around a whole program: no user's scope.


def model_twice(mesh):
  """A program that asks twice for one variable, in a scope of ours."""
  for _ in range(2):
    with mtf.variable_scope("net"):
      w = get(mesh)
  return w


def run_program(impl=None):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  loss = mtf.reduce_sum(mtf.square(model_twice(mesh)))
  mtf.gradients([loss], [v.value for v in mesh.graph.all_variables])
  impl = impl or mtf.PlacementMeshImpl("all:1", "", [""])
  model_twice(mesh)
  return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(loss)


@pytest.fixture
def no_warning(caplog):
  with caplog.at_level(logging.WARNING, "mesh_tensorflow"):
    yield
  assert not [r.getMessage() for r in caplog.records if "TensorFlow's scope" in r.getMessage()]


def test_no_alarm_in_a_keras_layer(no_warning):
  impl = mtf.PlacementMeshImpl("all:1", "", [""])
  seen = []

  class Layer(tf.keras.layers.Layer):
    def call(self, x):
      seen.append(tf.get_current_name_scope())
      return x + run_program(impl)

  tf.keras.Sequential([Layer(), Layer()])(tf.zeros([2, 3]))
  assert len(set(seen)) > 1


def test_no_alarm_in_replicas(no_warning, cpu_devices):
  strategy = tf.distribute.MirroredStrategy(cpu_devices[:2])
  seen = []

  @tf.function
  def step():
    def replica():
      seen.append(tf.get_current_name_scope())
      model_twice(mtf.Mesh(mtf.Graph(), "m"))
      return tf.constant(0.0)

    return strategy.run(replica)

  step()
  assert "replica_1" in seen


def test_no_alarm_in_our_own_meshes(no_warning, cpu_devices):
  for impl in (
    mtf.SimdMeshImpl("all:2", "a:all", cpu_devices[:2]),
    mtf.StrategyMeshImpl("all:2", "a:all", tf.distribute.MirroredStrategy(cpu_devices[:2])),
  ):
    for run in (impl.run, tf.function(impl.run)):
      run(lambda impl=impl: run_program(impl))


def test_no_alarm_in_a_function_or_its_loop(no_warning):
  impl = mtf.PlacementMeshImpl("all:1", "", [""])

  @tf.function
  def program():
    with tf.name_scope("step"):
      _, total = tf.while_loop(
        lambda i, s: i < 2, lambda i, s: (i + 1, s + run_program(impl)), (0, 0.0)
      )
    return total

  program()


# ------------------------------------------------------------- arguments of TensorFlow 1's scope


def test_reuse_true_shares_what_exists(mesh):
  with mtf.variable_scope("net"):
    w = get(mesh)
  with mtf.variable_scope("net", reuse=True):
    assert get(mesh) is w
    with pytest.raises(VariableError, match=r"net/b does not exist.*reuse=True.*has: net/w"):
      get(mesh, "b")


def test_reuse_false_makes_new_ones(mesh):
  for name in ("net", "net_2"):
    with mtf.variable_scope(name, reuse=False):
      get(mesh)
  with (
    mtf.variable_scope("net", reuse=False),
    pytest.raises(VariableError, match="net/w exists already.*reuse=False"),
  ):
    get(mesh)


@pytest.mark.parametrize("reuse", [None, "AUTO_REUSE", tf.compat.v1.AUTO_REUSE])
def test_auto_reuse_makes_and_shares(mesh, reuse):
  found = []
  for _ in range(2):
    with mtf.variable_scope("net", reuse=reuse):
      found.append(get(mesh))
  assert found[0] is found[1]


def reuse_inside(*reuses):
  """What holds inside scopes with these arguments, one in the other."""
  if not reuses:
    return current_reuse()
  with mtf.variable_scope("s", reuse=reuses[0]):
    return reuse_inside(*reuses[1:])


def test_reuse_is_inherited_as_in_tensorflow_1():
  auto = "AUTO_REUSE"
  assert reuse_inside(True, None) is True
  assert reuse_inside(True, False) is True
  assert reuse_inside(False, None) is False
  assert reuse_inside(False, True) is True
  assert reuse_inside(auto, False) == auto
  assert reuse_inside(True, auto) == auto
  with mtf.variable_scope("a", reuse=True) as opened:
    pass
  with mtf.variable_scope(opened):
    assert current_reuse() is True
  assert current_reuse() is None


@pytest.mark.parametrize(
  "argument,advice",
  [
    ("initializer", r"mtf\.get_variable\(\.\.\., initializer=\.\.\.\)"),
    ("regularizer", "penalty to the loss"),
    ("caching_device", "leave it out"),
    ("partitioner", "layout rules"),
    ("custom_getter", r"in place of mtf\.get_variable"),
    ("dtype", r"mtf\.get_variable\(\.\.\., dtype=\.\.\.\)"),
    ("use_resource", "leave it out"),
    ("constraint", r"mtf\.assign"),
    ("no_such", "has no argument 'no_such'; it has name_or_scope"),
  ],
)
def test_other_arguments_say_what_to_write(argument, advice):
  with pytest.raises(ArgumentError, match=advice), mtf.variable_scope("a", **{argument: 0}):
    pass


def test_arguments_without_effect(mesh):
  with mtf.variable_scope(
    "a", auxiliary_name_scope=False, values=[1], use_resource=True, initializer=None
  ):
    assert get(mesh).operation.full_name == "a/w"


@pytest.mark.parametrize("reuse", [1, "yes", tf.constant(True)])
def test_reuse_of_another_kind(reuse):
  with pytest.raises(ArgumentError, match="reuse must be"), mtf.variable_scope("a", reuse=reuse):
    pass
