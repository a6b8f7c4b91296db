"""Hyperparameters of a mixture of experts, as an attribute bag."""

from __future__ import annotations

from typing import Any

# What the layers take for hyperparameters that a bag does not have.
_DEFAULTS = dict(
  moe_gating="top_2",
  moe_num_experts=16,
  moe_loss_coef=1e-2,
  moe_hidden_size=4096,
  moe_group_size=1024,
  moe_min_expert_capacity=4,
  moe_capacity_factor_train=1.25,
  moe_capacity_factor_eval=2.0,
  moe_capacity_factor_second_level=1.0,
  moe_use_second_place_loss=False,
  moe_second_policy_train="random",
  moe_second_policy_eval="random",
  moe_second_threshold_train=0.2,
  moe_second_threshold_eval=0.2,
  moe_dropout_rate=0.0,
  moe_switch_policy_train="input_jitter",
  moe_switch_policy_eval="input_jitter",
  moe_switch_dropout=0.1,
  moe_switch_temperature=1.0,
  moe_switch_jitter=1e-2,
  moe_output_dim=None,
  moe_ntlb_top_k=4,
  moe_use_experts_attention=False,
  moe_z_loss=None,
  moe_word_embed_mode=None,
  moe_use_second_place_expert_prob=None,
  moe_use_second_place_expert_prob_temp=None,
  moe_top_n_num_experts_per_token=3,
  moe_summaries=False,
  moe_dropless=False,
  moe_num_shared_experts=0,
  moe_router_scores="softmax",
  moe_normalize_gates=True,
  moe_gate_scale=1.0,
  moe_balance_rate=None,
)


class HParams:
  """A bag of attributes.

  Args:
    **kwargs: the attributes.
  """

  def __init__(self, **kwargs: Any):
    for k, v in kwargs.items():
      self.add_hparam(k, v)

  def add_hparam(self, k: str, v: object) -> None:
    """Sets an attribute."""
    setattr(self, k, v)

  def __repr__(self) -> str:
    return f"HParams({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


def hparam(hparams: object, name: str) -> Any:
  """The hyperparameter `moe_<name>`, or its default if the bag does not have it.

  Args:
    hparams: any object with attributes.
    name: without the prefix.
  """
  return getattr(hparams, f"moe_{name}", _DEFAULTS[f"moe_{name}"])


def hparam_of_mode(hparams: object, name: str, train: bool) -> Any:
  """The hyperparameter `moe_<name>_train` or `moe_<name>_eval`.

  Args:
    hparams: any object with attributes.
    name: without prefix and suffix.
    train: whether the layer is being trained.
  """
  return hparam(hparams, f"{name}_{'train' if train else 'eval'}")


def set_default_moe_hparams(hparams: Any) -> None:
  """Gives an object the hyperparameters of a mixture of experts with their defaults.

  Args:
    hparams: an object with a method `add_hparam(name, value)`.
  """
  hparams.moe_num_experts = 16
  hparams.moe_loss_coef = 1e-2
  hparams.add_hparam("moe_gating", "top_2")
  # Slots of an expert, in multiples of the tokens it would have if all had equally many.
  hparams.add_hparam("moe_capacity_factor_train", 1.25)
  hparams.add_hparam("moe_capacity_factor_eval", 2.0)
  hparams.add_hparam("moe_capacity_factor_second_level", 1.0)
  hparams.add_hparam("moe_hidden_size", 4096)
  hparams.add_hparam("moe_group_size", 1024)
  hparams.add_hparam("moe_use_second_place_loss", 0)
  hparams.add_hparam("moe_second_policy_train", "random")
  hparams.add_hparam("moe_second_policy_eval", "random")
  hparams.add_hparam("moe_second_threshold_train", 0.2)
  hparams.add_hparam("moe_second_threshold_eval", 0.2)
