"""The mode "infer": prompts and their continuations on the screen, or the lines of a file."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import gin

from mesh_settings.run import RunSettings
from mesh_tensorflow import workers
from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.numerics import random_bits
from mesh_tensorflow.training.program import is_compiled_by_xla
from mesh_tensorflow.transformer.data.text_io import targets_vocabulary
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies, as_text
from mesh_tensorflow.transformer.generation import files as prompt_files
from mesh_tensorflow.transformer.generation import settings as sampling_settings
from mesh_tensorflow.transformer.generation.screen import Pace, Screen, output_file
from mesh_tensorflow.transformer.generation.seq2seq import encode_lines, generate
from mesh_tensorflow.transformer.generation.settings import Sampling, sample
from mesh_tensorflow.transformer.generation.texts import RowText, TextGenerator
from mesh_tensorflow.transformer.modes.chosen_checkpoints import (
  CheckpointStep,
  restored_checkpoints,
)
from mesh_tensorflow.transformer.modes.infer_files import decode_lines
from mesh_tensorflow.transformer.modes.job import Job, mode
from mesh_tensorflow.transformer.training.trainer import Trainer

# Told of a text: its number, what of it is sure behind its prompt, and whether that is all.
Show = Callable[[int, str, bool], None]
# Makes texts of prompts, of which the first text has a number, and shows them; returns them whole,
# and the number of new tokens.
Write = Callable[[Sequence[str], int, Show], tuple[list[str], int]]


def decode_prompts(
  estimator: Trainer,
  vocabulary: Vocabularies,
  model_type: str,
  batch_size: int,
  sequence_length: dict[str, int],
  settings: Sampling,
) -> list[str]:
  """Shows what a model makes of prompts, as it comes, and writes it to `sample.output`.

  Args:
    estimator: a `Trainer`, with variables restored.
    vocabulary: a vocabulary or a pair.
    model_type: "lm" continues a prompt, which stays in front; others write what they make of it.
    batch_size: rows at a time at most.
    sequence_length: dict from feature to number of tokens.
    settings: of `sample`.

  Returns:
    The texts.

  Raises:
    DataError: a prompt leaves no room for a token.
    StorageError: the output cannot be written.
  """
  settings = settings.with_default_seed(estimator.mesh_impl.variable_store.noise_seed)
  make = _continues if model_type == "lm" else _translates
  write = make(estimator, vocabulary, settings, batch_size, sequence_length)
  with output_file(settings.output) as file:
    if settings.interactive:
      return _converse(write, settings, file, continues=model_type == "lm")
    prompts = settings.prompt or ()
    started = time.perf_counter()
    texts, tokens = _show(write, prompts, 0, settings, file, continues=model_type == "lm")
    seconds = time.perf_counter() - started
    where = f": {settings.output}" if settings.output else ""
    print(
      f"{len(texts)} text(s) of {tokens:,} tokens written in {seconds:.1f} s, "
      f"{tokens / max(seconds, 1e-9):,.0f} tokens/s{where}",
      flush=True,
    )
    return texts


def _show(
  write: Write,
  prompts: Sequence[str],
  first: int,
  settings: Sampling,
  file: TextIO | None,
  continues: bool,
) -> tuple[list[str], int]:
  """Writes texts to the screen, and to the file; returns them and the number of new tokens."""
  samples = settings.num_samples
  every = [(p, i, j) for i, p in enumerate(prompts, 1) for j in range(1, samples + 1)]
  headings = [_heading(i, len(prompts), j, samples) for _, i, j in every]
  screen = Screen(headings, [p if continues else "" for p, _, _ in every])
  texts, tokens = write([p for p, _, _ in every], first, screen.update)
  if file is not None:
    for (prompt, _, j), text in zip(every, texts):
      file.write(prompt_files.text_entry(settings.output or "", prompt, j - 1, text))
    file.flush()
  return texts, tokens


def _heading(prompt: int, prompts: int, sample: int, samples: int) -> str | None:
  parts = [f"prompt {prompt} of {prompts}"] * (prompts > 1)
  parts += [f"sample {sample} of {samples}"] * (samples > 1)
  return f"--- {', '.join(parts)}" if parts else None


def _continues(
  estimator: Trainer,
  vocabulary: Vocabularies,
  settings: Sampling,
  batch_size: int,
  sequence_length: dict[str, int],
) -> Write:
  how = sampling_settings.of_language_model(settings)
  model = TextGenerator(estimator, vocabulary, settings, how, sequence_length, batch_size)

  def write(prompts: Sequence[str], first: int, show: Show) -> tuple[list[str], int]:
    rows = [model.row(first + i, text) for i, text in enumerate(prompts)]
    # All prompts are encoded: a warning of one of them does not stand in the middle of a text.
    if rows:
      show(0, "", False)
    places = {row: i for i, row in enumerate(rows)}
    made: list[str] = list(prompts)

    def listen(text: RowText) -> None:
      row = text.row
      ended = row.ended or text.stopped
      show(places[row], text.sure(), ended)
      if ended:
        made[places[row]] = text.new if how.only_new else prompts[places[row]] + text.new

    model.follow(rows, Pace(), listen)
    return made, sum(len(row.new) for row in rows)

  return write


def _translates(
  estimator: Trainer,
  vocabulary: Vocabularies,
  settings: Sampling,
  batch_size: int,
  sequence_length: dict[str, int],
) -> Write:
  options = sampling_settings.of_encoder_decoder(settings, hasattr(estimator.steps.model, "decode"))

  def write(prompts: Sequence[str], first: int, show: Show) -> tuple[list[str], int]:
    rows = encode_lines(prompts, vocabulary, sequence_length["inputs"])
    if rows:
      show(0, "", False)
    outputs = generate(
      estimator,
      rows,
      sequence_length,
      batch_size,
      options=options,
      seed=random_bits.fold(settings.seed or 0, first),
    )
    decode = targets_vocabulary(vocabulary).decode
    made = [as_text(settings.until_stop(decode(ids))) for ids in outputs]
    for i, text in enumerate(made):
      show(i, text, True)
    return made, sum(map(len, outputs))

  return write


def check_conversation() -> None:
  """Raises `ConfigError` where nobody can type: with several workers."""
  size = workers.current().size
  if size > 1:
    raise ConfigError(
      f"sample.interactive: {size} workers cannot all be typed to; run one, or bind sample.prompt"
    )


def _converse(write: Write, settings: Sampling, file: TextIO | None, continues: bool) -> list[str]:
  """Answers what is typed, until it ends."""
  check_conversation()
  is_terminal = sys.stdin.isatty()
  if is_terminal:
    print(
      "Type a text and Enter (a \\ at its end: it goes on in the next line). Ctrl-C ends an "
      "answer, Ctrl-D the program.",
      flush=True,
    )
  made: list[str] = []
  for prompt in _typed(is_terminal):
    try:
      texts, _ = _show(write, [prompt], len(made), settings, file, continues)
    except DataError as e:
      if not is_terminal:
        raise
      print(f"DataError: {e}", flush=True)
      continue
    except KeyboardInterrupt:
      if not is_terminal:
        raise
      print(flush=True)
      continue
    made += texts
  return made


def _typed(is_terminal: bool) -> Iterator[str]:
  """The prompts that are typed; empty ones are left out."""
  lines: list[str] = []
  while True:
    if is_terminal:
      print("  " if lines else "> ", end="", flush=True)
    line = sys.stdin.readline()
    if line.endswith("\\\n"):
      lines.append(line[:-2])
      continue
    lines.append(line.removesuffix("\n"))
    prompt = "\n".join(lines)
    lines = []
    if prompt:
      yield prompt
    if not line:
      return


@gin.configurable(module="mesh_tensorflow.transformer.utils")
@affects("report")
@takes(batch_size=COUNT, repeats=COUNT)
def decode_from_file(
  estimator: Trainer,
  vocabulary: Vocabularies,
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
    input_filename: a text file, one input per line; or JSON lines, see `prompts.read_prompts`.
    output_filename: the results go to `<output_filename>-<step>`, as they come; a run that was
      interrupted goes on there.
    eos_id: the end-of-sequence id.
    repeats: samples for each line; 1: `sample.num_samples`.

  Returns:
    The lines written.

  Raises:
    DataError: the file is missing or empty, or for "lm" a line is too long.
  """
  if checkpoint_path is not None:
    estimator.restore_for_inference(checkpoint_path)
  return decode_lines(
    estimator,
    vocabulary,
    model_type,
    batch_size,
    sequence_length,
    input_filename,
    output_filename,
    eos_id,
    repeats,
  )


@gin.configurable(module="mesh_tensorflow.transformer.utils")
@affects("report")
@takes(batch_size=COUNT)
def infer_model(
  estimator: Trainer,
  vocabulary: Vocabularies,
  sequence_length: dict[str, int],
  batch_size: int,
  model_type: str,
  model_dir: str,
  eval_checkpoint_step: CheckpointStep,
  checkpoint_paths: list[str] | None = None,
  decode_fn: Callable[..., object] = decode_from_file,
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


def _check(settings: RunSettings) -> None:
  """Bad settings are told before a model is made."""
  del settings
  sample()


@mode("infer", check=_check)
def run_infer(job: Job) -> None:
  """Continues the prompts of `sample`, if it has any; else decodes with `infer_model.decode_fn`."""
  settings = sample()
  others: dict[str, Any] = {}
  if settings.prompts_given:
    others["decode_fn"] = functools.partial(_decode_prompts, settings=settings)
  estimator = job.make_estimator()
  is_compiled_by_xla(job, estimator.mesh_impl)  # Raises, before a checkpoint is restored.
  infer_model(
    estimator,
    job.vocabulary,
    job.sequence_length,
    job.batch_size,
    job.model_type,
    job.model_dir,
    job.eval_checkpoint_step,
    **others,
  )


def _decode_prompts(
  estimator: Trainer, *, checkpoint_path: str | None, settings: Sampling, **others: Any
) -> list[str]:
  """`decode_prompts` as a `decode_fn`."""
  del checkpoint_path  # It is restored.
  return decode_prompts(estimator, settings=settings, **others)
