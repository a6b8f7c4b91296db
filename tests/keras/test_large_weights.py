"""Large weights of a model on a mesh: drawn when their slices are made, and held once."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.keras import archives, mirror, spilling
from tests.keras.models import X, Y, placement
from tests.kinds import kept

SIZE = (64, 32)
# Keras' own, by what they draw from: their seed, or nothing.
DRAWN_LATER: list[Any] = [
  *(getattr(keras.initializers, name)(seed=3) for name in (
    "GlorotUniform", "GlorotNormal", "HeNormal", "HeUniform", "LecunNormal", "LecunUniform",
    "Orthogonal", "RandomNormal", "RandomUniform", "TruncatedNormal", "VarianceScaling",
  )),
  keras.initializers.GlorotUniform(), keras.initializers.Constant(0.5), keras.initializers.Ones(),
  keras.initializers.Identity(), "zeros", "ones",
]  # fmt: skip


def name_of(initializer: Any) -> str:
  return initializer if isinstance(initializer, str) else type(initializer).__name__


class Own(keras.initializers.Initializer):
  """A user's, which draws other values each time."""

  def __call__(self, shape: Any, dtype: Any = None) -> Any:
    return np.random.normal(size=shape)

  def get_config(self) -> dict[str, Any]:
    return {}


DRAWN_AT_ONCE: list[Callable[[], Any]] = [
  Own,
  lambda: keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(3)),
  lambda: lambda shape, dtype=None: np.random.normal(size=shape),
  lambda: "glorot_uniform",  # Its seed is drawn by Keras, when it is made.
  lambda: np.ones(SIZE, np.float32),
]


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch, cpu_devices: list[str]) -> Iterator[None]:
  monkeypatch.setattr(mirror, "LARGE", 1)
  monkeypatch.setattr(mirror, "_KEPT_BYTES", 0)
  mtf.keras.enable()
  yield
  keras.distribution.set_distribution(None)
  mtf.keras.disable()


def distribution() -> Any:
  devices = keras.distribution.list_devices()[:4]
  mesh = keras.distribution.DeviceMesh((2, 2), ("data", "model"), devices)
  layouts = keras.distribution.LayoutMap(mesh)
  layouts["up/kernel"], layouts["down/kernel"] = (None, "model"), ("model", None)
  return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")


def has_value(variable: Any) -> bool:
  value = variable.value if isinstance(variable, keras.Variable) else variable
  with mirror.unnoticed():
    read = tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype)
  return bool(read.shape == value.shape)


def build(optimizer: str = "adam") -> keras.Model:
  keras.utils.set_random_seed(1)
  layers = [keras.layers.Dense(n, name=name) for n, name in ((16, "up"), (4, "down"))]
  model = keras.Sequential([keras.Input((8,)), *layers], name="net")
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(optimizer, loss, metrics=["accuracy"])
  return model


def gradient_of(model: keras.Model) -> Any:
  with tf.GradientTape() as tape:
    loss = tf.reduce_sum(model.layers[0].kernel ** 2)
  return tape.gradient(loss, model.layers[0].kernel.value)


def both() -> tuple[keras.Model, keras.Model]:
  """A model of Keras alone, and the same one on a mesh."""
  theirs = build()
  with distribution().scope():
    return theirs, build()


def assert_same(ours: keras.Model, theirs: keras.Model) -> None:
  pairs = zip(ours.get_weights(), theirs.get_weights(), strict=True)
  for a, b in [*pairs, *zip(ours.optimizer.variables, theirs.optimizer.variables, strict=True)]:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("initializer", DRAWN_LATER, ids=name_of)
def test_drawn_later_and_equal(initializer: Any, dtype: str) -> None:
  if isinstance(initializer, keras.initializers.Orthogonal) and dtype == "bfloat16":
    pytest.skip("Keras has it for TensorFlow's linear algebra, which has no bfloat16")
  expected = keras.Variable(initializer, shape=SIZE, dtype=dtype)
  keras.distribution.set_distribution(distribution())
  variable = keras.Variable(initializer, shape=SIZE, dtype=dtype)
  assert not has_value(variable) and variable.shape == SIZE and variable.dtype == dtype
  np.testing.assert_array_equal(np.asarray(variable), np.asarray(expected))
  assert has_value(variable)


@pytest.mark.parametrize("make", DRAWN_AT_ONCE)
def test_drawn_at_once(make: Callable[[], Any]) -> None:
  """What may draw something else another time."""
  values = []
  for d in (None, distribution()):
    keras.distribution.set_distribution(d)
    keras.utils.set_random_seed(1)
    initializer = make()
    shape = None if isinstance(initializer, np.ndarray) else SIZE
    variable = keras.Variable(initializer, shape=shape)
    assert has_value(variable)
    values.append(np.asarray(variable))
  np.testing.assert_array_equal(*values)


def test_a_step_holds_each_weight_once() -> None:
  theirs, ours = both()
  assert not has_value(ours.layers[0].bias)
  for model in (theirs, ours):
    model.fit(X[:32], Y[:32], batch_size=8, verbose=0, shuffle=False)
  # Slots too, the first values of which nobody has seen.
  assert not any(map(has_value, [*ours.variables, *ours.optimizer.variables[2:]]))
  ours.summary(print_fn=lambda *_, **__: None)
  assert not any(map(has_value, ours.variables))
  assert_same(ours, theirs)  # Which reads them.
  for model in (theirs, ours):
    model.layers[0].kernel.assign(model.layers[0].kernel * 0.5)
    model.train_on_batch(X[:8], Y[:8])
  assert not any(map(has_value, [*ours.variables, *ours.optimizer.variables[2:]]))
  assert_same(ours, theirs)


def test_saving_keeps_few_whole(tmp_path: pathlib.Path) -> None:
  theirs, ours = both()
  for model in (theirs, ours):
    model.fit(X[:16], Y[:16], batch_size=8, verbose=0, shuffle=False)
  ours.save(tmp_path / "ours.keras")
  filled = sum(map(has_value, [*ours.variables, *ours.optimizer.variables]))
  assert filled <= mirror._KEPT + 4  # And scalars, which the loop reads.
  again = keras.models.load_model(tmp_path / "ours.keras")
  assert_same(again, theirs)
  with distribution().scope():
    split = keras.models.load_model(tmp_path / "ours.keras")
  for model in (theirs, ours, split):
    model.fit(X[:16], Y[:16], batch_size=8, verbose=0, shuffle=False)
  assert_same(ours, theirs)
  assert_same(split, theirs)
  ours.load_weights(tmp_path / "ours.keras")
  theirs.set_weights(again.get_weights())
  np.testing.assert_allclose(ours.get_weights()[0], theirs.get_weights()[0], rtol=1e-6)


@pytest.mark.parametrize("steps", [0, 1])
def test_reading_keeps_one_whole(steps: int) -> None:
  theirs, ours = both()
  for _ in range(steps):
    for model in (theirs, ours):
      model.train_on_batch(X[:8], Y[:8])
  assert_same(ours, theirs)
  assert sum(map(has_value, [*ours.weights, *ours.optimizer.variables[2:]])) <= 1


def test_a_value_goes_to_the_slices_at_once() -> None:
  _, ours = both()
  kernel = ours.layers[0].kernel
  for _ in range(2):
    ours.train_on_batch(X[:8], Y[:8])
    kernel.assign(kernel + 1.0)
    expected = kernel.numpy() * 2.0
    assert kernel.value.assign(expected) is kernel.value
    assert not has_value(kernel)
    np.testing.assert_array_equal(kernel, expected)
  with pytest.raises(ValueError):
    kernel.value.assign(np.zeros(3, np.float32))
  np.testing.assert_array_equal(kernel, expected)


def test_loading_draws_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  theirs = build()
  theirs.save_weights(tmp_path / "net.weights.h5")
  with distribution().scope():
    ours = build()
    monkeypatch.setattr(keras.initializers.GlorotUniform, "__call__", None)
    ours.load_weights(tmp_path / "net.weights.h5")
  assert_same(ours, theirs)


@pytest.mark.parametrize("has_room", [True, False])
def test_loaded_weights_in_a_file(
  has_room: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """As several processes have them until the first step."""
  monkeypatch.setattr(spilling, "is_wanted", lambda: True)
  if not has_room:
    monkeypatch.setattr(spilling, "_File", no_room)
  theirs = build("sgd")
  with distribution().scope():
    ours = build("sgd")
  theirs.set_weights([w + 0.5 for w in theirs.get_weights()])
  path = tmp_path / "net.weights.h5"
  theirs.save_weights(path)
  for _ in range(2):
    ours.load_weights(path)
  path.unlink()
  assert not any(map(has_value, ours.weights))
  watchers = [mirror._WATCHED[id(w.value)].watchers[0] for w in ours.weights]
  assert all(isinstance(w.fetch, spilling.Spilled) for w in watchers)
  for model in (theirs, ours):
    model.train_on_batch(X[:8], Y[:8])
  assert not any(map(has_value, ours.weights))
  assert_same(ours, theirs)
  del watchers
  gc.collect()
  assert not spilling._CURRENT  # So its room on the disk is free again.


def no_room() -> Any:
  raise OSError("no room")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_value_in_a_file(dtype: str) -> None:
  values = [tf.cast(tf.reshape(tf.range(6) % n, [3, 2]), dtype) for n in (2, 3)]
  spilled = [spilling.Spilled(v) for v in values]
  for a, b in zip(spilled, values, strict=True):
    np.testing.assert_array_equal(a(), b)
    assert a().dtype == dtype and a.digest == spilling.Spilled(b).digest


@pytest.mark.parametrize(
  "use",
  [
    lambda model: model(X[:4]),
    lambda model: tf.function(model)(X[:4]),
    lambda model: model.predict(X[:4], verbose=0),
    lambda model: model.get_weights(),
    lambda model: keras.models.clone_model(model).set_weights(model.get_weights()),
    lambda model: model.layers[0].kernel.assign_add(np.ones((8, 16), "f")),
    lambda model: model.layers[0].kernel.value[1].assign(np.ones(16, "f")),
    lambda model: model.set_weights([2 * w for w in model.get_weights()]),
    gradient_of,
    lambda model: setattr(model.layers[0], "trainable", False),
  ],
)
def test_used_before_the_first_step_and_after_it(use: Callable[[keras.Model], Any]) -> None:
  theirs, ours = both()
  for _ in range(2):
    seen = [use(model) for model in (theirs, ours)]
    for a, b in zip(*map(tf.nest.flatten, seen), strict=True):
      if a is not None:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
    for model in (theirs, ours):
      model.train_on_batch(X[:8], Y[:8])
  assert_same(ours, theirs)


def test_what_another_compile_leaves_behind() -> None:
  """Somebody may hold the optimizer that was."""
  theirs, ours = both()
  before = []
  for model in (theirs, ours):
    model.train_on_batch(X[:8], Y[:8])
    before.append(model.optimizer)
    model.compile("sgd", model.loss)
    model.train_on_batch(X[:8], Y[:8])
  assert not has_value(ours.layers[0].kernel)
  for a, b in zip(*(o.variables for o in before), strict=True):
    np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-4, atol=1e-6)
  assert_same(ours, theirs)


def test_variables_outlive_their_model() -> None:
  theirs, ours = both()
  for model in (theirs, ours):
    model.train_on_batch(X[:8], Y[:8])
  kernel, watched = ours.layers[0].kernel.value, len(mirror._WATCHED)
  assert not has_value(kernel)
  del ours, model
  gc.collect()
  assert len(mirror._WATCHED) < watched  # Those that nobody holds are let go.
  np.testing.assert_allclose(kernel.numpy(), theirs.layers[0].kernel.numpy(), rtol=1e-4, atol=1e-6)
  assert has_value(kernel) and id(kernel) not in mirror._WATCHED


def test_models_that_nobody_trains_are_let_go() -> None:
  gc.collect()
  watched = len(mirror._WATCHED)
  with distribution().scope():
    build()
  gc.collect()
  assert len(mirror._WATCHED) == watched


def test_the_layout_of_training_takes_over() -> None:
  """A prediction decides a layout, the first step of training another one."""
  theirs = build()
  with mtf.keras.AutoParallel(4).scope():
    ours = build()
  for model in (theirs, ours):
    model.predict(X[:8], verbose=0)
    model.fit(X[:32], Y[:32], batch_size=16, verbose=0, shuffle=False)
  assert not has_value(ours.layers[0].kernel)
  assert_same(ours, theirs)


def test_two_meshes_share_weights() -> None:
  """Each step of one must be seen by the other, so the weights have a value of their own."""
  theirs, ours = build("sgd"), build("sgd")
  part = keras.Sequential(ours.layers, name="part")
  part.compile("sgd", ours.loss)
  runs = [mtf.keras.parallelize(m, placement("rows:2", "batch:rows")) for m in (ours, part)]
  for _ in range(2):
    for run in runs:
      run.train_on_batch(X[:8], Y[:8])
      theirs.train_on_batch(X[:8], Y[:8])
  np.testing.assert_allclose(ours(X[:4]), theirs(X[:4]), rtol=1e-4, atol=1e-5)


MEMORY = """
import keras
import mesh_tensorflow as mtf

def peak():
  lines = open("/proc/self/status").read().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

mtf.virtual_cpu_devices(2)
mtf.keras.enable()
keras.distribution.set_distribution(keras.distribution.DataParallel())
keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
before = peak()
layers = [keras.layers.Dense(4096, use_bias=False) for _ in range(8)]
model = keras.Sequential([keras.Input((4096,)), *layers])
print(model.count_params() * 4 >> 20, peak() - before)
"""


def test_memory_of_a_model_that_is_built(run_forked: Callable[..., Any]) -> None:
  whole, rise = map(int, run_forked(MEMORY).stdout.split())
  assert whole == 512 and rise < 100


def ten_million() -> keras.Model:
  keras.utils.set_random_seed(2)
  sizes = (4096, 1024, 2048)
  inputs = keras.Input((1,), dtype="int32")
  x = keras.layers.Embedding(4096, 512, name="embedding")(inputs)
  for size, name in zip(sizes, ("up", "down", "last")):
    x = keras.layers.Dense(size, name=name)(x)
  model = keras.Model(inputs, x, name="net")
  model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  return model


# Of HDF5, which is inside of .keras, too; .weights.json is of several files.
@pytest.mark.parametrize(
  "suffix", kept([".weights.h5", ".weights.json", ".keras"], [".weights.json", ".keras"])
)
def test_ten_million_values_are_those_of_keras(suffix: str, tmp_path: pathlib.Path) -> None:
  """Drawn when slices are made, loaded before there are some and after, and saved: bit for bit."""
  tokens = np.arange(4, dtype=np.int32)[:, None]
  path = tmp_path / f"net{suffix}"
  theirs = ten_million()
  assert theirs.count_params() > 10e6
  with distribution().scope():
    ours, others = ten_million(), ten_million()
  assert_bit_equal(ours, theirs)
  ours.predict(tokens, verbose=0)
  assert not any(map(has_value, ours.weights))
  assert_bit_equal(ours, theirs)
  ours.train_on_batch(tokens, tokens)
  save(ours, path)
  theirs.load_weights(path)
  others.load_weights(path)
  others.predict(tokens, verbose=0)
  assert_bit_equal(ours, theirs)
  assert_bit_equal(others, theirs)
  ours.train_on_batch(tokens, tokens)
  ours.load_weights(path)
  assert not any(map(has_value, ours.weights))
  assert_bit_equal(ours, theirs)


def save(model: keras.Model, path: pathlib.Path) -> None:
  if path.suffix == ".json":
    model.save_weights(path, max_shard_size=0.02)
    assert len(list(path.parent.glob("*.h5"))) > 2
  else:
    (model.save if path.suffix == ".keras" else model.save_weights)(path)


def assert_bit_equal(ours: keras.Model, theirs: keras.Model) -> None:
  for a, b in zip(ours.weights, theirs.weights, strict=True):
    np.testing.assert_array_equal(a.numpy(), b.numpy())


def with_vocabulary() -> keras.Model:
  x = ids = keras.Input((6,), dtype="int64")
  x = keras.layers.IntegerLookup(vocabulary=[3, 5, 8])(x)
  model = keras.Model(ids, keras.layers.Dense(2)(keras.layers.Embedding(4, 8)(x)))
  model.compile("adam", "mse")
  return model


@pytest.mark.parametrize("make", [build, with_vocabulary])
def test_large_archives_go_by_way_of_a_folder(
  make: Callable[[], keras.Model], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(archives, "LARGE", 1)
  path = tmp_path / "net.keras"
  with distribution().scope():
    ours = make()
    for replaced in (False, True):  # The second time there is a file.
      for v in ours.weights:
        v.assign(v + 1)
      if replaced:
        ours.save(path, True)
      else:
        keras.saving.save_model(ours, str(path))
      again = keras.models.load_model(path)
      for a, b in zip(again.weights, ours.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
  assert [f.name for f in tmp_path.iterdir()] == ["net.keras"]
  mtf.keras.disable()
  theirs = keras.models.load_model(path)
  for a, b in zip(theirs.weights, ours.weights, strict=True):
    np.testing.assert_array_equal(a.numpy(), b.numpy())
  mtf.keras.enable()
  if make is with_vocabulary:
    ids = np.array([[3, 5, 8, 4, 3, 5]])
    np.testing.assert_array_equal(theirs(ids), again(ids))


def test_an_archive_that_cannot_be_written_leaves_the_old_one(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(archives, "LARGE", 1)
  path = tmp_path / "net.keras"
  with distribution().scope():
    ours = build()
    ours.save(path)
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
      raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
      patched.setattr(archives.zipfile.ZipFile, "write", full)
      with pytest.raises(OSError, match="No space left"):
        ours.save(path)
      ours.save(tmp_path / "new.keras")  # In memory: there is nothing to lose.
    assert path.read_bytes() == before
    assert keras.models.load_model(tmp_path / "new.keras").name == "net"
    (tmp_path / "new.keras").unlink()
    with monkeypatch.context() as patched:
      patched.setattr(archives.zipfile.ZipFile, "extractall", full)
      again = keras.models.load_model(path)  # In memory.
    np.testing.assert_array_equal(again.get_weights()[0], ours.get_weights()[0])
    path.write_bytes(before[:-100])
    with pytest.raises(Exception, match="zip"):
      keras.models.load_model(path)
  assert [f.name for f in tmp_path.iterdir()] == ["net.keras"]


MEMORY_OF_SLICES = """
import gc, pathlib, sys
import keras
import numpy as np
import mesh_tensorflow as mtf

def memory(field):
  lines = open("/proc/self/status").read().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith(field)) // 1024

def rise():
  found = memory("VmHWM") - before
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  return found

mtf.virtual_cpu_devices(2)
mtf.keras.enable()
mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), ["cpu:0", "cpu:1"])
layouts = keras.distribution.LayoutMap(mesh)
layouts["kernel"] = (None, "model")
keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts))

def build(layers, width):
  dense = [keras.layers.Dense(width, use_bias=False) for _ in range(layers)]
  model = keras.Sequential([keras.Input((width,)), *dense])
  model.compile("sgd", "mse")
  return model

x = np.zeros((1, 8), np.float32)
build(12, 8).predict(x, verbose=0)
before = memory("VmRSS")
rise()
x = np.zeros((1, 2048), np.float32)
model, again = build(12, 2048), build(12, 2048)
rises = [rise()]
model.predict(x, verbose=0)
rises.append(rise())
model.save_weights(sys.argv[1])
rises.append(rise())
model.load_weights(sys.argv[1])
rises.append(rise())
del model
gc.collect()
again.load_weights(sys.argv[1])
again.predict(x, verbose=0)
rises.append(rise())
del again
gc.collect()
rise()
archive = sys.argv[1].replace(".weights.h5", ".keras")
model = build(12, 2048)
model.save(archive)
rises.append(rise())
del model
gc.collect()
model = keras.saving.load_model(archive)
rises.append(rise())
print(*rises)
"""


def test_memory_of_a_model_that_is_sliced(
  run_subprocess: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
  """12 weights of 16 MiB: slices of 192 MiB, and less than as much for programs and copies."""
  # So that what is freed is no longer resident.
  env = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
  done = run_subprocess(["-c", MEMORY_OF_SLICES, tmp_path / "net.weights.h5"], env=env)
  built, *others = map(int, done.stdout.split())
  assert built < 100
  assert all(rise < 340 for rise in others), others
