"""Mixtures of experts against NumPy, on drawn layouts that the layers are not told about."""

from __future__ import annotations

import functools

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import heterogeneous_moe, moe, transformer
from mesh_tensorflow.transformer.model.moe import expert_products
from tests.conformance.framework import ONE_DEVICE, T, op
from tests.transformer import numpy_moe

D = mtf.Dimension("d_model", 4)
FLOATS = mtf.VariableDType()
X = T("batch:4 length:4 d_model:4", -1, 1)
MEETING = ("batch:4 d_model:4 expert_unsplit:4", "experts:4 d_model:4 expert_hidden:4")
PADDING = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]


def hparams(gating, **kwargs):
  values = dict(num_experts=4, hidden_size=4, min_expert_capacity=1, gating=gating)
  values |= dict(second_policy_train="all", switch_policy_train="argmax", ntlb_top_k=2)
  return moe.HParams(**{f"moe_{k}": v for k, v in (values | kwargs).items()})


def layer(x, nonpadding=None, *, gating, **kwargs):
  return moe.transformer_moe_layer_v1(
    x, D, hparams(gating, **kwargs), True, FLOATS, nonpadding=nonpadding
  )


def described(name, gating, groups, capacity, reference, padded=False, *inputs, **kwargs):
  """A layer on 16 tokens in `groups` groups."""

  def mirror(x, *rest):
    importance = rest[0] if padded else None
    return numpy_moe.moe(
      gating,
      x,
      *rest[padded:],
      groups=groups,
      capacity=capacity,
      importance=importance,
      **reference,
    )

  return op(
    name,
    functools.partial(layer, gating=gating, group_size=16 // groups, **kwargs),
    mirror,
    X,
    *([T("batch:4 length:4", dtype="int32", values=PADDING)] if padded else []),
    variables={
      f"{gating}_gating/kernel": T("d_model:4 expert_unsplit:4", -2, 2),
      "wi/kernel": "experts:4 d_model:4 expert_hidden:4",
      "wo/kernel": "experts:4 expert_hidden:4 d_model:4",
    },
    together=MEETING,
  )


def products(name, rows, x_dims, output_dims, dims):
  """Products of rows with the matrices of experts, some of which there are not."""
  size = np.prod([d.size for d in mtf.Shape(mtf.convert_to_shape(rows).dims)])
  index = np.resize([0, 3, -1, 2, 2, 4, 1, 3, 3, 0, 0], size)
  owners = "owners:2 " if "owners" in rows else ""
  text = lambda dims: f"{dims} " if dims else ""  # noqa: E731

  def build(x, kernel, index):
    tokens = mtf.convert_to_shape("batch:4 length:2").dims
    return expert_products.expert_products(
      x, kernel, index, mtf.Dimension("e", 3), tokens, mtf.convert_to_shape(output_dims).dims
    )

  def mirror(x, kernel, index):
    x = np.broadcast_to(x.reshape(dims[0]), [*dims[1], 4])
    kernel, index = kernel.reshape(-1, 4, 4, 3), index.reshape(dims[1])
    y = np.zeros([*dims[1], 3])
    for row in np.ndindex(*dims[1]):
      if 0 <= index[row] < 4:
        y[row] = x[row] @ kernel[row[0], index[row]]
    return np.reshape(y.sum(dims[2]), [*mtf.convert_to_shape(output_dims).to_integer_list, 3])

  return op(
    name,
    build,
    mirror,
    f"{x_dims} d:4",
    f"{text(owners)}experts:4 d:4 e:3",
    T(rows, dtype="int32", values=index),
    together=f"{rows} experts:4 d:4 e:3",
  )


def balanced(name, dropless):
  """A bias chooses experts, gates are without it; and experts that all tokens go to."""
  options = dict(top_n_num_experts_per_token=2, router_scores="sigmoid", balance_rate=0.1)
  reference = dict(n=2, scores="sigmoid", z_loss=0.5)
  variables = {
    "top_k_gating/kernel": T("d_model:4 expert_unsplit:4", -2, 2),
    "top_k_gating/balance_bias": T("expert_unsplit:4", values=[0.5, -0.5, 0.25, 0.0]),
    "wi/kernel": "experts:4 d_model:4 expert_hidden:4",
    "wo/kernel": "experts:4 expert_hidden:4 d_model:4",
    "shared/wi/kernel": "d_model:4 d_ff:8",
    "shared/wo/kernel": "d_ff:8 d_model:4",
  }

  def mirror(x, kernel, bias, wi, wo, *shared):
    return numpy_moe.moe(
      "top_k", x, kernel, wi, wo, groups=4, capacity=16, bias=bias, shared=shared, **reference
    )

  return op(
    name,
    functools.partial(
      layer, gating="top_k", group_size=4, z_loss=0.5, num_shared_experts=2, dropless=dropless,
      capacity_factor_train=16.0, **options,
    ),
    mirror,
    X,
    variables=variables,
    untrained=("top_k_gating/balance_bias",),
    together=(*MEETING, "batch:4 length:4 d_model:4 d_ff:8"),
  )  # fmt: skip


def at_random(name, **kwargs):
  """A layer whose value on one device is the reference."""
  return op(
    name,
    functools.partial(layer, **kwargs),
    ONE_DEVICE,
    T("batch:4 length:4 d_model:4", -1, 1),
    together=MEETING,
  )


def two_levels(x, *, second_policy="all"):
  values = dict(expert_x=2, expert_y=2, hidden_size=4, min_expert_capacity=1, group_size=4)
  bag = moe.HParams(**{f"moe_{k}": v for k, v in values.items()})
  bag.add_hparam("moe_second_policy_train", second_policy)
  return moe.transformer_moe_layer_v2(x, D, bag, True, FLOATS)


TWO_LEVELS = dict(
  variables={
    "outer_gating/kernel": T("d_model:4 expert_x_unsplit:2", -2, 2),
    "inner_gating/kernel": T("expert_x:2 d_model:4 expert_y_unsplit:2", -2, 2),
    "wi/kernel": "expert_y:2 expert_x:2 d_model:4 expert_hidden:4",
    "wo/kernel": "expert_y:2 expert_x:2 expert_hidden:4 d_model:4",
  },
  together=(
    "outer_batch:2 batch:2 d_model:4 expert_x_unsplit:2",
    "outer_batch:2 expert_x:2 d_model:4 expert_y_unsplit:2",
  ),
)


class Model:
  """As much of a model as experts need."""

  model_dim = D
  ensemble_dims: list[mtf.Dimension] = []
  ensemble_dim = layout = mesh_shape = None


def heterogeneous(x):
  context = transformer.Context(
    Model(), x.mesh, x.shape.dims[:1], x.shape.dims[1], FLOATS, mode="eval", losses=[]
  )
  experts = heterogeneous_moe.HeterogeneousMoE1D(
    num_experts=4,
    hidden_size=1,
    group_size=4,
    min_expert_capacity=1,
    moe_gating="switch",
    switch_policy_eval="argmax",
    heterogeneous_mask_info=[
      dict(percent_number=2, layers=1, width=3),
      dict(percent_number=2, layers=2, width=4),
    ],
  )
  return experts.call(context, x), context.losses[0]


def numpy_heterogeneous(x, kernel, wi_0, wo_0, scale, wi_1, wo_1):
  combine, loss = numpy_moe.route("switch", x, kernel, 2)
  mask = np.ones([4, 2, 4])
  mask[3, :, :2] = mask[:, 1, :2] = 0.0
  results = numpy_moe.deep_experts(x, [(wi_0, wo_0), (wi_1, wo_1, scale)], mask)
  return np.einsum("gse,gsed->gsd", combine.sum(-1), results), loss * 1e-2


DESCRIPTORS = [
  op(
    "moe_heterogeneous",
    heterogeneous,
    numpy_heterogeneous,
    # Not near zero, where the norm is steep.
    T("batch:4 length:4 d_model:4", 0.3, 1),
    variables={
      "switch_gating/kernel": T("d_model:4 expert_unsplit:4", -2, 2),
      "expert_layer_0/wi/kernel": "experts:4 d_model:4 expert_hidden:4",
      "expert_layer_0/wo/kernel": "experts:4 expert_hidden:4 d_model:4",
      "expert_layer_1/rms_norm/scale": T("d_model:4", 0.5, 1.5),
      "expert_layer_1/wi/kernel": "experts:4 d_model:4 expert_hidden:4",
      "expert_layer_1/wo/kernel": "experts:4 expert_hidden:4 d_model:4",
    },
    together=MEETING,
  ),
  op(
    "moe_of_two_levels",
    two_levels,
    functools.partial(numpy_moe.moe_2d, groups=4, capacity=2, groups_y=2, capacity_y=2),
    T("outer_batch:2 batch:2 length:4 d_model:4", -1, 1),
    **TWO_LEVELS,
  ),
  op(
    "moe_of_two_levels_at_random",
    functools.partial(two_levels, second_policy="random"),
    ONE_DEVICE,
    T("outer_batch:2 batch:2 length:4 d_model:4", -1, 1),
    together=TWO_LEVELS["together"] + (
      "expert_x:2 d_model:4 expert_y_unsplit:2",
      "expert_y:2 expert_x:2 expert_hidden:4 d_model:4",
    ),
  ),
  described("moe_top_2", "top_2", 4, 1, {}),
  described("moe_top_2_in_one_group", "top_2", 1, 5, {}),
  described(
    "moe_top_2_of_both_places", "top_2", 2, 2,
    dict(second_loss=True, policy="threshold", threshold=0.3),
    use_second_place_loss=True, second_policy_train="threshold", second_threshold_train=0.3,
  ),
  described(
    "moe_top_2_padded", "top_2", 4, 1, dict(policy="none", z_loss=0.5), True,
    second_policy_train="none", z_loss=0.5,
  ),
  described("moe_top_n", "top_n", 4, 2, dict(n=3), capacity_factor_train=2.0),
  described(
    "moe_top_1_padded", "top_n", 1, 4, dict(n=1), True,
    capacity_factor_train=1.0, top_n_num_experts_per_token=1,
  ),
  described("moe_switch", "switch", 4, 1, {}),
  described("moe_switch_in_one_group", "switch", 1, 3, {}, True, capacity_factor_train=0.8),
  described("moe_switch_max", "switch_max", 2, 2, {}, True),
  described("moe_switch_max_of_few_tokens", "switch_max", 4, 6, {}, min_expert_capacity=6),
  described("moe_ntlb", "ntlb", 4, 1, {}),
  described("moe_ntlb_in_one_group", "ntlb", 1, 4, dict(top_k=3), True,
            ntlb_top_k=3, capacity_factor_train=1.0),
  described("moe_expert_selection", "expert_selection", 4, 2, {}, capacity_factor_train=2.0),
  described("moe_expert_selection_padded", "expert_selection", 1, 5, dict(z_loss=0.1), True,
            z_loss=0.1),
  described(
    "moe_top_k", "top_k", 4, 2, dict(n=2),
    top_n_num_experts_per_token=2, capacity_factor_train=2.0,
  ),
  described(
    "moe_top_k_of_sigmoids", "top_k", 1, 5,
    dict(n=3, scores="sigmoid", scale=2.5, z_loss=0.3), True,
    top_n_num_experts_per_token=3, router_scores="sigmoid", gate_scale=2.5, z_loss=0.3,
    capacity_factor_train=1.25,
  ),
  described(
    "moe_top_k_of_raw_scores", "top_k", 4, 2, dict(n=2, normalize=False),
    top_n_num_experts_per_token=2, normalize_gates=False, capacity_factor_train=2.0,
  ),
  described(
    "moe_dropless", "top_k", 1, 16, dict(n=2), True,
    top_n_num_experts_per_token=2, dropless=True,
  ),
  described("moe_dropless_switch", "switch", 4, 16, {}, dropless=True),
  described("moe_dropless_top_2", "top_2", 1, 16, {}, True, dropless=True),
  balanced("moe_balanced_by_a_bias", False),
  balanced("moe_dropless_with_shared_experts", True),
  products(
    "expert_products_of_tokens", "batch:4 length:2", "batch:4 length:2", "batch:4 length:2",
    ([1, 4, 2, 1, 4], [1, 4, 2, 1], ()),
  ),
  products(
    "expert_products_of_choices", "batch:4 length:2 choice:2", "batch:4 length:2",
    "batch:4 length:2 choice:2", ([1, 4, 2, 1, 4], [1, 4, 2, 2], ()),
  ),
  products(
    "expert_products_of_owners", "owners:2 batch:4 length:2 choice:2",
    "owners:2 batch:4 length:2 choice:2", "batch:4 length:2",
    ([2, 4, 2, 2, 4], [2, 4, 2, 2], (0, 3)),
  ),
  at_random("moe_top_2_at_random", gating="top_2", second_policy_train="random", dropout_rate=0.3),
  at_random("moe_switch_jitter", gating="switch", switch_policy_train="input_jitter"),
  at_random("moe_switch_sample", gating="switch", switch_policy_train="sample"),
  at_random(
    "moe_switch_max_dropout", gating="switch_max", switch_policy_train="input_dropout",
    group_size=4,
  ),
  at_random(
    "moe_ntlb_second_place", gating="ntlb", use_second_place_expert_prob=0.5,
    use_second_place_expert_prob_temp=0.7,
  ),
  at_random(
    "moe_switch_second_place", gating="switch", use_second_place_expert_prob=0.5, group_size=4
  ),
]  # fmt: skip
