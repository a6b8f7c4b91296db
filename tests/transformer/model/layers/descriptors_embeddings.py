"""Embeddings of tokens against NumPy, on drawn layouts."""

from __future__ import annotations

import functools

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import adaptive_softmax, vocab_embeddings
from tests.conformance.framework import T, op
from tests.transformer import layer_program
from tests.transformer.model.layers import numpy_embeddings as mirror

D, VOCAB = mtf.Dimension("d_model", 4), mtf.Dimension("vocab", 16)
IDS = T("batch:4 length:4", -2, 19, "int32")  # Also ids out of range.
HIDDEN = T("batch:4 length:4 d_model:4", -1, 1)
TARGETS = T("batch:4 length:4", -1, 16, "int32")
CLUSTERS = [
  dict(token_count=4, embedding_size=4),
  dict(token_count=4, embedding_size=2),
  dict(token_count=8, embedding_size=2),
]
# With two tails the head has as many rows as the tails have.
HEAD_AND_TAILS = [
  dict(token_count=6),
  dict(token_count=4, embedding_size=2),
  dict(token_count=6),
]
HEAD_AND_TAILS_SPLITTABLE = [
  dict(token_count=6),
  dict(token_count=2, embedding_size=2),
  dict(token_count=8, length_projection_factor=0.5),
]
VECTORS = "batch:4 length:4 vocab:16 d_model:4"
GATHERED = "batch:4 length:4 vocab:16 inner_vocab:2"


class Decoder:
  z_loss = 0.02

  def loss_denominator(self, targets, num_microbatches):
    return float(targets.shape.size) * num_microbatches


def make(cls, x, **kwargs):
  return cls(x.mesh, VOCAB, D, layer_program.FLOATS, "embedding", None, **kwargs)


def embed(ids, cls, **kwargs):
  return make(cls, ids, **kwargs).ids_to_embedding(ids, None)


def logits(hidden, cls, mode="eval", **kwargs):
  return make(cls, hidden, **kwargs).hidden_to_logits(
    hidden, layer_program.context(hidden, 1, mode)
  )


def loss(hidden, targets, clusters):
  context = layer_program.context(hidden, mode="train")
  embedding = make(adaptive_softmax.AdaptiveSoftmaxVocabEmbedding, hidden, clusters=clusters)
  hidden = embedding.hidden_to_logits(hidden, context)
  return adaptive_softmax.adaptive_softmax_loss_fn(Decoder(), context, hidden, targets, VOCAB)


FACTORIZED = {"embedding1": "vocab:16 inner_vocab:2", "embedding2": "inner_vocab:2 d_model:4"}
ADAPTIVE = {
  "embedding_0": "vocab:4 d_model:4",
  "embedding_11": "vocab:4 inner_vocab:2",
  "embedding_12": "inner_vocab:2 d_model:4",
  "embedding_21": "vocab:8 inner_vocab:2",
  "embedding_22": "inner_vocab:2 d_model:4",
}
MIXTURE = {
  "embedding_embedding_weights": "vocab:16 d_model:4",
  "embedding_mixture_weights": "softmax_components:3 d_model:4",
  "embedding_context_weights": "softmax_components:3 _d_model_copy:4 d_model:4",
}
MIXTAPE = {
  "embedding_embedding_weights": "vocab:16 d_model:4",
  "embedding_context_weights": "gates:4 _d_model_copy:4 d_model:4",
  "embedding_context_weights_bias": "gates:4 d_model:4",
  "embedding_prior_weights": "gates:3 gate_embedding:2 d_model:4",
  "embedding_prior_weights_bias": "gates:3 gate_embedding:2",
  "embedding_prior_vocab_vector": "vocab:8 gate_embedding:2",
  "embedding_prior_gates_vector": "gates:3 d_model:4",
  "embedding_prior_bias": "vocab:8 gates:3",
}


def head_and_tails(rows, tail, last):
  return {
    "embedding_0": f"vocab:{rows} d_model:4",
    "embedding_11": f"vocab:{tail} inner_vocab:2",
    "embedding_12": "inner_vocab:2 d_model:4",
    "embedding_2": f"vocab:{last} d_model:4",
  }


def adaptive(head, inner1, matrix1, inner2, matrix2):
  return np.concatenate([head, inner1 @ matrix1, inner2 @ matrix2])


_MOS = functools.partial(vocab_embeddings.MixtureOfSoftmaxes, num_softmaxes=3)
_MIXTAPE = functools.partial(
  vocab_embeddings.Mixtape, gate_embedding_size=2, frequent_token_fraction=0.5
)
_ADAPTIVE = functools.partial(vocab_embeddings.AdaptiveVocabEmbedding, clusters=CLUSTERS)
_FACTORIZED = functools.partial(vocab_embeddings.FactorizedVocabEmbedding, inner_dimension_size=2)
_SOFTMAX = functools.partial(
  adaptive_softmax.AdaptiveSoftmaxVocabEmbedding, clusters=HEAD_AND_TAILS
)

DESCRIPTORS = [
  op(
    "factorized_embedding",
    functools.partial(embed, cls=_FACTORIZED),
    lambda ids, w, u: mirror.rows(w @ u, ids),
    IDS,
    variables=FACTORIZED,
    together=(GATHERED, "batch:4 length:4 inner_vocab:2 d_model:4"),
  ),
  op(
    "factorized_logits",
    functools.partial(logits, cls=_FACTORIZED),
    lambda h, w, u: mirror.scaled(h) @ (w @ u).T,
    HIDDEN,
    variables=FACTORIZED,
    together=(
      "batch:4 length:4 d_model:4 inner_vocab:2",
      "batch:4 length:4 inner_vocab:2 vocab:16",
    ),
  ),
  op(
    "adaptive_embedding",
    functools.partial(embed, cls=_ADAPTIVE),
    lambda ids, *w: mirror.rows(adaptive(*w), ids),
    IDS,
    variables=ADAPTIVE,
    together=(VECTORS, GATHERED, "batch:4 length:4 inner_vocab:2 d_model:4"),
  ),
  op(
    "adaptive_logits",
    functools.partial(logits, cls=_ADAPTIVE),
    lambda h, *w: mirror.scaled(h) @ adaptive(*w).T,
    HIDDEN,
    variables=ADAPTIVE,
    together=(
      "batch:4 length:4 d_model:4 inner_vocab:2",
      "batch:4 length:4 inner_vocab:2 vocab:4",
      "batch:4 length:4 d_model:4 vocab:4",
    ),
  ),
  op(
    "mixture_of_softmaxes",
    functools.partial(logits, cls=_MOS),
    mirror.mixture_of_softmaxes,
    HIDDEN,
    variables=MIXTURE,
    together=(
      "batch:4 length:4 softmax_components:3 _d_model_copy:4 d_model:4",
      "batch:4 length:4 softmax_components:3 vocab:16 d_model:4",
    ),
  ),
  op(
    "mixture_of_softmaxes_embedding",
    functools.partial(embed, cls=_MOS),
    lambda ids, table, m, c: mirror.rows(table, ids),
    IDS,
    variables=MIXTURE,
    together=VECTORS,
  ),
  op(
    "mixtape",
    functools.partial(logits, cls=_MIXTAPE, extra_ids=3),
    functools.partial(mirror.mixtape, extra_ids=3),
    HIDDEN,
    variables=MIXTAPE,
    unsplit=("gates",),
    together=(
      "batch:4 length:4 _d_model_copy:4 d_model:4",
      "batch:4 length:4 gate_embedding:2 d_model:4",
      "batch:4 length:4 d_model:4 vocab:16",
    ),
  ),
  op(
    "mixtape_embedding",
    functools.partial(embed, cls=_MIXTAPE),
    lambda ids, table, *w: mirror.rows(table, ids),
    IDS,
    variables=MIXTAPE,
    together=VECTORS,
  ),
  op(
    "adaptive_softmax_embedding",
    functools.partial(embed, cls=_SOFTMAX),
    lambda ids, head, w, u, last: mirror.rows(np.concatenate([head[:6], w @ u, last]), ids),
    IDS,
    variables=head_and_tails(8, 4, 6),
    together=(VECTORS, GATHERED, "batch:4 length:4 inner_vocab:2 d_model:4"),
  ),
  op(
    "adaptive_softmax_log_probabilities",
    functools.partial(logits, cls=_SOFTMAX),
    lambda h, head, w, u, last: mirror.head_and_tails(h, head, [w @ u, last], 6),
    HIDDEN,
    variables=head_and_tails(8, 4, 6),
    together=("batch:4 length:4 inner_vocab:2 d_model:4 vocab:2",),
  ),
  op(
    "adaptive_softmax_loss",
    functools.partial(loss, clusters=HEAD_AND_TAILS_SPLITTABLE),
    lambda h, t, head, w, u, last: mirror.adaptive_loss(
      h, t, head, [w @ u, last], 6, z_loss=0.02, factors=[1.0, 0.5]
    ),
    HIDDEN,
    TARGETS,
    variables=head_and_tails(8, 2, 8),
    together=(
      "batch:4 length:4 inner_vocab:2 d_model:4",
      "batch:4 length:4 d_model:4 vocab:2",
      "batch:4 length:4 inner_vocab:2 vocab:2",
    ),
  ),
]
