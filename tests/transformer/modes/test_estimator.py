"""What the trainer does as an Estimator did: input functions, data that goes on, ensembles."""

from __future__ import annotations

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.model import mesh_setup
from mesh_tensorflow.transformer.training.trainer import Trainer
from tests.transformer import training_program as program


def batches(params):
  return program.dataset({"targets": program.LENGTH}).batch(params["batch_size"])


def test_input_functions_give_what_data_set_functions_give():
  expected = program.make_trainer(dropout=False).train(program.dataset, 5)
  trainer = program.make_trainer(dropout=False)
  assert trainer.train(input_fn=batches, max_steps=3) == expected[:3]
  result = trainer.evaluate(input_fn=batches, steps=2, name="few")
  rows = program.dataset({"targets": program.LENGTH})
  assert result == trainer.evaluate(rows, 2)
  other = program.make_trainer(dropout=False)
  assert other.train(input_fn=lambda: batches({"batch_size": 3}), steps=5) == expected


@pytest.mark.parametrize(
  ("kwargs", "text"),
  [
    (dict(input_fn=batches, steps=1, hooks=[1]), "hooks"),
    (dict(input_fn=batches, dataset_fn=program.dataset, steps=1), "either dataset_fn or input_fn"),
    (dict(train_steps=1), "either dataset_fn or input_fn"),
    (dict(input_fn=batches), "one of train_steps, max_steps and steps"),
    (dict(input_fn=batches, steps=1, max_steps=1), "one of train_steps, max_steps and steps"),
  ],
)
def test_arguments_that_do_not_go_together(kwargs, text):
  with pytest.raises(errors.ConfigError, match=text):
    program.make_trainer().train(**kwargs)
  with pytest.raises(errors.ConfigError, match="either dataset or input_fn"):
    program.make_trainer().evaluate()


def shuffled(sequence_length, vocabulary, dataset_split):
  del vocabulary, dataset_split
  return program.dataset(sequence_length).take(40).shuffle(40, seed=1).repeat()


def train(folder, steps, data=shuffled, **kwargs):
  trainer = program.make_trainer(
    model_dir=str(folder), dropout=False, save_checkpoints_steps=4,
    optimizer=mtf.optimize.SgdOptimizer, learning_rate=0.1,
  )  # fmt: skip
  losses = utils.train_model(trainer, None, None, None, data, steps, None, **kwargs)
  return losses, trainer


def steps_with_position(folder):
  names = folder.glob("model.ckpt-*.with-input_pipeline-00000.index")
  return sorted(int(p.name.split(".")[1].split("-")[1]) for p in names)


def test_saved_data_goes_on_where_it_was(tmp_path):
  """The order of a shuffled data set, too, after an interruption; also with another last step."""
  whole, _ = train(tmp_path / "a", 12, checkpoint_input_pipeline=True)
  assert len(whole) == 12
  assert whole == train(tmp_path / "c", 12)[0]
  parts = [train(tmp_path / "b", n, checkpoint_input_pipeline=True)[0] for n in (6, 7, 12)]
  assert sum(parts, []) == whole
  assert steps_with_position(tmp_path / "b") == [4, 6, 7, 8, 12]
  more, _ = train(tmp_path / "b", 14, checkpoint_input_pipeline=True)
  assert more == train(tmp_path / "a", 14)[0]


def test_old_positions_are_deleted_with_their_checkpoints(tmp_path):
  trainer = program.make_trainer(
    model_dir=str(tmp_path),
    save_checkpoints_steps=2,
    steps_per_call=2,
    keep_checkpoint_max=2,
    dropout=False,
    optimizer=mtf.optimize.SgdOptimizer,
  )
  trainer.train(program.dataset, 10, checkpoint_input_pipeline=True)
  assert steps_with_position(tmp_path) == [8, 10]


def test_without_a_saved_position_examples_are_skipped(tmp_path, capsys):
  whole, _ = train(tmp_path / "a", 8)
  first, _ = train(tmp_path / "b", 4)
  second, _ = train(tmp_path / "b", 8, checkpoint_input_pipeline=True)
  assert first + second == whole


def test_data_of_python_code_cannot_be_saved(tmp_path):
  def data(sequence_length, vocabulary, dataset_split):
    rows = [{"targets": np.ones(program.LENGTH, np.int32)}] * 100
    spec = {"targets": tf.TensorSpec([program.LENGTH], tf.int32)}
    return tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)

  with pytest.raises(errors.DataError, match="position in the training data cannot be saved"):
    train(tmp_path, 4, data, checkpoint_input_pipeline=True)
  with pytest.raises(ValueError, match="bind one of them"):
    train(tmp_path, 4, skip_seen_data=True, checkpoint_input_pipeline=True)


def test_seen_data_is_counted_from_the_given_step(tmp_path):
  seen = []

  def data(sequence_length, vocabulary, dataset_split, skip=0):
    seen.append(skip // program.BATCH)
    return program.dataset(sequence_length, skip=skip)

  train(tmp_path, 4, data)
  train(tmp_path, 6, data)
  train(tmp_path, 8, data, skip_seen_data=True, seen_data_init_step=4)
  assert seen == [0, 4, 2]


@pytest.mark.slow
def test_model_info_file(tmp_path):
  trainer = program.make_trainer("model:2", dropout=False, model_info_file=str(tmp_path / "info"))
  trainer.train(program.dataset, 1)
  lines = (tmp_path / "info").read_text().splitlines()
  first = next(x for x in lines if x.startswith("Variable transformer/embedding"))
  assert first.split()[2:6] == ["size", "2048", "slice_size", "1024"]
  names = [x.split()[1] for x in lines if x.startswith("Variable ")]
  assert names == sorted(names)
  total, every = (next(x for x in lines if x.startswith(tag)) for tag in ("Trainable", "All"))
  assert f"count: {len(names)}" in total and f"count: {3 * len(names)}" in every
  counters = lines[lines.index("Counters:") + 1 :]
  assert any(x.startswith("output: ") for x in counters)
  assert any(x.startswith(" output/EinsumOperation: ") for x in counters)


@pytest.mark.parametrize(
  ("mesh", "options", "kind"),
  [
    ("", {}, mtf.PlacementMeshImpl),
    ("batch:2,model:2", {}, mtf.SimdMeshImpl),
    ("batch:2,model:2", {"implementation": "placement"}, mtf.PlacementMeshImpl),
    ("batch:2,model:4", {}, mtf.PlacementMeshImpl),
    ("batch:2", {"pipeline_stages": 2}, mtf.PlacementMeshImpl),
    ("batch:4", {"device_shares": {"batch": [3, 1]}}, mtf.PlacementMeshImpl),
  ],
)
def test_an_automatic_mesh_implementation_is_the_one_that_is_ready_and_done_first(
  mesh, options, kind
):
  assert type(mesh_setup.make_mesh_impl(mesh, "", **options)) is kind


# ------------------------------------------------------------------------ ensembles

MEMBERS = 2


def make_ensemble(mesh="", layout="", seed=3):
  program.make_trainer(dropout=False)  # Binds the model's settings.
  gin.bind_parameter("Unitransformer.ensemble", MEMBERS)
  impl = mesh_setup.make_mesh_impl(mesh, layout, seed=seed)
  model = utils.build_model("lm", program.VOCAB, program.VOCAB, impl.layout_rules, impl.shape)
  steps = utils.ModelSteps(
    model, impl, "lm", 4, {"targets": program.LENGTH}, ensemble_inputs=MEMBERS
  )
  return Trainer(
    steps, None, None, optimizer=mtf.optimize.SgdOptimizer, learning_rate_schedule=0.5, quiet=True,
    steps_per_call=4,
  )  # fmt: skip


@pytest.mark.long
def test_members_of_an_ensemble_train_on_data_of_their_own():
  """Each as it would alone, on its part of each batch; on a mesh that splits them, too."""
  ensemble = make_ensemble()
  losses = ensemble.train(program.dataset, 4)
  split = make_ensemble("ensemble:2,batch:2", "ensemble:ensemble,batch:batch")
  np.testing.assert_allclose(split.train(program.dataset, 4), losses, rtol=1e-4)
  start = make_ensemble()
  start.build_for_inference()
  initial = program.weights(start)

  def part(member):
    def data(sequence_length, vocabulary, dataset_split):
      rows = program.dataset(sequence_length).batch(4)
      return rows.shard(MEMBERS, member).unbatch()

    return data

  alone = []
  for member in range(MEMBERS):
    trainer = program.make_trainer(
      dropout=False, optimizer=mtf.optimize.SgdOptimizer, learning_rate=0.5, batch=4
    )
    trainer.build_for_inference()
    for v in trainer.mesh_impl.variable_store:
      v.assign(initial[v.name][member])
    alone.append(trainer.train(part(member), 4))
    for name, value in program.weights(trainer).items():
      np.testing.assert_allclose(
        program.weights(ensemble)[name][member], value, rtol=2e-3, atol=1e-5, err_msg=name
      )
  np.testing.assert_allclose(losses, np.sum(alone, axis=0), rtol=1e-4)


# ------------------------------------------------------------------------ small names


def test_metrics_accumulate():
  @tf.function
  def step(x):
    total, new_total = utils.metric_sum(x, name="total")
    largest, new_largest = utils.metric_max(x)
    return new_total, new_largest

  assert [t.numpy() for t in step(tf.constant([1.0, 2.0]))] == [3.0, 2.0]
  assert [t.numpy() for t in step(tf.constant([-5.0, 1.5]))] == [-0.5, 2.0]
  accumulator, value = utils.metric_max([-3, -2], "m")
  assert value.numpy() == accumulator.numpy() == -2.0
  accumulator, value = utils.metric_sum([1, 2])
  assert value.numpy() == accumulator.numpy() == 3.0


def test_encode_delimited_lm():
  from mesh_tensorflow.transformer.vocabulary import CharacterVocabulary

  letters = CharacterVocabulary("abc")
  got = utils.encode_delimited_lm(["ab", "c "], ["c", "bbbb"], letters, 4, 6)
  assert got.dtype == np.int32
  assert got.tolist() == [[2, 3, 1, 4, 1, 0], [4, 1, 3, 3, 3, 3], *[[2, 3, 1, 4, 1, 0]] * 2]
  got = utils.encode_delimited_lm(["a"], ["b"], letters, 1, 4, eos_id=9, include_final_eos=False)
  assert got.tolist() == [[2, 9, 3, 0]]
  with pytest.raises(errors.DataError, match="1 inputs, but 2 targets"):
    utils.encode_delimited_lm(["a"], ["b", "c"], letters, 1, 4)
  with pytest.raises(errors.DataError, match="no input lines"):
    utils.encode_delimited_lm([], [], letters, 1, 4)
  prefixed = utils.encode_inputs(["c"], letters, "lm", 1, 4, unscored_prefix=["ab"])
  assert prefixed.tolist() == [[-2, -3, 4, 0]]
