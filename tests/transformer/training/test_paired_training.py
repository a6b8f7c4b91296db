"""Encoder-decoders and students through the trainer: learning, meshes, microbatches, decoding."""

from __future__ import annotations

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.gin_paths import gin_dir
from mesh_tensorflow.transformer.model import mesh_setup
from mesh_tensorflow.transformer.training.trainer import Trainer
from tests.kinds import kept

VOCAB, LENGTHS, BATCH, STEPS = 16, {"inputs": 6, "targets": 8}, 8, 1500
LEARNING_RATE = lambda step: 3e-3 * (1.0 - step / STEPS)  # noqa: E731
LAYOUT = "batch:batch,d_ff:model,heads:model,vocab:model"
BINDINGS = """
num_layers = 1
d_model = 32
d_ff = 64
num_heads = 4
d_kv = 8
dropout_rate = {dropout}
Unitransformer.max_length = 16
Unitransformer.vocab_divisor = 16
get_variable_dtype.master_dtype = 'float32'
get_variable_dtype.activation_dtype = 'float32'
serialize_num_microbatches.tokens_per_microbatch_per_replica = {microbatch}
"""
DISTILLATION = """
StudentTeacher.temperature = 1.0
StudentTeacher.fraction_soft = 1.0
StudentTeacher.distill_start_step = -1
student/decoder/make_layer_stack.layers = [
  @transformer_layers.SelfAttention, @transformer_layers.EncDecAttention,
  @transformer_layers.DenseReluDense]
teacher/decoder/make_layer_stack.layers = [
  @transformer_layers.SelfAttention, @transformer_layers.EncDecAttention,
  @transformer_layers.DenseReluDense]
"""


def pairs(sequence_length, vocabulary=None, dataset_split="train", skip: int = 0):
  """Endless rows: the targets are the inputs, each id twice as large plus 2, up to 15."""
  del vocabulary, dataset_split

  def row(n):
    length = tf.random.stateless_uniform([], [5, n], 1, sequence_length["inputs"], tf.int32)
    ids = tf.random.stateless_uniform([sequence_length["inputs"]], [6, n], 2, 7, tf.int32)
    at = tf.range(sequence_length["inputs"])
    ids = tf.where(at < length, ids, tf.where(at == length, 1, 0))
    targets = tf.where(ids > 1, 2 * ids + 2, ids)
    return {"inputs": ids, "targets": tf.pad(targets, [[0, sequence_length["targets"] - 6]])}

  return tf.data.Dataset.range(skip, 10**9).map(row)


def packed(sequence_length, **kwargs):
  """The same rows, told that each is one packed sequence."""

  def row(features):
    out = dict(features)
    for name in ("inputs", "targets"):
      out[f"{name}_segmentation"] = tf.minimum(features[name], 1)
      out[f"{name}_position"] = tf.range(sequence_length[name]) * tf.minimum(features[name], 1)
    return out

  return pairs(sequence_length, **kwargs).map(row)


def make_trainer(
  mesh="", kind="placement", dropout=0.0, microbatch=None, model_dir=None, bindings="",
  model_type="bitransformer", learning_rate=2e-3, **options,
) -> Trainer:  # fmt: skip
  gin.clear_config()
  gin.add_config_file_search_path(gin_dir())
  gin.parse_config_files_and_bindings(
    ["defaults.gin"], [BINDINGS.format(dropout=dropout, microbatch=microbatch), bindings]
  )
  impl = mesh_setup.make_mesh_impl(mesh, LAYOUT if mesh else "", implementation=kind, seed=3)
  model = utils.build_model(model_type, VOCAB, VOCAB, impl.layout_rules, impl.shape)
  steps = utils.ModelSteps(model, impl, model_type, BATCH, LENGTHS)
  return Trainer(
    steps, None, model_dir, optimizer=mtf.optimize.AdamWeightDecayOptimizer,
    learning_rate_schedule=learning_rate, quiet=True, steps_per_call=10, **options,
  )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """(trainer, losses, folder) of a model that has learned the task."""
  folder = str(tmp_path_factory.mktemp("trained"))
  trainer = make_trainer(model_dir=folder, learning_rate=LEARNING_RATE)
  losses = trainer.train(pairs, STEPS)
  yield trainer, losses, folder
  gin.clear_config()


@pytest.mark.slow
def test_the_task_is_learned(trained):
  trainer, losses, _ = trained
  assert np.mean(losses[-20:]) < 0.05 * losses[0]
  result = trainer.evaluate(pairs(LENGTHS, skip=10**6), max_batches=4)
  assert result["token_accuracy"] > 0.95
  assert result["sequence_accuracy"] > 0.8
  rows = [[3, 4, 2, 1], [6, 5, 1]]
  expected = [[8, 10, 6, 1], [14, 12, 1]]
  for options in ({}, dict(beam_size=4)):
    outputs = trainer.sample(rows, LENGTHS["inputs"], max_decode_length=8, **options)
    for output, wanted in zip(outputs, expected):
      assert output[: len(wanted)] == wanted


def test_a_row_that_is_too_long():
  """The message says how it may be longer, unless the model has no more positions."""
  trainer = make_trainer()
  longer = (
    "no room in sequences of 6; shorten it, or bind a larger run.sequence_length of at most 16"
  )
  with pytest.raises(errors.DataError, match=longer):
    trainer.sample([[3, 1], [3] * 7], 6)
  with pytest.raises(errors.DataError, match="no room in sequences of 16; shorten it$"):
    trainer.sample([[3] * 17], 16)


@pytest.mark.slow
def test_inference_without_training(trained):
  trainer, _, folder = trained
  other = make_trainer("batch:2,model:2", "simd", model_dir=folder)
  other.build_for_inference()
  assert other.global_step == STEPS
  expected = trainer.evaluate(pairs(LENGTHS, skip=10**6), max_batches=2)
  result = other.evaluate(pairs(LENGTHS, skip=10**6), max_batches=2)
  assert result == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def one_device_losses():
  try:
    return make_trainer(dropout=0.1).train(pairs, 10)
  finally:
    gin.clear_config()


@pytest.mark.slow
@pytest.mark.parametrize(
  "kind,mesh",
  kept(
    [("placement", "batch:2,model:2"), ("simd", "batch:2,model:2"), ("simd", "batch:2,model:4")],
    [("simd", "batch:2,model:2")],
  ),
)
def test_losses_do_not_depend_on_the_mesh(kind, mesh, one_device_losses):
  losses = make_trainer(mesh, kind, dropout=0.1).train(pairs, 10)
  np.testing.assert_allclose(losses, one_device_losses, rtol=1e-4)


@pytest.mark.slow
def test_microbatches_and_packed_features_give_the_same_losses():
  whole = make_trainer().train(pairs, 5)
  cut = make_trainer(microbatch=2 * LENGTHS["targets"]).train(pairs, 5)
  np.testing.assert_allclose(cut, whole, rtol=1e-4)
  np.testing.assert_allclose(make_trainer().train(packed, 5), whole, rtol=1e-5)


@pytest.mark.long  # Gradients of a student, the teacher's checkpoint: test_student_teacher.py.
def test_a_student_learns_from_its_teacher_alone(trained):
  """The hard loss plays no part; the teacher comes from a checkpoint, and does not change."""
  teacher, _, folder = trained
  path = checkpoint.latest_checkpoint(folder)
  bindings = DISTILLATION + f'StudentTeacher.teacher_checkpoint = "{path}"\n'
  bindings += "StudentTeacher.initialize_student_weights = True"
  trainer = make_trainer(model_type="bi_student_teacher", bindings=bindings, learning_rate=1e-3)
  losses = trainer.train(pairs, 10)
  # The student starts as the teacher: its loss is the entropy, and stays small.
  assert max(losses) < 0.3
  store = trainer.mesh_impl.variable_store
  of_teacher = [v for v in store if v.name.startswith("teacher/")]
  assert len(of_teacher) == len([v for v in store if v.name.startswith("student/") and (
    store[v.name].trainable)])  # fmt: skip
  for v in of_teacher:
    original = teacher.mesh_impl.variable_store[v.name.removeprefix("teacher/")]
    np.testing.assert_array_equal(v.numpy(), original.numpy(), err_msg=v.name)
  result = trainer.evaluate(pairs(LENGTHS, skip=10**6), max_batches=2)
  assert result["token_accuracy"] > 0.9
  outputs = trainer.sample([[3, 4, 2, 1]], LENGTHS["inputs"], max_decode_length=8)
  assert outputs[0][:4] == [8, 10, 6, 1]


def test_features_that_are_missing():
  trainer = make_trainer()
  with pytest.raises(errors.DataError, match="needs 'inputs' too"):
    trainer.steps.check_features(["targets"])
  assert trainer.steps.required_features == ("inputs", "targets")
  with pytest.raises(errors.ConfigError, match="unknown model_type 'bi'.*'bitransformer'"):
    utils.build_model("bi", 8, 8)
