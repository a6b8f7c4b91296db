"""Golden values of the TF1 library for language models with experts."""

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.model.moe.router import NONCAUSAL
from tests.transformer import lm_program as lm
from tests.transformer import moe_program

# Train loss, eval loss, squared gradient, logits[0, 0, :4], logits[1, 1, :4].
CASES = {
  "switch": (
    (1.397528, 1.397160, 7.370735),
    [0.61461, -0.41661, 0.17047, 0.09537],
    [0.21703, 0.05859, -0.32744, 0.55845],
  ),
  "top_2": (
    (1.389393, 1.364195, 6.091433),
    [0.61603, -0.42028, 0.17597, 0.08868],
    [-0.09492, 0.30703, -0.48366, 0.60438],
  ),
  "top_n": (
    (1.389105, 1.363335, 7.477736),
    [0.61611, -0.42050, 0.17630, 0.08827],
    [-0.13263, 0.33300, -0.49488, 0.59958],
  ),
  "ntlb": (
    (1.397488, 1.397121, 7.364138),
    [0.61461, -0.41661, 0.17047, 0.09537],
    [0.21703, 0.05859, -0.32744, 0.55845],
  ),
  "switch_max": (
    (1.397528, 1.397160, 7.370735),
    [0.61461, -0.41661, 0.17047, 0.09537],
    [0.21703, 0.05859, -0.32744, 0.55845],
  ),
  "expert_selection": (
    (1.394348, 1.393716, 11.086594),
    [0.61455, -0.41646, 0.17024, 0.09565],
    [0.08427, 0.17174, -0.40790, 0.59693],
  ),
}
MESHES = {
  "one device": ("all:1", ""),
  "experts": ("cols:3", "experts:cols"),
}
RUNS = [(gating, "one device") for gating in CASES]
RUNS += [(gating, "experts") for gating in ("top_2", "switch_max")]


@pytest.mark.parametrize("gating,mesh", RUNS)
def test_losses_logits_and_gradients(gating, mesh, cpu_devices):
  (train, evaluation, squared), first, second = CASES[gating]
  shape, layout = MESHES[mesh]
  impl = mtf.PlacementMeshImpl(shape, layout, cpu_devices[: mtf.convert_to_shape(shape).size])
  options = dict(num_experts=3, min_expert_capacity=2, moe_gating=gating, ntlb_top_k=2)
  options["allow_noncausal"] = gating in NONCAUSAL
  for mode in ("train", "eval"):
    options[f"switch_policy_{mode}"] = "argmax"
    options[f"second_policy_{mode}"] = "all"
  model = moe_program.make_model(options, layout=layout, mesh_shape=shape)
  store = lm.initialize(impl, model)
  lm.set_golden_weights(store)
  assert len([s for s in store if not s.name.startswith("_")]) == 21
  loss, _, grad = lm.run(impl, lm.loss_program(model), lm.TARGETS)
  np.testing.assert_allclose(loss, train, atol=2e-6)
  np.testing.assert_allclose(grad, squared, rtol=1e-5)
  loss, logits = lm.run(impl, lm.loss_program(model, "eval"), lm.TARGETS)
  np.testing.assert_allclose(loss, evaluation, atol=2e-6)
  np.testing.assert_allclose(logits[0, 0, :4], first, atol=3e-5)
  np.testing.assert_allclose(logits[1, 1, :4], second, atol=3e-5)
