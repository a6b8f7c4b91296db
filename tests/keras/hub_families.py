"""Families of keras-hub, at tiny sizes, on meshes beside Keras on one device.

`python -m tests.keras.hub_families Gemma T5` prints a table (by default of all families) of three
layouts: the family's own `get_layout_map`, a map that is derived of its variables, and a search.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.environment.virtual_devices import virtual_cpu_devices
from mesh_tensorflow.keras import layouts
from tests.importing.comparing import slow_machine

BATCH, LENGTH, PROMPT, VOCABULARY, STEPS = 4, 20, 8, 64, 6
TEXTS = 20  # That are generated.
MESHES = ("2", "2x2", "2x4")
LAYOUTS = ("own map", "derived map", "auto")
# What may be lost by adding in another order, as a part of the largest number.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Data:
  """What a model is trained on, and what it generates from.

  Attributes:
    x: inputs, by name, or one array.
    y: targets.
    weights: of the targets, or None.
    prompts: inputs of `generate`, by name; None if it does not generate.
  """

  x: Any
  y: np.ndarray
  weights: np.ndarray | None = None
  prompts: dict[str, np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models.

  Attributes:
    name: of the class of its backbone, without "Backbone".
    make: makes a model of the module `keras_hub.models` and the backbone.
    data: makes its data.
    settings: of the backbone.
  """

  name: str
  make: Callable[[Any, Any], keras.Model]
  data: Callable[[], Data]
  settings: Mapping[str, Any]


def _tokens(texts: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
  """Ids, and a mask of those that are no padding: of every second text the last ones are."""
  ids = np.random.default_rng(6).integers(3, VOCABULARY, [texts, LENGTH]).astype(np.int32)
  lengths = np.resize([LENGTH, LENGTH - 5], texts)
  return ids, (np.arange(LENGTH) < lengths[:, None]).astype(np.int32)


def _prompts() -> tuple[np.ndarray, np.ndarray]:
  """The first ids of each text, more of every second one, and a mask of them."""
  ids, _ = _tokens(TEXTS)
  mask = np.arange(LENGTH) < np.resize([PROMPT, PROMPT + 3], TEXTS)[:, None]
  return np.where(mask, ids, 0).astype(np.int32), mask


def _of_text() -> Data:
  ids, mask = _tokens()
  prompts, is_prompt = _prompts()
  return Data(
    {"token_ids": ids, "padding_mask": mask},
    np.roll(ids, -1, 1),
    mask.astype(np.float32),
    {"token_ids": prompts, "padding_mask": is_prompt},
  )


def _of_classes(segments: bool = False) -> Data:
  ids, mask = _tokens()
  x = {"token_ids": ids, "padding_mask": mask}
  if segments:
    x["segment_ids"] = (np.arange(LENGTH) >= PROMPT).astype(np.int32) * np.ones_like(ids)
  return Data(x, np.arange(BATCH) % 4)


def _of_two_texts() -> Data:
  ids, mask = _tokens()
  prompts, is_prompt = _prompts()
  source = [
    dict(zip(("encoder_token_ids", "encoder_padding_mask"), _tokens(n))) for n in (BATCH, TEXTS)
  ]
  return Data(
    {**source[0], "decoder_token_ids": ids[::-1].copy(), "decoder_padding_mask": mask},
    np.roll(ids[::-1], -1, 1),
    mask.astype(np.float32),
    {**source[1], "decoder_token_ids": prompts, "decoder_padding_mask": is_prompt},
  )


def _of_images() -> Data:
  x = np.random.default_rng(6).uniform(-1, 1, [BATCH, 16, 16, 3]).astype(np.float32)
  return Data(x, np.arange(BATCH) % 4)


def _of_sound() -> Data:
  ids, mask = _tokens()
  sound = np.random.default_rng(6).normal(size=[BATCH, 24, 8]).astype(np.float32)
  x = {"encoder_features": sound, "decoder_token_ids": ids, "decoder_padding_mask": mask}
  return Data(x, np.roll(ids, -1, 1), mask.astype(np.float32))


def _task(kind: str, **settings: Any) -> Callable[[Any, Any], keras.Model]:
  """A task of the family without a preprocessor: "CausalLM", "TextClassifier", ..."""

  def make(models: Any, backbone: Any) -> keras.Model:
    name = type(backbone).__name__.removesuffix("Backbone")
    found: keras.Model = getattr(models, name + kind)(
      backbone=backbone, preprocessor=None, **settings
    )
    return found

  return make


def _whisper(models: Any, backbone: Any) -> keras.Model:
  """Logits of the decoder's tokens; keras-hub has no task for it."""
  outputs = backbone.output["decoder_sequence_output"]
  return keras.Model(backbone.input, backbone.token_embedding(outputs, reverse=True))


_CAUSAL, _CLASSES = _task("CausalLM"), _task("TextClassifier", num_classes=4, dropout=0.0)
_SIZES = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64}
_PLAIN = {**_SIZES, "num_heads": 4, "dropout": 0.0}
_GROUPED = {**_SIZES, "num_query_heads": 8, "num_key_value_heads": 4}
_EXPERTS = {"num_experts": 4, "top_k": 2}
_QWEN_EXPERTS = {**_EXPERTS, "moe_intermediate_dim": 16}
_WITH_LENGTH = {**_PLAIN, "max_sequence_length": 24}


def _of_text_without_images() -> Data:
  """As Gemma3's preprocessor makes it of texts; without it keras-hub returns None for images."""
  data = _of_text()
  images = np.zeros([TEXTS, 0, 16, 16, 3], np.float32)
  return dataclasses.replace(data, prompts={**(data.prompts or {}), "images": images})


def _causal(name: str, settings: Mapping[str, Any], **more: Any) -> Family:
  return Family(name, _CAUSAL, _of_text, {**settings, **more})


FAMILIES = (
  _causal("Gemma", _GROUPED, head_dim=8),
  Family(
    "Gemma3",
    _CAUSAL,
    _of_text_without_images,
    {
      **{**_GROUPED, "image_size": 16, "head_dim": 8},
      **{"use_sliding_window_attention": True, "sliding_window_size": 6},
    },
  ),
  _causal("Llama", _GROUPED),
  _causal("Llama3", _GROUPED, tie_word_embeddings=True),
  _causal("Qwen", _GROUPED),
  _causal("QwenMoe", _GROUPED, **_QWEN_EXPERTS, shared_expert_intermediate_dim=16),
  _causal("Qwen3", _GROUPED, head_dim=8),
  _causal("Qwen3Moe", _GROUPED, **_QWEN_EXPERTS, head_dim=8),
  _causal("Mistral", _GROUPED, sliding_window=6),
  _causal("Mixtral", _GROUPED, **_EXPERTS),
  _causal("Phi3", _GROUPED),
  _causal("GPT2", _WITH_LENGTH),
  _causal("OPT", _WITH_LENGTH),
  _causal("Bloom", _PLAIN),
  _causal("Falcon", _SIZES, num_attention_heads=4),
  Family("T5", _task("Seq2SeqLM"), _of_two_texts, {**_PLAIN, "key_value_dim": 8}),
  Family("Bert", _CLASSES, functools.partial(_of_classes, segments=True), _WITH_LENGTH),
  Family("Roberta", _CLASSES, _of_classes, _WITH_LENGTH),
  Family("DebertaV3", _CLASSES, _of_classes, {**_WITH_LENGTH, "bucket_size": 8}),
  Family(
    "ViT",
    _task("ImageClassifier", num_classes=4),
    _of_images,
    {
      **{"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64},
      **{"image_shape": (16, 16, 3), "patch_size": 4},
    },
  ),
  Family(
    "ResNet",
    _task("ImageClassifier", num_classes=4),
    _of_images,
    {
      **{"input_conv_filters": [64], "input_conv_kernel_sizes": [3], "image_shape": (16, 16, 3)},
      **{"stackwise_num_filters": [64, 128], "stackwise_num_blocks": [1, 1]},
      **{"stackwise_num_strides": [1, 2], "block_type": "basic_block"},
    },
  ),
  Family(
    "Whisper",
    _whisper,
    _of_sound,
    {
      **{**_PLAIN, "num_mels": 8},
      **{"max_encoder_sequence_length": 24, "max_decoder_sequence_length": 24},
    },
  ),
)


def device_mesh(mesh: str) -> Any:
  """A mesh of the axes "batch" and "model".

  Args:
    mesh: one of `MESHES`; "2" is of the axis "model" alone.
  """
  shape = tuple(int(n) for n in (mesh if "x" in mesh else f"1x{mesh}").split("x"))
  devices = keras.distribution.list_devices("cpu")[: int(np.prod(shape))]
  return keras.distribution.DeviceMesh(shape, ("batch", "model"), devices)


def compiled(family: Family) -> keras.Model:
  """A model with weights that are drawn, and are the same each time."""
  models = importlib.import_module("keras_hub").models
  keras.utils.set_random_seed(0)
  backbone = getattr(models, f"{family.name}Backbone")(**family.settings)
  model = family.make(models, backbone)
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  greedy = {"sampler": "greedy", "weighted_metrics": None} if hasattr(model, "generate") else {}
  model.compile(keras.optimizers.SGD(0.1), loss=loss, jit_compile=False, **greedy)
  return model


def distribution(family: Family, kind: str, mesh: str) -> Any:
  """A distribution for a family; None if it has no map of its own.

  Args:
    family: the family.
    kind: one of `LAYOUTS`.
    mesh: one of `MESHES`.
  """
  devices = device_mesh(mesh)
  if kind == "auto":
    names = [str(d) for d in devices.devices.flatten()]
    shape = None if mesh == "2" else "batch:{},model:{}".format(*mesh.split("x"))
    return mtf.keras.AutoParallel(names, shape)
  if kind == "own map":
    of = getattr(importlib.import_module("keras_hub").models, f"{family.name}Backbone")
    if not hasattr(of, "get_layout_map"):
      return None
    layout_map = of.get_layout_map(devices)
  else:
    layout_map = keras.distribution.LayoutMap(devices)
    size = int(devices.shape[1])
    keras.backend.clear_session()  # Keras' numbers of names count anew.
    weights = {v.path: v for v in compiled(family).trainable_variables}  # Two of T5 have one path.
    for path, v in weights.items():
      if len(v.shape) > 1 and v.shape[-1] % size == 0:
        layout_map[f"^{path}$"] = (None,) * (len(v.shape) - 1) + ("model",)
  return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a model computes.

  Attributes:
    losses: of the steps of training.
    logits: after them.
    tokens: generated after them; None if it does not generate.
  """

  losses: np.ndarray
  logits: np.ndarray
  tokens: np.ndarray | None


def outcome(family: Family) -> tuple[keras.Model, Outcome]:
  """Builds a model under the distribution that is set, trains it, predicts and generates."""
  model, data = compiled(family), family.data()
  settings = {"batch_size": BATCH, "epochs": STEPS, "shuffle": False, "verbose": 0}
  history = model.fit(data.x, data.y, sample_weight=data.weights, **settings)
  logits = model.predict(data.x, batch_size=BATCH, verbose=0)
  tokens = None
  if data.prompts is not None:
    tokens = model.generate(dict(data.prompts), stop_token_ids=None)
    tokens = next(tokens[k] for k in ("decoder_token_ids", "token_ids") if k in tokens)
  return model, Outcome(np.asarray(history.history["loss"]), logits, tokens)


@dataclasses.dataclass(frozen=True)
class Difference:
  """A model on a mesh beside Keras on one device.

  Attributes:
    numbers: the largest difference of losses and logits, as a part of the largest of them.
    tokens: how many of the generated tokens differ; None if it does not generate.
    split: how many of the variables are split.
    variables: how many there are.
  """

  numbers: float
  tokens: int | None
  split: int
  variables: int

  @property
  def is_small(self) -> bool:
    """Whether they are the same but for the order of additions."""
    return self.numbers < TOLERANCE and not self.tokens


def _relative(found: np.ndarray, want: np.ndarray) -> float:
  difference = np.max(np.abs(np.asarray(found, np.float64) - want)) / np.max(np.abs(want))
  return float(difference) if np.isfinite(difference) else float("inf")


@contextlib.contextmanager
def distributed(wanted: Any) -> Iterator[None]:
  """Keras' distributions are served, and one is set; a search finds what splits.

  Args:
    wanted: the distribution.
  """
  plain = layouts.auto_layout

  def search(program: Any, **kwargs: Any) -> Any:
    return plain(program, **{**kwargs, "machine": slow_machine(), "time_limit": 15.0})

  mtf.keras.enable()
  keras.distribution.set_distribution(wanted)
  try:
    with mock.patch.object(layouts, "auto_layout", search):
      yield
  finally:
    keras.distribution.set_distribution(None)
    mtf.keras.disable()


@functools.cache
def on_one_device(family_name: str) -> Outcome:
  """What Keras computes without a distribution."""
  return outcome(next(f for f in FAMILIES if f.name == family_name))[1]


def compared(family: Family, kind: str, mesh: str) -> Difference | None:
  """A family on a mesh beside Keras on one device; None if it has no such layout.

  Args:
    family: the family.
    kind: one of `LAYOUTS`.
    mesh: one of `MESHES`.
  """
  wanted = distribution(family, kind, mesh)
  if wanted is None:
    return None
  want = on_one_device(family.name)
  keras.backend.clear_session()
  with distributed(wanted):
    model, found = outcome(family)
    store = mtf.keras.serving.programs_of(model).decision.mesh_impl.variable_store
  own = [store[v.path] for v in model.variables if v.path in store.names]
  numbers = max(_relative(found.losses, want.losses), _relative(found.logits, want.logits))
  tokens = None if want.tokens is None else int(np.sum(found.tokens != want.tokens))
  split = sum(tuple(v.slice_shape) != tuple(v.shape.to_integer_list) for v in own)
  return Difference(numbers, tokens, split, len(own))


def row(
  family: Family, meshes: Sequence[str], kinds: Sequence[str] = LAYOUTS, verbose: bool = False
) -> tuple[list[str], bool]:
  """A row of the table, and whether all is as it should be."""
  cells, found, is_right = [], [], True
  for kind in kinds:
    words = []
    for mesh in meshes:
      start = time.monotonic()
      try:
        difference = compared(family, kind, mesh)
      except Exception as e:  # Of every kind: it is what the table is for.
        is_right = False
        words.append(f"{mesh}: {type(e).__name__}: {str(e)[:200]}")
        if verbose:
          traceback.print_exc()
        continue
      finally:
        keras.backend.clear_session()
        gc.collect()
      if verbose:
        print(family.name, kind, mesh, difference, f"{time.monotonic() - start:.0f} s", flush=True)
      if difference is None:
        continue
      found.append(difference)
      is_right = is_right and difference.is_small
      same = "" if difference.is_small else f" differs by {difference.numbers:.1e}"
      words.append(f"{difference.split}{same}")
    cells.append(", ".join(words) or "-")
  tokens = [d.tokens for d in found if d.tokens is not None]
  generated = "-" if not tokens else f"{sum(tokens)} differ" if sum(tokens) else "equal"
  largest = f"{max(d.numbers for d in found):.1e}" if found else ""
  of = str(found[0].variables) if found else ""
  return [family.name, of, *cells, generated, largest], is_right


def main(arguments: Sequence[str]) -> int:
  """Prints the table; 1 if something differs or fails."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("families", nargs="*", default=[f.name for f in FAMILIES])
  parser.add_argument("--mesh", nargs="+", default=MESHES)
  parser.add_argument("--layout", nargs="+", default=LAYOUTS)
  parser.add_argument("--verbose", action="store_true")
  flags = parser.parse_args(arguments)
  virtual_cpu_devices(8)
  tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
  errors = 0
  print(f"| family | weights | {' | '.join(flags.layout)} | generate | largest difference |")
  print(f"|---|---|{'---|' * len(flags.layout)}---|---|")
  for family in FAMILIES:
    if family.name in flags.families:
      cells, is_right = row(family, flags.mesh, flags.layout, flags.verbose)
      errors += not is_right
      print(f"| {' | '.join(cells)} |", flush=True)
  return 1 if errors else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
