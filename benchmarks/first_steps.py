"""Seconds from the command to the end of the first training step of a real problem.

  python -m benchmarks.first_steps --data_dir multi30k [--rounds 3] [--only SIMD]

Ours is the trainer with `problems/multi30k.gin` as a user starts it: imports, data, tracing, the
first step. The others are the same model (3 + 3 layers, dropout, smoothed labels, Adam) as a user
of Keras or JAX writes it, on random tokens in rows of the same lengths, which are there at once.
Each is a process of its own, one after the other, in turns; the table has the median of seconds,
and the peak of resident memory in that time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

LAYERS, D_MODEL, D_FF, HEADS = 3, 256, 1024, 4
IDS, ROWS, INPUTS, TARGETS = 6016, 64, 56, 64
DROPOUT, SMOOTHING, LEARNING_RATE = 0.25, 0.1, 1e-3
DONE = "the first step is done"


@dataclasses.dataclass(frozen=True)
class Side:
  """A row of the table: who trains, and on which mesh."""

  name: str
  mesh: str = ""

  @property
  def label(self) -> str:
    return f"{self.name}, {self.mesh or 'one device'}"


MESH_2X2, MESH_2X4 = "batch:2,model:2", "batch:2,model:4"
SIDES = (
  Side("SIMD"),
  *(Side(name, mesh) for name in ("SIMD", "placement") for mesh in (MESH_2X2, MESH_2X4)),
  Side("Keras"),
  Side("MirroredStrategy", "batch:4"),
  *(Side("JAX", mesh) for mesh in ("", MESH_2X2, MESH_2X4)),
)


def main() -> None:
  """Measures and prints, or is one of the others' processes."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--data_dir", help="the folder of train.en.gz, train.fr.gz, val.*")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--only", default="", help="rows whose label has this text")
  parser.add_argument("--side", choices=("Keras", "MirroredStrategy", "JAX"), help="for itself")
  parser.add_argument("--mesh", default="", help="for itself")
  args = parser.parse_args()
  if args.side:
    loss = jax_step(args.mesh) if args.side == "JAX" else keras_step(args.mesh)
    print(f"loss {loss:.4f}  {DONE}", flush=True)
    return
  if args.data_dir is None:
    parser.error("give --data_dir, the folder of the texts of Multi30k")
  sides = [side for side in SIDES if args.only in side.label]
  if importlib.util.find_spec("jax") is None:
    sides = [side for side in sides if side.name != "JAX"]
  with tempfile.TemporaryDirectory() as folder:
    if any(side.name in ("SIMD", "placement") for side in sides):
      _until_done(_ours(Side("SIMD"), args.data_dir, folder))  # Trains the vocabulary.
    times: dict[Side, list[tuple[float, float]]] = {side: [] for side in sides}
    for _ in range(args.rounds):
      for side in sides:
        times[side].append(_until_done(_command(side, args.data_dir, folder)))
        print(f"{side.label}: {times[side][-1][0]:.1f} s", file=sys.stderr, flush=True)
  from benchmarks.run import machine

  print(f"\nMeasured on {machine()}.\n\n| first step of multi30k | seconds | GB |\n|---|---|---|")
  for side, measured in times.items():
    seconds, memory = (statistics.median(column) for column in zip(*measured))
    print(f"| {side.label} | {seconds:.1f} | {memory:.1f} |")


def _command(side: Side, data_dir: str, folder: str) -> list[str]:
  if side.name in ("SIMD", "placement"):
    return _ours(side, data_dir, folder)
  return [
    sys.executable, "-m", "benchmarks.first_steps", "--side", side.name, "--mesh", side.mesh
  ]  # fmt: skip


def _ours(side: Side, data_dir: str, folder: str) -> list[str]:
  """The command line of the trainer; its vocabulary stays in the folder."""
  bindings = [
    f"data_dir = '{os.path.abspath(data_dir)}'",
    f"vocabulary_file = '{folder}/pieces.model'",
    f"run.mesh_shape = '{side.mesh}'",
    f"run.mesh_implementation = '{side.name.lower()}'",
    "run.layout_rules = 'batch:batch,d_ff:model,heads:model,vocab:model'"
    if side.mesh
    else "run.layout_rules = ''",
  ]
  model_dir = tempfile.mkdtemp(dir=folder)
  return [
    sys.executable, "-m", "mesh_tensorflow.transformer.main", f"--model_dir={model_dir}",
    "--gin_file=problems/multi30k.gin", *(f"--gin_param={binding}" for binding in bindings),
  ]  # fmt: skip


def _until_done(command: list[str]) -> tuple[float, float]:
  """Seconds until a line says that the first step is done, and the peak of memory in GB.

  Raises:
    RuntimeError: the process ended before that.
  """
  started = time.perf_counter()
  environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
  said = []
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
  ) as process:
    for line in process.stdout:
      said.append(line)
      if DONE in line:
        seconds = time.perf_counter() - started
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
        peak = next(x for x in status.splitlines() if x.startswith("VmHWM"))
        process.kill()
        return seconds, int(peak.split()[1]) / 2**20
  raise RuntimeError(f"{' '.join(command)} ended before its first step:\n{''.join(said[-30:])}")


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Random ids of inputs [rows, inputs] and targets [rows, targets], int32, without end."""
  rng = np.random.default_rng(0)
  while True:
    lengths = INPUTS, TARGETS
    inputs, targets = (rng.integers(1, IDS, [ROWS, n], dtype=np.int32) for n in lengths)
    yield inputs, targets


def keras_step(mesh: str) -> float:
  """The loss of the first batch of `fit`, of one device or under a `MirroredStrategy`.

  Args:
    mesh: "" or "batch:N": the N virtual CPU devices that split the batch.
  """
  import contextlib

  import keras
  import tensorflow as tf

  scope: contextlib.AbstractContextManager = contextlib.nullcontext()
  if mesh:
    devices = int(mesh.split(":")[1])
    logical = [tf.config.LogicalDeviceConfiguration()] * devices
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)
    scope = tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(devices)]).scope()

  def residual(x: Any, layer: Callable[[Any], Any]) -> Any:
    y = layer(keras.layers.RMSNormalization()(x))
    return x + keras.layers.Dropout(DROPOUT)(y)

  def attention(memory: Any = None, causal: bool = False) -> Callable[[Any], Any]:
    def apply(x: Any) -> Any:
      attend = keras.layers.MultiHeadAttention(HEADS, D_MODEL // HEADS, use_bias=False)
      return attend(x, x if memory is None else memory, use_causal_mask=causal)

    return apply

  def dense(x: Any) -> Any:
    hidden = keras.layers.Dense(D_FF, "relu", use_bias=False)(x)
    return keras.layers.Dense(D_MODEL, use_bias=False)(hidden)

  def loss(targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    log_probs = tf.nn.log_softmax(logits)
    picked = tf.gather(log_probs, tf.cast(targets, tf.int32), axis=-1, batch_dims=2)
    smooth = tf.reduce_mean(log_probs, -1)
    # One number a row: Keras takes the mean, under a strategy of all devices' rows.
    return -tf.reduce_mean((1 - SMOOTHING) * picked + SMOOTHING * smooth, -1)

  class Embedded(keras.layers.Layer):
    """Sums of embeddings of ids, in a table that several share, and of positions."""

    def __init__(self, tokens: keras.layers.Embedding, length: int):
      super().__init__()
      self.tokens, self.places = tokens, keras.layers.Embedding(length, D_MODEL)
      self.dropout = keras.layers.Dropout(DROPOUT)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
      return self.dropout(self.tokens(ids) + self.places(tf.range(ids.shape[1])))

  with scope:
    tokens = keras.layers.Embedding(IDS, D_MODEL)
    inputs, before = (keras.Input([n], dtype="int32") for n in (INPUTS, TARGETS))
    memory = Embedded(tokens, INPUTS)(inputs)
    for _ in range(LAYERS):
      memory = residual(residual(memory, attention()), dense)
    memory = keras.layers.RMSNormalization()(memory)
    x = Embedded(tokens, TARGETS)(before)
    for _ in range(LAYERS):
      x = residual(residual(x, attention(causal=True)), attention(memory))
      x = residual(x, dense)
    x = keras.layers.RMSNormalization()(x)
    logits = keras.layers.Dense(IDS, use_bias=False)(x)
    model = keras.Model([inputs, before], logits)
    model.compile(keras.optimizers.Adam(LEARNING_RATE), loss)

  def examples() -> Iterator[tuple[tuple[np.ndarray, np.ndarray], np.ndarray]]:
    for given, targets in batches():
      yield (given, np.pad(targets[:, :-1], [[0, 0], [1, 0]])), targets

  specs = [tf.TensorSpec([ROWS, n], tf.int32) for n in (INPUTS, TARGETS)]
  data = tf.data.Dataset.from_generator(examples, output_signature=(tuple(specs), specs[1]))
  return model.fit(data, epochs=1, steps_per_epoch=1, verbose=0).history["loss"][0]


def jax_step(mesh_shape: str) -> float:
  """The loss of the first step of a jitted function, whose weights lie as on our meshes.

  Args:
    mesh_shape: "" or such as "batch:2,model:4", of virtual CPU devices.
  """
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType, NamedSharding, PartitionSpec

  axes = dict(axis.split(":") for axis in mesh_shape.split(",")) if mesh_shape else {"batch": "1"}
  sizes = [int(n) for n in axes.values()]
  if mesh_shape:
    jax.config.update("jax_num_cpu_devices", int(np.prod(sizes)))
  mesh = jax.make_mesh(sizes, list(axes), axis_types=(AxisType.Auto,) * len(sizes))
  rng = np.random.default_rng(0)

  def put(value: np.ndarray, *dims: str | None) -> Any:
    spec = PartitionSpec(*(dim if dim in axes else None for dim in dims))
    return jax.device_put(value, NamedSharding(mesh, spec))

  def matrix(rows: int, columns: int, *dims: str | None) -> Any:
    values = rng.normal(0, rows**-0.5, [rows, columns]).astype(np.float32)
    return put(values, *dims)

  def scale() -> Any:
    return put(np.ones([D_MODEL], np.float32), None)

  def attention() -> dict:
    split = {name: matrix(D_MODEL, D_MODEL, None, "model") for name in "qkv"}
    return split | {"o": matrix(D_MODEL, D_MODEL, "model", None), "scale": scale()}

  def dense() -> dict:
    wi, wo = matrix(D_MODEL, D_FF, None, "model"), matrix(D_FF, D_MODEL, "model", None)
    return {"wi": wi, "wo": wo, "scale": scale()}

  params = {
    "tokens": matrix(IDS, D_MODEL, "model", None),
    "logits": matrix(D_MODEL, IDS, None, "model"),
    "places": [matrix(n, D_MODEL, None, None) for n in (INPUTS, TARGETS)],
    "encoder": [{"self": attention(), "dense": dense()} for _ in range(LAYERS)],
    "decoder": [
      {"self": attention(), "cross": attention(), "dense": dense()} for _ in range(LAYERS)
    ],
    "scales": [scale(), scale()],
  }

  def norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * weight

  def dropped(x: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 1 - DROPOUT, x.shape), x / (1 - DROPOUT), 0)

  def attend(weights: dict, x: Any, memory: Any, causal: bool) -> Any:
    shape = [ROWS, -1, HEADS, D_MODEL // HEADS]
    q = (x @ weights["q"]).reshape(shape)
    k, v = ((memory @ weights[name]).reshape(shape) for name in "kv")
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (D_MODEL // HEADS) ** -0.5
    if causal:
      logits += jnp.where(jnp.tri(TARGETS, dtype=bool), 0.0, -1e9)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)
    return y.reshape([*x.shape[:2], -1]) @ weights["o"]

  def loss_of(params: dict, key: Any, inputs: Any, targets: Any) -> Any:
    keys = iter(jax.random.split(key, 5 * LAYERS + 2))

    def added(x: Any, weights: dict, layer: Callable[[Any], Any]) -> Any:
      return x + dropped(layer(norm(x, weights["scale"])), next(keys))

    def wide(weights: dict, x: Any) -> Any:
      return jax.nn.relu(x @ weights["wi"]) @ weights["wo"]

    memory = dropped(params["tokens"][inputs] + params["places"][0], next(keys))
    for layer in params["encoder"]:
      memory = added(memory, layer["self"], lambda x, w=layer["self"]: attend(w, x, x, False))
      memory = added(memory, layer["dense"], functools.partial(wide, layer["dense"]))
    memory = norm(memory, params["scales"][0])
    before = jnp.pad(targets[:, :-1], [[0, 0], [1, 0]])
    y = dropped(params["tokens"][before] + params["places"][1], next(keys))
    for layer in params["decoder"]:
      y = added(y, layer["self"], lambda x, w=layer["self"]: attend(w, x, x, True))
      y = added(y, layer["cross"], lambda x, w=layer["cross"]: attend(w, x, memory, False))
      y = added(y, layer["dense"], functools.partial(wide, layer["dense"]))
    log_probs = jax.nn.log_softmax(norm(y, params["scales"][1]) @ params["logits"])
    picked = jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
    return -jnp.mean((1 - SMOOTHING) * picked + SMOOTHING * jnp.mean(log_probs, -1))

  @functools.partial(jax.jit, donate_argnums=0)
  def train_step(state: tuple, key: Any, inputs: Any, targets: Any) -> tuple:
    params, means, squares, step = state
    loss, grads = jax.value_and_grad(loss_of)(params, key, inputs, targets)
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, grads)
    squares = jax.tree.map(lambda s, g: 0.98 * s + 0.02 * g * g, squares, grads)
    rate = LEARNING_RATE * jnp.sqrt(1 - 0.98**step) / (1 - 0.9**step)
    params = jax.tree.map(
      lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, means, squares
    )
    return loss, (params, means, squares, step + 1)

  zeros = jax.tree.map(jnp.zeros_like, params)
  state = (params, zeros, jax.tree.map(jnp.zeros_like, params), jnp.float32(1))
  inputs, targets = (put(x, "batch", None) for x in next(batches()))
  return float(train_step(state, jax.random.key(0), inputs, targets)[0])


if __name__ == "__main__":
  main()
