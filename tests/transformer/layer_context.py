"""Contexts in which a layer is called alone: all positions at once, or one after another."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.model.decoding_states import in_reading_order
from tests.conformance.framework import Descriptor

FLOATS = mtf.VariableDType()
# While decoding: how many positions of the rows are given, in turn, and how many follow.
GIVEN = np.array([0, 2], np.int32)
STEPS = 2


class Model:
  """As much of a model as layers ask for."""

  def __init__(self, model_dim: mtf.Dimension, **kwargs: Any):
    self.model_dim = model_dim
    self.ensemble_dim = None
    self.ensemble_dims: list[mtf.Dimension] = []
    self.layout = self.mesh_shape = None
    self.fully_autoregressive = True
    self.input_vocab_size_unpadded = 11
    vars(self).update(kwargs)


@dataclasses.dataclass
class _Stage:
  """What decoding changes in the contexts that are made meanwhile."""

  batch: list[mtf.Dimension]
  length: mtf.Dimension
  arguments: dict[str, Any]
  ids: mtf.Tensor | None
  made: transformer.Context | None = None


# Each processor builds its graph in a thread of its own.
_LOCAL = threading.local()


def make_context(
  x: mtf.Tensor,
  causal: bool = True,
  mode: str = "train",
  layout: Any = None,
  mesh_shape: Any = None,
  **kwargs: Any,
) -> transformer.Context:
  """A context for x, `[batch, length, d_model]`; within `decoded`, the one of its stage."""
  model = Model(x.shape.dims[-1], layout=layout, mesh_shape=mesh_shape, fully_autoregressive=causal)
  stage = getattr(_LOCAL, "stage", None)
  if stage is not None:
    # Whoever decodes, passes no ids of the decoder's sequences.
    kwargs["sequence_id"] = 1 if kwargs.get("sequence_id") is not None else None
    kwargs |= stage.arguments
    stage.made = transformer.Context(model, x.mesh, stage.batch, stage.length, FLOATS, **kwargs)
    stage.made.decoded_ids = stage.ids
    return stage.made
  *batch_dims, length, _ = x.shape.dims
  position = mtf.range(x.mesh, length, tf.int32)
  if causal:
    kwargs = dict(read_priority=position, write_priority=position) | kwargs
  kwargs = dict(position=position, position_is_default=True, losses=[]) | kwargs
  return transformer.Context(model, x.mesh, batch_dims, length, FLOATS, mode=mode, **kwargs)


@contextlib.contextmanager
def _stage(stage: _Stage) -> Iterator[_Stage]:
  _LOCAL.stage = stage
  try:
    # Opened anew: names that are counted start from the first.
    with mtf.variable_scope("layer"):
      yield stage
  finally:
    _LOCAL.stage = None


def decoded(build: Callable[..., Any], states: list[str]) -> Callable[..., list[mtf.Tensor]]:
  """The `build` of a descriptor, whose context is by `make_context`, one position at a time.

  It is called for the given positions, then for STEPS positions, with the states of the call
  before. Inputs with a dimension `length` are its inputs at the positions.

  Args:
    build: x `[batch, length, d_model]` and other inputs -> `[batch, length, d_model]` (or a list
      of which that is the first).
    states: what the dims of the layer's states must be.
  """

  def steps(x: mtf.Tensor, *rest: mtf.Tensor) -> list[mtf.Tensor]:
    batch, length, _ = x.shape.dims
    positions = mtf.range(x.mesh, length, tf.int32)
    position = mtf.import_tf_tensor(x.mesh, np.resize(GIVEN, batch.size), mtf.Shape([batch]))
    together = mtf.Shape([batch, length])
    later = mtf.to_float(mtf.greater(positions, position, output_shape=together))
    common = dict(constant_states=[], losses=None)
    first = common | dict(
      mode="first_part",
      new_states=[],
      initial_position=position,
      position=positions,
      position_is_default=True,
      read_priority=positions,
      write_priority=positions,
    )
    with _stage(_Stage([batch], length, first, None)) as stage:
      # Positions that are not there yet are not used: they hold other numbers.
      build(x + later * 3.0, *rest)
    found = stage.made.new_states
    assert [s.shape for s in found] == [mtf.convert_to_shape(s) for s in states], found
    # As loops over steps do.
    found = [in_reading_order(s) for s in found]
    constants = common["constant_states"]
    constants[:] = [in_reading_order(s) for s in constants]
    ys = []
    for _ in range(STEPS):
      here = [t if length not in t.shape else mtf.gather(t, position, length) for t in (x, *rest)]
      # The input of a position is the token before it.
      ids = [mtf.shift(t, -1, length, wrap=False) for t in rest if t.shape == together]
      now = common | dict(
        mode="incremental",
        states=found,
        new_states=[],
        initial_position=position,
        position=position,
        read_priority=position,
        write_priority=positions,
      )
      with _stage(_Stage([batch], length, now, ids[0] if ids else None)) as stage:
        y = build(*here)
      ys.append(y[0] if isinstance(y, (list, tuple)) else y)
      before, found = found, stage.made.new_states
      assert [s.shape for s in found] == [s.shape for s in before], found
      position += 1
    return ys

  return steps


def steps(full: Descriptor, *states: str, name: str | None = None) -> Descriptor:
  """A descriptor of the layer of `full` while decoding: its values at the positions decoded.

  Args:
    full: of a layer that sees no later position, on inputs `[batch, length=4, d_model]`.
    *states: the dims of the states that the layer keeps.
    name: of the descriptor, if not `full.name` and "_steps".
  """

  def reference(*arrays: np.ndarray) -> list[np.ndarray]:
    y = full.reference(*arrays)
    y = y[0] if isinstance(y, (list, tuple)) else y
    rows = np.arange(len(y))
    return [y[rows, np.resize(GIVEN, len(y)) + i] for i in range(STEPS)]

  return dataclasses.replace(
    full,
    name=name or f"{full.name}_steps",
    build=decoded(full.build, list(states)),
    reference=reference,
    variables=tuple((f"layer/{n}", v) for n, v in full.variables or ()),
    untrained=tuple(f"layer/{n}" for n in full.untrained),
    differentiable=False,
    gradient=None,
    together=(*full.together, *states),
  )
