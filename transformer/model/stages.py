"""The stages of a pipeline that a Transformer's layers are on; see `mtf.MeshImpl.with_stages`.

Embeddings are on the first mesh. The layers of a model, those of the encoder first, are cut into as
many runs of equal length as the graph has stages; what comes after the last layer, logits and
losses, is on the last of them. Of a graph of one mesh nothing changes.
"""

from __future__ import annotations

import contextlib
from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow import errors


def names(graph: mtf.Graph) -> list[str]:
  """The names of the meshes that are stages, in order; none if there are fewer than two."""
  found = [name for name in graph.meshes if name.startswith("stage")]
  return found if len(found) > 1 else []


def layers_of(model: Any) -> int:
  """Number of layers of an encoder or a decoder; of a stack that does not tell, one."""
  return int(getattr(model.layer_stack, "num_layers", 1))


def of_layer(context: Any, i: int) -> contextlib.AbstractContextManager[None]:
  """Context manager: what is made in the block is on the mesh of a layer.

  Args:
    context: a `Context`.
    i: number of the layer in the stack of `context.model`.

  Raises:
    ConfigError: there are more stages than layers.
  """
  stages = names(context.mesh.graph)
  if not stages:
    return contextlib.nullcontext()
  model = context.model
  first, count = model.layers_of_pipeline or (0, layers_of(model))
  if len(stages) > count:
    raise errors.ConfigError(
      f"run.pipeline_stages is {len(stages)}, and the model has {count} layers: a stage has at"
      " least one; leave it out, or make the model deeper"
    )
  return mtf.stage(stages[(first + i) * len(stages) // max(count, 1)])


def of_end(context: Any) -> contextlib.AbstractContextManager[None]:
  """Context manager: what is made in the block is on the mesh of the model's last layer.

  Args:
    context: a `Context`.
  """
  return of_layer(context, layers_of(context.model) - 1)
