"""Random numbers: of the distribution and shape of the original, the same ones on every layout.

A stateless operation is a function of its seed, so Keras' SeedGenerators work as they do in Keras:
their state is a variable that a step reads and changes. A stateful one draws anew in each run, by
the seed of the run and its name, as `mtf.random_uniform` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.importing.families.inputs import static_input
from mesh_tensorflow.importing.keyed_random import KeyedRandomOperation
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labels,
  Rule,
  Slicewise,
  on_slices,
  rule,
)
from mesh_tensorflow.importing.value import Value, flat
from mesh_tensorflow.operations.random import RandomOperation
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor


def _whole(node: Node, index: int, make: Construction) -> Tensor:
  """Input on dimensions that no layout splits."""
  wire = node.inputs[index]
  axes = tuple(
    () if n == 1 else (Dimension(f"_seed{index}_{i}", n),) for i, n in enumerate(wire.shape)
  )
  return make.value(wire, axes).ordered()


@rule("StatelessRandomGetKeyCounter", "StatelessRandomGetKey")
class KeyOfSeed(Slicewise):
  """Key of a seed, by TensorFlow's own operation; the same on each processor."""

  def labels(self, node: Node) -> Labels:
    outputs = [[f"y{k}_{i}" for i in range(w.rank)] for k, w in enumerate(node.outputs)]
    return Labels([("seed",)], outputs, ["seed", *(label for names in outputs for label in names)])


@rule("StatelessRandomGetAlg")
class Algorithm(Slicewise):
  """Number of the generator that TensorFlow would use; no random number depends on it here."""

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
  """Bounds of random integers, the upper one exclusive: Python numbers if static."""
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
    kwargs.update(_seed_of(node))
    operation = RandomOperation(make.mesh, Shape(flat(axes)), _STATEFUL[node.type], **kwargs)
    return [Value(operation.outputs[0], axes)]


_random = tf.random
# Functions of a node, a seed and its inputs.
_BY_SEED: dict[str, Callable[..., tf.Tensor]] = {
  "Multinomial": lambda node, seed, logits, count: _random.stateless_categorical(
    logits, count, seed, node.outputs[0].dtype
  ),
  "RandomGamma": lambda node, seed, shape, alpha: _random.stateless_gamma(
    tf.concat([shape, alpha.shape], 0), seed, alpha, dtype=alpha.dtype
  ),
  "RandomPoissonV2": lambda node, seed, shape, rate: _random.stateless_poisson(
    tf.concat([shape, rate.shape], 0), seed, rate, node.outputs[0].dtype
  ),
  "RandomShuffle": lambda node, seed, x: tf.gather(
    x, tf.argsort(_random.stateless_uniform([int(x.shape[0])], seed))
  ),
}


@rule(*_BY_SEED)
class BySeed(Slicewise):
  """Numbers that are drawn anew in each run, by TensorFlow's function of a seed, whole.

  The seed is drawn: the same on each processor, and on each layout.
  """

  def labels(self, node: Node) -> Labels:
    if node.type == "RandomShuffle":
      axes = range(node.inputs[0].rank)
      return Labels([axes], [axes], [0])  # Each row goes to one place.
    at = 1 if node.type == "Multinomial" else 0
    static_input(node, at, "shape")
    ins: list[Any] = [[f"x{k}_{i}" for i in range(w.rank)] for k, w in enumerate(node.inputs)]
    ins[at] = None
    out = [f"y{i}" for i in range(node.outputs[0].rank)]
    return Labels(ins, [out], [*(n for names in ins for n in names or ()), *out])

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    labels = self.labels(node)
    seed_dim = Dimension("_seed", 2)
    # As the numbers of a stateful operation; see `Stateful`.
    kwargs: dict[str, Any] = {"dtype": tf.int32, "minval": 0, "maxval": 2**31 - 1}
    kwargs.update(_seed_of(node), name=node.name)
    seed = RandomOperation(make.mesh, Shape([seed_dim]), tf.random.uniform, **kwargs)

    def axes(shape: Sequence[int], names: Sequence[Label]) -> Any:
      return tuple(() if n == 1 else dims[name] for n, name in zip(shape, names))

    ins = [
      (x, axes(w.shape, names))
      for x, w, names in zip(xs, node.inputs, labels.inputs)
      if names is not None
    ]

    def draw(key: tf.Tensor, *slices: tf.Tensor) -> tf.Tensor:
      remaining = iter(slices)
      operands = [
        w.static if names is None else next(remaining)
        for w, names in zip(node.inputs, labels.inputs)
      ]
      return _BY_SEED[node.type](node, key, *operands)

    whole = {d for label in labels.whole for d in dims[label]}
    (out,) = node.outputs
    return on_slices(
      draw,
      [seed.outputs[0], *(Value(x, a).ordered() for x, a in ins)],
      [((seed_dim,),), *(a for _, a in ins)],
      [axes(out.shape, labels.outputs[0])],
      [out.dtype],
      [d for _, a in ins for d in flat(a) if d not in whole],
      node.type,
    )


def _seed_of(node: Node) -> dict[str, int]:
  """The seed that the user gave, as an argument of `RandomOperation`."""
  seeds = [int(node.attributes[name]) for name in ("seed", "seed2")]
  return {"seed": (seeds[0] << 32) + seeds[1] & (1 << 63) - 1} if any(seeds) else {}
