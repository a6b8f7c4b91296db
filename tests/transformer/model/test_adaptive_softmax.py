"""Adaptive softmax: its loss is that of the distribution it defines."""

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import adaptive_softmax, transformer_layers
from tests.kinds import kept
from tests.transformer import bi_program, layer_program
from tests.transformer import lm_program as lm

MODULE = "mesh_tensorflow.transformer.adaptive_softmax."
BINDINGS = f"""
get_vocab_embedding_cls.cls = @{MODULE}AdaptiveSoftmaxVocabEmbedding
AdaptiveSoftmaxVocabEmbedding.clusters = [
  {{"token_count": 6}}, {{"token_count": 2, "embedding_size": 2}}, {{"token_count": 4}}]
Unitransformer.loss_fn = @{MODULE}adaptive_softmax_loss_fn
"""
SHORTER = """
AdaptiveSoftmaxVocabEmbedding.clusters = [
  {"token_count": 6}, {"token_count": 2, "length_projection_factor": 0.3},
  {"token_count": 4, "length_projection_factor": 1.0}]
"""
TARGETS = np.array([[9, 2, 6, 7, 1, 0], [7, 6, 7, 10, 3, 1]], np.int32)


def make_lm(bindings="", **kwargs):
  gin.parse_config(BINDINGS + bindings)
  layers = [[transformer_layers.SelfAttention, dict(num_heads=2, key_value_size=3)]]
  return layer_program.make_lm(layers, vocab_divisor=4, **kwargs)


def losses(model, targets=TARGETS):
  """Training loss, its squared gradient, loss and logits of evaluation."""
  impl = lm.one_device()
  bi_program.random_weights(lm.initialize(impl, model, targets))
  loss, hidden, squared = lm.run(impl, lm.loss_program(model), targets)
  assert hidden.shape == (*targets.shape, 4)
  return (loss, squared, *lm.run(impl, lm.loss_program(model, "eval"), targets))


def log_loss(logits, targets, kept=True):
  """Mean over all positions of minus the log probability of positive targets."""
  found = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
  return -(found * (targets > 0) * kept).mean()


def test_loss_is_that_of_the_full_softmax():
  train, _, evaluation, logits = losses(make_lm(z_loss=0.0))
  np.testing.assert_allclose(np.exp(logits).sum(-1), 1.0, rtol=1e-5)
  np.testing.assert_allclose(evaluation, log_loss(logits, TARGETS), rtol=1e-5)
  np.testing.assert_allclose(train, evaluation, rtol=1e-5)


def test_targets_beyond_the_room_of_a_tail_have_no_loss_in_it():
  bindings = "Unitransformer.loss_denominator = 12.0" + SHORTER
  train, _, _, logits = losses(make_lm(bindings, z_loss=0.0))
  # There is room for two of six positions: the third 6 or 7 of the second row is left out, but
  # the head still has to choose the tail.
  kept = np.ones_like(TARGETS)
  kept[1, 2] = 0
  probs = np.exp(logits[1, 2])
  in_head = -np.log(probs[6:8].sum())
  expected = log_loss(logits, TARGETS, kept) + in_head / 12
  np.testing.assert_allclose(train, expected, rtol=1e-5)


def test_shorter_tails_are_divided_by_their_own_positions():
  _, _, _, logits = losses(make_lm(SHORTER, z_loss=0.0))
  gin.clear_config()
  train = losses(make_lm(SHORTER, z_loss=0.0))[0]
  probs = np.exp(logits)
  total = 0.0
  for b, row in enumerate(TARGETS):
    room = 2
    for p, target in enumerate(row):
      if 6 <= target < 8:
        tail = probs[b, p, 6:8].sum()
        total -= np.log(tail) / 12
        if room:
          # Four positions in all: two of each row.
          total -= np.log(probs[b, p, target] / tail) / 4
          room -= 1
      elif target > 0:
        total -= np.log(probs[b, p, target]) / 12
  np.testing.assert_allclose(train, total, rtol=1e-5)


LAYOUTS = ["batch:rows,length:cols", "batch:rows,vocab:cols,heads:cols"]


@pytest.mark.parametrize(
  ("kind", "layout"),
  kept(
    [(kind, layout) for kind in ("placement", "simd") for layout in LAYOUTS],
    [("placement", LAYOUTS[0]), ("simd", LAYOUTS[1])],
  ),
)
@pytest.mark.slow
def test_training_on_a_mesh(kind, layout, cpu_devices):
  shorter = SHORTER.replace('"token_count": 6', '"token_count": 4').replace(
    '"token_count": 2, ', '"token_count": 4, '
  )
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = cls("rows:2,cols:2", layout, cpu_devices[:4])

  def train(impl):
    gin.clear_config()
    model = make_lm(shorter, z_loss=0.1)
    bi_program.random_weights(lm.initialize(impl, model, TARGETS))
    loss, _, squared = lm.run(impl, lm.loss_program(model), TARGETS)
    return [loss, squared, *lm.run(impl, lm.loss_program(model, "eval"), TARGETS)]

  for a, b in zip(train(impl), train(lm.one_device())):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_decoding():
  layer_program.check_decoding(make_lm(), lm.TARGETS)


@pytest.mark.slow
def test_encoder_decoder():
  """The embedding of an encoder-decoder is shared; padding is masked."""
  model = bi_program.make_model(
    "import mesh_tensorflow.transformer.adaptive_softmax\n"
    f"decoder/Unitransformer.loss_fn = @{MODULE}adaptive_softmax_loss_fn\n"
    "Unitransformer.z_loss = 0.0\n"
    + BINDINGS.replace("Unitransformer.loss_fn", "decoder/Unitransformer.loss_fn").replace(
      '{"token_count": 4}', '{"token_count": 3}'
    )
  )
  impl = lm.one_device()
  bi_program.random_weights(bi_program.initialize(impl, model))
  arrays = bi_program.INPUTS, bi_program.TARGETS
  train = lm.run(impl, bi_program.loss_program(model), *arrays)[0]
  evaluation, logits = lm.run(impl, bi_program.loss_program(model, "eval"), *arrays)
  np.testing.assert_allclose(evaluation, log_loss(logits, arrays[1]), rtol=1e-5)
  np.testing.assert_allclose(train, evaluation, rtol=1e-5)
  assert "shared/embedding_11" in bi_program.names(impl)
  ids = lm.run(impl, lambda x: model.decode(x), arrays[0])
  assert ids.shape == arrays[0].shape


def test_negative_targets_have_no_loss():
  model = make_lm(z_loss=0.1)
  masked = np.where(TARGETS == 7, -7, TARGETS)
  zeroed = np.where(TARGETS == 7, 0, TARGETS)
  impl = lm.one_device()
  bi_program.random_weights(lm.initialize(impl, model, TARGETS))

  def loss(targets, inputs):
    ids = mtf.ones_like(targets)
    return model.call_simple(inputs, targets, compute_loss=True, sequence_id=ids)[1]

  values = [lm.run(impl, loss, t, TARGETS) for t in (masked, zeroed, TARGETS)]
  assert values[0] == pytest.approx(values[1], rel=1e-6) and values[0] < values[2]


def test_training_returns_the_hidden_states_as_they_are():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  hidden = mtf.zeros(mesh, [("batch", 2), ("length", 3), ("d_model", 4)])
  embedding = adaptive_softmax.AdaptiveSoftmaxVocabEmbedding(
    mesh, mtf.Dimension("vocab", 8), hidden.shape[-1], layer_program.FLOATS, "e", None,
    clusters=[dict(token_count=8)],
  )  # fmt: skip
  assert embedding.hidden_to_logits(hidden, layer_program.context(hidden, mode="train")) is hidden


@pytest.mark.parametrize("clusters,message", [
  ([dict(token_count=7)], "sum up to 7"),
  ([dict(token_count=4), dict(token_count=4, length_projection_factor=0)], "above 0"),
  ([dict(token_count=4), dict(token_count=4, length_projection_factor=1.5)], "at most 1"),
  ([dict(token_count=8, embedding=3)], "embedding_size"),
  ([dict(embedding_size=8)], "token_count"),
])  # fmt: skip
def test_errors(clusters, message):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  with pytest.raises(errors.ConfigError, match=message):
    adaptive_softmax.AdaptiveSoftmaxVocabEmbedding(
      mesh, mtf.Dimension("vocab", 8), mtf.Dimension("d_model", 4), layer_program.FLOATS, "e",
      None, clusters=clusters,
    )  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_the_loss_needs_the_embedding(shared):
  model = make_lm(
    "" if not shared else "get_vocab_embedding_cls.cls = @transformer.VocabEmbedding",
    shared_embedding_and_softmax_weights=shared,
  )
  with pytest.raises(errors.ConfigError, match="get_vocab_embedding_cls"):
    lm.run(lm.one_device(), lm.loss_program(model), TARGETS)


def test_a_shorter_tail_needs_a_length():
  def program(targets):
    return lm.loss_program(make_lm(SHORTER))(targets)[0]

  with pytest.raises(errors.DimensionError, match="called length"):
    lm.run(lm.one_device(), program, TARGETS, names=("batch", "time"))
