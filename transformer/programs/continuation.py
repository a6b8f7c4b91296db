"""Rows of text, continued in calls of a few tokens: what one call keeps for the next."""

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
from mesh_tensorflow.transformer.models.decoding import IncrementalModel
from mesh_tensorflow.transformer.programs.forward import Forward
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID, PAD_ID

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class ContinuationOptions:
  """What the programs of a continuation are traced for.

  Attributes:
    choice: how tokens are chosen.
    eos_id: the id that ends a row; None: none does.
    never_end: whether that id is never chosen.
    bos_id: the input at position 0.
  """

  choice: TokenChoice = TokenChoice()
  eos_id: int | None = EOS_ID
  never_end: bool = False
  bos_id: int = 0


@dataclasses.dataclass
class Batch:
  """Rows on their way: the arguments of the programs. The arrays have an element for each row.

  Attributes:
    ids: [rows, length]: what the model sees: the last tokens of each row, then zeros.
    positions: how many of them there are.
    counts: how many tokens were made for the row.
    limits: how many there will be at most.
    active: 1 for rows that go on, 0 for those that have ended or reached `length`.
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
    """One without active rows."""
    return cls(np.zeros([rows, length], np.int32), *(np.zeros([rows], np.int32) for _ in range(5)))


class Continuation:
  """The two programs that continue rows, traced once each for all prompts.

  `start` looks at the given tokens in one pass and keeps keys and values of all layers; `go_on`
  makes tokens, a call at a time. What is kept goes out of one call and into the next as
  `tf.Tensor`s, and not into variables, which checkpoints would have. On one device nothing is
  copied; on a mesh each call puts it together and cuts it again, so there calls should be long.

  A token is a function of the row's tokens, its key and its count: neither the rows beside it nor
  the number of calls change it.

  Args:
    steps: a language model on its mesh.
    rows: rows at a time.
    length: positions that the model sees.
    options: see `ContinuationOptions`.

  Raises:
    UnsupportedError: the model is no language model that sees only what is before.
  """

  def __init__(self, steps: Forward, rows: int, length: int, options: ContinuationOptions):
    model = steps.model
    if not getattr(model, "fully_autoregressive", False) or model.output_vocab_dim is None:
      raise UnsupportedError(
        f"a model of type {steps.model_type!r} does not continue rows token by token; "
        "language models (run.model_type = 'lm') do"
      )
    self.rows, self.length, self.options = rows, length, options
    self._steps, self._model = steps, model
    self._batch, self._length = mtf.Dimension("batch", rows), mtf.Dimension("length", length)
    self._vocab: mtf.Dimension = model.output_vocab_dim
    ids = mtf.TensorSpec([self._batch, self._length], tf.int32, "ids")
    per_row = [mtf.TensorSpec([self._batch], tf.int32, n) for n in _PER_ROW]
    self._specs = [ids, *per_row]
    self._state_specs: list[mtf.TensorSpec] = []
    self._start = mtf.function(steps.mesh_impl, self._specs[:2])(self._start_program)
    self._go_on: mtf.Function | None = None

  @property
  def needs_seen(self) -> bool:
    """Whether `go_on` must be told which tokens a row has."""
    return self.options.choice.repetition_penalty != 1.0

  @property
  def vocab_size(self) -> int:
    """The size of the logits, which may have places for ids that are no tokens."""
    return self._vocab.size

  def start(self, batch: Batch) -> list[tf.Tensor]:
    """What is kept of the given tokens, for `go_on`."""
    return list(self._start(batch.ids, batch.positions))

  def go_on(
    self,
    batch: Batch,
    states: Sequence[tf.Tensor],
    most: int,
    least_active: int = 0,
    seen: Any = None,
  ) -> list[tf.Tensor]:
    """Makes tokens for the active rows, and writes them into `batch`.

    Args:
      batch: the rows; `ids`, `positions`, `counts` and `active` change.
      states: what `start` or the last call returned.
      most: tokens of a row at most.
      least_active: the call ends as soon as no more than so many rows are active.
      seen: if `needs_seen`: bool [rows, vocab_size], which tokens a row has.

    Returns:
      The states after it.
    """
    if self._go_on is None:
      # Only the trace of the first program says what is kept.
      scalars = [mtf.TensorSpec([], tf.int32, n) for n in ("most", "least_active")]
      mask = [mtf.TensorSpec([self._batch, self._vocab], tf.bool, "seen")] * self.needs_seen
      specs = [*self._specs, *scalars, *mask, *self._state_specs]
      self._go_on = mtf.function(self._steps.mesh_impl, specs)(self._go_on_program)
    arrays = [getattr(batch, n) for n in ("ids", *_PER_ROW)]
    # Not Python numbers: TensorFlow keeps the tensors of these, for ever.
    numbers = [np.array(n, np.int32) for n in (most, least_active)]
    mask = [seen] if self.needs_seen else []
    results = self._go_on(*arrays, *numbers, *mask, *states)
    for name, value in zip(_CHANGED, results):
      setattr(batch, name, value.numpy())
    return list(results[len(_CHANGED) :])

  def _decoder(
    self, ids: mtf.Tensor, positions: mtf.Tensor, states: Sequence[mtf.Tensor] | None
  ) -> IncrementalModel:
    return IncrementalModel(
      self._model,
      ids,
      positions,
      mtf.range(ids.mesh, self._length, dtype=tf.int32),
      self._steps.variable_dtype,
      bos_id=self.options.bos_id,
      states=states,
    )

  def _start_program(self, ids: mtf.Tensor, positions: mtf.Tensor) -> list[mtf.Tensor]:
    states = self._decoder(ids, positions, None).loop_states()
    self._state_specs = [mtf.TensorSpec(s.shape, s.dtype) for s in states]
    return states

  def _go_on_program(
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
    masks, kept = others[: self.needs_seen], others[self.needs_seen :]
    decoder = self._decoder(ids, positions, kept)

    def cond(step: mtf.Tensor, ids: Any, positions: Any, counts: Any, active: Any, *_: Any) -> Any:
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
      masks, states = list(others[: self.needs_seen]), others[self.needs_seen :]
      logits, states = decoder.step(positions, ids, states)
      logits = mtf.where(self._allowed(logits), mtf.to_float(logits), float("-inf"))
      seen = masks[0] if masks else None
      token = choose_token(logits, self._vocab, self.options.choice, keys, counts, seen)
      if seen is not None:
        new = mtf.one_hot(token, self._vocab, dtype=tf.int32)
        masks = [mtf.logical_or(seen, mtf.cast(new, tf.bool))]
      # Rows that have ended make tokens, too, which go nowhere.
      ids += token * active * mtf.one_hot(positions, self._length, dtype=tf.int32)
      positions += active
      counts += active
      goes_on = mtf.logical_and(mtf.less(positions, self.length), mtf.less(counts, limits))
      if self.options.eos_id is not None:
        goes_on = mtf.logical_and(goes_on, mtf.not_equal(token, self.options.eos_id))
      active *= mtf.to_int32(goes_on)
      return [step + 1, ids, positions, counts, active, *masks, *states]

    step = mtf.zeros(ids.mesh, mtf.Shape([]), tf.int32)
    _, *results = mtf.while_loop(
      cond, body, [step, ids, positions, counts, active, *masks, *decoder.loop_states()]
    )
    changed, kept = results[: len(_CHANGED)], results[len(_CHANGED) + self.needs_seen :]
    return [*changed, *kept]

  def _allowed(self, logits: mtf.Tensor) -> mtf.Tensor:
    """Which tokens may be chosen: bool [vocab]. No padding, and no place beyond the vocabulary."""
    size = self._model.output_vocab_size_unpadded
    banned = {PAD_ID}
    if self.options.never_end and self.options.eos_id is not None:
      banned.add(self.options.eos_id)

    def allow(token: tf.Tensor) -> tf.Tensor:
      kept = token < size
      for i in banned:
        kept &= tf.not_equal(token, i)
      return kept

    tokens = mtf.range(logits.mesh, self._vocab, dtype=tf.int32)
    return mtf.cwise(allow, [tokens], tf.bool, grad_function=0, name="allowed")


# Of a `Batch`: the arguments for each row, and what a call changes, in their orders.
_PER_ROW = ("positions", "counts", "limits", "active", "keys")
_CHANGED = ("ids", "positions", "counts", "active")
