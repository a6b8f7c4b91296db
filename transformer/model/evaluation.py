"""Teacher-forced evaluation: the sums of one batch, and what those of all batches say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.model.forward import Forward


def eval_step(steps: Forward, feature_names: Sequence[str]) -> mtf.Function:
  """Sums over one batch, teacher-forced.

  Args:
    steps: the model on its mesh.
    feature_names: the features of the data, in the order of the step's arguments.

  Returns:
    An `mtf.function` of the features that returns a dict of float32 scalars: `loss` (sum of
    nats), `tokens` (scored ones), `correct`, `sequences`, `correct_sequences`, `labels` (sum of
    target ids), and `longest`, the scored tokens of the row that has most.
  """
  steps.check_features(feature_names)

  @mtf.function(steps.mesh_impl, [steps.feature_spec(n) for n in feature_names])
  def eval_step(*args: mtf.Tensor) -> dict[str, mtf.Tensor]:
    features = steps.joined(dict(zip(feature_names, args)))
    targets = features["targets"]
    logits = mtf.to_float(steps.logits_and_loss(features, "eval", 1, compute_loss=False)[0])
    vocab_dim = steps.model.output_vocab_dim
    weights = steps.scored(targets)
    # Negative targets are no ids; their weight is 0.
    nats = mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.maximum(targets, 0), vocab_dim)
    right = mtf.to_float(mtf.equal(mtf.argmax(logits, vocab_dim), targets)) * weights
    length_dim = targets.shape.dims[-1]
    tokens = mtf.reduce_sum(weights, reduced_dim=length_dim)
    wrong = tokens - mtf.reduce_sum(right, reduced_dim=length_dim)
    # Rows without a target fill up the last batch: they are no sequences.
    used = mtf.to_float(mtf.greater(tokens, 0.0))
    return {
      "loss": mtf.reduce_sum(nats * weights),
      "tokens": mtf.reduce_sum(tokens),
      "correct": mtf.reduce_sum(right),
      "sequences": mtf.reduce_sum(used),
      # A count as a float: less than a half is none.
      "correct_sequences": mtf.reduce_sum(used * mtf.to_float(mtf.less(wrong, 0.5))),
      "labels": mtf.reduce_sum(mtf.to_float(targets) * weights),
      "longest": mtf.reduce_max(tokens),
    }

  return eval_step


def metrics_of(sums: Mapping[str, float], longest: float) -> dict[str, float]:
  """The metrics of a data set; see `Estimator.evaluate`.

  Args:
    sums: what `eval_step` returned, summed over all batches.
    longest: the largest of its `longest`.
  """
  # Of all tokens alike, not a mean of means of batches, which have different numbers of them.
  loss = sums["loss"] / sums["tokens"]
  return {
    "loss": loss,
    "bits_per_token": loss / math.log(2.0),
    "neg_log_perplexity": -loss,
    "token_accuracy": sums["correct"] / sums["tokens"],
    "sequence_accuracy": sums["correct_sequences"] / max(sums["sequences"], 1.0),
    "num_eval_tokens": sums["tokens"],
    "total_nats": sums["loss"],
    "mean_label": sums["labels"] / sums["tokens"],
    "max_targets_length": longest,
  }


def joined(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """The metrics of several data sets together, each token alike, of those of each."""
  tokens = sum(m["num_eval_tokens"] for m in found)
  loss = sum(m["total_nats"] for m in found) / tokens
  return {
    "loss": loss,
    "bits_per_token": loss / math.log(2.0),
    "token_accuracy": sum(m["token_accuracy"] * m["num_eval_tokens"] for m in found) / tokens,
    "num_eval_tokens": tokens,
  }
