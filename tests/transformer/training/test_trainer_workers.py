"""The trainer on several workers trains as on one device; worker count and mesh may change."""

from __future__ import annotations

import json

import gin
import numpy as np
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.training import model_files
from mesh_tensorflow.transformer import gin_config, utils
from tests.transformer import worker_processes as program

STANDARD = "batch:batch,heads:model,d_ff:model,vocab:model"
# (mesh, layout): what is split across workers is the first dimension of the mesh.
LAYOUTS = [
  ("batch:2,model:2", STANDARD),
  ("model:2,batch:2", STANDARD),
  ("all:4", "batch:all"),
  ("all:4", "heads:all"),
  ("all:4", "d_ff:all"),
  ("all:4", "vocab:all"),
  ("all:4", "heads:all,d_ff:all"),
  ("all:4", "heads:all,vocab:all"),
  ("all:4", "heads:all,d_ff:all,vocab:all"),
]
# Four processes, each of which has a part of the weights; two are trained with further below.
FOUR = ("model:4", STANDARD)

# Slices round otherwise than whole tensors, on processors without AVX-512 more so, and Adam's first
# steps amplify it: 7e-5 after 8 steps there, below 2e-5 elsewhere.
LOSSES = 2e-4
NORMS = 5e-3


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
  """The folder of a training on one device."""
  folder = tmp_path_factory.mktemp("one") / "model"
  program.run(1, program.trainer_arguments(folder))
  return folder


@pytest.fixture(scope="module")
def reference(one_device):
  """The losses of one device."""
  folder = one_device
  losses = program.losses(folder)
  assert sorted(losses) == list(range(1, 9))
  assert losses[8] < losses[1] - 0.3  # It learns.
  return losses


@pytest.fixture(scope="module")
def four(tmp_path_factory):
  """The folder of a training by four workers, and what each printed."""
  folder = tmp_path_factory.mktemp("four")
  arguments = program.trainer_arguments(folder / "model", *program.on_mesh(*FOUR))
  with program.processes(folder, 4, arguments) as group:
    assert group.wait() == [0] * 4, "\n".join(group.text(i) for i in range(4))
  return folder / "model", [group.text(i) for i in range(4)]


@pytest.mark.subprocess
def test_same_losses_as_one_device(four, reference):
  folder, texts = four
  losses = program.losses(folder)
  np.testing.assert_allclose(list(losses.values()), list(reference.values()), rtol=LOSSES)
  # The chief alone reports.
  assert texts[0].count("step       8/8") == 1
  # TensorFlow 2.16 notes of its connection what no setting silences.
  lines = [line for text in texts[1:] for line in text.splitlines()]
  assert [line for line in lines if "coordination_service_agent" not in line] == []
  assert len(list(folder.glob("command*"))) == 1


@pytest.mark.subprocess
def test_norms_are_those_of_one_device(four, one_device):
  """Summed over the slices of four processes; one of them writes them."""
  for ours, reference in zip(
    model_files.read_metrics(str(four[0])), model_files.read_metrics(str(one_device))
  ):
    assert ours["step"] == reference["step"]
    for name in ("gradient_norm", "parameter_norm", "update_norm"):
      assert ours[name] == pytest.approx(reference[name], rel=NORMS) and ours[name] > 0
  assert ours["step"] == 8


@pytest.mark.long
@pytest.mark.subprocess
@pytest.mark.parametrize("layout", LAYOUTS, ids=",".join)
@pytest.mark.parametrize("workers", [2, 4, 1])
def test_same_losses_on_all_layouts(workers, layout, reference, tmp_path):
  bindings = program.on_mesh(*layout)
  program.run(workers, program.trainer_arguments(tmp_path / "model", *bindings))
  losses = program.losses(tmp_path / "model")
  np.testing.assert_allclose(list(losses.values()), list(reference.values()), rtol=LOSSES)


READ = """
import sys
import numpy as np
import tensorflow as tf
for folder, file in (sys.argv[1:3], sys.argv[3:]):
  reader = tf.train.load_checkpoint(folder)
  names = reader.get_variable_to_shape_map()
  np.savez(file, **{name.replace("/", "|"): reader.get_tensor(name) for name in names})
assert "mesh_tensorflow" not in sys.modules
"""


@pytest.mark.long
@pytest.mark.subprocess
def test_tensorflow_alone_reads_what_four_workers_saved(four, one_device, tmp_path, run_subprocess):
  folders = {"four": four[0], "one": one_device}
  assert len(list(folders["four"].glob("model.ckpt-8.data-*-of-00004"))) == 4  # A part of each.
  pairs = [str(x) for name, folder in folders.items() for x in (folder, tmp_path / name)]
  run_subprocess(["-c", READ, *pairs], cwd=tmp_path)
  read = {name: np.load(tmp_path / f"{name}.npz") for name in folders}
  assert len(read["four"].files) > 30 and set(read["four"].files) == set(read["one"].files)
  for name in read["four"].files:
    np.testing.assert_allclose(
      read["four"][name], read["one"][name], rtol=1e-3, atol=1e-4, err_msg=name
    )


@pytest.mark.long
@pytest.mark.subprocess
def test_another_number_of_workers_goes_on(reference, tmp_path):
  """Four steps by 2 workers, two by one process, with the position in the data from files."""
  folder = tmp_path / "model"
  kept = "run.checkpoint_input_pipeline = True"
  two = program.on_mesh("batch:2", "batch:batch")
  program.run(2, program.trainer_arguments(folder, *two, kept, "run.train_steps = 4"))
  assert len(list(folder.glob("model.ckpt-4.with-input_pipeline*.index"))) == 2
  out = program.run(
    1, program.trainer_arguments(folder, *program.on_mesh("model:4", STANDARD), kept)
  )
  # Its rows are others, so it skips what was seen.
  assert "position in the data was not saved at step 4" in out
  losses = program.losses(folder)
  np.testing.assert_allclose(list(losses.values()), list(reference.values()), rtol=LOSSES)


@pytest.mark.parametrize(
  ("mesh_shape", "binding", "words"),
  [
    ("all:3", "run.seed = 0", "mesh of 3 processors .* by 2 workers"),
    ("all:2", "run.mesh_implementation = 'placement'", "'placement', .* TF_CONFIG names 2 workers"),
    ("all:2", "run.mode = 'export_infer'", "'export_infer' runs in one process"),
  ],
)
def test_settings_that_do_not_go_with_workers(mesh_shape, binding, words, tmp_path, monkeypatch):
  """They are told before anybody waits for anybody."""
  task = {"type": "worker", "index": 1}
  cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
  monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
  (tmp_path / "text.txt").write_text(program.TEXT)
  gin.clear_config()
  bindings = [*program.SMALL, *program.on_mesh(mesh_shape, ""), binding]
  gin_config.parse_gin(
    ["problems/tinyshakespeare.gin"], [f"text_file = '{tmp_path}/text.txt'", *bindings]
  )
  with pytest.raises(errors.MeshError, match=words):
    utils.run(None, None, None, None, str(tmp_path / "model"))
