"""The flags of run_squad."""

from __future__ import annotations

from absl import flags

from mesh_tensorflow.bert import tokenization
from mesh_tensorflow.bert.config import BertConfig
from mesh_tensorflow.bert.program_flags import FINE_TUNING, SHARED, Flag, ProgramFlags
from mesh_tensorflow.errors import ConfigError

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
