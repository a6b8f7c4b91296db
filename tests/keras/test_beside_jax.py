"""Programs with `keras.distribution` under TensorFlow beside the same ones under JAX."""

from __future__ import annotations

import importlib.util

import pytest

from tests.keras import beside_jax

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="jax is not installed: pip install jax"
  ),
]
QUICK = [c for c in beside_jax.CASES if c.name == "model parallel"]
OTHERS = [c for c in beside_jax.CASES if c not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [QUICK, pytest.param(OTHERS, marks=pytest.mark.long)])
def test_losses_are_those_under_jax(cases: list[beside_jax.Case]) -> None:
  for case, beside in zip(cases, beside_jax.both(cases)):
    assert beside.losses < beside_jax.TOLERANCE, case.name
    assert beside.predictions < 1e-4 and beside.weights < 1e-4, case.name
    assert beside.accuracies == 0.0, case.name
    assert beside.jax[-1] < beside.jax[0], case.name
