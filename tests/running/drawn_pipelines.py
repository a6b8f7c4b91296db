"""Pipelines drawn at random: layers on stages, stages on meshes, microbatches and a schedule.

A model is a chain of drawn layers between an embedding and a softmax over the same table. It is
written once; where it runs is what `mtf.stage` says.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.meshes import schedules
from tests.conformance.framework import SEED, Layout
from tests.operations.whole_programs import (
  ONE_DEVICE,
  SMALL_MESHES,
  DrawnMesh,
  draw_meshes,
  implementations,
)

EXAMPLES = 4  # Of each microbatch.
IO, HIDDEN, VOCAB = mtf.Dimension("io", 8), mtf.Dimension("hidden", 12), mtf.Dimension("vocab", 6)


@dataclasses.dataclass(frozen=True)
class Layer:
  """A layer of the chain.

  Attributes:
    kind: name of one of `LAYERS`.
    stage: number of its stage.
    recomputed: whether it is in `mtf.recompute_grad`.
    skips: whether the embedding is added to what it takes.
    output: name of an auxiliary output of it, one of `OUTPUTS`, or "".
    is_loss: whether that is part of the loss.
  """

  kind: str
  stage: int
  recomputed: bool
  skips: bool
  output: str
  is_loss: bool


def _variable(x: mtf.Tensor, name: str, *dims: mtf.Dimension) -> mtf.Tensor:
  initializer = tf.random_normal_initializer(stddev=0.5)
  return mtf.get_variable(x.mesh, name, list(dims), initializer=initializer)


def _dense(x: mtf.Tensor, name: str) -> mtf.Tensor:
  h = mtf.einsum([x, _variable(x, f"{name}/in", IO, HIDDEN)], reduced_dims=[IO])
  return x + mtf.einsum(
    [mtf.tanh(h), _variable(x, f"{name}/out", HIDDEN, IO)], reduced_dims=[HIDDEN]
  )


def _gated(x: mtf.Tensor, name: str) -> mtf.Tensor:
  return x * mtf.sigmoid(x * _variable(x, f"{name}/scale", IO) + _variable(x, f"{name}/bias", IO))


def _norm(x: mtf.Tensor, name: str) -> mtf.Tensor:
  return mtf.layers.standardize(x, IO, epsilon=0.1) * _variable(x, f"{name}/scale", IO)


def _loop(x: mtf.Tensor, name: str) -> mtf.Tensor:
  w = _variable(x, f"{name}/w", IO)
  start = mtf.constant(x.mesh, 0, dtype=tf.int32)
  body = lambda i, y: [i + 1, mtf.tanh(y * w) + y * 0.5]  # noqa: E731
  return mtf.while_loop(lambda i, y: mtf.less(i, 2), body, [start, x], maximum_iterations=2)[1]


LAYERS: dict[str, Callable[[mtf.Tensor, str], mtf.Tensor]] = {
  "dense": _dense,
  "gated": _gated,
  "norm": _norm,
  "loop": _loop,
  "dropout": lambda x, name: mtf.dropout(x, True, rate=0.25, name=name),
  "softmax": lambda x, name: mtf.softmax(x, IO) * 4.0 + x,
  "norm over examples": lambda x, name: x - mtf.reduce_mean(x, reduced_dim=x.shape.dims[0]) * 0.5,
  "shift": lambda x, name: x + mtf.shift(x, 1, IO, wrap=True) * 0.5,
}
OUTPUTS: dict[str, Callable[[mtf.Tensor], mtf.Tensor]] = {
  "whole": lambda x: x * 1.0,
  "of each example": lambda x: mtf.reduce_sum(x, reduced_dim=IO),
  "without the batch": lambda x: mtf.reduce_sum(x, reduced_dim=x.shape.dims[0]),
  "scalar": lambda x: mtf.reduce_mean(mtf.square(x)),
}


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """A model, where its stages are, and how its microbatches go through them.

  Attributes:
    layers: in order.
    stages: for each stage the name of its mesh.
    meshes: by name.
    microbatches: their number.
    schedule: see `meshes.schedules`.
    tied: whether the table of the first stage is that of the last, too.
    first_stage: whether the embedding is in the first stage, or on the mesh of the arguments.
    seed: whether a seed is given, or each run draws other random numbers.
    steps: number of training steps.
  """

  layers: tuple[Layer, ...]
  stages: tuple[str, ...]
  meshes: dict[str, DrawnMesh]
  microbatches: int
  schedule: str
  tied: bool
  first_stage: bool
  seed: bool
  steps: int

  def __repr__(self) -> str:
    meshes = [f"{name}: {m}" for name, m in self.meshes.items()]
    others = {k: v for k, v in vars(self).items() if k not in ("layers", "meshes")}
    return "\n".join(["", *meshes, str(others), *map(str, self.layers)])

  def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
    """How hypothesis shows a failing pipeline."""
    del cycle
    printer.text(repr(self))

  @property
  def batch(self) -> mtf.Dimension:
    return mtf.Dimension("batch", EXAMPLES * self.microbatches)

  def model(self, features: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
    """The outputs, among them the loss."""
    ids = features["ids"]
    outputs: dict[str, mtf.Tensor] = {}
    losses = []
    with mtf.stage(self.stages[0]) if self.first_stage else contextlib.nullcontext():
      mesh = ids.graph.mesh(self.stages[0]) if self.first_stage else ids.mesh
      table = mtf.get_variable(
        mesh, "table", [VOCAB, IO], initializer=tf.random_normal_initializer()
      )
      embedded = x = mtf.gather(table, ids, VOCAB)
    for i, layer in enumerate(self.layers):
      with mtf.stage(self.stages[layer.stage]):
        if layer.skips:
          x = x + embedded
        # On the mesh of the stage, where the variables of the layer are made.
        x, fn = x * 1.0, lambda x, i=i, layer=layer: LAYERS[layer.kind](x, f"layer{i}")
        x = mtf.recompute_grad(fn, [x]) if layer.recomputed else fn(x)
        if layer.output:
          y = outputs[f"{i} {layer.output}"] = OUTPUTS[layer.output](x)
          if layer.is_loss:
            losses.append(mtf.reduce_mean(mtf.square(y)) * 0.1)
    with mtf.stage(self.stages[-1]):
      x = x * 1.0
      last = table if self.tied else _variable(x, "last", VOCAB, IO)
      logits = mtf.einsum([x, last], output_shape=[x.shape.dims[0], VOCAB])
      outputs["logits"] = logits
      targets = mtf.one_hot(ids, VOCAB)
      loss = mtf.layers.softmax_cross_entropy_with_logits(logits, targets, VOCAB)
      outputs["loss"] = mtf.add_n([mtf.reduce_mean(loss), *losses]) * (1 / self.microbatches)
    return outputs

  def run(self, meshes: dict[str, DrawnMesh], devices: list[str]) -> dict[str, Any]:
    """Outputs, gradients, and the variables after the steps.

    Args:
      meshes: by the names of `meshes`.
      devices: the names of the devices.
    """
    impls = implementations(meshes, devices)
    names: list[str] = []

    @mtf.function(impls, [mtf.TensorSpec([self.batch], tf.int32)])
    def step(ids):
      gradients, outputs = mtf.serialize_training_step(
        {"ids": ids}, self.model, self.batch, self.microbatches, schedule=self.schedule
      )
      variables = list(ids.graph.trainable_variables)
      for v, g in zip(variables, gradients, strict=True):
        mtf.assign_sub(v, g * 0.1)
      names[:] = [v.name for v in variables]
      return outputs, gradients

    ids = np.random.default_rng(0).integers(0, VOCAB.size, [self.batch.size]).astype(np.int32)
    found: dict[str, Any] = {}
    for i in range(self.steps):
      outputs, gradients = step(ids, seed=SEED + i) if self.seed else step(ids)
      found.update({f"step {i}, output {k}": v.numpy() for k, v in outputs.items()})
      of_variables = zip(names, gradients, strict=True)
      found.update({f"step {i}, gradient of {n}": g.numpy() for n, g in of_variables})
    store = step.mesh_impl.variable_store
    found.update({f"variable {n}": store[n].numpy() for n in names})
    return found

  def check(self, devices: list[str]) -> int:
    """Compares with the same on one device; returns the number of values.

    Raises:
      AssertionError: they differ.
    """
    found = self.run(self.meshes, devices)
    expected = self.run(dict.fromkeys(self.meshes, ONE_DEVICE), devices)
    assert set(found) == set(expected)
    for name, value in expected.items():
      scale = np.abs(value).max(initial=1.0)
      np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4 * scale, err_msg=name)
    return len(found)


def _layout(draw: Callable[[Any], Any]) -> Layout:
  mesh = draw(st.sampled_from(SMALL_MESHES))
  axes = {d.name: d.size for d in mtf.convert_to_shape(mesh)}
  rules: list[str] = []
  # Each pair may be in one tensor, but for the hidden dimension and the vocabulary.
  taken: dict[str, set[str]] = {axis: set() for axis in axes}
  for d in draw(st.permutations([mtf.Dimension("batch", EXAMPLES), IO, HIDDEN, VOCAB])):
    options = [
      axis
      for axis, n in axes.items()
      if not d.size % n and (not taken[axis] or taken[axis] | {d.name} == {"hidden", "vocab"})
    ]
    if options and draw(st.integers(0, 3)):
      axis = draw(st.sampled_from(options))
      taken[axis].add(d.name)
      rules.append(f"{d.name}:{axis}")
  return Layout(mesh, ",".join(sorted(rules)))


@st.composite
def pipelines(draw) -> Pipeline:
  """A pipeline of 1 to 4 stages on 1 to 3 meshes."""
  names = [f"mesh{i}" for i in range(draw(st.sampled_from([2, 3, 1])))]
  count = draw(st.integers(len(names), 4))
  if draw(st.integers(0, 3)):
    stages = [names[i * len(names) // count] for i in range(count)]
  else:
    stages = [draw(st.sampled_from(names)) for _ in range(count)]
  numbers = sorted(draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6)))
  layers = []
  for number in numbers:
    kind = draw(st.sampled_from(sorted(LAYERS)))
    layers.append(
      Layer(
        kind=kind,
        stage=number,
        recomputed=not draw(st.integers(0, 3)),
        skips=not draw(st.integers(0, 3)),
        output=draw(st.sampled_from(["", "", *OUTPUTS])),
        is_loss=draw(st.booleans()),
      )
    )
  return Pipeline(
    layers=tuple(layers),
    stages=tuple(stages),
    meshes=draw_meshes(draw, names, lambda: _layout(draw)),
    microbatches=draw(st.integers(1, 6)),
    schedule=draw(st.sampled_from(schedules.SCHEDULES)),
    tied=draw(st.booleans()),
    first_stage=draw(st.booleans()),
    seed=draw(st.booleans()),
    steps=draw(st.sampled_from([1, 1, 2])),
  )
