"""BLEU by sacrebleu (Post, 2018), as a metric of evaluation.

Needs the package sacrebleu: `pip install sacrebleu`.
"""

from __future__ import annotations

from collections.abc import Sequence

import gin

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import ConfigError, DataError


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
    {"bleu": a number between 0 and 100}.

  Raises:
    ConfigError: sacrebleu is not installed.
    DataError: there is nothing to score, or the numbers of texts differ.
  """
  try:
    import sacrebleu
  except ImportError as e:
    raise ConfigError("BLEU needs the package sacrebleu: pip install sacrebleu") from e
  references = [[t] if isinstance(t, str) else list(t) for t in targets]
  counts = {len(r) for r in references}
  if len(references) != len(predictions) or len(counts) != 1 or not min(counts):
    raise DataError(
      f"bleu: {len(predictions)} predictions for {len(references)} targets, with {sorted(counts)} "
      "references each; there must be as many, and at least one"
    )
  score = sacrebleu.corpus_bleu(
    list(predictions),
    [list(column) for column in zip(*references)],
    tokenize=tokenize,
    lowercase=lowercase,
    force=True,  # No warning about texts that end in " .": they may be meant so.
  )
  return {"bleu": float(score.score)}
