"""Layouts that cannot work, one row each: program, mesh, layout, and what the error must say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.errors.error_rows import A, B, C, World

D = mtf.Dimension("d", 8)


@dataclasses.dataclass
class LayoutRow:
  """One program and a layout that does not suit it.

  Attributes:
    name: of the test.
    build: adds the operation to the world's graph.
    mesh_shape: of the mesh.
    layout: rules.
    words: what the error must have: operation, tensor, dimension, mesh axis, what is legal.
  """

  name: str
  build: Callable[[World], Any]
  mesh_shape: str
  layout: str
  words: list[str]


def _unsplit(name: str, build: Callable[[World], Any], words: str, layout: str = "b:rows"):
  return LayoutRow(
    f"{name} along a split dimension", build, "rows:2", layout, words.split() + ["rows:2", "rename"]
  )


def _free(k: World) -> mtf.Tensor:
  """x under names that no rule of these rows has."""
  return mtf.rename_dimension(mtf.rename_dimension(k.x, "a", "p"), "b", "q")


LAYOUT_ROWS = [
  LayoutRow(
    "indivisible",
    lambda k: mtf.square(k.x),
    "rows:3",
    "b:rows",
    ["ImportOperation", "x:0", "b:8", "rows:3", "1, 2, 4, 8", "9"],
  ),  # fmt: skip
  LayoutRow(
    "indivisible variable",
    lambda k: mtf.get_variable(k.mesh, "encoder/q", [("heads", 6)]),
    "model:4",
    "heads:model",
    ["Variable", "encoder/q", "heads:6", "model:4", "1, 2, 3, 6", "8"],
  ),  # fmt: skip
  LayoutRow(
    "two dimensions of a tensor",
    lambda k: None,
    "rows:2",
    "a:rows,b:rows",
    ["ImportOperation", "x:0", "a:4", "b:8", "rows:2", "rename"],
  ),  # fmt: skip
  LayoutRow(
    "one dimension over two axes",
    lambda k: None,
    "rows:2,cols:2",
    "a:rows,a:cols",
    ["a:4", "rows:2", "cols:2", "keep"],
  ),  # fmt: skip
  LayoutRow(
    "two kept dimensions of a product",
    lambda k: mtf.einsum([k.x, k.y], [A, C], name="logits"),
    "rows:2",
    "a:rows,c:rows",
    ["EinsumOperation", "logits", "a:4", "c:12", "rows:2"],
  ),  # fmt: skip
  LayoutRow(
    "a summed and a kept dimension",
    lambda k: mtf.einsum(
      [mtf.rename_dimension(k.x, "b", "d"), mtf.ones(k.mesh, [A, C])], [C], name="summed"
    ),
    "rows:2",
    "d:rows,c:rows",
    ["EinsumOperation", "summed", "d:8", "c:12", "rows:2"],
  ),  # fmt: skip
  LayoutRow(
    "a broadcast",
    lambda k: mtf.broadcast(k.x, [A, B, D]),
    "rows:2",
    "a:rows,d:rows",
    ["BroadcastOperation", "broadcast", "a:4", "d:8", "rows:2"],
  ),  # fmt: skip
  LayoutRow(
    "a sum of two tensors",
    lambda k: mtf.add(k.x, mtf.ones(k.mesh, [D])),
    "rows:2",
    "a:rows,d:rows",
    ["AddOperation", "add", "a:4", "d:8", "rows:2"],
  ),  # fmt: skip
  LayoutRow(
    "a comparison",
    lambda k: mtf.less(k.x, mtf.ones(k.mesh, [D])),
    "rows:2",
    "a:rows,d:rows",
    ["BinaryOp", "binary_op", "a:4", "d:8", "rows:2"],
  ),  # fmt: skip
  LayoutRow(
    "one_hot",
    lambda k: mtf.one_hot(k.i, D),
    "rows:2",
    "a:rows,d:rows",
    ["OneHotOperation", "one_hot", "a:4", "d:8", "rows:2"],
  ),  # fmt: skip
  LayoutRow(
    "gather with both",
    lambda k: mtf.gather(mtf.ones(k.mesh, [D, C]), k.i, D),
    "rows:2",
    "a:rows,c:rows",
    ["GatherOperation", "gather", "a:4", "c:12", "rows:2"],
  ),  # fmt: skip
  LayoutRow(
    "a reshape",
    lambda k: mtf.reshape(k.x, [D, A]),
    "rows:2",
    "a:rows,d:rows",
    ["ReshapeOperation", "reshape", "d:8", "a:4", "rows:2"],
  ),  # fmt: skip
  LayoutRow(
    "an indivisible reshape",
    lambda k: mtf.reshape(k.x, [("e", 2), ("f", 16)]),
    "rows:4",
    "e:rows",
    ["ReshapeOperation", "reshape", "e:2", "rows:4", "1, 2", "4"],
  ),  # fmt: skip
  LayoutRow(
    "random numbers",
    lambda k: mtf.random_uniform(k.mesh, [D, ("e", 4)]),
    "rows:2",
    "d:rows,e:rows",
    ["RandomOperation", "random", "d:8", "e:4", "rows:2"],
  ),  # fmt: skip
  LayoutRow(
    "a range",
    lambda k: mtf.range(k.mesh, ("e", 9), tf.int32),
    "rows:2",
    "e:rows",
    ["RangeOperation", "range", "e:9", "rows:2", "1, 3, 9", "10"],
  ),  # fmt: skip
  LayoutRow(
    "a constant",
    lambda k: mtf.zeros(k.mesh, [("e", 9)]),
    "rows:2",
    "e:rows",
    ["Constant", "constant", "e:9", "rows:2", "10"],
  ),  # fmt: skip
  LayoutRow(
    "a pooled dimension",
    lambda k: mtf.pool_tensor_1d(mtf.rename_dimension(k.x, "a", "e"), B, pool_size=4),
    "rows:4",
    "b:rows",
    ["b:2", "rows:4", "1, 2"],
  ),  # fmt: skip
  LayoutRow(
    "inside a loop",
    lambda k: mtf.while_loop(
      lambda v: mtf.less(mtf.reduce_sum(v), 1.0),
      lambda v: [mtf.reduce_sum(mtf.add(v, mtf.ones(k.mesh, [D])), reduced_dim=D)],
      [k.x],
    ),
    "rows:2",
    "a:rows,d:rows",
    ["AddOperation", "a:4", "d:8", "rows:2"],
  ),  # fmt: skip
  LayoutRow(
    "laid-out tensor",
    lambda k: mtf.import_laid_out_tensor(
      k.mesh,
      mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor(
        [tf.constant(np.ones([8], np.float32))] * 2
      ),
      [D],
      name="ready",
    ),
    "rows:2",
    "d:rows",
    ["ImportLaidOutTensorOperation", "ready", "d=8", "[8]", "[4]", "rows=2"],
  ),  # fmt: skip
  _unsplit("concat", lambda k: mtf.concat([k.x, k.x], "b"), "ConcatOperation concat x b:8"),
  _unsplit("split", lambda k: mtf.split(k.x, B, 2), "SplitOperation split x b:8"),
  _unsplit("stack", lambda k: mtf.stack([_free(k)] * 8, "b"), "StackOperation stack b:8"),
  _unsplit("unstack", lambda k: mtf.unstack(k.x, B), "UnstackOperation unstack x b:8"),
  _unsplit("slice", lambda k: mtf.slice(k.x, 0, 4, "b"), "SliceOperation slice x b:8"),
  _unsplit("pad", lambda k: mtf.pad(k.x, [4, 4], "b"), "PadOperation pad x b:8"),
  _unsplit("top_k", lambda k: mtf.top_k(_free(k), ("q", 8), B), "TopKOperation top_k b:8"),
  _unsplit(
    "slicewise",
    lambda k: mtf.slicewise(tf.sort, [k.x], splittable_dims=[A]),
    "SlicewiseOperation slicewise x b:8",
  ),  # fmt: skip
  _unsplit("halo", lambda k: mtf.halo_exchange(k.x, A, B, 1), "slice x b:8"),
]
