"""BERT's formulas in NumPy, on variables by Google's names (arXiv:1810.04805)."""

from __future__ import annotations

import math

import numpy as np

erf = np.vectorize(math.erf, otypes=[float])
ACTIVATIONS = {
  "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
  "gelu_erf": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
  "relu": lambda x: np.maximum(x, 0),
}


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def forward(values, config, ids, mask, types, positions):
  """(sequence output, pooled output, masked LM logits at positions, next sentence logits)."""
  w = {k: np.asarray(v, np.float64) for k, v in values.items()}
  act = ACTIVATIONS[config.feedforward_intermediate_act]
  heads = config.attention_num_heads

  def norm(x, scope):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.layer_norm_epsilon)
    return x * w[f"{scope}/LayerNorm/gamma"] + w[f"{scope}/LayerNorm/beta"]

  def dense(x, scope):
    return x @ w[f"{scope}/kernel"] + w[f"{scope}/bias"]

  e = "bert/embeddings"
  x = w[f"{e}/word_embeddings"][ids] + w[f"{e}/token_type_embeddings"][types]
  x = norm(x + w[f"{e}/position_embeddings"][: ids.shape[1]], e)
  bias = (1 - mask)[:, None, None, :] * -10000.0
  for i in range(config.num_blocks):
    layer = f"bert/encoder/layer_{i}"

    def split(what, layer=layer, x=x):
      y = dense(x, f"{layer}/attention/self/{what}")
      return y.reshape(*y.shape[:2], heads, -1).transpose(0, 2, 1, 3)

    q, k, v = split("query"), split("key"), split("value")
    weights = softmax(q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1]) + bias)
    y = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    x = norm(x + dense(y, f"{layer}/attention/output/dense"), f"{layer}/attention/output")
    y = dense(act(dense(x, f"{layer}/intermediate/dense")), f"{layer}/output/dense")
    x = norm(x + y, f"{layer}/output")
  pooled = np.tanh(dense(x[:, 0], "bert/pooler/dense"))
  at = np.take_along_axis(x, positions[:, :, None], 1)
  scope = "cls/predictions/transform"
  at = norm(act(dense(at, f"{scope}/dense")), scope)
  mlm = at @ w[f"{e}/word_embeddings"].T + w["cls/predictions/output_bias"]
  scope = "cls/seq_relationship"
  return x, pooled, mlm, pooled @ w[f"{scope}/output_weights"].T + w[f"{scope}/output_bias"]


def loss(mlm, nsp, batch):
  """Of both tasks: the mean cross-entropies with 1e-4 log(Z)^2, of masked positions by weight."""
  total = 0.0
  weights = batch["masked_lm_weights"], np.ones(len(nsp))
  for logits, labels, weight in zip(
    (mlm, nsp), (batch["masked_lm_ids"], batch["next_sentence_labels"]), weights
  ):
    z = np.log(np.exp(logits).sum(-1))
    losses = z - np.take_along_axis(logits, labels[..., None], -1)[..., 0] + 1e-4 * z**2
    total += (losses * weight).sum() / weight.sum()
  return total
