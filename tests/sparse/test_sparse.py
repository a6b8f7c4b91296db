"""Tables of embeddings: look-ups and updates against NumPy and Keras, on all kinds of layouts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.numerics import padding
from tests.kinds import kept

BATCH, VALUES, ROWS, WIDTH = (
  mtf.Dimension(n, s) for n, s in [("batch", 16), ("values", 4), ("rows", 48), ("width", 4)]
)
ROWS_A, ROWS_B = mtf.Dimension("rows_a", 4), mtf.Dimension("rows_b", 12)
RNG = np.random.default_rng(0)
# Few ids, so that there are many duplicates, on several devices and in one; some are none.
IDS = RNG.integers(-2, 50, [16, 4])
TARGET = RNG.normal(size=[16, 4]).astype(np.float32)
START = RNG.normal(size=[48, 4]).astype(np.float32)
LAYOUTS = {
  "one device": ("a:1", ""),
  "rows and ids over one axis": ("a:4", "batch:a,rows:a"),
  "rows over another axis than ids": ("a:2,b:2", "batch:a,rows:b"),
  "rows over one of two": ("a:2,b:2", "batch:a,values:b,rows:b"),
  "rows alone": ("a:4", "rows:a"),
  "ids alone": ("a:4", "batch:a"),
  "width, too": ("a:2,b:2", "batch:a,rows:a,width:b"),
  "two dimensions of rows": ("a:2,b:2", "batch:a,values:b,rows_a:a,rows_b:b"),
  "two, exchanged the other way": ("a:2,b:2", "batch:b,rows_a:b,rows_b:a"),
}
# `make test` has one of each kind of exchange.
SHORT = ("rows and ids over one axis", "two dimensions of rows")


def layouts():
  for kind in ("placement", "simd"):
    for name in LAYOUTS:
      # The losses of Keras are compared over one axis, by SIMD.
      short = (kind, name) in (("placement", SHORT[0]), ("simd", SHORT[1]))
      yield pytest.param(kind, name, marks=[] if short else pytest.mark.long, id=f"{kind}: {name}")


@pytest.fixture
def make_impl(cpu_devices):
  def make(kind="simd", name="rows and ids over one axis"):
    shape, layout = LAYOUTS[name]
    cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
    return cls(shape, layout, cpu_devices[: mtf.convert_to_shape(shape).size])

  return make


def table_of(mesh, impl):
  two = any("rows_a" in str(pair) for pair in impl.layout_rules.pairs)
  return mtf.sparse.table(mesh, "table", [ROWS_A, ROWS_B] if two else ROWS, WIDTH)


def make_step(impl, optimizer, combine="mean", **kwargs):
  @mtf.function(impl, [mtf.TensorSpec([BATCH, VALUES], tf.int32), mtf.TensorSpec([BATCH, WIDTH])])
  def step(ids, target):
    table = table_of(ids.mesh, impl)
    scale = mtf.get_variable(ids.mesh, "scale", [WIDTH], initializer=mtf.initializers.Ones())
    y = mtf.sparse.lookup(table, ids, combine=combine, over=VALUES, **kwargs)
    # A second look-up in the same table: its gradients belong to the same update.
    first = mtf.sparse.lookup(table, mtf.reduce_max(ids, reduced_dim=VALUES))
    loss = mtf.reduce_mean(mtf.square(y * scale + first - target))
    if optimizer is not None:
      mtf.sparse.minimize(loss, optimizer, mtf.optimize.SgdOptimizer(0.1))
    return loss, y

  return step


def start(impl, step):
  """Makes the variables, of known values."""
  step(IDS, TARGET)
  stored = impl.variable_store["table"]
  stored.assign(START.reshape(stored.shape.to_integer_list))
  for v in impl.variable_store:
    if v.name == "scale":
      v.assign(np.ones(4, np.float32))
    elif v.name != "table":
      v.assign(np.full(v.shape.to_integer_list, 0.1 if v.name.endswith("_a") else 0.0, np.float32))


class Reference:
  """The same in NumPy, by one row after another."""

  def __init__(self, rule):
    self.w, self.scale, self.rule = START.astype(np.float64), np.ones(4), rule
    self.slots = [np.full([48, 4], v) for v in rule.start]
    self.steps = 0

  def step(self):
    w, n = self.w, 16 * 4
    there = (IDS >= 0) & (IDS < 48)
    rows = np.where(there[..., None], w[np.clip(IDS, 0, 47)], 0.0)
    count = np.maximum(there.sum(1, keepdims=True), 1)
    y = rows.sum(1) / count
    largest = IDS.max(1)
    one = (largest >= 0) & (largest < 48)
    first = np.where(one[:, None], w[np.clip(largest, 0, 47)], 0.0)
    error = y * self.scale + first - TARGET
    g = {}
    for b in range(16):
      for v in range(4):
        if there[b, v]:
          g[IDS[b, v]] = g.get(IDS[b, v], 0) + 2 / n * error[b] * self.scale / count[b]
      if one[b]:
        g[largest[b]] = g.get(largest[b], 0) + 2 / n * error[b]
    self.scale = self.scale - 0.1 * 2 / n * (error * y).sum(0)
    self.steps += 1
    for row, gradient in g.items():
      self.rule(self.steps, w, row, gradient, *self.slots)
    return np.mean(error**2)


def sgd(step, w, row, g):
  w[row] -= 0.5 * g


def adagrad(step, w, row, g, a):
  a[row] += g * g
  w[row] -= 0.5 * g / np.sqrt(a[row] + 1e-7)


def adam(step, w, row, g, m, v):
  m[row] = 0.9 * m[row] + 0.1 * g
  v[row] = 0.999 * v[row] + 0.001 * g * g
  rate = 0.5 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
  w[row] -= rate * m[row] / (np.sqrt(v[row]) + 1e-7)


sgd.start, adagrad.start, adam.start = (), (0.1,), (0.0, 0.0)
RULES = [(mtf.sparse.Sgd, sgd), (mtf.sparse.Adagrad, adagrad), (mtf.sparse.LazyAdam, adam)]


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", layouts())
@pytest.mark.parametrize(
  "optimizer, rule",
  [
    pytest.param(*RULES[0], marks=pytest.mark.long, id="sgd"),
    pytest.param(*RULES[1], id="adagrad"),
    pytest.param(*RULES[2], marks=pytest.mark.long, id="adam"),
  ],
)
def test_training_on_layouts(kind, name, optimizer, rule, make_impl):
  impl = make_impl(kind, name)
  step = make_step(impl, optimizer(0.5))
  start(impl, step)
  reference = Reference(rule)
  for _ in range(3):
    np.testing.assert_allclose(step(IDS, TARGET)[0], reference.step(), rtol=1e-4)
  got = impl.variable_store["table"].numpy().reshape(48, 4)
  np.testing.assert_allclose(got, reference.w, rtol=1e-3, atol=1e-4)


def drawn_layout(seed):
  """A mesh of one to eight devices and rules for some dimensions of the table and of its ids."""
  rng = np.random.default_rng(seed)
  axes = ["a", "b", "c"][: rng.integers(1, 4)]
  sizes = [[4], [2, 4], [2, 2, 2]][len(axes) - 1]
  shape = ",".join(f"{axis}:{size}" for axis, size in zip(axes, sizes))
  rows = [["rows"], ["rows_a", "rows_b"]][rng.integers(2)]
  rules = {}
  # No tensor has two dimensions over one axis: those of the table and those of the ids are apart.
  for names in ([*rows, "width"], ["batch", "values"]):
    free = list(rng.permutation(axes))
    for name in names:
      if free and rng.random() < 0.7:
        rules[name] = free.pop()
  if "width" in rules and rules["width"] in (rules.get("batch"), rules.get("values")):
    del rules["width"]  # What is looked up has both.
  return shape, ",".join(f"{name}:{axis}" for name, axis in rules.items())


@pytest.mark.parametrize("seed", [*range(3), *kept(list(range(3, 40)), [])])
def test_training_on_drawn_layouts(seed, cpu_devices):
  shape, layout = drawn_layout(seed)
  cls = mtf.SimdMeshImpl if seed % 2 else mtf.PlacementMeshImpl
  impl = cls(shape, layout, cpu_devices[: mtf.convert_to_shape(shape).size])
  step = make_step(impl, mtf.sparse.Adagrad(0.5))
  start(impl, step)
  reference = Reference(adagrad)
  for _ in range(2):
    np.testing.assert_allclose(step(IDS, TARGET)[0], reference.step(), rtol=1e-4)
  got = impl.variable_store["table"].numpy().reshape(48, 4)
  np.testing.assert_allclose(got, reference.w, rtol=1e-3, atol=1e-4, err_msg=f"{shape} {layout}")


@pytest.mark.parametrize(
  "kind, shape, layout",
  [
    ("placement", "a:5", "batch:a~,rows:a~"),
    ("simd", "a:5", "batch:a~,rows:a~"),
    ("placement", "a:3,b:2", "batch:a~,values:b~,rows_a:a~,rows_b:b~"),
    ("simd", "a:3,b:2", "values:a~,rows:a~"),
    ("placement", "a:7", "rows:a~"),
  ],
)
def test_training_on_uneven_splits(kind, shape, layout, cpu_devices):
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = cls(shape, layout, cpu_devices[: mtf.convert_to_shape(shape).size])
  step = make_step(impl, mtf.sparse.Adagrad(0.5))
  with padding.filled_with(float("nan")):
    start(impl, step)
    reference = Reference(adagrad)
    for _ in range(2):
      np.testing.assert_allclose(step(IDS, TARGET)[0], reference.step(), rtol=1e-4)
  got = impl.variable_store["table"].numpy().reshape(48, 4)
  np.testing.assert_allclose(got, reference.w, rtol=1e-3, atol=1e-4)


def test_the_width_is_not_split_unevenly(cpu_devices):
  impl = mtf.PlacementMeshImpl("a:3", "width:a~", cpu_devices[:3])
  with pytest.raises(mtf.LayoutError, match="width:4 of LookupOperation .* 3 does not divide 4"):
    make_step(impl, mtf.sparse.Adagrad(0.5))(IDS, TARGET)


@pytest.mark.parametrize("optimizer, keras", [
  pytest.param(mtf.sparse.Sgd, tf.keras.optimizers.SGD, marks=pytest.mark.long),
  (mtf.sparse.Adagrad, tf.keras.optimizers.Adagrad),
])  # fmt: skip
def test_the_losses_of_keras(optimizer, keras, make_impl):
  impl = make_impl()
  ids = np.abs(IDS) % 48
  embedding = tf.keras.layers.Embedding(48, 4)
  embedding.build(None)
  embedding.set_weights([START])
  rule = keras(0.5)

  def keras_step():
    with tf.GradientTape() as tape:
      y = tf.reduce_sum(embedding(ids), 1) + embedding(ids.max(1))
      loss = tf.reduce_mean(tf.square(y - TARGET))
    (v,) = embedding.trainable_weights
    # Dense: of a sparse gradient Keras does not add up a row's parts before it squares them.
    rule.apply([tf.convert_to_tensor(tape.gradient(loss, v.value))], [v])
    return loss

  @mtf.function(impl, [mtf.TensorSpec([BATCH, VALUES], tf.int64), mtf.TensorSpec([BATCH, WIDTH])])
  def step(ids, target):
    table = table_of(ids.mesh, impl)
    y = mtf.sparse.lookup(table, ids, combine="sum", over=VALUES)
    y = y + mtf.sparse.lookup(table, mtf.reduce_max(ids, reduced_dim=VALUES))
    loss = mtf.reduce_mean(mtf.square(y - target))
    mtf.sparse.minimize(loss, optimizer(0.5))
    return loss

  start(impl, step)
  for _ in range(5):
    np.testing.assert_allclose(step(ids, TARGET), keras_step(), rtol=1e-4)


@pytest.mark.parametrize("kind", [pytest.param("placement", marks=pytest.mark.long), "simd"])
def test_all_ids_of_one_owner(kind, make_impl):
  """Boxes that are too small for them: further rounds."""
  impl, many = make_impl(kind), mtf.Dimension("many", 160)
  ids = np.stack([RNG.permutation(40) * 12 for _ in range(16)]).reshape(4, 160) % 480
  ids[1:] = ids[1:] % 120  # Of the first device.
  batch, rows = mtf.Dimension("batch", 4), mtf.Dimension("rows", 480)
  start_values = RNG.normal(size=[480, 4]).astype(np.float32)

  @mtf.function(impl, [mtf.TensorSpec([batch, many], tf.int32)])
  def step(ids):
    table = mtf.sparse.table(ids.mesh, "table", rows, WIDTH)
    y = mtf.sparse.lookup(table, ids)
    mtf.sparse.minimize(mtf.reduce_sum(y), mtf.sparse.Sgd(1.0))
    return y

  distinct = np.arange(160)[None, :] % 120 + np.zeros([4, 1], int)
  for given in (ids, distinct):
    step(given)
    impl.variable_store["table"].assign(start_values)
    np.testing.assert_array_equal(step(given), start_values[given])
    want = start_values - np.bincount(given.ravel(), minlength=480)[:, None]
    np.testing.assert_allclose(impl.variable_store["table"].numpy(), want, rtol=1e-4, atol=1e-4)


def test_hashed_ids_and_weights(make_impl):
  impl = make_impl()
  weights = RNG.uniform(0.5, 2, [16, 4]).astype(np.float32)
  ids = RNG.integers(0, 2**62, [16, 4])
  ids[:4, 0] = -1

  @mtf.function(impl, [mtf.TensorSpec([BATCH, VALUES], tf.int64), mtf.TensorSpec([BATCH, VALUES])])
  def f(ids, weights):
    table = table_of(ids.mesh, impl)
    rows = mtf.sparse.hash_ids(ids, table)
    found = dict(combine="mean", over=VALUES, weights=weights)
    return rows, mtf.sparse.lookup(table, ids, hashed=True, **found), table.value

  rows, mean, table = (t.numpy() for t in f(ids, weights))
  assert np.all(rows[:4, 0] == -1) and np.all(rows.ravel()[rows.ravel() != -1] >= 0)
  assert 25 < len(set(rows.ravel())) <= 49  # Of 60 ids in 48 rows.
  kept = weights * (rows >= 0)
  want = (kept[..., None] * table[np.maximum(rows, 0)]).sum(1) / kept.sum(1, keepdims=True)
  np.testing.assert_allclose(mean, want, rtol=1e-4, atol=1e-5)


def test_nothing_is_as_large_as_the_table(make_impl):
  """What a plan finds that is exchanged, and that no tensor of the program has the table's rows."""
  impl, rows = make_impl(), mtf.Dimension("rows", 2**20)

  @mtf.function(impl, [mtf.TensorSpec([BATCH], tf.int32)])
  def step(ids):
    table = mtf.sparse.table(ids.mesh, "table", rows, WIDTH, initializer=mtf.initializers.Zeros())
    y = mtf.sparse.lookup(table, ids)
    mtf.sparse.minimize(mtf.reduce_mean(mtf.square(y)), mtf.sparse.Adagrad(0.1))
    return y

  # A device has boxes for four ids to and from each of three others: ids and vectors of the
  # look-up, ids and gradients of the update, whatever the number of rows.
  assert step.plan().bytes_moved() == {"a": 2 * 3 * 4 * (4 + 4 * 4)}
  step(np.arange(16))
  concrete = step._compiled._tf_function.get_concrete_function(
    [tf.TensorSpec([16], tf.int32)], None
  )
  library = concrete.graph.as_graph_def().library.function
  reads = [n for f in library for n in f.node_def if n.op == "ReadVariableOp"]
  gathers = [n for f in library for n in f.node_def if n.op == "ResourceGatherNd"]
  assert gathers and all("rows" not in n.name and "table" not in n.name for n in reads)


@pytest.mark.parametrize(
  "wrong, error, text",
  [
    (lambda t, i: mtf.sparse.lookup(t, i, combine="mean"), mtf.ArgumentError, "over"),
    (lambda t, i: mtf.sparse.lookup(t, i, combine="max", over=VALUES), mtf.ArgumentError, "'sum'"),
    (lambda t, i: mtf.sparse.lookup(t, i, combine="sum", over=WIDTH), mtf.DimensionError, "width"),
    (lambda t, i: mtf.sparse.lookup(t, mtf.cast(i, tf.float32)), mtf.DTypeError, "integers"),
    (lambda t, i: mtf.sparse.lookup(t, mtf.rename_dimension(i, "batch", "rows")),
     mtf.ShapeError, "rows"),
    (lambda t, i: mtf.sparse.lookup(i, i), mtf.MeshError, "table"),
    (lambda t, i: mtf.sparse.table(t.mesh, "table", ROWS, VALUES), mtf.VariableError, "table"),
    (lambda t, i: mtf.sparse.table(t.mesh, "t", [ROWS] * 3, WIDTH), mtf.ShapeError, "one or two"),
    (lambda t, i: mtf.sparse.table(t.mesh, "t", ROWS, WIDTH, tf.int32), mtf.DTypeError, "floating"),
    (lambda t, i: mtf.sparse.minimize(mtf.reduce_sum(t.value), mtf.sparse.Sgd(1.0)),
     mtf.GraphError, "no lookup"),
    (lambda t, i: mtf.sparse.minimize(mtf.reduce_sum(t.value), mtf.optimize.SgdOptimizer(1.0)),
     mtf.MeshError, "rows"),
  ],
)  # fmt: skip
def test_wrong_uses(wrong, error, text):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  table = mtf.sparse.table(mesh, "table", ROWS, WIDTH)
  ids = mtf.zeros(mesh, [BATCH, VALUES], tf.int32)
  with pytest.raises(error, match=text):
    wrong(table, ids)


def test_a_lookup_in_a_loop_is_refused(make_impl):
  impl = make_impl()

  @mtf.function(impl, [mtf.TensorSpec([BATCH], tf.int32)])
  def step(ids):
    table = table_of(ids.mesh, impl)
    zero = mtf.constant(ids.mesh, 0, dtype=tf.int32)
    start = mtf.constant(ids.mesh, 0.0)
    _, total = mtf.while_loop(
      lambda i, _: mtf.less(i, 2),
      lambda i, s: [i + 1, s + mtf.reduce_sum(mtf.sparse.lookup(table, ids))],
      [zero, start],
    )
    mtf.sparse.minimize(total, mtf.sparse.Sgd(1.0))
    return total

  with pytest.raises(mtf.UnsupportedError, match="inside a loop"):
    step(np.arange(16))


WEIGHTED = list(itertools.product(["simd", "placement"], [False, True], ["sum", "mean", "sqrtn"]))


@pytest.mark.parametrize(("kind", "safe", "combine"), kept(WEIGHTED, WEIGHTED[::2]))
def test_weights_of_any_sign_count_as_in_tensorflow(make_impl, kind, safe, combine):
  """Values, and the update of the table by a gradient, beside `tf.nn.embedding_lookup_sparse`."""
  impl = make_impl(kind)
  rng = np.random.default_rng(3)
  # A sum of weights is sometimes negative, sometimes 0; some rows have no ids.
  weights = rng.choice([-1.5, -0.5, 0.0, 0.5, 1.0, 1.019], [16, 4]).astype(np.float32)
  weights[0], weights[1] = [1.5, -1.5, 0.5, -0.5], [0, 0, 0, 0]
  ids = rng.integers(-1, 48, [16, 4]).astype(np.int32)
  ids[0], ids[2] = [1, 2, 3, 4], -1
  specs = [mtf.TensorSpec([BATCH, VALUES], tf.int32), mtf.TensorSpec([BATCH, VALUES])]

  @mtf.function(impl, specs)
  def step(ids, weights):
    table = table_of(ids.mesh, impl)
    found = dict(combine=combine, over=VALUES, weights=weights, drop_weights=safe)
    y = mtf.sparse.lookup(table, ids, **found)
    mtf.sparse.minimize(mtf.reduce_sum(mtf.square(y)), mtf.sparse.Sgd(0.01))
    return y

  step(ids, weights)
  impl.variable_store["table"].assign(START)
  found = step(ids, weights).numpy()
  there = np.argwhere(ids >= 0)
  shape = [16, 4]
  sparse_ids = tf.SparseTensor(there, ids[ids >= 0].astype(np.int64), shape)
  sparse_weights = tf.SparseTensor(there, weights[ids >= 0], shape)
  table = tf.Variable(START)
  lookup = tf.nn.safe_embedding_lookup_sparse if safe else tf.nn.embedding_lookup_sparse
  with tf.GradientTape() as tape:
    y = lookup(table, sparse_ids, sparse_weights, combiner=combine)
    loss = tf.reduce_sum(tf.square(y))
  wanted = np.zeros([16, 4], np.float32)
  wanted[: len(y)] = y.numpy()
  np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-5)
  gradient = tf.convert_to_tensor(tape.gradient(loss, table)).numpy()
  after = impl.variable_store["table"].numpy()
  np.testing.assert_allclose(after, START - 0.01 * gradient, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["simd", "placement"])
@pytest.mark.parametrize("eagerly", [False, True])
def test_ids_of_no_row_are_counted_and_told_once(make_impl, kind, eagerly, capfd):
  name = f"table_of_{kind}_{eagerly}"

  def look_up(ids):
    return mtf.sparse.lookup(mtf.sparse.table(ids.mesh, name, ROWS, WIDTH), ids)

  impl = make_impl(kind)
  step = mtf.function(impl, [mtf.TensorSpec([BATCH, VALUES], tf.int32)])(look_up)
  ids = np.zeros([16, 4], np.int32)
  ids[0], ids[1], ids[15] = -1, [48, 47, 50, 0], 49
  tf.config.run_functions_eagerly(eagerly)
  try:
    step(np.minimum(ids, 47))
    assert "WARNING" not in capfd.readouterr().err
    found = step(ids).numpy()
    told = [line for line in capfd.readouterr().err.splitlines() if name in line]
    step(ids)
  finally:
    tf.config.run_functions_eagerly(False)
  assert not found[ids > 47].any() and found[1, 3].any()
  # Two devices that see them at the same time may both say so.
  assert 1 <= len(told) <= 2 and name not in capfd.readouterr().err
  assert "48 or more, its number of rows, are 2 of 16 ids" in told[0] or "are 4 of 16" in told[0]
