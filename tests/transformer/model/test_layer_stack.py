"""Layer stacks, sublayers, contexts and the layers' gin bindings."""

import json

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import attention, transformer, transformer_layers
from mesh_tensorflow.transformer.gin_paths import gin_dir
from tests.transformer import lm_program as lm

BATCH, LENGTH, D = mtf.Dimension("batch", 2), mtf.Dimension("length", 3), 4
X = np.random.default_rng(0).normal(size=[2, 3, D]).astype(np.float32)


class Scale(transformer.TransformerLayer):
  """Multiplies by a variable that starts as 2."""

  def call(self, context, x):
    weight = mtf.get_variable(
      context.mesh, "weight", [context.model.model_dim], initializer=tf.constant_initializer(2.0)
    )
    return x * weight


class Model:
  """As much of a model as sublayers need."""

  model_dim = mtf.Dimension("d_model", D)
  ensemble_dims: list[mtf.Dimension] = []


def make_context(mesh, mode="eval", **kwargs):
  return transformer.Context(
    Model(), mesh, [BATCH], LENGTH, mtf.VariableDType(tf.float32), mode=mode, **kwargs
  )


def apply(fn, *arrays, seed=None):
  """Value of fn(x, ...) on one device, and the names of its variables."""
  impl = lm.one_device()
  dims = [("batch", 2), ("length", 3), ("d_model", D)]
  signature = [mtf.TensorSpec(dims[: np.ndim(a)], np.asarray(a).dtype) for a in arrays]
  result = mtf.function(impl, input_signature=signature)(fn)(*arrays, seed=seed)
  names = {s.name for s in impl.variable_store if not s.name.startswith("_")}
  return result.numpy(), names


# ------------------------------------------------------------------ sublayers


def sublayer(name, *args, mode="eval", seed=None, **kwargs):
  fn = getattr(transformer, "sublayer_" + name)
  return apply(lambda x: fn(x, None, make_context(x.mesh, mode), *args, **kwargs), X, seed=seed)


def rms(x):
  return np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("name,variable", [
  ("rms_norm", "rms_norm/scale"),
  ("legacy_rms_norm", "layer_norm/scale"),
  ("legacy_final_rms_norm", "final_layer_norm/scale"),
  ("scale_norm", "scale_norm/scale"),
])  # fmt: skip
def test_norms_without_mean(name, variable):
  y, names = sublayer(name)
  np.testing.assert_allclose(y, X / rms(X), rtol=1e-5)
  assert names == {variable}


def test_subsampled_norm():
  y, names = sublayer("rms_norm_subsampled", percentage=30.0)
  np.testing.assert_allclose(y, X / rms(X[..., :2]), rtol=1e-5)
  assert names == {"layer_norm_subsampled/scale"}


def test_true_layer_norm():
  y, names = sublayer("true_layer_norm")
  centered = X - X.mean(-1, keepdims=True)
  np.testing.assert_allclose(y, centered / rms(centered), rtol=1e-4, atol=1e-5)
  prefix = "true_layer_norm/layer_prepostprocess/layer_norm/layer_norm_"
  assert names == {prefix + "scale", prefix + "bias"}


def test_rezero():
  y, names = sublayer("rezero", initial_value=0.5)
  np.testing.assert_allclose(y, X * 0.5)
  assert names == {"rezero_weight"}


def test_dropout_has_one_mask_for_all_positions():
  y, _ = sublayer("dropout", 0.5, mode="train", seed=1)
  kept = y != 0
  assert (kept == kept[:, :1]).all() and kept.any() and not kept.all()
  np.testing.assert_allclose(y[kept], 2 * X[kept], rtol=1e-6)


def test_dropout_may_have_a_mask_for_each_position():
  gin.bind_parameter("transformer.dropout_broadcast_dims.per_position", True)
  x = np.ones([2, 3, 400], np.float32)
  dims = [BATCH, LENGTH, mtf.Dimension("d_model", 400)]

  class Wide(Model):
    model_dim = dims[-1]

  def drop(x):
    context = transformer.Context(Wide(), x.mesh, [BATCH], LENGTH, mtf.VariableDType(tf.float32))
    return transformer.sublayer_dropout(x, None, context, 0.25)

  y = lm.run(lm.one_device(), drop, x, names=("batch", "length", "d_model"), seed=1)
  kept = (y != 0).reshape(6, 400)
  np.testing.assert_allclose(kept.mean(1), 0.75, atol=0.1)
  # Two masks are the same at a share of 0.75 ** 2 + 0.25 ** 2.
  same = [(kept[i] == kept[j]).mean() for i in range(6) for j in range(i)]
  np.testing.assert_allclose(same, 0.625, atol=0.1)


def test_dropout_adds_no_operation_when_it_does_nothing():
  x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), [BATCH, LENGTH, Model.model_dim])
  for mode, rate in (("eval", 0.5), ("train", 0.0), ("incremental", 0.5)):
    assert transformer.sublayer_dropout(x, None, make_context(x.mesh, mode), rate) is x
  assert len(x.graph.operations) == 1


@pytest.mark.parametrize("step,kept", [(0, 0.25), (2, 0.5), (4, 0.75), (6, 1.0), (9, 1.0)])
def test_annealed_dropout_falls_with_the_step(step, kept):
  x = np.ones([400, 2, D], np.float32)

  def fn(x):
    x.graph.global_step = mtf.constant(x.mesh, step, dtype=tf.int64)
    batch, length = x.shape.dims[:2]
    context = transformer.Context(Model(), x.mesh, [batch], length, mtf.VariableDType(tf.float32))
    return transformer.sublayer_annealed_dropout(
      x, None, context, init_dropout_rate=0.75, start_step=0, end_step=6
    )

  dims = ("batch", "length", "d_model")
  y = lm.run(lm.one_device(), fn, x, names=dims, seed=1)
  np.testing.assert_allclose((y != 0).mean(), kept, atol=0.05)
  np.testing.assert_allclose(y[y != 0], 1 / kept, rtol=1e-5)
  assert ((y != 0) == (y != 0)[:, :1]).all()


def test_clipped_gradient():
  """RMS of the whole gradient at most 0.1; the value is that of x."""

  def fn(clip):
    def program(x):
      y = transformer.sublayer_clip_activation_gradient(x, None, make_context(x.mesh), clip)
      return y, mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x])[0]

    return lm.run(lm.one_device(), program, X, names=("batch", "length", "d_model"))

  gradient = 2 * X
  root_mean_square = np.sqrt((gradient**2).mean())
  for clip, expected in (
    (0.1, gradient * 0.1 / root_mean_square),
    (100.0, gradient),
    (0, gradient),
  ):
    y, actual = fn(clip)
    np.testing.assert_array_equal(y, X)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_annealed_dropout_needs_steps():
  with pytest.raises(errors.ConfigError, match="start_step"):
    sublayer("annealed_dropout", 0.5, mode="train")


def test_padding_is_masked():
  ids = np.array([[1, 1, 0], [2, 0, 0]], np.int32)

  def fn(x, ids):
    context = make_context(x.mesh, sequence_id=ids)
    return transformer.sublayer_mask_padding(x, None, context)

  np.testing.assert_allclose(apply(fn, X, ids)[0], X * (ids != 0)[..., None])


# ---------------------------------------------------------------- layer stack


def call_stack(stack, mode="eval"):
  outputs = []

  def fn(x):
    context = make_context(x.mesh, mode, layer_outputs=outputs)
    with mtf.variable_scope("stack"):
      y = stack.call(context, x)
    assert context.layer_index == stack.num_layers
    return y

  return (*apply(fn, X), outputs)


def test_layers_names_and_outputs():
  stack = transformer.make_layer_stack(
    [Scale, [Scale, "named"]], lambda l: transformer.LayerStack(l, **lm.SUBLAYERS), num_layers=2
  )
  y, names, outputs = call_stack(stack)
  layers = ["block_000/layer_000", "block_000/named", "block_001/layer_000", "block_001/named"]
  assert [l.name for l in stack.layers] == layers
  assert names == {"stack/rms_norm/scale"} | {
    f"stack/{l}/{v}" for l in layers for v in ("rms_norm/scale", "Scale/weight")
  }
  x = X
  for _ in layers:
    x = x + 2 * x / rms(x)
  np.testing.assert_allclose(y, x / rms(x), rtol=1e-5)
  assert len(outputs) == len(layers) + 1


def test_without_block_scope():
  stack = transformer.make_layer_stack(
    [Scale, (dict(), "named", Scale)],
    lambda l: transformer.LayerStack(l, **lm.SUBLAYERS),
    num_layers=2,
    block_scope=False,
  )
  assert [l.name for l in stack.layers] == ["layer_000", "named", "layer_002", "named"]
  # The layers of one name share their weights.
  assert len([n for n in call_stack(stack)[1] if n.endswith("weight")]) == 3


def test_unnamed_layers_share_a_scope_with_an_empty_name():
  stack = transformer.LayerStack([Scale(), Scale()], **lm.SUBLAYERS)
  assert "stack//Scale/weight" in call_stack(stack)[1]


def test_legacy_sublayers():
  stack = transformer.make_layer_stack(
    [Scale], lambda l: transformer.LayerStack(l, dropout_rate=0.0, norm_epsilon=1e-6), num_layers=1
  )
  y, names, _ = call_stack(stack, mode="train")
  assert names == {
    "stack/block_000/layer_000/layer_norm/scale",
    "stack/block_000/layer_000/Scale/weight",
    "stack/final_layer_norm/scale",
  }
  x = X + 2 * X / rms(X)
  np.testing.assert_allclose(y, x / rms(x), rtol=1e-5)


def test_layer_stack_errors():
  with pytest.raises(errors.ConfigError, match="dropout_rate.*norm_epsilon"):
    transformer.LayerStack([], dropout_rate=0.1)
  with pytest.raises(errors.ConfigError, match="sublayers_initial is not set"):
    call_stack(transformer.LayerStack([Scale()]))
  assert transformer.LayerStack([Scale()], recompute_grads="Scale").recomputes(Scale())
  assert not transformer.LayerStack([Scale()], recompute_grads=["SelfAttention"]).recomputes(
    Scale()
  )
  with pytest.raises(
    errors.ConfigError, match="'Scales' is no class of layers; .* has Scale; True"
  ):
    transformer.LayerStack([Scale()], recompute_grads=["Scale", "Scales"])
  with pytest.raises(errors.ConfigError, match="ReversibleLayerStack.*must be True"):
    transformer.ReversibleLayerStack([Scale()], recompute_grads=["Scale"])
  with pytest.raises(errors.ConfigError, match="neither a layer class"):
    transformer.make_layer_stack([[Scale, 3]])
  with pytest.raises(errors.ConfigError, match="no layer class"):
    transformer.make_layer_stack([["name"]])

  class Transposes(transformer.TransformerLayer):
    def call(self, context, x):
      return mtf.transpose(x, mtf.Shape(x.shape.dims[::-1]))

  stack = transformer.LayerStack(
    [Transposes()], **(lm.SUBLAYERS | dict(sublayers_per_layer=[transformer.sublayer_call_layer]))
  )
  with pytest.raises(errors.ShapeError, match="Transposes"):
    call_stack(stack)


def test_base_layer():
  layer = transformer_layers.DenseReluDense(hidden_size=7)
  assert layer.name is None
  assert json.loads(layer.to_json())["hidden_size"] == 7
  with pytest.raises(NotImplementedError):
    transformer.TransformerLayer().call(None, None)


# -------------------------------------------------------------------- context


def test_context():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  given: list = []
  context = make_context(mesh, "train", layer_outputs=given, states=["a", "b", "c"], new_states=[])
  assert context.train and context.layer_outputs is given
  assert context.activation_dtype == tf.float32 and context.nonpadding is None
  assert context.get_states(1) == ["a"]
  context.record_new_states(["A"])
  assert context.get_states(2) == ["b", "c"]
  context.constant_states = []
  context.record_constant_state(5)
  context.record_constant_state(6)
  assert [context.get_constant_state(), context.get_constant_state()] == [5, 6]
  assert make_context(mesh, sequence_id=1).nonpadding == 1
  assert make_context(mesh, position_is_default=True).get_position().shape == mtf.Shape([LENGTH])
  position = mtf.zeros(mesh, [LENGTH], tf.int32)
  assert make_context(mesh, position=position).get_position() is position
  encoder_output = mtf.zeros(mesh, [BATCH, ("memory_length", 5), ("d_model", D)])
  assert make_context(mesh, encoder_output=encoder_output).encoder_length_dim.size == 5
  assert [context.cached("k", lambda: 1), context.cached("k", lambda: 2)] == [1, 1]


def test_masks_are_computed_once_for_all_layers():
  counts = []
  for num_layers in (1, 3):
    graph = mtf.Graph()
    targets = mtf.zeros(mtf.Mesh(graph, "m"), [BATCH, LENGTH], tf.int32)
    lm.make_model(num_layers=num_layers, num_heads=1).call_simple(
      targets, targets, compute_loss=False, sequence_id=targets
    )
    compare = [op for op in graph.operations if op.outputs[0].dtype == tf.bool]
    counts.append(len(compare))
  assert counts[0] == counts[1] > 0


def test_visibility_mask():
  visible = mtf.constant(mtf.Mesh(mtf.Graph(), "m"), True, [LENGTH], tf.bool)
  bias = attention.visibility_mask_to_attention_bias(visible, tf.bfloat16)
  assert (bias.dtype, bias.shape) == (tf.bfloat16, mtf.Shape([LENGTH]))


# ------------------------------------------------------------------------ gin


def test_bindings_of_a_class_hold_for_its_subclasses():
  gin.parse_config("""
    SelfAttention.num_heads = 3
    SelfAttention.key_value_size = 5
    SelfAttention.relative_attention_type = "bias"
    EncDecAttention.key_value_size = 7
    LocalSelfAttention.num_heads = 2
    LayerStack.recompute_grads = True
  """)
  layer = transformer_layers.EncDecAttention()
  assert (layer.num_heads, layer.key_value_size) == (3, 7)
  # This argument EncDecAttention passes on itself.
  assert layer.relative_attention_type is None
  layer = transformer_layers.LocalSelfAttention()
  assert (layer.num_heads, layer.key_value_size, layer.radius) == (2, 128, 128)
  assert layer.relative_attention_type == "bias"


def test_scopes_hold_at_construction():
  gin.parse_config("""
    encoder/SelfAttention.num_heads = 3
    SelfAttention.num_heads = 2
    make_layer_stack.layers = [@SelfAttention]
    make_layer_stack.num_layers = 1
    encoder/make_layer_stack.num_layers = 2
  """)
  with gin.config_scope("encoder"):
    encoder = transformer.make_layer_stack()
  decoder = transformer.make_layer_stack()
  assert [l.num_heads for l in encoder.layers] == [3, 3]
  assert [l.num_heads for l in decoder.layers] == [2]


SELECTORS = """
transformer.Unitransformer transformer.LayerStack transformer.make_layer_stack
transformer.VocabEmbedding transformer.get_vocab_embedding_cls transformer.shift_targets
transformer.reduce_ensemble_logits transformer.reduce_ensemble_logits_select
transformer.sublayer_rms_norm transformer.sublayer_legacy_rms_norm transformer.sublayer_dropout
transformer_layers.SelfAttention transformer_layers.DenseReluDense
transformer_layers.EncDecAttention transformer_layers.TalkingHeadsSelfAttention
transformer_layers.GeneralBilinearSelfAttention transformer_layers.LocalSelfAttention
transformer_layers.relative_position_spans
""".split()


def test_selectors():
  for name in SELECTORS:
    gin.get_configurable("mesh_tensorflow.transformer." + name)
  gin.get_configurable("Unitransformer.sample_autoregressive")


def test_the_packaged_defaults_parse_whole():
  gin.add_config_file_search_path(gin_dir())
  gin.parse_config_files_and_bindings(["defaults.gin"], [])
  assert transformer_layers.EncDecAttention().num_heads == 8
  assert transformer_layers.TalkingHeadsSelfAttention().dropout_rate == 0.1
