"""Incremental decoding of a language model: prefill, then decode calls that carry the KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.decoding.token_choice import TokenChoice, choose_token
from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.transformer.data.vocabularies.base import EOS_ID, PAD_ID
from mesh_tensorflow.transformer.model.decoding import IncrementalModel
from mesh_tensorflow.transformer.model.forward import Forward

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
  """Options for which the prefill and decode programs are traced.

  Attributes:
    choice: how the next token is chosen from the logits (temperature, top-k, top-p, ...).
    eos_id: the end-of-sequence id, which ends a row; None: only limits end rows.
    never_end: True if `eos_id` is masked out, so that it is never chosen.
    bos_id: the beginning-of-sequence id, the input at position 0.
  """

  choice: TokenChoice = TokenChoice()
  eos_id: int | None = EOS_ID
  never_end: bool = False
  bos_id: int = 0


@dataclasses.dataclass
class Batch:
  """State of the decoded rows, the programs' arguments. Each array has one element per slot.

  Attributes:
    ids: [rows, length]: the model's context: the last tokens of each row, padded with zeros.
    positions: number of tokens in the context.
    counts: number of tokens generated so far.
    limits: maximum number of generated tokens.
    active: 1 for rows still decoding, 0 for those that have ended or reached `length`.
    keys: see `token_choice.row_keys`.
  """

  ids: Ints
  positions: Ints
  counts: Ints
  limits: Ints
  active: Ints
  keys: Ints

  @classmethod
  def empty(cls, rows: int, length: int) -> Batch:
    """A batch without active rows."""
    return cls(np.zeros([rows, length], np.int32), *(np.zeros([rows], np.int32) for _ in range(5)))


def rounded_length(length: int, most: int) -> int:
  """Rounds a row length up to one of a few buckets, so that few programs are traced.

  Args:
    length: number of tokens of a row.
    most: the largest length to return.

  Returns:
    The smallest of 8, 12, 16, 24, 32, ... that is at least `length`, capped at `most`.
  """
  size = 8
  while size < length:
    size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
  return min(size, most)


class DecodePrograms:
  """Prefill and decode programs of a language model, traced once per bucket of prompt lengths.

  `prefill` runs the prompts of new rows in one pass and returns the KV cache of
  all layers. `decode` is the decode loop: it generates up to a given number of tokens per call. The
  cache is passed from call to call as `tf.Tensor`s, not as variables, which would end up in
  checkpoints. On one device this copies nothing; on a mesh each call gathers and splits the cache
  again, so calls should be long there.

  A token is a function of the row's tokens, its key and its count; the other rows of the batch and
  the number of calls do not change it.

  Args:
    steps: a language model on its mesh.
    rows: number of slots, that is rows decoded at the same time.
    length: context length in tokens.
    options: see `DecodeOptions`.

  Raises:
    UnsupportedError: the model is not an autoregressive language model.
  """

  def __init__(self, steps: Forward, rows: int, length: int, options: DecodeOptions):
    model = steps.model
    if not getattr(model, "fully_autoregressive", False) or model.output_vocab_dim is None:
      raise UnsupportedError(
        f"a model of type {steps.model_type!r} does not continue rows token by token; "
        "language models (run.model_type = 'lm') do"
      )
    self.rows, self.length, self.options = rows, length, options
    self._steps, self._model = steps, model
    self._batch, self._length = mtf.Dimension(_BATCH, rows), mtf.Dimension("length", length)
    self._vocab: mtf.Dimension = model.output_vocab_dim
    ids = mtf.TensorSpec([self._batch, self._length], tf.int32, "ids")
    per_row = [mtf.TensorSpec([self._batch], tf.int32, n) for n in _PER_ROW]
    self._specs = [ids, *per_row]
    self._prefills: dict[tuple[int, int], PrefillProgram] = {}
    self._decode: mtf.Function | None = None

  @property
  def needs_seen(self) -> bool:
    """True if `decode` needs `seen`, that is if there is a repetition penalty."""
    return self.options.choice.repetition_penalty != 1.0

  @property
  def vocab_size(self) -> int:
    """The size of the logits, which may be padded beyond the vocabulary."""
    return self._vocab.size

  def prefill(
    self,
    batch: Batch,
    slots: Sequence[int] = (),
    cache: Sequence[tf.Tensor] = (),
    expected: int = 1,
  ) -> list[tf.Tensor]:
    """Runs the prompts of some slots in one pass and returns the KV cache for `decode`.

    The prefill program takes half of the slots at a time. Its length is the longest of these
    prompts, or `expected`, rounded up to a power of two, so that there are few such programs.

    Args:
      batch: the rows.
      slots: the slots to fill; by default all.
      cache: the KV cache of the other slots; empty if there are none.
      expected: number of tokens of the longest prompt that later calls will prefill.

    Returns:
      The KV cache of all slots.
    """
    chosen = list(slots or range(self.rows))
    longest = max(int(batch.positions[chosen].max()), expected, 16)
    length = min(1 << (longest - 1).bit_length(), self.length)
    whole = self._prefill_program(self.rows, self.length)
    program = self._prefill_program(self._half_of_rows(), length)
    if not program.fits(whole):
      program = self._prefill_program(program.rows, self.length)
    if not program.fits(whole):  # Some entry has no batch dimension, so slots cannot be replaced.
      program, chosen = whole, list(range(self.rows))
    filled = list(cache)
    for first in range(0, len(chosen), program.rows):
      part = chosen[first : first + program.rows]
      ids = np.zeros([program.rows, program.length], np.int32)
      positions = np.zeros([program.rows], np.int32)
      ids[: len(part)] = batch.ids[part, : program.length]
      positions[: len(part)] = batch.positions[part]
      filled = program.joined(program.function(ids, positions), part, whole, filled)
    return filled

  def decode(
    self,
    batch: Batch,
    cache: Sequence[tf.Tensor],
    most: int,
    least_active: int = 0,
    seen: np.ndarray | None = None,
  ) -> list[tf.Tensor]:
    """Generates tokens for the active rows and writes them into `batch`.

    Args:
      batch: the rows; `ids`, `positions`, `counts` and `active` are updated in place.
      cache: the KV cache that `prefill` or the last call returned.
      most: maximum number of tokens per row in this call.
      least_active: the call ends early when at most this many rows are still active.
      seen: only if `needs_seen`: bool [rows, vocab_size], True at the tokens that a row contains.

    Returns:
      The updated KV cache.
    """
    if self._decode is None:
      scalars = [mtf.TensorSpec([], tf.int32, n) for n in ("most", "least_active")]
      mask = [mtf.TensorSpec([self._batch, self._vocab], tf.bool, "seen")] * self.needs_seen
      cache_specs = self._prefill_program(self.rows, self.length).cache
      specs = [*self._specs, *scalars, *mask, *cache_specs]
      self._decode = self._steps.decoding_function(specs)(self._decode_loop)
    arrays = [getattr(batch, n) for n in ("ids", *_PER_ROW)]
    # Not Python numbers: TensorFlow caches a tensor for each of those, forever.
    numbers = [np.array(n, np.int32) for n in (most, least_active)]
    given = [seen] if self.needs_seen else []
    results = self._decode(*arrays, *numbers, *given, *cache)
    for name, value in zip(_CHANGED, results):
      setattr(batch, name, value.numpy().copy())
    return list(results[len(_CHANGED) :])

  def _decoder(
    self, ids: mtf.Tensor, positions: mtf.Tensor, states: Sequence[mtf.Tensor] | None
  ) -> IncrementalModel:
    return IncrementalModel(
      self._model,
      ids,
      positions,
      mtf.range(ids.mesh, ids.shape.dims[-1], dtype=tf.int32),
      self._steps.variable_dtype,
      bos_id=self.options.bos_id,
      states=states,
    )

  def _half_of_rows(self) -> int:
    """Rows of a prefill: half of the slots if the mesh can split that number, else all."""
    axis = self._steps.mesh_impl.tensor_dimension_to_mesh_axis(self._batch)
    parts = 1 if axis is None else self._steps.mesh_impl.shape[axis].size
    return self.rows // 2 if self.rows % (2 * parts) == 0 else self.rows

  def _prefill_program(self, rows: int, length: int) -> PrefillProgram:
    """The prefill program for this number of rows and this length; traced at first use."""
    if (rows, length) not in self._prefills:

      def prefill(ids: mtf.Tensor, positions: mtf.Tensor) -> list[mtf.Tensor]:
        return self._decoder(ids, positions, None).loop_states()

      batch = mtf.Dimension(_BATCH, rows)
      specs = [
        mtf.TensorSpec([batch, mtf.Dimension("length", length)], tf.int32, "ids"),
        mtf.TensorSpec([batch], tf.int32, "positions"),
      ]
      function = self._steps.decoding_function(specs)(prefill)
      returned = function.build_graph()[2]
      cache = [mtf.TensorSpec(s.shape, s.dtype, mesh=s.mesh.name) for s in returned]
      self._prefills[rows, length] = PrefillProgram(rows, length, function, cache)
    return self._prefills[rows, length]

  def _decode_loop(
    self,
    ids: mtf.Tensor,
    positions: mtf.Tensor,
    counts: mtf.Tensor,
    limits: mtf.Tensor,
    active: mtf.Tensor,
    keys: mtf.Tensor,
    most: mtf.Tensor,
    least_active: mtf.Tensor,
    *others: mtf.Tensor,
  ) -> list[mtf.Tensor]:
    masks, cache = others[: self.needs_seen], others[self.needs_seen :]
    decoder = self._decoder(ids, positions, cache)
    # Loop-invariant: inside the loop these would be computed in each step.
    penalties = self._penalties(ids.mesh)
    columns = mtf.range(ids.mesh, self._length, dtype=tf.int32)

    def cond(
      step: mtf.Tensor,
      ids: mtf.Tensor,
      positions: mtf.Tensor,
      counts: mtf.Tensor,
      active: mtf.Tensor,
      *_: mtf.Tensor,
    ) -> Any:
      return mtf.logical_and(
        mtf.less(step, most), mtf.greater(mtf.reduce_sum(active), least_active)
      )

    def body(
      step: mtf.Tensor,
      ids: mtf.Tensor,
      positions: mtf.Tensor,
      counts: mtf.Tensor,
      active: mtf.Tensor,
      *others: mtf.Tensor,
    ) -> list[mtf.Tensor]:
      masks, states = list(others[: self.needs_seen]), list(others[self.needs_seen :])
      logits, states = decoder.step(positions, ids, states)
      logits = mtf.to_float(logits) + penalties
      seen = masks[0] if masks else None
      token = choose_token(logits, self._vocab, self.options.choice, keys, counts, seen)
      if seen is not None:
        new = mtf.one_hot(token, self._vocab, dtype=tf.int32)
        masks = [mtf.logical_or(seen, mtf.cast(new, tf.bool))]
      # Inactive rows compute a token, too; it is masked, so that a 0 is written over a 0.
      ids = mtf.where(mtf.equal(columns, positions), token * active, ids, output_shape=ids.shape)
      positions += active
      counts += active
      continues = mtf.logical_and(mtf.less(positions, self.length), mtf.less(counts, limits))
      if self.options.eos_id is not None:
        continues = mtf.logical_and(continues, mtf.not_equal(token, self.options.eos_id))
      active *= mtf.to_int32(continues)
      return [step + 1, ids, positions, counts, active, *masks, *states]

    step = mtf.zeros(ids.mesh, mtf.Shape([]), tf.int32)
    _, *results = mtf.while_loop(
      cond, body, [step, ids, positions, counts, active, *masks, *decoder.loop_states()]
    )
    return [*results[: len(_CHANGED)], *results[len(_CHANGED) + self.needs_seen :]]

  def _penalties(self, mesh: mtf.Mesh) -> mtf.Tensor:
    """Logit mask [vocab]: -inf for padding ids (and EOS, if it is never chosen), else 0."""
    size = self._model.output_vocab_size_unpadded
    banned = [PAD_ID]
    if self.options.never_end and self.options.eos_id is not None:
      banned.append(self.options.eos_id)

    def penalize(token: tf.Tensor) -> tf.Tensor:
      kept = token < size
      for i in banned:
        kept &= tf.not_equal(token, i)
      return tf.where(kept, 0.0, float("-inf"))

    tokens = mtf.range(mesh, self._vocab, dtype=tf.int32)
    return mtf.cwise(penalize, [tokens], tf.float32, grad_function=0, name="penalties")


@dataclasses.dataclass(frozen=True)
class PrefillProgram:
  """A prefill program.

  Attributes:
    rows: its batch size.
    length: its sequence length.
    function: maps ids [rows, length] and positions [rows] to the KV cache.
    cache: the specs of the KV cache.
  """

  rows: int
  length: int
  function: mtf.Function
  cache: Sequence[mtf.TensorSpec]

  def fits(self, whole: PrefillProgram) -> bool:
    """True if this program's KV cache can be written into slots of that of `whole`."""
    pairs = [pair for a, b in zip(self.cache, whole.cache) for pair in zip(a.shape, b.shape)]
    return all(a == b or a.name in (_BATCH, _MEMORY) for a, b in pairs) and all(
      any(d.name == _BATCH for d in spec.shape) for spec in self.cache
    )

  def joined(
    self,
    new: Sequence[tf.Tensor],
    slots: Sequence[int],
    whole: PrefillProgram,
    cache: Sequence[tf.Tensor],
  ) -> list[tf.Tensor]:
    """Writes a prefilled KV cache into some slots and returns the cache of all slots."""
    if self is whole and (not cache or len(slots) == whole.rows):
      return list(new)
    # Slot i of the result is row index[i] of the concatenation of old and new rows.
    index = np.arange(whole.rows) if cache else np.zeros(whole.rows, np.int64)
    index[list(slots)] = np.arange(len(slots)) + (whole.rows if cache else 0)
    result = []
    for i, (spec, x) in enumerate(zip(whole.cache, new)):
      dims = spec.shape.dims
      axis = [d.name for d in dims].index(_BATCH)
      # Cache entries behind a row's position are masked until they are written.
      missing = [d.size - n if d.name == _MEMORY else 0 for d, n in zip(dims, x.shape)]
      if any(missing):
        x = tf.pad(x, [[0, n] for n in missing])
      if cache:
        x = tf.concat([cache[i], x], axis)
      result.append(tf.gather(x, tf.constant(index), axis=axis))
    return result


# Dimensions of the KV cache: the slots, and the positions of keys and values.
_BATCH, _MEMORY = "batch", "memory_length"
# Of a `Batch`: the arguments for each row, and what a call changes, in their orders.
_PER_ROW = ("positions", "counts", "limits", "active", "keys")
_CHANGED = ("ids", "positions", "counts", "active")
