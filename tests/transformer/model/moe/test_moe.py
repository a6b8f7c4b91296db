"""Mixtures of experts: groups, routers, hyperparameters."""

from __future__ import annotations

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import moe
from mesh_tensorflow.transformer.model.moe import groups as moe_groups
from tests.transformer import lm_program as lm
from tests.transformer import moe_program, numpy_moe

D = mtf.Dimension("d_model", 4)
FLOATS = mtf.VariableDType()
ROUTERS = {
  "top_2": moe._top_2_gating,
  "top_n": moe._top_n_gating,
  "switch": moe._switch_gating,
  "switch_max": moe._switch_max_gating,
  "ntlb": moe._ntlb_gating,
  "expert_selection": moe._expert_selection_gating,
}


def hparams(**kwargs):
  return moe.HParams(**{f"moe_{k}": v for k, v in kwargs.items()})


# ------------------------------------------------------------------- groups


def test_split_into_groups():
  cases = {
    (3000, 1024, 1): (2, 1500),
    (1026, 1024, 1): (1, 1026),
    (3000, 1024, 4): (4, 750),
    (10, 3, 2): (10, 1),
    (7, 1024, 1): (1, 7),
  }
  for arguments, expected in cases.items():
    assert moe._split_into_groups(*arguments) == expected
  with pytest.raises(ValueError, match="10 tokens .* size 4"):
    moe._split_into_groups(10, 3, 4)


@pytest.mark.parametrize(
  "layout,mesh,n,expected",
  [
    # Whole groups, if there are enough of them.
    ("batch:r", "r:4", 64, [("batch", 4), ("group", 16)]),
    ("batch:r", "r:2", 64, [("batch", 4), ("group", 16)]),
    # Else parts of each, and else none.
    ("batch:r", "r:8", 64, [("batch_unsplit", 4), ("batch", 16)]),
    ("batch:r", "r:3", 48, [("batch", 3), ("group", 16)]),
    ("batch:r", "r:3", 64, [("batch_unsplit", 4), ("group", 16)]),
    ("", "r:8", 64, [("batch", 4), ("group", 16)]),
    # A layout that is not known may split the batch of 8 into 8.
    (None, None, 64, [("batch_unsplit", 4), ("batch", 16)]),
    (None, None, 128, [("batch", 8), ("group", 16)]),
  ],
)
def test_dimensions_of_groups(layout, mesh, n, expected):
  hints = moe_groups.LayoutHints(layout, mesh)
  dims = moe_groups.token_dims(n, 16, mtf.Dimension("batch", 8), "group", hints)
  assert [(d.name, d.size) for d in dims] == expected


# ------------------------------------------------------------------ routers


def gate(gating, x, kernel, capacity, importance=None, dtype=tf.float32, **options):
  """(dispatch, combine, loss) of a router that returns tensors; axes [groups, tokens, ...]."""
  groups, tokens, d = x.shape
  experts = kernel.shape[-1]
  dims = [("outer_batch", 1), ("batch", groups), ("group", tokens)]
  bag = dict(gating=gating, ntlb_top_k=2)
  for mode in ("train", "eval"):
    bag |= {f"switch_policy_{mode}": "argmax", f"second_policy_{mode}": "all"}
  mesh = mtf.Mesh(mtf.Graph(), "m")

  def imported(a, a_dims):
    return mtf.import_tf_tensor(mesh, np.reshape(a, [s for _, s in a_dims]), a_dims)

  inputs = mtf.cast(imported(x, [*dims, ("d_model", d)]), dtype)
  if importance is not None:
    importance = mtf.cast(imported(importance, dims), dtype)
  E, C = mtf.Dimension("expert_unsplit", experts), mtf.Dimension("expert_capacity", capacity)
  extra = [inputs.shape.dims[-2]] if gating == "expert_selection" else []
  results = ROUTERS[gating](
    inputs, None, E, *extra, C, hparams(**bag | options), True, FLOATS, importance
  )
  for t in results:
    assert t.dtype == dtype
  (variable,) = mesh.graph.all_variables
  assert variable.full_name == f"{gating}_gating/kernel"
  impl = lm.one_device()
  impl.variable_store.get(
    impl, variable.full_name, variable.shape, master_dtype=tf.float32, slice_dtype=tf.float32,
    initializer=mtf.initializers.Constant(kernel), trainable=True,
  )  # fmt: skip
  lowering = mtf.Lowering(mesh.graph, {mesh: impl})
  values = [tf.cast(lowering.export_to_tf_tensor(t), tf.float32).numpy() for t in results]
  names = results[1].shape.dimension_names
  if gating in ("switch_max", "expert_selection"):
    assert names == ["outer_batch", "batch", "expert_unsplit", "expert_capacity", "group"]
    return *(np.moveaxis(v[0], -1, 1) for v in values[:2]), values[2]
  assert [n for n in names if n != "k"] == [*(n for n, _ in dims), E.name, C.name]
  assert ("k" in names) == (gating == "ntlb")
  return *(np.squeeze(v[0], 2) if gating == "ntlb" else v[0] for v in values[:2]), values[2]


@pytest.mark.parametrize("capacity", [1, 3, 7])
@pytest.mark.parametrize("gating", ROUTERS)
def test_routers_fill_slots_as_numpy_does(gating, capacity):
  """Slots run over, and padding takes none."""
  rng = np.random.default_rng(capacity)
  x = rng.normal(size=[3, 8, 4]).astype(np.float32)
  kernel = rng.normal(size=[4, 5]).astype(np.float32)
  # In the last group there is nothing but padding.
  importance = np.array([[1] * 8, [1, 0, 1, 1, 1, 1, 0, 0], [0] * 8], np.float32)
  for given in (None, importance):
    options = dict(n=3) if gating == "top_n" else {}
    combine, loss = numpy_moe.route(gating, x, kernel, capacity, given, **options)
    if given is not None and gating == "expert_selection":
      # Among padding alone, all are equally good: their gates lead nowhere.
      keep = slice(0, 2)
    else:
      keep = slice(None)
    got_dispatch, got, got_loss = gate(gating, x, kernel, capacity, given)
    np.testing.assert_allclose(got[keep], combine[keep], atol=1e-6)
    if gating != "expert_selection":
      np.testing.assert_array_equal(got_dispatch, combine != 0)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    assert (got_dispatch.sum(1) <= 1).all(), "two tokens in one slot"


@pytest.mark.parametrize("gating", ["top_2", "top_n", "switch", "switch_max", "ntlb"])
def test_of_equal_experts_the_first_is_taken_and_of_equal_tokens_too(gating):
  x = np.ones([1, 6, 4], np.float32)
  kernel = np.ones([4, 3], np.float32) * [1.0, 1.0, 0.5]
  _, got, _ = gate(gating, x, kernel.astype(np.float32), 2)
  want, _ = numpy_moe.route(gating, x, kernel, 2, n=3 if gating == "top_n" else 2)
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert got[0, :2, 0].sum() > 0 and got[0, 2:, 0].sum() == 0


@pytest.mark.parametrize("gating", ["top_2", "switch_max"])
def test_gates_of_bfloat16_inputs_are_computed_in_float32(gating):
  rng = np.random.default_rng(0)
  x = tf.cast(rng.normal(size=[2, 8, 4]), tf.bfloat16).numpy().astype(np.float32)
  kernel = rng.normal(size=[4, 5]).astype(np.float32)
  _, got, _ = gate(gating, x, kernel, 3, dtype=tf.bfloat16)
  want, _ = numpy_moe.route(gating, x, kernel, 3)
  np.testing.assert_array_equal(got, tf.cast(want, tf.bfloat16).numpy().astype(np.float32))


@pytest.mark.parametrize("gating", ["top_2", "switch", "switch_max"])
def test_summaries_tell_the_use_of_experts(gating):
  rng = np.random.default_rng(0)
  importance = np.array([[1] * 8, [1, 1, 1, 0, 0, 0, 0, 0]], np.float32)
  x = rng.normal(size=[2, 8, 4]).astype(np.float32)
  mesh = mtf.Mesh(mtf.Graph(), "m")
  dims = [("batch", 2), ("length", 8), D]
  t = mtf.import_tf_tensor(mesh, x, dims)
  nonpadding = mtf.import_tf_tensor(mesh, importance, dims[:2])
  bag = hparams(
    num_experts=3, hidden_size=4, group_size=8, gating=gating, min_expert_capacity=1,
    capacity_factor_train=0.7, second_policy_train="all", switch_policy_train="argmax",
    summaries=True,
  )  # fmt: skip
  moe.transformer_moe_layer_v1(t, D, bag, True, FLOATS, nonpadding=nonpadding)
  impl = lm.one_device()
  lowering = mtf.Lowering(mesh.graph, {mesh: impl})
  got = {name.removeprefix(f"{gating}_gating/"): float(x) for name, x in lowering.scalar_summaries}
  kernel = impl.variable_store[f"{gating}_gating/kernel"].numpy()
  combine, loss = numpy_moe.route(gating, x, kernel, 1, importance)
  number = (combine > 0).sum()
  want = {f"experts/{i}": (combine[:, :, i] > 0).sum() / number for i in range(3)}
  want["aux_loss"] = loss
  want["expert_gate"] = combine.sum() / number
  want["fraction_routed"] = (combine.sum((2, 3)) > 0).sum() / importance.sum()
  assert got == pytest.approx(want, rel=1e-4)


def test_num_microbatches_divides_the_loss():
  x = np.random.default_rng(0).normal(size=[1, 8, 4]).astype(np.float32)

  def program(t):
    options = dict(gating="switch", num_experts=2, switch_policy_train="argmax", z_loss=0.1)
    losses = []
    for n in (None, 1, 4):
      with mtf.variable_scope("layer"):
        _, loss = moe.transformer_moe_layer_v1(
          t, D, hparams(**options), True, FLOATS, num_microbatches=n
        )
      losses.append(loss)
    return losses

  losses = lm.run(lm.one_device(), program, x, names=["batch", "length", "d_model"])
  np.testing.assert_allclose(losses, [losses[0], losses[0], losses[0] / 4], rtol=1e-6)


@pytest.mark.parametrize(
  "mode", ["concat", "concat_stop_grad", "add", "add_stop_grad", "embed_only"]
)
def test_word_embed_modes(mode):
  rng = np.random.default_rng(0)
  x, e = (rng.normal(size=[2, 6, 4]).astype(np.float32) for _ in range(2))
  impl = lm.one_device()

  def program(x, e):
    bag = hparams(
      num_experts=3, hidden_size=4, gating="switch", switch_policy_train="argmax",
      word_embed_mode=mode, group_size=6,
    )  # fmt: skip
    y, loss = moe.transformer_moe_layer_v1(x, D, bag, True, FLOATS, token_embeddings=e)
    (gradient,) = mtf.gradients([mtf.reduce_sum(y)], [e])
    return y, loss, mtf.zeros_like(e) if gradient is None else gradient

  y, loss, gradient = lm.run(impl, program, x, e, names=["batch", "length", "d_model"])
  kernel, wi, wo = (
    impl.variable_store[n].numpy() for n in ("switch_gating/kernel", "wi/kernel", "wo/kernel")
  )
  mixed = {"c": np.concatenate([x, e], -1), "a": x + e, "e": e}[mode[0]]
  assert kernel.shape[0] == mixed.shape[-1]
  combine, want_loss = numpy_moe.route("switch", mixed, kernel, 4)
  want = np.einsum("gse,gsed->gsd", combine.sum(-1), numpy_moe.feed_forward(x, wi, wo))
  np.testing.assert_allclose(y, want, atol=1e-5)
  np.testing.assert_allclose(loss, want_loss * 1e-2, rtol=1e-5)
  assert (gradient != 0).any() == (not mode.endswith("stop_grad"))


def test_two_outputs_for_attention():
  x = np.random.default_rng(0).normal(size=[2, 4, 4]).astype(np.float32)
  impl = lm.one_device()

  def program(x):
    bag = hparams(
      num_experts=2, hidden_size=3, use_experts_attention=True, second_policy_train="all"
    )
    outputs, _ = moe.transformer_moe_layer_v1(
      x, mtf.Dimension("d_model", 6), bag, True, FLOATS, activation=["gelu", "linear"]
    )
    return outputs

  q, k = lm.run(impl, program, x, names=["batch", "length", "d_model"])
  assert q.shape == k.shape == (2, 4, 6)
  assert not np.allclose(q, k)
  shapes = {v.name: [(d.name, d.size) for d in v.shape] for v in impl.variable_store}
  assert sorted(name for name in shapes if name[0] != "_") == [
    "k_wo/kernel", "q_wo/kernel", "top_2_gating/kernel", "wi_0/kernel", "wi_1/kernel",
  ]  # fmt: skip
  assert shapes["q_wo/kernel"] == [("experts", 2), ("expert_hidden", 3), ("d_model", 6)]


# --------------------------------------------------------- hyperparameters


def test_default_hyperparameters():
  bag = moe.HParams(other=1)
  moe.set_default_moe_hparams(bag)
  values = vars(bag)
  assert values.pop("other") == 1
  assert values == dict(
    moe_num_experts=16, moe_loss_coef=1e-2, moe_gating="top_2", moe_capacity_factor_train=1.25,
    moe_capacity_factor_eval=2.0, moe_capacity_factor_second_level=1.0, moe_hidden_size=4096,
    moe_group_size=1024, moe_use_second_place_loss=0, moe_second_policy_train="random",
    moe_second_policy_eval="random", moe_second_threshold_train=0.2,
    moe_second_threshold_eval=0.2,
  )  # fmt: skip


def test_gin_configures_the_layer():
  gin.parse_config("""
    mesh_tensorflow.transformer.moe.MoE1D.num_experts = 32
    MoE1D.moe_gating = "switch"
  """)
  layer = moe.MoE1D(hidden_size=7)
  bag = layer._hparams
  assert (bag.moe_num_experts, bag.moe_gating, bag.moe_hidden_size) == (32, "switch", 7)
  with pytest.raises(ValueError):
    gin.parse_config("MoE2D.expert_x = 2")


@pytest.mark.parametrize(
  "options,message",
  [
    (dict(gating="best"), "'best' is none of top_2, top_n, switch"),
    (dict(second_policy_train="some"), "second_policy_train 'some' is none of all, none"),
    (dict(gating="switch", switch_policy_train="max"), "switch_policy_train 'max' is none of"),
    (dict(word_embed_mode="product"), "word_embed_mode 'product' is not None or one of concat"),
    (dict(word_embed_mode="add"), "needs the embeddings"),
    (dict(gating="top_n", top_n_num_experts_per_token=5), "must be 1 to 4"),
    (
      dict(gating="top_n", top_n_num_experts_per_token=1, use_second_place_loss=True),
      "at least 2, got 1",
    ),
  ],
)
def test_wrong_hyperparameters(options, message):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.zeros(mesh, [("batch", 2), ("length", 4), D])
  with pytest.raises(errors.ConfigError, match=message):
    moe.transformer_moe_layer_v1(x, D, hparams(num_experts=4, **options), True, FLOATS)


def test_two_levels_take_top_2_and_three_or_four_dimensions():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  bag = hparams(expert_x=2, expert_y=2)
  with pytest.raises(errors.ShapeError, match="batch, length, d_model"):
    moe.transformer_moe_layer_v2(mtf.zeros(mesh, [("batch", 2), D]), D, bag, True, FLOATS)
  bag.add_hparam("moe_gating", "switch")
  x = mtf.zeros(mesh, [("batch", 2), ("length", 4), D])
  with pytest.raises(ValueError, match="only top_2"):
    moe.transformer_moe_layer_v2(x, D, bag, True, FLOATS)


def test_no_experts_in_ensembles():
  model = moe_program.make_model(ensemble=2)
  with pytest.raises(NotImplementedError, match="ensemble:2"):
    lm.run(lm.one_device(), lm.loss_program(model), lm.TARGETS)


def test_warning_of_too_few_groups(caplog):
  hints = moe_groups.LayoutHints("batch:r", "r:16")
  for _ in range(2):
    moe_groups.token_dims(160, 16, mtf.Dimension("batch", 16), "group", hints)
  (record,) = caplog.records
  assert "Groups of at most 10 tokens" in record.getMessage()
