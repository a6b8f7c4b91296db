"""Devices of unequal speed: shares of a mesh dimension, on which no value depends."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint
from mesh_tensorflow.errors import ArgumentError, MeshShapeError
from mesh_tensorflow.meshes import cross_mesh
from mesh_tensorflow.meshes.shares import assign_processors, device_grid
from mesh_tensorflow.training.state import averages_in_place
from tests.kinds import kept
from tests.meshes.test_sharded_state import (
  OPTIMIZERS,
  check_equal,
  on_one_device,
  trained,
  weights,
)

CASES = {
  "3:1": ("x:4", {"x": [3, 1]}),
  "1:3": ("x:4", {"x": [1, 3]}),
  "2:1:1": ("x:4", {"x": [2, 1, 1]}),
  "5:2:1": ("x:8", {"x": [5, 2, 1]}),
  "all on one": ("x:4", {"x": [4]}),
  "3:1 by 2": ("x:4,y:2", {"x": [3, 1]}),
  "2 by 1:1": ("x:2,y:2", {"x": [2]}),
  "2:2 by 3:1": ("x:4,y:4", {"x": [2, 2], "y": [3, 1]}),
  "1 by 1:1, in three": ("x:1,y:2,z:2", {"y": [1, 1], "z": [2]}),
}
RULES = ("", "batch:x", "batch:x,f:y", "d:x", "f:x,d:y")


def make_impl(kind, devices, case, rules="batch:x", sharding=(), store=None):
  shape, shares = CASES[case]
  known = mtf.convert_to_shape(shape)
  names = known.dimension_names
  rules = ",".join(r for r in rules.split(",") if r.split(":")[-1] in names)
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = cls(
    shape,
    rules,
    devices[: device_grid(known, shares).size],
    shares=shares,
    variable_store=store or mtf.VariableStore(seed=1),
  )
  return impl.with_sharded_state([n for n in sharding if n in names])


# ------------------------------------------------------------------------ the devices


@pytest.mark.parametrize(
  ("shape", "shares", "devices", "expected"),
  [
    ("x:4", {"x": [3, 1]}, "ab", "aaab"),
    ("x:4", {"x": (1, 2, 1)}, "abc", "abbc"),
    ("x:4", {}, "abcd", "abcd"),
    ("x:1", {"x": [1]}, "a", "a"),
    ("x:3", {"x": [3]}, "a", "aaa"),
    ("x:3,y:2", {"x": [2, 1]}, "abcd", "ababcd"),
    ("x:2,y:3", {"y": [2, 1]}, "abcd", "aabccd"),
    ("x:3,y:3", {"x": [2, 1], "y": [1, 2]}, "abcd", "abbabbcdd"),
  ],
)
def test_the_device_of_each_processor(shape, shares, devices, expected):
  assert assign_processors(mtf.convert_to_shape(shape), devices, shares) == list(expected)
  impl = mtf.PlacementMeshImpl(shape, "", list(devices), shares=shares)
  assert impl.devices == list(expected)
  assert impl.processors_of_devices == [expected.count(d) for d in dict.fromkeys(expected)]
  assert mtf.MeshImpl(shape, "", shares=shares).processors_of_devices == impl.processors_of_devices


def test_the_default_device_stands_for_any():
  assert mtf.PlacementMeshImpl("x:4", "", [""] * 4).processors_of_devices == [1] * 4


@pytest.mark.parametrize(
  ("shares", "devices", "message"),
  [
    ({"x": [2, 1]}, "ab", r"shares \[2, 1\] of mesh dimension x:4 add up to 3: make it x:3, or"),
    ({"x": [4, 0]}, "ab", r"x:4 must be whole numbers of at least 1, one for each .* \[4, 0\]; a"),
    ({"x": [5, -1]}, "ab", "whole numbers of at least 1"),
    ({"x": [True, 3]}, "ab", "must be whole numbers|must be an integer"),
    ({"x": []}, "", "whole numbers of at least 1"),
    ({"z": [3, 1]}, "ab", "shares: the mesh has no dimension 'z'; it has x, y"),
    ({"x": [3, 1]}, "ab", r"\{'x': \[3, 1\]\} of mesh x:4,y:2 are for 2 x 2 = 4 devices, got 2"),
    ({"x": [3, 1]}, "aabc", "device 'a' is named twice; name each device once"),
  ],
)
@pytest.mark.parametrize("kind", [mtf.PlacementMeshImpl, mtf.SimdMeshImpl])
def test_wrong_shares(kind, shares, devices, message):
  with pytest.raises(MeshShapeError, match=message):
    kind("x:4,y:2", "", list(devices), shares=shares)


def test_shares_of_numpy_are_whole_numbers(cpu_devices):
  shares = {"x": list(np.array([3, 1]))}
  impl = mtf.PlacementMeshImpl("x:4", "", cpu_devices[:2], shares=shares)
  assert impl.processors_of_devices == [3, 1]
  with pytest.raises(MeshShapeError, match=r"\{'x': \[3, 1\]\} of mesh x:4 are for 2 devices, got"):
    mtf.PlacementMeshImpl("x:4", "", cpu_devices[:3], shares={"x": [3, 1]})


@pytest.mark.parametrize("shares", [[3, 1], {"x": 4}, {"x": "31"}, {"x": [2.5, 1.5]}])
def test_what_are_no_shares_at_all(shares):
  with pytest.raises(ArgumentError, match="PlacementMeshImpl: shares.* must be a"):
    mtf.PlacementMeshImpl("x:4", "", ["a", "b"], shares=shares)
  with pytest.raises(MeshShapeError, match="shares"):
    device_grid(mtf.convert_to_shape("x:4"), shares)


def test_where_every_processor_needs_a_device_of_its_own(cpu_devices):
  with pytest.raises(MeshShapeError, match="a PlacementMeshImpl takes devices of several"):
    mtf.SimdMeshImpl("x:4", "", cpu_devices[:2], shares={"x": [3, 1]}, collectives="runtime")


def test_simd_takes_the_first_devices(cpu_devices):
  impl = mtf.SimdMeshImpl("x:4", "", shares={"x": [3, 1]})
  assert [d[-5:] for d in impl.devices] == ["CPU:0"] * 3 + ["CPU:1"]


# ------------------------------------------------------------------------ values


EACH = [*(("placement", name) for name in OPTIMIZERS), ("simd", "adafactor factored")]
KEPT = [("placement", "adamw"), ("placement", "adafactor"), ("placement", "muon"), EACH[-1]]


@pytest.mark.parametrize(("kind", "name"), kept(EACH, KEPT))
@hypothesis.settings(max_examples=2)
@hypothesis.given(
  case=st.sampled_from(list(CASES)),
  rules=st.sampled_from(RULES),
  sharding=st.sampled_from(["", "x", "xy"]),
  clip=st.booleans(),
  ema=st.booleans(),
)
def test_every_optimizer_as_on_one_device(
  name, kind, case, rules, sharding, clip, ema, cpu_devices
):
  impl = make_impl(kind, cpu_devices, case, rules, sharding)
  found = trained(impl, OPTIMIZERS[name](), clip=clip, ema=ema)
  check_equal(found, on_one_device(name, cpu_devices, clip=clip, ema=ema))


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.parametrize("case", ["3:1", "2:1:1", "3:1 by 2"])
def test_eagerly(kind, case, cpu_devices):
  impl = make_impl(kind, cpu_devices, case, "batch:x,f:y", "x")
  found = trained(impl, OPTIMIZERS["adamw"](), clip=True, traced=False)
  check_equal(found, on_one_device("adamw", cpu_devices, clip=True))


def test_random_numbers_are_those_of_one_device(cpu_devices):
  def draw(impl):
    @mtf.function(impl, [mtf.TensorSpec([("batch", 8), ("f", 16)])])
    def f(x):
      return mtf.dropout(x, True, rate=0.5)

    return f(np.ones([8, 16], np.float32), seed=3).numpy()

  store = mtf.VariableStore(seed=1)
  one = draw(mtf.PlacementMeshImpl("x:1", "", cpu_devices[:1], variable_store=store))
  assert 0 < np.mean(one == 0) < 1
  for case in CASES:
    np.testing.assert_array_equal(draw(make_impl("placement", cpu_devices, case, "batch:x")), one)


# ------------------------------------------------------------------------ memory and messages


def test_a_device_stores_what_is_replicated_once(cpu_devices):
  impl = make_impl("placement", cpu_devices, "3:1 by 2", "batch:x,f:y")
  trained(impl, OPTIMIZERS["adamw"](), steps=1)
  stored = {v.name: v for v in impl.variable_store}
  # "in" is split over y: on each of the four devices there is one slice; "odd" is whole.
  for name in ("in", "in/adam_m", "odd"):
    slices = stored[name].different_slices
    assert len(stored[name].slices) == 8 and len(slices) == 4
    assert [v.device[-6:] for v in slices] == [d[-6:] for d in cpu_devices[:4]]
  whole = mtf.PlacementMeshImpl("x:2,y:2", "batch:x,f:y", cpu_devices[:4])
  trained(whole, OPTIMIZERS["adamw"](), steps=1)

  def numbers(impl):
    return sum(v.shape.num_elements() for v in impl.variable_store.variables)

  assert numbers(impl) == numbers(whole)


def test_shards_of_one_device_are_apart(cpu_devices):
  impl = make_impl("placement", cpu_devices, "3:1", "", "x")
  trained(impl, OPTIMIZERS["adamw"](), steps=1)
  assert len(impl.variable_store["in"].different_slices) == 4
  assert len(impl.variable_store["scale"].different_slices) == 2


def crossings(program, impl):
  """The tensors that go from device to device in a traced program."""
  graph = tf.function(lambda: impl.run(program), autograph=False).get_concrete_function().graph
  return {
    (x.name, op.device)
    for op in graph.get_operations()
    for x in op.inputs
    if x.op.device and op.device and x.op.device != op.device and x.shape.rank
  }


@pytest.mark.parametrize(
  ("collective", "count"),
  [
    (lambda impl, x: impl.allreduce(x, [0], "SUM"), 2),  # A sum there, and the whole back.
    (lambda impl, x: impl.allreduce(x, [0], "MAX"), 2),
    (lambda impl, x: impl.reduce_scatter(x, 0, 0), 4),  # A part for each of the processors.
    (lambda impl, x: impl.receive(x, 0, [1, 2, 0, 3]), 0),
    (lambda impl, x: impl.receive(x, 0, [1, 2, 3, 0]), 2),
  ],
)
def test_sums_inside_a_device_come_first(collective, count, cpu_devices):
  impl = make_impl("placement", cpu_devices, "3:1")

  def all_of(impl):
    x = impl.slicewise(lambda p: tf.fill([4, 2], 1.0 + p), impl.laid_out_pnum())
    return impl.slicewise(tf.square, collective(impl, x)).tensor_list

  apart = mtf.PlacementMeshImpl("x:4", "batch:x", cpu_devices[:4])
  for mine, its in zip(all_of(impl), all_of(apart)):
    np.testing.assert_allclose(mine, its)
  assert len(crossings(lambda: all_of(impl), impl)) == count


def test_replicas_of_devices_that_sum_in_other_orders_are_equal(cpu_devices):
  """Bit by bit: a sum is not done inside devices if groups of processors would differ in it."""
  devices = [cpu_devices[i] for i in (0, 0, 0, 1, 1, 1, 2, 2)]
  impl = mtf.PlacementMeshImpl("x:4,y:2", "", devices)
  values = np.random.default_rng(0).normal(size=[4, 1000]).astype(np.float32)
  x = impl.slicewise(lambda i: tf.constant(values)[i], impl.laid_out_pcoord(0))
  total = impl.allreduce(x, [0], "SUM").tensor_list
  for t in total[1:]:
    np.testing.assert_array_equal(t, total[0])


def test_what_depends_on_equal_slices_is_computed_once_for_a_device(cpu_devices):
  impl = make_impl("placement", cpu_devices, "3:1")
  calls = []

  def double(x, n):
    calls.append(x)
    return x * n

  replicated = impl.import_tf_tensor(mtf.Shape([mtf.Dimension("d", 2)]), tf.ones([2]))
  assert len(impl.slicewise(double, replicated, 2).tensor_list) == 4 and len(calls) == 2
  del calls[:]
  # True is no 1, and 1.0 none either.
  found = impl.slicewise(double, impl.LaidOutTensor([1, True, 1.0, 1]), 2)
  assert found.tensor_list == [2, 2, 2.0, 2] and len(calls) == 4


# ------------------------------------------------------------------------ around


@pytest.mark.parametrize("case", ["3:1", "3:1 by 2", "all on one"])
def test_a_tape_has_the_gradient_of_a_variable_once(case, cpu_devices):
  def run(impl):
    @mtf.function(impl, [mtf.TensorSpec([("batch", 8), ("d", 8)])])
    def loss(x):
      w_in, bias, w_out, odd, scale = weights(x.mesh)
      batch, d = x.shape.dims
      f = mtf.Dimension("f", 16)
      h = mtf.tanh(mtf.einsum([x, w_in], [batch, f]) + bias)
      out = mtf.einsum([h, w_out], [batch, d]) * scale * mtf.reduce_sum(mtf.square(odd))
      return mtf.reduce_mean(mtf.square(out - x))

    x = np.random.default_rng(1).normal(size=[8, 8]).astype(np.float32)
    for _ in range(3):
      with tf.GradientTape() as tape:
        value = loss(x)
      variables = loss.trainable_variables
      for v, g in zip(variables, tape.gradient(value, variables)):
        v.assign_sub(0.1 * g)
    assert len({id(v) for v in variables}) == len(variables)
    return float(value), {v.name: v.numpy() for v in impl.variable_store}

  one = mtf.PlacementMeshImpl("x:1", "", cpu_devices[:1], variable_store=mtf.VariableStore(seed=1))
  expected = run(one)
  for sharding in ("", "x"):
    found = run(make_impl("placement", cpu_devices, case, "batch:x,f:y", sharding))
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    for name, value in expected[1].items():
      np.testing.assert_allclose(found[1][name], value, atol=1e-5)


def save(folder, impl, step):
  checkpoint.Checkpointer(str(folder), impl.variable_store, asynchronous=False).save(step)


def restore(folder, impl):
  checkpoint.Checkpointer(str(folder), impl.variable_store).restore()


@pytest.mark.parametrize("kind", kept(["placement", "simd"], ["placement"]))
def test_a_checkpoint_goes_to_other_meshes_and_back(kind, cpu_devices, tmp_path):
  first = make_impl(kind, cpu_devices, "3:1 by 2", "batch:x,f:y", "x")
  _, values = trained(first, OPTIMIZERS["adamw"](), steps=2)
  save(tmp_path / "a", first, 2)
  expected = trained(first, OPTIMIZERS["adamw"](), steps=2)
  for i, case in enumerate(["2:1:1", "all on one", "3:1 by 2"]):
    other = make_impl("placement", cpu_devices, case, "batch:x,d:y")
    trained(other, OPTIMIZERS["adamw"](), steps=1)
    restore(tmp_path / "a", other)
    for name, value in values.items():
      np.testing.assert_array_equal(other.variable_store[name].numpy(), value)
    check_equal(trained(other, OPTIMIZERS["adamw"](), steps=2), expected)
    save(tmp_path / f"b{i}", other, 4)
    one = mtf.PlacementMeshImpl("x:1", "", cpu_devices[:1])
    trained(one, OPTIMIZERS["adamw"](), steps=1)
    restore(tmp_path / f"b{i}", one)
    for name, value in expected[1].items():
      np.testing.assert_allclose(one.variable_store[name].numpy(), value, atol=2e-5)


def test_averages_come_and_go(cpu_devices):
  impl = make_impl("placement", cpu_devices, "3:1")
  _, values = trained(impl, OPTIMIZERS["adamw"](), ema=True)
  store = impl.variable_store
  with averages_in_place(store):
    np.testing.assert_array_equal(store["in"].numpy(), store["in/ema"].numpy())
  np.testing.assert_array_equal(store["in"].numpy(), values["in"])


def test_tensors_go_to_and_from_other_meshes(cpu_devices):
  shape = mtf.Shape([mtf.Dimension("batch", 12), mtf.Dimension("f", 4)])
  mine = make_impl("placement", cpu_devices, "3:1")
  other = mtf.PlacementMeshImpl("x:2", "batch:x", cpu_devices[2:4])
  value = np.arange(48, dtype=np.float32).reshape(12, 4)
  for source, target in ((mine, other), (other, mine)):
    slices = source.import_tf_tensor(shape, tf.constant(value)).tensor_list
    moved = cross_mesh.reshard(source, target, shape, tf.float32, slices)
    np.testing.assert_array_equal(target.combine_slices(moved, shape), value)
    assert cross_mesh.elements_sent(source, target, shape) == 48
  # To the same devices: nothing but what changes its device is sent.
  even = mtf.PlacementMeshImpl("x:2", "batch:x", cpu_devices[:2])
  assert cross_mesh.elements_sent(mine, even, shape) == 12


def test_operations_that_run_when_they_are_made(cpu_devices):
  impl = make_impl("placement", cpu_devices, "3:1")
  with mtf.eager(impl) as mesh:
    x = mtf.import_tf_tensor(mesh, np.ones([8, 3], np.float32), "batch:8,d:3")
    assert float(mtf.reduce_sum(x)) == 24.0


def test_stages_may_have_shares(cpu_devices):
  store = mtf.VariableStore()
  first, second = (
    mtf.PlacementMeshImpl("x:4", "batch:x", d, shares={"x": [3, 1]}, variable_store=store)
    for d in (cpu_devices[:2], cpu_devices[2:4])
  )
  assert first.with_stages([second]).stages["stage1"] is second
  with pytest.raises(MeshShapeError, match="have device"):
    first.with_stages([first])
