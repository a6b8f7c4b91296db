"""Beam search and greedy decoding."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance.framework import ONE_DEVICE, T, op
from tests.decoding import numpy_beam_search

BEAM, LENGTH = mtf.Dimension("beam", 4), mtf.Dimension("length", 4)
TABLE, START = T("u:12 v:12"), T("batch:4 v:12")
# Dimensions that meet in the model, and in the search.
ROWS = ("batch:4 beam:4 u:12 v:12", "batch:4 beam:4 length:4")
OLD, SEQUENCES = "batch:4 old:8", T("batch:4 old:8 length:4", 0, 9, "int32")


def _logits_fn(table):
  """The state, and the logits, are the sum of the rows that belong to the tokens so far."""

  def logits_fn(step, ids, states):
    last = mtf.gather(ids, step - 1, ids.shape[-1])
    state = states[0] + mtf.gather(table, last, table.shape[0])
    return state, [state]

  return logits_fn


def _beam_search(table, start, **kwargs):
  batch, vocab = start.shape
  return mtf.beam_search.beam_search(
    _logits_fn(table),
    mtf.zeros(start.mesh, [batch, BEAM, LENGTH], tf.int32),
    0.6,
    states=[mtf.broadcast(start, [batch, BEAM, vocab])],
    **kwargs,
  )


def _beam_search_in_place(table, start, **kwargs):
  """What each step adds to the logits stays where its beam wrote it; beams know their ancestors."""
  batch, vocab = start.shape
  writer = mtf.Dimension("memory_beam", BEAM.size)
  steps = mtf.Dimension("memory_length", LENGTH.size)

  def logits_fn(step, ids, states):
    written, ancestry = states
    here = mtf.one_hot(step, steps, dtype=start.dtype)
    last = mtf.gather(ids, step - 1, ids.shape[-1])
    new = mtf.rename_dimension(mtf.gather(table, last, table.shape[0]), "beam", "memory_beam")
    written += mtf.multiply(new, here, output_shape=written.shape)
    own = mtf.one_hot(mtf.range(ids.mesh, BEAM, tf.int32), writer, dtype=start.dtype)
    ancestry += mtf.einsum([own, here], output_shape=ancestry.shape)
    summed = mtf.einsum([written, ancestry], output_shape=mtf.Shape([batch, BEAM, vocab]))
    return summed + start, [written, ancestry]

  return mtf.beam_search.beam_search(
    logits_fn,
    mtf.zeros(start.mesh, [batch, BEAM, LENGTH], tf.int32),
    0.6,
    states=[
      mtf.zeros(start.mesh, [batch, writer, steps, vocab], start.dtype),
      mtf.zeros(start.mesh, [batch, BEAM, writer, steps], start.dtype),
    ],
    **kwargs,
  )


def _beam_search_in_numpy(table, start, **kwargs):
  def log_probs(row, prefix):
    logits = start[row] + table[0] + sum(table[t] for t in prefix)
    return logits - np.log(np.sum(np.exp(logits)))

  ids, scores, _ = numpy_beam_search.search(
    log_probs, len(start), BEAM.size, LENGTH.size, 0.6, **kwargs
  )
  return [ids, scores]


def _greedy_decode(table, start, forced=None, temperature=0.0):
  return mtf.beam_search.greedy_decode(
    _logits_fn(table),
    mtf.zeros(start.mesh, [start.shape[0], LENGTH], tf.int32),
    temperature,
    initial_states=[start],
    forced_ids=forced,
  )


def _greedy_decode_in_numpy(table, start, forced):
  ids, last, state = np.zeros_like(forced), 0 * forced[:, 0], start
  for i in range(LENGTH.size):
    if not np.all(np.any(ids == 1, axis=1)):
      state = state + table[last]
      last = np.where(forced[:, i], forced[:, i], np.argmax(state, axis=1))
      ids[:, i] = last
  return ids


def _topk(sequences, scores, others, flags):
  return mtf.beam_search.compute_topk_scores_and_seq(sequences, scores, others, flags, BEAM)


def _topk_in_numpy(sequences, scores, others, flags):
  at = np.argsort(-scores, axis=1)[:, : BEAM.size]
  others, flags = (np.take_along_axis(x, at, 1) for x in (others, flags))
  return [np.take_along_axis(sequences, at[..., None], 1), others, flags, np.eye(8)[at]]


DESCRIPTORS = [
  op(
    "beam_search",
    _beam_search,
    _beam_search_in_numpy,
    TABLE,
    START,
    together=ROWS,
    differentiable=False,
  ),
  op(
    "beam_search_all_steps",
    lambda t, s: _beam_search(t, s, stop_early=False, eos_id=5),
    lambda t, s: _beam_search_in_numpy(t, s, stop_early=False, end=5),
    TABLE,
    START,
    together=ROWS,
    differentiable=False,
  ),
  op(
    "beam_search_with_a_state_of_all_beams",
    lambda t, s: _beam_search_in_place(t, s, eos_id=5),
    lambda t, s: _beam_search_in_numpy(t, s, end=5),
    TABLE,
    START,
    together=(*ROWS, "batch:4 beam:4 memory_beam:4 memory_length:4 v:12"),
    differentiable=False,
  ),
  op(
    "greedy_decode",
    _greedy_decode,
    _greedy_decode_in_numpy,
    TABLE,
    START,
    T("batch:4 length:4", 0, 2, "int32"),
    together="batch:4 u:12 v:12",
    differentiable=False,
  ),
  op(
    "greedy_decode_sampled",
    lambda t, s: _greedy_decode(t, s, temperature=1.0),
    ONE_DEVICE,
    TABLE,
    START,
    together=("batch:4 u:12 v:12", "batch:4 length:4"),
    differentiable=False,
  ),
  op(
    "compute_topk_scores_and_seq",
    _topk,
    _topk_in_numpy,
    SEQUENCES,
    OLD,
    OLD,
    T(OLD, dtype="bool"),
    together=("batch:4 beam:4 old:8", "batch:4 old:8 length:4"),
  ),
]
