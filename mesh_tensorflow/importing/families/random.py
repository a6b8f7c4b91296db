"""Random numbers: of the distribution and shape of the original, the same ones on every layout.

A stateless operation is a function of its seed, so Keras' SeedGenerators work as they do in Keras:
their state is a variable that a step reads and changes. A stateful one draws anew in each run, by
the seed of the run and its name, as `mtf.random_uniform` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.importing.families.static_inputs import static_input
from mesh_tensorflow.importing.keyed_random import KeyedRandomOperation
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import (
  Construction,
  Labels,
  Rule,
  Slicewise,
  rule,
)
from mesh_tensorflow.importing.value import Value, flat
from mesh_tensorflow.operations.random import RandomOperation
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor


def _whole(node: Node, index: int, make: Construction) -> Tensor:
  """An input that no layout splits."""
  wire = node.inputs[index]
  axes = tuple(
    () if n == 1 else (Dimension(f"_seed{index}_{i}", n),) for i, n in enumerate(wire.shape)
  )
  return make.value(wire, axes).ordered()


@rule("StatelessRandomGetKeyCounter", "StatelessRandomGetKey")
class KeyOfSeed(Slicewise):
  """The key of a seed: TensorFlow's own, the same on each processor."""

  def labels(self, node: Node) -> Labels:
    outputs = [[f"y{k}_{i}" for i in range(w.rank)] for k, w in enumerate(node.outputs)]
    return Labels([("seed",)], outputs, ["seed", *(label for names in outputs for label in names)])


@rule("StatelessRandomGetAlg")
class Algorithm(Slicewise):
  """Which generator TensorFlow would use; none of the numbers depends on it here."""

  def labels(self, node: Node) -> Labels:
    return Labels([], [()])


_STATELESS = {
  "StatelessRandomUniform": "uniform",
  "StatelessRandomNormal": "normal",
  "StatelessTruncatedNormal": "truncated_normal",
  "StatelessRandomUniformInt": "uniform",
  "StatelessRandomUniformFullInt": "bits",
}


@rule(*_STATELESS, *(f"{name}V2" for name in _STATELESS))
class Stateless(Rule):
  """Numbers that are a function of a seed, or of a key and a counter."""

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    (out,) = node.outputs
    axes = make.axes_of(out)
    with_counter = node.type.endswith("V2")
    seeds = [_whole(node, i, make) for i in ((1, 2) if with_counter else (1,))]
    distribution = _STATELESS[node.type.removesuffix("V2")]
    bounds: list[Any] = []
    if "UniformInt" in node.type:
      bounds = _bounds(node, 4 if with_counter else 2, make)
    shape = Shape(flat(axes))
    operation = KeyedRandomOperation(seeds, shape, distribution, out.dtype, bounds, node.type)
    return [Value(operation.outputs[0], axes)]


def _bounds(node: Node, first: int, make: Construction) -> list[Any]:
  """The least integer and the first above: numbers, where they are known."""
  return [
    wire.static.item() if wire.static is not None else make.value(wire).tensor
    for wire in node.inputs[first : first + 2]
  ]


_STATEFUL: dict[str, Any] = {
  "RandomUniform": tf.random.uniform,
  "RandomUniformInt": tf.random.uniform,
  "RandomStandardNormal": tf.random.normal,
  "TruncatedNormal": tf.random.truncated_normal,
}


@rule(*_STATEFUL)
class Stateful(Rule):
  """Numbers that are drawn anew in each run."""

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    (out,) = node.outputs
    axes = make.axes_of(out)
    kwargs: dict[str, Any] = {"dtype": out.dtype, "name": node.name}
    if node.type == "RandomUniformInt":
      kwargs["minval"] = static_input(node, 1, "least number").item()
      kwargs["maxval"] = static_input(node, 2, "bound").item()
    seeds = [int(node.attributes[name]) for name in ("seed", "seed2")]
    if any(seeds):
      kwargs["seed"] = (seeds[0] << 32) + seeds[1] & (1 << 63) - 1
    operation = RandomOperation(make.mesh, Shape(flat(axes)), _STATEFUL[node.type], **kwargs)
    return [Value(operation.outputs[0], axes)]
