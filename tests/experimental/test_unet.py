"""The U-Net of `experimental`: data, model, losses, training; on several meshes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import flagsaver

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.experimental import (
  input_reader,
  model_executor,
  offline_data_aug,
  unet,
  unet_losses,
)
from tests.operations.comparing import placement, simd

SMALL = {
  "ct_resolution": 8, "image_nx_block": 2, "image_ny_block": 2, "batch_size_train": 2,
  "batch_size_eval": 2, "n_base_filters": 2, "network_depth": 2, "n_conv_per_block": 1,
  "mtf_dtype": "float32", "dropout_keep_p": 0.8, "n_dataset_processes": 2,
  "n_dataset_read_interleave": 2,
}  # fmt: skip
LAYOUT = "image_nx_block:r,image_ny_block:c"


@pytest.fixture(autouse=True)
def small_flags():
  if not unet.FLAGS.is_parsed():
    unet.FLAGS(["test"])
  with flagsaver.flagsaver(**SMALL):
    yield


def scan(seed=0, n=8):
  """A dark liver with a darker lesion, and their classes."""
  rng = np.random.default_rng(seed)
  place = np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), -1)
  center = rng.uniform(3, 5, 3)
  r = np.linalg.norm(place - center, axis=-1)
  label = (r < 3).astype("f") + (r < 1.6)
  return (0.5 + 0.2 * label + 0.02 * rng.normal(size=label.shape)).astype("f"), label.astype("f")


def write_scans(folder, number=2):
  for i in range(number):
    image, label = scan(i)
    offline_data_aug.save_to_tfrecord(image, label, None, i, str(folder), "scan")
  return str(folder / "*.tfrecords")


def batch(dataset_str="train"):
  images, labels = zip(*(scan(i) for i in range(2)))
  shapes = [s.to_integer_list for s in unet.get_input_mtf_shapes(dataset_str)]
  images = np.stack(images)
  if len(shapes[0]) == 6:  # One slice of each.
    images, labels = images[..., 4], [label[..., 4] for label in labels]
  return (
    images.reshape(shapes[0]),
    np.eye(3, dtype="f")[np.stack(labels).astype(int)].reshape(shapes[1]),
  )


def losses(impl, steps, in_function=True):
  """Losses of steps of training on one batch, by SGD."""
  images, labels = batch()
  shapes = unet.get_input_mtf_shapes("train")

  def program(images, labels):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    slices = [impl.import_tf_tensor(s, t).tensor_list for t, s in zip((images, labels), shapes)]
    _, loss, _, updates = unet.unet_with_spatial_partition(mesh, impl, "train", *slices)
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.outputs[0] for v in variables])
    updates = updates + mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, variables)
    lowering = mtf.Lowering(graph, {mesh: impl}, seed=3)
    with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
      return lowering.export_to_tf_tensor(loss)

  step = lambda: impl.run(program, [tf.constant(images), tf.constant(labels)])  # noqa: E731
  step = tf.function(step, autograph=False) if in_function else step
  return [float(step()) for _ in range(steps)]


def test_the_loss_does_not_depend_on_the_mesh():
  alone = losses(placement("", "r:1"), 3)
  assert len(set(alone)) == 3  # Dropout, and weights that change.
  np.testing.assert_allclose(losses(simd(LAYOUT, "r:2,c:2"), 3), alone, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("flat", [False, True], ids=["scans", "images"])
def test_fifty_losses_do_not_depend_on_the_mesh(flat):
  meshes = [("image_nx_block:r", "r:2"), (LAYOUT, "r:2,c:2")]
  with flagsaver.flagsaver(sampled_2d_slices=flat):
    alone = losses(placement("", "r:1"), 50)
    assert alone[-1] < 0.8 * alone[0]
    for layout, mesh in [*meshes, (f"{LAYOUT},batch:e", "r:2,c:2,e:2")]:
      np.testing.assert_allclose(losses(placement(layout, mesh), 50), alone, rtol=1e-4)


def test_names_of_variables():
  impl = placement(LAYOUT, "r:2,c:2")
  losses(impl, 1, in_function=False)
  names = {v.name: tuple(v.shape.to_integer_list) for v in impl.variable_store}
  assert names["conv_down_0_0/kernel"] == (3, 3, 3, 1, 2)
  assert names["conv_down_1_0/kernel"] == (3, 3, 3, 2, 4)
  assert names["conv_up_0_0/kernel"] == (3, 3, 3, 4, 2)
  assert names["deconv_0_0/kernel"] == (2, 2, 2, 2, 4)
  assert names["final_conv_3/kernel"] == (1, 1, 1, 2, 3)
  norm = {"batch_norm_scale", "batch_norm_bias", "bn_moving_mean", "bn_moving_variance"}
  assert {n.split("/")[1] for n in names if n.startswith("conv_up_0_0/")} == {"kernel", *norm}
  assert "final_conv_3/batch_norm_scale" not in names


def test_losses_and_metrics_are_those_of_their_formulas():
  rng = np.random.default_rng(1)
  y = rng.normal(size=[2, 1, 1, 4, 4, 4, 3]).astype("f")
  t = np.eye(3, dtype="f")[rng.integers(0, 3, y.shape[:-1])]
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  shape = "batch:2 nx:1 ny:1 sx:4 sy:4 sz:4 label_c:3"
  tensors = [mtf.import_tf_tensor(mesh, a, shape) for a in (y, t)]
  predictions, loss, metrics = unet_losses.loss_and_metrics(*tensors, unet.FLAGS)
  lowering = mtf.Lowering(graph, {mesh: placement("sx:r,sz:c", "r:2,c:2")})
  got = {n: float(lowering.export_to_tf_tensor(m)) for n, m in {**metrics, "loss": loss}.items()}

  p = np.exp(y) / np.exp(y).sum(-1, keepdims=True)
  liver, lesion = t[..., 1], t[..., 2]
  weight = 1 + liver * 7 + lesion * 8
  xen = np.mean(-np.log((p * t).sum(-1)) * weight)
  axes = tuple(range(1, 6))
  intersection, area = (p[..., 2] * lesion).sum(axes), (p[..., 2] + lesion).sum(axes)
  per_case = np.mean(-2 * intersection / (area + 0.1))
  together = -2 * intersection.sum() / (area.sum() + 0.1)
  hard = (y.argmax(-1) == 2).astype("f")
  hits, sums = (hard * lesion).sum(axes), (hard + lesion).sum(axes)
  expected = {
    "lesion_pred_ratio": hard.mean(),
    "lesion_label_ratio": lesion.mean(),
    "accuracy_of_all_classes": (y.argmax(-1) == t.argmax(-1)).mean(),
    "lesion_dice_per_case": np.mean(2 * hits / sums),
    "lesion_dice_global": 2 * hits.sum() / sums.sum(),
    "loss_xen": xen,
    "loss_dice": (per_case + together) / 2,
    "loss_dice_per_case": per_case,
    "loss_dice_global": together,
    "loss": 0.2 * (per_case + together) / 2 + 0.8 * xen,
  }
  assert set(got) == set(expected)
  for name, value in expected.items():
    assert got[name] == pytest.approx(value, rel=1e-4), name
  shapes = [p.shape.to_integer_list for p in predictions]
  assert shapes == [[2, 1, 1, 2, 2, 2]] * 3 + [[2], [2]]
  first = lowering.export_to_tf_tensor(predictions[0]).numpy()
  want = p[..., 1].reshape([2, 1, 1, 2, 2, 2, 2, 2, 2]).mean((4, 6, 8))
  np.testing.assert_allclose(first, want, rtol=1e-4)
  np.testing.assert_allclose(lowering.export_to_tf_tensor(predictions[3]), hits)


@pytest.mark.parametrize(
  "mesh,layout",
  [
    ("rows:2", "image_nx_block:rows"),
    pytest.param(
      "rows:2,columns:2", "image_nx_block:rows,image_ny_block:columns", marks=pytest.mark.long
    ),
  ],
)
def test_training_and_evaluation(tmp_path, caplog, capsys, mesh, layout):
  pattern = write_scans(tmp_path)
  run = tmp_path / "run"
  arguments = {
    "use_tpu": False, "mesh_shape": mesh, "num_training_loops": 1,
    "layout": layout, "num_train_iterations_per_loop": 2,
    "num_eval_iterations_per_loop": 1, "train_file_pattern": pattern, "lr_drop_steps": 2.0,
    "eval_file_pattern": pattern, "checkpoint_dir": str(run), "image_noise_probability": 1.0,
    "image_noise_ratio": 0.01, "pred_output_dir": str(tmp_path / "predictions"),
  }  # fmt: skip
  with flagsaver.flagsaver(**arguments), caplog.at_level("INFO", "mesh_tensorflow"):
    model_executor.train_and_eval()
    assert mtf_step(run) == 2
  said = capsys.readouterr().out
  assert "step       2/2  loss" in said and "step       2  eval loss" in said
  assert "lesion_dice_per_case" in said and "dice_per_case" in caplog.text
  reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
  assert reports[0]["learning_rate"] == pytest.approx(0.003) and "loss_xen" in reports[0]
  files = sorted(p.name for p in (tmp_path / "predictions" / "2").iterdir())
  assert files == sorted(
    f"{n}_2_{i}.npy" for n in ("label", "pred_lesion", "pred_liver") for i in (0, 1)
  )
  truth = np.load(tmp_path / "predictions" / "2" / "label_2_0.npy")
  assert truth.shape == (4, 4, 4)
  # The scan as a whole: blocks are back in their places.
  lesions = [(scan(i)[1] == 2).reshape([4, 2, 4, 2, 4, 2]).mean((1, 3, 5)) for i in range(2)]
  assert min(np.abs(truth - lesion).max() for lesion in lesions) < 1e-6
  assert list(run.glob("events*"))


@pytest.mark.long
def test_training_goes_on_from_a_checkpoint_on_another_mesh(tmp_path):
  pattern = write_scans(tmp_path)
  arguments = {
    "use_tpu": False, "num_training_loops": 1, "layout": "image_nx_block:rows",
    "num_train_iterations_per_loop": 2, "num_eval_iterations_per_loop": 0, "lr_drop_steps": 2.0,
    "train_file_pattern": pattern, "checkpoint_dir": str(tmp_path / "run"),
  }  # fmt: skip
  with flagsaver.flagsaver(**arguments):
    for mesh in ("rows:2", "rows:1"):
      with flagsaver.flagsaver(mesh_shape=mesh):
        model_executor.train_and_eval()
  assert mtf_step(tmp_path / "run") == 4
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  (last,) = [r for r in map(json.loads, lines) if r["step"] == 4]
  assert last["learning_rate"] == pytest.approx(0.0009)


def mtf_step(run):
  (newest,) = [p for p in [tf.train.latest_checkpoint(str(run))] if p]
  return int(newest.rsplit("-", 1)[1])


def test_2d_evaluation_has_all_slices_in_order(tmp_path):
  pattern = write_scans(tmp_path, 1)
  with flagsaver.flagsaver(sampled_2d_slices=True, image_c=3, eval_file_pattern=pattern):
    data = unet.get_dataset_creator("eval")()
    images, labels = zip(*[(x.numpy(), t.numpy()) for x, t in data.take(7)])
  image, label = scan(0)
  for i in (0, 5):
    at = images[i].reshape([8, 8, 3])
    np.testing.assert_allclose(at, np.clip(image[..., i : i + 3] / 1024 + 0.5, 0, 1), rtol=1e-6)
    np.testing.assert_array_equal(labels[i].reshape([8, 8, 3]).argmax(-1), label[..., i + 1])
  np.testing.assert_array_equal(images[0], images[6])  # Endless.


def test_pnum_map_of_the_reference():
  impl = placement("batch:cores,x:rows", "rows:2,cols:2,cores:2")
  table = input_reader._pnum_map(impl, mtf.convert_to_shape("batch:4 x:6"))
  assert table.tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


@pytest.mark.parametrize("is_eval", [False, True])
def test_reader_of_parts(is_eval):
  created = []

  def create():
    created.append(1)
    first = 100 * len(created)
    return tf.data.Dataset.range(first, first + 50).map(lambda i: (tf.repeat(i, 6), i))

  impl = simd("batch:cores,x:rows", "rows:2,cols:2,cores:2")
  reader = input_reader.SimdMeshImplInputReader(
    impl, create, ["batch:4 x:6", "batch:4"], is_eval_mode=is_eval
  )
  thread = reader.start_infeed_thread(None, 2, 0.0)
  x, y = reader.infeed_queue.get(timeout=60)
  thread.join(60)
  assert len(created) == (1 if is_eval else 2)
  for pnum in range(8):
    core, row = pnum % 2, pnum // 4
    first = 100 + 2 * core if is_eval else 100 * (core + 1)
    np.testing.assert_array_equal(y[pnum], [first, first + 1])
    np.testing.assert_array_equal(x[pnum], np.repeat([[first], [first + 1]], 3, 1), str(row))


def test_the_end_of_the_data_is_told():
  impl = placement("batch:r", "r:2")
  reader = input_reader.SimdMeshImplInputReader(
    impl, lambda: tf.data.Dataset.range(4), ["batch:4"], is_eval_mode=True
  )
  reader.start_infeed_thread(None, -1, 0.0)
  reader.infeed_queue.get(timeout=60)
  assert isinstance(reader.infeed_queue.get(timeout=60), mtf.DataError)


def test_mesh_context_without_a_tpu():
  context = model_executor.MeshContext(None, False, "r:2", "batch:r")
  assert context.num_cores is context.num_hosts is context.device_assignment is None
  graph, mesh, impl = context.create_graph_mesh_and_mesh_impl()
  assert "my_mesh" in repr(mesh) and mesh.graph is graph and impl is context.mesh_impl
  with pytest.raises(ConfigError):
    model_executor.MeshContext(None, True, "r:2", "batch:r")


def test_wrong_use_is_told():
  with pytest.raises(ConfigError, match="'train' or 'eval'"):
    unet.get_input_mtf_shapes("test")
  with flagsaver.flagsaver(image_nx_block=3), pytest.raises(ConfigError, match="image_nx_block 3"):
    unet.get_input_mtf_shapes("train")
  with pytest.raises(ConfigError, match="train_file_pattern"):
    unet.get_dataset_creator("train")()
  with flagsaver.flagsaver(network_depth=4), pytest.raises(ConfigError, match="image_sx_block=4"):
    losses(placement("", "r:1"), 1, in_function=False)
  with pytest.raises(mtf.SizeError, match="one batch size"):
    input_reader.PlacementMeshImplInputReader(
      placement("", "r:1"), lambda: tf.data.Dataset.range(4), ["batch:4 x:2", "batch:2"]
    )


PROGRAM = """
from absl import app
from mesh_tensorflow.experimental import model_executor
app.run(model_executor.main)
"""


@pytest.mark.slow
def test_the_program_makes_its_own_devices(tmp_path, run_forked):
  """As the command of its docstring does: in a process where TensorFlow has not started."""
  pattern = write_scans(tmp_path)
  flags = [f"--{n}={v}" for n, v in SMALL.items()]
  run_forked([
    "-c", PROGRAM, "--nouse_tpu", "--mesh_shape=rows:2,columns:2", *flags,
    "--layout=image_nx_block:rows,image_ny_block:columns", f"--train_file_pattern={pattern}",
    f"--eval_file_pattern={pattern}", f"--checkpoint_dir={tmp_path}/m", "--num_training_loops=1",
    "--num_train_iterations_per_loop=2", "--num_eval_iterations_per_loop=1",
    f"--pred_output_dir={tmp_path}/p",
  ])  # fmt: skip
  names = {p.name for p in tmp_path.rglob("*") if p.is_file()}
  assert {"model.ckpt-2.index", "pred_lesion_2_0.npy", "pred_liver_2_1.npy"} <= names


FLAGS_PROGRAM = """
from mesh_tensorflow.experimental import model_executor, offline_data_aug, unet
flags = unet.FLAGS
defaults = {
  "lr": 0.003, "mesh_shape": "rows:4, columns:4, cores:2", "num_train_iterations_per_loop": 500,
  "layout": "batch:cores, image_nx_block:rows, image_ny_block:columns", "use_tpu": True,
  "xen_lesion_weight": 16.0, "n_base_filters": 32, "mtf_dtype": "bfloat16", "dice_epsilon": 0.1,
  "num_data_aug": 1000, "process_no": None, "output_file_prefix": "augmented", "master": "",
}
found = {n: flags[n].default for n in defaults}
assert found == defaults, found
by_module = {m: {f.name for f in fs} for m, fs in flags.flags_by_module_dict().items()}
assert {"layout", "image_c"} <= by_module[unet.__name__], by_module
assert {"lr", "mesh_shape"} <= by_module[model_executor.__name__], by_module
# With flags of the same names in one process, which absl refuses.
from mesh_tensorflow.bert import run_classifier
assert flags["mesh_shape"].default == defaults["mesh_shape"]
"""


def test_flags_have_the_archived_defaults(run_forked):
  """Facts of the archived package: a sample of names and defaults of its three programs."""
  run_forked(["-c", FLAGS_PROGRAM])
