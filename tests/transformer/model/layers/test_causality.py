"""No layer of an autoregressive model sees later tokens, but those that are told to."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import heterogeneous_moe, moe, transformer
from mesh_tensorflow.transformer import transformer_layers as t
from mesh_tensorflow.transformer.model.moe.layer import ExpertsLayer
from mesh_tensorflow.transformer.model.moe.router import NONCAUSAL, ROUTERS
from tests.transformer import decode_program as program
from tests.transformer import lm_program as lm
from tests.transformer.model.layers import test_layer_decoding as decoding
from tests.transformer.model.layers import test_layer_inventories as inventories

DRAWS = 3
# Room for all choices: a second choice would otherwise wait for the first ones of later tokens.
ROOM = dict(hidden_size=5, capacity_factor_train=8.0, capacity_factor_eval=8.0)
TWO_LEVELS = dict(expert_x=2, expert_y=2, capacity_factor_second_level=8.0, **ROOM)
EXPERTS = (ExpertsLayer, t.ExpertsSelfAttention)
LAYERS = [
  *[case[:2] for case in inventories.LAYERS if not issubclass(case[0], EXPERTS)],
  *[case[:2] for case in decoding.CASES.values()],
  *[(moe.MoE1D, dict(moe_gating=g, num_experts=3, **ROOM)) for g in set(ROUTERS) - NONCAUSAL],
  (heterogeneous_moe.HeterogeneousMoE1D, dict(moe_gating="switch", num_experts=3, **ROOM)),
  (moe.MoE2D, TWO_LEVELS),
]
# Plain convolutions reach as far to the right as to the left, as in the archived library.
BOTH_SIDES = (t.Conv1DLayer, dict(filter_size=3, output_size=4))
NAMES = [f"{cls.__name__}-{i}" for i, (cls, _) in enumerate(LAYERS)]


def moves(cls, kwargs, seed):
  """Whether logits of positions before later tokens change with these, in any of some draws."""
  model = program.make_model(cls, kwargs)
  with_encoder = "EncDec" in cls.__name__

  def logits(tokens, *encoder):
    one = mtf.ones(tokens.mesh, tokens.shape, dtype=np.int32)
    arguments = program._encoder(*encoder, with_encoder)
    inputs = transformer.autoregressive_inputs(tokens)
    return model.call_simple(inputs, tokens, False, mode="eval", sequence_id=one, **arguments)[0]

  impl = lm.one_device()
  function = mtf.function(impl, input_signature=program.SIGNATURE)(logits)
  rng = np.random.default_rng(seed)
  with lm.eagerly():
    function(*program.ARGUMENTS)
    lm.set_golden_weights(impl.variable_store)
    before = function(*program.ARGUMENTS).numpy()
    for first in rng.integers(1, program.LENGTH, DRAWS):
      tokens = program.TOKENS.copy()
      tokens[:, first:] = rng.integers(2, 11, tokens[:, first:].shape)
      after = function(tokens, *program.ARGUMENTS[1:]).numpy()
      # Inputs are shifted: the logits of `first` are of the tokens before it.
      if np.abs(after - before)[:, : first + 1].max() > 1e-7:
        return True
      assert first + 1 == program.LENGTH or np.abs(after - before).max() > 1e-5
  return False


@pytest.mark.parametrize("i", range(len(LAYERS)), ids=NAMES)
def test_layers_see_no_later_token(i):
  assert moves(*LAYERS[i], seed=i) == (LAYERS[i] == BOTH_SIDES)


@pytest.mark.parametrize(
  ("cls", "kwargs"),
  [
    (moe.MoE1D, {}),
    (heterogeneous_moe.HeterogeneousMoE1D, {}),
    (t.ExpertsSelfAttention, dict(shared_kv=True, **decoding.DIMS)),
    (t.ExpertsEncDecAttention, dict(shared_kv=True, **decoding.DIMS)),
  ],
)
@pytest.mark.parametrize("gating", sorted(NONCAUSAL))
def test_experts_that_choose_tokens_are_refused_unless_asked_for(cls, kwargs, gating):
  few = dict(num_experts=2, hidden_size=5, capacity_factor_eval=0.5, min_expert_capacity=1)
  kwargs = dict(moe_gating=gating) | few | kwargs
  told = f"{cls.__name__}.*moe_gating '{gating}'.*later tokens.*{cls.__name__}.allow_noncausal"
  with pytest.raises(errors.ConfigError, match=told):
    moves(cls, kwargs, seed=0)
  assert moves(cls, kwargs | dict(allow_noncausal=True), seed=0)
