"""A tiny BERT model on a mesh, for tests."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import bert, checkpoint_names, optimization

LAYOUT = "batch:rows,vocab:cols,intermediate:cols,num_heads:cols,experts:rows"
BATCH, SEQ, PREDICTIONS = 4, 8, 3


def config(**settings):
  tiny = {
    "vocab_size": 100,
    "d_model": 16,
    "num_blocks": 2,
    "attention_num_heads": 2,
    "feedforward_intermediate_size": 32,
    "max_position_embeddings": 12,
    "type_vocab_size": 2,
  }
  return bert.BertConfig(**{**tiny, **settings})


def batch(seed=0):
  rng = np.random.default_rng(seed)
  mask = np.ones([BATCH, SEQ], np.int32)
  mask[1, 5:] = 0
  return {
    "input_ids": rng.integers(0, 100, [BATCH, SEQ]).astype(np.int32),
    "input_mask": mask,
    "segment_ids": rng.integers(0, 2, [BATCH, SEQ]).astype(np.int32),
    "masked_lm_positions": rng.integers(0, 5, [BATCH, PREDICTIONS]).astype(np.int32),
    "masked_lm_ids": rng.integers(0, 100, [BATCH, PREDICTIONS]).astype(np.int32),
    "masked_lm_weights": np.array([[1, 1, 0]] * BATCH, np.float32),
    "next_sentence_labels": rng.integers(0, 2, [BATCH]).astype(np.int32),
  }


def specs():
  dims = [("batch", BATCH), ("seq", SEQ)], [("batch", BATCH), ("max_pred_seq", PREDICTIONS)]
  seq = [mtf.TensorSpec(dims[0], tf.int32)] * 3
  predictions = [mtf.TensorSpec(dims[1], d) for d in (tf.int32, tf.int32, tf.float32)]
  return seq + predictions + [mtf.TensorSpec([("batch", BATCH)], tf.int32)]


def function(impl, of, learning_rate=None):
  """sequence, pooled, masked LM and next sentence logits, and the loss; with a rate, trains."""
  is_training = learning_rate is not None

  @mtf.function(impl, specs())
  def run(ids, mask, types, positions, label_ids, weights, labels):
    model = bert.BertModel(
      of, is_training, ids, mask, types, mesh_shape=impl.shape, layout=impl.layout_rules
    )
    loss, _, mlm = model.get_masked_lm_output(positions, label_ids, weights)
    next_loss, _, nsp = model.get_next_sentence_output(labels)
    loss = loss + next_loss + model.get_extra_loss()
    if is_training:
      optimization.create_optimizer(loss, learning_rate, 10, 0)
      mtf.optimize.count_global_step(ids.graph)
      return loss
    return model.get_sequence_output(), model.get_pooled_output(), mlm, nsp, loss

  return run


def one_device(cpu_devices, **options):
  return mtf.PlacementMeshImpl("all:1", "", cpu_devices[:1], **options)


def scatter(store, seed=1):
  """Gives all variables values that are not those of the start, so that each one counts."""
  rng = np.random.default_rng(seed)
  for v in store:
    if v.slice_dtype.is_floating:
      v.assign(v.numpy() + rng.normal(0, 0.2, v.shape.to_integer_list).astype(np.float32))


def by_google(store, vocab_size):
  return {
    checkpoint_names.google_name(v.name): checkpoint_names.to_google(v.name, v.numpy(), vocab_size)
    for v in store
    if checkpoint_names.is_of_model(v.name) and not v.name.startswith("_")
  }
