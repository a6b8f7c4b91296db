"""Features of Keras under each distribution, beside the same program of Keras on one device.

A feature is a function that builds, trains and uses a model; it returns what there is to compare.
Keras' side runs without XLA, which keeps float32 between the operations of a fused loop: in half
precision it differs from Keras without it by more than the mesh does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.keras import layouts as deciding
from tests.importing.comparing import slow_machine
from tests.keras.models import X, Y
from tests.kinds import kept

pytestmark = pytest.mark.usefixtures("enabled")

X, Y = X[:16], Y[:16]
IDS = np.random.default_rng(1).integers(1, 20, (16, 6))
IMAGES = np.random.default_rng(2).normal(size=(16, 6, 6, 4)).astype(np.float32)
FIT = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0}
layers, optimizers = keras.layers, keras.optimizers
Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Feature:
  """A feature.

  Attributes:
    run: builds a model, trains it, and returns named values.
    tolerance: of differences, as a part of the largest number of a value.
    traced: whether Keras has to trace it, too: some gradients have more axes than kernels of single
      operations take.
  """

  run: Callable[[], Values]
  tolerance: float = 1e-5
  traced: bool = False


FEATURES: dict[str, Feature] = {}


def feature(run: Callable[[], Values]) -> Callable[[], Values]:
  FEATURES[run.__name__] = Feature(run)
  return run


def net() -> keras.Model:
  up = layers.Dense(16, activation="gelu", name="up")
  return keras.Sequential([keras.Input((8,)), up, layers.Dense(4, name="down")], name="net")


def compiled(model: keras.Model, optimizer: Any = "adam", **kwargs: Any) -> keras.Model:
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  defaults = {"loss": loss, "metrics": ["accuracy"], "jit_compile": False}
  model.compile(optimizer, **{**defaults, **kwargs})
  return model


def trained(
  model: keras.Model, x: Any = X, y: Any = Y, *, predicts: bool = False, **kwargs: Any
) -> Values:
  """Losses, weights, slots, metrics and perhaps predictions after two more steps."""
  history = model.fit(x, y, **{**FIT, **kwargs}).history
  found: Values = {f"history {name}": values for name, values in history.items()}
  if predicts:
    found["predictions"] = model.predict(x, batch_size=8, verbose=0)
  of_model = {"weight": model.weights, "slot": model.optimizer.variables}
  for what, variables in {**of_model, "metric": model.metrics_variables}.items():
    found.update({f"{what} {i} {v.path}": v.numpy() for i, v in enumerate(variables)})
  return found


# ------------------------------------------------------------------- weights that are not trained


@feature
def lora() -> Values:
  model = net()
  model.layers[0].enable_lora(4)
  return trained(compiled(model, optimizers.Adam(0.05)))


@feature
def lora_after_a_prediction() -> Values:
  """Keras builds the optimizer at the first step of training, not before."""
  model = compiled(net())
  model.predict(X, batch_size=8, verbose=0)
  model.evaluate(X, Y, batch_size=8, verbose=0)
  model.layers[0].enable_lora(4)
  return trained(model)  # To predict is a function of before, which has no adapter.


@feature
def lora_after_training() -> Values:
  model = compiled(net())
  model.fit(X, Y, **FIT)
  model.layers[0].enable_lora(4)
  model.layers[1].trainable = False
  return trained(compiled(model))


@feature
def lora_of_einsum_and_embedding() -> Values:
  einsum = layers.EinsumDense("abc,cd->abd", (None, 8), bias_axes="d", name="up")
  embedding = layers.Embedding(20, 8, name="table")
  ends = [layers.GlobalAveragePooling1D(), layers.Dense(4, name="down")]
  model = keras.Sequential([keras.Input((6,)), embedding, einsum, *ends], name="net")
  einsum.enable_lora(2)
  embedding.enable_lora(2)
  return trained(compiled(model, optimizers.SGD(0.5)), IDS, predicts=True)


@feature
def frozen_between_trainings() -> Values:
  model = compiled(net())
  model.fit(X, Y, **FIT)
  model.layers[0].trainable = False
  compiled(model, optimizers.SGD(0.1, momentum=0.9)).fit(X, Y, **FIT)
  model.layers[0].trainable, model.layers[1].trainable = True, False
  return trained(compiled(model))


@feature
def a_weight_that_is_added_later() -> Values:
  class Scale(layers.Layer):
    def __init__(self) -> None:
      super().__init__()
      self.scale: Any = None

    def call(self, x: Any) -> Any:
      return x if self.scale is None else x * self.scale

  model = keras.Sequential([keras.Input((8,)), Scale(), layers.Dense(4, name="down")], name="net")
  compiled(model).fit(X, Y, **FIT)
  scale = Scale()
  scale.scale = scale.add_weight(shape=(8,), initializer="ones", name="scale")
  head = layers.Dense(4, name="up")
  return trained(
    compiled(keras.Sequential([model, layers.Dense(8), scale, head], name="all")), predicts=True
  )


# -------------------------------------------------------------------------------- number formats


def _sgd() -> Any:
  return optimizers.SGD(0.1)


def of_policy(policy: str, optimizer: Callable[[], Any]) -> Callable[[], Values]:
  def run() -> Values:
    keras.config.set_dtype_policy(policy)
    try:
      return trained(compiled(net(), optimizer()), predicts=True)
    finally:
      keras.config.set_dtype_policy("float32")

  return run


# A few units of the last of 8 bits (bfloat16) or 11 (float16). On one device outputs and gradients
# of kernels are Keras' bit for bit; TensorFlow's gradient of a bias is added up in half precision,
# and here sums of slices are rounded before they are added.
FEATURES["mixed bfloat16"] = Feature(of_policy("mixed_bfloat16", _sgd), 2**-6)
FEATURES["bfloat16"] = Feature(of_policy("bfloat16", _sgd), 2**-6)
# With the scaling of the loss that Keras adds.
FEATURES["mixed float16"] = Feature(of_policy("mixed_float16", _sgd), 2**-9)


@feature
def scaled_losses_that_overflow() -> Values:
  """A step whose gradients are not finite is left out, and the scale is halved."""
  scaled = optimizers.LossScaleOptimizer(optimizers.Adam(0.01), 1024.0, dynamic_growth_steps=1)
  x = X.copy()
  x[9] = np.inf
  found = trained(compiled(net(), scaled, metrics=None), x)
  del found["history loss"]  # Not finite.
  return {name: v for name, v in found.items() if np.isfinite(v).all()}


# ------------------------------------------------------------------------------------- optimizers


def of_optimizer(make: Callable[[], Any], **kwargs: Any) -> Callable[[], Values]:
  return lambda: trained(compiled(net(), make(), **kwargs))


def _decayed() -> Any:
  optimizer = optimizers.AdamW(0.01, weight_decay=0.5)
  optimizer.exclude_from_weight_decay(var_names=["bias"])
  return optimizer


def _cosine() -> Any:
  return optimizers.SGD(optimizers.schedules.CosineDecay(0.1, 4, warmup_target=0.2, warmup_steps=2))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
  "gradient accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
  "accumulation, clipped": lambda: optimizers.SGD(
    0.1, momentum=0.9, gradient_accumulation_steps=2, clipnorm=0.1
  ),
  "averages": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
  "averages, taken over": lambda: optimizers.Adam(
    0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
  ),
  "clipped norms": lambda: optimizers.Adam(0.01, clipnorm=0.01),
  "clipped global norm": lambda: optimizers.AdamW(0.01, global_clipnorm=0.01),
  "one inside of another": lambda: optimizers.LossScaleOptimizer(optimizers.Nadam(0.01)),
  "weight decay": _decayed,
  "schedule": _cosine,
}
FEATURES.update({name: Feature(of_optimizer(make)) for name, make in OPTIMIZERS.items()})
FEATURES["jit_compile"] = Feature(of_optimizer(lambda: "adam", jit_compile=True))


def slots_that_begin_as_large_weights() -> Values:
  """Keras' own `fit` builds the optimizer in the trace of a step, and sets them in each step."""
  large = layers.Dense(32768, name="up")
  model = keras.Sequential([keras.Input((8,)), large, layers.Dense(4, name="down")], name="net")
  compiled(model, optimizers.ScheduleFreeAdamW(0.01, epsilon=1e-3))
  if keras.distribution.distribution() is None:
    model.optimizer.build(model.trainable_variables)
  return trained(model)


if hasattr(optimizers, "ScheduleFreeAdamW"):  # Sums of 32,768 numbers.
  FEATURES["slots that begin as large weights"] = Feature(slots_that_begin_as_large_weights, 1e-4)


# ------------------------------------------------------------------------- ways to make and use one


@feature
def models_one_after_another() -> Values:
  """As KerasTuner tries them, each built in the distribution's scope after a `clear_session`."""
  distribution = keras.distribution.distribution()
  found: Values = {}
  for i, (units, rate) in enumerate([(8, 0.1), (16, 0.01)]):
    keras.utils.clear_session()
    keras.utils.set_random_seed(i)
    with contextlib.nullcontext() if distribution is None else distribution.scope():
      up, down = layers.Dense(units, activation="relu", name="up"), layers.Dense(4, name="down")
      model = compiled(keras.Sequential([up, down], name="net"), optimizers.Adam(rate))
      stop = keras.callbacks.EarlyStopping("val_loss", patience=1)
      of_trial = trained(model, validation_data=(X[:8], Y[:8]), callbacks=[stop])
    found.update({f"{i} {name}": value for name, value in of_trial.items()})
  return found


@feature
def int8() -> Values:
  model = compiled(net())
  model.fit(X, Y, **FIT)
  model.quantize("int8")
  return {"predictions": model.predict(X, batch_size=8, verbose=0)}


@feature
def lora_of_int8() -> Values:
  model = net()
  model.quantize("int8")
  for layer in model.layers:
    layer.enable_lora(2)
  return trained(compiled(model, optimizers.SGD(0.1)), predicts=True)


@feature
def weights_and_slots_that_are_set() -> Values:
  model = compiled(net())
  model.fit(X, Y, **FIT)
  weights = model.get_weights()
  model.fit(X, Y, **FIT)
  model.set_weights(weights)
  for v in model.optimizer.variables[2:]:
    v.assign(0.5 * v)
  model.optimizer.learning_rate = 0.1
  return trained(model)


@feature
def a_clone() -> Values:
  model = compiled(net())
  model.fit(X, Y, **FIT)
  clone = keras.models.clone_model(model)
  clone.set_weights(model.get_weights())
  clone.compile_from_config(model.get_compile_config())
  return trained(clone)


@feature
def a_file() -> Values:
  model = net()
  model.layers[0].enable_lora(4)
  compiled(model).fit(X, Y, **FIT)
  with tempfile.TemporaryDirectory() as folder:
    model.save(pathlib.Path(folder) / "net.keras")
    return trained(keras.models.load_model(pathlib.Path(folder) / "net.keras"), predicts=True)


@feature
def a_subclass() -> Values:
  class Classifier(keras.Model):
    def __init__(self) -> None:
      super().__init__(name="net")
      self.up, self.down = layers.Dense(16, name="up"), layers.Dense(4, name="down")

    def call(self, x: Any, training: bool = False) -> Any:
      self.add_loss(0.01 * keras.ops.mean(x))
      return self.down(keras.ops.tanh(self.up(x)))

  return trained(compiled(Classifier()), predicts=True)


@feature
def two_inputs_and_outputs() -> Values:
  numbers, ids = keras.Input((8,), name="numbers"), keras.Input((6,), name="ids")
  pooled = layers.GlobalAveragePooling1D()(layers.Embedding(20, 8, mask_zero=True)(ids))
  both = layers.concatenate([layers.Dense(16, name="up")(numbers), pooled])
  outputs = {"kind": layers.Dense(4, name="down")(both), "size": layers.Dense(1)(both)}
  model = keras.Model({"numbers": numbers, "ids": ids}, outputs, name="net")
  kinds = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile("sgd", {"kind": kinds, "size": "mse"}, jit_compile=False)
  found = trained(model, {"numbers": X, "ids": IDS}, {"kind": Y, "size": X[:, :1]}, predicts=True)
  predictions = found.pop("predictions")
  return {**found, **predictions}


@feature
def sizes_of_one() -> Values:
  model = keras.Sequential([keras.Input((1,)), layers.Dense(1), layers.Dense(1)], name="net")
  return trained(
    compiled(model, loss="mse", metrics=None), X[:3, :1], X[:3, 1:2], batch_size=1, predicts=True
  )


@feature
def batch_statistics_of_images() -> Values:
  middle = [layers.Conv2D(8, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU()]
  ends = [layers.GlobalAveragePooling2D(), layers.Dense(4, name="down")]
  model = keras.Sequential([keras.Input((6, 6, 4)), *middle, *ends], name="net")
  return trained(compiled(model, "sgd"), IMAGES, predicts=True)


def more_axes_than_kernels_take() -> Values:
  """Of the parts into which reshapes divide two axes, and the examples."""

  def halves(x: Any) -> Any:
    x = keras.ops.where(x > 0, x, 0.0)
    rows = keras.ops.reshape(x, (-1, 2, 2, 2, 2, 16))
    columns = keras.ops.reshape(x, (-1, 16, 2, 2, 2, 2))
    return keras.ops.mean(rows, (1, 3, 5)) + keras.ops.mean(columns, (1, 3, 5))

  up = [layers.Dense(256, name="up"), layers.Reshape((16, 16))]
  ends = [layers.Lambda(halves), layers.Flatten(), layers.Dense(4, name="down")]
  return trained(
    compiled(keras.Sequential([keras.Input((8,)), *up, *ends], name="net"), _sgd()), predicts=True
  )


FEATURES["more axes than kernels take"] = Feature(more_axes_than_kernels_take, traced=True)


@feature
def a_masked_recurrence() -> Values:
  ids = np.where(np.arange(6) < np.resize([6, 3], 16)[:, None], IDS, 0)
  recurrent = layers.Bidirectional(layers.GRU(4))
  table = layers.Embedding(20, 8, mask_zero=True)
  model = keras.Sequential([keras.Input((6,)), table, recurrent, layers.Dense(4)], name="net")
  return trained(compiled(model, optimizers.SGD(0.1)), ids, predicts=True)


@feature
def single_batches() -> Values:
  model = compiled(net(), weighted_metrics=["accuracy"])
  logs = [model.train_on_batch(X[:8], Y[:8]) for _ in range(2)]
  logs.append(model.train_on_batch(X[:8], Y[:8], class_weight={0: 1.0, 1: 2.0, 2: 1.0, 3: 3.0}))
  logs.append(model.train_on_batch(X[:8], Y[:8], sample_weight=np.linspace(0.0, 1.0, 8)))
  model.reset_metrics()
  logs.append(model.test_on_batch(X[:8], Y[:8]))
  return {"logs": np.array(logs), **trained(model)}


# --------------------------------------------------------------------------------------- the test


def devices(n: int = 4) -> list[str]:
  return list(keras.distribution.list_devices()[:n])


def device_mesh(shape: tuple[int, int] = (2, 2)) -> Any:
  names = ("batch", "model")
  return keras.distribution.DeviceMesh(shape, names, devices(shape[0] * shape[1]))


def model_parallel(
  maps: dict[str, Any] | None = None, shape: tuple[int, int] = (2, 2), batch: str = "batch"
) -> Any:
  mesh = device_mesh(shape)
  made = keras.distribution.LayoutMap(mesh)
  for pattern, axes in (maps or {".*up/kernel": (None, "model")}).items():
    made[pattern] = axes
  return keras.distribution.ModelParallel(layout_map=made, batch_dim_name=batch)


DISTRIBUTIONS: dict[str, Callable[[], Any]] = {
  "data": lambda: keras.distribution.DataParallel(devices=devices()),
  "model": model_parallel,
  "auto": lambda: mtf.keras.AutoParallel(devices()),
}


def run_of(name: str, distribution: Any) -> Values:
  keras.backend.clear_session()
  keras.distribution.set_distribution(distribution)
  keras.utils.set_random_seed(0)
  try:
    return FEATURES[name].run()
  finally:
    keras.distribution.set_distribution(None)


ON_ONE_DEVICE: dict[str, Values] = {}
# In `make long`: of each another feature has all that is particular to it.
COVERED = (
  "lora",  # lora_after_training
  "lora_after_a_prediction",  # The same; what a prediction builds: single_batches.
  "bfloat16",  # mixed bfloat16
  "gradient accumulation",  # accumulation, clipped
  "averages",  # averages, taken over
  "clipped norms",  # clipped global norm; of each weight: accumulation, clipped
  "one inside of another",  # scaled_losses_that_overflow
  "a_clone",  # a_file
)


@pytest.mark.parametrize(
  "name", kept(list(FEATURES), [name for name in FEATURES if name not in COVERED])
)
@pytest.mark.parametrize(
  "kind",
  [
    "model",
    pytest.param("data", marks=pytest.mark.long),
    pytest.param("auto", marks=pytest.mark.long),
  ],
)
def test_features(
  kind: str, name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
  plain = deciding.auto_layout
  monkeypatch.setattr(
    deciding,
    "auto_layout",  # Of a machine for which splitting pays.
    lambda *args, **kwargs: plain(*args, **{**kwargs, "machine": slow_machine()}),
  )
  if FEATURES[name].traced:
    request.getfixturevalue("keras_traces")
  if name not in ON_ONE_DEVICE:
    ON_ONE_DEVICE[name] = run_of(name, None)
  steps: list[Any] = []
  run = mtf.keras.programs.Programs._run
  monkeypatch.setattr(
    mtf.keras.programs.Programs, "_run", lambda *args: steps.append(args) or run(*args)
  )
  found, expected = run_of(name, DISTRIBUTIONS[kind]()), ON_ONE_DEVICE[name]
  assert steps  # On the mesh.
  assert list(found) == list(expected)
  for key, value in expected.items():
    value, ours = (np.asarray(v, np.float64) for v in (value, found[key]))
    scale = max(np.max(np.abs(value), initial=0.0), 1e-2)
    np.testing.assert_allclose(
      ours, value, rtol=0, atol=FEATURES[name].tolerance * scale, err_msg=key
    )


def test_a_distribution_that_clear_session_drops_is_told(caplog: pytest.LogCaptureFixture) -> None:
  """As KerasTuner calls it before each trial."""
  keras.distribution.set_distribution(model_parallel())
  with caplog.at_level(logging.WARNING, "mesh_tensorflow"):
    keras.backend.clear_session()
    keras.utils.clear_session()  # There is none any more.
  assert caplog.text.count("clear_session has also dropped the distribution (ModelParallel)") == 1
  assert keras.distribution.distribution() is None


def _of_another_mesh() -> Any:
  layout = keras.distribution.TensorLayout((None, "model"), device_mesh((1, 2)))
  return model_parallel({".*up/kernel": layout})


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (
      lambda: model_parallel({".*up/kernel": (None, "rows")}),
      "Valid axis names: .*Got .*rows",  # Keras' own line.
    ),
    (
      lambda: model_parallel(shape=(1, 3)),
      r"variable net/up/kernel \[8, 16\], and model:3 does not divide 16; give it None, or split",
    ),
    (
      lambda: model_parallel({".*up/kernel": ("model",)}),
      "which has 2 axes; give a mesh axis, or None, for each",
    ),
    (lambda: model_parallel(batch="rows"), "Valid axis names: .*Got .*rows"),
    (_of_another_mesh, "on the mesh batch:1, model:2, and the mesh is .*; give the layout no"),
  ],
)
def test_maps_that_do_not_suit(make: Callable[[], Any], message: str) -> None:
  with pytest.raises(ValueError, match=message) as told:
    keras.distribution.set_distribution(make())
    compiled(net()).train_on_batch(X[:8], Y[:8])
  assert "\n" not in str(told.value).strip()
