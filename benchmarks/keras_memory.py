"""Memory of a Keras model on a mesh of 8 virtual devices: peak of the process, beside its slices.

  python -m benchmarks.keras_memory [--parameters 1e9] [programs]

A decoder of Keras' own layers, each large weight split over 8 devices, SGD, batches of 16 tokens.
Each program is a process of its own: Linux tells its highest resident memory since the phase
before (VmHWM), and what is resident after it. The slices are those of all devices, which share the
memory of this machine; whole is what variables of the model and of the optimizer hold beside
them; above is the peak without what the process had after its imports and without the slices.

  train    built, trained a step, saved as .weights.h5
  again    built, loaded from that file, trained a step, saved as .keras, loaded again
  model    the .keras file is loaded, trained a step
  shards   built, loaded from a .weights.json and its shards (12 if the model is large), trained a
           step, saved as shards
  preset   a Llama 3 of keras-hub from a preset of shards, trained a step, saved as a preset
  hf       the same from a folder as Hugging Face has it, of four .safetensors files, and of one
  equal    weights that were drawn slice by slice, and loaded ones, beside those of Keras alone

The last two but one need keras-hub, and safetensors.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from mesh_tensorflow.keras import mirror
from mesh_tensorflow.keras.serving import programs_of

_MEBI, DEVICES, LENGTH, HEADS, VOCABULARY = 2**20, 8, 16, 16, 8192
WIDTHS = (4096, 2048, 1024, 512, 256)


def decoder(parameters: float) -> keras.Model:
  """A decoder of about so many parameters, compiled; the same values each time."""
  blocks_of = {w: round((parameters - 2 * VOCABULARY * w) / (12 * w**2)) for w in WIDTHS}
  width = next((w for w, blocks in blocks_of.items() if blocks >= 4), WIDTHS[-1])
  keras.utils.set_random_seed(0)
  tokens = keras.Input([LENGTH], dtype="int32")
  x = layers.Embedding(VOCABULARY, width, name="embedding")(tokens)
  for i in range(max(1, blocks_of[width])):
    y = layers.LayerNormalization(name=f"norm_{i}")(x)
    attention = layers.MultiHeadAttention(HEADS, width // HEADS, name=f"attention_{i}")
    x = x + attention(y, y, use_causal_mask=True)
    y = layers.LayerNormalization(name=f"second_norm_{i}")(x)
    x = x + layers.Dense(width, name=f"down_{i}")(
      layers.Dense(4 * width, "gelu", name=f"up_{i}")(y)
    )
  x = layers.LayerNormalization(name="last_norm")(x)
  model = keras.Model(tokens, layers.Dense(VOCABULARY, name="logits")(x), name="decoder")
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(keras.optimizers.SGD(0.01), loss)
  return model


def distribution() -> Any:
  """Each large weight of `decoder` over 8 devices."""
  mtf.virtual_cpu_devices(DEVICES)
  mesh = keras.distribution.DeviceMesh(
    (1, DEVICES), ("batch", "model"), keras.distribution.list_devices()[:DEVICES]
  )
  found = keras.distribution.LayoutMap(mesh)
  found["embedding/embeddings"] = ("model", None)
  found[r"attention_\d+/(query|key|value)/kernel"] = (None, "model", None)
  found[r"attention_\d+/attention_output/kernel"] = ("model", None, None)
  found[r"(up_\d+|logits)/kernel"] = (None, "model")
  found[r"down_\d+/kernel"] = ("model", None)
  return keras.distribution.ModelParallel(layout_map=found, batch_dim_name="batch")


def hub() -> Any:
  """`keras_hub.models`."""
  return importlib.import_module("keras_hub").models


def llama_sizes(parameters: float) -> dict[str, int]:
  """Arguments of a Llama 3 of about so many parameters."""
  width = 2048 if parameters >= 3e8 else 1024 if parameters >= 5e7 else 256
  blocks = max(1, round((parameters - 2 * VOCABULARY * width) / (15 * width**2)))
  return {
    "vocabulary_size": VOCABULARY,
    "num_layers": blocks,
    "num_query_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "hidden_dim": width,
    "intermediate_dim": 4 * width,
  }


def llama_distribution() -> Any:
  """The layout map of keras-hub's Llama on 8 devices, and that of the logits."""
  mtf.virtual_cpu_devices(DEVICES)
  mesh = keras.distribution.DeviceMesh(
    (1, DEVICES), ("batch", "model"), keras.distribution.list_devices()[:DEVICES]
  )
  layouts = hub().LlamaBackbone.get_layout_map(mesh)
  layouts["token_embedding/reverse_embeddings"] = (None, "model")  # Llama 3 has it, Llama not.
  return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def _causal(backbone: Any) -> keras.Model:
  model = hub().Llama3CausalLM(backbone, preprocessor=None)
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(keras.optimizers.SGD(0.01), loss)
  return model


def train_causal(model: keras.Model) -> float:
  """A step of a language model of keras-hub; returns its loss."""
  ids = np.random.default_rng(0).integers(0, VOCABULARY, [1, LENGTH]).astype(np.int32)
  inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
  return float(np.ravel(model.train_on_batch(inputs, np.roll(ids, -1, 1)))[0])  # And metrics.


def write_hugging_face(folder: Path, sizes: Mapping[str, int], count: int) -> None:
  """Writes a Llama as Hugging Face has it, tensor by tensor.

  Args:
    folder: is made.
    sizes: of `llama_sizes`.
    count: how many .safetensors files.
  """
  folder.mkdir()
  width, inner = sizes["hidden_dim"], sizes["intermediate_dim"]
  keys = width // HEADS * sizes["num_key_value_heads"]
  config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "num_hidden_layers": sizes["num_layers"],
    "num_attention_heads": HEADS,
    "num_key_value_heads": sizes["num_key_value_heads"],
    "hidden_size": width,
    "intermediate_size": inner,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
  }
  (folder / "config.json").write_text(json.dumps(config))
  shapes = {"model.embed_tokens.weight": [VOCABULARY, width], "model.norm.weight": [width]}
  shapes["lm_head.weight"] = [VOCABULARY, width]
  for i in range(sizes["num_layers"]):
    of_layer = {
      "input_layernorm": [width],
      "post_attention_layernorm": [width],
      "self_attn.q_proj": [width, width],
      "self_attn.k_proj": [keys, width],
      "self_attn.v_proj": [keys, width],
      "self_attn.o_proj": [width, width],
      "mlp.gate_proj": [inner, width],
      "mlp.up_proj": [inner, width],
      "mlp.down_proj": [width, inner],
    }
    shapes.update({f"model.layers.{i}.{n}.weight": shape for n, shape in of_layer.items()})
  names = list(shapes)
  parts = [names[i::count] for i in range(count)]
  files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
  if count == 1:
    files = ["model.safetensors"]
  else:
    index = {n: file for file, part in zip(files, parts) for n in part}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
  rng = np.random.default_rng(0)
  for file, part in zip(files, parts):
    _write_safetensors(folder / file, {n: shapes[n] for n in part}, rng)


def _write_safetensors(path: Path, shapes: Mapping[str, list[int]], rng: Any) -> None:
  header, end = {}, 0
  for name, shape in shapes.items():
    begin, end = end, end + 4 * math.prod(shape)
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
  text = json.dumps(header).encode()
  with path.open("wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for shape in shapes.values():
      values = rng.standard_normal(math.prod(shape), np.float32)
      values *= 0.02
      values.tofile(file)


def train(model: keras.Model) -> float:
  """A step; returns its loss."""
  ids = np.random.default_rng(0).integers(0, VOCABULARY, [1, LENGTH]).astype(np.int32)
  return float(model.train_on_batch(ids, np.roll(ids, -1, 1)))


def _memory(field: str) -> int:
  found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
  assert found
  return int(found[1]) * 1024


class Phases:
  """Measures phases, and prints a line of a table for each."""

  def __init__(self) -> None:
    gc.collect()
    self._base = _memory("VmRSS")
    self._line("imported", None, self._base)

  @contextlib.contextmanager
  def __call__(self, name: str, models: list[keras.Model]) -> Iterator[None]:
    """Context manager: a phase.

    Args:
      name: of the phase.
      models: gets the model that is measured, if it is made inside.
    """
    Path("/proc/self/clear_refs").write_text("5")  # The highest value counts from here.
    yield
    peak = _memory("VmHWM")
    gc.collect()
    self._line(name, models[0], peak)

  def _line(self, name: str, model: keras.Model | None, peak: int) -> None:
    slices, whole = held(model) if model else (0, 0)
    figures = [peak, _memory("VmRSS"), slices, whole, peak - self._base - slices]
    cells = [f"{n / _MEBI:>8.0f} MiB" for n in figures]
    print(f"  {name:<16}{''.join(cells if model else cells[:2])}", flush=True)


def held(model: keras.Model) -> tuple[int, int]:
  """Bytes of the slices of a model on all devices, and of its variables that have a value."""
  programs = programs_of(model)
  slices = 0
  if programs is not None and programs.decision is not None:
    store = programs.decision.mesh_impl.variable_store
    slices = sum(_bytes(s) for v in store for s in v.slices)
  whole = 0
  with mirror.unnoticed():
    for v in [*model.variables, *model.optimizer.variables]:
      size = tf.raw_ops.VariableShape(input=v.value.handle).numpy()
      whole += int(np.prod(size)) * v.value.dtype.size
  return slices, whole


def _bytes(v: Any) -> int:
  return math.prod(v.shape) * tf.as_dtype(v.dtype).size


def _print_head(title: str) -> None:
  heads = ("peak", "after", "slices", "whole", "above")
  print(f"{title:<18}{''.join(f'{head:>12}' for head in heads)}", flush=True)


class Programs:
  """What the processes do; each method is one.

  Args:
    parameters: of the model, about.
    folder: where files are.
  """

  def __init__(self, parameters: float, folder: Path):
    self._parameters, self._folder = parameters, folder
    self._file = folder / "decoder.weights.h5"

  def _built(self) -> tuple[Phases, list[keras.Model]]:
    phases, models = self._served(), []
    with phases("built", models):
      models.append(decoder(self._parameters))
    return phases, models

  def _served(self, hub: bool = False) -> Phases:
    mtf.keras.enable()
    keras.distribution.set_distribution(llama_distribution() if hub else distribution())
    keras.Sequential([keras.Input((8,)), layers.Dense(8)])
    return Phases()

  def train(self) -> None:
    phases, models = self._built()
    with phases("trained a step", models):
      train(models[0])
    with phases("another step", models):
      train(models[0])
    with phases("saved", models):
      models[0].save_weights(self._file)
    self._tell(models[0])

  def again(self) -> None:
    phases, models = self._built()
    with phases("loaded", models):
      models[0].load_weights(self._file)
    with phases("trained a step", models):
      train(models[0])
    with phases("saved", models):
      models[0].save(self._file.with_name("decoder.keras"))
    with phases("loaded again", models):
      models[0].load_weights(self._file)
    with phases("trained a step", models):
      train(models[0])
    self._tell(models[0])

  def model(self) -> None:
    phases, models = self._served(), []
    with phases("loaded", models):
      models.append(keras.models.load_model(self._file.with_name("decoder.keras")))
    with phases("trained a step", models):
      train(models[0])
    self._tell(models[0])

  def shards(self) -> None:
    phases, models = self._built()
    file = self._file.with_suffix(".json")
    size = 4 * models[0].count_params() / 12 * 1.01 / 2**30
    with phases("saved", models):
      models[0].save_weights(file, max_shard_size=size)
    del models[:]
    gc.collect()
    with phases("built", models):
      models.append(decoder(self._parameters))
    with phases("loaded", models):
      models[0].load_weights(file)
    with phases("trained a step", models):
      train(models[0])
    with phases("saved", models):
      models[0].save_weights(file, max_shard_size=size)
    self._tell(models[0])
    self._tell_shards("decoder_*.weights.h5")

  def _tell_shards(self, pattern: str) -> None:
    files = [f.stat().st_size / _MEBI for f in self._folder.glob(pattern)]
    print(f"  {len(files)} shards, the largest of {max(files):.0f} MiB")

  def preset(self) -> None:
    sizes = llama_sizes(self._parameters)
    phases, models = self._served(hub=True), []
    size = 4.1 * self._parameters / 12 / 2**30
    if not (self._folder / "preset").exists():
      with phases("built", models):
        models.append(_causal(hub().Llama3Backbone(**sizes)))
      with phases("saved", models):
        models[0].backbone.save_to_preset(str(self._folder / "preset"), max_shard_size=size)
      del models[:]
      gc.collect()
    with phases("from_preset", models):
      backbone = hub().Llama3Backbone.from_preset(str(self._folder / "preset"))
      models.append(_causal(backbone))
      del backbone
    with phases("trained a step", models):
      train_causal(models[0])
    with phases("saved", models):
      models[0].backbone.save_to_preset(str(self._folder / "again"), max_shard_size=size)
    self._tell(models[0])
    self._tell_shards("again/model_*.weights.h5")

  def hf(self) -> None:
    sizes = llama_sizes(self._parameters)
    phases, models = self._served(hub=True), []
    for count in (4, 1):
      folder = self._folder / f"hf_{count}"
      write_hugging_face(folder, sizes, count)
      with phases(f"{count} files" if count > 1 else "one file", models):
        models.append(_causal(hub().Llama3Backbone.from_preset(str(folder))))
      with phases("trained a step", models):
        train_causal(models[0])
      self._tell(models[0])
      del models[:]
      gc.collect()

  def equal(self) -> None:
    mtf.virtual_cpu_devices(DEVICES)
    theirs = decoder(self._parameters)
    theirs.save_weights(self._file)
    self._served()
    ours, loaded = decoder(self._parameters), decoder(self._parameters)
    loaded.load_weights(self._file)
    for model in (ours, loaded):
      model.predict(np.zeros([1, LENGTH], np.int32), verbose=0)  # Makes slices, changes none.
      for a, b in zip(model.weights, theirs.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    ours.save_weights(self._file)
    theirs.load_weights(self._file)
    for a, b in zip(loaded.weights, theirs.weights, strict=True):
      np.testing.assert_array_equal(a.numpy(), b.numpy())
    count = theirs.count_params()
    print(f"  {count:,} values, drawn, loaded and saved, are those of Keras bit for bit")

  def _tell(self, model: keras.Model) -> None:
    sizes = [_bytes(v) for v in model.variables]
    print(
      f"  {model.count_params():,} parameters, {sum(sizes) / _MEBI:.0f} MiB, the largest of "
      f"{max(sizes) / _MEBI:.0f} MiB"
    )


NAMES = ("train", "again", "model", "shards", "preset", "hf", "equal")


def main() -> int:
  """The command."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("programs", nargs="*", help=f"of {', '.join(NAMES)}; by default all")
  parser.add_argument("--parameters", type=float, default=1e8, help="of the model, about")
  parser.add_argument("--folder", help=argparse.SUPPRESS)
  flags = parser.parse_args()
  unknown = set(flags.programs) - set(NAMES)
  if unknown:
    parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
  if flags.folder:
    getattr(Programs(flags.parameters, Path(flags.folder)), flags.programs[0])()
    return 0
  with tempfile.TemporaryDirectory() as folder:
    for name in flags.programs or NAMES:
      _print_head(name)
      command = [sys.executable, "-m", "benchmarks.keras_memory", name, "--folder", folder]
      command += ["--parameters", str(flags.parameters)]
      env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)}
      done = subprocess.run(command, env=env, check=False)
      if done.returncode:
        return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
