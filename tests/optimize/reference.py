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


class AdamW:
  """As PyTorch's documentation has it, line by line."""

  def __init__(
    self, lr, weight_decay=0.01, beta_1=0.9, beta_2=0.999, epsilon=1e-8, bias_correction=True
  ):
    self.lr, self.weight_decay, self.epsilon = lr, weight_decay, epsilon
    self.beta_1, self.beta_2, self.bias_correction = beta_1, beta_2, bias_correction
    self.m = self.v = 0.0
    self.t = 0

  def step(self, w, g):
    lr = rate(self.lr, self.t)
    self.t += 1
    w = w - lr * self.weight_decay * w
    self.m = self.beta_1 * self.m + (1 - self.beta_1) * g
    self.v = self.beta_2 * self.v + (1 - self.beta_2) * g**2
    m, v = self.m, self.v
    if self.bias_correction:
      m, v = m / (1 - self.beta_1**self.t), v / (1 - self.beta_2**self.t)
    return w - lr * m / (np.sqrt(v) + self.epsilon)

  def slots(self):
    return {"/adam_m": self.m, "/adam_v": self.v}


class Lion(Rule):
  def __init__(self, lr, weight_decay=0.0, beta_1=0.9, beta_2=0.99):
    super().__init__(self._step, "/lion_m")
    self._lr, self._weight_decay, self._betas = lr, weight_decay, (beta_1, beta_2)
    self._t = 0

  def _step(self, w, g, m):
    lr, (beta_1, beta_2) = rate(self._lr, self._t), self._betas
    self._t += 1
    w = w - lr * (np.sign(beta_1 * m + (1 - beta_1) * g) + self._weight_decay * w)
    return w, beta_2 * m + (1 - beta_2) * g


def newton_schulz(x, num_iterations=5, coefficients=(3.4445, -4.7750, 2.0315), epsilon=1e-7):
  """Of one matrix; as the post that introduces Muon has it, with the products in its order."""
  a, b, c = coefficients
  x = x / (np.linalg.norm(x) + epsilon)
  is_tall = x.shape[0] > x.shape[1]
  x = x.T if is_tall else x
  for _ in range(num_iterations):
    gram = x @ x.T
    x = a * x + (b * gram + c * gram @ gram) @ x
  return x.T if is_tall else x


class Muon(Rule):
  """
  Args:
    lr: a number, or a function of the step.
    matrices: turns an array into a list of matrices, and back: a pair of functions.
    scale: of the sizes of a matrix.
  """

  def __init__(
    self, lr, matrices, weight_decay=0.01, momentum=0.95, nesterov=True, scale=None, **options
  ):
    super().__init__(self._step, "/muon_m")
    self._lr, self._weight_decay, self._momentum = lr, weight_decay, momentum
    self._nesterov, self._options = nesterov, options
    self._cut, self._join = matrices
    self._scale = scale or (lambda rows, columns: 0.2 * max(rows, columns) ** 0.5)
    self._t = 0

  def _step(self, w, g, m):
    lr, mu = rate(self._lr, self._t), self._momentum
    self._t += 1
    m = mu * m + (1 - mu) * g
    u = mu * m + (1 - mu) * g if self._nesterov else m
    steps = [
      self._scale(*x.shape) * newton_schulz(x, **self._options) for x in self._cut(u)
    ]  # fmt: skip
    return w - lr * (self._join(steps, w.shape) + self._weight_decay * w), m


def one_matrix(rows=1):
  """The first axes are rows, the others columns."""
  return (
    lambda x: [x.reshape(int(np.prod(x.shape[:rows])), -1)],
    lambda xs, shape: xs[0].reshape(shape),
  )


def stacked_matrices(axis=0, rows=1):
  """A matrix for each index of an axis; of the other axes the first are rows."""
  cut, join = one_matrix(rows)
  return (
    lambda x: [cut(part)[0] for part in np.moveaxis(x, axis, 0)],
    lambda xs, shape: np.moveaxis(
      np.stack([join([x], [*shape[:axis], *shape[axis + 1 :]]) for x in xs]), 0, axis
    ),
  )
