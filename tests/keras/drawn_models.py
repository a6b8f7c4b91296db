"""Random Keras models, trained on random meshes and layouts, beside Keras.

`python -m tests.keras.drawn_models --models=50 --seed=3` prints how many gave Keras' losses,
weights and predictions, which gave others, and which ended in an error; `--only=17` runs model 17
of the seed. Each is trained by "auto", on a machine for which splitting pays; by a layout that is
drawn from the names of its dimensions; and in stages, with such a layout and drawn cuts, numbers of
microbatches and schedules.

What differs is compared with what noise of a few units in the last place in the initial weights
does in Keras alone: a weight whose gradient is rounding only is moved by Adam all the same. Models
that draw random numbers draw others in Keras; they are compared with themselves on one device.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.environment.virtual_devices import virtual_cpu_devices
from mesh_tensorflow.keras import layouts, programs
from tests.importing.comparing import slow_machine

MESHES = [
  "r:1", "r:2", "r:2", "r:3", "r:4", "r:2,c:2", "r:2,c:2", "r:2,c:2", "r:1,c:2", "r:2,c:3",
  "r:2,c:4", "r:2,c:2,s:2",
]  # fmt: skip
SIZES = [1, 2, 3, 4, 4, 6, 8]
ACTIVATIONS = [
  None, "relu", "gelu", "tanh", "sigmoid", "softmax", "swish", "elu", "selu", "softplus",
  "leaky_relu", "hard_sigmoid", "mish", "relu6", "softsign", "log_softmax",
]  # fmt: skip
# The largest difference without noise, in units of the largest value of an array, at least of 1.
_TOLERANCE, _NOISE, _TIME_LIMIT, _MOST = 1e-4, 1e-6, 240, 3000
_BATCH = 8
# Of a stage, and how many stages there are of them.
_STAGES = [("r:1", 2), ("r:1", 3), ("r:1", 4), ("r:2", 2), ("r:2", 3), ("r:2,c:2", 2), ("c:3", 2)]


class Unfit(Exception):
  """A layer cannot be here."""


class Draw:
  """Draws a model.

  Args:
    seed: of all that is drawn.

  Attributes:
    random: whether the model draws random numbers in training.
    tables: whether it has embeddings.
    whole: whether its batches cannot be cut into microbatches.
  """

  def __init__(self, seed: Sequence[int]):
    self.rng = np.random.default_rng(seed)
    # The rest of 12 by 8 is a batch of another size.
    self.examples = self.one([8, 8, 8, 16, 12])
    self.random = False
    self.tables = False
    self.whole = False

  def number(self, low: int, high: int) -> int:
    """One from low to high."""
    return int(self.rng.integers(low, high + 1))

  def coin(self, probability: float = 0.5) -> bool:
    return bool(self.rng.random() < probability)

  def one(self, options: Sequence[Any]) -> Any:
    return options[self.number(0, len(options) - 1)]

  def size(self) -> int:
    return int(self.one(SIZES))

  def activation(self) -> Any:
    return self.one(ACTIVATIONS) if self.coin() else None

  def weights(self) -> dict[str, Any]:
    """Settings of a kernel."""
    found: dict[str, Any] = {}
    if self.coin(0.2):
      found["use_bias"] = False
    if self.coin(0.15):
      found["kernel_regularizer"] = self.one(["l2", "l1", keras.regularizers.L1L2(0.01, 0.02)])
    if self.coin(0.1):
      found["activity_regularizer"] = keras.regularizers.L2(0.01)
    if self.coin(0.1):
      found["kernel_constraint"] = self.one([keras.constraints.MaxNorm(0.9), "non_neg"])
    return found


WAYS = ("auto", "by hand", "in stages")
Layer = Callable[[Draw, Any], Any]
LAYERS: dict[str, Layer] = {}


def _layer(*ranks: int) -> Callable[[Layer], Layer]:
  """Registers what adds a layer to a value of one of the ranks (the axis of examples counts)."""

  def register(fn: Layer) -> Layer:
    def checked(draw: Draw, x: Any) -> Any:
      if len(x.shape) not in ranks:
        raise Unfit
      return fn(draw, x)

    LAYERS[fn.__name__.strip("_")] = checked
    return checked

  return register


def _simple(make: Callable[[Draw, Any], Any], name: str, *ranks: int) -> None:
  def fn(draw: Draw, x: Any) -> Any:
    return make(draw, x)(x)

  fn.__name__ = name
  _layer(*ranks)(fn)


def _largest_divisor(n: int, of: Sequence[int]) -> int:
  return max(d for d in of if n % d == 0)


L = keras.layers
_ALL = (2, 3, 4)
for _name, _make, _ranks in [
  ("dense", lambda d, x: L.Dense(d.size(), activation=d.activation(), **d.weights()), _ALL),
  ("dense again", lambda d, x: L.Dense(d.size(), activation=d.activation()), _ALL),
  ("layer norm", lambda d, x: L.LayerNormalization(axis=d.one([-1, list(range(1, len(x.shape)))]),
    epsilon=d.one([1e-3, 1e-1])), _ALL),
  ("group norm", lambda d, x: L.GroupNormalization(
    d.one([n for n in (1, 2, 3, 4, -1) if n < 0 or x.shape[-1] % n == 0])), _ALL),
  ("rms norm", lambda d, x: getattr(L, "RMSNormalization", L.LayerNormalization)(), _ALL),
  ("unit norm", lambda d, x: L.UnitNormalization(), _ALL),
  ("no dropout", lambda d, x: L.Dropout(0.0), _ALL),
  ("activation", lambda d, x: L.Activation(d.one(ACTIVATIONS)), _ALL),
  ("prelu", lambda d, x: L.PReLU(shared_axes=[1] if d.coin(0.3) else None), _ALL),
  ("rescaling", lambda d, x: L.Rescaling(0.5, 0.1), _ALL),
  ("flatten", lambda d, x: L.Flatten(), (3, 4)),
  ("repeat", lambda d, x: L.RepeatVector(d.number(1, 4)), (2,)),
  ("activity", lambda d, x: L.ActivityRegularization(l1=0.01, l2=0.02), _ALL),
  ("average 1", lambda d, x: L.GlobalAveragePooling1D(keepdims=d.coin(0.2)), (3,)),
  ("max 1", lambda d, x: L.GlobalMaxPooling1D(), (3,)),
  ("average 2", lambda d, x: L.GlobalAveragePooling2D(), (4,)),
  ("max 2", lambda d, x: L.GlobalMaxPooling2D(keepdims=d.coin(0.3)), (4,)),
  ("pad 1", lambda d, x: L.ZeroPadding1D(d.one([1, (0, 2)])), (3,)),
  ("pad 2", lambda d, x: L.ZeroPadding2D(d.one([1, ((0, 1), (2, 1))])), (4,)),
  ("crop 1", lambda d, x: L.Cropping1D((1, 0)), (3,)),
  ("crop 2", lambda d, x: L.Cropping2D(((1, 0), (0, 1))), (4,)),
  ("up 1", lambda d, x: L.UpSampling1D(2), (3,)),
  ("up 2", lambda d, x: L.UpSampling2D(2, interpolation=d.one(["nearest", "bilinear"])), (4,)),
  ("resize", lambda d, x: L.Resizing(d.number(2, 6), 4), (4,)),
  ("permute 1", lambda d, x: L.Permute((2, 1)), (3,)),
  ("permute 2", lambda d, x: L.Permute(d.one([(2, 1, 3), (3, 1, 2)])), (4,)),
  ("over time", lambda d, x: L.TimeDistributed(L.Dense(d.size(), d.activation())), (3, 4)),
  ("einsum 1", lambda d, x: L.EinsumDense("abc,cde->abde", (None, 2, d.size()), bias_axes="de"),
    (3,)),
  ("einsum 2", lambda d, x: L.EinsumDense("abcd,cde->abe", (None, d.size())), (4,)),
  ("masking", lambda d, x: L.Masking(0.0), (3,)),
]:  # fmt: skip
  _simple(_make, _name.replace(" ", "_"), *_ranks)


@_layer(2, 3, 4)
def _batch_norm(draw: Draw, x: Any) -> Any:
  draw.whole = True  # Its statistics are those of the batch.
  settings = {"center": draw.coin(0.8), "scale": draw.coin(0.8)}
  return L.BatchNormalization(momentum=draw.one([0.9, 0.5]), **settings)(x)


@_layer(2, 3, 4)
def _dropout(draw: Draw, x: Any) -> Any:
  if not draw.coin(0.4):  # It makes the comparison with Keras impossible.
    raise Unfit
  draw.random = True
  kinds = [L.Dropout, L.GaussianDropout, L.GaussianNoise, L.AlphaDropout]
  if len(x.shape) == 3:
    kinds.append(L.SpatialDropout1D)
  return draw.one(kinds)(draw.one([0.2, 0.5]), seed=draw.one([None, 3]))(x)


@_layer(2, 3, 4)
def _reshape(draw: Draw, x: Any) -> Any:
  n = math.prod(x.shape[1:])
  a = draw.one([d for d in range(1, n + 1) if n % d == 0])
  b = draw.one([d for d in range(1, n // a + 1) if n // a % d == 0])
  shape = [(n,), (a, n // a), (a, b, n // a // b)][draw.number(0, 2)]
  return L.Reshape(shape)(x)


def _convolution(draw: Draw, x: Any, name: str, nd: int) -> Any:
  c, settings = x.shape[-1], draw.weights()
  kernel = draw.one([1, 2, 3]) if draw.coin() else tuple(draw.number(1, 3) for _ in range(nd))
  paddings = ["same", "valid"] + ["causal"] * (name == "Conv1D")
  settings.update(kernel_size=kernel, padding=draw.one(paddings), activation=draw.activation())
  if draw.coin(0.3):
    settings["strides"] = 2
  elif draw.coin(0.2):
    settings["dilation_rate"] = 2
  if name.startswith("Conv") and "Transpose" not in name and draw.coin(0.2):
    settings["groups"] = _largest_divisor(c, [1, 2, 3])
  if not name.startswith("Depthwise"):
    settings["filters"] = draw.size() * settings.get("groups", 1)
  if not name.startswith("Conv"):
    settings["depth_multiplier"] = draw.one([1, 1, 2])
    for key in ("kernel_regularizer", "kernel_constraint"):
      settings.pop(key, None)
  return getattr(L, name)(**settings)(x)


@_layer(3)
def _convolution_1(draw: Draw, x: Any) -> Any:
  names = ["Conv1D", "Conv1D", "SeparableConv1D", "DepthwiseConv1D", "Conv1DTranspose"]
  return _convolution(draw, x, draw.one(names), 1)


@_layer(4)
def _convolution_2(draw: Draw, x: Any) -> Any:
  names = ["Conv2D", "Conv2D", "SeparableConv2D", "DepthwiseConv2D", "Conv2DTranspose"]
  return _convolution(draw, x, draw.one(names), 2)


LAYERS["another convolution 2"] = LAYERS["convolution_2"]


@_layer(3, 4)
def _pool(draw: Draw, x: Any) -> Any:
  name = f"{draw.one(['Max', 'Average'])}Pooling{len(x.shape) - 2}D"
  strides = draw.one([None, 1, 2])
  return getattr(L, name)(draw.number(1, 3), strides, padding=draw.one(["same", "valid"]))(x)


def _cell(draw: Draw, sequences: bool) -> Any:
  settings: dict[str, Any] = {"return_sequences": sequences, "go_backwards": draw.coin(0.2)}
  if draw.coin(0.15):
    settings["unroll"] = True
  if draw.coin(0.2):
    settings["recurrent_dropout"] = 0.0
  kind = draw.one([L.LSTM, L.GRU, L.SimpleRNN])
  if kind is L.GRU and draw.coin(0.3):
    settings["reset_after"] = False
  return kind(draw.size(), **settings)


@_layer(3)
def _recurrent(draw: Draw, x: Any) -> Any:
  layer = _cell(draw, draw.coin())
  if draw.coin(0.3):
    layer = L.Bidirectional(layer, merge_mode=draw.one(["concat", "sum", "mul", "ave"]))
  return layer(x)


LAYERS["another recurrent"] = LAYERS["recurrent"]


@_layer(3)
def _attention(draw: Draw, x: Any) -> Any:
  settings = {"num_heads": draw.one([1, 2, 4]), "key_dim": draw.one([1, 2, 4])}
  kind = L.MultiHeadAttention
  if draw.coin(0.3):
    kind = L.GroupQueryAttention
    settings = {"head_dim": 2, "num_query_heads": 4, "num_key_value_heads": draw.one([1, 2, 4])}
  layer = kind(**settings, use_bias=draw.coin(0.7))
  y = layer(x, x, use_causal_mask=draw.coin())
  return L.Add()([x, y]) if draw.coin() else y


@_layer(3)
def _attention_without_weights(draw: Draw, x: Any) -> Any:
  layer = draw.one([L.Attention, L.AdditiveAttention])(use_scale=draw.coin())
  return layer([x, x, x], use_causal_mask=draw.coin())


@_layer(2, 3, 4)
def _residual(draw: Draw, x: Any) -> Any:
  y = L.Dense(x.shape[-1], activation=draw.activation())(x)
  merge = draw.one([L.Add, L.Multiply, L.Average, L.Maximum, L.Minimum, L.Subtract, L.Concatenate])
  return merge()([x, y])


@_layer(2)
def _dot(draw: Draw, x: Any) -> Any:
  y = L.Dense(x.shape[-1])(x)
  return L.Concatenate()([L.Dot(axes=1, normalize=draw.coin())([x, y]), x])


@_layer(2, 3, 4)
def _shared(draw: Draw, x: Any) -> Any:
  """A layer that is there twice."""
  layer = L.Dense(x.shape[-1], activation="tanh")
  return layer(layer(x))


@_layer(2, 3, 4)
def _nested(draw: Draw, x: Any) -> Any:
  """A model in the model."""
  normalization = draw.one([L.BatchNormalization, L.LayerNormalization])
  draw.whole |= normalization is L.BatchNormalization
  layers = [keras.Input(x.shape[1:]), L.Dense(draw.size(), "relu"), normalization()]
  return keras.Sequential(layers)(x)


@_layer(2, 3, 4)
def _operations(draw: Draw, x: Any) -> Any:
  """Keras' functions outside of layers."""
  return draw.one([
    lambda: x * 0.5 + keras.ops.mean(x, axis=-1, keepdims=True),
    lambda: keras.ops.where(x > 0.1, x, keras.ops.square(x)),
    lambda: keras.ops.concatenate([x, keras.ops.flip(x, axis=1)], axis=1),
    lambda: keras.ops.cumsum(x, axis=-1),
    lambda: keras.ops.clip(x, -0.5, 1.0) - keras.ops.max(x, axis=1, keepdims=True),
    lambda: keras.ops.sort(x, axis=-1),
    lambda: keras.ops.roll(x, 1, axis=1),
  ])()  # fmt: skip


class Penalty(keras.layers.Layer):
  """A loss of a layer's own, and a weight that is assigned in the step."""

  def __init__(self, **kwargs: Any) -> None:
    super().__init__(**kwargs)
    self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

  def call(self, x: Any, training: bool = False) -> Any:
    if training:
      self.add_loss(0.01 * keras.ops.sum(keras.ops.square(x)))
      self.steps.assign_add(1.0)
    return x * 1.0


@_layer(2, 3, 4)
def _penalty(draw: Draw, x: Any) -> Any:
  draw.whole = True  # It is a sum over the examples, and counts batches.
  return Penalty()(x)


def _squared(y: Any, p: Any) -> Any:
  """A loss of a user's own."""
  return keras.ops.mean(keras.ops.square(keras.ops.cast(y, p.dtype) - p), axis=-1)


def _close(y: Any, p: Any) -> Any:
  """A metric of a user's own."""
  return keras.ops.mean(keras.ops.cast(keras.ops.abs(y - p) < 0.5, "float32"), axis=-1)


@dataclasses.dataclass
class Task:
  """A model to be compiled, and data.

  Attributes:
    model: the model.
    compile: compiles one.
    x: its inputs.
    y: its targets.
    weights: of the examples, or None.
    draw: what drew it.
    layers: what was drawn.
  """

  model: keras.Model
  compile: Callable[[keras.Model, bool], None]
  x: Any
  y: Any
  weights: Any
  draw: Draw
  layers: list[str]
  evaluates: bool

  @property
  def fit(self) -> dict[str, Any]:
    """Arguments of `fit`."""
    return {
      "x": self.x, "y": self.y, "sample_weight": self.weights, "batch_size": _BATCH, "epochs": 2,
      "shuffle": False, "verbose": 0,
    }  # fmt: skip


def _inputs(draw: Draw) -> tuple[Any, np.ndarray]:
  """An input, or what is made of it at once, and its values."""
  kind = draw.one(["vector", "sequence", "image", "image", "tokens", "tokens"])
  if kind == "tokens":
    length, ids = draw.size(), draw.one([4, 6, 8, 9])
    x = keras.Input([length], dtype="int32")
    values = draw.rng.integers(0, ids, [draw.examples, length]).astype(np.int32)
    return x, values
  shape = [draw.size()]
  if kind == "sequence":
    shape = [draw.number(1, 6), draw.size()]
  elif kind == "image":
    shape = [draw.one([4, 6, 8, 5]), draw.one([4, 6, 8]), draw.one([1, 2, 3, 4])]
  return keras.Input(shape), draw.rng.normal(size=[draw.examples, *shape]).astype(np.float32)


def _embedded(draw: Draw, x: Any) -> Any:
  """Of tokens a table's rows, or how often each is there."""
  if draw.coin(0.2):
    return L.CategoryEncoding(10, output_mode=draw.one(["multi_hot", "count"]))(x)
  draw.tables = True
  return L.Embedding(draw.one([9, 10, 12]), draw.size(), mask_zero=draw.coin(0.2))(x)


def _deepened(draw: Draw, x: Any, count: int, names: list[str]) -> Any:
  """A value after some layers."""
  options = list(LAYERS)
  for _ in range(count * 6):
    if not count:
      break
    name = draw.one(options)
    try:
      y = LAYERS[name](draw, x)
    except (Unfit, ValueError, TypeError):  # Whatever Keras refuses.
      continue
    if None in y.shape[1:] or not 0 < math.prod(y.shape[1:]) <= _MOST or len(y.shape) > 5:
      continue
    x, count = y, count - 1
    names.append(name)
  return x


def _head(draw: Draw, x: Any, name: str) -> tuple[Any, Any, np.ndarray, Any]:
  """An output, its loss, its targets and its metric."""
  if len(x.shape) > 2 and draw.coin(0.8):
    x = L.Flatten()(x)
  size = draw.one([1, 2, 3, 4])
  kind = draw.one(["numbers", "classes", "one-hot", "binary"])
  shape = [draw.examples, *x.shape[1:-1]]
  rng, losses = draw.rng, keras.losses
  if kind == "numbers":
    y = L.Dense(size, name=name)(x)
    loss = draw.one(["mse", "mae", "huber", "log_cosh", _squared, "cosine_similarity"])
    values = rng.normal(size=[*shape, size]).astype(np.float32)
    return y, loss, values, draw.one(["mae", _close, "mse"])
  if kind == "classes":
    y = L.Dense(size + 1, name=name)(x)
    metric = draw.one(["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    return y, loss, rng.integers(0, size + 1, shape), metric
  if kind == "one-hot":
    y = L.Dense(size + 1, activation="softmax", name=name)(x)
    loss = losses.CategoricalCrossentropy(label_smoothing=draw.one([0.0, 0.1]))
    metric = draw.one(["accuracy", "kl_divergence", keras.metrics.F1Score("macro")])
    if len(shape) > 1:
      metric = "accuracy"
    return y, loss, np.eye(size + 1, dtype=np.float32)[rng.integers(0, size + 1, shape)], metric
  y = L.Dense(size, activation="sigmoid", name=name)(x)
  loss = draw.one([losses.BinaryCrossentropy(), losses.BinaryFocalCrossentropy()])
  values = rng.integers(0, 2, [*shape, size]).astype(np.float32)
  metric = draw.one([keras.metrics.AUC(20), keras.metrics.Precision(), "binary_accuracy"])
  return y, loss, values, metric


def _optimizer(draw: Draw) -> Callable[[], Any]:
  """Makes an optimizer.

  Of repeated ids Keras under TensorFlow clips each alone, and gives Adam and its kin the sum of
  their squares: such optimizers are for models without tables.
  """
  o = keras.optimizers
  schedule = lambda: o.schedules.CosineDecay(0.05, 4)  # noqa: E731
  options: list[Callable[[], Any]] = [
    lambda: o.SGD(0.05),
    lambda: o.SGD(schedule(), momentum=0.9, nesterov=True),
    lambda: o.SGD(0.05, weight_decay=0.01),
    lambda: o.SGD(0.05, use_ema=True, ema_momentum=0.9),
    lambda: o.LossScaleOptimizer(o.SGD(0.05), initial_scale=8.0),
  ]
  if not draw.tables:
    options += [
      lambda: o.Adam(0.01),
      lambda: o.Adam(0.01, amsgrad=True, gradient_accumulation_steps=2),
      lambda: o.AdamW(schedule(), weight_decay=0.1, global_clipnorm=1.0),
      lambda: o.Adafactor(0.05),
      lambda: o.RMSprop(0.01, centered=True, momentum=0.5),
      lambda: o.Adagrad(0.05),
      lambda: o.Adadelta(0.5),
      lambda: o.Adamax(0.01),
      lambda: o.Nadam(0.01),
      lambda: o.Ftrl(0.05),
      lambda: o.Lion(0.001),
      lambda: o.SGD(0.05, clipnorm=0.5),
      lambda: o.SGD(0.05, global_clipnorm=0.5, weight_decay=0.01),
      lambda: o.SGD(0.05, clipvalue=0.05, use_ema=True, ema_momentum=0.9),
    ]
    if hasattr(o, "Lamb"):
      options.append(lambda: o.Lamb(0.01))
  return draw.one(options)


def draw_task(seed: int, number: int) -> Task:
  """A model with its data; the same for the same numbers."""
  draw = Draw([seed, number])
  keras.utils.set_random_seed(number)
  inputs, values, ends, names = [], [], [], []
  for _ in range(draw.one([1, 1, 1, 2, 3])):
    x, value = _inputs(draw)
    inputs.append(x)
    values.append(value)
    if x.dtype == "int32":
      x = _embedded(draw, x)
    ends.append(_deepened(draw, x, draw.number(1, 4), names))
  if len(ends) > 1:
    flat = [L.Flatten()(e) for e in ends]
    ends.append(_deepened(draw, L.Concatenate()(flat), draw.number(0, 2), names))
  outputs, losses, targets, metrics = {}, {}, {}, {}
  for k in range(draw.one([1, 1, 1, 2])):
    end = ends[-1] if k == 0 else draw.one(ends)
    output, loss, target, metric = _head(draw, end, f"head_{k}")
    outputs[f"head_{k}"], losses[f"head_{k}"] = output, loss
    targets[f"head_{k}"], metrics[f"head_{k}"] = target, metric
  optimizer = _optimizer(draw)
  one = len(outputs) == 1
  if one:
    (outputs,), (losses,), (targets,), (metrics,) = (
      list(d.values()) for d in (outputs, losses, targets, metrics)
    )
  weights = None
  if draw.coin(0.3) and one:
    weights = draw.rng.uniform(0, 2, draw.examples).astype(np.float32)
  weighted = draw.coin(0.3)
  frozen = draw.coin(0.15)

  def compile_model(model: keras.Model, eager: bool) -> None:
    if frozen:
      model.layers[len(model.layers) // 2].trainable = False
    copies = keras.tree.map_structure(
      lambda m: type(m).from_config(m.get_config()) if isinstance(m, keras.metrics.Metric) else m,
      metrics,
    )
    kind = "weighted_metrics" if weighted and weights is not None else "metrics"
    given = {kind: [copies] if one else copies}
    model.compile(optimizer(), losses, **given, run_eagerly=eager, jit_compile=False)

  model = keras.Model(inputs if len(inputs) > 1 else inputs[0], outputs, name="net")
  xs = values if len(values) > 1 else values[0]
  return Task(model, compile_model, xs, targets, weights, draw, names, draw.coin(0.3))


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What came of a training.

  Attributes:
    kind: "right", "wrong", "typed", "untyped", or "left out".
    text: the difference, or the error.
    where: mesh and layout.
  """

  kind: str
  text: str = ""
  where: str = ""


Arrays = dict[str, np.ndarray]


def _trained(task: Task, model: keras.Model, run: Any) -> Arrays:
  """What training, evaluation and prediction give, and the weights."""
  history = run.fit(**task.fit).history
  arguments = {k: v for k, v in task.fit.items() if k not in ("epochs", "shuffle")}
  results = run.evaluate(**arguments, return_dict=True) if task.evaluates else {}
  predictions = keras.tree.flatten(run.predict(task.x, batch_size=_BATCH, verbose=0))
  found = {f"fit {k}": np.asarray(v) for k, v in history.items()}
  found.update({f"evaluate {k}": np.asarray(v) for k, v in results.items()})
  found.update({f"predict {i}": p for i, p in enumerate(predictions)})
  found.update({f"weight {i} {v.path}": v.numpy() for i, v in enumerate(model.variables)})
  # Seeds count in Keras' way, and on a mesh in the mesh's.
  return {k: v for k, v in found.items() if "seed_generator" not in k}


def _difference(ours: Arrays, theirs: Arrays, allowed: Arrays) -> str:
  """What differs by more than is allowed."""
  if len(ours) != len(theirs):
    return f"{sorted(ours)} for {sorted(theirs)}"
  for (name, a), (other, b) in zip(ours.items(), theirs.items()):
    if a.shape != b.shape or a.dtype != b.dtype:
      return f"{name}: {a.shape} {a.dtype} for {other} {b.shape} {b.dtype}"
    if not a.size:
      continue
    difference = float(np.max(np.abs(a.astype(np.float64) - b)))
    limit = _TOLERANCE * max(1.0, float(np.max(np.abs(b)))) + 30 * float(allowed.get(name, 0.0))
    if not difference <= limit:
      return f"{name}: {difference:.3g} > {limit:.3g}"
  return ""


class Reference:
  """A model in Keras, with initial weights that all others begin with."""

  def __init__(self, task: Task, device: str):
    self._task, self._device = task, device
    self._initial = task.model.get_weights()
    self._values: dict[int, Arrays] = {}
    self._moved: Arrays | None = None

  def values(self, microbatches: int = 1) -> Arrays:
    """Results of a training.

    Args:
      microbatches: of a batch; a model that draws random numbers draws others in each.
    """
    key = microbatches if self._task.draw.random else 1
    if key not in self._values:
      self._values[key] = self._of(self._task, key)
    return self._values[key]

  def _of(self, task: Task, microbatches: int, noise: float = 0.0) -> Arrays:
    rng = np.random.default_rng(0)
    initial = [
      w * (1 + noise * rng.normal(size=w.shape)).astype(w.dtype) if w.dtype.kind == "f" else w
      for w in self._initial
    ]
    model = self.model(initial)
    self._task.compile(model, not task.draw.random)
    run = model
    if task.draw.random:
      impl = mtf.PlacementMeshImpl("r:1", "", [self._device])
      run = mtf.keras.parallelize(model, impl, microbatches=microbatches)
    return _trained(task, model, run)

  def model(self, initial: Any = None) -> keras.Model:
    """A copy of the model, not compiled."""
    # A layer whose seed is None draws one when it is made: each copy draws the same.
    keras.utils.set_random_seed(0)
    copied = keras.models.clone_model(self._task.model)
    copied.set_weights(self._initial if initial is None else initial)
    return copied

  def difference(self, ours: Arrays, microbatches: int = 1) -> str:
    """What differs by more than noise explains; arguments as `values`."""
    found = _difference(ours, self.values(microbatches), {})
    if not found:
      return ""
    if self._moved is None:
      noisy = self._of(self._task, 1, _NOISE)
      pairs = zip(noisy.items(), self.values().values())
      self._moved = {k: np.max(np.abs(a.astype(np.float64) - b), initial=0) for (k, a), b in pairs}
    return _difference(ours, self.values(microbatches), self._moved)


@contextlib.contextmanager
def _searched_quickly() -> Iterator[None]:
  """Layouts are searched on a machine for which splitting pays, and for a short time."""
  plain = layouts.auto_layout

  def search(program: Any, **kwargs: Any) -> Any:
    return plain(program, **{**kwargs, "machine": slow_machine(), "time_limit": 2.0})

  layouts.auto_layout = search  # type: ignore[assignment]
  try:
    yield
  finally:
    layouts.auto_layout = plain


@contextlib.contextmanager
def _drawn_layouts(rng: np.random.Generator) -> Iterator[None]:
  """Layouts are not searched, but drawn: legal rules over the names that the program has."""
  plain = programs.decide

  def decide(
    kind: str,
    mesh: Any,
    layout: Any,
    imported: Any,
    body: Any,
    signature: Any,
    *rest: Any,
    **say: Any,
  ) -> Any:
    conflicts = layouts._conflicts(layouts._graph(mesh, body, signature))
    rules: dict[str, str] = {}
    wanted = int(rng.integers(1, 9))
    for name in rng.permutation(list(imported.dimensions)).tolist():
      axis = mesh.shape[int(rng.integers(len(mesh.shape)))]
      split = [n for n, a in rules.items() if a == axis.name]
      free = not any(frozenset((name, n)) in conflicts for n in split)
      if free and imported.dimensions[name].size % axis.size == 0 and len(rules) < wanted:
        rules[name] = axis.name
    return plain(kind, mesh, list(rules.items()), imported, body, signature, *rest, **say)

  programs.decide = decide
  try:
    yield
  finally:
    programs.decide = plain


@dataclasses.dataclass(frozen=True)
class Cut:
  """How a model is trained in stages.

  Attributes:
    shape: of the mesh of a stage.
    count: number of stages.
    kind: of the meshes.
    microbatches: of a batch.
    given: further arguments of `parallelize`.
  """

  shape: str = ""
  count: int = 1
  kind: Any = None
  microbatches: int = 1
  given: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def mesh(self, kind: Any, shape: mtf.Shape, devices: Sequence[str]) -> Any:
    """The mesh implementation, with all stages."""
    store, n = mtf.VariableStore(), shape.size
    parts = [list(devices[k * n : (k + 1) * n]) for k in range(self.count)]
    first, *others = [kind(shape, "", part, variable_store=store) for part in parts]
    return first.with_stages(others) if others else first


_NO_CUT = Cut()


def _draw_cut(rng: np.random.Generator, task: Task) -> Cut:
  shape, count = _STAGES[int(rng.integers(len(_STAGES)))]
  size = mtf.convert_to_shape(shape).size
  stages: Any = count
  names = [x.name for x in task.model.layers if not isinstance(x, L.InputLayer)][1:]
  if rng.random() < 0.5 and len(names) >= count - 1:
    stages = [names[i] for i in sorted(rng.choice(len(names), count - 1, replace=False).tolist())]
  options = [1, 2, 4, 8] if size == 1 else [1, 2, 4] if size < 4 else [1, 2]
  # The last batch, of half the size, may have fewer, which then draw other numbers.
  whole = task.draw.whole or (task.draw.random and task.draw.examples % _BATCH > 0)
  microbatches = 1 if whole else int(rng.choice(options))
  kind = mtf.SimdMeshImpl if size * count > 4 or rng.random() < 0.4 else mtf.PlacementMeshImpl
  schedule = ["gpipe", "1f1b", "zero_bubble"][int(rng.integers(3))]
  given = {"stages": stages, "microbatches": microbatches, "schedule": schedule}
  return Cut(shape, count, kind, microbatches, given)


def run(
  seed: int, number: int, devices: Sequence[str], ways: Sequence[str] = WAYS
) -> tuple[str, list[Outcome]]:
  """Trains model `number` of a seed.

  Args:
    seed: the seed.
    number: the number.
    devices: virtual CPUs.
    ways: of `WAYS`.

  Returns:
    What it is, and what came of it.
  """
  rng = np.random.default_rng([seed, number, 1])
  text, outcomes = "", []
  shape = mtf.convert_to_shape(MESHES[int(rng.integers(len(MESHES)))])
  # The program of a placement is as many times as large as there are devices.
  kind = mtf.SimdMeshImpl if shape.size > 4 or rng.random() < 0.3 else mtf.PlacementMeshImpl
  with _time_limit(), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
      task = draw_task(seed, number)
      text = f"{', '.join(task.layers)}"
      reference = Reference(task, devices[0])
      if not all(np.all(np.isfinite(v)) for v in reference.values().values()):
        return text, [Outcome("left out", "not finite")]
    except Exception as e:  # noqa: BLE001 - whatever Keras says
      return text, [Outcome("left out", f"Keras: {type(e).__name__}: {e}")]
    for how in ways:
      parallel, cut = None, _NO_CUT
      if how == "in stages":
        rng = np.random.default_rng([seed, number, 2])
        cut = _draw_cut(rng, task)
        shape = mtf.convert_to_shape(cut.shape)
        kind = cut.kind
      try:
        with _searched_quickly() if how == "auto" else _drawn_layouts(rng):
          model = reference.model()
          task.compile(model, False)
          parallel = mtf.keras.parallelize(model, cut.mesh(kind, shape, devices), **cut.given)
          ours = _trained(task, model, parallel)
        difference = reference.difference(ours, cut.microbatches)
        outcome = Outcome("wrong" if difference else "right", difference)
      except mtf.MeshError as e:
        outcome = Outcome("typed", f"{type(e).__name__}: {e}")
      except Exception as e:  # noqa: BLE001 - that is what is looked for
        outcome = Outcome("untyped", f"{type(e).__name__}: {e}")
      pairs = None if parallel is None or parallel.layout is None else parallel.layout.pairs
      where = f"{how} {shape.to_string} {kind.__name__} {pairs} {cut.given or ''}"
      outcomes.append(dataclasses.replace(outcome, where=where))
  return text, outcomes


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
  def end(*_: Any) -> None:
    raise TimeoutError(f"no end after {_TIME_LIMIT} s")

  before = signal.signal(signal.SIGALRM, end)
  signal.alarm(_TIME_LIMIT)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def main(arguments: Sequence[str]) -> int:
  """Trains models, and prints what came of them; 1 if one is wrong, or ends in no typed error."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--models", type=int, default=50)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--first", type=int, default=0, help="the number of the first model")
  parser.add_argument("--ways", choices=[*WAYS, "all", "either"], default="all")
  parser.add_argument("--only", type=int, help="the number of the only model")
  flags = parser.parse_args(arguments)
  faulthandler.enable()
  devices = virtual_cpu_devices(8)
  counts: collections.Counter[str] = collections.Counter()
  layers: collections.Counter[str] = collections.Counter()
  start = time.monotonic()
  numbers = range(flags.first, flags.first + flags.models)
  for number in [flags.only] if flags.only is not None else numbers:
    ways = {"all": WAYS, "either": [WAYS[number % 3]]}.get(flags.ways, [flags.ways])
    text, outcomes = run(flags.seed, number, devices, ways)
    counts.update(o.kind for o in outcomes)
    layers.update(text.split(", "))
    for o in outcomes:
      if o.kind != "right" or flags.only is not None:
        print(f"--- {number} {o.kind}: {o.text[:1500]}\n  {o.where}\n  {text}", flush=True)
    keras.backend.clear_session()
  seconds = time.monotonic() - start
  print(
    f"seed {flags.seed}, {flags.models} models, {len(layers)} kinds of layers, {seconds:.0f} s: "
    f"{dict(counts)}"
  )
  return 1 if counts["wrong"] or counts["untyped"] else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
