"""Universal Transformer: names, sharing of weights, arguments, and models; see also descriptors."""

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import (
  transformer_layers,
  universal_transformer,
)
from mesh_tensorflow.transformer.model import universal_passes as passes
from tests.transformer import bi_program, layer_program
from tests.transformer import lm_program as lm
from tests.transformer.model.layers.descriptors_smaller_layers import UNIVERSAL

LAYERS = [
  [transformer_layers.SelfAttention, dict(num_heads=2, key_value_size=3)],
  [transformer_layers.DenseReluDense, dict(hidden_size=6)],
]
NORM = "layer_prepostprocess/layer_norm/layer_norm_"
RECURRENCES = {
  "act": dict(recurrence_type="act", add_step_timing_signal=True),
  "basic": dict(mix_with_transformer_before_ut=True, mix_with_transformer_after_ut=True),
  "highway": dict(recurrence_type="highway", couple_carry_transform_gates=False),
  "gru": dict(use_gated_transformer=True, gating_type="gru"),
  "gated highway": dict(use_gated_transformer=True, gating_type="highway"),
}


def make_lm(layers=LAYERS, **kwargs):
  return layer_program.make_lm(
    layers, lambda made: universal_transformer.UTLayerStack(made, **(UNIVERSAL | kwargs))
  )


def made_names(**kwargs):
  made = layer_program.names(make_lm(**kwargs))
  return {k.removeprefix("transformer/"): v.to_integer_list for k, v in made.items()}


COMMON = {
  "embedding", "positional_embedding", NORM + "scale", NORM + "bias",
  *(f"block_000/layer_00{i}/{NORM}{what}" for i in range(2) for what in ("scale", "bias")),
  *(f"block_000/layer_000/SelfAttention/{x}" for x in "qkvo"),
  *(f"block_000/layer_001/DenseReluDense/{x}/kernel" for x in ("wi", "wo")),
}  # fmt: skip


@pytest.mark.parametrize("kwargs,more", [
  (dict(num_rec_steps=5, num_inrecurrence_layers=3), {}),
  (RECURRENCES["basic"], {}),
  (RECURRENCES["act"], {
    "sigmoid_activation_for_pondering/dense/kernel": [4, 1],
    "sigmoid_activation_for_pondering/dense_1/bias": [1],
    "layer_embedding": [2, 4],
  }),
  (dict(recurrence_type="highway", num_rec_steps=2), {
    "dense/kernel": [12, 4], "dense_1/bias": [4], "dense_2/kernel": [12, 4], "dense_3/bias": [4],
  }),
  (dict(recurrence_type="highway", num_rec_steps=1, gates_inputs="s"), {
    "dense/kernel": [4, 4], "dense_1/bias": [4],
  }),
  (RECURRENCES["gated highway"], {
    f"block_000/layer_00{i}/{n}": s for i in range(2)
    for n, s in (("dense/kernel", [8, 4]), ("dense_1/bias", [4]))
  }),
  (RECURRENCES["gru"], {
    f"block_000/layer_00{i}/dense{n}": s for i in range(2)
    for n, s in (("/kernel", [8, 4]), ("_1/bias", [4]), ("_2/kernel", [8, 4]), ("_3/bias", [4]),
                 ("_4/kernel", [8, 4]), ("_5/bias", [4]))
  }),
])  # fmt: skip
def test_all_steps_share_weights(kwargs, more):
  made = made_names(**kwargs)
  assert set(made) == COMMON | set(more)
  assert {k: made[k] for k in more} == more


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_decoding(recurrence):
  model = make_lm(act_max_steps=1, **RECURRENCES[recurrence])
  layer_program.check_decoding(model, lm.TARGETS[:, :4])


@pytest.mark.parametrize("recurrence,kind", [("act", "simd"), ("highway", "placement")])
def test_training_on_a_mesh(recurrence, kind, cpu_devices):
  """With dropout."""
  targets = np.random.default_rng(1).integers(1, 11, [4, 6]).astype(np.int32)
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = cls("rows:2,cols:2", "batch:rows,heads:cols,d_ff:cols", cpu_devices[:4])
  model = make_lm(dropout_rate=0.3, num_rec_steps=1, act_max_steps=1, **RECURRENCES[recurrence])

  def train(impl):
    bi_program.random_weights(lm.initialize(impl, model, targets), scale=0.3)
    loss, _, squared = lm.run(impl, lm.loss_program(model), targets, seed=3)
    return loss, squared

  np.testing.assert_allclose(train(impl), train(lm.one_device()), rtol=1e-4)


def test_encoder_decoder_by_gin():
  model = bi_program.make_model(f"""
    import mesh_tensorflow.transformer.universal_transformer
    make_layer_stack.layer_stack_cls = @UTLayerStack
    make_layer_stack.num_layers = 1
    UTLayerStack.recurrence_type = "act"
    {chr(10).join(f"UTLayerStack.{k} = {v!r}" for k, v in UNIVERSAL.items() if k[0] != "r")}
    encoder/UTLayerStack.act_max_steps = 0
    decoder/UTLayerStack.act_max_steps = 1
  """)
  impl = lm.one_device()
  bi_program.random_weights(bi_program.initialize(impl, model), scale=0.3)
  arrays = bi_program.INPUTS, bi_program.TARGETS
  _, logits = lm.run(impl, bi_program.loss_program(model, "eval"), *arrays)
  stepwise = lm.run(impl, bi_program.stepwise_program(model), *arrays)
  np.testing.assert_allclose(stepwise[arrays[1] > 0], logits[arrays[1] > 0], rtol=1e-4, atol=1e-4)


def test_layer_outputs():
  outputs = []

  def program(targets):
    model = make_lm(num_rec_steps=3)
    return model.call_simple(targets, targets, False, mode="eval", layer_outputs=outputs)[0]

  lm.run(lm.one_device(), program, lm.TARGETS)
  # The first, those of three passes of two layers but the last of each, and the result.
  assert len(outputs) == 1 + 3 + 1


def test_timing_signals():
  d_model = mtf.Dimension("d_model", 4)

  def program(x):
    context = layer_program.context(mtf.zeros(x.mesh, [*x.shape.dims, d_model]))
    stack = universal_transformer.UTLayerStack([], **(UNIVERSAL | dict(position_start_index=3)))
    zeros = mtf.zeros(x.mesh, [*x.shape.dims, d_model])
    return (
      stack.get_timing_signal_1d(context, x.shape[1], d_model, start_index=2),
      stack.add_position_timing_signal_func(context, zeros, 0),
      passes.learned_layer_timing_signal(context, d_model, 7, 2),
    )

  signal, added, beyond = lm.run(lm.one_device(), program, lm.TARGETS)
  angles = np.arange(10)[:, None] * np.array([1.0, 1e-4])
  expected = np.concatenate([np.sin(angles), np.cos(angles)], -1)
  np.testing.assert_allclose(signal, expected[2:8], atol=1e-6)
  np.testing.assert_allclose(added[1], expected[3:9], atol=1e-6)
  assert not beyond.any()


def test_ponder_times_are_told():
  x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), [("batch", 2), ("length", 3), ("d_model", 4)])
  stack = universal_transformer.UTLayerStack([], **(UNIVERSAL | RECURRENCES["act"]))
  stack.call(layer_program.context(x, mode="train"), x)
  assert any("ponder_times" in op.name for op in x.graph.operations)


@pytest.mark.parametrize("changes", [
  dict(recurrence_type="act", act_type="global"),
  dict(recurrence_type="act", act_type="random"),
  dict(recurrence_type="loop"),
  dict(add_step_timing_signal=True, step_timing_signal_type="rnn"),
  dict(add_step_timing_signal=True, add_or_concat_timing_signal="concat"),
  dict(recurrence_type="highway", gate_ffn_layer="dense_relu_dense"),
  dict(use_gated_transformer=True, gating_type="lstm"),
  dict(recurrence_type="highway", gates_inputs=""),
  dict(recurrence_type="highway", gates_inputs="sx"),
])  # fmt: skip
def test_arguments_that_mean_nothing(changes):
  *_, (name, value) = changes.items()
  with pytest.raises(errors.ConfigError, match=f"UTLayerStack.{name} = {value!r}"):
    universal_transformer.UTLayerStack([], **(UNIVERSAL | changes))


def test_arguments_that_are_not_used_may_be_anything():
  unused = dict(act_type="global", gates_inputs="", gate_ffn_layer="?", gating_type="?")
  universal_transformer.UTLayerStack([], **(UNIVERSAL | unused))


def test_a_layer_must_keep_the_shape():
  class Cuts(transformer_layers.DenseReluDense):
    def call(self, context, x):
      return mtf.reduce_sum(x, reduced_dim=x.shape[-1])

  with pytest.raises(errors.ShapeError, match="Cuts"):
    layer_program.names(make_lm([Cuts]))


def test_the_ffn_layer_has_one_kind():
  x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), [("batch", 2), ("length", 3), ("d_model", 4)])
  stack = universal_transformer.UTLayerStack([], **UNIVERSAL)
  context = layer_program.context(x)
  with pytest.raises(errors.ConfigError, match="ffn_layer_type"):
    stack.ffn_layer_multi_inputs(context, None, [x], ffn_layer_type="conv")
  y = stack.ffn_layer_multi_inputs(context, None, [x, x], postprocess=True, activation=mtf.tanh)
  assert y.shape == x.shape and y.dtype == tf.float32


def test_selector_and_required_arguments():
  gin.get_configurable("mesh_tensorflow.transformer.universal_transformer.UTLayerStack")
  with pytest.raises(RuntimeError, match="act_type"):
    universal_transformer.UTLayerStack([])
