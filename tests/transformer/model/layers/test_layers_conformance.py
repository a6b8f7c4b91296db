"""Layers of the Transformer on drawn layouts, placement and SIMD, eager and in tf.function.

A long run: set `MTF_CONFORMANCE_DRAWS=30`.
"""

from __future__ import annotations

import functools
import importlib
import os
import pathlib

import gin
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.operations.random import DropoutNoiseOperation
from mesh_tensorflow.transformer import (  # noqa: F401
  evolved_transformer,
  fixup_layers,
  funnel_transformer,
  heterogeneous_moe,
  memory_layers,
  transformer,
  universal_transformer,
)
from mesh_tensorflow.transformer.model import sublayers
from mesh_tensorflow.transformer.model.layers import fixup
from tests.conformance import framework, further_ways
from tests.kinds import kept

# How many layouts each family is run on in every mode.
DRAWS = int(os.environ.get("MTF_CONFORMANCE_DRAWS", "2"))
# Threads and tracing take long: in other modes than the fastest, a draw takes one layer in so many,
# and traced one in so many of these.
PART, TRACED_PART = 9, 3
# Of steps of decoding, which are several calls of a layer, also in the fastest, and fewer.
STEPS_PART = 3
if "MTF_CONFORMANCE_DRAWS" in os.environ:
  PART = TRACED_PART = STEPS_PART = 1
# How many more, as they come, in one eager mode: many must be refused.
WILD = max(2, DRAWS // 3)
# Names (comma-separated) of the only layers to test.
ONLY = [name for name in os.environ.get("MTF_CONFORMANCE_ONLY", "").split(",") if name]


def _families() -> dict[str, list[framework.Descriptor]]:
  found = {}
  for path in sorted(pathlib.Path(__file__).parent.glob("descriptors_*.py")):
    module = importlib.import_module(f"tests.transformer.model.layers.{path.stem}")
    chosen = [d for d in module.DESCRIPTORS if not ONLY or d.name in ONLY]
    if chosen:
      found[path.stem.removeprefix("descriptors_")] = chosen
  return found


FAMILIES = _families()
CASES = [
  (family, draw, mode)
  for family in FAMILIES
  for mode in framework.MODES
  for draw in range(DRAWS + WILD if mode == "placement_eager" else DRAWS)
]
# What is traced is run on one of the layouts in `make test`, families in turns on simd and on
# placement, where a trace grows with the mesh: there on the second one, of four processors.
SECOND = "r:2,s:2"
KEPT = [
  (family, draw, mode)
  for family, draw, mode in CASES
  if not mode.endswith("function")
  or "MTF_CONFORMANCE_DRAWS" in os.environ
  or draw % 2 == (mode == "placement_function") == list(FAMILIES).index(family) % 2
]


@functools.cache
def layouts(family: str) -> list[framework.Layout]:
  return framework.draw_layouts(family, FAMILIES[family], DRAWS, WILD, SECOND)


def whose_turn(family: str, draw: int) -> list[framework.Descriptor]:
  """Layers that refuse a layout, and those whose turn it is: one in six on a wild one."""
  if "MTF_CONFORMANCE_DRAWS" in os.environ:
    return FAMILIES[family]
  result = []
  if draw >= DRAWS:
    layout = layouts(family)[draw]
    return [d for i, d in enumerate(FAMILIES[family]) if d.is_illegal(layout) or i % 6 == draw % 6]
  for i, descriptor in enumerate(FAMILIES[family]):
    legal = [n for n in range(DRAWS) if not descriptor.is_illegal(layouts(family)[n])]
    if draw not in legal or draw == legal[i % len(legal)]:
      result.append(descriptor)
  return result


@pytest.mark.parametrize("family,draw,mode", kept(CASES, KEPT))
def test_family(family, draw, mode, cpu_devices, pytestconfig):
  layout, descriptors = layouts(family)[draw], FAMILIES[family]
  if mode == "placement_eager":
    descriptors = whose_turn(family, draw)
  descriptors = descriptors[:: max(1, 24 // (pytestconfig.getoption("quick") or 24))]
  part = STEPS_PART if family == "decoding" else 1
  if mode != "placement_eager":
    part *= PART
  if mode.endswith("function"):
    part *= TRACED_PART
  # Other layers in each mode and draw.
  descriptors = descriptors[(draw + 2 * framework.MODES.index(mode)) % part :: part]
  _, problems = framework.check_family(mode, layout, descriptors, cpu_devices)
  assert not problems, f"{layout}, {mode}:\n  " + "\n  ".join(problems)


def test_layers_that_refuse_all_layouts_run_on_one_device(cpu_devices):
  """Of these `test_family` never sees a value."""
  whole = framework.Layout("r:1", "")
  problems = []
  for family, descriptors in FAMILIES.items():
    drawn = layouts(family)[:DRAWS]
    refused = [d for d in descriptors if all(d.is_illegal(layout) for layout in drawn)]
    problems += framework.check_family("placement_eager", whole, refused, cpu_devices)[1]
  assert not problems, "\n  ".join(["", *problems])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["placement_eager", "simd_function"])
@pytest.mark.parametrize("draw", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_of_a_family(family, draw, mode, cpu_devices):
  layout = framework.draw_layouts(family, FAMILIES[family], 3)[draw]
  _, problems = framework.check_family(mode, layout, FAMILIES[family], cpu_devices)
  assert not problems, f"{layout}, {mode}:\n  " + "\n  ".join(problems)


def public_layers() -> set[type]:
  """All layers of the package that are not base classes of others only."""
  found, open_ = set(), [transformer.TransformerLayer]
  while open_:
    subclasses = open_.pop().__subclasses__()
    open_ += subclasses
    found.update(c for c in subclasses if c.__module__.startswith("mesh_tensorflow.transformer."))
  abstract = {"Conv1D", "Conv1DLocalAttn", "ExpertsLayer", "OneLevelExpertsLayer"}
  abstract |= {"AttendsToEncoder", "Layers", "QueryKeyOptions", "SublayerStack", "UTPasses"}
  return {c for c in found if not c.__name__.startswith("_") and c.__name__ not in abstract}


def build(descriptor: framework.Descriptor) -> mtf.Graph:
  """The graph of a descriptor."""
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  inputs = zip(descriptor.arrays, descriptor.inputs)
  framework._call(descriptor, mesh, [mtf.import_tf_tensor(mesh, a, x.shape) for a, x in inputs])
  return mesh.graph


@pytest.mark.skipif(bool(ONLY), reason="not all descriptors are there")
def test_no_sublayer_is_forgotten():
  """Each is among the public names, and in a descriptor or in a stack of one."""
  made = {n for room in (sublayers, fixup) for n in vars(room) if n.startswith("sublayer_")}
  assert made <= set(dir(transformer)) | set(dir(fixup_layers)) and len(made) > 12
  folder = pathlib.Path(__file__).parent
  texts = "".join(p.read_text() for p in [*folder.glob("*.py"), *folder.parent.rglob("test_*.py")])
  assert not [n for n in made if n not in texts and f'"{n.removeprefix("sublayer_")}"' not in texts]


def test_no_layer_is_forgotten(monkeypatch):
  """Each layer has a descriptor with gradients; and one while decoding, unless it looks ahead."""
  called = {False: set(), True: set()}

  def noted(call):
    @functools.wraps(call)
    def with_note(self, context, *args, **kwargs):
      called[context.mode == "incremental"].add(type(self))
      return call(self, context, *args, **kwargs)

    return with_note

  layers = public_layers()
  for cls in {c for layer in layers for c in layer.__mro__ if "call" in vars(c)}:
    monkeypatch.setattr(cls, "call", noted(cls.call))
  for descriptors in FAMILIES.values():
    for d in descriptors:
      build(d)
  assert len(layers) > 30 and not layers - called[False]
  ahead = {"EncoderConvolutionalLayer", "FunnelTransformerLayerStack"}
  assert {c.__name__ for c in layers - called[True]} == ahead


@pytest.mark.parametrize("descriptor", FAMILIES.get("dropout", []), ids=lambda d: d.name)
def test_positions_have_one_dropout_mask(descriptor):
  graph = build(descriptor)
  masks = [o.outputs[0].shape for o in graph.operations if isinstance(o, DropoutNoiseOperation)]
  assert masks and not any("length" in mask.dimension_names for mask in masks), masks


def test_names_are_unique():
  names = [d.name for descriptors in FAMILIES.values() for d in descriptors]
  assert len(names) == len(set(names))


@pytest.mark.long
@pytest.mark.parametrize(
  "family", [name for name in FAMILIES if name not in ("decoding", "states")]
)
def test_gradients_of_gradients(family, record_property):
  """Whole, on one device: that layouts do not matter is tested of what layers are made of."""
  problems, cases = [], [d for d in FAMILIES[family] if d.differentiable]
  for descriptor in cases:
    again = further_ways.differentiated_again(descriptor)
    problems += further_ways.run(
      [(again.descriptor, again.check)], "placement_eager", framework.Layout("r:1", ""), [""]
    )
    gin.clear_config()
  record_property(
    "conformance_way",
    {"family": family, "way": "gradients differentiated again, layers", "cases": len(cases)},
  )
  assert not problems, problems
