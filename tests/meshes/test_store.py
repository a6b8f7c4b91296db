"""The variable store: slices on their devices, equal values on every layout, one of each name."""

from __future__ import annotations

import types

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.meshes import store as blocks
from mesh_tensorflow.meshes.contract import LaidOutVariable
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.program.dimensions import convert_to_shape
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

SHAPE = convert_to_shape([("a", 8), ("b", 4)])
LAYOUTS = [
  ("", "", 1),
  ("rows:2,cols:2", "a:rows,b:cols", 4),
  ("rows:2,cols:2", "a:cols", 4),
  ("all:8", "a:all", 8),
  ("x:2,y:2,z:2", "b:z,a:x", 8),
]


def make_impl(devices, layout=LAYOUTS[1], store=None, kind=PlacementMeshImpl):
  shape, rules, size = layout
  return kind(shape, rules, devices[:size], variable_store=store)


def get(impl, name="w", shape=SHAPE, dtype=tf.float32, master=None, **kwargs):
  return impl.variable_store.get(
    impl, name, shape, master_dtype=master or dtype, slice_dtype=dtype, **kwargs
  )


def test_slices_are_on_their_devices_and_only_slices_exist(cpu_devices):
  stored = get(make_impl(cpu_devices))
  assert [v.shape.as_list() for v in stored.slices] == [[4, 2]] * 4
  assert stored.slice_shape == (4, 2)
  assert stored.begins == ((0, 0), (0, 2), (4, 0), (4, 2))
  assert [v.device.endswith(d) for v, d in zip(stored.slices, cpu_devices)] == [True] * 4


@pytest.mark.parametrize("kind", [PlacementMeshImpl, SimdMeshImpl])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
  "initializer",
  [
    None,
    tf.random_normal_initializer(stddev=2.0),
    tf.random_uniform_initializer(-3.0, 5.0),
    tf.keras.initializers.TruncatedNormal(stddev=1.0),
    mtf.initializers.RandomNormal(1.0, 3.0),
    mtf.initializers.TruncatedNormal(1.0, 3.0),
    mtf.initializers.RandomUniform(-2.0, 2.0),
    mtf.initializers.GlorotUniform(),
    mtf.initializers.Constant(np.arange(32.0).reshape(8, 4)),
    mtf.layers.VarianceScalingInitializer()([SHAPE[0]], [SHAPE[1]]),
    mtf.layers.VarianceScalingInitializer(distribution="uniform")([SHAPE[0]], [SHAPE[1]]),
  ],
)
def test_initial_values_do_not_depend_on_the_layout(cpu_devices, layout, initializer, kind):
  one = get(make_impl(cpu_devices, LAYOUTS[0]), initializer=initializer).numpy()
  assert len(np.unique(one)) == one.size
  other = get(make_impl(cpu_devices, layout, kind=kind), initializer=initializer)
  # Up to the last bit: vectorized and scalar code round logarithms differently.
  np.testing.assert_allclose(other.numpy(), one, rtol=3e-7)
  whole = other.numpy()
  for begin, v in zip(other.begins, other.slices):  # Replicas too.
    part = tuple(slice(b, b + n) for b, n in zip(begin, other.slice_shape))
    np.testing.assert_array_equal(v.numpy(), whole[part])


def test_initial_values_depend_on_seed_and_name(cpu_devices):
  def values(seed, name):
    return get(make_impl(cpu_devices, store=VariableStore(seed=seed)), name).numpy()

  assert np.array_equal(values(1, "w"), values(1, "w"))
  assert not np.array_equal(values(1, "w"), values(2, "w"))
  assert not np.array_equal(values(1, "w"), values(1, "v"))


def test_found_again_by_name(cpu_devices):
  impl = make_impl(cpu_devices)
  w = get(impl, "scope/w")
  assert get(impl, "scope/w") is w
  assert get(make_impl(cpu_devices, store=impl.variable_store), "scope/w") is w
  v = get(impl, "v", trainable=False)
  store = impl.variable_store
  assert (store.names, len(store), list(store)) == (["scope/w", "v"], 2, [w, v])
  assert "v" in store and "x" not in store
  assert store["v"] is v
  with pytest.raises(errors.VariableError, match="no variable 'x'; known: scope/w, v"):
    store["x"]
  assert len(store.variables) == 8 and len(store.trainable_variables) == 4


def test_another_shape_dtype_or_layout_is_refused(cpu_devices):
  impl = make_impl(cpu_devices)
  get(impl)
  with pytest.raises(errors.VariableError, match=r"variable w exists with shape .*8.* a.*16"):
    get(impl, shape=convert_to_shape([("a", 16), ("b", 4)]))
  with pytest.raises(errors.VariableError, match="master float32, slice float32 .* bfloat16"):
    get(impl, dtype=tf.bfloat16)
  with pytest.raises(errors.VariableError, match="master bfloat16, slice float32"):
    get(impl, master=tf.bfloat16)
  with pytest.raises(errors.VariableError, match="dimensions are named differently"):
    get(impl, shape=convert_to_shape([("c", 8), ("b", 4)]))
  wider = PlacementMeshImpl(
    "rows:4,cols:2", LAYOUTS[1][1], cpu_devices, variable_store=impl.variable_store
  )
  with pytest.raises(errors.VariableError, match="slices for the mesh .* asked for on the mesh"):
    get(wider)
  assert len(impl.variable_store) == 1


def test_names_that_tensorflow_refuses(cpu_devices):
  stored = get(make_impl(cpu_devices), "/a//b/")
  assert stored.name == "/a//b/"
  assert stored.slices[3].name.startswith("a/b/_slice_3")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_assign_and_read_whole_values(cpu_devices, layout):
  impl = make_impl(cpu_devices, layout)
  stored = get(impl)
  value = np.random.RandomState(0).randn(8, 4)
  stored.assign(value)
  np.testing.assert_array_equal(stored.numpy(), value.astype(np.float32))
  assert len(stored.distinct()) * np.prod(stored.slice_shape) == 32
  scalar = get(impl, "scalar", shape=convert_to_shape([]))
  scalar.assign(2.5)
  assert scalar.numpy() == 2.5
  with pytest.raises(errors.VariableError, match=r"w has shape .* the new value has \(4, 8\)"):
    stored.assign(value.T)


def test_slice_dtype(cpu_devices):
  stored = get(make_impl(cpu_devices), dtype=tf.bfloat16, master=tf.float32)
  assert {v.dtype for v in stored.slices} == {tf.bfloat16}
  stored.assign(np.full([8, 4], 1.5))
  assert stored.numpy().astype(np.float32).tolist() == [[1.5] * 4] * 8


def test_created_inside_a_trace(cpu_devices):
  impl = make_impl(cpu_devices)

  @tf.function
  def program():
    return get(impl).slices[2].read_value()

  np.testing.assert_array_equal(program(), impl.variable_store["w"].numpy()[4:, :2])
  assert all(isinstance(v, tf.Variable) for v in impl.variable_store["w"].slices)


@pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eager", "function"])
def test_laid_out_variable(cpu_devices, run):
  impl = make_impl(cpu_devices)
  stored = get(impl, initializer=tf.ones_initializer())
  # What it asks of the operation is the layout of the slices.
  operation = types.SimpleNamespace(stored_impl=lambda impl: impl)
  variable = LaidOutVariable(impl, stored, operation)
  seen = []

  @run
  def program():
    now = impl.export_to_tf_tensor(SHAPE, variable.laid_out_tensor)
    twice = impl.slicewise(lambda t: 2.0 * t, variable.laid_out_tensor)

    def assign(operation, v, value):
      seen.append(operation)
      return v.assign_add(value)

    assert len(variable.assign_to_slices(assign, twice)) == 4
    variable.update(lambda v, t: v.assign_sub(t), impl.slicewise(tf.ones_like, twice))
    return now

  assert (program().numpy() == 1).all()
  assert (stored.numpy() == 2).all()
  assert seen == [operation] * 4


def test_two_programs_share_a_store(cpu_devices):
  store = VariableStore()
  values = []
  for layout in (LAYOUTS[1], LAYOUTS[1]):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    w = mtf.get_variable(mesh, "w", [mtf.Dimension("a", 8), mtf.Dimension("b", 4)])
    lowering = mtf.Lowering(graph, {mesh: make_impl(cpu_devices, layout, store)})
    values.append(lowering.export_to_tf_tensor(w).numpy())
  np.testing.assert_array_equal(values[0], values[1])
  assert store.names == ["w"]


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_large_slices_are_computed_in_parts(cpu_devices, monkeypatch, dtype):
  def values():
    impl = PlacementMeshImpl("all:2", "x:all", cpu_devices[:2])
    stored = [
      impl.variable_store.get(
        impl,
        name,
        convert_to_shape([("one", 1), ("x", 12), ("y", 40)]),
        master_dtype=dtype,
        slice_dtype=dtype,
        initializer=initializer,
      )
      for name, initializer in (
        ("glorot", None),
        ("normal", tf.keras.initializers.RandomNormal(seed=1)),
        ("function", lambda shape, dtype: tf.ones(shape, dtype)),
      )
    ]
    return [tf.cast(s.numpy(), tf.float32).numpy() for s in stored], stored[0].slices[1]

  whole, _ = values()
  monkeypatch.setattr(blocks, "_COMPUTED_AT_ONCE", 500)
  parts, v = values()
  for a, b in zip(whole, parts):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  assert np.unique(parts[0]).size > 100
  # A part of it was set; a later change must not show in what was read before.
  before = v.read_value()
  blocks.assign_block(v, [0, 2, 0], tf.zeros([1, 3, 40], dtype))
  after = v.read_value()
  # Also after that reading is no copying.
  reads = [np.asarray(memoryview(x)) for x in (after, v.read_value()) if dtype == tf.float32]
  assert len({x.ctypes.data for x in reads}) <= 1
  v.assign_add(tf.ones_like(v))
  assert np.any(before[0, 2].numpy() != 0) and np.all(after[0, 2:5].numpy() == 0)
  assert np.all(after[0, 5].numpy() == before[0, 5].numpy())


def test_blocks():
  for size, limit in (
    ([3, 5, 4], 70),
    ([1, 7, 2], 16),
    ([6], 4),
    ([2, 100], 8),
    ([], 1),
    ([1, 1], 1),
  ):
    seen = np.zeros(size, np.int32)
    parts = blocks.split_block(size, 4, limit)
    for offset, part in parts:
      seen[tuple(slice(o, o + n) for o, n in zip(offset, part))] += 1
      row = 4 * int(np.prod(size)) // max([n for n in size if n > 1][:1], default=1)
      assert 4 * np.prod(part) <= max(limit, row)
    assert np.all(seen == 1)
    assert len({tuple(o) for o, _ in parts}) == len(parts)
