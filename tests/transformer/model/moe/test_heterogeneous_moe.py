"""Mixtures of experts of different depths and widths."""

from __future__ import annotations

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import heterogeneous_moe, moe, transformer
from tests.transformer import lm_program as lm
from tests.transformer import moe_program, numpy_moe

KINDS = [
  dict(percent_number=0.5, layers=1, width=1),
  dict(percent_number=0.5, layers=2, width=2),
]
OPTIONS = dict(num_experts=4, min_expert_capacity=2, moe_gating="switch")
OPTIONS |= dict(switch_policy_train="argmax", switch_policy_eval="argmax")


def masks(kinds, experts, width):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  dim = mtf.Dimension("experts", experts)
  mask = heterogeneous_moe.generate_heterogeneous_expert_masks(kinds, experts, dim, mesh, width)
  assert mask.dtype == "float64"
  assert mask.shape.dimension_names == ["expert_hidden", "num_expert_layers", "experts"]
  lowering = mtf.Lowering(mesh.graph, {mesh: lm.one_device()})
  return lowering.export_to_tf_tensor(mask).numpy()


def test_masks_of_kinds_of_experts():
  # Hidden value, layer, expert.
  expected = np.zeros([2, 2, 4])
  expected[0, 0] = 1.0
  expected[1, 0, 2:] = expected[:, 1, 2:] = 1.0
  np.testing.assert_array_equal(masks(KINDS, 4, 1), expected)
  # Numbers in place of fractions; the last kind gets what is left; width times expert_width.
  kinds = [dict(percent_number=1, layers=2, width=1), dict(percent_number=0.1, layers=1, width=3)]
  expected = np.zeros([3, 2, 4])
  expected[:2, :, 0] = expected[:, 0, 1:] = 1.0
  np.testing.assert_array_equal(masks(kinds, 4, 2), expected)


def test_wrong_kinds():
  too_many = [dict(percent_number=3, layers=1, width=1)] * 3
  with pytest.raises(errors.ConfigError, match="first 2 kinds have 6 experts, experts is 4"):
    masks(too_many, 4, 1)
  with pytest.raises(errors.ConfigError, match="at least 1"):
    masks([dict(percent_number=1, layers=0, width=1)], 4, 1)


def test_stacks_of_masked_layers_are_those_of_numpy():
  x = np.random.default_rng(0).normal(size=[2, 4, 4]).astype(np.float32)
  impl = lm.one_device()

  class Model:
    model_dim = mtf.Dimension("d_model", 4)
    ensemble_dims: list[mtf.Dimension] = []
    ensemble_dim = None
    layout = mesh_shape = None

  def program(t):
    context = transformer.Context(
      Model(), t.mesh, t.shape.dims[:1], t.shape.dims[1], mtf.VariableDType(), losses=[]
    )
    layer = heterogeneous_moe.HeterogeneousMoE1D(
      **OPTIONS, hidden_size=1, group_size=4, heterogeneous_mask_info=KINDS
    )
    y = layer.call(context, t)
    return y, context.losses[0]

  y, loss = lm.run(impl, program, x, names=["batch", "length", "d_model"])
  weights = {v.name: v.numpy() for v in impl.variable_store if v.name[0] != "_"}
  assert sorted(weights) == [
    "expert_layer_0/wi/kernel",
    "expert_layer_0/wo/kernel",
    "expert_layer_1/rms_norm/scale",
    "expert_layer_1/wi/kernel",
    "expert_layer_1/wo/kernel",
    "switch_gating/kernel",
  ]
  assert weights["expert_layer_1/wi/kernel"].shape == (4, 4, 2)
  combine, want_loss = numpy_moe.route("switch", x, weights["switch_gating/kernel"], 2)
  first, second = (
    [weights[f"expert_layer_{i}/{n}/kernel"] for n in ("wi", "wo")] for i in range(2)
  )
  second.append(weights["expert_layer_1/rms_norm/scale"])
  results = numpy_moe.deep_experts(x, [first, second], masks(KINDS, 4, 1))
  want = np.einsum("gse,gsed->gsd", combine.sum(-1), results)
  np.testing.assert_allclose(y, want, atol=1e-5)
  np.testing.assert_allclose(loss, want_loss * 1e-2, rtol=1e-5)


def values(mesh, layout, devices, **kwargs):
  """Train loss, logits and squared gradient of a language model."""
  impl = mtf.PlacementMeshImpl(mesh, layout, devices[: mtf.convert_to_shape(mesh).size])
  model = moe_program.make_model(
    OPTIONS | kwargs,
    heterogeneous_moe.HeterogeneousMoE1D,
    num_layers=1,
    layout=layout,
    mesh_shape=mesh,
  )
  return lm.run(impl, lm.loss_program(model), lm.TARGETS, seed=1)


def test_one_layer_without_masks_is_moe_1d(cpu_devices):
  impl = lm.one_device()
  for cls in (moe.MoE1D, heterogeneous_moe.HeterogeneousMoE1D):
    model = moe_program.make_model(OPTIONS, cls)
    lm.set_golden_weights(lm.initialize(impl, model))
  names = {s.name for s in impl.variable_store}
  inside = "transformer/block_000/layer_001/HeterogeneousMoE1D/"
  for name in ("expert_layer_0/wi/kernel", "expert_layer_0/wo/kernel", "switch_gating/kernel"):
    assert inside + name in names
    plain = inside.replace("Heterogeneous", "") + name.removeprefix("expert_layer_0/")
    impl.variable_store[inside + name].assign(impl.variable_store[plain].numpy())
    block = "block_001".join(inside.split("block_000"))
    plain = plain.replace("block_000", "block_001")
    impl.variable_store[block + name].assign(impl.variable_store[plain].numpy())
  results = []
  for cls in (moe.MoE1D, heterogeneous_moe.HeterogeneousMoE1D):
    model = moe_program.make_model(OPTIONS, cls)
    results.append(lm.run(impl, lm.loss_program(model, "eval"), lm.TARGETS))
  for a, b in zip(*results):
    np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("mesh,layout", [
  ("all:2", "batch:all,experts:all"),
  ("rows:2,cols:2", "batch:rows,experts:rows,expert_hidden:cols"),
  ("cols:2", "d_model:cols"),
])  # fmt: skip
def test_deep_experts_with_dropout_on_meshes(mesh, layout, cpu_devices):
  """Also dropout between the layers of an expert, whose noise does not depend on the layout."""
  gin.parse_config("transformer.sublayer_dropout.dropout_rate = 0.2")
  kinds = [KINDS[0] | dict(width=2), KINDS[1]]
  options = dict(heterogeneous_mask_info=kinds, group_size=6, dropout_rate=0.1)
  want = values("all:1", "", cpu_devices, **options)
  got = values(mesh, layout, cpu_devices, **options)
  for a, b in zip(got, want):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_number_of_layers_without_masks(cpu_devices):
  one = values("all:1", "", cpu_devices, moe_num_layers=1)
  three = values("all:1", "", cpu_devices, moe_num_layers=3)
  assert abs(one[0] - three[0]) > 1e-4


def test_residual_connections_need_one_size():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.zeros(mesh, [("batch", 2), ("length", 4), ("d_model", 4)])
  bag = moe.HParams(moe_num_layers=2)
  with pytest.raises(errors.ShapeError, match="residual"):
    heterogeneous_moe.transformer_moe_layer_v1(
      x, mtf.Dimension("d_model", 6), bag, True, mtf.VariableDType()
    )
