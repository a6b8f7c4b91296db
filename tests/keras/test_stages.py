"""Keras models in stages, beside plain Keras; and what `parallelize` refuses of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import (
  ArgumentError,
  MeshShapeError,
  ShapeError,
  UnsupportedError,
)
from mesh_tensorflow.keras import stages as stages_of_models
from tests.keras.models import assert_same_history, assert_same_variables

layers = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8)).astype(np.float32)
Y = RNG.integers(0, 4, 32)
FIT: dict[str, Any] = dict(batch_size=16, epochs=2, shuffle=False, verbose=0)


def blocks(dropout: float = 0.0, normalization: Any = layers.LayerNormalization) -> keras.Model:
  """Residual blocks, with a skip connection from the first layer to the last."""
  keras.utils.set_random_seed(1)
  inputs = keras.Input((8,))
  first = h = layers.Dense(16, activation="gelu", name="first")(inputs)
  for i in range(2):
    r = normalization(name=f"norm{i}")(h)
    r = layers.Dense(16, activation="relu", kernel_regularizer="l2", name=f"block{i}")(r)
    h = h + layers.Dropout(dropout, seed=i, name=f"drop{i}")(r)
  return keras.Model(inputs, layers.Dense(4, name="last")(h + first), name="net")


def compiled(model: keras.Model, optimizer: Any = None, **kwargs: Any) -> keras.Model:
  """A model for classes, compiled; AdamW changes weights before it looks at gradients."""
  optimizer = optimizer or keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=1.0)
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(optimizer, **{"loss": loss, "metrics": ["accuracy"], **kwargs})
  return model


def pipeline(kind: Any, count: int, schedule: str = "1f1b", shape: str = "rows:1") -> Any:
  """A mesh implementation of several stages."""
  store = mtf.VariableStore()
  size = mtf.convert_to_shape(shape).size
  first, *others = [
    kind(
      shape,
      "batch:rows",
      [f"/device:CPU:{i}" for i in range(k * size, (k + 1) * size)],
      variable_store=store,
    )
    for k in range(count)
  ]
  return first.with_stages(others, schedule)


def check_fit(
  make: Callable[[], keras.Model], parallel: Any, tolerance: float = 1e-5, examples: int = 32
) -> None:
  """Trains on the stages and in Keras: losses, metrics, weights, slots and predictions."""
  expected = make()
  given: dict[str, Any] = {"validation_data": (X[:16], Y[:16]), **FIT}
  history = expected.fit(X[:examples], Y[:examples], **given)
  found = parallel.fit(X[:examples], Y[:examples], **given)
  assert_same_history(found, history, tolerance)
  assert_same_variables(parallel.model, expected)
  outputs = parallel.predict(X, verbose=0), expected.predict(X, verbose=0)
  np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("kind", "count", "schedule"),
  [
    (mtf.PlacementMeshImpl, 2, "1f1b"),
    (mtf.SimdMeshImpl, 2, "zero_bubble"),
    pytest.param(mtf.PlacementMeshImpl, 4, "gpipe", marks=pytest.mark.long),
    pytest.param(mtf.PlacementMeshImpl, 4, "zero_bubble", marks=pytest.mark.long),
    pytest.param(mtf.SimdMeshImpl, 4, "1f1b", marks=pytest.mark.long),
    pytest.param(mtf.SimdMeshImpl, 2, "gpipe", marks=pytest.mark.long),
  ],
)
def test_fit(kind: Any, count: int, schedule: str, cpu_devices: list[str]) -> None:
  shape = "rows:2" if schedule != "zero_bubble" else "rows:1"
  impl = pipeline(kind, count, schedule, shape)
  # Of an epoch's last batch, which is smaller, there is a program of its own.
  examples = 20 if count == 2 else 32
  parallel = mtf.keras.parallelize(compiled(blocks()), impl)
  check_fit(lambda: compiled(blocks()), parallel, examples=examples)


def test_a_mesh_shape(cpu_devices: list[str]) -> None:
  parallel = mtf.keras.parallelize(
    compiled(blocks()), "rows:2", "batch:rows", stages=["block1"], microbatches=4
  )
  assert parallel.stages is None
  check_fit(lambda: compiled(blocks()), parallel)
  assert parallel.stages == ["block1"]
  devices = {v.name: v.slices[0].device[-1] for v in parallel.mesh_impl.variable_store}
  for name, device in [
    ("first/kernel", "0"),
    ("norm1/gamma", "0"),
    ("block1/kernel", "2"),
    ("last/bias", "2"),
    ("accuracy/total", "2"),
    ("adam_w/first_kernel_momentum", "0"),
    ("adam_w/norm1_gamma_velocity", "0"),
    ("adam_w/block1_kernel_momentum", "2"),
    ("adam_w/last_bias_velocity", "2"),
  ]:
    assert devices[name] == device, name
  assert "stage1" in str(parallel.describe())


def test_one_microbatch_takes_everything(cpu_devices: list[str]) -> None:
  """Batch statistics and a loss that is a sum are those of the whole batch."""

  def make() -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    optimizer = keras.optimizers.SGD(0.001, momentum=0.9)
    return compiled(blocks(normalization=layers.BatchNormalization), optimizer, loss=loss)

  parallel = mtf.keras.parallelize(make(), "rows:1", "", stages=2, microbatches=1)
  check_fit(make, parallel, 1e-4)


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.long)])
def test_dropout_is_that_of_the_same_microbatches_on_one_mesh(
  stages: int, cpu_devices: list[str]
) -> None:
  losses = []
  for count in (None, stages):
    parallel = mtf.keras.parallelize(
      compiled(blocks(0.5)), "rows:1", "", stages=count, microbatches=4
    )
    losses.append(parallel.fit(X, Y, **FIT).history["loss"])
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
  without = compiled(blocks()).fit(X, Y, **FIT).history["loss"]
  assert abs(losses[0][0] - without[0]) > 1e-3


def test_microbatches_draw_different_numbers(cpu_devices: list[str]) -> None:
  keras.utils.set_random_seed(1)
  model = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5, seed=1), layers.Dense(1)])
  model.layers[-1].kernel.assign(np.ones([8, 1]))
  model.compile("sgd", lambda _, y: y)
  ones = np.ones([8, 8], np.float32)
  state = model.layers[0].seed_generator.state.numpy().copy()
  parallel = mtf.keras.parallelize(model, "rows:1", "", microbatches=8)
  model.optimizer.learning_rate = 0.0
  losses = np.array([parallel.train_on_batch(ones, ones[:, :1]) for _ in range(3)])
  # The sum of an example is twice the number of those that are kept, and so were the mean of equal
  # ones.
  assert np.any(np.abs(losses / 2 - np.round(losses / 2)) > 1e-3)
  assert (model.layers[0].seed_generator.state.numpy() - state).tolist() == [0, 3]


class Block(layers.Layer):
  """A residual block, with layers in it."""

  def __init__(self, **kwargs: Any):
    super().__init__(**kwargs)
    self.inner = layers.Dense(8, activation="tanh")
    self.outer = layers.Dense(8)

  def build(self, shape: Any) -> None:
    self.inner.build(shape)
    self.outer.build(shape)

  def call(self, x: Any) -> Any:
    return x + self.outer(self.inner(x))


class Subclassed(keras.Model):
  """Layers that are made in another order than they are called in, one of them twice."""

  def __init__(self) -> None:
    super().__init__(name="net")
    self.head = layers.Dense(4, name="head")
    self.blocks = [Block(name=f"block{i}") for i in range(3)]
    self.shared = layers.Dense(8, name="shared")

  def call(self, x: Any) -> Any:
    x = self.shared(x)
    for block in self.blocks:
      x = block(x)
    return self.head(self.shared(x))


def subclassed() -> keras.Model:
  keras.utils.set_random_seed(1)
  return compiled(Subclassed(), keras.optimizers.Adam(0.01, epsilon=1e-3))


def nested() -> keras.Model:
  keras.utils.set_random_seed(1)
  inner = keras.Sequential([keras.Input((8,)), Block(name="a"), Block(name="b")], name="inner")
  outer = [keras.Input((8,)), inner, layers.ReLU(name="relu"), layers.Dense(4, name="head")]
  return compiled(keras.Sequential(outer, name="net"), keras.optimizers.Adam(0.01, epsilon=1e-3))


@pytest.mark.parametrize(
  ("make", "stages", "cut"),
  [
    pytest.param(subclassed, 2, None, marks=pytest.mark.long),
    (subclassed, ["block1", "head"], ["block1", "head"]),
    (nested, ["b", "relu"], ["b", "relu"]),
  ],
)
def test_kinds_of_models(make: Any, stages: Any, cut: Any, cpu_devices: list[str]) -> None:
  parallel = mtf.keras.parallelize(make(), "rows:1", "", stages=stages)
  check_fit(make, parallel, 2e-5)
  assert parallel.stages is not None
  assert cut is None or parallel.stages == cut


def two_of_all() -> keras.Model:
  """Two inputs, two outputs, two losses, metrics of each."""
  keras.utils.set_random_seed(1)
  a, b = keras.Input((8,), name="a"), keras.Input((3,), name="b")
  h = layers.Dense(8, activation="relu", name="one")(a)
  h = layers.Concatenate(name="both")([h, b])
  first = layers.Dense(1, name="first")(h)
  h = layers.Dense(8, activation="relu", name="two")(h)
  h = layers.Concatenate(name="again")([h, b])
  model = keras.Model({"a": a, "b": b}, {"u": first, "v": layers.Dense(2, name="second")(h)})
  model.compile(
    keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    {"u": "mse", "v": "mae"},
    loss_weights={"u": 2.0, "v": 0.5},
    metrics={"u": ["mae"]},
    weighted_metrics={"v": ["mse"]},
  )
  return model


def test_two_inputs_two_outputs_and_sample_weights(cpu_devices: list[str]) -> None:
  inputs = {"a": X[:32], "b": X[:32, :3]}
  targets = {"u": X[:32, :1], "v": X[:32, 1:3]}
  weights = {"u": RNG.random(32).astype(np.float32), "v": RNG.random(32).astype(np.float32)}
  arguments: dict[str, Any] = {**FIT, "sample_weight": weights}
  history = two_of_all().fit(inputs, targets, **arguments)
  parallel = mtf.keras.parallelize(two_of_all(), "rows:2", "batch:rows", stages=["two"])
  assert_same_history(parallel.fit(inputs, targets, **arguments), history, 2e-5)
  assert parallel.predict(inputs, verbose=0)["v"].shape == (32, 2)


def masked(reduction: str, **kwargs: Any) -> keras.Model:
  """Two outputs with masks of their own: padded tokens, and steps of zeros."""
  keras.utils.set_random_seed(1)
  tokens, steps = keras.Input((5,), name="tokens"), keras.Input((6, 3), name="steps")
  x = layers.Embedding(4, 8, mask_zero=True, name="table")(tokens)
  x = layers.Dense(4, name="u")(layers.Dense(8, activation="relu", name="one")(x))
  y = layers.Dense(1, name="v")(layers.Masking()(steps))
  model = keras.Model([tokens, steps], {"u": x, "v": y}, name="net")
  loss = keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction, **kwargs)
  model.compile(
    keras.optimizers.SGD(0.05, momentum=0.9),
    {"u": loss, "v": "mse"},
    metrics={"u": ["accuracy"]},
    weighted_metrics={"v": ["mae"]},
  )
  return model


@pytest.mark.parametrize(
  ("reduction", "weighted", "stages"),
  [
    ("sum_over_batch_size", False, 2),
    ("mean_with_sample_weight", True, None),
    pytest.param("mean_with_sample_weight", True, 2, marks=pytest.mark.long),
    pytest.param("mean_with_sample_weight", False, 2, marks=pytest.mark.long),
    pytest.param("sum_over_batch_size", True, 2, marks=pytest.mark.long),
    pytest.param("mean", True, 3, marks=pytest.mark.long),
    pytest.param("sum", True, 2, marks=pytest.mark.long),
    pytest.param("sum", False, None, marks=pytest.mark.long),
  ],
)
def test_masked_and_weighted_losses(
  reduction: str, weighted: bool, stages: int | None, cpu_devices: list[str]
) -> None:
  """Each is divided by what the whole batch has; a microbatch of padding only has no part in it."""
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, 4, (8, 5))
  steps = np.where(rng.random((8, 6, 1)) < 0.5, 0, rng.random((8, 6, 3))).astype(np.float32)
  tokens[::4] = 0
  y = {"u": rng.integers(0, 4, (8, 5)), "v": rng.random((8, 6, 1)).astype(np.float32)}
  given: dict[str, Any] = {"x": [tokens, steps], "y": y, "return_dict": True}
  if weighted:
    given["sample_weight"] = {
      "u": rng.random((8, 5)).astype(np.float32),
      "v": rng.random((8, 6)).astype(np.float32),
    }
  model, expected = masked(reduction), masked(reduction)
  parallel = mtf.keras.parallelize(model, "rows:1", "", stages=stages, microbatches=4)
  for _ in range(2):
    logs, right = parallel.train_on_batch(**given), expected.train_on_batch(**given)
    assert logs.keys() == right.keys()
    np.testing.assert_allclose(list(logs.values()), list(right.values()), rtol=1e-5)
  assert_same_variables(model, expected)


@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.long)])
def test_losses_that_ignore_a_class(reduction: str, cpu_devices: list[str]) -> None:
  """Keras gives their values a mask, and the output has none."""

  def make() -> keras.Model:
    of_classes = keras.losses.SparseCategoricalCrossentropy
    return compiled(blocks(), loss=of_classes(True, reduction=reduction, ignore_class=2))

  check_fit(make, mtf.keras.parallelize(make(), "rows:2", "batch:rows", microbatches=2), 2e-5)


@pytest.mark.slow
def test_on_batch_steps_per_execution_and_callbacks(cpu_devices: list[str], tmp_path: Path) -> None:
  expected = compiled(blocks(), steps_per_execution=2)
  model = compiled(blocks(), steps_per_execution=2, jit_compile=True)
  parallel = mtf.keras.parallelize(model, "rows:1", "", stages=2)
  np.testing.assert_allclose(
    parallel.train_on_batch(X[:8], Y[:8]), expected.train_on_batch(X[:8], Y[:8]), rtol=1e-5
  )
  checkpoint = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
  slower = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1))
  history = expected.fit(X, Y, callbacks=[slower], **FIT)
  assert_same_history(parallel.fit(X, Y, callbacks=[checkpoint, slower], **FIT), history, 1e-5)
  np.testing.assert_allclose(
    parallel.evaluate(X, Y, verbose=0), expected.evaluate(X, Y, verbose=0), rtol=1e-5
  )
  # A training goes on without stages, and another one in stages.
  loaded = keras.models.load_model(tmp_path / "2.keras")
  other = mtf.keras.parallelize(keras.models.load_model(tmp_path / "2.keras"), 4, "", stages=4)
  expected.optimizer.learning_rate = loaded.optimizer.learning_rate = 0.01
  other.optimizer.learning_rate = 0.01
  histories = [m.fit(X, Y, **FIT) for m in (expected, loaded, other)]
  assert_same_history(histories[1], histories[0], 1e-5)
  assert_same_history(histories[2], histories[0], 1e-5)
  parallel.set_weights([w * 0 for w in parallel.get_weights()])
  assert not np.any(parallel.predict(X[:4], verbose=0))


@pytest.mark.long
def test_predict_comes_first(cpu_devices: list[str]) -> None:
  parallel = mtf.keras.parallelize(compiled(blocks()), 2, stages=2)
  np.testing.assert_allclose(
    parallel.predict(X, verbose=0), blocks().predict(X, verbose=0), rtol=1e-4, atol=1e-5
  )
  check_fit(lambda: compiled(blocks()), parallel)
  assert "memory" in str(parallel.describe())


@pytest.mark.long
def test_an_automatic_layout_without_microbatches(cpu_devices: list[str]) -> None:
  """Stages one after the other are searched as one mesh; prediction comes before."""
  parallel = mtf.keras.parallelize(compiled(blocks()), 4, stages=2, microbatches=1)
  np.testing.assert_allclose(
    parallel.predict(X, verbose=0), blocks().predict(X, verbose=0), rtol=1e-4, atol=1e-5
  )
  assert parallel.mesh_impl is not None and parallel.mesh_impl.size == 2
  check_fit(lambda: compiled(blocks()), parallel)


@pytest.mark.long
def test_weights_without_gradients(cpu_devices: list[str]) -> None:
  def make() -> keras.Model:
    model = compiled(blocks())
    model.get_layer("block1").trainable = False
    return compiled(model)

  check_fit(make, mtf.keras.parallelize(make(), "rows:1", "", stages=2))


@pytest.mark.parametrize(
  "optimizer",
  [
    pytest.param(lambda: keras.optimizers.Adafactor(0.01), marks=pytest.mark.long),
    pytest.param(
      lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, use_ema=True, amsgrad=True),
      marks=pytest.mark.long,
    ),
    lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5, clipvalue=0.1),
  ],
  ids=["adafactor", "adam", "rmsprop"],
)
@pytest.mark.slow
def test_optimizers(optimizer: Any, cpu_devices: list[str]) -> None:
  parallel = mtf.keras.parallelize(compiled(blocks(), optimizer()), "rows:1", "", stages=2)
  check_fit(lambda: compiled(blocks(), optimizer()), parallel, 1e-4)


# -------------------------------------------------------------------- where it is cut


def test_balanced_runs() -> None:
  balanced = stages_of_models._balanced
  assert balanced([1, 1, 1, 1], 2) == [0, 2]
  assert balanced([5, 1, 1, 1, 1, 1], 2) == [0, 1]
  assert balanced([1, 1, 1, 1, 1, 5], 3) == [0, 2, 5] or balanced([1] * 5 + [5], 3) == [0, 3, 5]
  assert balanced([3, 1], 2) == [0, 1]
  assert balanced([2], 1) == [0]


def test_an_automatic_layout_is_searched_for_stages(cpu_devices: list[str]) -> None:
  """What a stage takes is that of its own layers, as `describe` has it."""
  predicted = []
  for stages in (None, 2):
    # Of a number of devices the shape of the mesh of a stage is searched, too.
    mesh: Any = "rows:2" if stages is None else 4
    parallel = mtf.keras.parallelize(compiled(blocks()), mesh, stages=stages, microbatches=2)
    parallel.train_on_batch(X[:16], Y[:16])
    assert parallel.mesh_impl is not None and parallel.mesh_impl.size == 2
    decision = parallel._programs.decision
    assert decision is not None and decision.choice is not None
    predicted.append(decision.choice.memory)
    if stages:
      plan = parallel.describe().pipeline
      assert plan is not None and plan.microbatches == 2
      assert predicted[-1] == max(s.memory for s in plan.stages)
  assert predicted[1] < 0.9 * predicted[0]


# -------------------------------------------------------------------- what is refused


def test_refused_at_once(cpu_devices: list[str]) -> None:
  def refused(error: Any, message: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=message):
      mtf.keras.parallelize(compiled(blocks()), *args, **kwargs)

  refused(ArgumentError, "stages=0; a model has at least 1", "rows:1", stages=0)
  refused(ArgumentError, "microbatches=0; a batch has at least 1", "rows:1", microbatches=0)
  refused(ArgumentError, "schedule must be one of gpipe", "rows:1", stages=2, schedule="fast")
  refused(ArgumentError, "schedule='gpipe' is that of stages", "rows:1", schedule="gpipe")
  for name in ("stages", "microbatches"):
    refused(ArgumentError, f"{name}=True is no number", "rows:1", **{"stages": 2, name: True})
  refused(MeshShapeError, "3 devices cannot be divided among the 2 stages of", 3, stages=2)
  impl = pipeline(mtf.PlacementMeshImpl, 2)
  refused(ArgumentError, "has 2 stages: give it them", impl, stages=3)
  alone = mtf.PlacementMeshImpl("rows:1", "", cpu_devices[:1])
  refused(ArgumentError, r"has no stages: give it them \(mesh_impl.with_stages", alone, stages=2)

  class Own(keras.Model):
    def train_step(self, data: Any) -> Any:
      return super().train_step(data)

  with pytest.raises(UnsupportedError, match="Own has a train_step of its own"):
    mtf.keras.parallelize(Own(), "rows:1", stages=2)


def test_too_few_devices(cpu_devices: list[str]) -> None:
  parallel = mtf.keras.parallelize(compiled(blocks()), "rows:2", "", stages=16)
  with pytest.raises(MeshShapeError, match=re.escape("stages:16 x devices:2 has 32 processors")):
    parallel.train_on_batch(X[:8], Y[:8])


def one() -> keras.Model:
  return keras.Sequential([keras.Input((8,)), layers.Dense(4, name="only")], name="net")


@pytest.mark.parametrize(
  ("make", "stages", "message"),
  [
    (one, 2, "stages=2, and the model net has 1 layer to cut .*only.* at most stages=1"),
    (blocks, 30, "net has 8 layers .*first, norm0, .*a stage has at least one"),
    (blocks, ["blok1"], "the layer 'blok1', which the model net does not call; its layers are fir"),
    (blocks, ["first"], r"no layer would be in the stage before .* 'first'"),
    (blocks, ["block1", "block0"], r"order of their calls \(block0, block1\)"),
  ],
)
def test_cuts_that_cannot_be(
  make: Any, stages: Any, message: str, cpu_devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  devices = [f"/device:CPU:{i}" for i in range(8)] * 4
  count = stages if isinstance(stages, int) else len(stages) + 1
  mesh = devices[:count]
  parallel = mtf.keras.parallelize(compiled(make()), mesh, "", stages=stages)
  monkeypatch.setattr(type(parallel._programs._mesh), "with_stages", lambda self, impl: impl)
  with pytest.raises(ArgumentError, match=message):
    parallel.train_on_batch(X[:8], Y[:8])


def masked_by_noise() -> keras.Model:
  inputs = keras.Input((5, 8))
  x = layers.Masking()(layers.Dropout(0.5)(inputs))
  return keras.Model(inputs, layers.Dense(4)(x), name="net")


class Total(keras.losses.Loss):
  """A scalar, of which Keras does not know whether it is a sum or a mean."""

  def call(self, y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_pred))


class OwnMetrics(keras.Model):
  def compute_metrics(self, *args: Any, **kwargs: Any) -> Any:
    return {**super().compute_metrics(*args, **kwargs), "one": 1.0}


class Largest(keras.metrics.Metric):
  """Keeps the largest prediction: no sum over microbatches."""

  def __init__(self) -> None:
    super().__init__(name="largest")
    self.value = self.add_weight(name="value", initializer="zeros")

  def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
    self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

  def result(self) -> Any:
    return self.value


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (
      lambda: compiled(blocks(), metrics=[Largest()]),
      "changes largest/value, of a metric, by more than adding .*assign_add.*microbatches=1",
    ),
    (
      lambda: compiled(blocks(normalization=layers.BatchNormalization)),
      "changes norm0/moving_mean by more than adding .*GroupNormalization.*microbatches=1",
    ),
    (
      lambda: compiled(blocks(), loss=Total("Total", "sum")),
      "Total has reduction='sum' of a scalar, .*sum_over_batch_size.* microbatches=1",
    ),
    (
      lambda: compiled(blocks(), keras.optimizers.Adam(gradient_accumulation_steps=4)),
      "gradient_accumulation_steps=4 of the optimizer .* use microbatches=4",
    ),
    (
      lambda: compiled(blocks(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
      "LossScaleOptimizer of the optimizer decides .* bfloat16",
    ),
    (
      lambda: compiled(blocks(), keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=3)),
      "ema_overwrite_frequency=3 of the optimizer decides .* ema_overwrite_frequency=None",
    ),
    (
      lambda: compiled(OwnMetrics(*(lambda m: (m.inputs, m.outputs))(blocks()))),
      "OwnMetrics has a compute_metrics of its own",
    ),
  ],
  ids=[
    "metric",
    "batch statistics",
    "a scalar",
    "accumulation",
    "loss scale",
    "averages",
    "metrics",
  ],
)
def test_refused_at_a_first_batch(make: Any, message: str, cpu_devices: list[str]) -> None:
  parallel = mtf.keras.parallelize(make(), "rows:1", "", stages=2)
  with pytest.raises(UnsupportedError, match=message):
    parallel.train_on_batch(X[:8], Y[:8])


def test_a_mask_that_depends_on_random_numbers(cpu_devices: list[str]) -> None:
  parallel = mtf.keras.parallelize(compiled(masked_by_noise()), "rows:1", "", stages=2)
  with pytest.raises(UnsupportedError, match="mask of an output of net depends on random numbers"):
    parallel.train_on_batch(np.ones([8, 5, 8], np.float32), np.ones([8, 5], np.int32))


def test_a_number_of_microbatches_that_does_not_divide(cpu_devices: list[str]) -> None:
  parallel = mtf.keras.parallelize(
    compiled(blocks()), "rows:2", "batch:rows", stages=2, microbatches=4
  )
  message = "microbatches=4 does not divide the 6 examples .* of 12; .* 3 say, .* multiple of 8"
  with pytest.raises(ShapeError, match=message):
    parallel.train_on_batch(X[:12], Y[:12])
  parallel.train_on_batch(X[:16], Y[:16])
  parallel.train_on_batch(X[:12], Y[:12])  # A smaller one, the last of an epoch say.
  counts = [p.microbatches and p.microbatches.count for p in parallel._programs._made.values()]
  assert counts == [4, 3]
