"""Fine-tunes BERT to answer questions about texts (SQuAD 1.1 and 2.0), and answers them.

  python -m mesh_tensorflow.bert.run_squad --train_file=train.json --predict_file=dev.json \
    --do_train --do_predict --vocab_file=vocab.txt --bert_config_file=config.json \
    --init_checkpoint=model --output_dir=tuned --mesh_shape=batch:2

Answers are written into predictions.json and nbest_predictions.json of --output_dir.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import flags

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import (
  records,
  settings,
  squad_data,
  squad_predictions,
  tokenization,
  training,
)
from mesh_tensorflow.bert.bert import BertConfig, BertModel
from mesh_tensorflow.bert.layout import runner_for
from mesh_tensorflow.bert.optimization import Optimization
from mesh_tensorflow.bert.program_flags import AUTO, FINE_TUNING, SHARED, Flag, ProgramFlags
from mesh_tensorflow.bert.squad_data import (
  FeatureWriter,
  InputFeatures,
  SquadExample,
  convert_examples_to_features,
)
from mesh_tensorflow.bert.squad_predictions import RawResult
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.program.dimensions import ShapeLike

__all__ = [
  "FeatureWriter",
  "InputFeatures",
  "RawResult",
  "SquadExample",
  "convert_examples_to_features",
  "create_model",
  "get_final_text",
  "input_fn_builder",
  "main",
  "model_fn_builder",
  "read_squad_examples",
  "validate_flags_or_throw",
  "write_predictions",
]

FLAGS = ProgramFlags(
  SHARED,
  FINE_TUNING,
  (
    Flag(flags.DEFINE_string, "train_file", None, "JSON file of questions to train on."),
    Flag(flags.DEFINE_string, "predict_file", None, "JSON file of questions to answer."),
    Flag(flags.DEFINE_integer, "max_seq_length", 384, "WordPieces in a window: question and text."),
    Flag(
      flags.DEFINE_integer, "doc_stride", 128, "WordPieces from one window of a text to the next."
    ),
    Flag(
      flags.DEFINE_integer,
      "max_query_length",
      64,
      "WordPieces of a question; longer ones are cut.",
    ),
    Flag(
      flags.DEFINE_integer, "n_best_size", 20, "Answers to a question in nbest_predictions.json."
    ),
    Flag(flags.DEFINE_integer, "max_answer_length", 30, "WordPieces of the longest answer."),
    Flag(flags.DEFINE_bool, "verbose_logging", False, "Log what cannot be projected to the text."),
    Flag(
      flags.DEFINE_bool, "version_2_with_negative", False, "There are questions without an answer."
    ),
    Flag(
      flags.DEFINE_float,
      "null_score_diff_threshold",
      0.0,
      "There is no answer if that scores by more than this over the best one.",
    ),
  ),
)
FLAGS.define(__name__)


def validate_flags_or_throw(bert_config: BertConfig) -> None:
  """Raises `ConfigError` if flags contradict each other, or the model."""
  value = FLAGS.value
  tokenization.validate_case_matches_checkpoint(value("do_lower_case"), value("init_checkpoint"))
  if not value("do_train") and not value("do_predict"):
    raise ConfigError("nothing is to be done: set --do_train or --do_predict")
  for done, file in (("do_train", "train_file"), ("do_predict", "predict_file")):
    if value(done) and not value(file):
      raise ConfigError(f"--{done} needs --{file}")
  length = value("max_seq_length")
  if length > bert_config.max_position_embeddings:
    raise ConfigError(
      f"--max_seq_length={length} is more than the {bert_config.max_position_embeddings} positions "
      "(max_position_embeddings) of the model"
    )
  if length <= value("max_query_length") + 3:
    raise ConfigError(
      f"--max_seq_length={length} must be more than --max_query_length={value('max_query_length')}"
      " + 3, for [CLS] and twice [SEP]"
    )
  FLAGS.check_positive(
    "train_batch_size", "predict_batch_size", "save_checkpoints_steps", "iterations_per_loop",
    "doc_stride", "max_query_length", "n_best_size", "max_answer_length",
  )  # fmt: skip


def read_squad_examples(input_file: str, is_training: bool) -> list[SquadExample]:
  """The questions of a JSON file of SQuAD's form.

  Args:
    input_file: the file; --version_2_with_negative says whether "is_impossible" is looked at.
    is_training: whether each question has exactly one answer, or is impossible. One whose answer
      is not in the text is left out, with a warning.

  Raises:
    DataError: the file cannot be read, or has another form.
  """
  return squad_data.read_examples(input_file, is_training, FLAGS.version_2_with_negative)


def get_final_text(pred_text: str, orig_text: str, do_lower_case: bool) -> str:
  """The part of a text that a prediction, which lost case and accents, stands for.

  ("steve smith", "Steve Smith's") gives "Steve Smith"; all of `orig_text` if it cannot be told.

  Args:
    pred_text: WordPieces put together.
    orig_text: the words of the text that they are of.
    do_lower_case: as the model was trained.
  """
  return squad_predictions.final_text(pred_text, orig_text, do_lower_case, FLAGS.verbose_logging)


def write_predictions(
  all_examples: Sequence[SquadExample],
  all_features: Iterable[InputFeatures],
  all_results: Iterable[RawResult],
  n_best_size: int,
  max_answer_length: int,
  do_lower_case: bool,
  output_prediction_file: str,
  output_nbest_file: str,
  output_null_log_odds_file: str,
) -> None:
  """Writes the answers as JSON; see `squad_predictions.write` and its `Options`.

  Args:
    all_examples: the questions.
    all_features: their windows.
    all_results: logits of each window.
    n_best_size: number of starts, ends and answers that are considered.
    max_answer_length: WordPieces of the longest answer.
    do_lower_case: as the model was trained.
    output_prediction_file: gets question -> answer.
    output_nbest_file: gets question -> the best answers.
    output_null_log_odds_file: gets, with --version_2_with_negative, question -> by how much "no
      answer" scores over the best one.
  """
  options = squad_predictions.Options(
    n_best_size,
    max_answer_length,
    do_lower_case,
    FLAGS.version_2_with_negative,
    FLAGS.null_score_diff_threshold,
    FLAGS.verbose_logging,
  )
  squad_predictions.write(
    all_examples,
    all_features,
    all_results,
    options,
    output_prediction_file,
    output_nbest_file,
    output_null_log_odds_file,
  )


def _features(seq_length: int, is_training: bool) -> dict[str, records.Feature]:
  found: dict[str, records.Feature] = {
    "unique_ids": ((), tf.int64),
    **records.token_features(seq_length),
  }
  if is_training:
    found.update(start_positions=((), tf.int64), end_positions=((), tf.int64))
  return found


def input_fn_builder(
  input_file: str, seq_length: int, is_training: bool, drop_remainder: bool
) -> records.InputFn:
  """A function that reads batches of a file of records.

  Args:
    input_file: see `FeatureWriter`.
    seq_length: WordPieces in a window.
    is_training: whether there are answers; windows are shuffled then, and repeated without end.
    drop_remainder: whether a last batch that is not full is left out.

  Returns:
    A function of a dict with `batch_size`, and if wanted `seed` and `first_step`.
  """
  return records.input_fn(
    [input_file], _features(seq_length, is_training), is_training, drop_remainder=drop_remainder
  )


def create_model(
  bert_config: BertConfig,
  is_training: bool,
  input_ids: mtf.Tensor,
  input_mask: mtf.Tensor,
  segment_ids: mtf.Tensor,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """BERT with logits of an answer's start and end at each position, on the mesh of the flags.

  Variables, beside BERT's: `cls/squad/output/kernel` [hidden, class] and `.../bias`.

  Args:
    bert_config: the model.
    is_training: whether there is dropout.
    input_ids: int [batch, seq], ids of WordPieces.
    input_mask: int [batch, seq], 1 for tokens, 0 for padding.
    segment_ids: int [batch, seq], 0 for the question, 1 for the text.

  Returns:
    (start_logits, end_logits): each [batch, seq].
  """
  layout = settings.value("layout")
  rules = "" if layout == AUTO else layout
  ids = (input_ids, input_mask, segment_ids)
  return _logits(bert_config, is_training, ids, rules, settings.value("mesh_shape"))


def _logits(
  bert_config: BertConfig,
  is_training: bool,
  ids: tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor],
  layout: LayoutLike | None,
  mesh_shape: ShapeLike | None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  model = BertModel(bert_config, is_training, *ids, None, mesh_shape, layout)
  class_dim = mtf.Dimension("class", 2)
  with mtf.variable_scope("cls/squad"):
    logits = mtf.layers.dense(
      model.get_sequence_output(),
      reduced_dims=[model.model_dim],
      new_dims=[class_dim],
      kernel_initializer=initializers.TruncatedNormal(stddev=0.02),
      name="output",
    )
  start_logits, end_logits = mtf.unstack(logits, class_dim)
  return start_logits, end_logits


def model_fn_builder(
  bert_config: BertConfig,
  init_checkpoint: str | None,
  learning_rate: float,
  num_train_steps: int | None,
  num_warmup_steps: int | None,
  use_tpu: bool,
) -> training.TrainableModel:
  """A function of a batch: the loss, or the logits of each window.

  The loss is the mean of those of start and end; that of experts is not part of it.

  Arguments and result as those of `run_classifier.model_fn_builder`.
  """
  del init_checkpoint, use_tpu

  def model_fn(
    features: dict[str, mtf.Tensor], labels: None, mode: str, params: Mapping[str, Any]
  ) -> training.ModelSpec:
    del labels
    if mode not in (training.TRAIN, training.PREDICT):
      raise ConfigError(f"run_squad has the modes train and infer, not {mode!r}")
    ids = features["input_ids"], features["input_mask"], features["segment_ids"]
    start_logits, end_logits = _logits(
      bert_config,
      mode == training.TRAIN,
      ids,
      params.get("layout", ""),
      params.get("mesh_shape", ""),
    )
    if mode == training.PREDICT:
      return training.ModelSpec(
        predictions={
          "unique_ids": features["unique_ids"],
          "start_logits": start_logits,
          "end_logits": end_logits,
        }
      )
    seq_dim = start_logits.shape.dims[1]
    losses = [
      mtf.reduce_mean(
        mtf.layers.softmax_cross_entropy_with_logits(
          logits, features[f"{which}_positions"], seq_dim
        )
      )
      for which, logits in (("start", start_logits), ("end", end_logits))
    ]
    loss = (losses[0] + losses[1]) / 2.0
    return training.ModelSpec(loss)

  how = Optimization(
    learning_rate,
    num_train_steps or 0,
    num_warmup_steps,
    max_optimized_variable_size=settings.value("max_optimized_variable_size"),
    optimizer=settings.value("optimizer"),
    clip_gradients=settings.value("clip_gradients"),
  )
  return training.TrainableModel(model_fn, how)


def _write_windows(
  examples: Sequence[SquadExample],
  tokenizer: tokenization.FullTokenizer,
  file: str,
  is_training: bool,
) -> list[InputFeatures]:
  """Writes the windows of questions into a file; returns them (of training: none)."""
  writer = FeatureWriter(file, is_training)
  kept: list[InputFeatures] = []

  def take(feature: InputFeatures) -> None:
    writer.process_feature(feature)
    if not is_training:
      kept.append(feature)

  convert_examples_to_features(
    examples,
    tokenizer,
    FLAGS.max_seq_length,
    FLAGS.doc_stride,
    FLAGS.max_query_length,
    is_training,
    take,
  )
  writer.close()
  return kept


def main(_: Sequence[str]) -> None:
  """Trains and answers, as the flags say."""
  config = settings.load_config(FLAGS.max_seq_length)
  validate_flags_or_throw(config)
  tokenizer = tokenization.FullTokenizer(FLAGS.vocab_file, do_lower_case=FLAGS.do_lower_case)
  settings.check_vocabulary(config, tokenizer.vocab)
  settings.prepare_devices()
  settings.make_folder(FLAGS.output_dir)
  readers, steps, windows = {}, 0, []
  examples = {
    what: read_squad_examples(FLAGS.value(f"{what}_file"), is_training=what == "train")
    for what in ("train", "predict")
    if settings.value(f"do_{what}")
  }
  for what, found in examples.items():
    is_training = what == "train"
    file = settings.in_folder("train.tf_record" if is_training else "eval.tf_record")
    if is_training:
      steps = settings.training_steps(len(found))
      # Neighbours are of one text; the records are shuffled among a hundred only.
      random.Random(12345).shuffle(found)
    if is_training and FLAGS.cached_train_file:
      file = FLAGS.cached_train_file
    else:
      windows = _write_windows(found, tokenizer, file, is_training)
    features = _features(FLAGS.max_seq_length, is_training)
    records.check_first(file, features, "set --max_seq_length as they were made")
    readers[what] = input_fn_builder(file, FLAGS.max_seq_length, is_training, is_training)
  model_fn = model_fn_builder(
    config,
    FLAGS.init_checkpoint,
    FLAGS.learning_rate,
    steps,
    int(steps * FLAGS.warmup_proportion),
    FLAGS.use_tpu,
  )
  programs = {
    "train": (FLAGS.train_batch_size, training.TRAIN),
    "predict": (FLAGS.predict_batch_size, training.PREDICT),
  }
  first = next(iter(readers))
  runner = runner_for(model_fn, readers[first], *programs[first])
  if FLAGS.do_train:
    runner.train(readers["train"], FLAGS.train_batch_size, steps)
  if FLAGS.do_predict:
    results = [
      RawResult(int(row["unique_ids"]), row["start_logits"].tolist(), row["end_logits"].tolist())
      for row in runner.predict(readers["predict"], FLAGS.predict_batch_size)
    ]
    write_predictions(
      examples["predict"],
      windows,
      results,
      FLAGS.n_best_size,
      FLAGS.max_answer_length,
      FLAGS.do_lower_case,
      settings.in_folder("predictions.json"),
      settings.in_folder("nbest_predictions.json"),
      settings.in_folder("null_odds.json"),
    )
    print(f"{len(examples['predict'])} answers in {settings.in_folder('predictions.json')}")


if __name__ == "__main__":
  settings.run_program(main, __doc__, ["vocab_file", "bert_config_file", "output_dir"], trains=True)
