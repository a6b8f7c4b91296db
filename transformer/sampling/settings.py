"""Sampling settings: `sample.*`, and the bindings of older names for the same."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import gin

from mesh_tensorflow.arguments.declared import NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.decoding.token_choice import TokenChoice
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.gin_config import value_checks
from mesh_tensorflow.transformer.programs.continuation import ContinuationOptions
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID, as_text

_LOG = logging.getLogger("mesh_tensorflow")

# Drawn, not the likeliest: the likeliest text of a language model repeats itself (Holtzman et al.
# 2020). A little below 1, since small models give too much to tokens that are wrong.
DEFAULT_TEMPERATURE = 0.8

_OLD, _OLD_PAIRED = "Unitransformer.sample_autoregressive", "Bitransformer.decode"


@dataclasses.dataclass(frozen=True)
class SampleSettings:
  """The arguments of `sample`, checked; see there."""

  prompts: tuple[str, ...] | None
  interactive: bool
  temperature: float | None
  top_k: int | None
  top_p: float | None
  min_p: float | None
  repetition_penalty: float | None
  given_seed: int | None
  num_samples: int
  max_tokens: int | None
  stop: tuple[str, ...]
  output: str | None
  batch_size: int | None

  @property
  def prompts_given(self) -> bool:
    """True if prompts come from `sample.prompt` or the terminal, and not from a file."""
    return self.prompts is not None or self.interactive

  @property
  def seed(self) -> int:
    """The seed of what is drawn."""
    return self.given_seed or 0

  def with_default_seed(self, seed: int) -> SampleSettings:
    """The same settings, with a seed of the run's if `sample.seed` is not bound."""
    return self if self.given_seed is not None else dataclasses.replace(self, given_seed=seed)

  def until_stop(self, decoded: Any) -> Any:
    """Cuts decoded text at the first stop string; without stop strings returns it unchanged."""
    if not self.stop:
      return decoded
    text = as_text(decoded)
    places = [i for i in (text.find(s) for s in self.stop) if i >= 0]
    return text[: min(places)] if places else text


@gin.configurable(module="mesh_tensorflow.transformer.utils")
@affects("report")
@takes(temperature=NOT_BELOW_ZERO)
def sample(
  prompt: Any = None,
  interactive: bool = False,
  temperature: float | None = None,
  top_k: int | None = None,
  top_p: float | None = None,
  min_p: float | None = None,
  repetition_penalty: float | None = None,
  seed: int | None = None,
  num_samples: int = 1,
  max_tokens: int | None = None,
  stop: Any = (),
  output: str | None = None,
  batch_size: int | None = None,
) -> SampleSettings:
  """Sampling settings of the mode "infer"; gin binds the arguments.

  Args:
    prompt: a text to be continued (encoder-decoders: an input), or a list of such; None: those of
      `decode_from_file.input_filename`.
    interactive: whether prompts are read from the standard input, one after the other.
    temperature: 0 takes the likeliest token, 1 draws from the model's distribution; None: 0.8 for
      language models, and what `Bitransformer.decode` says for encoder-decoders.
    top_k: draw among so many likeliest tokens; None: among all.
    top_p: draw among the likeliest tokens that have this probability together; None: among all.
    min_p: draw among tokens at least this much as probable as the likeliest; None: among all.
    repetition_penalty: above 1, tokens that a text has already become less likely; None: they do
      not.
    seed: other seeds draw other texts; the same one, of the same prompts, the same. None: that of
      the run (`run.seed`, or `run.seeds`' for "sampling").
    num_samples: texts for each prompt.
    max_tokens: new tokens of a text at most; more than `run.sequence_length` slides the window of
      what the model sees. None: to the end of the sequence.
    stop: a text, or a list of such: what is written ends before the first of them.
    output: a file that gets the texts of `prompt` and `interactive`, besides the screen; with a
      name that ends in ".jsonl" one JSON object a line.
    batch_size: rows of a file that a language model continues at a time; None: four times
      `run.batch_size`, since no gradients take memory. The texts do not depend on it.

  Raises:
    ConfigError: a value that is not legal; there is no prompt, or an empty one.
  """
  value_checks.check_arguments("sample", sample, locals())
  prompts = None if prompt is None else _texts("prompt", prompt)
  if prompts == ():
    raise ConfigError("sample.prompt is an empty list: give a text to be continued")
  if prompts is not None and "" in prompts:
    raise ConfigError(
      "sample.prompt is empty: give a text to be continued, such as '\\n', with which a line begins"
    )
  if prompts is not None and interactive:
    raise ConfigError("sample.prompt and sample.interactive exclude each other: bind one of them")
  stops = _texts("stop", stop)
  if "" in stops:
    raise ConfigError("sample.stop has an empty text, at which nothing could begin")
  return SampleSettings(
    prompts,
    bool(interactive),
    temperature,
    top_k,
    top_p,
    min_p,
    repetition_penalty,
    seed,
    num_samples,
    max_tokens,
    stops,
    output,
    batch_size,
  )


def _texts(name: str, given: Any) -> tuple[str, ...]:
  """A text or several, as a tuple."""
  texts = (given,) if isinstance(given, str) else given
  if not isinstance(texts, Sequence) or not all(isinstance(t, str) for t in texts):
    raise ConfigError(f"sample.{name} = {given!r}: it must be a text in quotes, or a list of such")
  return tuple(texts)


@dataclasses.dataclass(frozen=True)
class LanguageModelSampling:
  """Decoding settings of a language model, merged from `sample` and `sample_autoregressive`.

  Attributes:
    options: options of the prefill and decode programs.
    max_tokens: maximum number of new tokens of a row; None: up to the end of the sequence.
    only_new: True if results leave out the prompts.
  """

  options: ContinuationOptions
  max_tokens: int | None
  only_new: bool


def of_language_model(settings: SampleSettings, eos_id: int = EOS_ID) -> LanguageModelSampling:
  """Merges the settings of a language model; bindings of `sample_autoregressive` win.

  Args:
    settings: of `sample`.
    eos_id: the end-of-sequence id, unless `stop_at_token` is bound.
  """
  old = gin.get_bindings(_OLD)
  k = old.get("sampling_keep_top_k")
  same = {
    "temperature": old.get("temperature"),
    "top_k": None if k == -1 else k,
    "max_tokens": old.get("max_steps") or None,
  }
  new = {name: getattr(settings, name) for name in same}
  for name, value in same.items():
    if value is None:
      continue
    if new[name] not in (None, value):
      _LOG.warning(
        "sample.%s (=%r) is not used: of %s the same is bound, to %r",
        name,
        new[name],
        _OLD,
        value,
      )
    new[name] = value
  temperature = new["temperature"]
  choice = TokenChoice(
    temperature=DEFAULT_TEMPERATURE if temperature is None else temperature,
    top_k=new["top_k"],
    top_p=_or(settings.top_p, 1.0),
    min_p=_or(settings.min_p, 0.0),
    repetition_penalty=_or(settings.repetition_penalty, 1.0),
  )
  options = ContinuationOptions(
    choice,
    eos_id=old.get("stop_at_token", eos_id),
    never_end=bool(old.get("never_end", False)),
    bos_id=old.get("bos_id", 0),
  )
  return LanguageModelSampling(
    options, new["max_tokens"], bool(old.get("remove_partial_sequences", False))
  )


def _or(value: float | None, default: float) -> float:
  return default if value is None else value


def bound_decoding() -> dict[str, str]:
  """Gin bindings of the decoding functions as text, to be compared with those of another run."""
  return {name: repr(gin.get_bindings(name)) for name in (_OLD, _OLD_PAIRED)}


def of_encoder_decoder(settings: SampleSettings, has_decode: bool) -> dict[str, Any]:
  """Converts settings to arguments of `Bitransformer.decode` or `sample_autoregressive`.

  Settings that are None are left out, so that gin's bindings of these functions apply.

  Args:
    settings: those of `sample`.
    has_decode: True for `Bitransformer.decode`, False for `sample_autoregressive` ("delimited_lm").

  Raises:
    ConfigError: a setting that the function does not have.
  """
  for name in ("top_p", "min_p", "repetition_penalty"):
    if getattr(settings, name) is not None:
      raise ConfigError(
        f"sample.{name} is for models of type 'lm'; others have sample.temperature and "
        "sample.top_k, or the search of Bitransformer.decode.beam_size"
      )
  options: dict[str, Any] = {}
  if settings.temperature is not None:
    options["temperature"] = settings.temperature
    if has_decode:
      options["beam_size"] = 1  # A search draws nothing.
  if settings.top_k is not None:
    options["sampling_keep_top_k"] = settings.top_k
  if settings.max_tokens is not None:
    options["max_decode_length" if has_decode else "max_steps"] = settings.max_tokens
  return options
