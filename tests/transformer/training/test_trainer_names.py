"""Facts about the trainer's small functions."""

from __future__ import annotations

import itertools
import threading
import time

import gin
import numpy as np
import pytest
from absl import flags

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.modes import chosen_checkpoints
from tests.transformer import small_checkpoints


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    (("4x4", 8), "batch:4,model:8"),
    (("v3-8", 1), "batch:8"),
    (("2x2x2", 2), "batch:8,model:2"),
    (("2x2", 1, 2), "ensemble:2,batch:4"),
    (("4x4_twisted", 2), "batch:16,model:2"),
    (("4x4_untwisted", 32), "model:32"),
    (("v2-1", 1), ""),
  ],
)
def test_tpu_mesh_shape(arguments, expected):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  shape = utils.tpu_mesh_shape(*arguments)
  assert [f"{d.name}:{d.size}" for d in shape] == [x for x in expected.split(",") if x]


@pytest.mark.parametrize(
  ("method", "expected"),
  [
    (("sequences_per_batch", 7), 7),
    (("tokens_per_batch", 2048), 4),
    (("sequences_per_replica", 3), 24),
    (("tokens_per_replica", 1024), 16),
    (("tokens_per_batch", 2049), "no multiple of the sequence length 512"),
    (("words_per_batch", 1), "unknown method 'words_per_batch'"),
  ],
)
def test_compute_batch_size(method, expected):
  lengths = {"inputs": 512, "targets": 128}
  mesh, layout = (
    mtf.convert_to_shape("a:4,b:2"),
    mtf.convert_to_layout_rules("batch:a,outer_batch:b"),
  )
  if isinstance(expected, int):
    assert utils.compute_batch_size(lengths, mesh, layout, method) == expected
    return
  with pytest.raises(ValueError, match=expected):
    utils.compute_batch_size(lengths, mesh, layout, method)


def test_microbatches_and_steps():
  lengths = {"inputs": 512, "targets": 128}
  count = lambda size, tokens: utils.serialize_num_microbatches(  # noqa: E731
    mtf.Dimension("batch", size), lengths, mtf.convert_to_shape("a:2"),
    mtf.convert_to_layout_rules("batch:a"), tokens,
  )  # fmt: skip
  assert count(32, 2048) == 4 and count(32, None) == 1 and count(32, 1) == 16
  assert count(12, 2048) == 2  # 4 sequences do not divide 6: 3 at a time.
  with pytest.raises(ValueError, match="batch"):
    count(33, 2048)
  assert utils.auto_train_steps(128, lengths) == 2**36 // (128 * 512)
  assert utils.auto_train_steps(2, lengths, train_tokens=5000) == 4


def test_clean_decodes():
  ids = [[5, 1, 7, 1], [5, 6, 7, 8], [1, 9, 9, 9], [0, 3, 1, 2]]
  expected = [[5, 1, 0, 0], [5, 6, 7, 8], [1, 0, 0, 0], [0, 3, 1, 0]]
  np.testing.assert_array_equal(utils.clean_decodes(ids), expected)
  np.testing.assert_array_equal(
    utils.clean_decodes(np.transpose(ids), length_axis=0), np.transpose(expected)
  )
  other = utils.clean_decodes([[5, 1, 7, 2]], eos_id=7, pad_id=-1)
  np.testing.assert_array_equal(other, [[5, 1, 7, -1]])


def test_steps_of_checkpoints():
  step = utils.get_step_from_checkpoint_path
  assert [step(p) for p in ("/a/model.ckpt-5000", "model.ckpt-7.index")] == [5000, 7]
  for path in ("/a/model-5", "model.ckpt-", "model.ckpt-x"):
    with pytest.raises(ValueError, match="is not the name of a checkpoint"):
      step(path)


@pytest.fixture
def folder(tmp_path):
  for step in (0, 10, 20, 30):
    small_checkpoints.write(tmp_path, step)
  return tmp_path


@pytest.mark.parametrize(
  ("wanted", "kwargs", "expected"),
  [
    ("all", {}, [10, 20, 30]),
    ("all", dict(skip_until=-1), [0, 10, 20, 30]),
    ("all", dict(skip_until=10), [20, 30]),
    (-1, {}, [30]),
    (20, {}, [20]),
    (15, {}, [10]),
    (16, {}, [20]),
    ([29, 31, 4], {}, [0, 30]),
    ([10, 25], dict(find_closest=False), [10]),
    (25, dict(find_closest=False), None),
  ],
)
def test_get_checkpoint_iterator(folder, wanted, kwargs, expected):
  if expected is None:
    with pytest.raises(ValueError, match="no checkpoint of step 25 .* 10, 20, 30"):
      utils.get_checkpoint_iterator(wanted, str(folder), **kwargs)
    return
  paths = utils.get_checkpoint_iterator(wanted, str(folder), **kwargs)
  assert list(paths) == [str(folder / f"model.ckpt-{step}") for step in expected]


@pytest.mark.parametrize("wanted", [None, "new"])
def test_new_checkpoints_are_waited_for(wanted, folder, monkeypatch, caplog):
  """A damaged one is left out, and named."""
  monkeypatch.setattr(chosen_checkpoints, "_SECONDS_BETWEEN_LOOKS", 0.01)

  def named_by_now():
    return "truncated" in caplog.text

  def write():
    for step in (31, 32, 40):
      path = small_checkpoints.write(tmp_path, step, newest=step != 32)
      if step == 32:
        named.append(small_checkpoints.damage(path))
        (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-32"\n')
      # On a busy machine the other thread needs time to look.
      told_by = time.monotonic() + 60
      while time.monotonic() < told_by and not (31 in seen if step == 31 else named_by_now()):
        time.sleep(0.05)

  tmp_path, named, seen = folder, [], []
  paths = utils.get_checkpoint_iterator(wanted, str(folder), skip_until=10, stop_after=39)
  assert step_of(next(iter(paths))) == 30
  timer = threading.Thread(target=write)
  timer.start()
  for path in itertools.islice(paths, 5):
    seen.append(step_of(path))
  timer.join()
  assert seen == [31]
  assert f"{named[0]} truncated" in caplog.text


def step_of(path: str) -> int:
  return int(path.rpartition("-")[2])


class Restorer:
  """Stands for a `Trainer`: restores what is not damaged."""

  def __init__(self):
    self.restored = []

  def restore_for_inference(self, path):
    damages = checkpoint.verify(path)
    if damages:
      raise checkpoint.DamagedCheckpointError("; ".join(map(str, damages)))
    self.restored.append(step_of(path))


def test_damaged_checkpoints_are_left_out_or_an_error(folder, caplog):
  """Of all they are left out; one that was asked for is an error; the newest is the newest good."""
  data = small_checkpoints.damage(str(folder / "model.ckpt-30"))

  def restored(step, **kwargs):
    restorer = Restorer()
    list(chosen_checkpoints.restored_checkpoints(restorer, step, str(folder), **kwargs))
    return restorer.restored

  for newest in (None, -1):
    caplog.clear()
    assert restored(newest) == [20]
    assert data in caplog.text
  caplog.clear()
  assert restored("all") == [10, 20]
  assert data in caplog.text
  for wanted in (30, [10, 30]):
    with pytest.raises(checkpoint.DamagedCheckpointError, match=data):
      restored(wanted)
  with pytest.raises(checkpoint.DamagedCheckpointError, match=data):
    restored("all", paths=[str(folder / "model.ckpt-30")])
  for step in (0, 10, 20):
    small_checkpoints.damage(str(folder / f"model.ckpt-{step}"))
  for wanted in ("all", -1):
    with pytest.raises(checkpoint.DamagedCheckpointError, match="data-00000"):
      restored(wanted)


def test_checkpoints_that_are_deleted_meanwhile(folder, caplog):
  """Training deletes old ones while they are evaluated."""

  class Slow(Restorer):
    def restore_for_inference(self, path):
      if step_of(path) == 20:
        for file in folder.glob("model.ckpt-20.*"):
          file.unlink()
      checkpoint.resolve(path)
      super().restore_for_inference(path)

  restorer = Slow()
  list(chosen_checkpoints.restored_checkpoints(restorer, "all", str(folder)))
  assert restorer.restored == [10, 30]
  assert "left out: there is no checkpoint" in caplog.text


def test_unknown_checkpoint_steps(folder):
  for wanted in ("latest", 2.5, ["all"]):
    with pytest.raises(errors.ConfigError, match="is unknown: use a step"):
      utils.get_checkpoint_iterator(wanted, str(folder))


def test_no_checkpoint(tmp_path):
  assert list(utils.get_checkpoint_iterator(-1, str(tmp_path))) == [None]
  with pytest.raises(errors.CheckpointError, match="there is no checkpoint"):
    utils.get_checkpoint_iterator(3, str(tmp_path))


def test_vocabularies_and_lines(tmp_path):
  assert utils.inputs_vocabulary(("a", "b")) == "a" and utils.targets_vocabulary(("a", "b")) == "b"
  assert utils.inputs_vocabulary(["a", "b"]) == utils.targets_vocabulary(["a", "b"]) == ["a", "b"]
  gin.parse_config("separate_vocabularies.inputs = 1\nseparate_vocabularies.targets = 2")
  assert utils.separate_vocabularies() == (1, 2)
  path = str(tmp_path / "new" / "file")
  utils.write_lines_to_file(["a\nb", 3, "# c ", "", "d", ""], path)
  assert utils.get_inputs_from_file(path) == ["a b", "3", "# c", "", "d"]
  assert utils.get_inputs_from_file(path, ignore_comments=True) == ["a b", "3", "", "d"]
  utils.write_lines_to_file([], path)
  with pytest.raises(errors.DataError, match="is empty"):
    utils.get_inputs_from_file(path)


def test_names_that_other_packages_import():
  example = {
    "inputs": 1,
    "targets_position": 2,
    "targets_subsegmentation": 3,
    "idx": 4,
    "weight": 5,
  }
  kept = ["inputs", "targets_position", "targets_subsegmentation"]
  assert list(utils._filter_features(example)) == kept
  assert callable(utils._dynamic_text2self)
  assert {"gin_file", "gin_param", "gin_location_prefix"} <= {
    f.name for f in flags.FLAGS.flags_by_module_dict()[utils.__name__]
  }
