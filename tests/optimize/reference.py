"""The optimizers in NumPy, float64."""

from __future__ import annotations

import numpy as np


def rate(lr, t):
  """A learning rate: a number, or a function of the step."""
  return lr(t) if callable(lr) else lr


class Rule:
  """An optimizer as one function: (w, g, the slots) -> (new w, the new slots).

  Args:
    rule: the function; slots begin with 0.
    *names: of the slots, as they follow the name of the weight.
  """

  def __init__(self, rule, *names):
    self._rule = rule
    self._slots = dict.fromkeys(names, 0.0)

  def step(self, w, g):
    w, *values = self._rule(w, g, *self._slots.values())
    self._slots = dict(zip(self._slots, values, strict=True))
    return w

  def slots(self):
    return self._slots


class Sgd(Rule):
  def __init__(self, lr):
    super().__init__(lambda w, g: (w - lr * g,))


class Momentum(Rule):
  def __init__(self, lr, momentum):
    super().__init__(self._step, "_momentum_v")
    self._lr, self._momentum, self._t = lr, momentum, 0

  def _step(self, w, g, v):
    v = rate(self._lr, self._t) * g + self._momentum * v
    self._t += 1
    return w - v, v


class Adam:
  def __init__(self, lr, weight_decay=0.0, beta_1=0.9, beta_2=0.999, epsilon=1e-6):
    self.lr, self.weight_decay, self.epsilon = lr, weight_decay, epsilon
    self.beta_1, self.beta_2 = beta_1, beta_2
    self.m = self.v = 0.0
    self.t = 0

  def step(self, w, g):
    lr = rate(self.lr, self.t)
    self.t += 1
    self.m = self.beta_1 * self.m + (1 - self.beta_1) * g
    self.v = self.beta_2 * self.v + (1 - self.beta_2) * g**2
    return w - lr * (self.m / (np.sqrt(self.v) + self.epsilon) + self.weight_decay * w)

  def slots(self):
    return {"/adam_m": self.m, "/adam_v": self.v}


def rms(x, axis=None):
  return np.sqrt(np.mean(np.square(x), axis, keepdims=axis is not None))


class Adafactor:
  """With axes instead of names: factored=(axis of d0, axis of d1), stacked=list of axes."""

  def __init__(
    self, lr=None, factored=None, stacked=(), scale=True, beta1=0.0, threshold=1.0, decay=None
  ):
    self.lr = lr or (lambda t: min((t + 1) ** -0.5, 0.01) * (1.0 if scale else 0.05))
    self.decay = decay or (lambda t: 1 - (t + 1) ** -0.8)
    self.factored, self.stacked, self.scale = factored, stacked, scale
    self.beta1, self.threshold = beta1, threshold
    self.vr = self.vc = self.v = self.m = 0.0
    self.t = 0

  def step(self, w, g):
    lr, rho = self.lr(self.t), self.decay(self.t)
    self.t += 1
    q = g**2 + 1e-30
    if self.factored is None:
      self.v = rho * self.v + (1 - rho) * q
      x = g / np.sqrt(self.v)
    else:
      a0, a1 = self.factored
      self.vr = rho * self.vr + (1 - rho) * q.mean(a0, keepdims=True)
      self.vc = rho * self.vc + (1 - rho) * q.mean(a1, keepdims=True)
      x = g / np.sqrt(self.vr / self.vr.mean(a1, keepdims=True)) / np.sqrt(self.vc)
    if self.threshold is not None:
      x = x / max(1.0, rms(x) / self.threshold)
    scale = lr
    if self.scale:
      axes = tuple(i for i in range(w.ndim) if i not in self.stacked)
      scale = lr * np.maximum(rms(w, axes), 1e-3)
    delta = x * scale
    if self.beta1:
      self.m = delta = self.beta1 * self.m + (1 - self.beta1) * delta
    return w - delta

  def slots(self):
    if self.factored is None:
      slots = {"_slot_v": self.v}
    else:
      slots = {
        "_slot_vr": self.vr.squeeze(self.factored[0]),
        "_slot_vc": self.vc.squeeze(self.factored[1]),
      }
    return {**slots, "_slot_m": self.m} if self.beta1 else slots
