"""Sampling settings: `sample.*`, and the bindings of older names for the same."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import gin

from mesh_settings.records import settings_of, takes_settings
from mesh_settings.sample import SampleSettings
from mesh_tensorflow.arguments.declared import affects, declares
from mesh_tensorflow.decoding.token_choice import TokenChoice
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.data.vocabularies.base import EOS_ID, as_text
from mesh_tensorflow.transformer.generation.prefill_decode import DecodeOptions
from mesh_tensorflow.transformer.gin_config import checks

_LOG = logging.getLogger("mesh_tensorflow")

# Drawn, not the likeliest: the likeliest text of a language model repeats itself (Holtzman et al.
# 2020). A little below 1, since small models give too much to tokens that are wrong.
DEFAULT_TEMPERATURE = 0.8

_OLD, _OLD_PAIRED = "Unitransformer.sample_autoregressive", "Bitransformer.decode"


class Sampling(SampleSettings):
  """`SampleSettings` that are checked, with `prompt` and `stop` as tuples of texts.

  Attributes:
    prompt: the prompts; None if they come from the terminal or a file.
    stop: the stop strings.
  """

  @property
  def prompts_given(self) -> bool:
    """True if prompts come from `sample.prompt` or the terminal, and not from a file."""
    return self.prompt is not None or self.interactive

  def with_default_seed(self, seed: int) -> Sampling:
    """The same settings, with a seed of the run's if `sample.seed` is not bound."""
    return self if self.seed is not None else dataclasses.replace(self, seed=seed)

  def until_stop(self, decoded: object) -> Any:
    """Cuts decoded text at the first stop string; without stop strings returns it unchanged."""
    if not self.stop:
      return decoded
    text = as_text(decoded)
    places = [i for i in (text.find(s) for s in self.stop) if i >= 0]
    return text[: min(places)] if places else text


@gin.configurable(module="mesh_tensorflow.transformer.utils")
@declares(SampleSettings)
@affects("report")
@takes_settings(SampleSettings, tuple(settings_of(SampleSettings)))
def sample(given: dict[str, Any]) -> Sampling:
  """Sampling settings of the mode "infer"; gin binds the arguments.

  {settings}

  Raises:
    ConfigError: a value that is not legal; there is no prompt, or an empty one.
  """
  checks.check_arguments("sample", sample, given)
  prompt = given["prompt"]
  prompts = None if prompt is None else _texts("prompt", prompt)
  if prompts == ():
    raise ConfigError("sample.prompt is an empty list: give a text to be continued")
  if prompts is not None and "" in prompts:
    raise ConfigError(
      "sample.prompt is empty: give a text to be continued, such as '\\n', with which a line begins"
    )
  if prompts is not None and given["interactive"]:
    raise ConfigError("sample.prompt and sample.interactive exclude each other: bind one of them")
  stops = _texts("stop", given["stop"])
  if "" in stops:
    raise ConfigError("sample.stop has an empty text, at which nothing could begin")
  return Sampling(**given | {"prompt": prompts, "stop": stops})


def _texts(name: str, given: object) -> tuple[str, ...]:
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

  options: DecodeOptions
  max_tokens: int | None
  only_new: bool


def of_language_model(settings: Sampling, eos_id: int = EOS_ID) -> LanguageModelSampling:
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
  options = DecodeOptions(
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


def of_encoder_decoder(settings: Sampling, has_decode: bool) -> dict[str, Any]:
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
