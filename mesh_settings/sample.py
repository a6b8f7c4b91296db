"""Settings of sampling from a trained model: `sample.*` of gin, flags of the command infer."""

from __future__ import annotations

import dataclasses
from typing import Any

from mesh_settings.records import setting
from mesh_settings.rules import ABOVE_ZERO, COUNT, COUNT_OR_ZERO, FRACTION, NOT_BELOW_ZERO, number


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSettings:
  """The settings of sampling; the help of each field says what it means."""

  prompt: Any = setting(
    "a text to be continued (encoder-decoders: an input), or a list of such; None: those of "
    "`decode_from_file.input_filename`.",
    None,
  )
  interactive: bool = setting(
    "whether prompts are read from the standard input, one after the other.",
    False,
    flag="--interactive",
    short="Ask for prompts on the terminal, one after the other.",
    commands="infer",
  )
  temperature: float | None = setting(
    "0 takes the likeliest token, 1 draws from the model's distribution; None: 0.8 for language "
    "models, and what `Bitransformer.decode` says for encoder-decoders.",
    None,
    NOT_BELOW_ZERO,
    flag="--temperature",
    short="0: always the most probable token; 1: as the model says.",
    commands="infer",
  )
  top_k: int | None = setting(
    "draw among so many likeliest tokens; None: among all.",
    None,
    COUNT,
    flag="--top_k",
    short="Choose among the k most probable tokens.",
    commands="infer",
  )
  top_p: float | None = setting(
    "draw among the likeliest tokens that have this probability together; None: among all.",
    None,
    number("above 0 and at most 1", lambda x: 0 < x <= 1),
    flag="--top_p",
    short="Choose among the most probable tokens that have this probability.",
    commands="infer",
  )
  min_p: float | None = setting(
    "draw among tokens at least this much as probable as the likeliest; None: among all.",
    None,
    FRACTION,
    flag="--min_p",
    short="Leave out tokens less probable than this part of the best one's.",
    commands="infer",
  )
  repetition_penalty: float | None = setting(
    "above 1, tokens that a text has already become less likely; None: they do not.",
    None,
    ABOVE_ZERO,
    flag="--repetition_penalty",
    short="Above 1: tokens that are there already are less probable.",
    commands="infer",
  )
  seed: int | None = setting(
    "other seeds draw other texts; the same one, of the same prompts, the same. None: that of the "
    'run (`run.seed`, or `run.seeds`\' for "sampling").',
    None,
    flag="--seed",
    flag_values=COUNT_OR_ZERO,
    short="Of the choices.",
    commands="infer",
  )
  num_samples: int = setting(
    "texts for each prompt.",
    1,
    COUNT,
    flag="--num_samples",
    short="Samples for each prompt.",
    commands="infer",
  )
  max_tokens: int | None = setting(
    "new tokens of a text at most; more than `run.sequence_length` slides the window of what the "
    "model sees. None: to the end of the sequence.",
    None,
    COUNT,
    flag="--max_tokens",
    short="New tokens at most.",
    commands="infer",
  )
  stop: Any = setting(
    "a text, or a list of such: what is written ends before the first of them.",
    (),
  )
  output: str | None = setting(
    "a file that gets the texts of `prompt` and `interactive`, besides the screen; with a name "
    'that ends in ".jsonl" one JSON object a line.',
    None,
  )
  batch_size: int | None = setting(
    "rows of a file that a language model continues at a time; None: four times `run.batch_size`, "
    "since no gradients take memory. The texts do not depend on it.",
    None,
    COUNT,
  )
