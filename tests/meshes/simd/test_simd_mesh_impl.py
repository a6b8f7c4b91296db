"""SimdMeshImpl: one trace for all devices, variables, loops, results, errors, settings."""

import gc
import threading
import weakref

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import CollectiveError, ConfigError, GraphError, MeshShapeError
from mesh_tensorflow.meshes.collectives.run_guard import collective_errors
from mesh_tensorflow.meshes.laid_out import LaidOutTensor
from mesh_tensorflow.program import scope
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl
from tests.kinds import kept

# (mesh shape, layout) of 1 to 8 devices for a program with dimensions batch, io and hidden.
LAYOUTS = [
  ("all:1", "batch:all"),
  ("all:2", "batch:all"),
  ("all:2", "hidden:all"),
  ("rows:2,cols:2", "batch:rows,hidden:cols"),
  ("rows:2,cols:2", "io:rows,hidden:cols"),
  ("rows:4,cols:2", "batch:rows,hidden:cols"),
  ("a:2,b:2,c:2", "batch:a,io:b,hidden:c"),
]

BATCH, IO, HIDDEN = mtf.Dimension("batch", 8), mtf.Dimension("io", 4), mtf.Dimension("hidden", 16)


def simd(shape="a:2,b:2", layout="", **kwargs):
  return SimdMeshImpl(shape, layout, timeout_seconds=60, **kwargs)


def network(traces=None):
  """A per-device program: x -> (sum over hidden of relu(x w), the new w), updating w."""

  def program(x, impl):
    if traces is not None:
      traces.append(1)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    x = mtf.import_tf_tensor(mesh, x, [BATCH, IO])
    w = mtf.get_variable(mesh, "w", [IO, HIDDEN], initializer=tf.constant_initializer(WEIGHTS))
    y = mtf.reduce_sum(
      mtf.relu(mtf.einsum([x, w], output_shape=[BATCH, HIDDEN])), reduced_dim=HIDDEN
    )
    new_w = mtf.assign_add(w.operation, w * 0.5)
    lowering = mtf.Lowering(graph, {mesh: impl})
    lowering.lowered_operation(new_w)
    return lowering.export_to_tf_tensor(y)

  return program


WEIGHTS = np.random.default_rng(0).normal(size=[4, 16]).astype(np.float32)
INPUT = np.random.default_rng(1).normal(size=[8, 4]).astype(np.float32)


def expected(steps):
  """The outputs of successive steps, and the final weights."""
  w, outputs = WEIGHTS.copy(), []
  for _ in range(steps):
    outputs.append(np.maximum(INPUT @ w, 0).sum(-1))
    w = w * 1.5
  return outputs, w


# ------------------------------------------------------------------- right values


# Eager execution has one kind of collectives.
@pytest.mark.parametrize(("shape", "layout"), kept(LAYOUTS, [LAYOUTS[i] for i in (0, 1, 4, 6)]))
@pytest.mark.parametrize(
  ("eager", "collectives"), [(False, "queues"), (True, "queues"), (False, "runtime")]
)
def test_a_network_on_every_mesh(shape, layout, eager, collectives):
  impl = simd(shape, layout, collectives=collectives)

  def step(x):
    return impl.run(network(), [x, impl])

  step = step if eager else tf.function(step)
  outputs, w = expected(2)
  for y in outputs:
    np.testing.assert_allclose(step(tf.constant(INPUT)), y, rtol=1e-5)
  np.testing.assert_allclose(impl.variable_store["w"].numpy(), w, rtol=1e-6)


@pytest.mark.parametrize(
  "shape",
  kept(
    ["all:2", "all:4", "all:8", "rows:2,cols:2", "a:2,b:2,c:2"], ["all:2", "all:8", "rows:2,cols:2"]
  ),
)
def test_python_is_traced_once(shape):
  traces = []
  impl = simd(shape, "batch:all,batch:rows,hidden:cols,batch:a,hidden:c")
  step = tf.function(lambda x: impl.run(network(traces), [x, impl]))
  for y in expected(3)[0]:
    np.testing.assert_allclose(step(tf.constant(INPUT)), y, rtol=1e-5)
  assert len(traces) == 1


def test_eagerly_the_program_runs_once_per_processor():
  traces = []
  impl = simd("all:4", "batch:all")
  impl.run(network(traces), [tf.constant(INPUT), impl])
  assert len(traces) == 4
  assert len(impl.variable_store) == 1


def test_variables_in_a_range_loop():
  impl = simd("rows:2,cols:2", "batch:rows,hidden:cols")

  @tf.function
  def steps(x, n):
    y = tf.zeros([8])
    for _ in tf.range(n):
      y = impl.run(network(), [x, impl])
    return y

  outputs, w = expected(5)
  np.testing.assert_allclose(steps(tf.constant(INPUT), tf.constant(5)), outputs[-1], rtol=1e-5)
  np.testing.assert_allclose(impl.variable_store["w"].numpy(), w, rtol=1e-6)


@pytest.mark.parametrize("collectives", ["queues", "runtime"])
def test_a_loop_of_exchanges_inside_the_program(collectives):
  impl = simd(collectives=collectives)

  def program(n):
    pnum = tf.cast(impl.laid_out_pnum().one_slice, tf.float32)

    def body(i, total):
      # What is exchanged does not depend on the iteration before: only order keeps them apart.
      sent = pnum + 10.0 * tf.cast(i, tf.float32)
      got = impl.shift_by_n_processors(LaidOutTensor([sent]), 1, 1, wrap=True).one_slice
      summed = impl.allreduce(LaidOutTensor([sent]), [0], "SUM").one_slice
      return i + 1, total + tf.stack([got, summed]) * tf.cast(i + 1, tf.float32)

    return tf.while_loop(lambda i, t: i < n, body, [0, tf.zeros([2])])[1]

  got = tf.function(lambda n: impl.run_per_device(program, [n]))(tf.constant(20))
  for pnum, y in enumerate(got):
    shifted = [(pnum ^ 1) + 10.0 * i for i in range(20)]
    summed = [pnum + (pnum ^ 2) + 20.0 * i for i in range(20)]
    weights = np.arange(1, 21)
    np.testing.assert_allclose(y, [weights @ shifted, weights @ summed])


def test_inside_a_condition():
  impl = simd()

  @tf.function
  def f(x, which):
    if which:
      return impl.run(lambda: impl.allreduce(LaidOutTensor([x]), [0, 1], "SUM").one_slice)
    return impl.run(lambda: impl.allreduce(LaidOutTensor([x + 1.0]), [0, 1], "SUM").one_slice)

  assert [float(f(tf.constant(2.0), tf.constant(b))) for b in (True, False, True)] == [8, 12, 8]


def test_several_runs_in_one_function():
  impl = simd("rows:2,cols:2", "batch:rows,hidden:cols")

  @tf.function
  def f(x):
    a = impl.run(network(), [x, impl])
    b = impl.run(network(), [x, impl])
    return a, b

  outputs, w = expected(4)
  for i in (0, 2):
    for got, y in zip(f(tf.constant(INPUT)), outputs[i:]):
      np.testing.assert_allclose(got, y, rtol=1e-5)
  np.testing.assert_allclose(impl.variable_store["w"].numpy(), w, rtol=1e-6)


def test_import_and_export_of_every_layout():
  shape = mtf.Shape([mtf.Dimension("x", 4), mtf.Dimension("y", 6), mtf.Dimension("z", 8)])
  value = np.arange(4 * 6 * 8).reshape(4, 6, 8).astype(np.int32)
  for layout in ("", "x:a", "y:b", "z:a,x:b", "y:a,z:b", "x:a,y:b"):
    impl = simd("a:2,b:2", layout)

    def program(v, impl=impl):
      laid_out = impl.import_tf_tensor(shape, v)
      assert laid_out.slice_shape == impl.slice_shape(shape)
      return laid_out.one_slice, impl.export_to_tf_tensor(shape, laid_out)

    for run in (impl.run_per_device, tf.function(lambda *a, i=impl: i.run_per_device(*a))):
      for pnum, (part, whole) in enumerate(run(program, [tf.constant(value)])):
        begin = impl.slice_begin(shape, pnum)
        where = tuple(slice(b, b + n) for b, n in zip(begin, impl.slice_shape(shape)))
        np.testing.assert_array_equal(part, value[where])
        np.testing.assert_array_equal(whole, value)


def test_mtf_function():
  impl = simd("rows:2,cols:2", "batch:rows,hidden:cols")

  @mtf.function(impl, [mtf.TensorSpec([BATCH, IO])])
  def f(x):
    w = mtf.get_variable(x.mesh, "w", [IO, HIDDEN], initializer=tf.constant_initializer(WEIGHTS))
    y = mtf.einsum([x, w], output_shape=[BATCH, HIDDEN])
    mtf.assign_add(w.operation, w * 0.5)
    return y

  np.testing.assert_allclose(f(INPUT), INPUT @ WEIGHTS, rtol=1e-5)
  np.testing.assert_allclose(f(INPUT), INPUT @ WEIGHTS * 1.5, rtol=1e-5)


# ---------------------------------------------------------- arguments and results


def test_structures_of_results():
  impl = simd("all:2")
  nothing = object()

  def program(x, *, scale):
    pnum = impl.pnum_tensor
    return {"x": x * scale, "list": [pnum, None, 3, "text"], "o": nothing, "t": (x, np.ones(2))}

  taken = []

  def call(x):
    taken[:] = impl.run_per_device(program, [x], {"scale": 2.0})
    return [r["x"] for r in taken], [r["list"][0] for r in taken]

  for run in (call, tf.function(call)):
    values, pnums = run(tf.constant([1.0, 2.0]))
    assert [int(p) for p in pnums] == [0, 1]
    for v, r in zip(values, taken):
      np.testing.assert_array_equal(v, [2.0, 4.0])
      assert r["list"][1:] == [None, 3, "text"]
      assert r["o"] is nothing
      assert isinstance(r["t"], tuple) and isinstance(r["t"][1], np.ndarray)


def test_results_keep_their_static_shapes():
  impl = simd("all:2")
  shapes = []

  @tf.function
  def f(x):
    y = impl.run(lambda: impl.allreduce(LaidOutTensor([x]), [0], "SUM").one_slice)
    shapes.append(y.shape.as_list())
    return y

  f(tf.ones([2, 3]))
  assert shapes == [[2, 3]]


def test_a_program_without_tensors_as_results():
  impl = simd("all:2")
  counts = [tf.Variable(0), tf.Variable(0)]

  @tf.function
  def f():
    def program():
      impl._program.own(counts).assign_add(1)
      return {"a": None}

    return impl.run(program)

  assert f() == {"a": None}
  f()
  assert [int(c) for c in counts] == [2, 2]


def test_resources_that_all_processors_share():
  impl = simd("a:2,b:2")
  v = tf.Variable(1.0)

  @tf.function
  def f():
    v.assign_add(1.0)
    y = impl.run(lambda: impl.allreduce(LaidOutTensor([v.read_value()]), [0, 1], "SUM").one_slice)
    v.assign_add(10.0)
    return y

  assert float(f()) == 8.0
  assert float(f()) == 52.0


def test_tensors_of_an_outer_loop_are_seen():
  impl = simd("all:2")

  @tf.function
  def f(x):
    total = tf.zeros([])
    for i in tf.range(4):
      scaled = x * tf.cast(i, tf.float32)
      total += impl.run(lambda s=scaled: impl.allreduce(LaidOutTensor([s]), [0], "SUM").one_slice)
    return total

  assert float(f(tf.constant(3.0))) == 2 * 3.0 * 6


def test_different_programs_are_not_confused():
  impl = simd("all:2")

  @tf.function
  def f(x):
    return [impl.run(lambda k=k: x * float(k)) for k in range(3)]

  assert [float(v) for v in f(tf.constant(2.0))] == [0.0, 2.0, 4.0]


def test_retracing_keeps_nothing():
  impl = simd("rows:2,cols:2", "batch:rows,hidden:cols")

  def trace():
    f = tf.function(lambda x: impl.run(network(), [x, impl]))
    f(tf.constant(INPUT))
    return weakref.ref(f), len(impl._communication._network._links)

  first, links = trace()
  for _ in range(3):
    assert trace()[1] == links
  gc.collect()
  assert first() is None


# --------------------------------------------------------------------- variables


def test_every_device_has_its_slice():
  impl = simd("rows:2,cols:2", "batch:rows,hidden:cols")
  tf.function(lambda x: impl.run(network(), [x, impl]))(tf.constant(INPUT))
  stored = impl.variable_store["w"]
  short = [v.device[v.device.index("/device") :] for v in stored.slices]
  assert short == impl.devices == [f"/device:CPU:{i}" for i in range(4)]
  assert [tuple(v.shape) for v in stored.slices] == [(4, 8)] * 4
  assert stored.begins == ((0, 0), (0, 8), (0, 0), (0, 8))


def test_variables_made_eagerly_are_found_by_a_trace():
  impl = simd("rows:2,cols:2", "batch:rows,hidden:cols")
  outputs, _ = expected(2)
  np.testing.assert_allclose(impl.run(network(), [tf.constant(INPUT), impl]), outputs[0], rtol=1e-5)
  step = tf.function(lambda x: impl.run(network(), [x, impl]))
  np.testing.assert_allclose(step(tf.constant(INPUT)), outputs[1], rtol=1e-5)
  assert impl.variable_store.names == ["w"]


def test_threads_see_the_scopes_around_the_run():
  impl = simd("all:2")
  seen = []

  def program():
    with scope.variable_scope("inner"):
      thread = threading.current_thread().name
      seen.append((scope.current_scope_name(), gin.current_scope(), thread))

  with scope.variable_scope("outer"), gin.config_scope("mode"):
    impl.run(program)
    assert scope.current_scope_name() == "outer"
  assert [s[:2] for s in seen] == [("outer/inner", ["mode"])] * 2
  assert {s[2] for s in seen} == {"mtf-processor-0", "mtf-processor-1"}


# ------------------------------------------------------------------------ errors


def test_an_error_on_one_thread_ends_all():
  impl = simd("a:2,b:2")

  def program():
    if impl.pnum_tensor == 2:
      raise KeyError("broken")
    return impl.allreduce(LaidOutTensor([tf.ones([2])]), [0, 1], "SUM").one_slice

  with pytest.raises(KeyError, match="broken") as e:
    impl.run(program)
  if hasattr(e.value, "__notes__"):
    assert e.value.__notes__ == ["on processor 2 of 4"]
  assert not [t for t in threading.enumerate() if t.name.startswith("mtf-processor")]


def test_diverging_threads_are_told_apart():
  impl = simd("all:2")
  x = LaidOutTensor([tf.ones([2])])

  def other_collective():
    if impl.pnum_tensor == 0:
      return impl.allreduce(x, [0], "SUM").one_slice
    return impl.allconcat(x, 0, 0).one_slice

  with pytest.raises(
    CollectiveError,
    match="allreduce SUM of float32.*processor . is in allconcat|"
    "allconcat.*processor . is in allreduce",
  ):
    impl.run(other_collective)

  def left_out():
    return impl.allreduce(x, [0], "SUM").one_slice if impl.pnum_tensor == 0 else None

  with pytest.raises(
    CollectiveError,
    match="processor 0 waits in allreduce .* along all, but processor 1 finished without it",
  ):
    impl.run(left_out)


def test_a_thread_that_does_not_come():
  impl = SimdMeshImpl("all:2", "", timeout_seconds=1.0)
  wait = threading.Event()

  def program():
    if impl.pnum_tensor == 1:
      wait.wait(4.0)
    return impl.allreduce(LaidOutTensor([tf.ones([2])]), [0], "SUM").one_slice

  with pytest.raises(CollectiveError, match="processor 1 did not come within 1 s"):
    impl.run(program)


def test_a_failed_run_is_noticed_and_the_mesh_can_be_reset():
  impl = simd("a:2,b:2")

  @tf.function
  def f(bad):
    def program():
      pnum = impl.pnum_tensor
      x = impl.allreduce(LaidOutTensor([tf.ones([2])]), [0], "SUM").one_slice
      tf.debugging.Assert(tf.logical_or(pnum != 1, tf.logical_not(bad)), ["wrong value"])
      return impl.allreduce(LaidOutTensor([x]), [0, 1], "SUM").one_slice

    return impl.run(program)

  assert f(tf.constant(False)).numpy().tolist() == [8.0, 8.0]
  with pytest.raises(tf.errors.InvalidArgumentError, match="wrong value"):
    f(tf.constant(True))
  with pytest.raises(CollectiveError, match="earlier run of this mesh failed midway"):
    with collective_errors():
      f(tf.constant(False))
  impl.reset()
  assert f(tf.constant(False)).numpy().tolist() == [8.0, 8.0]


def test_what_was_cancelled_is_not_taken_for_the_error():
  with pytest.raises(CollectiveError, match="the program of a processor failed.*MIN_LOG_LEVEL"):
    with collective_errors(simd("a:2")):
      raise tf.errors.CancelledError(None, None, "RecvAsync is cancelled.")


HANGING = """
import sys, time
import tensorflow as tf
from mesh_tensorflow.meshes.collectives.run_guard import collective_errors
from mesh_tensorflow.errors import CollectiveError
from mesh_tensorflow.meshes.laid_out import LaidOutTensor
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

tf.config.set_logical_device_configuration(
  tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
impl = SimdMeshImpl("all:2", "", collectives=sys.argv[1], timeout_seconds=6.0)

@tf.function
def f(x, diverge):
  def program():
    def exchange():
      return impl.allreduce(LaidOutTensor([x]), [0], "SUM").one_slice
    here = tf.logical_or(impl.pnum_tensor == 0, tf.logical_not(diverge))
    return tf.cond(here, exchange, lambda: x)
  return impl.run(program)

print("sum", float(f(tf.constant(2.0), tf.constant(False))))
start = time.time()
try:
  with collective_errors():
    f(tf.constant(2.0), tf.constant(True))
except CollectiveError as e:
  print("CollectiveError", str(e).splitlines()[0], int(time.time() - start))
if sys.argv[1] == "queues":
  # A new trace gets new queues.
  f = tf.function(lambda x: impl.run(
    lambda: impl.allreduce(LaidOutTensor([x]), [0], "SUM").one_slice))
  print("again", float(f(tf.constant(3.0))))
"""


@pytest.mark.long  # Of an mtf.function, which says more: running/test_function_errors.py.
@pytest.mark.subprocess
@pytest.mark.parametrize("collectives", ["queues", "runtime"])
def test_a_processor_that_waits_in_vain_fails(collectives, run_forked):
  result = run_forked(["-c", HANGING, collectives], timeout=100)
  lines = result.stdout.splitlines()
  assert lines[0] == "sum 4.0"
  assert lines[1].startswith("CollectiveError a processor waited in vain")
  if collectives == "queues":
    assert lines[2] == "again 6.0"


FAILING = """
import sys
import tensorflow as tf
from mesh_tensorflow.meshes.laid_out import LaidOutTensor
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

tf.config.set_logical_device_configuration(
  tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4)
impl = SimdMeshImpl("a:2,b:2", "", collectives="runtime", timeout_seconds=20.0)

@tf.function
def f(x):
  def program():
    tf.debugging.Assert(impl.pnum_tensor != 1, ["wrong value"])
    return impl.allreduce(LaidOutTensor([x]), [0, 1], "SUM").one_slice
  return impl.run(program)

try:
  f(tf.constant(2.0))
except tf.errors.OpError as e:
  print("wrong value" in str(e) or "aborted" in str(e))
"""


@pytest.mark.subprocess
def test_an_error_on_one_processor_ends_the_run_on_all(run_forked):
  assert run_forked(FAILING, timeout=100).stdout == "True\n"


def test_run_inside_a_program_is_refused():
  impl = simd("all:2")
  with pytest.raises(GraphError, match="run was called inside a per-device program"):
    tf.function(lambda: impl.run(lambda: impl.run(lambda: None)))()


def test_lowering_outside_a_program_is_refused():
  impl = simd("all:2", "batch:all")
  with pytest.raises(GraphError, match=r"mesh_impl.run\(f\)"):
    network()(tf.constant(INPUT), impl)


def test_an_error_while_tracing_leaves_the_mesh_usable():
  impl = simd("all:2")

  def broken():
    raise KeyError("x")

  with pytest.raises(KeyError):
    tf.function(lambda: impl.run(broken))()
  assert float(tf.function(lambda: impl.run(lambda: tf.constant(1.0)))()) == 1.0


# ---------------------------------------------------------------------- settings


def test_default_devices(cpu_devices):
  assert simd("a:2,b:3").devices == cpu_devices[:6]
  with pytest.raises(
    MeshShapeError,
    match=r"a:4 x b:4 has 16 processors, but this process has 0 "
    r"logical GPUs and 8 logical CPUs; a mesh that fits: a:2,b:4",
  ):
    simd("a:4,b:4")
  with pytest.raises(MeshShapeError, match="4 processors, but 3 device.s. were given"):
    simd("a:4", devices=["/device:CPU:0"] * 3)


def test_logical_to_physical(cpu_devices):
  impl = simd("a:2,b:2", logical_to_physical=[0, 2, 3, 1])
  assert impl.devices == [cpu_devices[i] for i in (0, 2, 3, 1)]
  assert [impl.l2p(i) for i in range(4)] == [0, 2, 3, 1]
  assert [impl.p2l(i) for i in range(4)] == [0, 3, 1, 2]
  for wrong in ([0, 1, 2], [0, 1, 1, 2], [1, 2, 3, 4]):
    with pytest.raises(MeshShapeError, match="permutation of 0 to 3"):
      simd("a:2,b:2", logical_to_physical=wrong)


def test_kinds_of_collectives(cpu_devices):
  with pytest.raises(ConfigError, match="'mpi' is not 'auto', 'queues' or 'runtime'"):
    simd(collectives="mpi")
  with pytest.raises(MeshShapeError, match="a device of its own"):
    simd("a:2", devices=[cpu_devices[0]] * 2, collectives="runtime")
  with pytest.raises(ConfigError, match="needs CPU devices"):
    gpus = [f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(2)]
    simd("a:2", devices=gpus, collectives="queues")


def test_gin():
  gin.parse_config("mesh_tensorflow.simd_mesh_impl.SimdMeshImpl.timeout_seconds = 7.0")
  assert SimdMeshImpl("a:2", "")._timeout_seconds == 7.0


def test_print(capfd):
  impl = simd("all:2")

  @tf.function
  def f():
    return impl.run(
      lambda: (
        impl.Print(LaidOutTensor([0]), [LaidOutTensor([impl.pnum_tensor * 10])], "value:").one_slice
      )
    )

  f()
  printed = capfd.readouterr().err
  assert "value: processor 0 0" in printed and "value: processor 1 10" in printed
