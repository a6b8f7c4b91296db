"""Mixtures of experts in NumPy: token by token, without slots being filled."""

from __future__ import annotations

from typing import Any

import numpy as np


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
  e = np.exp(x - x.max(axis, keepdims=True))
  return e / e.sum(axis, keepdims=True)


def relu(x: np.ndarray) -> np.ndarray:
  return np.maximum(x, 0.0)


class Slots:
  """The slots of the experts for one group; tokens take them as they come."""

  def __init__(self, tokens: int, experts: int, capacity: int):
    self.combine = np.zeros([tokens, experts, capacity])
    self.taken = [0] * experts
    self.capacity = capacity

  def take(self, token: int, expert: int, gate: float) -> bool:
    if self.taken[expert] == self.capacity:
      return False
    self.combine[token, expert, self.taken[expert]] = gate
    self.taken[expert] += 1
    return True


def top_n(p, importance, capacity, n=2, policy="all", threshold=0.2, second_loss=False, **_):
  """top_2 (n = 2) and top_n; importance 1 or 0."""
  tokens, experts = p.shape
  order = np.argsort(-p, axis=1, kind="stable")[:, :n]
  gates = np.take_along_axis(p, order, 1) * importance[:, None]
  if n > 1:
    gates = gates / (gates.sum(1, keepdims=True) + 1e-9)
  chosen = np.zeros([n, tokens, experts])
  for s in range(tokens):
    for k in range(n):
      chosen[k, s, order[s, k]] = importance[s]
  loss = np.mean((p * importance[:, None]).mean(0) * chosen[0].mean(0)) * experts**2
  if second_loss:
    others = p * (1 - chosen[0])
    others = others / (others.sum(1, keepdims=True) + 1e-9)
    loss += 0.5 * np.mean(others.mean(0) * chosen[1].mean(0)) * experts**2
  slots = Slots(tokens, experts, capacity)
  for k in range(n):
    for s in range(tokens):
      kept = k == 0 or policy == "all" or (policy == "threshold" and gates[s, k] > threshold)
      if importance[s] and kept:
        slots.take(s, order[s, k], gates[s, k])
  return slots.combine, loss


def top_k(logits, importance, capacity, n=2, scores="softmax", normalize=True, scale=1.0,
          bias=None, **_):  # fmt: skip
  tokens, experts = logits.shape
  p = softmax(logits) if scores == "softmax" else 1 / (1 + np.exp(-logits))
  preferred = p if bias is None else p + bias
  order = np.argsort(-preferred, axis=1, kind="stable")[:, :n]
  gates = np.take_along_axis(p, order, 1)
  if normalize:
    gates = gates / gates.sum(1, keepdims=True)
  chosen = np.zeros([tokens, experts])
  np.put_along_axis(chosen, order, 1.0, 1)
  chosen *= importance[:, None]
  shares = p / p.sum(1, keepdims=True) * importance[:, None]
  loss = np.mean(shares.mean(0) * chosen.mean(0) / n) * experts**2 if bias is None else 0.0
  slots = Slots(tokens, experts, capacity)
  for k in range(n):
    for s in range(tokens):
      if importance[s]:
        slots.take(s, order[s, k], gates[s, k] * scale)
  return slots.combine, loss


def top_2_of_slots(p, importance, capacity):
  """top_2 with importance 1, 0.5 (only a second choice: the best expert) or 0."""
  tokens, experts = p.shape
  slots, first = Slots(tokens, experts, capacity), np.zeros(p.shape)
  second = []
  for s in range(tokens):
    order = np.argsort(-p[s], kind="stable")
    if importance[s] == 1:
      first[s, order[0]] = 1
      total = p[s, order[0]] + p[s, order[1]] + 1e-9
      slots.take(s, order[0], p[s, order[0]] / total)
      second.append((s, order[1], p[s, order[1]] / total))
    elif importance[s] == 0.5:
      second.append((s, order[0], p[s, order[0]] / (p[s, order[0]] + 1e-9)))
  for s, e, gate in second:
    slots.take(s, e, gate)
  proxy = (p * (importance == 1)[:, None]).mean(0)
  return slots.combine, np.mean(proxy * first.mean(0)) * experts**2


def switch_loss(p, chosen, importance):
  """`chosen`: for each token one expert, or several."""
  tokens, experts = p.shape
  density = np.stack([(chosen == e).mean(0) for e in range(experts)], -1)
  return np.mean(density * p.mean(0)) * importance.mean() * experts**2


def switch(p, importance, capacity, **_):
  slots = Slots(*p.shape, capacity)
  for s in range(len(p)):
    if importance[s]:
      slots.take(s, p[s].argmax(), p[s].max())
  return slots.combine, switch_loss(p, p.argmax(1), importance)


def switch_max(p, importance, capacity, **_):
  combine = np.zeros([*p.shape, capacity])
  for e in range(p.shape[1]):
    own = [s for s in range(len(p)) if importance[s] and p[s].argmax() == e]
    for c, s in enumerate(sorted(own, key=lambda s: -p[s, e])[:capacity]):
      combine[s, e, c] = p[s, e]
  return combine, switch_loss(p, p.argmax(1), importance)


def ntlb(p, importance, capacity, top_k=2, **_):
  slots = Slots(*p.shape, capacity)
  order = np.argsort(-p, axis=1, kind="stable")[:, :top_k]
  left = [s for s in range(len(p)) if importance[s]]
  for k in range(top_k):
    left = [s for s in left if not slots.take(s, order[s, k], p[s, order[s, k]])]
  return slots.combine, switch_loss(p, order, importance)


def expert_selection(logits, importance, capacity, **_):
  tokens, experts = logits.shape
  p = softmax(logits - 1e9 * (importance == 0)[:, None], 0)
  combine = np.zeros([tokens, experts, capacity])
  for e in range(experts):
    for c, s in enumerate(np.argsort(-p[:, e], kind="stable")[:capacity]):
      combine[s, e, c] = p[s, e]
  # Slots are taken even where the gate is nearly zero.
  best = [set(np.argsort(-p[:, e], kind="stable")[:capacity]) for e in range(experts)]
  number = np.array([sum(s in b for b in best) for s in range(tokens)])
  combine /= np.maximum(number, 1)[:, None, None]
  loss = tokens * np.mean((p.mean(1) * importance) ** 2 * importance.sum())
  return combine, loss


GATINGS = {
  "top_2": top_n,
  "top_n": top_n,
  "top_k": top_k,
  "switch": switch,
  "switch_max": switch_max,
  "ntlb": ntlb,
  "expert_selection": expert_selection,
}


def route(
  gating: str,
  x: np.ndarray,
  kernel: np.ndarray,
  capacity: int,
  importance: np.ndarray | None = None,
  **options: Any,
) -> tuple[np.ndarray, float]:
  """A router on groups of tokens.

  Args:
    gating: its name.
    x: `[groups, tokens, d]`.
    kernel: `[d, experts]`.
    capacity: slots of an expert for a group.
    importance: `[groups, tokens]`: 1 or 0; None: 1.
    **options: of the router.

  Returns:
    (combine, loss): `[groups, tokens, experts, slots]`; the mean of the groups' losses.
  """
  if importance is None:
    importance = np.ones(x.shape[:2])
  logits = x @ kernel
  scores = logits if gating in ("expert_selection", "top_k") else softmax(logits)
  found = [GATINGS[gating](p, i, capacity, **options) for p, i in zip(scores, importance)]
  loss = np.mean([loss for _, loss in found])
  if options.get("z_loss"):
    lse = np.log(np.exp(logits).sum(-1))
    loss += options["z_loss"] * (lse**2 * importance).sum() / importance.sum()
  return np.stack([combine for combine, _ in found]), loss


def feed_forward(x: np.ndarray, wi: np.ndarray, wo: np.ndarray) -> np.ndarray:
  """All experts on all rows: `[..., experts, d]`."""
  return np.einsum("...eh,ehd->...ed", relu(np.einsum("...d,edh->...eh", x, wi)), wo)


def moe(
  gating: str,
  x: np.ndarray,
  kernel: np.ndarray,
  wi: np.ndarray,
  wo: np.ndarray,
  *,
  groups: int,
  capacity: int,
  importance: np.ndarray | None = None,
  loss_coef: float = 1e-2,
  shared: tuple[np.ndarray, np.ndarray] | None = None,
  **options: Any,
) -> tuple[np.ndarray, float]:
  """The layer: `[..., d]` to (`[..., d]`, loss); `shared`: matrices of shared experts."""
  rows = x.reshape(groups, -1, x.shape[-1])
  if importance is not None:
    importance = importance.reshape(groups, -1)
  combine, loss = route(gating, rows, kernel, capacity, importance, **options)
  y = np.einsum("gse,gsed->gsd", combine.sum(-1), feed_forward(rows, wi, wo))
  if shared is not None:
    y = y + relu(rows @ shared[0]) @ shared[1]
  return y.reshape(*x.shape[:-1], wo.shape[-1]), loss * loss_coef


def rms_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def deep_experts(
  x: np.ndarray, layers: list[tuple[np.ndarray, ...]], mask: np.ndarray
) -> np.ndarray:
  """Stacks of masked feed-forward layers, expert by expert: `[..., experts, d]`.

  Args:
    x: `[..., d]`.
    layers: (wi, wo) `[experts, ...]` of the first layer, (wi, wo, scale of the norm) of others.
    mask: `[hidden, layers, experts]`.
  """

  def expert(e):
    y = None
    for i, (wi, wo, *scale) in enumerate(layers):
      z = rms_norm(y, *scale) if scale else x
      z = (relu(z @ wi[e]) * mask[:, i, e]) @ wo[e]
      y = y + z if scale else z
    return y

  return np.stack([expert(e) for e in range(mask.shape[-1])], -2)


def moe_2d(
  x: np.ndarray,
  outer: np.ndarray,
  inner: np.ndarray,
  wi: np.ndarray,
  wo: np.ndarray,
  *,
  groups: int,
  capacity: int,
  groups_y: int,
  capacity_y: int,
  loss_coef: float = 1e-2,
) -> tuple[np.ndarray, float]:
  """The layer of two levels, `groups` and `groups_y` in all; second policy "all"."""
  rows = x.reshape(groups, -1, x.shape[-1])
  combine, loss = route("top_2", rows, outer, capacity)
  gates = combine.sum(1)
  contents = np.einsum("gsec,gsd->egcd", combine != 0, rows)
  results, losses = np.zeros([*contents.shape[:-1], wo.shape[-1]]), []
  for e in range(len(contents)):
    slots = contents[e].reshape(groups_y, -1, x.shape[-1])
    importance = 0.5 * ((gates[:, e] > 0.5) + 1.0 * (gates[:, e] > 0))
    found = [
      top_2_of_slots(softmax(s @ inner[e]), i, capacity_y)
      for s, i in zip(slots, importance.reshape(groups_y, -1))
    ]
    inner_combine = np.stack([c for c, _ in found]).sum(-1)
    y = np.einsum("gse,gsed->gsd", inner_combine, feed_forward(slots, wi[:, e], wo[:, e]))
    results[e] = y.reshape(results[e].shape)
    losses += [loss for _, loss in found]
  y = np.einsum("gsec,egcd->gsd", combine, results)
  return y.reshape(*x.shape[:-1], wo.shape[-1]), (loss + np.mean(losses)) * loss_coef
