"""Funnel-Transformer: pooled sequences, names, and encoder-decoder models."""

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import funnel_transformer, transformer
from tests.transformer import bi_program, layer_program
from tests.transformer import lm_program as lm

IDS = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 0, 0, 0, 0, 0]], np.int32)
X = np.random.default_rng(0).normal(size=[2, 8, 4]).astype(np.float32)
SIZES = dict(n_blocks=3, block_param_size=[1, 2, 1], block_repeat_size=[1, 1, 1])
SUBLAYERS = dict(
  sublayers_initial=[],
  sublayers_per_layer=[transformer.sublayer_call_layer, transformer.sublayer_residual],
  sublayers_final=[],
)


class Scale(transformer.TransformerLayer):
  """Multiplies by a variable that starts as 2."""

  def call(self, context, x):
    weight = mtf.get_variable(
      context.mesh, "weight", [x.shape[-1]], initializer=tf.constant_initializer(2.0)
    )
    return x * weight


class Sees(Scale):
  """As `Scale`; notes what it sees of the context."""

  def __init__(self, seen):
    self.seen = seen

  def call(self, context, x):
    self.seen.append((self.name, context.length_dim.size, context.layer_index))
    assert x.shape[1] == context.length_dim
    return super().call(context, x)


def make_stack(layers, **kwargs):
  return funnel_transformer.FunnelTransformerLayerStack(layers, **(SIZES | SUBLAYERS | kwargs))


def apply(stack, ids=IDS, x=X, position=None, impl=None):
  """The result, pooled sequence ids and positions, and the context."""
  contexts = []

  def program(x, ids):
    positions = mtf.range(x.mesh, x.shape[1], tf.int32)
    if position is not None:
      positions = mtf.import_tf_tensor(x.mesh, position, ids.shape)
    context = layer_program.context(
      x, sequence_id=ids, position=positions, position_is_default=position is None, inputs=ids
    )
    contexts.append(context)
    y = stack.call(context, x)
    assert stack.context is context and context.inputs.shape == context.sequence_id.shape
    return y, context.sequence_id, context.position

  signature = [
    mtf.TensorSpec([("batch", 2), ("length", x.shape[1]), ("d_model", 4)], tf.float32),
    mtf.TensorSpec([("batch", 2), ("length", x.shape[1])], tf.int32),
  ]
  results = mtf.function(impl or lm.one_device(), input_signature=signature)(program)(x, ids)
  return [r.numpy() for r in results], contexts[0]


def pooled(x, kind="mean"):
  return getattr(x.reshape(2, x.shape[1] // 2, 2, -1), kind)(2)


def mirror(x, ids, repeats=(1, 1, 1), kind="mean"):
  for block, params in enumerate(SIZES["block_param_size"]):
    for step in range(2 * params * repeats[block]):
      x = x + 2 * x * (ids != 0)[..., None]
      if block and step == 0:
        x, ids = pooled(x, kind), ids[:, ::2]
  return x * (ids != 0)[..., None], ids


@pytest.mark.parametrize("kind", ["mean", "max", "min"])
def test_positions_are_pooled(kind):
  (y, ids, position), context = apply(make_stack([Scale() for _ in range(8)], pooling_type=kind))
  expected, expected_ids = mirror(X, IDS, kind=kind)
  np.testing.assert_allclose(y, expected, rtol=1e-5)
  np.testing.assert_array_equal(ids, expected_ids)
  np.testing.assert_array_equal(position, [0, 1])
  assert context.length_dim == mtf.Dimension("length", 2)
  assert len(context.layer_outputs) == 9 and context.layer_index == 8


def test_given_positions_are_cut():
  position = np.arange(16).reshape(2, 8).astype(np.int32)
  (_, _, cut), _ = apply(make_stack([Scale() for _ in range(8)]), position=position)
  np.testing.assert_array_equal(cut, position[:, :2])


@pytest.mark.parametrize("layout", ["length:rows", "batch:rows", "d_model:rows"])
@pytest.mark.parametrize("cls", [mtf.PlacementMeshImpl, mtf.SimdMeshImpl])
def test_on_a_mesh(cls, layout, cpu_devices):
  position = np.arange(16).reshape(2, 8).astype(np.int32)
  stack = make_stack([Scale() for _ in range(8)])
  results, _ = apply(stack, position=position, impl=cls("rows:2", layout, cpu_devices[:2]))
  np.testing.assert_allclose(results[0], mirror(X, IDS)[0], rtol=1e-5)
  np.testing.assert_array_equal(results[2], position[:, :2])


def test_order_and_names():
  seen = []
  apply(make_stack([Sees(seen) for _ in range(8)]))
  scopes = [f"funnel_block_{b:03d}/param_idx_{p:03d}/submodule_{s:03d}"
            for b, p in ((0, 0), (1, 0), (1, 1), (2, 0)) for s in range(2)]  # fmt: skip
  # The first submodule of a block still sees the length of the block before.
  lengths = [8, 8, 8, 4, 4, 4, 4, 2]
  assert seen == list(zip(scopes, lengths, range(8)))


def test_repeated_layers_share_weights():
  repeats = [2, 1, 3]
  seen = []
  stack = make_stack([Sees(seen) for _ in range(8)], block_repeat_size=repeats)
  impl = lm.one_device()
  (y, _, _), context = apply(stack, impl=impl)
  np.testing.assert_allclose(y, mirror(X, IDS, repeats)[0], rtol=1e-5)
  assert len(seen) == context.layer_index == 14 and len(context.layer_outputs) == 15
  assert len(bi_program.names(impl)) == 8 and [name for name, *_ in seen[:4]] == 2 * [
    "funnel_block_000/param_idx_000/submodule_000", "funnel_block_000/param_idx_000/submodule_001"
  ]  # fmt: skip


@pytest.mark.parametrize("changes,message", [
  (dict(block_param_size=[1, 2]), "block_param_size"),
  (dict(block_repeat_size=[1]), "block_repeat_size"),
  (dict(n_submodules=3), "make 12"),
  (dict(pooling_type="sum"), "'sum'"),
])  # fmt: skip
def test_arguments(changes, message):
  with pytest.raises(errors.ConfigError, match=message):
    make_stack([Scale() for _ in range(8)], **changes)


def test_errors_of_calls():
  with pytest.raises(errors.ShapeError, match="pooled by"):
    apply(make_stack([Scale() for _ in range(8)], pooling_size=3))
  with pytest.raises(errors.ConfigError, match="sublayers_final"):
    apply(make_stack([Scale() for _ in range(8)], sublayers_final=None))
  model = layer_program.make_lm([Scale], lambda made: make_stack(made), num_layers=8)
  with pytest.raises(errors.UnsupportedError, match="autoregressive"):
    layer_program.names(model, np.ones([2, 8], np.int32))


# ----------------------------------------------------------- encoder and decoder

FUNNEL = """
import mesh_tensorflow.transformer.funnel_transformer
make_bitransformer.bitransformer_cls = @BitransformerFunnel
encoder/make_layer_stack.layer_stack_cls = @FunnelTransformerLayerStack
encoder/make_layer_stack.layers = [@SelfAttention, @DenseReluDense]
FunnelTransformerLayerStack.n_blocks = 2
FunnelTransformerLayerStack.block_param_size = [1, 1]
FunnelTransformerLayerStack.block_repeat_size = [1, 2]
FunnelTransformerLayerStack.sublayers_initial = []
FunnelTransformerLayerStack.sublayers_per_layer = [
  @sublayer_rms_norm, @sublayer_call_layer, @sublayer_residual]
FunnelTransformerLayerStack.sublayers_final = [@sublayer_rms_norm]
"""
RELATIVE = """
Unitransformer.positional_embedding = False
SelfAttention.relative_attention_type = "bias_shared"
"""


def run_model(impl, bindings="", **kwargs):
  model = bi_program.make_model(FUNNEL + bindings, **kwargs)
  bi_program.random_weights(bi_program.initialize(impl, model))
  arrays = bi_program.INPUTS, bi_program.TARGETS
  loss, _, gradients, squared = lm.run(impl, bi_program.loss_program(model), *arrays)
  _, logits = lm.run(impl, bi_program.loss_program(model, "eval"), *arrays)
  return model, (loss, squared, logits), gradients


@pytest.mark.parametrize("bindings", ["", RELATIVE])
def test_encoder_decoder(bindings):
  impl = lm.one_device()
  model, (_, _, logits), gradients = run_model(impl, bindings)
  made = [n for n in bi_program.names(impl) if n.startswith("encoder/")]
  prefix = "encoder/funnel_block_001/param_idx_000/submodule_000/"
  assert {prefix + "SelfAttention/q", prefix + "rms_norm/scale", "encoder/rms_norm/scale"} <= set(
    made
  )
  assert len([n for n in made if n.endswith("SelfAttention/q")]) == 2
  assert all(np.abs(gradients[n]).max() > 0 for n in made)
  # Decoding sees the pooled encoder as training does.
  arrays = bi_program.INPUTS, bi_program.TARGETS
  stepwise = lm.run(impl, bi_program.stepwise_program(model), *arrays)
  tokens = arrays[1] > 0
  np.testing.assert_allclose(stepwise[tokens], logits[tokens], rtol=1e-4, atol=1e-4)
  greedy = lm.run(impl, lambda x: model.decode(x, max_decode_length=5), arrays[0])
  beam = lm.run(impl, lambda x: model.decode(x, beam_size=2, max_decode_length=5), arrays[0])
  assert greedy.shape == beam.shape == (2, 5)


def test_padding_of_the_encoder_is_not_seen():
  """A row's logits do not depend on how far it is padded."""
  impl = lm.one_device()
  model = bi_program.make_model(FUNNEL)
  bi_program.random_weights(bi_program.initialize(impl, model))
  loss = bi_program.loss_program(model, "eval")
  _, logits = lm.run(impl, loss, bi_program.INPUTS[:1], bi_program.TARGETS[:1])
  longer = np.pad(bi_program.INPUTS[:1], [(0, 0), (0, 4)])

  def program(inputs, targets):
    mesh = inputs.mesh
    wide = mtf.import_tf_tensor(mesh, longer, mtf.Shape([inputs.shape[0], ("length", 10)]))
    return model.call_simple(wide, targets, compute_loss=False, mode="eval")[0]

  padded = lm.run(impl, program, bi_program.INPUTS[:1], bi_program.TARGETS[:1])
  np.testing.assert_allclose(padded, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  "layout,kind", [("batch:rows,heads:cols", "simd"), ("batch:cols,length:rows", "placement")]
)
def test_training_on_a_mesh(kind, layout, cpu_devices):
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  # Lengths are 6 and 3.
  shape = "rows:2,cols:2" if layout.startswith("batch:rows") else "rows:3,cols:2"
  impl = cls(shape, layout, cpu_devices[: mtf.convert_to_shape(shape).size])
  for a, b in zip(run_model(impl)[1], run_model(lm.one_device())[1]):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_selectors_and_bindings_of_decode():
  for name in ("FunnelTransformerLayerStack", "BitransformerFunnel"):
    gin.get_configurable("mesh_tensorflow.transformer.funnel_transformer." + name)
  gin.get_configurable("BitransformerFunnel.decode")
  impl = lm.one_device()
  bindings = "Bitransformer.decode.max_decode_length = 3\nBitransformerFunnel.decode."
  model = bi_program.make_model(FUNNEL + bindings + "max_decode_length = 4")
  bi_program.initialize(impl, model)
  assert lm.run(impl, lambda x: model.decode(x), bi_program.INPUTS).shape == (2, 4)
