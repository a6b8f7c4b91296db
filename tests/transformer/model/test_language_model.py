"""The language model against NumPy, in all variants of attention; packing; variable names."""

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from tests.transformer import lm_program as lm
from tests.transformer import numpy_lm

RNG = np.random.default_rng(0)
LENGTH = 20
TARGETS = RNG.integers(1, 11, [2, LENGTH]).astype(np.int32)
A = "transformer/block_{}/layer_000/SelfAttention/"
COMMON = {
  "transformer/embedding",
  "transformer/rms_norm/scale",
  *(f"transformer/block_00{b}/layer_00{n}/rms_norm/scale" for b in (0, 1) for n in (0, 1)),
  *(
    f"transformer/block_00{b}/layer_001/DenseReluDense/{w}/kernel"
    for b in (0, 1)
    for w in ("wi", "wo")
  ),
}
POSITIONS = {"transformer/positional_embedding"}


def attention_names(*names, blocks=("000", "001")):
  return {A.format(b) + n for b in blocks for n in names}


# Name: (arguments of SelfAttention, arguments of the model, variables, some shapes)
VARIANTS = {
  "plain": ({}, {}, POSITIONS | attention_names("q", "k", "v", "o"), {"q": [4, 12], "o": [12, 4]}),
  "one head": (dict(num_heads=1), {}, POSITIONS | attention_names("q", "k", "v", "o"),
               {"q": [4, 3], "o": [3, 4]}),
  "one memory head": (dict(num_memory_heads=1), {}, POSITIONS | attention_names("q", "k", "v", "o"),
                      {"q": [4, 12], "k": [4, 3], "o": [12, 4]}),
  "grouped heads": (dict(num_memory_heads=2), {}, POSITIONS | attention_names("q", "k", "v", "o"),
                    {"q": [4, 12], "k": [4, 6], "o": [12, 4]}),
  "grouped heads, separate dims": (
    dict(num_memory_heads=2, combine_dims=False), {},
    POSITIONS | attention_names("q", "k", "v", "o"),
    {"q": [4, 2, 2, 3], "k": [4, 2, 3], "o": [2, 2, 3, 4]}),
  "shared keys and values": (dict(shared_kv=True), {}, POSITIONS | attention_names("q", "kv", "o"),
                             {"kv": [4, 12]}),
  "scaling at run time": (dict(fold_scaling_into_initializer=False), {},
                          POSITIONS | attention_names("q", "k", "v", "o"), {}),
  "separate dims": (dict(combine_dims=False), {}, POSITIONS | attention_names("q", "k", "v", "o"),
                    {"q": [4, 4, 3], "o": [4, 3, 4]}),
  "untied": ({}, dict(shared_embedding_and_softmax_weights=False),
             POSITIONS | {"transformer/logits/kernel"} | attention_names("q", "k", "v", "o"), {}),
  "bias": (dict(relative_attention_type="bias"), dict(positional_embedding=False),
           attention_names("q", "k", "v", "o", "relative_attention_bias"),
           {"relative_attention_bias": [4, 32]}),
  "bias, grouped heads": (
    dict(relative_attention_type="bias", num_memory_heads=2), dict(positional_embedding=False),
    attention_names("q", "k", "v", "o", "relative_attention_bias"),
    {"relative_attention_bias": [2, 2, 32]}),
  "bias, one head": (
    dict(relative_attention_type="bias", num_heads=1), dict(positional_embedding=False),
    attention_names("q", "k", "v", "o", "relative_attention_bias"),
    {"relative_attention_bias": [32]}),
  "shared bias": (
    dict(relative_attention_type="bias_shared", relative_attention_num_buckets=8),
    dict(positional_embedding=False),
    attention_names("q", "k", "v", "o")
    | attention_names("relative_attention_bias", blocks=["000"]),
    {"relative_attention_bias": [4, 8]}),
  "contextual": (
    dict(relative_attention_type="contextual"), dict(positional_embedding=False),
    attention_names("q", "k", "v", "o", "relative_attention_ak/kernel"),
    {"relative_attention_ak/kernel": [4, 3, 32]}),
}  # fmt: skip


def variant(name):
  """(mesh implementation, model, weights, options of NumPy's attention)."""
  attention, options, _, _ = VARIANTS[name]
  model = lm.make_model(num_heads=4, attention=attention, **(dict(max_length=LENGTH) | options))
  impl = lm.one_device()
  store = lm.initialize(impl, model, TARGETS)
  lm.set_golden_weights(store)
  weights = {s.name: s.numpy().astype(np.float64) for s in store if not s.name.startswith("_")}
  numpy_options = dict(num_heads=4, d_kv=3) | attention
  numpy_options["buckets"] = attention.get("relative_attention_num_buckets", 32)
  return impl, model, weights, numpy_options


def shifted(targets):
  return np.pad(targets, [[0, 0], [1, 0]])[:, :-1]


@pytest.mark.parametrize("name", VARIANTS)
def test_names_shapes_and_logits(name):
  impl, model, weights, options = variant(name)
  _, _, names, shapes = VARIANTS[name]
  assert set(weights) == COMMON | names
  for variable, shape in shapes.items():
    assert list(weights[A.format("000") + variable].shape) == shape
  ones = np.ones_like(TARGETS)
  _, logits = lm.run(impl, lm.loss_program(model, "eval"), TARGETS, ones)
  expected = numpy_lm.logits(weights, shifted(TARGETS), 2, options)
  np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_decoding_is_the_argmax_of_the_forward_pass(name):
  impl, model, weights, options = variant(name)
  partial = np.zeros_like(TARGETS)
  partial[0, :3], partial[1, :7] = TARGETS[0, :3], TARGETS[1, :7]
  ids = lm.run(impl, lambda p: model.sample_autoregressive(p, stop_at_token=None), partial)
  best = numpy_lm.logits(weights, shifted(ids), 2, options).argmax(-1)
  np.testing.assert_array_equal(ids, np.where(partial == 0, best, partial))


def test_packed_sequences_do_not_see_each_other():
  impl, model, weights, options = variant("plain")
  first, second = TARGETS[:, :8], TARGETS[:, 8:14]
  packed = np.concatenate([first, second, np.zeros([2, 6], np.int32)], axis=1)
  sequence_id = np.repeat(np.array([[1] * 8 + [2] * 6 + [0] * 6], np.int32), 2, axis=0)
  position = np.repeat(np.array([[*range(8), *range(6), *[0] * 6]], np.int32), 2, axis=0)

  def program(targets, ids, position):
    inputs = lm.transformer.autoregressive_inputs(targets, sequence_id=ids)
    return model.call_simple(
      inputs, targets, compute_loss=True, mode="eval", sequence_id=ids, position=position
    )

  logits, loss = lm.run(impl, program, packed, sequence_id, position)
  expected = [numpy_lm.logits(weights, shifted(t), 2, options) for t in (first, second)]
  np.testing.assert_allclose(logits[:, :8], expected[0], atol=2e-5)
  np.testing.assert_allclose(logits[:, 8:14], expected[1], atol=2e-5)

  def cross_entropy(x, t):
    log_z = np.log(np.exp(x).sum(-1))
    return (log_z - np.take_along_axis(x, t[..., None], -1)[..., 0]).sum()

  total = cross_entropy(expected[0], first) + cross_entropy(expected[1], second)
  np.testing.assert_allclose(loss, total / packed.size, rtol=1e-5)


def test_subsequences_do_not_see_each_other():
  impl, model, weights, options = variant("bias")
  ids = np.repeat(np.array([[1] * 10 + [2] * 10], np.int32), 2, axis=0)

  def program(targets, ids):
    return model.call_simple(
      lm.transformer.autoregressive_inputs(targets),
      targets,
      compute_loss=False,
      mode="eval",
      sequence_id=mtf.ones_like(ids),
      subsequence_id=ids,
    )[0]

  logits = lm.run(impl, program, TARGETS, ids)
  expected = numpy_lm.logits(weights, shifted(TARGETS)[:, 10:], 2, options)
  np.testing.assert_allclose(logits[:, 10:], expected, atol=2e-5)


def test_negative_and_zero_targets_do_not_count():
  impl, model, weights, options = variant("plain")
  targets = TARGETS.copy()
  targets[:, 5] *= -1
  targets[:, 9] = 0
  ones = np.ones_like(targets)
  loss, logits = lm.run(impl, lm.loss_program(model, "eval"), targets, ones)
  log_p = np.log(numpy_lm.softmax(logits))
  picked = np.take_along_axis(log_p, np.maximum(targets, 0)[..., None], -1)[..., 0]
  np.testing.assert_allclose(loss, -(picked * (targets > 0)).sum() / targets.size, rtol=1e-5)


def test_z_loss_label_smoothing_and_denominator():
  model = lm.make_model(label_smoothing=0.2, z_loss=0.1, loss_denominator=7)
  impl = lm.one_device()
  lm.set_golden_weights(lm.initialize(impl, model))
  loss, logits, _ = lm.run(impl, lm.loss_program(model), lm.TARGETS)
  log_z = np.log(np.exp(logits).sum(-1))
  soft = np.full(logits.shape, 0.2 / 11) + 0.8 * np.eye(11)[lm.TARGETS]
  each = -(soft * (logits - log_z[..., None])).sum(-1) + 0.1 * log_z**2
  np.testing.assert_allclose(loss, (each * (lm.TARGETS > 0)).sum() / 7, rtol=1e-5)


def test_microbatches_share_the_denominator():
  model = lm.make_model()
  impl = lm.one_device()
  loss, _, _ = lm.run(impl, lm.loss_program(model), lm.TARGETS)
  part, _, _ = lm.run(impl, lm.loss_program(model, num_microbatches=4), lm.TARGETS)
  np.testing.assert_allclose(part, loss / 4, rtol=1e-6)


def test_loss_fn_takes_the_place_of_cross_entropy():
  def loss_fn(model, context, logits, targets, vocab_dim):
    del model, context, targets
    return mtf.reduce_mean(mtf.reduce_max(logits, reduced_dim=vocab_dim))

  impl, model = lm.one_device(), lm.make_model(loss_fn=loss_fn)
  loss, logits, _ = lm.run(impl, lm.loss_program(model), lm.TARGETS)
  np.testing.assert_allclose(loss, logits.max(-1).mean(), rtol=1e-5)


def test_sinusoid_positions_have_no_variable():
  impl, model = lm.one_device(), lm.make_model(sinusoid_positional_embedding=True)
  store = lm.initialize(impl, model)
  assert "transformer/positional_embedding" not in store
  assert len(store) == 18


def test_inputs_of_a_delimited_model_see_each_other():
  model = lm.make_model(
    input_full_attention=True,
    loss_on_targets_only=True,
    positional_embedding=False,
    attention=dict(relative_attention_type="bias_shared"),
  )
  impl = lm.one_device()
  # Inputs 5 6 7 EOS, targets 8 9 EOS.
  a = np.array([[5, 6, 7, 1, 8, 9, 1, 0]], np.int32)
  store = lm.initialize(impl, model, a)
  lm.set_golden_weights(store)
  ones = np.ones_like(a)
  loss_a, logits_a = lm.run(impl, lm.loss_program(model, "eval"), a, ones)
  # A change of input 7 is seen at position 0, one of target 9 only after it.
  logits_b = lm.run(impl, lm.loss_program(model, "eval"), np.where(a == 7, 2, a), ones)[1]
  assert np.abs(logits_b - logits_a)[0, 0].max() > 1e-3
  logits_c = lm.run(impl, lm.loss_program(model, "eval"), np.where(a == 9, 2, a), ones)[1]
  np.testing.assert_allclose(logits_c[0, :6], logits_a[0, :6], atol=1e-6)
  assert np.abs(logits_c - logits_a)[0, 6].max() > 1e-3
  log_p = np.log(numpy_lm.softmax(logits_a))
  expected = -sum(log_p[0, i, a[0, i]] for i in (4, 5, 6)) / 8
  np.testing.assert_allclose(loss_a, expected, rtol=1e-5)
  # The buckets are those of both directions: the upper half is of later positions.
  bias = store["transformer/block_000/layer_000/SelfAttention/relative_attention_bias"]
  bias.assign(bias.numpy() + (np.arange(32) > 16).astype(np.float32))
  logits_d = lm.run(impl, lm.loss_program(model, "eval"), a, ones)[1]
  assert np.abs(logits_d - logits_a)[0, 0].max() > 1e-3


def test_ensemble_members_are_separate_models():
  impl, model = lm.one_device(), lm.make_model(ensemble=2)
  store = lm.initialize(impl, model)
  assert all(s.shape[0] == ("ensemble", 2) for s in store)
  loss, logits, _ = lm.run(impl, lm.loss_program(model), lm.TARGETS)
  members = []
  values = {s.name: s.numpy() for s in store}
  for i in range(2):
    single, one = lm.one_device(), lm.make_model()
    for s in lm.initialize(single, one):
      s.assign(values[s.name][i])
    members.append(lm.run(single, lm.loss_program(one), lm.TARGETS))
  np.testing.assert_allclose(loss, members[0][0] + members[1][0], rtol=1e-5)
  probs = (numpy_lm.softmax(members[0][1]) + numpy_lm.softmax(members[1][1])) / 2
  np.testing.assert_allclose(logits, np.log(probs), atol=1e-4)


@pytest.mark.parametrize("recompute_grads", [False, True])
def test_z_loss_of_attention(recompute_grads):
  """With keys of zeros, every logit is 0 and the denominator of row i has i + 1 summands."""
  coefficient = 0.1
  model = lm.make_model(
    attention=dict(z_loss_coeff=coefficient),
    stack=lm.SUBLAYERS | dict(recompute_grads=recompute_grads),
  )
  plain, impl = lm.make_model(), lm.one_device()
  store = lm.initialize(impl, model)
  for block in ("000", "001"):
    k = store[A.format(block) + "k"]
    k.assign(np.zeros(k.shape.to_integer_list, np.float32))
  targets = TARGETS[:, :6]
  ones = np.ones_like(targets)
  with_z = lm.run(impl, lm.loss_program(model), targets, ones)[0]
  without = lm.run(impl, lm.loss_program(plain), targets, ones)[0]
  expected = 2 * coefficient * (np.log(np.arange(6) + 1) ** 2).mean()
  np.testing.assert_allclose(with_z - without, expected, rtol=1e-4)
  # Evaluation has no such loss.
  evaluation = [lm.run(impl, lm.loss_program(m, "eval"), targets, ones)[0] for m in (model, plain)]
  assert evaluation[0] == evaluation[1]


def test_token_dropout_zeroes_ids():
  """At rate 0.5 about half of the inputs become 0; the others stay as they are."""
  embedded = []

  class Identity(lm.transformer.TransformerLayer):
    def call(self, context, x):
      embedded.append(x)
      return x

  model = lm.make_model(token_dropout_rate=0.5, positional_embedding=False)
  model.layer_stack = Identity()
  impl = lm.one_device()

  def program(targets):
    model.call_simple(targets, targets, compute_loss=False)
    return embedded[-1], targets.graph.trainable_variables[0].outputs[0]

  x, table = lm.run(impl, program, TARGETS, seed=1)
  kept = (x == table[TARGETS]).all(-1)
  dropped = (x == table[0]).all(-1)
  assert (kept | dropped).all() and 0.3 < kept.mean() < 0.7


def test_bfloat16_activations():
  model = lm.make_model(dense=dict(activation=["gelu", "linear"], use_bias=True))
  impl = lm.one_device()
  lm.set_golden_weights(lm.initialize(impl, model))
  exact = lm.run(impl, lm.loss_program(model), lm.TARGETS)
  dtype = mtf.VariableDType(np.float32, np.float32, "bfloat16")
  loss, logits, squared = lm.run(impl, lm.loss_program(model, variable_dtype=dtype), lm.TARGETS)
  assert logits.dtype == "bfloat16" and loss.dtype == np.float32
  np.testing.assert_allclose(float(loss), exact[0], rtol=0.02)
  # With these weights roundings add up; with drawn ones they do not.
  np.testing.assert_allclose(float(squared), exact[2], rtol=0.25)
  ids = lm.run(impl, lambda p: model.sample_autoregressive(p, variable_dtype=dtype), lm.TARGETS)
  assert ids.shape == lm.TARGETS.shape


def test_errors_say_what_is_wrong():
  with pytest.raises(errors.ConfigError, match="output_vocab_size"):
    lm.make_model(output_vocab_size=None)
  with pytest.raises(errors.ConfigError, match="input_full_attention"):
    lm.make_model(autoregressive=False, input_full_attention=True)
  with pytest.raises(errors.ShapeError, match=r"length=20.*max_length=16.*Unitransformer.max_len"):
    lm.initialize(lm.one_device(), lm.make_model(), TARGETS)
  with pytest.raises(errors.DimensionError, match=r"num_memory_heads \(=3\).*num_heads \(=4\)"):
    lm.initialize(lm.one_device(), lm.make_model(num_heads=4, attention=dict(num_memory_heads=3)))
  with pytest.raises(errors.ConfigError, match="relative_attention_type"):
    lm.initialize(lm.one_device(), lm.make_model(attention=dict(relative_attention_type="no such")))
  with pytest.raises(errors.ShapeError, match="combine_dims=False"):
    lm.initialize(lm.one_device(), lm.make_model(attention=dict(keep_query_heads_dims=True)))
