"""A BERT program's model: a function of named tensors that returns a `ModelSpec`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.meshes import layout_names

TRAIN, EVAL, PREDICT = "train", "eval", "infer"
# Feature of an evaluation: 1 for examples, 0 for what fills up the last batch.
REAL = "is_real_example"
_MESH_NAMES = frozenset(("batch", "model"))
# Names that layouts of BERT use for what a model need not have.
_TENSOR_NAMES = frozenset(("batch", "vocab", "intermediate", "num_heads", "experts"))


@dataclasses.dataclass
class ModelSpec:
  """Outputs of a model for one batch.

  Attributes:
    loss: a scalar `Tensor`, of a training step.
    learning_rate: a scalar `Tensor`, for the report; or None. The updates of the variables are
      operations of the graph.
    metrics: (sum, weight) by name, scalar `Tensor`s: the metric is the quotient over all batches.
      Both leave out the rows that fill up a batch: 0 in the feature `is_real_example`.
    losses: names of metrics whose sum is `loss` in the results of an evaluation.
    predictions: `Tensor`s by name whose first dimension is the batch.
  """

  loss: mtf.Tensor | None = None
  learning_rate: mtf.Tensor | None = None
  metrics: Mapping[str, tuple[mtf.Tensor, mtf.Tensor]] = dataclasses.field(default_factory=dict)
  losses: Sequence[str] = ()
  predictions: Mapping[str, mtf.Tensor] = dataclasses.field(default_factory=dict)


# features, labels (None), mode, params ("mesh_shape", "layout", "batch_size").
ModelFn = Callable[[dict[str, mtf.Tensor], None, str, Mapping[str, Any]], ModelSpec]


def second_dimension(name: str) -> str:
  """Name of a feature's second dimension; the first is the batch."""
  return "max_pred_seq" if name.startswith("masked_lm_") else "seq"


def batch_specs(
  element_spec: Mapping[str, tf.TensorSpec], batch_size: int, mode: str
) -> dict[str, tf.TensorSpec]:
  """The features of a model's batches, which are full.

  Args:
    element_spec: of a data set, whose last batch may have fewer examples.
    batch_size: examples in each.
    mode: "eval" adds the feature `is_real_example` [batch]: 1, and 0 for what fills up.
  """
  specs = {
    name: tf.TensorSpec([batch_size, *spec.shape[1:]], spec.dtype)
    for name, spec in element_spec.items()
  }
  if mode == EVAL:
    specs.setdefault(REAL, tf.TensorSpec([batch_size], tf.int32))
  return specs


def mean_of_real(
  x: mtf.Tensor, features: Mapping[str, mtf.Tensor]
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Sum and weight, a metric of `ModelSpec`, over the examples that fill nothing up.

  Args:
    x: [batch], or a scalar, which counts once for each example.
    features: of the batch; all examples count if it has no `is_real_example`.
  """
  batch = features["input_ids"].shape.dims[0]
  real = features.get(REAL)
  weights = mtf.ones(x.mesh, [batch]) if real is None else mtf.to_float(real)
  return mtf.reduce_sum(x * weights), mtf.reduce_sum(weights)


def make_function(
  model_fn: ModelFn, mode: str, specs: Mapping[str, tf.TensorSpec], mesh_impl: mtf.MeshImpl
) -> mtf.Function:
  """A model as an `mtf.function` of the features, in the order of `specs`.

  Args:
    model_fn: the model.
    mode: "train", "eval" or "infer".
    specs: specs of the features of batches, all of one static size.
    mesh_impl: the mesh.

  Returns:
    A function that returns a dict: loss, learning_rate, metrics and predictions, those that are.
  """
  names = list(specs)
  signature = []
  for name in names:
    sizes = specs[name].shape.as_list()
    dims = zip(("batch", second_dimension(name)), sizes)
    signature.append(mtf.TensorSpec(mtf.Shape(list(dims)), specs[name].dtype, name))
  params = {
    "mesh_shape": mesh_impl.shape,
    "layout": mesh_impl.layout_rules,
    "batch_size": int(signature[0].shape[0].size),
  }

  def bert_step(*args: mtf.Tensor) -> dict[str, Any]:
    spec = model_fn(dict(zip(names, args)), None, mode, params)
    graph = args[0].graph
    if mode == TRAIN:
      mtf.optimize.count_global_step(graph)
    layout_names.check_tensor_names(mesh_impl, graph, _TENSOR_NAMES)
    found = {
      "loss": spec.loss,
      "learning_rate": spec.learning_rate,
      "metrics": {k: list(v) for k, v in spec.metrics.items()},
      "losses": {name: list(spec.metrics[name]) for name in spec.losses},
      "predictions": dict(spec.predictions),
    }
    return {k: v for k, v in found.items() if v is not None}

  return mtf.function(mesh_impl, signature)(bert_step)
