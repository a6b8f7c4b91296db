"""BLEU by sacrebleu (Post, 2018), as metrics of evaluation.

`bleu` is sacrebleu's own: comparable everywhere. `moses_bleu` scores what the scripts of Moses make
of the texts, as papers do whose data is tokenized.

Need the package sacrebleu, and sacremoses for `moses_bleu`: `pip install sacrebleu sacremoses`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gin

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.transformer.data.moses import MosesWords, optional_package


class Score(float):
  """A number that says how it was made.

  Attributes:
    signature: what has to be the same in scores that are compared.
  """

  signature: str

  def __new__(cls, value: float, signature: str) -> Score:
    made = super().__new__(cls, value)
    made.signature = signature
    return made


@gin.configurable(module="mesh_tensorflow.transformer.bleu")
@affects("report")
def bleu(
  targets: Sequence[str | Sequence[str]],
  predictions: Sequence[str],
  tokenize: str = "13a",
  lowercase: bool = False,
) -> dict[str, float]:
  """Corpus BLEU of detokenized texts.

  Args:
    targets: for each text its reference, or a list of references, equally many for all.
    predictions: the texts to be scored.
    tokenize: tokenizer of sacrebleu: "13a", "intl", "zh", "char", "none", ....
    lowercase: whether case is ignored.

  Returns:
    {"bleu": a number between 0 and 100, with sacrebleu's signature}.

  Raises:
    ConfigError: sacrebleu is not installed.
    DataError: there is nothing to score, or the numbers of texts differ.
  """
  score, signature = _score(targets, predictions, tokenize, lowercase, lambda text: text)
  return {"bleu": Score(score, signature)}


@gin.configurable(module="mesh_tensorflow.transformer.bleu")
@affects("report")
def moses_bleu(
  targets: Sequence[str | Sequence[str]],
  predictions: Sequence[str],
  language: str = gin.REQUIRED,
  lowercase: bool = True,
) -> dict[str, float]:
  """Corpus BLEU of texts that are normalized and tokenized as by the scripts of Moses.

  Predictions and references alike have their punctuation normalized and are tokenized, by
  sacremoses, which leaves special characters as they are.

  Args:
    targets: as of `bleu`.
    predictions: likewise.
    language: code of the language, for its abbreviations and elisions: "fr", say.
    lowercase: whether case is ignored.

  Returns:
    {"moses_bleu": a number between 0 and 100, with a signature}.

  Raises:
    ConfigError: sacrebleu or sacremoses is not installed.
    DataError: there is nothing to score, or the numbers of texts differ.
  """
  moses = optional_package("sacremoses", "BLEU")
  normalizer = moses.MosesPunctNormalizer(lang=language)
  words = MosesWords(language)

  def tokenized(text: str) -> str:
    return words.cut(normalizer.normalize(text))

  score, signature = _score(targets, predictions, "none", lowercase, tokenized)
  tokens = f"tok:moses-{language}-sacremoses-{moses.__version__}"
  return {"moses_bleu": Score(score, signature.replace("tok:none", tokens))}


def _score(
  targets: Sequence[str | Sequence[str]],
  predictions: Sequence[str],
  tokenize: str,
  lowercase: bool,
  change: Callable[[str], str],
) -> tuple[float, str]:
  """BLEU and its signature, of texts that are changed first; see `bleu`."""
  sacrebleu = optional_package("sacrebleu", "BLEU")
  references = [[t] if isinstance(t, str) else list(t) for t in targets]
  counts = {len(r) for r in references}
  if len(references) != len(predictions) or len(counts) != 1 or not min(counts):
    raise DataError(
      f"bleu: {len(predictions)} predictions for {len(references)} targets, with {sorted(counts)} "
      "references each; there must be as many, and at least one"
    )
  # Forced: no warning about texts that end in " .", as they may be meant so.
  metric = sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
  score = metric.corpus_score(
    [change(p) for p in predictions],
    [[change(t) for t in column] for column in zip(*references)],
  )
  return float(score.score), str(metric.get_signature())
