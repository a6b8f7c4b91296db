"""The examples: they learn, the mesh does not change what they compute, and errors are clear."""

from __future__ import annotations

import gzip
import importlib
import re

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf


@pytest.fixture
def example():
  """Imports a module of the folder `examples`."""
  return lambda name: importlib.import_module(f"mesh_tensorflow.examples.{name}")


def _run(run_forked, repository, name: str, *flags: str, **kwargs):
  return run_forked([str(repository / "examples" / name), *flags], timeout=150, **kwargs)


# ------------------------------------------------------------------------ mnist.py

SMALL = ["--made_examples", "2000", "--hidden_size", "64", "--batch_size", "50"]


@pytest.mark.long
def test_mnist_reads_drawn_digits(run_forked, repository, tmp_path, example, capsys):
  """Trains on 2x2 devices and goes on from its checkpoint."""
  flags = [*SMALL, "--data_dir", str(tmp_path / "none"), "--model_dir", str(tmp_path / "model")]
  out = _run(run_forked, repository, "mnist.py", *flags, "--train_epochs", "2").stdout
  assert "2000 digits drawn by this program, 400 more to test" in out
  assert "Mesh b1:2;b2:2 (placement), layout row_blocks:b1;col_blocks:b2" in out
  accuracy = float(re.search(r"accuracy on 400 test images: ([\d.]+)%", out).group(1))
  assert accuracy > 50  # Chance is 10; an untrained model gives about that.
  losses = [float(x) for x in re.findall(r"loss ([\d.]+)  test", out)]
  assert losses[1] < losses[0] < 2.31

  example("mnist").main([*flags, "--train_epochs", "2"])
  again = capsys.readouterr().out
  assert f"Going on from {tmp_path / 'model'}" in again
  assert "epoch" not in again
  assert f"accuracy on 400 test images: {accuracy:.2f}%" in again


def _mnist_losses(example, impl, steps: int = 3) -> list[float]:
  """Losses of a few training steps, then what an evaluation gives."""
  mnist, data = example("mnist"), example("mnist_dataset")
  args = mnist.parse_args(["--batch_size", "8", "--hidden_size", "16"])
  images, labels = data.draw_digits(8 * steps, seed=3)
  train = mnist.make_step(impl, args, "train")
  losses = []
  for i in range(steps):
    rows = slice(8 * i, 8 * i + 8)
    losses.append(float(train(tf.constant(images[rows]), tf.constant(labels[rows]))[0]))
  evaluated = mnist.make_step(impl, args, "eval")(images[:8], labels[:8])
  return losses + [float(x) for x in evaluated]


@pytest.mark.slow
def test_mnist_on_split_images_equals_one_device(example, cpu_devices):
  shape, layout = "b1:2;b2:2", "row_blocks:b1;col_blocks:b2"
  one = _mnist_losses(example, mtf.PlacementMeshImpl([], {}, [""]))
  assert one[2] < one[0]
  placement = mtf.PlacementMeshImpl(shape, layout, cpu_devices[:4])
  np.testing.assert_allclose(_mnist_losses(example, placement), one, rtol=2e-4)
  simd = mtf.SimdMeshImpl(shape, layout, cpu_devices[:4])
  np.testing.assert_allclose(_mnist_losses(example, simd), one, rtol=2e-4)


def test_mnist_evaluates_every_row_once(example, cpu_devices):
  """Also those of a batch that is not full."""
  mnist, data = example("mnist"), example("mnist_dataset")
  impl = mtf.PlacementMeshImpl([], {}, [""])
  images, labels = data.draw_digits(11, seed=5)
  by_size = []
  for size in ("4", "11"):
    args = mnist.parse_args(["--batch_size", size, "--hidden_size", "16"])
    step = mnist.make_step(impl, args, "eval")
    by_size.append(mnist.evaluate(step, images, labels, args))
  np.testing.assert_allclose(by_size[0], by_size[1], rtol=1e-5)


def test_drawn_digits(example):
  data = example("mnist_dataset")
  images, labels = data.draw_digits(500, seed=0)
  assert images.shape == (500, 784)
  assert images.dtype == np.float32
  assert images.min() >= 0.0
  assert images.max() <= 1.0
  assert set(labels) == set(range(10))
  again, _ = data.draw_digits(500, seed=0)
  np.testing.assert_array_equal(images, again)
  assert not np.array_equal(images, data.draw_digits(500, seed=1)[0])
  # The drawings differ, and those of a digit resemble its mean more than other means, mostly.
  assert len(np.unique(images, axis=0)) == 500
  means = np.stack([images[labels == d].mean(0) for d in range(10)])
  nearest = np.argmin(((images[:, None] - means) ** 2).sum(-1), axis=1)
  assert 0.5 < np.mean(nearest == labels) < 1.0


def _write_idx(path, magic: int, values: np.ndarray, opener=open) -> None:
  sizes = np.array([magic, *values.shape], ">u4").tobytes()
  with opener(path, "wb") as f:
    f.write(sizes + values.astype(np.uint8).tobytes())


@pytest.fixture
def mnist_files(tmp_path):
  """A folder with the four files: 12 images to train and 5 to test; two files are compressed."""
  rng = np.random.default_rng(0)
  for split, n in [("train", 12), ("t10k", 5)]:
    images = rng.integers(0, 256, [n, 28, 28])
    _write_idx(tmp_path / f"{split}-images-idx3-ubyte.gz", 2051, images, gzip.open)
    _write_idx(tmp_path / f"{split}-labels-idx1-ubyte", 2049, np.arange(n) % 10)
    if split == "train":
      np.save(tmp_path / "expected.npy", images)
  return tmp_path


def test_mnist_files_are_read(example, mnist_files):
  data = example("mnist_dataset")
  images, labels, source = data.load(str(mnist_files), "train", 99)
  expected = np.load(mnist_files / "expected.npy").reshape(12, 784) / 255.0
  np.testing.assert_allclose(images, expected, rtol=1e-6)
  np.testing.assert_array_equal(labels, np.arange(12) % 10)
  assert str(mnist_files) in source
  assert len(data.load(str(mnist_files), "test", 99)[0]) == 5
  image, label = next(iter(data.dataset(images, labels)))
  assert image.shape == [784]
  assert image.dtype == tf.float32
  assert label.dtype == tf.int32


def _cut(folder):
  path = folder / "train-labels-idx1-ubyte"
  path.write_bytes(path.read_bytes()[:-2])


def _cut_gz(folder):
  path = folder / "train-images-idx3-ubyte.gz"
  path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize(
  ("damage", "words"),
  [
    (_cut, ["train-labels", "18 bytes", "20", "damaged"]),
    (_cut_gz, ["train-images-idx3-ubyte.gz", "cannot be read"]),
    (
      lambda f: (f / "train-labels-idx1-ubyte").write_bytes(b""),
      ["train-labels", "number 0", "2049"],
    ),
    (
      lambda f: (f / "train-labels-idx1-ubyte").unlink(),
      ["some of the MNIST files", "not train-labels-idx1-ubyte"],
    ),
    (
      lambda f: _write_idx(f / "train-labels-idx1-ubyte", 2051, np.zeros([12])),
      ["train-labels", "2051", "2049"],
    ),
    (
      lambda f: _write_idx(f / "train-labels-idx1-ubyte", 2049, np.zeros([11])),
      ["12 images", "11 labels"],
    ),
    (
      lambda f: _write_idx(f / "train-labels-idx1-ubyte", 2049, np.full([12], 10)),
      ["train-labels", "label 10", "0 to 9"],
    ),
    (
      lambda f: _write_idx(
        f / "train-images-idx3-ubyte.gz", 2051, np.zeros([12, 27, 28]), gzip.open
      ),
      ["train-images", "27 x 28", "28 x 28"],
    ),
  ],
)
def test_damaged_mnist_files(example, mnist_files, damage, words):
  damage(mnist_files)
  with pytest.raises(mtf.DataError) as error:
    example("mnist_dataset").load(str(mnist_files), "train", 99)
  missing = [w for w in words if w not in str(error.value)]
  assert not missing, f"{missing} not in: {error.value}"


def test_mnist_stops_at_a_damaged_file(example, mnist_files):
  _cut(mnist_files)
  with pytest.raises(mtf.DataError, match="damaged"):
    example("mnist").main(["--data_dir", str(mnist_files)])


def test_mnist_needs_a_whole_batch(example, mnist_files):
  with pytest.raises(mtf.DataError, match="12 images are not one batch of 200"):
    example("mnist").main(["--data_dir", str(mnist_files), "--model_dir", ""])


# -------------------------------------------------------------------- toy_model.py

FLOATS = ["--master_dtype", "float32"]


def _toy_losses(out: str) -> dict[int, float]:
  return {int(s): float(x) for s, x in re.findall(r"step +(\d+)  loss ([\d.]+)", out)}


def test_toy_model_trains_evaluates_and_goes_on(example, tmp_path, capsys):
  """One run of 60 steps, and one of 40 that is started again, end at the same weights."""
  flags = [*FLOATS, "--lr", "0.2", "--iterations", "10", "--steps_per_checkpoint", "20"]

  def run(*more):
    example("toy_model").main([*flags, *more])
    return capsys.readouterr().out

  whole = run("--train_steps", "60")
  assert "Mesh all:8 (placement), layout hidden_odd:all" in whole
  assert "No checkpoints are written" in whole
  evaluated = [float(x) for x in re.findall(r"eval loss ([\d.]+)", whole)]
  assert len(evaluated) == 3
  assert evaluated[2] < 0.8 * evaluated[0]
  run("--train_steps", "40", "--model_dir", str(tmp_path))
  rest = run("--train_steps", "60", "--model_dir", str(tmp_path))
  assert f"Going on from {tmp_path}" in rest
  assert list(_toy_losses(rest)) == [50, 60]
  assert _toy_losses(rest)[60] == pytest.approx(_toy_losses(whole)[60], rel=1e-4)
  assert float(re.findall(r"eval loss ([\d.]+)", rest)[-1]) == pytest.approx(evaluated[2], rel=1e-4)


def test_toy_model_tells_of_a_nan(run_forked, repository, tmp_path):
  flags = ["--step_with_nan", "7", "--train_steps", "40", "--iterations", "5"]
  result = _run(
    run_forked, repository, "toy_model.py", *flags, "--model_dir", str(tmp_path), check=False
  )
  assert result.returncode == 1
  last = result.stderr.splitlines()[-1]
  assert last.startswith("NonFiniteError: the loss of step 7 is nan")
  assert not list(tmp_path.glob("model.ckpt*"))


def _toy_run(toy, impl, *flags: str) -> np.ndarray:
  args = toy.parse_args(["--batch_size", "8", "--num_hidden_layers", "2", "--lr", "0.1", *flags])
  trainer = toy.ToyTrainer(impl, args)
  losses = trainer.train(trainer.batches(0), 0, 4)
  return np.append(losses, float(trainer.evaluate()))


@pytest.mark.parametrize(
  ("kind", "shape", "layout", "optimizer"),
  [
    pytest.param("placement", "all:8", "hidden_odd:all", "SGD", marks=pytest.mark.long),
    ("simd", "r:2,c:2", "batch:r,hidden_even:c", "SGD"),
    ("placement", "r:2,c:2", "batch:r,io:c", "Adafactor"),
  ],
)
def test_toy_model_is_the_same_on_every_mesh(example, cpu_devices, kind, shape, layout, optimizer):
  toy = example("toy_model")
  flags = [*FLOATS, "--optimizer", optimizer]
  one = _toy_run(toy, mtf.PlacementMeshImpl([], {}, [""]), *flags)
  make = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = make(shape, layout, cpu_devices[: mtf.convert_to_shape(shape).size])
  np.testing.assert_allclose(_toy_run(toy, impl, *flags), one, rtol=1e-4)


@pytest.mark.parametrize(
  ("name", "flags", "words"),
  [
    (
      "toy_model",
      ["--layout", "hiden_odd:all"],
      "no tensor of the model has a dimension 'hiden_odd'",
    ),
    ("toy_model", ["--layout", "hidden_odd:al"], "the mesh has no dimension 'al'; it has all; did"),
    ("mnist", ["--layout", "row_blocs:b1", *SMALL], "did you mean row_blocks"),
    (
      "mnist",
      ["--layout", "row_blocks:b3", *SMALL],
      "the mesh has no dimension 'b3'; it has b1, b2",
    ),
  ],
)
def test_a_layout_name_that_nothing_has(example, name, flags, words, tmp_path):
  """A typing error would train, silently, as if the rule were not there."""
  data = ["--data_dir", str(tmp_path)] if name == "mnist" else []
  with pytest.raises(mtf.LayoutError, match=words):
    example(name).main([*flags, *data])


def test_toy_model_dtypes(example):
  toy = example("toy_model")
  impl = mtf.PlacementMeshImpl([], {}, [""])
  losses = _toy_run(toy, impl, "--activation_dtype", "bfloat16")
  assert np.isfinite(losses).all()
  stored = impl.variable_store["layer_1/kernel"]
  assert (stored.master_dtype, stored.slice_dtype) == (tf.bfloat16, tf.float32)
  assert stored.shape.dimension_names == ["io", "hidden_odd"]
  assert impl.variable_store["layer_2/kernel"].shape.dimension_names == [
    "hidden_odd",
    "hidden_even",
  ]
  assert impl.variable_store["layer_3/kernel"].shape.dimension_names == ["hidden_even", "io"]


@pytest.mark.parametrize("name", ["toy_model", "mnist"])
def test_help(name, example, capsys):
  with pytest.raises(SystemExit):
    example(name).main(["--help"])
  out = capsys.readouterr().out
  for flag in ("--mesh_shape", "--layout", "--batch_size", "--model_dir", "default:"):
    assert flag in out


# ------------------------------------------------------------------------ keras_mesh.py


@pytest.mark.long  # tests/keras has shorter ones.
def test_keras_mesh_learns(run_forked, repository):
  out = _run(run_forked, repository, "keras_mesh.py").stdout
  losses = [float(x) for x in re.findall(r"loss: ([\d.]+)", out)]
  assert len(losses) == 4
  assert losses[-1] < 0.8 * losses[0]
  assert "AutoParallel: mesh rows:2,cols:2; split: " in out and "what splits them" in out
  assert re.search(r"next after 5, 8, 11: \d+$", out.rstrip())


# ------------------------------------------------------------------------ own_loop.py


def test_own_loop_goes_on_with_another_layout(tmp_path, example, capsys):
  """The losses do not depend on where a run was interrupted, nor on mesh and layout."""
  own_loop = example("own_loop")
  folder = ["--model_dir", str(tmp_path / "a")]
  own_loop.main([*folder, "--steps", "100"])
  own_loop.main([*folder, "--steps", "200", "--mesh_shape", "cols:2", "--layout", "hidden:cols"])
  split = capsys.readouterr().out
  assert f"Going on from {tmp_path / 'a' / 'model.ckpt-100'}" in split
  whole = ["--steps", "200", "--mesh_shape", "one:1", "--layout", "", "--implementation=placement"]
  own_loop.main(["--model_dir", str(tmp_path / "b"), *whole])
  found = [re.findall(r"^step.*$", text, re.M) for text in (split, capsys.readouterr().out)]
  assert found[0] == found[1]
  assert len(found[0]) == 2
  assert float(re.search(r"held out ([\d.]+)%", found[0][1])[1]) > 90


def test_own_loop_tells_of_a_layout_that_matches_nothing(tmp_path, example):
  with pytest.raises(mtf.LayoutError, match="layout rule widht:cols: .*the dimensions are"):
    example("own_loop").main(["--model_dir", str(tmp_path), "--layout", "widht:cols"])
