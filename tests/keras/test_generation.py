"""`generate` of models like those of keras-hub: a program on the mesh, its KV cache split."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import mesh_tensorflow as mtf
from mesh_tensorflow.importing.imported import Imported
from tests.kinds import kept

BATCH, LENGTH, PROMPT, VOCABULARY, WIDTH, HEADS, SIZE = 4, 12, 3, 20, 16, 4, 6


class Block(keras.layers.Layer):
  """Causal self-attention that reads and writes a KV cache, if it is given one."""

  def __init__(self, **kwargs: Any):
    super().__init__(**kwargs)
    self.query, self.key, self.value = (
      keras.layers.EinsumDense("bld,dhk->blhk", [None, HEADS, SIZE], name=n) for n in "qkv"
    )
    self.out = keras.layers.EinsumDense("blhk,hkd->bld", [None, WIDTH], name="out")

  def call(self, x: Any, cache: Any = None, index: Any = 0) -> Any:
    q, k, v = self.query(x), self.key(x), self.value(x)
    if cache is not None:
      k = ops.slice_update(cache[:, 0], [0, index, 0, 0], k)
      v = ops.slice_update(cache[:, 1], [0, index, 0, 0], v)
    scores = ops.einsum("blhk,bmhk->bhlm", q, k) / SIZE**0.5
    rows = ops.arange(ops.shape(x)[1])[:, None] + index
    hidden = rows < ops.arange(ops.shape(k)[1])[None]
    weights = ops.softmax(ops.where(hidden, -1e9, scores))
    y = x + self.out(ops.einsum("bhlm,bmhk->blhk", weights, v))
    return y if cache is None else (y, ops.stack([k, v], axis=1))


class LanguageModel(keras.Model):
  """A causal language model with the methods of keras-hub's, and no preprocessor."""

  def __init__(self) -> None:
    tokens = keras.Input([None], dtype="int32", name="token_ids")
    embedding = keras.layers.Embedding(VOCABULARY, WIDTH, name="embedding")
    blocks = [Block(name=f"block_{i}") for i in range(2)]
    logits = keras.layers.Dense(VOCABULARY, name="logits")
    x = embedding(tokens)
    for block in blocks:
      x = block(x)
    super().__init__({"token_ids": tokens}, logits(x))
    self.embedding, self.blocks, self.logits = embedding, blocks, logits
    self.temperature: float | None = None
    self.seeds = keras.random.SeedGenerator(7)
    self.generate_function: Any = None

  def compile(self, *args: Any, **kwargs: Any) -> None:
    super().compile(*args, **kwargs)
    self.generate_function = None

  def make_generate_function(self) -> Any:
    if self.generate_function is None:
      self.generate_function = tf.function(self.generate_step)
    return self.generate_function

  def generate(self, inputs: Any, stop_token_ids: Any = None) -> Any:
    function = self.make_generate_function()
    if keras.distribution.distribution() is not None:  # As keras-hub does.
      raise AttributeError("Keras' TensorFlow backend has no distribute_tensor")
    inputs = {name: ops.convert_to_tensor(x) for name, x in inputs.items()}
    found = function(inputs, stop_token_ids=stop_token_ids)
    return {name: ops.convert_to_numpy(x) for name, x in found.items()}

  def with_cache(self, tokens: Any, caches: Any, index: Any) -> tuple[Any, Any]:
    x, made = self.embedding(tokens), []
    for i, block in enumerate(self.blocks):
      x, cache = block(x, cache=caches[:, i], index=index)
      made.append(cache)
    return self.logits(x), ops.stack(made, axis=1)

  def generate_step(self, inputs: Any, stop_token_ids: Any = None) -> Any:
    tokens, mask = inputs["token_ids"], inputs["padding_mask"]
    batch, length = tokens.shape
    _, caches = self.with_cache(tokens, ops.zeros([batch, 2, 2, length, HEADS, SIZE]), 0)
    start = ops.min(ops.sum(ops.cast(mask, "int32"), axis=-1))

    def ends(tokens: Any) -> Any:
      found = [ops.equal(tokens, i) for i in stop_token_ids]
      return ops.logical_and(ops.any(ops.stack(found), axis=0), ops.logical_not(mask))

    def goes_on(tokens: Any, caches: Any, index: Any) -> Any:
      if stop_token_ids is None:
        return ops.convert_to_tensor(True)
      return ops.logical_not(ops.all(ops.any(ends(tokens), axis=-1)))

    def one(tokens: Any, caches: Any, index: Any) -> Any:
      last = ops.slice(tokens, [0, index - 1], [batch, 1])
      logits, caches = self.with_cache(last, caches, index - 1)
      logits = ops.squeeze(logits, axis=1)
      if self.temperature is None:
        chosen = ops.argmax(logits, axis=-1)
      else:
        chosen = keras.random.categorical(logits / self.temperature, 1, seed=self.seeds)[:, 0]
      chosen = ops.where(mask[:, index], tokens[:, index], ops.cast(chosen, tokens.dtype))
      return ops.slice_update(tokens, [0, index], chosen[:, None]), caches, index + 1

    tokens, _, _ = ops.while_loop(
      goes_on, one, (tokens, caches, start), maximum_iterations=length - start
    )
    if stop_token_ids is None:
      return {"token_ids": tokens, "padding_mask": ops.ones_like(tokens, dtype="bool")}
    ended = ops.cast(ends(tokens), "int32")
    over = ops.cumsum(ended, axis=-1) - ended
    return {"token_ids": tokens, "padding_mask": ops.logical_not(ops.cast(over, "bool"))}


def build(temperature: float | None = None) -> LanguageModel:
  keras.utils.set_random_seed(0)
  model = LanguageModel()
  model.temperature = temperature
  model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  return model


def prompts(examples: int = BATCH, lengths: tuple[int, ...] = (PROMPT,)) -> dict[str, np.ndarray]:
  """Token ids, random, and a mask of where there is a prompt."""
  rng = np.random.default_rng(0)
  of_each = np.resize(lengths, examples)
  mask = np.arange(LENGTH) < of_each[:, None]
  tokens = rng.integers(1, VOCABULARY, [examples, LENGTH]).astype(np.int32)
  return {"token_ids": np.where(mask, tokens, 0).astype(np.int32), "padding_mask": mask}


def step_by_step(model: keras.Model, given: dict[str, np.ndarray]) -> np.ndarray:
  """The most probable tokens, all positions computed anew for each, without a cache."""
  tokens, mask = given["token_ids"].copy(), given["padding_mask"]
  for i in range(mask.sum(1).min(), LENGTH):
    logits = np.array(model({"token_ids": tokens}))[:, i - 1]
    tokens[:, i] = np.where(mask[:, i], tokens[:, i], logits.argmax(-1))
  return tokens


def trained(model: Any) -> Any:
  rng = np.random.default_rng(1)
  tokens = rng.integers(1, VOCABULARY, [8, LENGTH]).astype(np.int32)
  targets = np.roll(tokens, -1, 1)
  return model.fit({"token_ids": tokens}, targets, batch_size=4, epochs=2, verbose=0)


# What occurs in the KV cache, and what else there is to split.
RULES = ("batch:r", "block_0/q.1:c", "embedding.vocabulary:c", "block_0/q.1:r", "block_0/q.2:c")
LAYOUTS = ["", "auto", *RULES, "batch:r,block_0/q.1:c", "batch:c,block_0/q.2:r"]


PLACEMENT, SIMD = mtf.PlacementMeshImpl, mtf.SimdMeshImpl
# Each dimension split once, and two on both axes; in a long run each layout on both.
KEPT = [
  ("auto", SIMD),
  (RULES[2], PLACEMENT),
  (RULES[4], PLACEMENT),
  *zip(LAYOUTS[-2:], (SIMD, PLACEMENT)),
]


@functools.cache
def expected() -> tuple[np.ndarray, int, dict[str, np.ndarray]]:
  """Tokens of one device, one at which to stop, and what is generated until it."""
  model, given = build(), prompts(lengths=(3, 5))
  want = model.generate(given)["token_ids"]
  np.testing.assert_array_equal(want, step_by_step(model, given))
  stop = int(want[0, -1])
  return want, stop, model.generate(given, stop_token_ids=[stop])


@pytest.mark.parametrize(
  ("layout", "impl"), kept(list(itertools.product(LAYOUTS, (PLACEMENT, SIMD))), KEPT)
)
def test_tokens_are_those_of_one_device(
  layout: str, impl: type[mtf.MeshImpl], cpu_devices: list[str]
) -> None:
  given, (want, stop, ended) = prompts(lengths=(3, 5)), expected()
  rules = "" if layout == "auto" else layout
  parallel = mtf.keras.parallelize(build(), impl("r:2,c:2", rules, cpu_devices[:4]))
  np.testing.assert_array_equal(parallel.generate(given)["token_ids"], want)
  found = parallel.generate(given, stop_token_ids=[stop])
  for name in ended:
    np.testing.assert_array_equal(found[name], ended[name])


def test_the_cache_is_split(cpu_devices: list[str]) -> None:
  mesh = mtf.PlacementMeshImpl("r:2,c:2", "batch:r,block_0/q.1:c", cpu_devices[:4])
  parallel = mtf.keras.parallelize(build(), mesh)
  parallel.generate(prompts())
  graph = parallel._programs.latest("generate").function.graph
  loop = next(o for o in graph.operations if getattr(o, "inner_operations", None))
  cache = next(x for x in loop.outputs if len(x.shape) == 6)
  whole = {"batch": BATCH, "block_0/q.1": HEADS}
  split = {d.name: d.size for d in cache.shape if d.name in whole}
  assert split == whole
  assert mesh.slice_shape(cache.shape)[0] == BATCH // 2
  assert HEADS // 2 in mesh.slice_shape(cache.shape)


def distributions() -> Iterator[tuple[str, Callable[[], Any]]]:
  devices = keras.distribution.list_devices()[:4]
  mesh = keras.distribution.DeviceMesh((2, 2), ("data", "model"), devices)
  maps = keras.distribution.LayoutMap(mesh)
  maps["block_./[qkv]/kernel"] = (None, "model", None)
  maps["block_./out/kernel"] = ("model", None, None)
  yield "model", lambda: keras.distribution.ModelParallel(layout_map=maps, batch_dim_name="data")
  yield "data", lambda: keras.distribution.DataParallel(devices=devices)
  yield "auto", lambda: mtf.keras.AutoParallel(devices)


@pytest.mark.parametrize(
  ("kind", "temperature"),
  [
    ("model", 0.7),
    *(
      pytest.param(*case, marks=pytest.mark.long)
      for case in [("model", None), ("data", None), ("data", 0.7), ("auto", None), ("auto", 0.7)]
    ),
  ],
)
def test_under_a_distribution(kind: str, temperature: float | None, cpu_devices: list[str]) -> None:
  """Before training, between trainings, after, and after a compile: as Keras does it alone."""

  def told() -> list[Any]:
    model = build(temperature)
    found = [model.generate(prompts())["token_ids"], model.generate(prompts(3))["token_ids"]]
    losses = trained(model).history["loss"]
    found.append(model.generate(prompts(lengths=(2, 6)))["token_ids"])
    losses += trained(model).history["loss"]
    found += [model.generate(prompts())["token_ids"], model.predict({"token_ids": found[0]})]
    model.compile(
      keras.optimizers.SGD(0.1, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    losses += trained(model).history["loss"]
    return [*found, model.generate(prompts(), (3, 5))["padding_mask"], losses]

  want = told()
  mtf.keras.enable()
  try:
    keras.distribution.set_distribution(dict(distributions())[kind]())
    found = told()
  finally:
    keras.distribution.set_distribution(None)
    mtf.keras.disable()
  for a, b in zip(found, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
  assert LanguageModel.__dict__["generate"].__qualname__ == "LanguageModel.generate"


def test_in_a_callback(cpu_devices: list[str]) -> None:
  """The tokens that a plain model with the weights of that moment generates."""

  class Samples(keras.callbacks.Callback):
    def __init__(self) -> None:
      super().__init__()
      self.found: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
      self.found.append(self.model.generate(prompts())["token_ids"])

  rng = np.random.default_rng(1)
  tokens = rng.integers(1, VOCABULARY, [8, LENGTH]).astype(np.int32)
  outcomes = []
  for is_parallel in (False, True):
    model: Any = build()
    if is_parallel:
      mesh = mtf.SimdMeshImpl("r:2,c:2", "batch:r,block_0/q.1:c", cpu_devices[:4])
      model = mtf.keras.parallelize(model, mesh)
    samples = Samples()
    model.fit(
      *({"token_ids": tokens}, np.roll(tokens, -1, 1)),
      **{"epochs": 3, "batch_size": 4, "verbose": 0, "callbacks": [samples]},
    )
    outcomes.append(samples.found)
  np.testing.assert_array_equal(*outcomes)


def test_programs_that_relate_more_dimensions_join_their_names(cpu_devices: list[str]) -> None:
  """In this order: each of two programs relates what the other one does not."""
  model = build()
  want = [
    model.generate(prompts())["token_ids"],
    model.predict({"token_ids": prompts()["token_ids"]}),
  ]
  for order in itertools.permutations(range(2)):
    parallel = mtf.keras.parallelize(build(), mtf.PlacementMeshImpl("r:2,c:2", "", cpu_devices[:4]))
    for i in (*order, *order):
      if i == 0:
        np.testing.assert_array_equal(parallel.generate(prompts())["token_ids"], want[0])
      else:
        found = parallel.predict({"token_ids": prompts()["token_ids"]})
        np.testing.assert_allclose(found, want[1], rtol=1e-4, atol=1e-5)


def test_derived_names_of_one_axis_are_joined() -> None:
  """The first of them stays; those that a user gives are refused as ever."""
  a, b = tf.Variable(np.zeros([4, 6], "f")), tf.Variable(np.zeros([4, 6], "f"))

  @tf.function(autograph=False)
  def step(x: tf.Tensor) -> tf.Tensor:
    return x + a + b

  dims = {"Variable": ["rows", "one"], "Variable_1": ["rows", "two"]}
  names = [v.name for v in Imported(step, [tf.TensorSpec([4, 6])], {}, "error").variables]
  dims = dict(zip(names, dims.values()))
  with pytest.raises(mtf.DimensionError, match="two names for one axis: '(one|two)'"):
    Imported(step, [tf.TensorSpec([4, 6])], dims, "error")
  found = Imported(step, [tf.TensorSpec([4, 6])], dims, "error", derived=["one", "two"])
  assert {tuple(v.shape.dimension_names) for v in found.variables} in (
    {("rows", "one")},
    {("rows", "two")},
  )
  found = Imported(step, [tf.TensorSpec([4, 6])], dims, "error", derived=["one"])
  assert {tuple(v.shape.dimension_names) for v in found.variables} == {("rows", "two")}
