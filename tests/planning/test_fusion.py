"""What kernels of fused elementwise operations read and write, counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.planning.evaluation import Evaluator
from mesh_tensorflow.planning.machine import Machine

ROWS, IN, OUT = mtf.Dimension("rows", 64), mtf.Dimension("d", 32), mtf.Dimension("out", 128)
FUSED = Machine.load("a100-fused")
WIDE = 4 * 64 * 128  # Bytes of a tensor of rows and outputs.


def moved(build, layout="", mesh=""):
  """Bytes and launches of each operation that is no product, by its name, if they are fused."""
  graph = mtf.Graph()
  mesh_of_graph = mtf.Mesh(graph, "m")
  x = mtf.import_tf_tensor(mesh_of_graph, tf.zeros([64, 32]), [ROWS, IN])
  w = mtf.import_tf_tensor(mesh_of_graph, tf.zeros([32, 128]), [IN, OUT])
  bias = mtf.import_tf_tensor(mesh_of_graph, tf.zeros([128]), [OUT])
  results = build(x, w, bias)
  costs = Evaluator(graph, results).evaluate(mesh, layout).costs_on(FUSED)
  works = {op.name: cost.work for op, cost in costs.items() if op.inputs and not cost.flops}
  return {name: (work.traffic, work.launches) for name, work in works.items()}


def layer(x, w, bias):
  h = mtf.einsum([x, w], [ROWS, OUT])
  return mtf.relu(mtf.add(h, bias, name="biased"), name="relu")


@pytest.mark.parametrize("parts", [1, 4])
def test_a_chain_between_products_is_a_kernel(parts):
  def build(x, w, bias):
    y = mtf.multiply(layer(x, w, bias), 2.0, name="doubled")
    return [mtf.einsum([y, w], [ROWS, IN])]

  found = moved(build, "rows:r", f"r:{parts}")
  last = [name for name in found if "biased" not in name and "relu" not in name]
  # It reads the product and the bias, which is whole, and writes what the other product reads.
  assert [found[name] for name in last] == [(2 * WIDE // parts + 4 * 128, 1)]
  assert {found[name] for name in found if name not in last} == {(0, 0)}


def test_what_two_kernels_read_is_computed_in_both_if_less_moves_so():
  def build(x, w, bias):
    y = layer(x, w, bias)
    return [mtf.reduce_sum(y, reduced_dim=OUT), mtf.reduce_max(y, reduced_dim=ROWS)]

  found = moved(build)
  assert found["relu"] == found["biased"] == (0, 0)
  reads = WIDE + 4 * 128
  assert sorted(found.values())[2:] == [(reads + 4 * 64, 1), (reads + 4 * 128, 1)]


def test_what_is_made_of_much_is_written_once():
  def build(x, w, bias):
    h = mtf.einsum([x, w], [ROWS, OUT])
    sums = h
    for i in range(3):
      sums = mtf.add(sums, mtf.einsum([x, w * float(i)], [ROWS, OUT]), name=f"sum{i}")
    return [mtf.reduce_sum(sums, reduced_dim=OUT), mtf.reduce_max(sums, reduced_dim=ROWS)]

  found = moved(build)
  assert found["sum0"] == found["sum1"] == (0, 0)
  assert found["sum2"] == (4 * WIDE + WIDE, 1)


def test_a_softmax_and_results_are_in_memory():
  def build(x, w, bias):
    logits = layer(x, w, bias)
    weights = mtf.softmax(logits, OUT, name="softmax")
    return [mtf.negative(weights), weights]

  found = moved(build)
  assert found["softmax"] == (2 * WIDE + 4 * 128, 1)
  assert found["negative"] == (2 * WIDE, 1)


def test_what_the_backward_pass_reads_is_in_memory():
  def build(x, w, bias):
    h = mtf.einsum([x, w], [ROWS, OUT])
    y = mtf.tanh(mtf.add(h, bias, name="biased"), name="tanh")
    loss = mtf.reduce_sum(y, name="loss")
    return [loss, *mtf.gradients([loss], [w])]

  found = moved(build)
  assert found["biased"] == (0, 0)
  # The gradient of tanh is made of its result.
  assert found["tanh"] == (2 * WIDE + 4 * 128, 1)


def test_a_search_predicts_what_describe_does():
  batch = mtf.Dimension("rows", 4096)

  @mtf.function(mtf.MeshImpl("", ""), [mtf.TensorSpec([batch, IN])])
  def step(x):
    y = mtf.layers.dense(x, OUT, reduced_dims=[IN], activation=mtf.gelu, name="a")
    loss = mtf.reduce_mean(mtf.square(mtf.layers.dense(y, IN, reduced_dims=[OUT], name="b")))
    mtf.optimize.SgdOptimizer(0.1).minimize(loss)
    return loss

  choice = mtf.auto_layout(step, mesh_shape="a:2", machine=FUSED)
  report = mtf.describe(step, choice.layout, "a:2", machine=FUSED)
  assert report.seconds == pytest.approx(choice.seconds)
  unfused = dataclasses.replace(
    FUSED, device=dataclasses.replace(FUSED.device, fuses_elementwise=False)
  )
  plain = mtf.describe(step, choice.layout, "a:2", machine=unfused)
  assert plain.time.work.traffic > 2 * report.time.work.traffic
  assert plain.time.work.products == report.time.work.products
