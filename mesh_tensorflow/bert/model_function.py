"""A BERT program's model: a function of named tensors that returns a `ModelSpec`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow.bert import records
from mesh_tensorflow.bert.optimization import Optimization
from mesh_tensorflow.meshes import layout_names
from mesh_tensorflow.training import program

TRAIN, EVAL, PREDICT = "train", "eval", "infer"
# Feature of an evaluation: 1 for examples, 0 for what fills up the last batch.
REAL = "is_real_example"
_MESH_NAMES = frozenset(("batch", "model"))
# Names that layouts of BERT use for what a model need not have.
_TENSOR_NAMES = frozenset(("batch", "vocab", "intermediate", "num_heads", "experts"))

_Element = TypeVar("_Element")


@dataclasses.dataclass
class ModelSpec:
  """Outputs of a model for one batch.

  Attributes:
    loss: a scalar `Tensor`, of a training step.
    minimized: a scalar `Tensor`, if that is not the loss alone.
    metrics: (sum, weight) by name, scalar `Tensor`s: the metric is the quotient over all batches.
      Both leave out the rows that fill up a batch: 0 in the feature `is_real_example`.
    losses: names of metrics whose sum is `loss` in the results of an evaluation.
    predictions: `Tensor`s by name whose first dimension is the batch.
  """

  loss: mtf.Tensor | None = None
  minimized: mtf.Tensor | None = None
  metrics: Mapping[str, tuple[mtf.Tensor, mtf.Tensor]] = dataclasses.field(default_factory=dict)
  losses: Sequence[str] = ()
  predictions: Mapping[str, mtf.Tensor] = dataclasses.field(default_factory=dict)


# features, labels (None), mode, params ("mesh_shape", "layout", "batch_size").
ModelFn = Callable[[dict[str, mtf.Tensor], None, str, Mapping[str, Any]], ModelSpec]


@dataclasses.dataclass(frozen=True)
class TrainableModel:
  """A model function that says how it is trained.

  Attributes:
    function: the model function, which is called in its place.
    optimization: learning rate, optimizer, clipping and the choice of variables.
  """

  function: ModelFn
  optimization: Optimization

  def __call__(
    self, features: dict[str, mtf.Tensor], labels: None, mode: str, params: Mapping[str, Any]
  ) -> ModelSpec:
    return self.function(features, labels, mode, params)


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


def _feature_spec(name: str, spec: tf.TensorSpec, local: bool = False) -> mtf.TensorSpec:
  dims = zip(("batch", second_dimension(name)), spec.shape.as_list())
  return mtf.TensorSpec(mtf.Shape(list(dims)), spec.dtype, name, local=local)


def _params(mesh_impl: mtf.MeshImpl, specs: Mapping[str, tf.TensorSpec]) -> dict[str, Any]:
  size = int(next(iter(specs.values())).shape[0])
  return {"mesh_shape": mesh_impl.shape, "layout": mesh_impl.layout_rules, "batch_size": size}


def make_function(
  model_fn: ModelFn, mode: str, specs: Mapping[str, tf.TensorSpec], mesh_impl: mtf.MeshImpl
) -> mtf.Function:
  """A model as an `mtf.function` of the features, in the order of `specs`.

  Args:
    model_fn: the model.
    mode: "eval" or "infer"; training has a `BertProgram`.
    specs: specs of the features of batches, all of one static size.
    mesh_impl: the mesh.

  Returns:
    A function that returns a dict: metrics, losses (those metrics whose sum it is) and predictions.
  """
  names = list(specs)

  @mtf.function(mesh_impl, [_feature_spec(n, specs[n]) for n in names])
  def bert_step(*args: mtf.Tensor) -> dict[str, Any]:
    spec = model_fn(dict(zip(names, args)), None, mode, _params(mesh_impl, specs))
    layout_names.check_tensor_names(mesh_impl, args[0].graph, _TENSOR_NAMES)
    return {
      "metrics": {k: list(v) for k, v in spec.metrics.items()},
      "losses": {name: list(spec.metrics[name]) for name in spec.losses},
      "predictions": dict(spec.predictions),
    }

  return bert_step


class BertProgram:
  """A model as the `Program` of a training loop.

  Args:
    model_fn: the model.
    specs: specs of the features of a batch.
    mesh_impl: the mesh.
    seed: of dropout.
  """

  def __init__(
    self,
    model_fn: TrainableModel,
    specs: Mapping[str, tf.TensorSpec],
    mesh_impl: mtf.MeshImpl,
    seed: int = 0,
  ):
    self._model_fn = model_fn
    self._specs = specs
    self.mesh_impl = mesh_impl
    self._seed = seed
    self.examples = mtf.Shape([("batch", int(next(iter(specs.values())).shape[0]))])
    self.speed = ("examples", self.examples.size)
    self.num_classes = None
    self.activation_dtype = tf.float32

  def feature_names(self, dataset: tf.data.Dataset) -> list[str]:
    """The features of the specs, which a data set has as they are read."""
    return [name for name in self._specs if name in dataset.element_spec]

  def feature_spec(self, name: str, training: bool = False, local: bool = False) -> mtf.TensorSpec:
    """See `Program.feature_spec`."""
    return _feature_spec(name, self._specs[name], local)

  def reading(self, batches: Iterable[_Element]) -> Iterator[_Element]:
    """See `records.reading`."""
    return records.reading(batches)

  def losses(self, features: dict[str, mtf.Tensor], num_microbatches: int) -> dict[str, mtf.Tensor]:
    """The loss, and what is minimized."""
    params = _params(self.mesh_impl, self._specs)
    spec = self._model_fn(features, None, TRAIN, params)
    assert spec.loss is not None
    found = {"loss": spec.loss if spec.minimized is None else spec.minimized, "reported": spec.loss}
    if num_microbatches > 1:
      found = {name: x * (1.0 / num_microbatches) for name, x in found.items()}
    return found

  def finish(self, graph: mtf.Graph, outputs: Mapping[str, mtf.Tensor]) -> None:
    """Checks the variables and the names of the layout."""
    self._model_fn.optimization.check_trained(graph)
    layout_names.check_tensor_names(self.mesh_impl, graph, _TENSOR_NAMES)

  def is_trained(self, variable: mtf.Variable) -> bool:
    """See `Optimization.is_trained`."""
    return self._model_fn.optimization.is_trained(variable)

  def num_microbatches(self) -> int:
    """One."""
    return 1

  def random_seed(self, step: mtf.Tensor) -> mtf.Tensor:
    """A number of the step and the seed: a step draws what it would in any other run."""
    return step + self._seed * 2**32 if self._seed else step

  def initialize(self) -> None:
    """Does nothing: initial weights are the loop's."""

  def on_mesh(self, mesh_impl: mtf.MeshImpl) -> BertProgram:
    """See `Program.on_mesh`."""
    return BertProgram(self._model_fn, self._specs, mesh_impl, self._seed)

  def train_step(self, settings: TrainerSettings) -> mtf.Function:
    """A training step, such as is planned for a layout."""
    optimizer = self._model_fn.optimization.make_optimizer
    return program.train_step(self, settings, list(self._specs), optimizer)
