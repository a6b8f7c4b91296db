"""Drawn programs with loops: the searched layout lowers, and gives the values of one device."""

import random

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.planning import Machine
from tests.kinds import kept
from tests.planning.test_machine import fields

# Exchanges cost next to nothing, so that layouts split even small programs.
MACHINE = Machine.from_dict(fields(links__0__latency=1e-12, links__0__bandwidth=1e15))
MESHES = ["x:1", "x:2", "x:4", "x:2,y:2", "x:2,y:1", "x:4,y:2", "x:2,y:2,z:2"]


def draw_step(seed):
  """A function of a mesh implementation that makes a drawn training step."""

  def make(impl):
    draw = random.Random(seed)
    sizes = {n: draw.choice([4, 8]) for n in ("rows", "width", "deep")}
    rows, width, deep = (mtf.Dimension(n, s) for n, s in sizes.items())

    @mtf.function(impl, input_signature=[mtf.TensorSpec([rows, width])])
    def step(x):
      mesh, draw = x.mesh, random.Random(seed + 1)  # The same, each time it is traced.
      ones = mtf.initializers.RandomNormal(stddev=0.3)
      w = mtf.get_variable(mesh, "w", [width, deep], initializer=ones)
      v = mtf.get_variable(mesh, "v", [deep, width], initializer=ones)

      def piece(x, depth):
        kind = draw.choice(["dense", "dense", "tanh", "mean", "softmax", "cond", "loop", "scale"])
        if kind == "dense":
          h = mtf.tanh(mtf.einsum([x, w], output_shape=[rows, deep]))
          return mtf.einsum([h, v], output_shape=[rows, width])
        if kind == "mean":
          return x - mtf.reduce_mean(x, reduced_dim=draw.choice([rows, width]))
        if kind == "softmax":
          return mtf.softmax(x, draw.choice([rows, width]))
        if kind == "scale":
          return x * mtf.sigmoid(mtf.reduce_max(x, reduced_dim=draw.choice([rows, width])))
        if kind == "cond" and depth:
          pred = mtf.greater(mtf.reduce_sum(x), 0.0)
          return mtf.cond(pred, lambda: piece(x, depth - 1), lambda: x * 0.5)
        if kind == "loop" and depth:
          return loop(x, depth - 1)
        return mtf.tanh(x)

      def loop(x, depth):
        times, known = draw.randint(1, 3), draw.random() < 0.5
        count = draw.randint(1, 2)

        def body(i, x):
          for _ in range(count):
            x = piece(x, depth)
          return i + 1, x

        start = [mtf.constant(mesh, 0, dtype=tf.int32), x]
        most = {"maximum_iterations": times} if known else {}
        return mtf.while_loop(lambda i, _: mtf.less(i, times), body, start, **most)[1]

      y = x
      for _ in range(draw.randint(0, 2)):
        y = piece(y, 1)
      y = loop(y, 1)
      loss = mtf.reduce_sum(mtf.square(y + mtf.reduce_sum(w) + mtf.reduce_sum(v)))
      gradients = mtf.gradients([loss], [x, w, v])
      return [loss, y, *gradients]

    return step, [sizes["rows"], sizes["width"]]

  return make


def check(seed, devices):
  draw = random.Random(seed)
  mesh = mtf.convert_to_shape(draw.choice(MESHES))
  make = draw_step(seed)
  tf.random.set_seed(seed)
  alone = mtf.PlacementMeshImpl("x:1", "", devices[:1])
  step, shape = make(alone)
  x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
  expected = [np.asarray(t) for t in step(x)]
  values = {v.name: v.numpy() for v in map(alone.variable_store.__getitem__, ["w", "v"])}
  impl = mtf.PlacementMeshImpl(mesh, "", devices[: mesh.size])
  choice = mtf.auto_layout(make(impl)[0], mesh_shape=mesh, machine=MACHINE, time_limit=20)
  impl = impl.with_layout(choice.layout)
  step, _ = make(impl)
  step(x)  # Makes the variables.
  for name, value in values.items():
    impl.variable_store[name].assign(value)
  for a, b in zip(step(x), expected, strict=True):
    np.testing.assert_allclose(np.asarray(a), b, rtol=2e-4, atol=2e-4 * max(1, np.abs(b).max()))
  return len(choice.layout.pairs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", kept(list(range(6)), [0, 1, 2]))
def test_searched_layouts_of_drawn_loops_give_the_values_of_one_device(seed, cpu_devices):
  check(seed, cpu_devices)


@pytest.mark.long
def test_searched_layouts_of_many_drawn_loops(cpu_devices):
  assert sum(check(seed, cpu_devices) > 0 for seed in range(100, 200)) > 30
