"""Single facts about optimizers: names, schedules, dtypes, errors, gin."""

from __future__ import annotations

import types

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import optimize
from mesh_tensorflow.errors import ConfigError, GraphError, ShapeError
from mesh_tensorflow.optimize.scalars import evaluate_scalar

Dim = mtf.Dimension


def program(**variables):
  """A graph with float32 variables of ones, given as name="a:4 b:8"."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  ones = mtf.initializers.Ones()
  return mesh, {n: mtf.get_variable(mesh, n, s, initializer=ones) for n, s in variables.items()}


def lower(mesh, impl=None):
  impl = impl or mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""])
  return impl, mtf.Lowering(mesh.graph, {mesh: impl})


def sum_of(*xs):
  total = 0.0
  for x in xs:
    total = total + mtf.reduce_sum(x)
  return total


# -------------------------------------------------------------------------- names and slots


def test_slot_names_and_shapes_of_adafactor():
  mesh, v = program(w="d_model:256 d_ff:512", b="d_ff:512")
  optimize.AdafactorOptimizer(beta1=0.9).minimize(sum_of(*v.values()))
  slots = {x.full_name: x.shape for x in mesh.graph.all_variables if "_slot_" in x.full_name}
  assert list(slots) == ["w_slot_vr", "w_slot_vc", "w_slot_m", "b_slot_v", "b_slot_m"]
  assert slots["w_slot_vr"] == mtf.Shape([Dim("d_model", 256)])
  assert slots["w_slot_vc"] == mtf.Shape([Dim("d_ff", 512)])
  assert not any(x.trainable for x in mesh.graph.all_variables if "_slot_" in x.full_name)


@pytest.mark.parametrize(
  "dims, d0, d1",
  [
    ("d_model:1024 d_ff:4096", "d_ff", "d_model"),
    ("a:128 b:128", "a", "b"),
    ("vocab:32000 d_model:512", "vocab", "d_model"),
    ("heads:200 d:300 e:100", "d", "heads"),
    ("a:128 b:127", None, None),
    ("a:1000", None, None),
    ("stack:1000 a:2000", None, None),
    ("stack:1000 a:300 b:200", "a", "b"),
  ],
)
def test_factored_dims(dims, d0, d1):
  found = optimize.AdafactorOptimizer(stacked_dim_names=["stack"])._factored_dims(
    mtf.convert_to_shape(dims)
  )
  assert (None, None) if found is None else tuple(d.name for d in found) == (d0, d1)
  assert (found is None) == (d0 is None)


def test_slots_are_named_within_the_open_scope():
  mesh, v = program(w="a:4")
  loss = sum_of(*v.values())
  with mtf.variable_scope("sc", graph=mesh.graph):
    optimize.AdamWeightDecayOptimizer(0.1).minimize(loss)
  names = [x.full_name for x in mesh.graph.all_variables]
  assert names == ["w", "sc/w/adam_m", "sc/w/adam_v"]


def test_momentum_slot_has_the_dtypes_of_the_weight():
  mesh, _ = program()
  dtype = mtf.VariableDType(tf.bfloat16, tf.float32, tf.bfloat16)
  w = mtf.get_variable(mesh, "w", "a:4", dtype=dtype, initializer=mtf.initializers.Ones())
  optimize.MomentumOptimizer(0.1, 0.9).minimize(sum_of(w))
  assert mesh.graph.name_to_variable["w_momentum_v"].dtype == dtype


# ------------------------------------------------------------------------- what is updated


def test_no_gradient_warns_and_makes_no_slot(caplog):
  mesh, v = program(w="a:4", unused="a:4")
  optimizer = optimize.AdamWeightDecayOptimizer(0.1)
  with caplog.at_level("WARNING", "mesh_tensorflow"):
    updates = optimizer.minimize(sum_of(v["w"]))
  assert len(updates) == 1
  assert "unused" in caplog.text
  assert "unused/adam_m" not in mesh.graph.name_to_variable


def test_minimize_only_given_variables():
  mesh, v = program(w="a:4", u="a:4")
  optimize.SgdOptimizer(0.25).minimize(sum_of(v["w"], v["u"]), [v["u"].operation])
  impl, _ = lower(mesh)
  np.testing.assert_array_equal(impl.variable_store["w"].numpy(), np.ones(4))
  np.testing.assert_array_equal(impl.variable_store["u"].numpy(), np.full(4, 0.75))


def test_no_variables():
  assert optimize.SgdOptimizer(0.1).apply_grads([], []) == []


def test_reads_happen_before_writes():
  """A tensor computed from a weight before the update keeps its value."""
  mesh, v = program(w="a:4", u="a:4")
  product = v["w"] * v["u"]
  optimize.AdamWeightDecayOptimizer(0.5, weight_decay_rate=0.1).minimize(mtf.reduce_sum(product))
  after = mtf.read_variable(v["w"].operation)

  @tf.function
  def step():
    _, lowering = lower(mesh, impl)
    return [lowering.export_to_tf_tensor(t) for t in (product, v["w"], after)]

  impl, _ = lower(mtf.Mesh(mtf.Graph(), "empty"))
  before = [t.numpy() for t in step()]
  np.testing.assert_array_equal(before[0], np.ones(4))
  np.testing.assert_array_equal(before[1], np.ones(4))
  np.testing.assert_allclose(before[2], impl.variable_store["w"].numpy())
  assert np.all(before[2] < 0.0)


def test_own_optimizer_of_assigns_reads_before_it_writes():
  class Swap(optimize.Optimizer):
    """Each weight becomes the gradient, which depends on the other weight."""

    def apply_grad(self, grad, var):
      slot = mtf.get_variable(var.mesh, f"{var.full_name}_s", var.shape, trainable=False)
      return [mtf.assign(slot, grad), mtf.assign_sub(var, var.value - grad)]

  mesh = mtf.Mesh(mtf.Graph(), "m")
  a = mtf.get_variable(mesh, "a", "x:2", initializer=mtf.initializers.Constant(2.0))
  b = mtf.get_variable(mesh, "b", "x:2", initializer=mtf.initializers.Constant(5.0))
  updates = Swap().minimize(mtf.reduce_sum(a * b))
  assert len(updates) == 2  # One of all slots, one of all weights.
  impl, lowering = lower(mesh)
  assert impl.variable_store["a"].numpy().tolist() == [5.0, 5.0]
  assert impl.variable_store["b"].numpy().tolist() == [2.0, 2.0]
  assert all(op in lowering.operations for op in updates)


def test_update_operations_inside_a_function_are_tf_operations():
  mesh, v = program(w="a:4")
  updates = optimize.AdafactorOptimizer().minimize(sum_of(v["w"]))
  impl, _ = lower(mtf.Mesh(mtf.Graph(), "empty"))
  found = []

  @tf.function
  def step():
    _, lowering = lower(mesh, impl)
    found.extend(lowering.lowered_operation(op) for op in updates)

  step.get_concrete_function()
  assert found and all(isinstance(op, tf.Operation) for op in found)


def test_bfloat16_activations_do_not_round_the_slices():
  for make in (
    lambda: optimize.SgdOptimizer(1.0),
    lambda: optimize.MomentumOptimizer(1.0, 0.0),
    lambda: optimize.AdamWeightDecayOptimizer(
      2.0**-12, 2.0**-20, epsilon=1e-12, beta_1=0.0, beta_2=0.0
    ),
    lambda: optimize.AdafactorOptimizer(learning_rate=2.0**-12),
  ):
    mesh, _ = program()
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
    w = mtf.get_variable(mesh, "w", "a:4", dtype=dtype, initializer=mtf.initializers.Ones())
    make().minimize(mtf.reduce_sum(w) * 2.0**-12)
    impl, _ = lower(mesh)
    change = 1.0 - impl.variable_store["w"].numpy()
    np.testing.assert_allclose(change, np.full(4, 2.0**-12), rtol=1e-3)


@pytest.mark.parametrize(
  "make",
  [
    lambda: optimize.SgdOptimizer(0.25),
    lambda: optimize.MomentumOptimizer(0.25, 0.5),
    lambda: optimize.AdamWeightDecayOptimizer(0.25, 0.0),
    lambda: optimize.AdafactorOptimizer(learning_rate=0.25),
  ],
)
def test_bfloat16_slices(make):
  mesh, _ = program()
  w = mtf.get_variable(mesh, "w", "a:4", dtype=tf.bfloat16, initializer=mtf.initializers.Ones())
  make().minimize(mtf.reduce_sum(w))
  impl, _ = lower(mesh)
  expected = 1.0 - 0.25 * (0.1 / 0.001**0.5 if "Adam" in type(make()).__name__ else 1.0)
  np.testing.assert_allclose(impl.variable_store["w"].numpy().astype(float), expected, rtol=1e-2)


def test_excluded_from_weight_decay():
  optimizer = optimize.AdamWeightDecayOptimizer(0.1, 1.0, exclude_from_weight_decay=["^b", "norm"])
  _, v = program(w="a:4", b="a:4", layer_norm="a:4", wb="a:4")
  assert [n for n, x in v.items() if optimizer._decays(x.operation)] == ["w", "wb"]


def test_excluded_from_parameter_scale():
  optimizer = optimize.AdafactorOptimizer(exclude_from_parameter_scale=["bias", "a.b"])
  _, v = program(w="a:4", my_bias_1="a:4", axb="a:4")
  scaled = [n for n, x in v.items() if optimizer._scale_dims(x.operation) is not None]
  assert scaled == ["w", "axb"]


# ------------------------------------------------------------------------------- schedules


def test_adafactor_decay_rate_pow():
  rate = optimize.adafactor_decay_rate_pow()
  np.testing.assert_allclose(
    [rate(t) for t in (0, 1, 9)], [0.0, 0.42565, 0.84151], rtol=1e-4, atol=1e-7
  )
  assert float(optimize.adafactor_decay_rate_pow(offset=10)(9)) == -np.inf
  assert np.isnan(optimize.adafactor_decay_rate_pow(offset=10)(5))


def test_adafactor_decay_rate_adam():
  rate = optimize.adafactor_decay_rate_adam(0.9)
  expected = [0.9 * (1 - 0.9**t) / (1 - 0.9 ** (t + 1)) for t in range(5)]
  np.testing.assert_allclose([rate(t) for t in range(5)], expected, rtol=1e-5)


def test_default_learning_rate_of_adafactor():
  lr = optimize.AdafactorOptimizer()._learning_rate
  np.testing.assert_allclose([lr(t) for t in (0, 9998, 20000)], [0.01, 0.01, 0.0070711], rtol=1e-4)
  unscaled = optimize.AdafactorOptimizer(multiply_by_parameter_scale=False)._learning_rate
  np.testing.assert_allclose(unscaled(0), 0.0005, rtol=1e-5)
  gin.bind_parameter("mesh_tensorflow.layers.unit_scaling_convention.value", True)
  unscaled = optimize.AdafactorOptimizer(multiply_by_parameter_scale=False)._learning_rate
  np.testing.assert_allclose(unscaled(0), 0.01, rtol=1e-5)


@pytest.mark.parametrize(
  "lr",
  [
    0.25,
    np.float32(0.25),
    lambda mesh: tf.constant(0.25),
    lambda mesh: tf.Variable(0.25),
    lambda mesh: mtf.constant(mesh, 0.25),
    lambda mesh: lambda step: 0.25,
    lambda mesh: lambda step: mtf.to_float(step) * 0.25 + 0.25,
    lambda mesh: lambda step: tf.constant(0.25),
  ],
)
@pytest.mark.parametrize("name", ["SgdOptimizer", "AdamWeightDecayOptimizer"])
def test_kinds_of_learning_rates(name, lr):
  mesh, v = program(w="a:4")
  optimizer = getattr(optimize, name)(lr(mesh) if callable(lr) else lr)
  optimizer.minimize(sum_of(v["w"]))
  impl, _ = lower(mesh)
  change = 1.0 - impl.variable_store["w"].numpy()
  np.testing.assert_allclose(change, 0.25 if "Sgd" in name else 0.25 * 0.1 / 0.001**0.5, rtol=1e-4)


def test_a_schedule_is_evaluated_once_for_all_weights():
  calls = []

  def schedule(step):
    calls.append(step)
    return 0.1

  _, v = program(w="a:4", u="a:4", x="a:4")
  optimize.SgdOptimizer(schedule).minimize(sum_of(*v.values()))
  assert len(calls) == 1


def test_wrong_scalars():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  with pytest.raises(ShapeError, match="learning_rate must be a scalar.*a=4"):
    evaluate_scalar(mtf.zeros(mesh, "a:4"), mesh, "learning_rate")
  with pytest.raises(ShapeError, match="scalar"):
    evaluate_scalar(tf.zeros([2]), mesh, "learning_rate")
  with pytest.raises(ConfigError, match="learning_rate must be a number.*'fast'"):
    evaluate_scalar("fast", mesh, "learning_rate")


def test_global_step_is_the_graphs_or_a_variable():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  with mtf.variable_scope("somewhere", graph=mesh.graph):
    step = optimize.get_global_step(mesh)
  assert step is optimize.get_global_step(mesh)
  assert (step.dtype, step.shape.ndims) == (tf.int64, 0)
  assert mesh.graph.name_to_variable["global_step"].outputs[0] is step
  assert not mesh.graph.trainable_variables
  mesh.graph.global_step = mtf.constant(mesh, 3, dtype=tf.int32)
  assert optimize.get_global_step(mesh) is mesh.graph.global_step


def test_global_step_variable_drives_adafactor():
  impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""])
  for step in range(3):
    mesh, v = program(w="a:4")
    optimize.AdafactorOptimizer().minimize(sum_of(v["w"]))
    lower(mesh, impl)
    assert impl.variable_store["global_step"].numpy() == step + 1


# ------------------------------------------------------------------ several learning rates


def changes(optimizer, **variables):
  mesh, v = program(**variables)
  optimizer.minimize(sum_of(*v.values()))
  impl, _ = lower(mesh)
  return {n: float(1.0 - impl.variable_store[n].numpy().mean()) for n in variables}, mesh


@pytest.mark.parametrize(
  "name, arguments",
  [
    ("AdamWithMultiLRSchedule", dict(beta_1=0.0, beta_2=0.0)),
    ("AdafactorWithMultiLRSchedule", dict()),
  ],
)
def test_first_match_decides(name, arguments):
  make = getattr(optimize, name)
  optimizer = make(
    variable_search=["prompt", "norm$", "p"],
    alt_lr_schedules=[[0.5, 0.5], None, [lambda step, total: mtf.to_float(step) + total, 0.0]],
    learning_rate=0.125,
    **arguments,
  )
  found, mesh = changes(optimizer, prompt="a:4", norm="a:4", p="a:4", w="a:4")
  expected = {"prompt": 0.25, "norm": 0.125, "p": 0.0, "w": 0.125}
  for n in found:
    np.testing.assert_allclose(found[n], expected[n], rtol=1e-4, atol=1e-6)
  assert any("alt_learning_rate" in op.name for op in mesh.graph.operations)
  without = make(learning_rate=0.125, **arguments)
  np.testing.assert_allclose(changes(without, prompt="a:4")[0]["prompt"], 0.125, rtol=1e-4)


def test_multi_lr_needs_a_schedule_for_each_regex():
  with pytest.raises(ConfigError, match="variable_search has 2.*1"):
    optimize.AdamWithMultiLRSchedule(["a", "b"], [None], learning_rate=0.1)


def test_product_learning_rate():
  assert optimize.product_learning_rate(5, 100, factors=[2.0, 0.25]) == 0.5
  lr = optimize.product_learning_rate(
    5, 100, factors=[0.5, lambda step, total: step / total], offset=1
  )
  assert lr == 0.5 * 4 / 99


def test_product_of_tensors():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  step = mtf.constant(mesh, 4, dtype=tf.int64)
  lr = optimize.product_learning_rate(
    step, 8, factors=[lambda s, t: tf.constant(0.5), lambda s, t: mtf.to_float(s) / t]
  )
  _, lowering = lower(mesh)
  assert float(lowering.export_to_tf_tensor(lr)) == 0.25


def test_compute_lr_for_step_binds_train_steps():
  gin.bind_parameter("mesh_tensorflow.optimize.compute_lr_for_step.train_steps", 10)
  normal, product = optimize.compute_lr_for_step([None, [lambda step, total: step / total]], 0.3)
  assert normal == 0.3
  assert product(5) == 0.5


# ------------------------------------------------------------------------ hparams, gin, errors


def hparams(**kwargs):
  prefix = "optimizer_adafactor_"
  values = dict(
    decay_type="pow",
    memory_exponent=0.8,
    multiply_by_parameter_scale=False,
    beta1=0.5,
    clipping_threshold=2.0,
    factored=False,
    beta2=0.9,
  )
  values.update(kwargs)
  return types.SimpleNamespace(
    optimizer=kwargs.get("optimizer", "Adafactor"), **{prefix + k: v for k, v in values.items()}
  )


def test_optimizers_from_hparams():
  assert optimize.make_optimizer(hparams(optimizer="SGD"), 0.5).lr == 0.5
  made = optimize.make_optimizer(hparams(), 0.5)
  assert (made._learning_rate, made._beta1, made._clipping_threshold) == (0.5, 0.5, 2.0)
  assert (made._factored, made._multiply_by_parameter_scale) == (False, False)
  np.testing.assert_allclose(made._decay_rate(1), 0.42565, rtol=1e-4)
  made = optimize.make_optimizer(hparams(decay_type="Adam"), 0.5)
  np.testing.assert_allclose(made._decay_rate(1), 0.9 * 0.1 / 0.19, rtol=1e-4)
  with pytest.raises(ConfigError, match="'Rmsprop' is not one of SGD, Adafactor"):
    optimize.make_optimizer(hparams(optimizer="Rmsprop"), 0.5)
  with pytest.raises(ConfigError, match="decay_type 'x' is not one of"):
    optimize.make_optimizer(hparams(decay_type="x"), 0.5)


@pytest.mark.parametrize(
  "name",
  [
    "SgdOptimizer",
    "MomentumOptimizer",
    "AdamWeightDecayOptimizer",
    "AdafactorOptimizer",
    "AdafactorWithMultiLRSchedule",
    "AdamWithMultiLRSchedule",
    "adafactor_decay_rate_pow",
    "product_learning_rate",
    "compute_lr_for_step",
  ],
)
def test_gin_names(name):
  assert gin.get_configurable(f"mesh_tensorflow.optimize.{name}")


def test_gin_configures_an_optimizer():
  gin.parse_config("""
    optimize.MomentumOptimizer.momentum = 0.5
    optimize.AdafactorOptimizer.decay_rate = 0.25
  """)
  assert optimize.MomentumOptimizer(0.1).momentum == 0.5
  assert optimize.AdafactorWithMultiLRSchedule()._decay_rate == 0.25
  gin.clear_config()
  with pytest.raises(TypeError, match="momentum"):
    optimize.MomentumOptimizer(0.1)


def test_errors():
  mesh, v = program(w="a:4", u="b:8")
  optimizer = optimize.SgdOptimizer(0.1)
  with pytest.raises(ShapeError, match=r"SgdOptimizer.*variable w .*a=4.*b=8"):
    optimizer.apply_grad(v["u"], v["w"].operation)
  with pytest.raises(GraphError, match="1 gradients for 2 variables"):
    optimizer.apply_grads([v["w"]], [v["w"].operation, v["u"].operation])
  with pytest.raises(GraphError, match="Optimizer defines no method apply_grad"):
    optimize.Optimizer().apply_grad(v["w"], v["w"].operation)


def test_reduce_rms():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.import_tf_tensor(mesh, np.array([[3.0, 4.0], [0.0, 2.0]], "f"), "a:2 b:2")
  y = optimize.reduce_rms(x, reduced_dim=Dim("b", 2))
  _, lowering = lower(mesh)
  np.testing.assert_allclose(lowering.export_to_tf_tensor(y), [12.5**0.5, 2.0**0.5], rtol=1e-6)


def test_minimize_counts_the_global_step():
  """Adafactor's decay rate depends on it: at step 0 the old average is forgotten."""
  impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "a:all", ["", ""])
  optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=0.0, factored=False)

  @mtf.function(impl, input_signature=[mtf.TensorSpec([("a", 4)])])
  def step(x):
    w = mtf.get_variable(x.mesh, "w", x.shape, initializer=mtf.initializers.Zeros())
    optimizer.minimize(mtf.reduce_sum(w * x))
    return w

  for size in (1.0, 3.0):
    step(tf.fill([4], size))
  assert impl.variable_store["global_step"].numpy() == 2
  decay = 1 - 2**-0.8
  want = np.full(4, decay * 1.0 + (1 - decay) * 9.0)
  np.testing.assert_allclose(impl.variable_store["w_slot_v"].numpy(), want, rtol=1e-6)


def test_the_global_step_is_counted_once():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  mtf.optimize.get_global_step(mesh)
  assert len(mtf.optimize.count_global_step(graph)) == 1
  assert mtf.optimize.count_global_step(graph) == []
  other = mtf.Graph()
  other.global_step = mtf.constant(mtf.Mesh(other, "m"), 7, dtype=tf.int64)
  assert mtf.optimize.count_global_step(other) == []


def test_the_global_step_is_counted_also_where_nothing_reads_it():
  impl = mtf.SimdMeshImpl("", "")

  @mtf.function(impl, input_signature=[mtf.TensorSpec([("a", 4)])])
  def step(x):
    w = mtf.get_variable(x.mesh, "w", x.shape)
    loss = mtf.reduce_sum(mtf.square(w * x))
    updates = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
    assert len(updates) == 1  # No variable of its own.
    assert len(mtf.optimize.count_global_step(x.graph)) == 1
    return loss

  for _ in range(3):
    step(tf.ones([4]))
  assert impl.variable_store["global_step"].numpy() == 3


def test_counting_steps_of_an_empty_graph_says_what_is_missing():
  with pytest.raises(mtf.errors.GraphError, match=r"get_global_step\(mesh\)"):
    mtf.optimize.count_global_step(mtf.Graph())
