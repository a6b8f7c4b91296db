"""Beam search and greedy decoding: sequences of tokens made step by step on a mesh.

A beam is the set of the best sequences that are not complete yet (alive). A step asks the
model for the next token of each, and keeps the best extensions; those that end with the
end-of-sequence token compete for the places of the finished sequences. Sequences of
different lengths are compared by their log probability divided by a length penalty; their length
counts the end of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import gin
import tensorflow as tf

from mesh_tensorflow.arguments import checking
from mesh_tensorflow.arguments.declared import NOT_BELOW_ZERO, affects, one_of, takes
from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.decoding.beam_search_state import (
  INF,
  LENGTH_PENALTIES,
  BeamSearch,
  LogitsFn,
  call_logits_fn,
  take,
  vocab_dim,
)
from mesh_tensorflow.environment import tensorflow_mode
from mesh_tensorflow.errors import DTypeError, ShapeError
from mesh_tensorflow.operations.comparison import equal, less, logical_and, logical_or, not_equal
from mesh_tensorflow.operations.constants import constant, zeros
from mesh_tensorflow.operations.einsum import transpose
from mesh_tensorflow.operations.elementwise import cast, logical_not
from mesh_tensorflow.operations.indexing import GatherOperation
from mesh_tensorflow.operations.loops import while_loop
from mesh_tensorflow.operations.one_hot import one_hot
from mesh_tensorflow.operations.random import sample_with_temperature
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reduction import reduce_all
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.operations.top_k import top_k
from mesh_tensorflow.operations.where import where
from mesh_tensorflow.program.argument_kinds import TensorOrScalar
from mesh_tensorflow.program.dimensions import Dimension, DimensionLike, Shape, convert_to_dimension
from mesh_tensorflow.program.graph import Tensor

# Id of the token that ends a sequence.
EOS_ID = 1


def compute_topk_scores_and_seq(
  sequences: Tensor,
  scores: Tensor,
  scores_to_gather: Tensor,
  flags: Tensor,
  beam_dim: DimensionLike,
  prefix: str = "default",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
  """Selects the sequences with the highest scores, and the values that belong to them.

  Args:
    sequences: token ids, of shape [..., old_beam, length].
    scores: scores to compare, of shape [..., old_beam].
    scores_to_gather: values of the shape of `scores`; returned for the selected sequences.
    flags: values of the shape of `scores`, of any dtype; returned for the selected sequences.
    beam_dim: the new dimension in place of the last one of `scores`, not larger. It needs
      another name.
    prefix: prefix of the operation's name.

  Returns:
    Of the selected, best first: sequences [..., beam, length], scores_to_gather [..., beam],
    flags [..., beam], and their one-hot float32 selector [..., beam, old_beam].

  Raises:
    ShapeError: `beam_dim` is larger than the old beam, or has its name; or the sequences have
      not the dimensions of the scores.
  """
  beam_dim = convert_to_dimension(beam_dim)
  old_beam = scores.shape[-1] if scores.shape.ndims else None
  if old_beam is None or old_beam not in sequences.shape or old_beam.name == beam_dim.name:
    raise ShapeError(
      f"compute_topk_scores_and_seq {prefix!r}: the last dimension of the scores {scores} must be "
      f"one of the sequences {sequences}, of another name than the new {beam_dim}"
    )
  selected = Dimension("_selected", beam_dim.size)
  _, at = top_k(scores, old_beam, selected, name=f"{prefix}_top_k")
  selector_shape = Shape(at.shape.dims[:-1] + [beam_dim])
  return (
    take(sequences, at, old_beam, beam_dim),
    take(scores_to_gather, at, old_beam, beam_dim),
    take(flags, at, old_beam, beam_dim),
    one_hot(reshape(at, selector_shape), old_beam, dtype=tf.float32),
  )


@gin.configurable(module="mesh_tensorflow.beam_search")
@affects("report")
@takes(alpha=NOT_BELOW_ZERO, length_penalty=one_of(LENGTH_PENALTIES))
def beam_search(
  logits_fn: LogitsFn,
  initial_ids: Tensor,
  alpha: float,
  states: Sequence[Tensor] | None = None,
  eos_id: float = EOS_ID,
  stop_early: bool = True,
  decode_length: TensorOrScalar | None = None,
  use_tpu: bool = True,
  dtype: DTypeLike = tf.float32,
  layout: object = None,
  mesh_shape: object = None,
  num_prefilter: float | None = 2,
  *,
  length_penalty: str = "gnmt",
) -> tuple[Tensor, Tensor]:
  """The most probable sequences that a model makes, found by beam search.

  The search is exact about its candidates on every layout: a split vocabulary gives the
  same sequences as a whole one. All dimensions of the arguments may be split.

  Args:
    logits_fn: called once, with (step, ids, states): an int32 scalar, the sequences so far
      (of the shape of `initial_ids`; positions from `step` on are zero) and a list of states.
      Returns logits of the dimensions [batch, beam, vocab], and the new states in the order
      and of the shapes of the given ones.
    initial_ids: int32 zeros of shape [batch, beam, length] (or with several dimensions in
      place of batch). The sequences start from nothing: a prompt is the model's affair.
    alpha: exponent of the length penalty; 0 compares log probabilities, higher values favour
      long sequences. Must not be negative for `stop_early` to be exact.
    states: a list of `Tensor`s that have the dimensions batch and beam, such as caches of keys
      and values. After each step every sequence gets the states of the one that it extends. A state
      with a dimension called memory_beam (if beam is called so), of its size, in place of beam
      belongs to all sequences of a row, and stays as it is.
    eos_id: id of the token that ends a sequence.
    stop_early: stop as soon as no alive sequence can become better than the finished ones,
      rather than after `decode_length` steps.
    decode_length: number of steps, if less than the size of length: a number, or an int32
      scalar `Tensor`.
    use_tpu: kept for compatibility; has no effect.
    dtype: dtype of the scores.
    layout: kept for compatibility; has no effect: the layout is that of the `Lowering`.
    mesh_shape: kept for compatibility; has no effect.
    num_prefilter: kept for compatibility; has no effect. It made the search approximate.
    length_penalty: what log probabilities are divided by: "gnmt", ((5 + length) / 6) ** alpha (Wu
      et al., 2016; arXiv:1609.08144), or "power", length ** alpha, as in fairseq and Hugging Face:
      with an alpha of 1 the mean log probability of a token.

  Returns:
    int32 ids [batch, beam, length] and scores [batch, beam] of `dtype`, best first. Sequences
    end with `eos_id`, followed by zeros; places without a sequence have zeros and the score
    -INF. Where no sequence of a batch row was finished, it holds the alive ones, with their
    log probabilities, unpenalized, as scores.

  Raises:
    ShapeError: arguments, or what `logits_fn` returned, have not these dimensions.
    DTypeError: `initial_ids` are not integers, or `dtype` is not floating.
    GraphError: `logits_fn` returned more or fewer states than it was given.
  """
  del use_tpu, layout, mesh_shape, num_prefilter
  search = BeamSearch(
    logits_fn,
    initial_ids,
    float(alpha),
    states or [],
    int(eos_id),
    stop_early,
    decode_length,
    tf.as_dtype(dtype),
    length_penalty,
  )
  return search.run()


@gin.configurable(module="mesh_tensorflow.beam_search")
@affects("report")
@takes(temperature=NOT_BELOW_ZERO)
def greedy_decode(
  logits_fn: LogitsFn,
  initial_ids: Tensor,
  temperature: float = 0.0,
  initial_states: Sequence[Tensor] | None = None,
  eos_id: int = EOS_ID,
  forced_ids: Tensor | None = None,
  use_tpu: bool = True,
) -> Tensor:
  """Sequences made of the model's most probable next token, or of a sample of it.

  Decoding ends when every sequence has an `eos_id`. Until then those that have one go on:
  what comes after it has no meaning.

  Args:
    logits_fn: called once, with (step, ids, states): an int32 scalar, the sequences so far
      (of the shape of `initial_ids`; positions from `step` on are zero) and a list of states.
      Returns logits of shape [..., vocab], and the new states.
    initial_ids: int32 zeros of shape [..., length].
    temperature: 0.0 takes the most probable token; otherwise it is sampled with the
      probabilities softmax(logits / temperature). Samples do not depend on the layout.
    initial_states: a list of `Tensor`s of any shape.
    eos_id: id of the token that ends a sequence.
    forced_ids: None, or ids of the shape of `initial_ids`; where they are not zero, they are
      taken in place of the model's: a prompt, say.
    use_tpu: kept for compatibility; has no effect.

  Returns:
    int32 ids of the shape of `initial_ids`.

  Raises:
    ShapeError: `forced_ids`, or what `logits_fn` returned, have not these dimensions.
    DTypeError: `initial_ids` are not integers.
    GraphError: `logits_fn` returned more or fewer states than it was given.
  """
  del use_tpu
  if not initial_ids.dtype.is_integer:
    raise DTypeError(f"greedy_decode: initial_ids must be integers, got {initial_ids}")
  if not initial_ids.shape.ndims:
    raise ShapeError(f"greedy_decode: initial_ids must have a length dimension, got {initial_ids}")
  if forced_ids is not None and set(forced_ids.shape) != set(initial_ids.shape):
    raise ShapeError(
      f"greedy_decode: forced_ids {forced_ids} have not the shape of initial_ids {initial_ids}"
    )
  mesh = initial_ids.mesh
  *rows, length = initial_ids.shape.dims
  positions = mtf_range(mesh, length, tf.int32)

  def cond(step: Tensor, complete: Tensor, ids: Tensor, *states: Tensor) -> Tensor:
    return logical_and(less(step, length.size), logical_not(reduce_all(complete)))

  def body(step: Tensor, complete: Tensor, ids: Tensor, *states: Tensor) -> list[Tensor]:
    logits, new_states = call_logits_fn(logits_fn, step, ids, list(states))
    vocab = vocab_dim("greedy_decode", logits, rows)
    token = transpose(sample_with_temperature(logits, vocab, temperature), Shape(rows))
    if forced_ids is not None:
      forced = GatherOperation(forced_ids, step, length, Shape(rows), in_range=True).outputs[0]
      token = where(not_equal(forced, 0), cast(forced, tf.int32), token)
    ids = where(equal(positions, step), token, ids, output_shape=ids.shape)
    complete = logical_or(complete, equal(token, eos_id))
    return [step + 1, complete, ids, *new_states]

  start = [
    zeros(mesh, Shape([]), tf.int32),
    constant(mesh, False, Shape(rows), tf.bool),
    cast(initial_ids, tf.int32),
    *(initial_states or []),
  ]
  return while_loop(cond, body, start, maximum_iterations=length.size)[2]


checking.check_functions(globals())
tensorflow_mode.exempt(globals())

__all__ = ["EOS_ID", "INF", "beam_search", "compute_topk_scores_and_seq", "greedy_decode"]
