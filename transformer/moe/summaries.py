"""Scalar summaries of a router's decisions."""

from __future__ import annotations

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.moe.routing import Routing, scatter_add


def summarize_routing(
  name: str, routing: Routing, loss: mtf.Tensor, importance: mtf.Tensor | None
) -> None:
  """Reports statistics of a router through `mtf.scalar_summary`.

  `<name>/aux_loss`; `<name>/fraction_routed`, the fraction of tokens that got a slot;
  `<name>/expert_gate`, the mean gate of the slots in use; `<name>/experts/<i>`, the fraction of
  them that are expert i's.

  Args:
    name: of the router.
    routing: its decision.
    loss: its auxiliary loss, a scalar.
    importance: 0 for padding, of the dims of tokens; or None.
  """
  # Watching costs no backward pass.
  gates = mtf.stop_gradient(routing.gates_of_slots())
  used = mtf.cast(mtf.greater(gates, 0.0), tf.float32)
  of_experts = mtf.reduce_sum(used, output_shape=[routing.experts_dim])
  number = mtf.maximum(mtf.reduce_sum(of_experts), 1.0)
  tokens = mtf.Shape(routing.token_dims)
  # Counted by slots, of which a token may have several.
  slots_of_token = scatter_add(used, routing.token_of_slot(), tokens, routing.group_dim)
  routed = mtf.reduce_sum(mtf.cast(mtf.greater(slots_of_token, 0.0), tf.float32))
  if importance is None:
    fraction_routed = routed * (1.0 / tokens.size)
  else:
    counted = mtf.reduce_sum(mtf.cast(mtf.greater(importance, 0.0), tf.float32))
    fraction_routed = routed / mtf.maximum(counted, 1.0)
  mtf.scalar_summary(f"{name}/aux_loss", mtf.stop_gradient(loss))
  mtf.scalar_summary(f"{name}/fraction_routed", fraction_routed)
  mtf.scalar_summary(f"{name}/expert_gate", mtf.reduce_sum(gates) / number)
  for i, fraction in enumerate(mtf.unstack(of_experts / number, routing.experts_dim)):
    mtf.scalar_summary(f"{name}/experts/{i}", fraction)
