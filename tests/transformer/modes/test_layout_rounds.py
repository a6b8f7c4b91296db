"""Layouts of models that are built otherwise for another layout."""

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.modes import automatic_layout, variants
from mesh_tensorflow.transformer.modes.layout_rounds import Start

ROWS, WIDTH = 64, 512


class InMicrobatches:
  """Makes steps that cut a batch which is not split into microbatches of one row."""

  batch_size = ROWS

  def __init__(self):
    self.made = []

  def __call__(self, mesh_shape, layout, variant):
    del variant
    self.made.append(layout.pairs)
    rows = ROWS if any(d == "batch" for d, _ in layout.pairs) else 1

    @mtf.function(mtf.MeshImpl(mesh_shape, layout), input_signature=[mtf.TensorSpec([("id", 1)])])
    def step(one):
      w = mtf.get_variable(one.mesh, "w", [("in", WIDTH), ("out", WIDTH)])
      total = mtf.zeros(one.mesh, [])
      for i in range(ROWS // rows):
        x = mtf.zeros(one.mesh, [("batch", rows), ("in", WIDTH)]) + float(i)
        total += mtf.reduce_sum(mtf.einsum([x, w], output_shape=[("batch", rows), ("out", WIDTH)]))
      return total

    return step

  def variants(self, choices):
    del choices
    return [variants.AS_BOUND]


@pytest.mark.parametrize("bound", ["", "batch:all", "out:all", "batch:all,out:other"])
@pytest.mark.parametrize("free", [False, True])
def test_no_bound_layout_is_faster_than_the_best(bound, free):
  make = InMicrobatches()
  shape = mtf.convert_to_shape("all:4,other:2")
  rules = mtf.convert_to_layout_rules(bound)
  choice = automatic_layout.choose_layout(
    make, None if free else shape, 8, None, "tpu-v3", bound=Start(shape, rules)
  )
  rows = [choice, *choice.alternatives]
  built = mtf.describe(make(shape, rules, variants.AS_BOUND), machine="tpu-v3").seconds
  assert choice.seconds <= built
  assert [c.seconds for c in rows] == sorted(c.seconds for c in rows)
  assert len({(str(c.mesh_shape), str(c.layout)) for c in rows}) == len(rows)
  # The layout decides what is built, so nothing is proven; the best is as it is built.
  assert not choice.proven
  again = make(choice.mesh_shape, choice.layout, variants.AS_BOUND)
  assert mtf.describe(again, machine="tpu-v3").seconds == pytest.approx(choice.seconds)


def test_a_layout_is_found_that_an_unsplit_batch_hides():
  choice = automatic_layout.choose_layout(
    InMicrobatches(), mtf.convert_to_shape("all:4,other:2"), 8, None, "tpu-v3"
  )
  assert "batch" in dict(choice.layout.pairs)
