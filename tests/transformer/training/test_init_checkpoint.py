"""Starting from another checkpoint: which variables come from where."""

from __future__ import annotations

import re

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.training import init_checkpoint
from mesh_tensorflow.transformer import utils
from tests.transformer import training_program as program


@pytest.fixture(scope="module", autouse=True)
def two_blocks():
  with pytest.MonkeyPatch.context() as patch:
    bindings = program.BINDINGS.replace("num_layers = 1", "num_layers = 2")
    patch.setattr(program, "BINDINGS", bindings)
    yield


def write_checkpoint(path: str, names) -> str:
  values = [tf.constant(float(i)) for i in range(len(names))]
  tf.raw_ops.SaveV2(
    prefix=path, tensor_names=list(names), shape_and_slices=[""] * len(names), tensors=values
  )
  return path


def mapping(tmp_path, theirs, ours, **kwargs):
  path = write_checkpoint(str(tmp_path / "model.ckpt-1"), theirs)
  return utils.flexible_ckpt_init_mapping(path, variable_names=ours, **kwargs)


def names(prefix, pairs, blocks=True):
  return [
    f"{prefix}{f'block_{b:03}/' if blocks else ''}layer_{n:03}/SelfAttention/q" for b, n in pairs
  ]


def test_layers_of_one_stack_are_matched_in_order(tmp_path):
  """Also under a prefix, as every language model has one."""
  theirs = names("transformer/", [(0, 0), (0, 1), (1, 0), (1, 1)])
  ours = names("transformer/", [(0, n) for n in range(4)], blocks=False)
  fn = mapping(tmp_path, [*theirs, "transformer/embedding"], [*ours, "transformer/embedding"])
  assert [fn(n) for n in ours] == theirs
  assert fn("transformer/embedding") == "transformer/embedding"
  back = tmp_path / "back"
  back.mkdir()
  fn = mapping(back, ours, theirs)
  assert [fn(n) for n in theirs] == ours


def test_encoder_and_decoder_are_matched_by_themselves(tmp_path):
  theirs = names("encoder/", [(0, 0), (1, 0)]) + names("decoder/", [(0, 0), (0, 1)])
  ours = names("encoder/", [(0, 0), (0, 1)]) + names("decoder/", [(0, 0), (1, 0)])
  fn = mapping(tmp_path, theirs, ours)
  assert [fn(n) for n in ours] == theirs


@pytest.mark.parametrize("stacks", [1, 2])
def test_new_layers_have_no_counterpart(tmp_path, stacks):
  prefixes = ["encoder/", "decoder/"][:stacks] if stacks == 2 else ["transformer/"]
  theirs = [n for p in prefixes for n in names(p, [(0, 0), (1, 0)])]
  ours = [n for p in prefixes for n in names(p, [(0, 0), (0, 1), (1, 0), (1, 1)])]
  new = [[1]] * stacks
  fn = mapping(tmp_path, theirs, ours, new_layers=new)
  has = mapping(tmp_path, theirs, ours, new_layers=new, return_mapping_fn=False)
  kept = [n for n in ours if "layer_000" in n]
  assert [fn(n) for n in kept] == theirs
  assert [n for n in ours if has(n)] == kept
  with pytest.raises(KeyError, match="layer_001.*stands for none") as e:
    fn(ours[1])
  assert isinstance(e.value, errors.CheckpointError)
  with pytest.raises(ValueError, match="layers that are not new, and the checkpoint .* has 2"):
    mapping(tmp_path, theirs, ours)(ours[0])
  with pytest.raises(errors.ConfigError, match=f"{stacks} stack"):
    mapping(tmp_path, theirs, ours, new_layers=[[1]] * 3)(ours[0])


def test_names_that_are_not_there(tmp_path):
  theirs = names("transformer/", [(0, 0)])
  fn = mapping(tmp_path, theirs, ["transformer/block_000/layer_000/Other/w", "other"])
  for name in ("transformer/block_000/layer_000/Other/w", "other"):
    with pytest.raises(KeyError):
      fn(name)
  with pytest.raises(errors.ConfigError, match="ckpt_path is not bound"):
    utils.flexible_ckpt_init_mapping()
  with pytest.raises(errors.CheckpointError, match="nowhere"):
    utils.flexible_ckpt_init_mapping(str(tmp_path / "nowhere"))
  fn = utils.flexible_ckpt_init_mapping(str(tmp_path / "model.ckpt-1"))
  with pytest.raises(errors.ConfigError, match="there is no model"):
    fn(theirs[0])


def test_small_configurables():
  assert utils.init_checkpoint_variable_mapping("a") == "a"
  assert utils.init_checkpoint_variable_mapping("a", lambda n: n + "b") == "ab"
  assert utils.should_load_variable("a") is True
  assert utils.should_load_variable("a", lambda n: False) is False
  mesh = mtf.Mesh(mtf.Graph(), "m")
  v = mtf.get_variable(mesh, "v", mtf.Shape([("a", 10)])).operation
  assert utils.variable_filter_max_size(v) and utils.variable_filter_max_size(v, 10)
  assert not utils.variable_filter_max_size(v, 9)


@pytest.fixture(scope="module")
def first(two_blocks, tmp_path_factory):
  """(path of a checkpoint of step 5, its values by name)"""
  folder = str(tmp_path_factory.mktemp("first"))
  trainer = program.make_trainer(model_dir=folder, dropout=False, learning_rate=1e-2)
  trainer.train(program.dataset, 5)
  values = program.weights(trainer)
  gin.clear_config()
  return trainer.latest_checkpoint(), values


def make_trainer(path, tmp_path=None, **kwargs):
  folder = None if tmp_path is None else str(tmp_path)
  # Variables of the checkpoint that the model does not have, those of Adam, are no matter.
  return program.make_trainer(
    model_dir=folder, dropout=False, seed=8, optimizer=mtf.optimize.SgdOptimizer, learning_rate=0.0,
    init_checkpoint=path, **kwargs,
  )  # fmt: skip


def test_training_starts_from_the_checkpoint_and_its_step(first, tmp_path):
  path, values = first
  trainer = make_trainer(path, tmp_path)
  assert len(trainer.train(program.dataset, 8)) == 3
  name = "transformer/embedding"
  np.testing.assert_array_equal(program.weights(trainer)[name], values[name])
  # Afterwards the folder's own checkpoint counts, and the other is needed no more: not to know
  # either which examples were seen.
  skipped = []

  def data(sequence_length, vocabulary, dataset_split, skip=0):
    skipped.append(skip)
    return program.dataset(sequence_length, skip=skip)

  for steps, other in ((9, path + "0"), (10, None)):
    assert len(make_trainer(other, tmp_path).train(data, steps)) == 1
  assert skipped == [3 * program.BATCH, 4 * program.BATCH]


def test_data_starts_anew_with_another_checkpoint(first):
  """Which examples were seen is counted from the step of the checkpoint."""
  seen = []

  def data(sequence_length, vocabulary, dataset_split, skip=0):
    seen.append(skip)
    return program.dataset(sequence_length, skip=skip)

  make_trainer(first[0]).train(data, 6)
  make_trainer(first[0]).train(data, 6, seen_data_init_step=2)
  assert seen == [0, 3 * program.BATCH]
  with pytest.raises(errors.ConfigError, match="seen_data_init_step .=7. is after the step 5"):
    make_trainer(first[0]).train(data, 8, seen_data_init_step=7)


def test_filters_and_mappings_say_what_is_restored(first):
  path, values = first
  trainer = make_trainer(path, init_variable_filter="block_000")
  gin.bind_parameter("should_load_variable.filter_fn", lambda n: "layer_001" in n)
  assert len(trainer.train(program.dataset, 2)) == 2  # The step is not among them.
  for name, value in program.weights(trainer).items():
    if "rms_norm" not in name and "adam" not in name and name in values:
      same = np.array_equal(value, values[name])
      assert same == ("block_000/layer_001" in name), name


def test_nothing_to_restore_is_an_error_with_advice(first, tmp_path):
  def train(path, text, **kwargs):
    with pytest.raises(errors.CheckpointError, match=f"none of the model's .* variables .*{text}"):
      make_trainer(path, **kwargs).train(program.dataset, 9)

  train(first[0], "init_variable_filter is found in none .* transformer/", init_variable_filter="x")
  gin.clear_config()
  other = write_checkpoint(str(tmp_path / "model.ckpt-1"), ["decoder/w", "encoder/w"])
  train(other, "it has decoder/w, encoder/w. .*init_checkpoint_variable_mapping.mapping_fn")
  trainer = make_trainer(first[0])
  gin.bind_parameter("should_load_variable.filter_fn", lambda n: False)
  with pytest.raises(errors.CheckpointError, match="filter_fn leaves all of them out"):
    trainer.train(program.dataset, 2)


def test_report_of_what_matched(first, tmp_path, capsys, caplog):
  path, values = first

  def mapping(name):
    return name if "layer_001" not in name else name.replace("layer_001", "layer_007")

  trainer = make_trainer(path, init_variable_filter="^transformer/(block|embedding)", quiet=False)
  gin.bind_parameter("init_checkpoint_variable_mapping.mapping_fn", mapping)
  gin.bind_parameter("should_load_variable.filter_fn", lambda n: "/block_001/" not in n)
  with caplog.at_level("INFO"):
    trainer.train(program.dataset, 2)
  printed = capsys.readouterr().out
  lines = printed.split("\n")
  start = lines.index(next(line for line in lines if line.startswith("started from")))
  model = set(program.weights(trainer))
  same = [n for n in model if n in values and "layer_001" not in n and "/block_001/" not in n]
  same = [n for n in same if re.match("transformer/(block|embedding)", n)]
  assert lines[start] == f"started from {path}: {len(same)} variables restored"
  missing = [n for n in model if "/block_000/layer_001" in n]
  at = lines.index(f"  not in the checkpoint, unchanged ({len(missing)}):")
  assert sorted(lines[at + 1 : at + 1 + len(missing)]) == sorted(f"    {n}" for n in missing)
  others = [n for n in values if n not in same]
  at = lines.index(f"  in the checkpoint, not used ({len(others)}):")
  assert lines[at + 9] == f"    and {len(others) - 8} more"
  left_out = len(model) - len(same) - len(missing)
  assert f"init_variable_filter, unchanged ({left_out}):" in printed
  assert all(n in caplog.text for n in others)


def test_a_mapping_bound_in_gin(first):
  """The blocks of the checkpoint in reverse, and, by the flexible mapping, in order."""
  path, values = first

  def reverse(name):
    return re.sub("block_00([01])", lambda m: f"block_00{1 - int(m.group(1))}", name)

  trainer = make_trainer(path)
  gin.bind_parameter("init_checkpoint_variable_mapping.mapping_fn", reverse)
  trainer.train(program.dataset, 6)
  name = "transformer/block_000/layer_000/SelfAttention/q"
  np.testing.assert_array_equal(program.weights(trainer)[name], values[reverse(name)])
  trainer = make_trainer(path)
  gin.parse_config(
    f"""
    flexible_ckpt_init_mapping.ckpt_path = '{path}'
    init_checkpoint_variable_mapping.mapping_fn = @flexible_ckpt_init_mapping()
    should_load_variable.filter_fn = @flag/flexible_ckpt_init_mapping()
    flag/flexible_ckpt_init_mapping.return_mapping_fn = False
    """
  )
  trainer.train(program.dataset, 6)
  np.testing.assert_array_equal(program.weights(trainer)[name], values[name])


def test_a_checkpoint_that_is_not_there(tmp_path):
  with pytest.raises(errors.CheckpointError, match="nowhere"):
    make_trainer(str(tmp_path / "nowhere")).train(program.dataset, 2)
  assert init_checkpoint.step_of(write_checkpoint(str(tmp_path / "x"), ["a"])) == 0
