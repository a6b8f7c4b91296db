"""The lines of a file decoded, a block after the other, so that a run can be interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import tqdm

from mesh_tensorflow import workers
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.numerics import random_bits
from mesh_tensorflow.transformer.data.text_io import (
  inputs_vocabulary,
  strip_ids,
  targets_vocabulary,
)
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies
from mesh_tensorflow.transformer.data.vocabularies.kept import describe
from mesh_tensorflow.transformer.generation import files as prompt_files
from mesh_tensorflow.transformer.generation import predict
from mesh_tensorflow.transformer.generation import settings as sampling_settings
from mesh_tensorflow.transformer.generation.files import ResumableFile, stopped_by_signals
from mesh_tensorflow.transformer.generation.seq2seq import encode_lines, generate
from mesh_tensorflow.transformer.generation.settings import Sampling
from mesh_tensorflow.transformer.generation.texts import TextGenerator, prompt_ids
from mesh_tensorflow.transformer.training.trainer import Trainer

# Batches in a block: what is lost, at most, when a run is interrupted; and among so many rows those
# of similar length are found.
_BATCHES = 64
_SECONDS_BETWEEN_LINES = 30.0
# Rows that a language model continues at a time, for each of a training batch, whose memory also
# holds activations of all positions.
_ROWS_PER_TRAINED = 4

# Makes texts of some texts, of which the first has a number; also says how many tokens are new.
Decode = Callable[[Sequence[str], int], tuple[list[str], int]]


def decode_lines(
  estimator: Trainer,
  vocabulary: Vocabularies,
  model_type: str,
  batch_size: int,
  sequence_length: dict[str, int],
  input_filename: str,
  output_filename: str,
  eos_id: int,
  repeats: int,
) -> list[str]:
  """Decodes each line of a file; see `decode_from_file`.

  Blocks of lines are decoded one after the other, and written in their order. What a block becomes
  depends on the block alone: so a run that was interrupted goes on behind the last one, and its
  file is that of a run which was not.
  """
  texts = prompt_files.read_prompts(input_filename)
  if not texts:
    raise DataError(f"the input file {input_filename!r} is empty")
  seed = estimator.mesh_impl.variable_store.noise_seed
  settings = sampling_settings.sample().with_default_seed(seed)
  if repeats == 1:
    repeats = settings.num_samples
  of_model = _of_language_model if model_type == "lm" else _of_encoder_decoder
  decode, how = of_model(estimator, vocabulary, settings, batch_size, sequence_length, eos_id)
  work = dict(
    texts=texts,
    repeats=repeats,
    model=[str(estimator.model_dir), estimator.global_step, model_type],
    vocabulary=[describe(of(vocabulary)) for of in (inputs_vocabulary, targets_vocabulary)],
    batch_size=batch_size,
    sequence_length=sequence_length,
    how=how,
  )  # fmt: skip
  filename = f"{output_filename}-{estimator.global_step}"
  file = ResumableFile(filename, work)
  total = len(texts) * repeats
  if file.resumed:
    print(f"{file.resumed:,} of {total:,} lines are there: going on with {filename}", flush=True)
  progress = _Progress(file.done, total)

  def kept() -> str:
    return f"{file.done:,} of {total:,} lines are kept. The same command goes on from there"

  with stopped_by_signals(kept), progress:
    while file.done < total:
      first = file.done
      numbers = range(first, min(first + _BATCHES * batch_size, total))
      made, tokens = decode([texts[n // repeats] for n in numbers], first)
      file.append([
        prompt_files.result_line(output_filename, texts[n // repeats], n % repeats, text)
        for n, text in zip(numbers, made)
      ])  # fmt: skip
      progress.update(file.done, tokens)
    file.finish()
  print(progress.summary(filename), flush=True)
  return file.lines


def _of_language_model(
  estimator: Trainer,
  vocabulary: Vocabularies,
  settings: Sampling,
  batch_size: int,
  sequence_length: dict[str, int],
  eos_id: int,
) -> tuple[Decode, Any]:
  """Continues texts; and what decides how, for comparison."""
  how = sampling_settings.of_language_model(settings, eos_id)
  if not getattr(estimator.steps.model, "fully_autoregressive", False):
    return _of_other_language_model(
      estimator, vocabulary, settings, batch_size, sequence_length, eos_id
    )
  rows = settings.batch_size or _ROWS_PER_TRAINED * batch_size
  model = TextGenerator(estimator, vocabulary, settings, how, sequence_length, rows)

  def decode(texts: Sequence[str], first: int) -> tuple[list[str], int]:
    rows = [model.row(first + i, text) for i, text in enumerate(texts)]
    made = model.texts_of(rows)
    return [text.whole(how.only_new) for text in made], sum(len(row.new) for row in rows)

  return decode, [repr(how), settings.seed or 0, settings.stop]


def _of_other_language_model(
  estimator: Trainer,
  vocabulary: Vocabularies,
  settings: Sampling,
  batch_size: int,
  sequence_length: dict[str, int],
  eos_id: int,
) -> tuple[Decode, Any]:
  """Like `_of_language_model`, for a model with full attention in prompts, or for a user's."""
  options = sampling_settings.of_encoder_decoder(settings, has_decode=False)
  length = predict.row_length(sequence_length)

  def decode(texts: Sequence[str], first: int) -> tuple[list[str], int]:
    rows = [prompt_ids(text, vocabulary) for text in texts]
    seed = random_bits.fold(settings.seed or 0, first)
    outputs = estimator.sample(rows, length, batch_size=batch_size, seed=seed, **options)
    made = [strip_ids(ids, eos_id) for ids in outputs]
    tokens = sum(map(len, made)) - sum(map(len, rows))
    return [settings.until_stop(targets_vocabulary(vocabulary).decode(i)) for i in made], tokens

  return decode, [options, sampling_settings.bound_decoding(), settings.seed or 0, settings.stop]


def _of_encoder_decoder(
  estimator: Trainer,
  vocabulary: Vocabularies,
  settings: Sampling,
  batch_size: int,
  sequence_length: dict[str, int],
  eos_id: int,
) -> tuple[Decode, Any]:
  """Makes targets of inputs; and what decides how, for comparison."""
  options = sampling_settings.of_encoder_decoder(settings, hasattr(estimator.steps.model, "decode"))

  def decode(texts: Sequence[str], first: int) -> tuple[list[str], int]:
    rows = encode_lines(texts, vocabulary, sequence_length["inputs"], eos_id)
    outputs = generate(
      estimator,
      rows,
      sequence_length,
      batch_size,
      options=options,
      seed=random_bits.fold(settings.seed or 0, first),
    )
    made = [settings.until_stop(targets_vocabulary(vocabulary).decode(ids)) for ids in outputs]
    return made, sum(map(len, outputs))

  return decode, [options, sampling_settings.bound_decoding(), settings.seed or 0, settings.stop]


class _Progress:
  """A bar on a terminal; elsewhere a line now and then. And the speed.

  Args:
    done: lines that are there.
    total: of the file.
  """

  def __init__(self, done: int, total: int):
    self._first, self._done, self._total, self._tokens = done, done, total, 0
    self._started = self._last_line = time.perf_counter()
    self._bar = tqdm.tqdm(
      total=total,
      initial=done,
      unit="line",
      dynamic_ncols=True,
      disable=not (sys.stderr.isatty() and workers.current().is_chief),
    )

  def __enter__(self) -> _Progress:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self._bar.close()

  def update(self, done: int, tokens: int) -> None:
    """Records numbers of finished lines and new tokens."""
    self._bar.update(done - self._done)
    self._done, self._tokens = done, self._tokens + tokens
    self._bar.set_postfix_str(f"{self._rate:,.0f} tokens/s", refresh=False)
    now = time.perf_counter()
    if self._bar.disable and now - self._last_line > _SECONDS_BETWEEN_LINES:
      self._last_line = now
      print(f"{done:,} of {self._total:,} lines decoded, {self._rate:,.0f} tokens/s", flush=True)

  @property
  def _rate(self) -> float:
    return self._tokens / max(time.perf_counter() - self._started, 1e-9)

  def summary(self, filename: str) -> str:
    """A line of text with the number of decoded lines, the time and the tokens per second."""
    seconds = time.perf_counter() - self._started
    return (
      f"{self._done - self._first:,} lines decoded in {seconds:.1f} s, {self._rate:,.0f} tokens/s: "
      f"{filename}"
    )
