"""Fine-tunes BERT to classify texts, or pairs of them, and evaluates and predicts.

  python -m mesh_tensorflow.bert.run_classifier --task_name=cola --data_dir=cola --do_train \
    --do_eval --vocab_file=vocab.txt --bert_config_file=config.json --init_checkpoint=model \
    --output_dir=tuned --mesh_shape=batch:2

Tasks: cola, mnli, mrpc, xnli, with files as GLUE has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import records, settings, tokenization, training
from mesh_tensorflow.bert.bert import BertConfig, BertModel
from mesh_tensorflow.bert.classifier_data import (
  PROCESSORS,
  ColaProcessor,
  DataProcessor,
  InputExample,
  InputFeatures,
  MnliProcessor,
  MrpcProcessor,
  PaddingInputExample,
  XnliProcessor,
)
from mesh_tensorflow.bert.classifier_features import (
  convert_examples_to_features,
  convert_single_example,
  file_based_convert_examples_to_features,
)
from mesh_tensorflow.bert.layout import runner_for
from mesh_tensorflow.bert.optimization import Optimization
from mesh_tensorflow.bert.program_flags import FINE_TUNING, SHARED, Flag, ProgramFlags
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.program.dimensions import ShapeLike

__all__ = [
  "ColaProcessor",
  "DataProcessor",
  "InputExample",
  "InputFeatures",
  "MnliProcessor",
  "MrpcProcessor",
  "PaddingInputExample",
  "XnliProcessor",
  "convert_examples_to_features",
  "convert_single_example",
  "create_model",
  "file_based_convert_examples_to_features",
  "file_based_input_fn_builder",
  "input_fn_builder",
  "main",
  "model_fn_builder",
]

FLAGS = ProgramFlags(
  SHARED,
  FINE_TUNING,
  (
    Flag(flags.DEFINE_string, "data_dir", None, "Folder of the task's files."),
    Flag(flags.DEFINE_string, "task_name", None, f"One of {', '.join(PROCESSORS)}."),
    Flag(
      flags.DEFINE_integer, "max_seq_length", 128, "WordPieces in an example; longer ones are cut."
    ),
    Flag(flags.DEFINE_bool, "do_eval", False, "Evaluate on the dev set."),
    Flag(flags.DEFINE_integer, "eval_batch_size", 32, "Examples in a batch of the evaluation."),
  ),
)
FLAGS.define(__name__)


# ------------------------------------------------------------------------- data


def _features(seq_length: int) -> dict[str, records.Feature]:
  return {
    **records.token_features(seq_length),
    "label_ids": ((), tf.int64),
    "is_real_example": ((), tf.int64),
  }


def file_based_input_fn_builder(
  input_file: str, seq_length: int, is_training: bool, drop_remainder: bool
) -> records.InputFn:
  """A function that reads batches of a file of records.

  Args:
    input_file: see `file_based_convert_examples_to_features`.
    seq_length: WordPieces in an example.
    is_training: whether examples are shuffled, and repeated without end.
    drop_remainder: whether a last batch that is not full is left out.

  Returns:
    A function of a dict with `batch_size`, and if wanted `seed` and `first_step`.
  """
  return records.input_fn(
    [input_file], _features(seq_length), is_training, drop_remainder=drop_remainder
  )


def input_fn_builder(
  features: Sequence[InputFeatures], seq_length: int, is_training: bool, drop_remainder: bool
) -> records.InputFn:
  """As `file_based_input_fn_builder`, of examples in memory."""
  columns = {
    name: np.array([getattr(f, name) for f in features], np.int32).reshape(
      len(features), seq_length
    )
    for name in ("input_ids", "input_mask", "segment_ids")
  }
  columns["label_ids"] = np.array([f.label_id for f in features], np.int32)
  return records.in_memory(columns, is_training, drop_remainder=drop_remainder)


# ------------------------------------------------------------------------ model


def create_model(
  bert_config: BertConfig,
  is_training: bool,
  input_ids: mtf.Tensor,
  input_mask: mtf.Tensor,
  segment_ids: mtf.Tensor,
  labels: mtf.Tensor,
  num_labels_dim: mtf.Dimension,
  layout: LayoutLike | None,
  mesh_shape: ShapeLike | None,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor, mtf.Tensor]:
  """BERT with a layer of classes on its pooled output.

  Variables, beside BERT's: `output_weights` [num_labels_dim, hidden] and `output_bias`.

  Args:
    bert_config: the model.
    is_training: whether there is dropout.
    input_ids: int [batch, seq], ids of WordPieces.
    input_mask: int [batch, seq], 1 for tokens, 0 for padding.
    segment_ids: int [batch, seq], 0 for the first text, 1 for the second.
    labels: int [batch].
    num_labels_dim: the classes.
    layout: see `BertModel`.
    mesh_shape: see `BertModel`.

  Returns:
    (loss, per_example_loss, logits, probabilities): the mean cross-entropy and the experts' loss,
    the cross-entropy [batch], and twice [batch, num_labels_dim].
  """
  model = BertModel(
    bert_config, is_training, input_ids, input_mask, segment_ids, None, mesh_shape, layout
  )
  pooled = mtf.dropout(model.get_pooled_output(), is_training, keep_prob=0.9)
  weights = mtf.get_variable(
    pooled.mesh,
    "output_weights",
    mtf.Shape([num_labels_dim, model.model_dim]),
    initializer=initializers.TruncatedNormal(stddev=0.02),
  )
  bias = mtf.get_variable(
    pooled.mesh, "output_bias", mtf.Shape([num_labels_dim]), initializer=initializers.Zeros()
  )
  logits = mtf.einsum([pooled, weights], reduced_dims=[model.model_dim]) + bias
  per_example_loss = mtf.layers.softmax_cross_entropy_with_logits(logits, labels, num_labels_dim)
  loss = mtf.reduce_mean(per_example_loss) + model.get_extra_loss()
  return loss, per_example_loss, logits, mtf.softmax(logits, num_labels_dim)


def model_fn_builder(
  bert_config: BertConfig,
  num_labels: int,
  init_checkpoint: str | None,
  learning_rate: float,
  num_train_steps: int | None,
  num_warmup_steps: int | None,
  use_tpu: bool,
) -> training.TrainableModel:
  """A function of a batch: loss, metrics and probabilities.

  Args:
    bert_config: the model.
    num_labels: number of classes.
    init_checkpoint: not looked at here: `training.Runner` takes it.
    learning_rate: peak of the learning rate; see `optimization.Optimization`.
    num_train_steps: number of training steps; None if there is no training.
    num_warmup_steps: number of warm-up steps; None or 0: none.
    use_tpu: not looked at: the mesh says what the program runs on.

  Returns:
    A function of (features, labels, mode, params), features being `Tensor`s by name; it returns a
    `training.ModelSpec`.
  """
  del init_checkpoint, use_tpu

  def model_fn(
    features: dict[str, mtf.Tensor], labels: None, mode: str, params: Mapping[str, Any]
  ) -> training.ModelSpec:
    del labels
    # The name of the archived library's, which layouts may know: not that of positions.
    classes = mtf.Dimension("seq", num_labels)
    label_ids = features["label_ids"]
    loss, losses, logits, probabilities = create_model(
      bert_config,
      mode == training.TRAIN,
      features["input_ids"],
      features["input_mask"],
      features["segment_ids"],
      label_ids,
      classes,
      params.get("layout", ""),
      params.get("mesh_shape", ""),
    )
    if mode == training.TRAIN:
      return training.ModelSpec(loss)
    if mode == training.PREDICT:
      return training.ModelSpec(predictions={"probabilities": probabilities})
    right = mtf.to_float(mtf.equal(mtf.argmax(logits, classes), label_ids))
    metrics = {
      "eval_accuracy": training.mean_of_real(right, features),
      "eval_loss": training.mean_of_real(losses, features),
    }
    if "moe" in bert_config.block_layers:
      # The part of `loss` beside the mean over all examples, padding included.
      extra = loss - mtf.reduce_mean(losses)
      metrics["experts_loss"] = training.mean_of_real(extra, features)
    return training.ModelSpec(
      metrics=metrics, losses=[name for name in metrics if name.endswith("_loss")]
    )

  how = Optimization(
    learning_rate,
    num_train_steps or 0,
    num_warmup_steps,
    max_optimized_variable_size=settings.value("max_optimized_variable_size"),
    optimizer=settings.value("optimizer"),
    clip_gradients=settings.value("clip_gradients"),
  )
  return training.TrainableModel(model_fn, how)


# ---------------------------------------------------------------------- program


def _examples(processor: DataProcessor, what: str) -> list[InputExample]:
  found: list[InputExample] = getattr(processor, f"get_{what}_examples")(FLAGS.data_dir)
  if not found:
    raise DataError(f"--data_dir={FLAGS.data_dir} has no {what} examples of {FLAGS.task_name}")
  return found


def _check_flags() -> DataProcessor:
  name = (FLAGS.task_name or "").lower()
  if name not in PROCESSORS:
    raise ConfigError(f"--task_name={FLAGS.task_name} is unknown; use {', '.join(PROCESSORS)}")
  if not (FLAGS.do_train or FLAGS.do_eval or FLAGS.do_predict):
    raise ConfigError("nothing is to be done: set --do_train, --do_eval or --do_predict")
  FLAGS.check_positive(
    "train_batch_size", "eval_batch_size", "predict_batch_size", "save_checkpoints_steps",
    "iterations_per_loop",
  )  # fmt: skip
  if FLAGS.max_seq_length < 4:
    raise ConfigError(f"--max_seq_length={FLAGS.max_seq_length} must be at least 4")
  return PROCESSORS[name]()


def main(_: Sequence[str]) -> None:
  """Trains, evaluates and predicts, as the flags say."""
  processor = _check_flags()
  tokenization.validate_case_matches_checkpoint(FLAGS.do_lower_case, FLAGS.init_checkpoint)
  config = settings.load_config(FLAGS.max_seq_length)
  tokenizer = tokenization.FullTokenizer(FLAGS.vocab_file, do_lower_case=FLAGS.do_lower_case)
  settings.check_vocabulary(config, tokenizer.vocab)
  settings.prepare_devices()
  settings.make_folder(FLAGS.output_dir)
  labels, length = processor.get_labels(), FLAGS.max_seq_length

  def reader(what: str, examples: Sequence[InputExample], file: str) -> records.InputFn:
    file = settings.in_folder(file)
    is_training = what == "train"
    if is_training and FLAGS.cached_train_file:
      file = FLAGS.cached_train_file
    else:
      file_based_convert_examples_to_features(examples, labels, length, tokenizer, file)
    records.check_first(file, _features(length), "set --max_seq_length as they were made")
    return file_based_input_fn_builder(file, length, is_training, drop_remainder=is_training)

  sets = [("train", FLAGS.do_train), ("dev", FLAGS.do_eval), ("test", FLAGS.do_predict)]
  examples = {what: _examples(processor, what) for what, wanted in sets if wanted}
  files = {"train": "train.tf_record", "dev": "eval.tf_record", "test": "predict.tf_record"}
  readers = {what: reader(what, found, files[what]) for what, found in examples.items()}
  steps = settings.training_steps(len(examples.get("train", ())))
  model_fn = model_fn_builder(
    config,
    len(labels),
    FLAGS.init_checkpoint,
    FLAGS.learning_rate,
    steps,
    int(steps * FLAGS.warmup_proportion),
    FLAGS.use_tpu,
  )
  programs = {
    "train": (FLAGS.train_batch_size, training.TRAIN),
    "dev": (FLAGS.eval_batch_size, training.EVAL),
    "test": (FLAGS.predict_batch_size, training.PREDICT),
  }
  first = next(iter(readers))
  runner = runner_for(model_fn, readers[first], *programs[first])
  if FLAGS.do_train:
    runner.train(readers["train"], FLAGS.train_batch_size, steps)
  if FLAGS.do_eval:
    found = runner.evaluate(readers["dev"], FLAGS.eval_batch_size)
    training.write_results(settings.in_folder("eval_results.txt"), found)
  if FLAGS.do_predict:
    rows = runner.predict(readers["test"], FLAGS.predict_batch_size)
    with tf.io.gfile.GFile(settings.in_folder("test_results.tsv"), "w") as f:
      for row in rows:
        f.write("\t".join(str(p) for p in row["probabilities"]) + "\n")
    print(f"{len(examples['test'])} predictions in {settings.in_folder('test_results.tsv')}")


if __name__ == "__main__":
  settings.run_program(
    main,
    __doc__,
    ["data_dir", "task_name", "vocab_file", "bert_config_file", "output_dir"],
    trains=True,
  )
