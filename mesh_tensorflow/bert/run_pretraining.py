"""Pretrains BERT on masked WordPieces and next sentences.

  python -m mesh_tensorflow.bert.run_pretraining --input_train_files='train*.tfrecord' \
    --input_eval_files=eval.tfrecord --bert_config_file=config.json --output_dir=model \
    --mesh_shape=batch:2,model:2

Records are made by create_pretraining_data. A run that finds checkpoints in --output_dir goes on
from the newest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import flags

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import records, settings, training
from mesh_tensorflow.bert.bert import BertConfig, BertModel
from mesh_tensorflow.bert.layout import runner_for
from mesh_tensorflow.bert.optimization import Optimization
from mesh_tensorflow.bert.program_flags import SHARED, Flag, ProgramFlags
from mesh_tensorflow.errors import ConfigError

# What is done in each mode.
_MODES = {"train_and_eval": ("train", "eval"), "train": ("train",), "eval": ("eval",)}


FLAGS = ProgramFlags(
  SHARED,
  (
    Flag(
      flags.DEFINE_string,
      "input_train_files",
      None,
      "Records to train on: globs, with commas. Not needed by --mode=eval.",
    ),
    Flag(
      flags.DEFINE_string,
      "input_eval_files",
      None,
      "Records to evaluate on: globs, with commas. Not needed by --mode=train.",
    ),
    Flag(flags.DEFINE_integer, "max_seq_length", 128, "As the records were made with."),
    Flag(flags.DEFINE_integer, "max_predictions_per_seq", 20, "As the records were made with."),
    Flag(flags.DEFINE_string, "mode", "train_and_eval", "train_and_eval, train or eval."),
    Flag(flags.DEFINE_integer, "eval_batch_size", 8, "Examples in a batch of the evaluation."),
    Flag(flags.DEFINE_integer, "num_train_steps", 100000, "Steps in all."),
    Flag(
      flags.DEFINE_integer,
      "num_warmup_steps",
      10000,
      "Steps in which the learning rate rises.",
    ),
    Flag(flags.DEFINE_integer, "max_eval_steps", 100, "Most batches of an evaluation."),
    Flag(flags.DEFINE_integer, "steps_per_eval", 5000, "Steps between evaluations."),
  ),
)
FLAGS.define(__name__)


def features_of(max_seq_length: int, max_predictions_per_seq: int) -> dict[str, records.Feature]:
  """The features of a record: lists of integers, of numbers for `masked_lm_weights`."""
  predictions = (max_predictions_per_seq,)
  return {
    **records.token_features(max_seq_length),
    "masked_lm_positions": (predictions, tf.int64),
    "masked_lm_ids": (predictions, tf.int64),
    "masked_lm_weights": (predictions, tf.float32),
    "next_sentence_labels": ((1,), tf.int64),
  }


def input_fn_builder(
  input_files: Sequence[str],
  max_seq_length: int,
  max_predictions_per_seq: int,
  is_training: bool,
  num_cpu_threads: int = 4,
) -> records.InputFn:
  """A function that reads batches for `model_fn_builder`.

  Training reads several files in turn, in a drawn order, without end, in full batches; evaluation
  all in order, once: its last batch may have fewer examples.

  Args:
    input_files: paths of the files of records.
    max_seq_length: WordPieces in an example.
    max_predictions_per_seq: masked WordPieces in an example, with padding.
    is_training: whether batches are for training.
    num_cpu_threads: number of files, and of records, that are read at once.

  Returns:
    A function of a dict with `batch_size`, and if wanted `seed` and `first_step`.
  """
  return records.input_fn(
    input_files,
    features_of(max_seq_length, max_predictions_per_seq),
    is_training,
    drop_remainder=is_training,
    shuffle_files=True,
    threads=num_cpu_threads,
  )


def model_fn_builder(
  bert_config: BertConfig,
  init_checkpoint: str | None,
  learning_rate: float,
  num_train_steps: int,
  num_warmup_steps: int,
) -> training.TrainableModel:
  """A function of a batch: the two losses of pretraining, and what is measured.

  Args:
    bert_config: the model.
    init_checkpoint: not looked at here: `training.Runner` takes it.
    learning_rate: peak of the learning rate; see `optimization.Optimization`.
    num_train_steps: number of training steps, at which the learning rate reaches 0.
    num_warmup_steps: number of warm-up steps; 0: none.

  Returns:
    A function of (features, labels, mode, params), features being `Tensor`s by name; it returns a
    `training.ModelSpec`. Its loss is that of both tasks; what is minimized has the experts' in it.
  """
  del init_checkpoint

  def model_fn(
    features: dict[str, mtf.Tensor], labels: None, mode: str, params: Mapping[str, Any]
  ) -> training.ModelSpec:
    del labels
    if mode not in (training.TRAIN, training.EVAL):
      raise ConfigError(f"pretraining has the modes train and eval, not {mode!r}")
    model = BertModel(
      bert_config,
      mode == training.TRAIN,
      features["input_ids"],
      features["input_mask"],
      features["segment_ids"],
      mesh_shape=params.get("mesh_shape", ""),
      layout=params.get("layout", ""),
    )
    next_labels = features["next_sentence_labels"]
    # A record has a list of one label.
    next_labels = mtf.reshape(next_labels, next_labels.shape.dims[:1])
    ids, weights = features["masked_lm_ids"], features["masked_lm_weights"]
    mlm_loss, mlm_losses, mlm_logits = model.get_masked_lm_output(
      features["masked_lm_positions"], ids, weights
    )
    next_loss, next_losses, next_logits = model.get_next_sentence_output(next_labels)
    loss = mlm_loss + next_loss
    if mode == training.TRAIN:
      return training.ModelSpec(loss, loss + model.get_extra_loss())
    found = mtf.argmax(mlm_logits, model.vocab_dim)
    next_found = mtf.argmax(next_logits, next_logits.shape.dims[-1])
    next_right = mtf.to_float(mtf.equal(next_found, next_labels))
    return training.ModelSpec(
      metrics={
        # What fills up a batch has weights of 0.
        "masked_lm_accuracy": _mean(mtf.to_float(mtf.equal(found, ids)), weights),
        "masked_lm_loss": _mean(mlm_losses, weights),
        "next_sentence_accuracy": training.mean_of_real(next_right, features),
        "next_sentence_loss": training.mean_of_real(next_losses, features),
      },
      losses=["masked_lm_loss", "next_sentence_loss"],
    )

  how = Optimization(
    learning_rate,
    num_train_steps,
    num_warmup_steps,
    optimizer=settings.value("optimizer"),
    clip_gradients=settings.value("clip_gradients"),
  )
  return training.TrainableModel(model_fn, how)


def _mean(x: mtf.Tensor, weights: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Sum and weight of a mean."""
  return mtf.reduce_sum(x * weights), mtf.reduce_sum(weights)


def main(_: Sequence[str]) -> None:
  """Trains and evaluates in turn."""
  if FLAGS.mode not in _MODES:
    raise ConfigError(f"--mode={FLAGS.mode} is unknown; use one of {', '.join(_MODES)}")
  FLAGS.check_positive(
    "max_seq_length", "max_predictions_per_seq", "train_batch_size", "eval_batch_size",
    "num_train_steps", "max_eval_steps", "steps_per_eval", "save_checkpoints_steps",
    "iterations_per_loop",
  )  # fmt: skip
  config = settings.load_config(FLAGS.max_seq_length)
  settings.prepare_devices()
  sizes = FLAGS.max_seq_length, FLAGS.max_predictions_per_seq
  advice = "set --max_seq_length and --max_predictions_per_seq as the records were made"
  input_fns = {}
  for what in _MODES[FLAGS.mode]:
    if not FLAGS.value(f"input_{what}_files"):
      raise ConfigError(f"--mode={FLAGS.mode} needs --input_{what}_files")
    files = settings.find_files(FLAGS.value(f"input_{what}_files"), f"input_{what}_files")
    records.check_first(files[0], features_of(*sizes), advice)
    input_fns[what] = input_fn_builder(files, *sizes, is_training=what == "train")
  settings.make_folder(FLAGS.output_dir)
  model_fn = model_fn_builder(
    config,
    FLAGS.init_checkpoint,
    FLAGS.learning_rate,
    FLAGS.num_train_steps,
    FLAGS.num_warmup_steps,
  )
  programs = {
    "train": (FLAGS.train_batch_size, training.TRAIN),
    "eval": (FLAGS.eval_batch_size, training.EVAL),
  }
  first = next(iter(input_fns))
  both = len(input_fns) == 2
  save_every = FLAGS.save_checkpoints_steps
  if both and FLAGS.steps_per_eval:  # What is evaluated is saved, too.
    save_every = min(save_every, FLAGS.steps_per_eval)
  runner = runner_for(
    model_fn,
    input_fns[first],
    *programs[first],
    eval_every_steps=FLAGS.steps_per_eval if both else 0,
    save_checkpoints_steps=save_every,
    eval_steps=FLAGS.max_eval_steps,
  )
  told = []

  def write(found: dict[str, float]) -> None:
    told.append(found)
    training.write_results(settings.in_folder(f"eval_results_{runner.step}.txt"), found)

  if "train" in input_fns:
    evaluation = None
    if both:
      evaluation = training.Evaluation(runner, input_fns["eval"], FLAGS.eval_batch_size, write)
    runner.train(input_fns["train"], FLAGS.train_batch_size, FLAGS.num_train_steps, evaluation)
  if "eval" in input_fns and not told:  # There was nothing to train.
    write(runner.evaluate(input_fns["eval"], FLAGS.eval_batch_size, FLAGS.max_eval_steps))


if __name__ == "__main__":
  settings.run_program(main, __doc__, ["bert_config_file", "output_dir"], trains=True)
