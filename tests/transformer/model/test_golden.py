"""Golden values of the TF1 library: losses, logits, gradients and decoded ids."""

import functools
from itertools import product

import numpy as np
import pytest

import mesh_tensorflow as mtf
from tests.transformer import bi_program as bi
from tests.transformer import lm_program as lm

# Language models. Name: (arguments of make_model, number of variables, (train loss, eval loss,
# squared gradient), logits[0, 0, :4], logits[1, 1, :4], decoded ids)
CASES = {
  "D": (
    dict(label_smoothing=0.1, z_loss=0.01),
    19,
    (1.581156, 1.541405, 1.167193),
    [0.72702, -0.56166, 0.33140, -0.06284],
    [-0.05296, -0.27194, 0.56541, -0.79354],
    [[5, 6, 2, 4, 2, 1], [3, 4, 2, 4, 2, 3]],
  ),
  "E": (
    dict(attention=dict(fold_scaling_into_initializer=False, num_memory_heads=1, shared_kv=True)),
    17,
    (1.360026, 1.359667, 0.311557),
    [0.52269, -0.37201, 0.17834, 0.03594],
    [-0.59037, 0.46828, -0.29206, 0.08210],
    [[5, 6, 2, 6, 4, 8], [3, 4, 2, 6, 4, 8]],
  ),
}
# Encoder-decoders. Name: (gin bindings, then as above, ids of beam search with a beam of 3)
PAIRED_CASES = {
  "A": (
    "",
    46,
    (1.382394, 1.382006, 1.001580),
    [0.84626, -0.69455, 0.46257, -0.17715],
    [-0.64601, 0.73615, -0.74121, 0.66063],
    [[9, 2, 0, 2, 2], [9, 2, 0, 4, 2]],
    [[7, 1, 0, 0, 0], [7, 1, 0, 0, 0]],
  ),
  "B": (
    bi.T5_1_0,
    47,
    (1.440910, 1.440556, 0.589479),
    [0.40977, -0.32498, 0.20263, -0.05686],
    [0.33699, -0.16754, -0.02127, 0.20763],
    [[7, 7, 7, 5, 5], [9, 7, 7, 7, 7]],
    [[7, 7, 7, 5, 5], [7, 5, 5, 5, 5]],
  ),
  "C": (
    bi.T5_1_1,
    52,
    (1.531253, 1.530805, 1.888617),
    [-0.93554, 0.13776, 1.14627, 1.61567],
    [-1.35892, -0.35183, 0.82073, 1.60729],
    [[3, 5, 4, 1, 0], [3, 5, 4, 1, 0]],
    [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]],
  ),
}
KINDS = {"placement": mtf.PlacementMeshImpl, "simd": mtf.SimdMeshImpl}
MESHES = {
  "one device": ("all:1", ""),
  "batch": ("rows:2", "batch:rows"),
  "heads": ("cols:2", "heads:cols"),
  "d_model": ("cols:2", "d_model:cols"),
  "batch and heads": ("rows:2,cols:2", "batch:rows,heads:cols"),
}


def runs(cases, *traced):
  """Case, mesh implementation, mesh, whether in a tf.function; and what of them is `long`.

  Each case is run on one device and on one of the meshes, on another than the case before it.
  """
  found, kinds = [], list(KINDS)
  for (n, case), (at, mesh) in product(enumerate(cases), enumerate(MESHES)):
    marks = () if at == 0 or at == 1 + n % (len(MESHES) - 1) else (pytest.mark.long,)
    found.append(pytest.param(case, kinds[(n + at // 2) % 2], mesh, False, marks=marks))
  return [*found, *traced]


RUNS = runs(
  CASES, ("D", "simd", "heads", True), ("E", "placement", "batch and heads", True),
  pytest.param("D", "placement", "one device", True, marks=pytest.mark.long),
)  # fmt: skip
PAIRED_RUNS = runs(
  PAIRED_CASES, ("A", "placement", "one device", True), ("C", "simd", "heads", True),
  pytest.param("B", "placement", "d_model", True, marks=pytest.mark.long),
)  # fmt: skip


def mesh_impl(kind, mesh, cpu_devices):
  shape, layout = MESHES[mesh]
  return KINDS[kind](shape, layout, cpu_devices[: mtf.convert_to_shape(shape).size])


def check(found, case):
  """Losses, squared gradient and logits."""
  (loss, squared), (evaluation, logits) = found
  expected, first, second = case[2:5]
  np.testing.assert_allclose([loss, evaluation], expected[:2], atol=2e-6)
  np.testing.assert_allclose(squared, expected[2], rtol=1e-5)
  np.testing.assert_allclose(logits[0, 0, :4], first, atol=1e-5)
  np.testing.assert_allclose(logits[1, 1, :4], second, atol=1e-5)


@pytest.mark.parametrize("name,kind,mesh,traced", RUNS)
def test_language_models(name, kind, mesh, traced, cpu_devices):
  case, run = CASES[name], functools.partial(lm.run, traced=traced)
  impl = mesh_impl(kind, mesh, cpu_devices)
  model = lm.make_model(**case[0])
  lm.set_golden_weights(lm.initialize(impl, model))
  assert len([s for s in impl.variable_store if not s.name.startswith("_")]) == case[1]
  loss, _, squared = run(impl, lm.loss_program(model), lm.TARGETS)
  check([(loss, squared), run(impl, lm.loss_program(model, "eval"), lm.TARGETS)], case)
  partial = np.array([[5, 6, 0, 0, 0, 0], [3, 4, 2, 0, 0, 0]], np.int32)
  np.testing.assert_array_equal(run(impl, model.sample_autoregressive, partial), case[5])


@pytest.mark.parametrize("name,kind,mesh,traced", PAIRED_RUNS)
def test_encoder_decoders(name, kind, mesh, traced, cpu_devices):
  case, run = PAIRED_CASES[name], functools.partial(lm.run, traced=traced)
  impl = mesh_impl(kind, mesh, cpu_devices)
  model = bi.make_model(case[0])
  bi.golden(impl, model)
  assert len(bi.names(impl)) == case[1]
  loss, _, _, squared = run(impl, bi.loss_program(model), bi.INPUTS, bi.TARGETS)
  evaluated = run(impl, bi.loss_program(model, "eval"), bi.INPUTS, bi.TARGETS)
  check([(loss, squared), evaluated], case)

  def decode(**options):
    return run(impl, lambda x: model.decode(x, max_decode_length=5, **options), bi.INPUTS)

  np.testing.assert_array_equal(decode(), case[5])
  np.testing.assert_array_equal(decode(beam_size=3), case[6])
