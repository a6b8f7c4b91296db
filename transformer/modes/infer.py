"""The mode "infer": texts generated from the lines of a file, or whatever `decode_fn` reads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin

from mesh_tensorflow.errors import DataError
from mesh_tensorflow.transformer.data.text_io import (
  get_inputs_from_file,
  inputs_vocabulary,
  strip_ids,
  targets_vocabulary,
  write_lines_to_file,
)
from mesh_tensorflow.transformer.modes.chosen_checkpoints import restored_checkpoints
from mesh_tensorflow.transformer.modes.job import Job
from mesh_tensorflow.transformer.modes.registry import mode
from mesh_tensorflow.transformer.programs import sampling
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID

_LOG = logging.getLogger("mesh_tensorflow")

_ROUND_TO = 8  # Lengths are rounded up to this, so that similar inputs use one program.


def generate(
  estimator: Any,
  rows: Sequence[Sequence[int]],
  sequence_length: Mapping[str, int],
  batch_size: int | None = None,
) -> list[list[int]]:
  """What the model makes of rows of ids.

  Rows of similar length are decoded together. How an encoder-decoder decodes is bound in gin
  (`Bitransformer.decode.beam_size`, ...); if `max_decode_length` is not, it is
  `sequence_length["targets"]`.

  Args:
    estimator: a `Trainer`, with variables restored.
    rows: ids of each input, EOS included, at most `sequence_length["inputs"]`.
    sequence_length: dict with "inputs" and "targets".
    batch_size: rows at a time; as many as in a training batch by default.

  Returns:
    For each row the new ids, to the first EOS, without it.
  """
  # A batch goes on until its last row has ended: rows of similar length end at similar steps.
  order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
  ordered = [rows[i] for i in order]
  longest = -(-max(map(len, rows)) // _ROUND_TO) * _ROUND_TO
  length = min(longest, sequence_length["inputs"])
  options = sampling.decoding_options(estimator.steps.model, sequence_length["targets"])
  if not hasattr(estimator.steps.model, "decode"):
    # A language model continues its inputs, in the same row.
    length += sequence_length["targets"]
  outputs = estimator.sample(ordered, length, batch_size=batch_size, **options)
  results: list[list[int]] = [[]] * len(rows)
  for i, output in zip(order, outputs):
    results[i] = strip_ids(output, EOS_ID)
  return results


def encode_lines(
  lines: Sequence[str], vocabulary: Any, length: int, eos_id: int = EOS_ID
) -> list[list[int]]:
  """Ids of lines of text, with EOS; longer ones are cut, and counted in a warning.

  Args:
    lines: texts.
    vocabulary: a vocabulary or a pair; that of the inputs is used.
    length: ids at most, EOS included.
    eos_id: the end-of-sequence id.
  """
  encode = inputs_vocabulary(vocabulary).encode
  rows = [list(encode(line.strip())) for line in lines]
  cut = [i for i, row in enumerate(rows, 1) if len(row) >= length]
  if cut:
    _LOG.warning(
      "%d of %d inputs are cut, because they have more than %d tokens (run.sequence_length); the "
      "first is on line %d", len(cut), len(rows), length - 1, cut[0],
    )  # fmt: skip
  return [[*row[: length - 1], eos_id] for row in rows]


@gin.configurable(module="mesh_tensorflow.transformer.utils")
def decode_from_file(
  estimator: Any,
  vocabulary: Any,
  model_type: str,
  batch_size: int,
  sequence_length: dict[str, int],
  checkpoint_path: str | None = None,
  input_filename: str = gin.REQUIRED,
  output_filename: str = gin.REQUIRED,
  eos_id: int = 1,
  repeats: int = 1,
) -> list[str]:
  """Decodes each line of a file and writes the results, one a line.

  Args:
    estimator: a `Trainer`, with variables restored.
    vocabulary: a vocabulary or a pair.
    model_type: "lm" continues each line, which stays in front of what is generated; others write
      what they make of it.
    batch_size: rows at a time.
    sequence_length: dict: of "inputs" and "targets"; for "lm" a row has
      `sequence_length["targets"]` ids at most, those of the line included.
    checkpoint_path: a checkpoint to restore; None: the variables as they are. The step goes into
      the output's name.
    input_filename: a text file, one input per line.
    output_filename: the results go to `<output_filename>-<step>`.
    eos_id: the end-of-sequence id.
    repeats: samples for each line.

  Returns:
    The lines written.

  Raises:
    DataError: the file is missing or empty, or for "lm" a line is too long.
  """
  lines = get_inputs_from_file(input_filename)
  lines = [line for line in lines for _ in range(repeats)]
  if not lines:
    raise DataError(f"the input file {input_filename!r} is empty")
  if checkpoint_path is not None:
    estimator.restore_for_inference(checkpoint_path)
  started = time.perf_counter()
  if model_type == "lm":
    rows = [list(inputs_vocabulary(vocabulary).encode(line)) for line in lines]
    length = sampling.row_length(sequence_length)
    outputs = estimator.sample(rows, length, batch_size=batch_size)
    outputs = [strip_ids(ids, eos_id) for ids in outputs]
  else:
    rows = encode_lines(lines, vocabulary, sequence_length["inputs"], eos_id)
    outputs = generate(estimator, rows, sequence_length, batch_size)
  results = [targets_vocabulary(vocabulary).decode(ids) for ids in outputs]
  filename = f"{output_filename}-{estimator.global_step}"
  write_lines_to_file(results, filename)
  seconds = time.perf_counter() - started
  print(f"{len(results):,} lines decoded in {seconds:.1f} s: {filename}", flush=True)
  return results


@gin.configurable(module="mesh_tensorflow.transformer.utils")
def infer_model(
  estimator: Any,
  vocabulary: Any,
  sequence_length: dict[str, int],
  batch_size: int,
  model_type: str,
  model_dir: str,
  eval_checkpoint_step: Any,
  checkpoint_paths: list[str] | None = None,
  decode_fn: Callable[..., Any] = decode_from_file,
) -> None:
  """Decodes with each of the chosen checkpoints.

  Args:
    estimator: a `Trainer`.
    vocabulary: a vocabulary or a pair.
    sequence_length: dict from feature to number of tokens.
    batch_size: rows at a time.
    model_type: see `build_model`.
    model_dir: folder of checkpoints.
    eval_checkpoint_step: see `get_checkpoint_iterator`.
    checkpoint_paths: paths to use in place of those.
    decode_fn: called for each checkpoint.

  Raises:
    ConfigError: there is no checkpoint.
    DamagedCheckpointError: see `restored_checkpoints`.
  """
  for path in restored_checkpoints(estimator, eval_checkpoint_step, model_dir, checkpoint_paths):
    decode_fn(
      estimator,
      vocabulary=vocabulary,
      model_type=model_type,
      batch_size=batch_size,
      sequence_length=sequence_length,
      checkpoint_path=path,
    )


@mode("infer")
def run_infer(job: Job) -> None:
  """Decodes with `infer_model.decode_fn`."""
  infer_model(
    job.make_estimator(),
    job.vocabulary,
    job.sequence_length,
    job.batch_size,
    job.model_type,
    job.model_dir,
    job.eval_checkpoint_step,
  )
