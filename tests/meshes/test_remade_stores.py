"""A mesh implementation that is made anew in each step: told once, and only then."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.meshes import remade_stores

X = np.random.default_rng(0).normal(size=[4, 8]).astype(np.float32)


@pytest.fixture(autouse=True)
def new_lines(monkeypatch):
  monkeypatch.setattr(remade_stores, "_lines", {})


@pytest.fixture
def told(caplog):
  caplog.set_level(logging.WARNING, "mesh_tensorflow")
  return lambda: [m for m in map(logging.LogRecord.getMessage, caplog.records) if "anew" in m]


def lowered_loss(impl, x=X, learning_rate=0.1, name="w"):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  batch, io = mtf.Dimension("b", 4), mtf.Dimension("i", 8)
  w = mtf.get_variable(mesh, name, [io])
  y = mtf.einsum([mtf.import_tf_tensor(mesh, x, [batch, io]), w], [batch])
  loss = mtf.reduce_mean(mtf.square(y))
  if learning_rate:
    mtf.optimize.AdafactorOptimizer(learning_rate).minimize(loss)
  return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(loss)


def placement(**kwargs):
  return mtf.PlacementMeshImpl("all:1", "", [""], **kwargs)


def simd(**kwargs):
  return mtf.SimdMeshImpl("all:2", "b:all", ["/device:CPU:0", "/device:CPU:1"], **kwargs)


@pytest.mark.parametrize("make", [placement, simd])
def test_in_a_step(make, told):
  losses = []
  for _ in range(5):
    impl = make()
    losses.append(float(impl.run(lowered_loss, (impl,))))
  assert len(set(losses)) == 1
  (message,) = told()
  assert "with it the variables (w, ...)" in message
  assert "variable_store=" in message


def test_in_a_tf_function_that_is_traced_again(told):
  @tf.function(autograph=False)
  def step(x, scale):
    return lowered_loss(placement(), x * scale)

  assert step(X, 1.0) > step(X, 1.0)
  assert not told()
  step(X, 2.0)
  (message,) = told()
  assert "trace of its tf.function" in message


# ---------------------------------------------------------------------------- no false alarm


def test_a_store_given(told):
  store = mtf.VariableStore()
  losses = []
  for _ in range(4):
    losses.append(float(lowered_loss(placement(variable_store=store))))
  assert not told() and losses[3] < losses[0]


def test_one_outside(told):
  impl = placement()
  for _ in range(5):
    lowered_loss(impl)
  assert not told()


@pytest.mark.parametrize("make", [placement, simd])
def test_several_steps_of_each(make, told):
  """A search for the best learning rate."""
  for rate in (0.1, 0.2, 0.3, 0.4):
    impl = make()
    for _ in range(2):
      impl.run(lowered_loss, (impl, X, rate))
  assert not told()


@pytest.mark.parametrize(
  "look",
  [
    lambda store: store["w"].numpy(),
    lambda store: [v.name for v in store],
    lambda store: "w" in store,
    lambda store: store.names,
  ],
)
def test_variables_that_are_looked_at(look, told):
  for _ in range(4):
    impl = placement()
    lowered_loss(impl)
    look(impl.variable_store)
  assert not told()


def test_values_that_are_read_from_the_graph(told):
  for _ in range(4):
    impl = placement()
    mesh = mtf.Mesh(mtf.Graph(), "m")
    w = mtf.get_variable(mesh, "w", "i:8")
    mtf.assign(w, w * 2.0)
    mtf.Lowering(mesh.graph, {mesh: impl})
    w.operation.get_master().numpy()
    del mesh, w, impl
  assert not told()


def test_saved(told, tmp_path):
  from mesh_tensorflow.checkpoint import Checkpointer

  for i in range(4):
    impl = placement()
    lowered_loss(impl)
    Checkpointer(str(tmp_path / str(i)), impl.variable_store).save(1)
  assert not told()


def test_kept(told):
  kept = []
  for _ in range(5):
    kept.append(placement())
    lowered_loss(kept[-1])
  assert not told()


def test_only_evaluated(told):
  for _ in range(5):
    lowered_loss(placement(), learning_rate=None)
  assert not told()


def test_other_variables(told):
  for i in range(5):
    lowered_loss(placement(), name=f"w{i}")
  assert not told()


def test_other_layouts(told):
  for shape in ("all:1", "b:1", "c:1", "d:1"):
    lowered_loss(mtf.PlacementMeshImpl(shape, "", [""]))
  assert not told()


def test_functions_that_are_made_anew(told):
  """Each is trained as long as it is there, wherever its implementation is made."""
  for _ in range(4):
    step = tf.function(lambda: lowered_loss(placement()), autograph=False)
    impl = placement()
    other = tf.function(lambda impl=impl: lowered_loss(impl), autograph=False)
    for _ in range(2):
      step()
      other()
    del step, other
  assert not told()
