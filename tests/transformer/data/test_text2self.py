"""Inputs and targets joined: worked by hand, and trained on."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.data.text2self import dynamic_text2self


def join(features, mesh="", layout=""):
  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")
  tensors = {
    k: mtf.import_tf_tensor(m, tf.constant(v, tf.int32), [("batch", 2), ("length", len(v[0]))])
    for k, v in features.items()
  }
  result = dynamic_text2self(tensors)
  impl = mtf.PlacementMeshImpl(mesh, layout, [""] * max(1, mtf.convert_to_shape(mesh).size))
  lowering = mtf.Lowering(graph, {m: impl})
  return {k: lowering.export_to_tf_tensor(v).numpy().tolist() for k, v in result.items()}


@pytest.mark.parametrize(("mesh", "layout"), [("", ""), ("b:2", "batch:b")])
def test_rows_of_one_example(mesh, layout):
  result = join(
    {"inputs": [[5, 6, 1, 0], [7, 1, 0, 0]], "targets": [[8, 1, 0], [9, 4, 1]]}, mesh, layout
  )
  assert result == {"targets": [[5, 6, 1, 8, 1, 0, 0], [7, 1, 9, 4, 1, 0, 0]]}


def test_packed_rows():
  result = join(
    {
      "inputs": [[5, 1, 6, 7, 1], [4, 1, 0, 0, 0]],
      "inputs_segmentation": [[1, 1, 2, 2, 2], [1, 1, 0, 0, 0]],
      "inputs_position": [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]],
      "targets": [[8, 9, 1, 3, 1], [2, 1, 0, 0, 0]],
      "targets_segmentation": [[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]],
      "targets_position": [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]],
    }
  )
  assert result["targets"] == [[5, 1, 8, 9, 1, 6, 7, 1, 3, 1], [4, 1, 2, 1, 0, 0, 0, 0, 0, 0]]
  assert result["targets_segmentation"][0] == [1, 1, 1, 1, 1, 2, 2, 2, 2, 2]
  assert result["targets_position"][0] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
  assert np.array(result["targets_segmentation"][1]).tolist() == [1] * 4 + [0] * 6


def test_a_row_of_as_many_examples_as_places():
  numbers, positions = [[1, 2, 3], [1, 0, 0]], [[0, 0, 0], [0, 0, 0]]
  result = join(
    {
      "inputs": [[5, 6, 7], [4, 0, 0]],
      "inputs_segmentation": numbers,
      "inputs_position": positions,
      "targets": [[8, 9, 3], [2, 0, 0]],
      "targets_segmentation": numbers,
      "targets_position": positions,
    }
  )
  assert result["targets"] == [[5, 8, 6, 9, 7, 3], [4, 2, 0, 0, 0, 0]]
