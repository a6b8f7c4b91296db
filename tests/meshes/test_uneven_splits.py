"""Dimensions that their mesh axis does not divide, split all the same."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.numerics import padding

VOCAB = mtf.Dimension("vocab", 65)


def impl_of(devices, mesh, layout, kind="placement"):
  size = mtf.convert_to_shape(mesh).size
  cls = mtf.simd_mesh_impl.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  return cls(mesh, layout, devices[:size])


def values_of(impl, build, traced=False):
  """Exports what `build(mesh)` returns, a list of tensors."""

  def program():
    mesh = mtf.Mesh(mtf.Graph(), "m")
    outputs = build(mesh)
    lowering = mtf.Lowering(mesh.graph, {mesh: impl}, seed=0)
    return [lowering.export_to_tf_tensor(y) for y in outputs]

  def run():
    return impl.run(program)

  return [y.numpy() for y in (tf.function(run, autograph=False) if traced else run)()]


class TestRules:
  def test_a_tilde_is_no_part_of_the_name(self):
    rules = mtf.convert_to_layout_rules("vocab:model~,batch:rows")
    assert rules.pairs == [("batch", "rows"), ("vocab", "model")]
    assert rules.uneven == {("vocab", "model")}
    assert rules.to_string == "batch:rows,vocab:model~"

  def test_written_rules_are_the_same_rules(self):
    rules = mtf.convert_to_layout_rules({"vocab": "model~", "batch": "rows"})
    for again in (rules.to_string, rules.written):
      assert mtf.convert_to_layout_rules(again) == rules
    assert rules != mtf.convert_to_layout_rules("vocab:model,batch:rows")
    assert "('vocab', 'model~')" in repr(rules)

  def test_largest_part(self):
    rules, shape = "vocab:model~", mtf.convert_to_shape("model:4")
    assert mtf.tensor_dim_to_size_per_split(rules, shape, VOCAB) == 17
    with pytest.raises(LayoutError, match="the rule vocab:model~, which splits it unevenly"):
      mtf.tensor_dim_to_size_per_split("vocab:model", shape, VOCAB)


class TestPlaces:
  @pytest.mark.parametrize(
    ("size", "n", "begins", "extents"),
    [
      (65, 4, [0, 17, 34, 51], [17, 17, 17, 14]),
      (3, 4, [0, 1, 2, 3], [1, 1, 1, 0]),
      (9, 4, [0, 3, 6, 9], [3, 3, 3, 0]),
      (1, 2, [0, 1], [1, 0]),
      (8, 4, [0, 2, 4, 6], [2, 2, 2, 2]),
    ],
  )
  def test_slices(self, cpu_devices, size, n, begins, extents):
    impl = impl_of(cpu_devices, [("model", n)], "vocab:model~")
    shape = mtf.Shape([("a", 2), ("vocab", size)])
    assert impl.slice_shape(shape) == [2, -(-size // n)]
    assert [impl.slice_begin(shape, p)[1] for p in range(n)] == begins
    assert [impl.slice_extent(shape, p)[1] for p in range(n)] == extents
    assert impl.uneven_axes(shape) == ((1,) if size % n else ())

  def test_an_even_size_is_split_as_without_the_tilde(self, cpu_devices):
    def operations(layout):
      impl = impl_of(cpu_devices, "model:4", layout)

      def build(mesh):
        x = mtf.import_tf_tensor(mesh, tf.range(64.0), [("vocab", 64)])
        w = mtf.get_variable(mesh, "w", [("vocab", 64), ("d", 8)])
        y = mtf.softmax(mtf.einsum([x, w], [("d", 8)]), mtf.Dimension("d", 8))
        return [y, mtf.reduce_max(w), *mtf.gradients([y], [w])]

      def step():
        mesh = mtf.Mesh(mtf.Graph(), "m")
        outputs = build(mesh)
        lowering = mtf.Lowering(mesh.graph, {mesh: impl}, seed=0)
        return [lowering.export_to_tf_tensor(y) for y in outputs]

      graph = tf.function(step, autograph=False).get_concrete_function().graph
      return [op.type for op in graph.get_operations()]

    assert operations("vocab:model~") == operations("vocab:model")

  @pytest.mark.parametrize("kind", ["placement", "simd"])
  @pytest.mark.parametrize("size", [1, 3, 5, 10])
  def test_import_and_export(self, cpu_devices, kind, size):
    x = np.arange(float(2 * size), dtype=np.float32).reshape([2, size])
    impl = impl_of(cpu_devices, "model:4", "n:model~", kind)
    (y,) = values_of(impl, lambda mesh: [mtf.import_tf_tensor(mesh, x, [("a", 2), ("n", size)])])
    np.testing.assert_array_equal(x, y)

  @pytest.mark.parametrize(
    ("processors", "begin", "size"), [([0, 1], 0, 6), ([2, 3], 6, 3), ([3], 9, 0)]
  )
  def test_part_of_a_worker(self, cpu_devices, monkeypatch, processors, begin, size):
    impl = impl_of(cpu_devices, "model:4", "n:model~", "simd")
    monkeypatch.setattr(impl, "_here", processors)
    assert impl.local_part(mtf.Shape([("a", 2), ("n", 9)])) == ([0, begin], [2, size])


class TestErrors:
  def test_without_the_tilde(self, cpu_devices):
    impl = impl_of(cpu_devices, "model:4", "vocab:model")
    with pytest.raises(
      LayoutError, match="4 does not divide 65; legal: .* or the rule vocab:model~"
    ):
      values_of(impl, lambda mesh: [mtf.zeros(mesh, [VOCAB])])

  def test_two_dimensions_on_one_axis(self, cpu_devices):
    impl = impl_of(cpu_devices, "model:4", "vocab:model~,d:model~")
    with pytest.raises(LayoutError, match="vocab:65 and d:6 are both split over mesh axis model:4"):
      values_of(impl, lambda mesh: [mtf.zeros(mesh, [VOCAB, ("d", 6)])])

  def test_what_must_not_be_split_evenly(self, cpu_devices):
    impl = impl_of(cpu_devices, "model:4", "n:model~")
    with pytest.raises(LayoutError, match="n:8 of .* is split over mesh axis model:4"):
      values_of(impl, lambda mesh: [mtf.slice(mtf.zeros(mesh, "n:8"), 0, 4, "n")])

  def test_an_update_that_is_not_made_for_it(self, cpu_devices):
    class Update(mtf.Operation):
      def __init__(self, w):
        super().__init__([w], name="update")
        self.variables = [w.operation]

      def lower(self, lowering):
        raise AssertionError

    def build(mesh):
      w = mtf.get_variable(mesh, "w", [VOCAB])
      Update(w)
      return [w]

    impl = impl_of(cpu_devices, "model:4", "vocab:model~")
    with pytest.raises(LayoutError, match="Update update: dimension vocab:65 is split unevenly"):
      values_of(impl, build)


class TestOtherOperations:
  """Those that know nothing of padding see whole dimensions."""

  class Reverse(mtf.Operation):
    """An operation of a user."""

    def __init__(self, x):
      super().__init__([x], name="reverse")
      self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys):
      return [TestOtherOperations.Reverse(grad_ys[0]).outputs[0]]

    def verify_layout(self, mesh_impl):
      super().verify_layout(mesh_impl)
      self._require_unsplit(mesh_impl, self.inputs[0].shape[0], "it is reversed")

    def lower(self, lowering):
      lowering.set_tensor_lowering(
        self.outputs[0],
        lowering.mesh_impl(self).slicewise(
          lambda t: tf.reverse(t, [0]), lowering.tensors[self.inputs[0]]
        ),
      )

  @pytest.mark.parametrize("kind", ["placement", "simd"])
  @pytest.mark.parametrize("traced", [False, True])
  def test_inputs_are_gathered(self, cpu_devices, kind, traced):
    x = np.arange(10, dtype=np.float32).reshape([5, 2])

    def build(mesh):
      y = self.Reverse(mtf.import_tf_tensor(mesh, x, "n:5,d:2")).outputs[0]
      return [y, mtf.reduce_sum(y * y)]

    with padding.filled_with(float("nan")):
      y, total = values_of(impl_of(cpu_devices, "model:4", "n:model~", kind), build, traced)
    np.testing.assert_array_equal(y, x[::-1])
    np.testing.assert_allclose(total, np.sum(x * x))

  @pytest.mark.parametrize("kind", ["placement", "simd"])
  def test_integers_are_not_divided_by_padding(self, cpu_devices, kind):
    x = np.arange(1, 6, dtype=np.int32)

    def build(mesh):
      n = mtf.import_tf_tensor(mesh, x, "n:5")
      looked_up = mtf.cwise(lambda i: tf.gather(tf.range(10), i), [n])
      return [mtf.floordiv(n * 7, n), mtf.mod(n, n + 1), looked_up]

    impl = impl_of(cpu_devices, "model:4", "n:model~", kind)
    with padding.filled_with(float("nan")):
      for got, want in zip(values_of(impl, build), [7 * x // x, x % (x + 1), x]):
        np.testing.assert_array_equal(got, want)


class TestVariables:
  @pytest.mark.parametrize("initializer", [None, 3.0, tf.keras.initializers.RandomNormal(seed=1)])
  @pytest.mark.parametrize("layout", ["vocab:model~", "d:model~"])
  def test_initial_values_are_those_of_one_device(self, cpu_devices, layout, initializer):
    found = []
    for mesh, rules in (("model:1", ""), ("model:4", layout)):
      impl = impl_of(cpu_devices, mesh, rules)
      values_of(
        impl,
        lambda m: [mtf.get_variable(m, "w", [VOCAB, ("d", 3)], initializer=initializer)],
      )
      found.append(impl.variable_store["w"].numpy())
    np.testing.assert_array_equal(*found)

  @pytest.mark.parametrize("size", [3, 9, 65])
  def test_assign_keeps_the_padding_finite(self, cpu_devices, size):
    impl = impl_of(cpu_devices, "model:4", "n:model~")
    x = np.arange(float(size), dtype=np.float32)

    def build(mesh):
      w = mtf.get_variable(mesh, "w", [("n", size)], initializer=1.0)
      mtf.assign_add(w, mtf.import_tf_tensor(mesh, x, [("n", size)]))
      return [w]

    with padding.filled_with(float("nan")):
      values_of(impl, build)
    stored = impl.variable_store["w"]
    np.testing.assert_array_equal(stored.numpy(), x + 1.0)
    for begin, v in zip(stored.begins, stored.slices):
      behind = v.numpy()[stored.extent(begin)[0] :]
      np.testing.assert_array_equal(behind, np.zeros_like(behind))
    stored.assign(x)
    np.testing.assert_array_equal(stored.numpy(), x)
