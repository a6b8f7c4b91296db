"""Beam search and greedy decoding, against all sequences and against a search in plain NumPy."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import beam_search as bs
from mesh_tensorflow.errors import DTypeError, GraphError, ShapeError
from tests.conformance.framework import MODE_PAIRS, Layout, make_impl
from tests.decoding import numpy_beam_search
from tests.decoding.numpy_beam_search import padded, penalty
from tests.kinds import kept

ONE = Layout("r:1", "")


def run(build, layout=ONE, mode="placement_function", seed=None):
  """Runs build(mesh) -> tensors; returns arrays, after checking that processors agree."""
  kind, execution = mode.split("_")
  impl = make_impl(kind, layout, [d.name for d in tf.config.list_logical_devices("CPU")])

  def program():
    mesh = mtf.Mesh(mtf.Graph(), "m")
    mesh.graph.random_seed = seed
    tensors = build(mesh)
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    return [lowering.export_to_tf_tensor(t) for t in tensors]

  run_all = functools.partial(impl.run_per_device, program)
  if execution == "function":
    run_all = tf.function(run_all, autograph=False)
  first, *others = [[np.asarray(t) for t in p] for p in run_all()]
  for other in others:
    assert [t.tobytes() for t in first] == [t.tobytes() for t in other]
  return first


@dataclasses.dataclass
class Model:
  """A recurrent model: its logits depend on the state alone, the state on all tokens so far."""

  batch: int = 2
  vocab: int = 6
  hidden: int = 4
  eos_bias: float = 0.0
  seed: int = 0
  end: int = bs.EOS_ID

  def __post_init__(self):
    rng = np.random.default_rng(self.seed)
    h, v = self.hidden, self.vocab
    self.start = rng.normal(size=[self.batch, h]).astype(np.float32)
    self.keep = rng.normal(size=[h, h]).astype(np.float32)
    self.embedding = 2 * rng.normal(size=[v, h]).astype(np.float32)
    self.out = 1.5 * rng.normal(size=[h, v]).astype(np.float32)
    self.bias = np.zeros([v], np.float32)
    self.bias[self.end] = self.eos_bias

  @functools.cache  # noqa: B019 - the models of a test live as long as it
  def log_probs(self, row: int, prefix: tuple[int, ...]) -> np.ndarray:
    """Of the next token, in float64; the state is computed from the start."""
    state = self.start[row].astype(np.float64)
    for token in (0, *prefix):
      state = np.tanh(state @ self.keep + self.embedding[token])
    logits = state @ self.out + self.bias
    return logits - np.log(np.sum(np.exp(logits)))

  def log_prob(self, row: int, sequence: tuple[int, ...]) -> float:
    return sum(self.log_probs(row, sequence[:i])[t] for i, t in enumerate(sequence))

  __hash__ = object.__hash__

  def logits_fn(self, mesh, dtype=tf.float32, transposed=False, state_last=False):
    """What mtf's searches take; the state is [batch, beam, hidden]."""
    h, g = mtf.Dimension("h", self.hidden), mtf.Dimension("g", self.hidden)
    v = mtf.Dimension("vocab", self.vocab)
    keep = mtf.import_tf_tensor(mesh, self.keep, [h, g])
    embedding = mtf.import_tf_tensor(mesh, self.embedding, [v, g])
    out = mtf.import_tf_tensor(mesh, self.out, [h, v])
    bias = mtf.import_tf_tensor(mesh, self.bias, [v])

    def logits_fn(step, ids, states):
      (old,) = states
      rows = ids.shape.dims[:-1]
      last = mtf.gather(ids, step - 1, ids.shape[-1])
      state = mtf.einsum([old, keep], reduced_dims=[h]) + mtf.gather(embedding, last, v)
      state = mtf.rename_dimension(mtf.tanh(mtf.transpose(state, [*rows, g])), "g", "h")
      logits = mtf.einsum([state, out], reduced_dims=[h]) + bias
      if transposed:
        logits = mtf.transpose(logits, [v, *rows[::-1]])
      return mtf.cast(logits, dtype), [mtf.transpose(state, old.shape)]

    return logits_fn

  def beam_search(
    self, on=ONE, mode="placement_function", *, beam=3, length=5, alpha=0.6, decode_length=None,
    as_tensor=False, logits_dtype=tf.float32, transposed=False, state_first=True, **kwargs,
  ):  # fmt: skip
    """Runs mtf's beam search; returns ids, scores and the number of steps."""
    b, k = mtf.Dimension("batch", self.batch), mtf.Dimension("beam", beam)
    l, h = mtf.Dimension("length", length), mtf.Dimension("h", self.hidden)

    def build(mesh):
      start = mtf.import_tf_tensor(mesh, self.start, [b, h])
      limit = decode_length
      if as_tensor:
        limit = mtf.constant(mesh, limit, dtype=tf.int32)
      ids, scores = bs.beam_search(
        self.logits_fn(mesh, logits_dtype, transposed),
        mtf.zeros(mesh, [b, k, l], tf.int32),
        alpha,
        states=[mtf.broadcast(start, [b, k, h] if state_first else [h, b, k])],
        decode_length=limit,
        eos_id=self.end,
        **kwargs,
      )
      assert ids.shape == mtf.Shape([b, k, l]) and ids.dtype == tf.int32
      assert scores.shape == mtf.Shape([b, k])
      assert scores.dtype == tf.as_dtype(kwargs.get("dtype", tf.float32))
      loop = [op for op in mesh.graph.operations if isinstance(op, mtf.WhileLoopOperation)][-1]
      return [ids, mtf.cast(scores, tf.float32), loop.outputs[0]]

    return run(build, on, mode)

  def greedy(self, layout=ONE, mode="placement_function", *, length=5, forced=None, **kwargs):
    b, l = mtf.Dimension("batch", self.batch), mtf.Dimension("length", length)
    h = mtf.Dimension("h", self.hidden)

    def build(mesh):
      ids = bs.greedy_decode(
        self.logits_fn(mesh),
        mtf.zeros(mesh, [b, l], tf.int32),
        initial_states=[mtf.import_tf_tensor(mesh, self.start, [b, h])],
        eos_id=self.end,
        forced_ids=None if forced is None else mtf.import_tf_tensor(mesh, forced, [b, l]),
        **kwargs,
      )
      assert ids.shape == mtf.Shape([b, l]) and ids.dtype == tf.int32
      return [ids]

    return run(build, layout, mode, seed=3)[0]


def search_in_numpy(model, beam, length, alpha, decode_length=None, stop_early=True, **kwargs):
  limit = length if decode_length is None else min(decode_length, length)
  return numpy_beam_search.search(
    model.log_probs, model.batch, beam, length, alpha, model.end, limit, stop_early, **kwargs
  )


def all_sequences(model, row, length, alpha):
  """Every complete sequence with its score, best first."""
  others = [t for t in range(model.vocab) if t != model.end]
  sequences = [
    (*start, model.end) for n in range(length) for start in itertools.product(others, repeat=n)
  ]
  scored = [(model.log_prob(row, s) / penalty(len(s), alpha), s) for s in sequences]
  return sorted(scored, key=lambda x: -x[0])


def assert_same(got, want, tolerance=1e-5):
  ids, scores = np.array(got[0]), np.array(got[1])
  # Alive places that no sequence reached hold any.
  empty = want[1] < -bs.INF / 2
  ids[empty & (scores < -bs.INF / 2)] = 0
  np.testing.assert_array_equal(ids, want[0])
  np.testing.assert_allclose(scores[~empty], want[1][~empty], rtol=tolerance, atol=tolerance)
  np.testing.assert_array_less(scores[empty], -bs.INF / 2)


@pytest.mark.parametrize("stop_early", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_wide_beam_finds_the_best_of_all_sequences(alpha, stop_early):
  model = Model(vocab=4, batch=3, seed=1)
  # The last step extends 27 sequences by 4 tokens: twice as many candidates as places.
  want = [padded(all_sequences(model, row, 4, alpha), 54, 4) for row in range(3)]
  got = model.beam_search(beam=54, length=4, alpha=alpha, stop_early=stop_early)
  assert_same(got, [np.stack(x) for x in zip(*want)])


def test_more_places_than_sequences():
  """The places that stay empty hold zeros and -INF."""
  model = Model(vocab=3, seed=2)
  sequences = all_sequences(model, 0, 3, 0.6)
  assert len(sequences) == 7
  ids, scores, _ = model.beam_search(beam=10, length=3)
  want = padded(sequences, 10, 3)
  np.testing.assert_array_equal(ids[0], want[0])
  np.testing.assert_allclose(scores[0, :7], want[1][:7], rtol=1e-5)
  np.testing.assert_array_equal(scores[0, 7:], np.float32(-bs.INF))


@pytest.mark.parametrize("seed", range(6))
def test_equals_search_in_numpy(seed):
  rng = np.random.default_rng(seed)
  model = Model(batch=3, vocab=int(rng.integers(3, 12)), eos_bias=rng.uniform(-2, 2), seed=seed)
  kwargs = {
    "beam": int(rng.integers(1, 5)),
    "length": int(rng.integers(2, 8)),
    "alpha": float(rng.choice([0.0, 0.6, 1.5])),
    "stop_early": bool(seed % 2),
    "length_penalty": ["gnmt", "power"][seed // 2 % 2],
  }
  got, want = model.beam_search(**kwargs), search_in_numpy(model, **kwargs)
  assert_same(got, want)
  assert got[2] == want[2]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("decode_length", [0, 2, 4, 9])
def test_decode_length(decode_length, as_tensor):
  model = Model(seed=4)
  kwargs = {"length": 6, "decode_length": decode_length}
  got, want = (
    model.beam_search(as_tensor=as_tensor, **kwargs),
    search_in_numpy(model, 3, alpha=0.6, **kwargs),
  )
  assert got[2] == want[2] <= decode_length
  if decode_length:
    assert_same(got, want)


def test_stops_early_with_the_same_sequences():
  model = Model(eos_bias=4.0, seed=5)
  early = model.beam_search(length=12)
  late = model.beam_search(length=12, stop_early=False)
  assert early[2] < 12 == late[2]
  np.testing.assert_array_equal(early[0], late[0])
  np.testing.assert_array_equal(early[1], late[1])


def test_unfinished_rows_have_raw_log_probabilities():
  model = Model(eos_bias=-100.0, vocab=12, seed=6)
  ids, scores, _ = model.beam_search(length=4)
  assert not np.any(ids == model.end)
  for row, place in np.ndindex(2, 3):
    sequence = tuple(int(t) for t in ids[row, place])
    np.testing.assert_allclose(scores[row, place], model.log_prob(row, sequence), rtol=1e-5)
  assert np.all(np.diff(scores) <= 0)


def test_other_end_token_and_orders_of_dimensions():
  model = Model(end=3, eos_bias=1.0, seed=7)
  want = search_in_numpy(model, 3, 5, 0.6)
  assert_same(model.beam_search(), want)
  assert_same(model.beam_search(transposed=True, state_first=False), want)


def test_beam_of_one_and_vocabulary_of_two():
  model = Model(vocab=2, seed=8)
  assert_same(model.beam_search(beam=1), search_in_numpy(model, 1, 5, 0.6))


def test_without_states():
  """The model sees the ids alone; states=None and no new states."""
  model = Model(seed=9)
  table = np.random.default_rng(0).normal(size=[6, 6]).astype(np.float32)
  model.log_probs = lambda row, prefix: np.log(
    np.exp(table[(0, *prefix)[-1]]) / np.sum(np.exp(table[(0, *prefix)[-1]]))
  )

  def build(mesh):
    v = mtf.Dimension("v", 6)
    rows = mtf.import_tf_tensor(mesh, table, [v, mtf.Dimension("vocab", 6)])

    def logits_fn(step, ids, states):
      assert states == [] and step.dtype == tf.int32 and not step.shape.dims
      return mtf.gather(rows, mtf.gather(ids, step - 1, ids.shape[-1]), v), None

    ids = mtf.zeros(mesh, "batch:2 beam:3 length:5", tf.int32)
    return bs.beam_search(logits_fn, ids, 0.6)

  assert_same(run(build), search_in_numpy(model, 3, 5, 0.6))


def test_one_search_without_a_batch():
  """Ids of [beam, length]: as a batch of one, and the least that a search has."""
  table = np.random.default_rng(0).normal(size=[6, 6]).astype(np.float32)

  def build(mesh, shape):
    v = mtf.Dimension("v", 6)
    rows = mtf.import_tf_tensor(mesh, table, [v, mtf.Dimension("vocab", 6)])

    def logits_fn(step, ids, states):
      return mtf.gather(rows, mtf.gather(ids, step - 1, ids.shape[-1]), v), None

    return bs.beam_search(logits_fn, mtf.zeros(mesh, shape, tf.int32), 0.6)

  ids, scores = run(lambda mesh: build(mesh, "beam:3 length:5"))
  batch_ids, batch_scores = run(lambda mesh: build(mesh, "batch:1 beam:3 length:5"))
  np.testing.assert_array_equal(ids, batch_ids[0])
  np.testing.assert_allclose(scores, batch_scores[0], rtol=1e-6)
  with pytest.raises(ShapeError, match="must have the dimensions"):
    run(lambda mesh: build(mesh, "length:5"))


def test_masked_tokens_are_not_taken():
  """Logits of -1e9, by which models forbid tokens, are below the empty places' -INF."""

  def build(mesh):
    logits = mtf.import_tf_tensor(mesh, np.array([-1e9, -1e9, 0.5, 0.0], np.float32), "vocab:4")
    ids = mtf.zeros(mesh, "batch:1 beam:3 length:3", tf.int32)
    return bs.beam_search(
      lambda step, ids, _: (mtf.broadcast(logits, "batch:1 beam:3 vocab:4"), None), ids, 0.6
    )

  ids, scores = run(build)
  np.testing.assert_array_equal(ids[0, 0], [2, 2, 2])
  assert {tuple(x) for x in ids[0, 1:]} < {(2, 2, 3), (2, 3, 2), (3, 2, 2)}
  np.testing.assert_allclose(scores[0, 0], 3 * np.log(np.e**0.5 / (1 + np.e**0.5)), rtol=1e-5)


LAYOUTS = [
  Layout("r:2", "batch:r"),
  Layout("r:2", "vocab:r"),
  Layout("r:4", "vocab:r"),
  Layout("r:2", "length:r"),
  Layout("r:2", "h:r"),
  Layout("r:3", "beam:r"),
  Layout("r:2,s:2", "batch:r,vocab:s"),
  Layout("r:2,s:3", "vocab:r,beam:s"),
  Layout("r:2,s:2,t:2", "batch:r,vocab:s,length:t"),
]


# Of `make test`: vocabulary, beam, both with the batch; conformance tests draw others.
@pytest.mark.parametrize("layout", kept(LAYOUTS, [LAYOUTS[i] for i in (1, 5, 6)]), ids=str)
@pytest.mark.slow
def test_layout_does_not_matter(layout):
  model = Model(batch=2, vocab=8, seed=10)
  want = search_in_numpy(model, 3, 4, 0.6)
  want_greedy = model.greedy(length=4)
  sampled = model.greedy(length=4, temperature=1.0)
  for mode in MODE_PAIRS[LAYOUTS.index(layout) % 2]:
    got = model.beam_search(layout, mode, length=4)
    assert_same(got, want)
    assert got[2] == want[2]
    np.testing.assert_array_equal(model.greedy(layout, mode, length=4), want_greedy)
    np.testing.assert_array_equal(model.greedy(layout, mode, length=4, temperature=1.0), sampled)


def test_bfloat16():
  """Scores in bfloat16 are near those of the returned sequences; the best one is good."""
  model = Model(vocab=20, eos_bias=2.0, seed=11)
  _, best, _ = search_in_numpy(model, 4, 4, 0.6)
  for kwargs in (
    {"logits_dtype": tf.bfloat16},
    {"dtype": tf.bfloat16},
    {"logits_dtype": tf.bfloat16, "dtype": tf.bfloat16},
  ):
    ids, scores, _ = model.beam_search(beam=4, length=4, **kwargs)
    for row, place in np.ndindex(2, 4):
      sequence = tuple(int(t) for t in ids[row, place])
      sequence = sequence[: sequence.index(model.end) + 1]
      true = model.log_prob(row, sequence) / penalty(len(sequence), 0.6)
      np.testing.assert_allclose(scores[row, place], true, rtol=0.03)
    np.testing.assert_allclose(scores[:, 0], best[:, 0], rtol=0.03)


@pytest.mark.parametrize("mode", ["placement_function", "simd_function"])
def test_variables_and_several_batch_dimensions(mode):
  """The model's variables are made once; [outer, batch] is as good as one dimension."""
  outer, batch = mtf.Dimension("outer", 2), mtf.Dimension("batch", 2)
  vocab = mtf.Dimension("vocab", 6)

  def build(mesh, batch_dims):
    k, l, one = mtf.Dimension("beam", 2), mtf.Dimension("length", 4), mtf.Dimension("one", 1)
    shape = mtf.Shape(batch_dims)
    values = np.arange(4, dtype=np.float32).reshape(shape.to_integer_list)
    start = mtf.import_tf_tensor(mesh, values, shape)

    def logits_fn(step, ids, states):
      weights = mtf.get_variable(
        mesh,
        "weights",
        mtf.Shape([one, vocab]),
        initializer=tf.random_normal_initializer(seed=1),
      )
      state = states[0] + mtf.to_float(mtf.reduce_sum(ids, reduced_dim=l))
      x = mtf.reshape(state, mtf.Shape([*batch_dims, k, one]))
      return mtf.einsum([x, weights], reduced_dims=[one]), [state]

    state = mtf.broadcast(start, mtf.Shape([*batch_dims, k]))
    ids = mtf.zeros(mesh, mtf.Shape([*batch_dims, k, l]), tf.int32)
    ids, scores = bs.beam_search(logits_fn, ids, 0.6, states=[state])
    assert [v.full_name for v in mesh.graph.all_variables] == ["weights"]
    flat = mtf.Dimension("flat", 4)
    ids, scores = mtf.reshape(ids, [flat, k, l]), mtf.reshape(scores, [flat, k])
    return [mtf.anonymize(ids), mtf.anonymize(scores)]

  want = run(lambda mesh: build(mesh, [mtf.Dimension("batch", 4)]))
  layout = Layout("r:2,s:2", "outer:r,batch:s")
  got = run(lambda mesh: build(mesh, [outer, batch]), layout, mode)
  np.testing.assert_array_equal(got[0], want[0])
  np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


def test_inside_mtf_function(cpu_devices):
  model = Model(seed=12)
  impl = mtf.PlacementMeshImpl("r:2", "batch:r", cpu_devices[:2])
  start = mtf.TensorSpec([("batch", 2), ("h", 4)], tf.float32)

  @mtf.function(impl, input_signature=[start])
  def decode(start):
    beam = mtf.Dimension("beam", 3)
    state = mtf.broadcast(start, [start.shape[0], beam, start.shape[1]])
    ids = mtf.zeros(start.mesh, [start.shape[0], beam, ("length", 5)], tf.int32)
    return bs.beam_search(model.logits_fn(start.mesh), ids, 0.6, states=[state])

  assert_same([np.asarray(t) for t in decode(model.start)], search_in_numpy(model, 3, 5, 0.6))
  steps = {
    op["times"] for op in mtf.describe(decode).to_dict()["operations"] if "top_k" in op["name"]
  }
  assert steps == {5}


@pytest.mark.slow
def test_arguments_of_the_old_approximation_change_nothing():
  model = Model(vocab=8, seed=13)
  want = model.beam_search(beam=4)
  for kwargs in (
    {"num_prefilter": 1, "layout": "vocab:r", "mesh_shape": "r:4"},
    {"use_tpu": False},
  ):
    for got, wanted in zip(model.beam_search(Layout("r:4", "vocab:r"), beam=4, **kwargs), want):
      np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_gin_bindings():
  gin.parse_config("""
    mesh_tensorflow.beam_search.beam_search.alpha = 0.0
    mesh_tensorflow.beam_search.greedy_decode.temperature = 0.0
  """)
  model = Model(seed=14)

  def build(mesh):
    state = mtf.import_tf_tensor(mesh, model.start, "batch:2 h:4")
    state = mtf.broadcast(state, "batch:2 beam:3 h:4")
    ids = mtf.zeros(mesh, "batch:2 beam:3 length:5", tf.int32)
    return bs.beam_search(model.logits_fn(mesh), ids, states=[state])

  assert_same(run(build), search_in_numpy(model, 3, 5, 0.0))


def test_autograph_does_not_convert_it():
  """A tf.function of the user's, which converts what it calls."""
  model = Model(seed=17)

  @tf.function
  def decode(start):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    state = mtf.broadcast(mtf.import_tf_tensor(mesh, start, "batch:2 h:4"), "batch:2 beam:3 h:4")
    ids = mtf.zeros(mesh, "batch:2 beam:3 length:5", tf.int32)
    ids, scores = bs.beam_search(model.logits_fn(mesh), ids, 0.6, states=[state])
    lowering = mtf.Lowering(mesh.graph, {mesh: mtf.PlacementMeshImpl("r:1", "", [""])})
    return lowering.export_to_tf_tensor(ids), lowering.export_to_tf_tensor(scores)

  assert_same([np.asarray(t) for t in decode(model.start)], search_in_numpy(model, 3, 5, 0.6))


def test_work_of_a_step():
  """No tensor of a step is larger than the logits, and few nodes are as large."""
  sizes = {}

  def build(mesh):
    logits = mtf.import_tf_tensor(
      mesh, np.zeros([2, 4, 100], np.float32), "batch:2 beam:4 vocab:100"
    )
    ids = mtf.zeros(mesh, "batch:2 beam:4 length:5", tf.int32)
    state = mtf.zeros(mesh, "batch:2 beam:4 h:7", tf.float32)
    return bs.beam_search(lambda step, ids, states: (logits, states), ids, 0.6, states=[state])

  @tf.function(autograph=False)
  def search():
    mesh = mtf.Mesh(mtf.Graph(), "m")
    ids, scores = build(mesh)
    lowering = mtf.Lowering(mesh.graph, {mesh: mtf.PlacementMeshImpl("r:1", "", [""])})
    return lowering.export_to_tf_tensor(ids), lowering.export_to_tf_tensor(scores)

  library = search.get_concrete_function().graph.as_graph_def(add_shapes=True).library
  (body,) = [f for f in library.function if "while_body" in f.signature.name]
  nodes = [n for n in body.node_def if n.op not in ("Const", "Identity")]
  for node in nodes:
    for shape in node.attr["_output_shapes"].list.shape:
      sizes[node.name] = max(
        sizes.get(node.name, 0), int(np.prod([d.size for d in shape.dim], dtype=np.int64))
      )
  assert len(sizes) == len(nodes) < 65
  large = [name for name, size in sizes.items() if size >= 2 * 4 * 100]
  # The difference to the maximum, and its exponential, for the normalization.
  assert len(large) == 2 and max(sizes.values()) == 2 * 4 * 100


def test_compute_topk_scores_and_seq():
  rng = np.random.default_rng(0)
  sequences = rng.integers(0, 9, [2, 5, 3]).astype(np.int32)
  scores, others = rng.normal(size=[2, 2, 5]).astype(np.float32)
  flags = rng.random([2, 5]) < 0.5
  for layout in (ONE, Layout("r:2", "batch:r"), Layout("r:3", "beam:r"), Layout("r:5", "old:r")):

    def build(mesh):
      rows = mtf.Shape([("batch", 2), ("old", 5)])
      return bs.compute_topk_scores_and_seq(
        mtf.import_tf_tensor(mesh, sequences, rows + mtf.Dimension("length", 3)),
        mtf.import_tf_tensor(mesh, scores, rows),
        mtf.import_tf_tensor(mesh, others, rows),
        mtf.import_tf_tensor(mesh, flags, rows),
        mtf.Dimension("beam", 3),
        prefix="p",
      )

    got = run(build, layout)
    order = np.argsort(-scores, axis=1)[:, :3]
    np.testing.assert_array_equal(got[0], np.take_along_axis(sequences, order[..., None], 1))
    np.testing.assert_array_equal(got[1], np.take_along_axis(others, order, 1))
    np.testing.assert_array_equal(got[2], np.take_along_axis(flags, order, 1))
    np.testing.assert_array_equal(got[3], np.eye(5, dtype=np.float32)[order])


def greedy_in_numpy(model, length, forced=None):
  ids = np.zeros([model.batch, length], np.int32)
  for i in range(length):
    if np.all(np.any(ids[:, :i] == model.end, axis=1)):
      break
    for row in range(model.batch):
      token = np.argmax(model.log_probs(row, tuple(int(t) for t in ids[row, :i])))
      ids[row, i] = forced[row, i] if forced is not None and forced[row, i] else token
  return ids


@pytest.mark.parametrize("seed", range(4))
def test_greedy_decode_equals_numpy(seed):
  model = Model(batch=3, eos_bias=1.0, seed=seed)
  np.testing.assert_array_equal(model.greedy(length=7), greedy_in_numpy(model, 7))


@pytest.mark.parametrize(
  "layout", [ONE, Layout("r:2", "length:r"), Layout("r:2", "batch:r")], ids=str
)
def test_greedy_decode_with_forced_ids(layout):
  model = Model(seed=15)
  forced = np.array([[5, 4, 0, 0, 0, 3], [0, 2, 2, 0, 0, 0]], np.int32)
  got = model.greedy(layout, length=6, forced=forced)
  np.testing.assert_array_equal(got, greedy_in_numpy(model, 6, forced))
  assert np.all(got[0, :2] == [5, 4]) and np.all(got[1, 1:3] == 2)


def test_greedy_decode_stops_when_all_rows_are_complete():
  model = Model(eos_bias=100.0, seed=16)
  got = model.greedy(length=6)
  np.testing.assert_array_equal(got, [[model.end, 0, 0, 0, 0, 0]] * 2)


def test_greedy_decode_samples_by_temperature():
  logits = np.array([0.3, -1.0, 1.2, 0.0], np.float32)
  rows = 8000

  def build(mesh):
    x = mtf.broadcast(
      mtf.import_tf_tensor(mesh, logits, "vocab:4"), mtf.convert_to_shape(f"batch:{rows} vocab:4")
    )
    ids = mtf.zeros(mesh, f"batch:{rows} length:2", tf.int32)
    return [bs.greedy_decode(lambda *_: (x, []), ids, temperature=2.0, eos_id=9)]

  (ids,) = run(build, seed=1)
  want = np.exp(logits / 2) / np.sum(np.exp(logits / 2))
  for position in range(2):
    np.testing.assert_allclose(np.bincount(ids[:, position]) / rows, want, atol=0.03)
  # Each step draws its own numbers.
  assert 0.2 < np.mean(ids[:, 0] == ids[:, 1]) < 0.4


def _mesh():
  return mtf.Mesh(mtf.Graph(), "m")


def _search(
  ids="batch:2 beam:3 length:5", dtype=tf.int32, logits="batch:2 beam:3 vocab:6", **kwargs
):
  mesh = _mesh()
  states = [mtf.zeros(mesh, shape) for shape in kwargs.pop("states", [])]
  if "limit" in kwargs:
    kwargs["decode_length"] = mtf.zeros(mesh, kwargs.pop("limit"), tf.float32)
  new = kwargs.pop("new", None)
  return bs.beam_search(
    lambda step, ids, states: (mtf.zeros(mesh, logits), states if new is None else new),
    mtf.zeros(mesh, ids, dtype),
    0.6,
    states=states,
    **{"dtype": tf.float32, **({"dtype": kwargs.pop("scores")} if "scores" in kwargs else {})},
    **kwargs,
  )


@pytest.mark.parametrize(
  "kwargs,error,text",
  [
    ({"dtype": tf.float32}, DTypeError, "initial_ids must be integers"),
    ({"ids": "length:5"}, ShapeError, r"\[batch, beam, length\]"),
    ({"scores": tf.int32}, DTypeError, "must be floating, got int32"),
    ({"states": ["batch:2 h:4"]}, ShapeError, "lacks dimensions of .*beam"),
    ({"states": ["batch:2 memory_beam:4 h:4"]}, ShapeError, "one with the dimension memory_beam=3"),
    ({"states": ["memory_beam:3 h:4"]}, ShapeError, "lacks dimensions of .*batch"),
    ({"logits": "batch:2 vocab:6"}, ShapeError, "logits of the dimensions .*beam"),
    ({"logits": "batch:2 beam:3 x:2 vocab:6"}, ShapeError, "logits of the dimensions"),
    ({"new": [1]}, GraphError, "returned 1 states, it was given 0"),
    ({"limit": []}, ShapeError, "decode_length must be an integer scalar"),
  ],
)
def test_errors_of_beam_search(kwargs, error, text):
  with pytest.raises(error, match=text):
    _search(**kwargs)


@pytest.mark.parametrize(
  "ids,dtype,logits,forced,error,text",
  [
    ("batch:2 length:5", tf.float32, "batch:2 v:6", None, DTypeError, "must be integers"),
    ([], tf.int32, "v:6", None, ShapeError, "must have a length dimension"),
    ("batch:2 length:5", tf.int32, "v:6", None, ShapeError, "logits of the dimensions .*batch"),
    ("batch:2 length:5", tf.int32, "batch:2 v:6", "batch:2", ShapeError, "forced_ids"),
  ],
)
def test_errors_of_greedy_decode(ids, dtype, logits, forced, error, text):
  mesh = _mesh()
  forced = None if forced is None else mtf.zeros(mesh, forced, tf.int32)
  with pytest.raises(error, match=text):
    bs.greedy_decode(
      lambda step, ids, states: (mtf.zeros(mesh, logits), states),
      mtf.zeros(mesh, ids, dtype),
      forced_ids=forced,
    )


@pytest.mark.parametrize("beam_dim", ["old:3", "beam:6"])
def test_errors_of_compute_topk(beam_dim):
  mesh = _mesh()
  scores = mtf.zeros(mesh, "batch:2 old:5")
  with pytest.raises(ShapeError, match="old"):
    bs.compute_topk_scores_and_seq(
      mtf.zeros(mesh, "batch:2 old:5 length:3", tf.int32),
      scores,
      scores,
      scores,
      mtf.convert_to_shape(beam_dim)[0],
    )
