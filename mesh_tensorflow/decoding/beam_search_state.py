"""The loop of a beam search: what it carries from step to step, and what a step does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, DTypeError, GraphError, ShapeError
from mesh_tensorflow.operations.binary import floordiv, minimum
from mesh_tensorflow.operations.comparison import equal, greater, less, logical_and
from mesh_tensorflow.operations.constants import constant, zeros
from mesh_tensorflow.operations.cross_mesh import reshard
from mesh_tensorflow.operations.einsum import transpose
from mesh_tensorflow.operations.elementwise import cast, logical_not
from mesh_tensorflow.operations.indexing import GatherOperation
from mesh_tensorflow.operations.loops import while_loop
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reduction import broadcast, reduce_all, reduce_max, reduce_min
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.operations.slicing import concat
from mesh_tensorflow.operations.softmax import reduce_logsumexp
from mesh_tensorflow.operations.top_k import top_k
from mesh_tensorflow.operations.where import where
from mesh_tensorflow.program.dimensions import Dimension, DimensionLike, Shape, convert_to_dimension
from mesh_tensorflow.program.graph import Tensor

# Length penalties: by a summand and a divisor of the length, which is then raised to alpha.
LENGTH_PENALTIES = {"gnmt": (5.0, 6.0), "power": (0.0, 1.0)}
# A log probability of -INF marks an empty place of the beam.
INF = 1e7

LogitsFn = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, Sequence[Tensor] | None]]

# Inside the search the beam has names that no layout splits: its sequences are ordered.
_BEAM, _CANDIDATES, _SELECTED = "_beam", "_candidates", "_selected"


def take(weights: Tensor, indices: Tensor, dim: Dimension, new_dim: DimensionLike) -> Tensor:
  """The elements along `dim` at `indices`, whose last dimension becomes `new_dim` in its place."""
  selected = indices.shape[-1]
  shape = Shape([selected if d == dim else d for d in weights.shape])
  taken = GatherOperation(weights, indices, dim, shape, in_range=True).outputs[0]
  new_dim = convert_to_dimension(new_dim)
  return reshape(taken, Shape([new_dim if d == selected else d for d in shape]))


def memory_beam(beam: Dimension) -> Dimension:
  """The dimension that a state which belongs to all beams has in place of theirs."""
  return Dimension(f"memory_{beam.name}", beam.size)


class BeamSearch:
  """One beam search: its dimensions, and the condition and the body of its loop.

  The loop variables are: the step; whether no alive sequence can become better than the
  finished ones; the alive sequences and their log probabilities; the finished sequences and
  their penalized scores (-INF for empty places); the states.
  """

  def __init__(
    self,
    logits_fn: LogitsFn,
    initial_ids: Tensor,
    alpha: float,
    states: Sequence[Tensor],
    eos_id: int,
    stop_early: bool,
    decode_length: Tensor | int | None,
    dtype: tf.DType,
    length_penalty: str = "gnmt",
  ):
    if not initial_ids.dtype.is_integer:
      raise DTypeError(f"beam_search: initial_ids must be integers, got {initial_ids}")
    if initial_ids.shape.ndims < 2:
      raise ShapeError(
        f"beam_search: initial_ids must have the dimensions [batch, beam, length], got "
        f"{initial_ids}"
      )
    if not dtype.is_floating:
      raise DTypeError(f"beam_search: the dtype of the scores must be floating, got {dtype.name}")
    if length_penalty not in LENGTH_PENALTIES:
      raise ArgumentError(
        f"beam_search: length_penalty must be one of {', '.join(LENGTH_PENALTIES)}, got "
        f"{length_penalty!r}"
      )
    self.logits_fn, self.initial_ids, self.mesh = logits_fn, initial_ids, initial_ids.mesh
    self.alpha, self.eos_id, self.stop_early, self.dtype = alpha, eos_id, stop_early, dtype
    self.summand, self.divisor = LENGTH_PENALTIES[length_penalty]
    *self.batch, self.outer_beam, self.length = initial_ids.shape.dims
    self.beam = Dimension(_BEAM, self.outer_beam.size)
    self.states = list(states)
    shared = memory_beam(self.outer_beam)
    for x in self.states:
      beam = shared if shared in x.shape else self.outer_beam
      if any(d not in x.shape for d in [*self.batch, beam]):
        raise ShapeError(
          f"beam_search: the state {x} lacks dimensions of "
          f"{Shape([*self.batch, self.outer_beam])}; each sequence needs its own state, or all "
          f"beams of a row have one with the dimension {shared.name}={shared.size}"
        )
    self.limit = _limit(decode_length, self.length)
    self.positions = mtf_range(self.mesh, self.length, tf.int32)
    # Indices of the finished sequences in the concatenation of finished and alive ones.
    self.places = broadcast(mtf_range(self.mesh, self.beam, tf.int32), self._shape(self.beam))

  def _shape(self, *dims: Dimension) -> Shape:
    return Shape([*self.batch, *dims])

  def run(self) -> tuple[Tensor, Tensor]:
    """Adds the loop to the graph; returns ids and scores."""
    ids = cast(self.initial_ids, tf.int32)
    ids = reshape(ids, self._shape(self.beam, self.length))
    place = mtf_range(self.mesh, self.beam, tf.int32)
    # All sequences begin equal: only the first counts, or the beam would hold copies of one.
    first_only = cwise(lambda p: tf.where(p > 0, tf.cast(-INF, self.dtype), 0), [place], self.dtype)
    scores = constant(self.mesh, -INF, self._shape(self.beam), self.dtype)
    variables = [
      zeros(self.mesh, Shape([]), tf.int32),
      constant(self.mesh, False, Shape([]), tf.bool),
      ids,
      broadcast(first_only, scores.shape),
      ids,
      scores,
      *self.states,
    ]
    bound = self.limit if isinstance(self.limit, int) else self.length.size
    results = while_loop(self.cond, self.body, variables, maximum_iterations=bound)
    alive, log_probs, finished, scores = results[2:6]
    # Half of -INF lies between empty places and sequences, whose log probabilities are far smaller.
    any_finished = greater(reduce_max(scores, reduced_dim=self.beam), -INF / 2)
    ids = where(any_finished, finished, alive)
    scores = where(any_finished, scores, log_probs)
    return reshape(ids, self.initial_ids.shape), reshape(scores, self._shape(self.outer_beam))

  def cond(self, step: Tensor, done: Tensor, *unused: Tensor) -> Tensor:
    more = less(step, self.limit)
    return logical_and(more, logical_not(done)) if self.stop_early else more

  def body(
    self,
    step: Tensor,
    done: Tensor,
    alive: Tensor,
    log_probs: Tensor,
    finished: Tensor,
    scores: Tensor,
    *states: Tensor,
  ) -> list[Tensor]:
    """One step: the best extensions of the alive sequences, and the best finished ones."""
    outer_ids = reshape(alive, self.initial_ids.shape)
    logits, new_states = call_logits_fn(self.logits_fn, step, outer_ids, list(states))
    source, token, candidates = self._extend(logits, log_probs)
    complete = equal(token, self.eos_id)

    # At most half of the candidates are complete, so these do not take a place here.
    selected = Dimension(_SELECTED, self.beam.size)
    log_probs, at = top_k(
      where(complete, float("-inf"), candidates), candidates.shape[-1], selected
    )
    log_probs = reshape(log_probs, scores.shape)
    parent = take(source, at, candidates.shape[-1], selected)
    next_token = take(token, at, candidates.shape[-1], self.beam)
    new_alive = self._write(step, next_token, take(alive, parent, self.beam, self.beam))

    # An extension of an empty place is no sequence.
    complete = logical_and(complete, greater(candidates, -INF / 2))
    candidates = candidates * self._inverse_penalty(step)
    candidates = where(complete, candidates, float("-inf"))
    both = concat([scores, self._as_beam(candidates)], _BEAM)
    scores, at = top_k(both, both.shape[-1], selected)
    scores = reshape(scores, log_probs.shape)
    where_from = concat([self.places, self._as_beam(source + self.beam.size)], _BEAM)
    where_from = take(where_from, at, both.shape[-1], selected)
    # The alive ones as they were before this step: what is new is one of them, and eos.
    sequences = concat([finished, alive], _BEAM)
    finished = take(sequences, where_from, sequences.shape[-2], self.beam)
    # Those of before have zeros from their ends on: the 0 that is written to them changes nothing.
    is_new = cwise(lambda i: tf.where(i < self.beam.size, 0, self.eos_id), [at])
    finished = self._write(step, reshape(is_new, scores.shape), finished)

    # The states of the stages of a pipeline are on the meshes of these.
    new_states = [
      take(x, reshard(parent, x.mesh), self.outer_beam, self.outer_beam)
      if self.outer_beam in x.shape
      else x
      for x in new_states
    ]
    if self.stop_early:
      done = self._is_done(log_probs, scores)
    return [step + 1, done, new_alive, log_probs, finished, scores, *new_states]

  def _extend(self, logits: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the best extensions, in descending order: (parent beams, tokens, log probabilities).

    There are twice as many as beams, since half of them may be complete. Of the logits, only the
    largest are exchanged over the mesh.
    """
    vocab = vocab_dim("beam_search", logits, [*self.batch, self.outer_beam])
    if logits.dtype.size < 4:
      logits = cast(logits, tf.float32)
    # All candidates may come from one sequence, but no more than these.
    per_beam = Dimension("_per_beam", min(2 * self.beam.size, vocab.size))
    values, tokens = top_k(logits, vocab, per_beam)
    # The normalizers, subtracted from the largest logits only: no log_softmax of all is made.
    total = reshape(
      transpose(reduce_logsumexp(logits, vocab), self._shape(self.outer_beam)), log_probs.shape
    )
    merged = Dimension("_extensions", self.beam.size * per_beam.size)
    by_beam = self._shape(self.outer_beam, per_beam)
    values = reshape(transpose(values, by_beam), self._shape(self.beam, per_beam))
    values = cast(values - total, self.dtype) + log_probs
    tokens = reshape(transpose(tokens, by_beam), self._shape(merged))
    candidates = Dimension(_CANDIDATES, min(2 * self.beam.size, merged.size))
    values, at = top_k(reshape(values, self._shape(merged)), merged, candidates)
    token = GatherOperation(tokens, at, merged, in_range=True).outputs[0]
    return floordiv(at, per_beam.size), token, values

  def _as_beam(self, x: Tensor) -> Tensor:
    return reshape(x, self._shape(Dimension(_BEAM, x.shape[-1].size)))

  def _write(self, step: Tensor, token: Tensor, sequences: Tensor) -> Tensor:
    return where(equal(self.positions, step), token, sequences, output_shape=sequences.shape)

  def _inverse_penalty(self, step: Tensor) -> Tensor:
    """Factor of a sequence whose last token, of this step, ends it: its length is step + 1."""
    return cwise(
      lambda i: tf.cast(
        ((tf.cast(i, tf.float32) + (1.0 + self.summand)) / self.divisor) ** -self.alpha, self.dtype
      ),
      [step],
      self.dtype,
      name="length_penalty",
    )

  def _is_done(self, log_probs: Tensor, scores: Tensor) -> Tensor:
    """True for each row whose finished beams all score above what unfinished ones can reach."""
    # A bound of every future score: log probabilities are negative and only fall, and the penalty
    # of the greatest length, by which they are divided, raises them most.
    best = reduce_max(log_probs, reduced_dim=self.beam)
    if isinstance(self.limit, int):
      # With no step at all there is no length, and nothing to bound.
      best *= ((self.summand + max(self.limit, 1)) / self.divisor) ** -self.alpha
    else:
      # The last step, limit - 1, makes the length limit.
      best *= self._inverse_penalty(self.limit - 1)
    return reduce_all(greater(reduce_min(scores, reduced_dim=self.beam), best))


def _limit(decode_length: Tensor | int | None, length: Dimension) -> Tensor | int:
  """The number of steps."""
  if decode_length is None:
    return length.size
  if isinstance(decode_length, Tensor):
    if decode_length.shape.ndims or not decode_length.dtype.is_integer:
      raise ShapeError(f"beam_search: decode_length must be an integer scalar, got {decode_length}")
    return minimum(cast(decode_length, tf.int32), length.size)
  return min(int(decode_length), length.size)


def call_logits_fn(
  logits_fn: LogitsFn, step: Tensor, ids: Tensor, states: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
  """Calls `logits_fn`, and checks its number of states; returns logits and new states.

  Raises:
    GraphError: there are more or fewer states.
  """
  logits, new_states = logits_fn(step, ids, states)
  new_states = [] if new_states is None else list(new_states)
  if len(new_states) != len(states):
    raise GraphError(f"logits_fn returned {len(new_states)} states, it was given {len(states)}")
  return logits, new_states


def vocab_dim(name: str, logits: Tensor, others: Sequence[Dimension]) -> Dimension:
  """Finds the vocabulary dimension: the one of the logits that is not among `others`.

  Raises:
    ShapeError: there is none, or more than one, or one of the sequences is missing.
  """
  own = [d for d in logits.shape if d not in others]
  if len(own) != 1 or logits.shape.ndims != len(others) + 1:
    raise ShapeError(
      f"{name}: logits_fn must return logits of the dimensions {Shape(list(others))} and a "
      f"vocabulary, got {logits}"
    )
  return own[0]
