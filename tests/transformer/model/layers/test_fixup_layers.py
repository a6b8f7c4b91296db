"""Fixup layers: what they start as, and models made of them."""

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import fixup_layers, transformer
from tests.transformer import layer_program
from tests.transformer import lm_program as lm

STACK = dict(
  sublayers_initial=[],
  sublayers_per_layer=[
    fixup_layers.sublayer_fixup_shift,
    transformer.sublayer_call_layer,
    fixup_layers.sublayer_fixup_scale,
    transformer.sublayer_residual,
  ],
  sublayers_final=[],
)
PREFIX = "transformer/block_000/layer_"


def make_lm(attention=None, dense=None, **kwargs):
  layers = [
    [
      fixup_layers.SelfAttentionFixup,
      dict(num_blocks=3, num_heads=2, key_value_size=3) | (attention or {}),
    ],
    [fixup_layers.DenseReluDenseFixup, dict(num_blocks=3, hidden_size=5) | (dense or {})],
  ]
  stack = kwargs.pop("stack", STACK)
  return layer_program.make_lm(layers, lambda made: transformer.LayerStack(made, **stack), **kwargs)


def test_variables():
  made = {k: str(v) for k, v in layer_program.names(make_lm()).items()}
  made = {k.removeprefix(PREFIX): v for k, v in made.items() if k.startswith(PREFIX)}
  assert made == {
    "000/fixup_bias": "Shape[single_bias=1]",
    "000/fixup_scale_weight": "Shape[single_scale=1]",
    "000/SelfAttentionFixup/q_fixup": "Shape[d_model=4, heads=6]",
    "000/SelfAttentionFixup/k_fixup": "Shape[d_model=4, heads=6]",
    "000/SelfAttentionFixup/v_fixup": "Shape[d_model=4, heads=6]",
    "000/SelfAttentionFixup/o_fixup": "Shape[heads=6, d_model=4]",
    "001/fixup_bias": "Shape[single_bias=1]",
    "001/fixup_scale_weight": "Shape[single_scale=1]",
    "001/DenseReluDenseFixup/wi/kernel": "Shape[d_model=4, d_ff=5]",
    "001/DenseReluDenseFixup/shift": "Shape[single_bias=1]",
    "001/DenseReluDenseFixup/wo/kernel": "Shape[d_ff=5, d_model=4]",
  }


def test_shared_keys_and_values_and_gates():
  model = make_lm(dict(shared_kv=True), dict(activation=["gelu", "linear"], use_bias=True))
  made = {k.split("/", 3)[-1] for k in layer_program.names(model)}
  assert {"SelfAttentionFixup/kv_fixup", "DenseReluDenseFixup/wi_1/bias"} <= made
  assert "SelfAttentionFixup/k_fixup" not in made


@pytest.mark.parametrize("heads,query,memory", [
  (dict(num_heads=1), 3, 3),
  (dict(num_heads=4, num_memory_heads=1), 12, 3),
  (dict(num_heads=4, num_memory_heads=2), 12, 6),
])  # fmt: skip
def test_heads(heads, query, memory):
  made = layer_program.names(make_lm(heads))
  prefix = PREFIX + "000/SelfAttentionFixup/"
  assert made[prefix + "q_fixup"].to_integer_list == [4, query]
  assert made[prefix + "k_fixup"].to_integer_list == [4, memory]


def test_a_stack_starts_as_the_identity():
  impl, other = lm.one_device(), lm.one_device()
  model = make_lm()
  empty = layer_program.make_lm([], lambda made: transformer.LayerStack(made, **STACK))
  lm.initialize(impl, model)
  lm.initialize(other, empty)
  np.testing.assert_array_equal(
    lm.run(impl, layer_program.full_program(model), lm.TARGETS),
    lm.run(other, layer_program.full_program(empty), lm.TARGETS),
  )


@pytest.mark.parametrize("init", ["glorot", "he"])
@pytest.mark.parametrize("distribution", ["uniform", "truncated_normal", "untruncated_normal"])
def test_initial_values(init, distribution):
  blocks = 8
  options = dict(num_blocks=blocks, default_init=init, init_distribution=distribution)
  model = make_lm(
    dict(num_heads=4, key_value_size=32, **options), dict(hidden_size=192, **options), d_model=64
  )
  impl = lm.one_device()
  store = lm.initialize(impl, model)

  def check(name, fan_in, fan_out, factor):
    values = store[PREFIX + name].numpy()
    variance = 2 * factor / fan_in if init == "he" else factor / ((fan_in + fan_out) / 2)
    assert values.std() == pytest.approx(variance**0.5, rel=0.05)
    if distribution == "uniform":
      assert 0.98 < np.abs(values).max() / np.sqrt(3 * variance) <= 1.0
    elif distribution == "truncated_normal":
      assert np.abs(values).max() < 2.3 * np.sqrt(variance)
    else:
      assert np.abs(values).max() > 2.5 * np.sqrt(variance)

  check("000/SelfAttentionFixup/q_fixup", 64, 128, blocks ** (-1 / 3))
  check("000/SelfAttentionFixup/v_fixup", 64, 128, blocks ** (-1 / 3))
  check("001/DenseReluDenseFixup/wi/kernel", 64, 192, 1 / blocks)
  for name in ("000/SelfAttentionFixup/o_fixup", "001/DenseReluDenseFixup/wo/kernel"):
    assert not store[PREFIX + name].numpy().any()
  assert store[PREFIX + "000/fixup_scale_weight"].numpy() == [1.0]


def test_initial_values_do_not_depend_on_the_layout(cpu_devices):
  one = lm.one_device()
  two = mtf.PlacementMeshImpl("a:2", "d_ff:a", cpu_devices[:2])
  model = make_lm(dense=dict(hidden_size=6))
  stores = [lm.initialize(impl, model) for impl in (one, two)]
  name = PREFIX + "001/DenseReluDenseFixup/wi/kernel"
  np.testing.assert_array_equal(*(s[name].numpy() for s in stores))


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_training_on_a_mesh(kind, cpu_devices):
  targets = np.random.default_rng(1).integers(1, 11, [4, 6]).astype(np.int32)
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = cls("rows:2,cols:2", "batch:rows,heads:cols,d_ff:cols", cpu_devices[:4])
  model = make_lm(dense=dict(hidden_size=6))
  actual = layer_program.losses_and_gradients(model, impl, targets)
  expected = layer_program.losses_and_gradients(model, lm.one_device(), targets)
  for a, b in zip(actual, expected):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_decoding():
  layer_program.check_decoding(make_lm(stack=lm.SUBLAYERS))


def test_dropout_has_one_mask_for_all_positions():
  layer = fixup_layers.DenseReluDenseFixup(hidden_size=5, num_blocks=1, dropout_rate=0.5)
  x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), [("batch", 2), ("length", 3), ("d_model", 4)])
  layer.call(layer_program.context(x, mode="train"), x)
  (noise,) = [op for op in x.graph.operations if "random" in op.name]
  assert noise.outputs[0].shape.dimension_names == ["batch", "d_ff"]


def test_scaling_is_not_folded():
  assert not fixup_layers.SelfAttentionFixup(num_blocks=1).fold_scaling_into_initializer
  gin.parse_config("SelfAttentionFixup.fold_scaling_into_initializer = True")
  with pytest.raises(errors.ConfigError, match="fold_scaling_into_initializer = False"):
    layer_program.names(make_lm())


def test_errors():
  for changes in (dict(default_init="xavier"), dict(init_distribution="cauchy")):
    for which in ("attention", "dense"):
      with pytest.raises(errors.ConfigError, match=next(iter(changes))):
        layer_program.names(make_lm(**{which: changes}))
  with pytest.raises(errors.DimensionError, match="num_memory_heads"):
    layer_program.names(make_lm(dict(num_heads=4, num_memory_heads=3)))
  gin.parse_config("mesh_tensorflow.layers.unit_scaling_convention.value = True")
  with pytest.raises(errors.ConfigError, match="unit_scaling_convention"):
    layer_program.names(make_lm())


def test_attention_to_an_encoder_is_the_usual_one():
  layer = fixup_layers.EncDecAttentionFixup(num_heads=2)
  assert layer.num_heads == 2 and layer.relative_attention_type is None
  for name in ("SelfAttentionFixup", "sublayer_fixup_scale", "sublayer_fixup_shift"):
    gin.get_configurable("mesh_tensorflow.transformer.fixup_layers." + name)
