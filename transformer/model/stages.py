"""The stages of a pipeline that a Transformer's layers are on; see `mtf.MeshImpl.with_stages`.

Embeddings are on the first mesh. The layers of a model, those of the encoder first, are cut into as
many runs as the graph has stages, or into some times as many, which go round the stages; what comes
after the last layer, logits and losses, is on the last of them. Of a graph of one mesh nothing
changes.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.planning.pipeline import equal_cut


def names(graph: mtf.Graph) -> list[str]:
  """The names of the meshes that are stages, in order; none if there are fewer than two."""
  found = [name for name in graph.meshes if name.startswith("stage")]
  return found if len(found) > 1 else []


def layers_of(model: Any) -> int:
  """Number of layers of an encoder or a decoder; of a stack that does not tell, one."""
  return int(getattr(model.layer_stack, "num_layers", 1))


def _parts(model: Any) -> list[Any]:
  """The stacks through which a model goes, in order; those of a student, not of its teacher."""
  model = getattr(model, "student", model)
  return [model.encoder, model.decoder] if hasattr(model, "encoder") else [model]


def count_layers(model: Any) -> int:
  """Number of layers that can be cut into stages; attention and feed-forward count one each.

  Args:
    model: a `Unitransformer`, `Bitransformer` or `StudentTeacher`.
  """
  return sum(layers_of(part) for part in _parts(model))


def check_count(stages: int, layers: int, chunks: int = 1) -> None:
  """Raises `ConfigError` if there are more stages, or runs of layers, than layers.

  Args:
    stages: number of stages.
    layers: number of layers.
    chunks: number of runs of each stage.
  """
  if stages > layers:
    raise errors.ConfigError(
      f"run.pipeline_stages is {stages}, and the model has {layers} layers: a stage has at"
      " least one; leave it out, or make the model deeper"
    )
  if stages * chunks > layers:
    raise errors.ConfigError(
      f"run.pipeline_chunks is {chunks}, and the model has {layers} layers: {chunks} runs on each "
      f"of {stages} stages need {stages * chunks}; bind it to {layers // stages} at most, or make "
      "the model deeper"
    )


def set_cut(model: Any, cut: Sequence[int], why: str) -> None:
  """Cuts the layers of a model into runs of these numbers of layers, which go round the stages.

  Args:
    model: see `count_layers`; it must not have been called yet.
    cut: number of layers of each run; the stages divide how many there are.
    why: where the cut comes from, for `described`.
  """
  for part in _parts(model):
    part.pipeline_cut, part.pipeline_cut_from = tuple(cut), why


def described(model: Any, stages: int) -> str:
  """A sentence about the layers of each stage; "" if there is one stage.

  Args:
    model: see `count_layers`.
    stages: number of stages.
  """
  if stages < 2:
    return ""
  part = _parts(model)[0]
  cut = part.pipeline_cut or equal_cut(count_layers(model), stages)
  runs = "" if len(cut) == stages else f"{len(cut) // stages} runs each, "
  return f"{stages} stages of {runs}{', '.join(map(str, cut))} layers, {part.pipeline_cut_from}"


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
  cut = model.pipeline_cut
  if cut is None or len(cut) % len(stages) or sum(cut) != count:
    # A teacher is not that for which the cut was found; nor is a part of a model by itself.
    check_count(len(stages), count)
    cut = equal_cut(count, len(stages))
  run = bisect.bisect_right(list(itertools.accumulate(cut)), first + i)
  return mtf.stage(stages[run % len(stages)])


def of_end(context: Any) -> contextlib.AbstractContextManager[None]:
  """Context manager: what is made in the block is on the mesh of the model's last layer.

  Args:
    context: a `Context`.
  """
  return of_layer(context, layers_of(context.model) - 1)
