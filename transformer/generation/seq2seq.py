"""Targets that an encoder-decoder makes of inputs, in batches of similar lengths."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mesh_tensorflow.numerics import random_bits
from mesh_tensorflow.transformer.data.text_io import inputs_vocabulary, strip_ids
from mesh_tensorflow.transformer.data.vocabularies.base import EOS_ID, Vocabularies
from mesh_tensorflow.transformer.generation import predict
from mesh_tensorflow.transformer.generation.prefill_decode import rounded_length

_LOG = logging.getLogger("mesh_tensorflow")


def generate(
  estimator: Any,
  rows: Sequence[Sequence[int]],
  sequence_length: Mapping[str, int],
  batch_size: int | None = None,
  *,
  options: Mapping[str, object] | None = None,
  seed: int | None = None,
  before_batch: Callable[[], None] | None = None,
) -> list[list[int]]:
  """Generates outputs for rows of ids.

  Rows of similar length are decoded together, by a program of about that length. How an
  encoder-decoder decodes is bound in gin (`Bitransformer.decode.beam_size`, ...); if
  `max_decode_length` is not, it is `sequence_length["targets"]`.

  Args:
    estimator: a `Trainer`, with variables restored.
    rows: ids of each input, EOS included, at most `sequence_length["inputs"]`.
    sequence_length: dict with "inputs" and "targets".
    batch_size: rows at a time; as many as in a training batch by default.
    options: more arguments for the model.
    seed: what is drawn depends on it and on the place of a batch among those of the call; None: on
      how many runs there were before.
    before_batch: called before each batch; what it raises ends decoding.

  Returns:
    For each row the new ids, to the first EOS, without it.
  """
  # A batch goes on until its last row has ended: rows of similar length end at similar steps.
  order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
  size = batch_size or estimator.steps.batch_size
  given = predict.decoding_options(estimator.steps.model, sequence_length["targets"])
  # A language model continues its inputs, in the same row.
  more = 0 if hasattr(estimator.steps.model, "decode") else sequence_length["targets"]
  batches = [order[i : i + size] for i in range(0, len(order), size)]
  lengths = [rounded_length(len(rows[b[0]]), sequence_length["inputs"]) for b in batches]
  results: list[list[int]] = [[]] * len(rows)
  for n, (length, of_length) in enumerate(
    itertools.groupby(zip(lengths, batches), key=lambda pair: pair[0])
  ):
    places = [i for _, batch in of_length for i in batch]
    more_arguments: dict[str, Any] = {}
    if seed is not None:
      more_arguments["seed"] = random_bits.fold(seed, n)
    if before_batch is not None:
      more_arguments["before_batch"] = before_batch
    outputs = estimator.sample(
      [rows[i] for i in places],
      length + more,
      batch_size=batch_size,
      **{**given, **(options or {})},
      **more_arguments,
    )
    for i, output in zip(places, outputs):
      results[i] = strip_ids(output, EOS_ID)
  return results


def encode_lines(
  lines: Sequence[str], vocabulary: Vocabularies, length: int, eos_id: int = EOS_ID
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
