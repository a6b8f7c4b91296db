"""Recurrent layers: products, gates, lengths, and the order of positions, in NumPy."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from tests.conformance.framework import T, op

H = mtf.Dimension("h", 4)
X = T("b:4 length:4 d:4", -1, 1)
STATE = T("b:4 h:4", -1, 1)
LENGTHS = T("b:4", dtype="int32", values=[4, 1, 0, 3])


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def over(cell, x, states, lengths=None, backwards=False):
  """Outputs and last states of a cell over the positions of x [batch, length, ...]."""
  n = x.shape[1]
  lengths = np.full([len(x)], n) if lengths is None else lengths
  y = np.zeros([*x.shape[:2], states[0].shape[-1]])
  last = [np.array(s) for s in states]
  for b in range(len(x)):
    h = [s[b] for s in states]
    order = range(lengths[b])
    for i in reversed(order) if backwards else order:
      h = cell(x[b, i], h)
      y[b, i] = h[0]
    if lengths[b] and not backwards:
      y[b, lengths[b] :] = h[0]
    for s, value in zip(last, h):
      s[b] = value
  return [y, *last]


def lstm(x, h, c, k, r, b, **kwargs):
  def cell(x, states):
    h, c = states
    i, f, g, o = np.einsum("d,dgh->gh", x, k) + np.einsum("j,jgh->gh", h, r) + b
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return [sigmoid(o) * np.tanh(c), c]

  return over(cell, x, [h, c], **kwargs)


def gru(x, h, k, r, b, b2, **kwargs):
  def cell(x, states):
    (h,) = states
    x_z, x_r, x_g = np.einsum("d,dgh->gh", x, k) + b
    h_z, h_r, h_g = np.einsum("j,jgh->gh", h, r) + b2
    z, reset = sigmoid(x_z + h_z), sigmoid(x_r + h_r)
    return [z * h + (1 - z) * np.tanh(x_g + reset * h_g)]

  return over(cell, x, [h], **kwargs)


def simple(x, k, r, b, **kwargs):
  return over(lambda x, h: [np.tanh(x @ k + h[0] @ r + b)], x, [np.zeros([4, 4])], **kwargs)


def flat(result):
  y, states = result
  return [y, *(states if isinstance(states, tuple) else [states])]


def weights(kind, gates):
  """The variables of a layer, small enough for finite differences."""
  shapes = {"kernel": f"d:4 {gates} h:4", "recurrent_kernel": f"_h:4 {gates} h:4"}
  shapes["bias"] = f"{gates} h:4"
  if kind == "gru":
    shapes["recurrent_bias"] = f"{gates} h:4"
  return {f"{kind}/{name}": T(dims, -0.5, 0.5) for name, dims in shapes.items()}


MEETING = ("b:4 length:4 d:4 h:4", "b:4 _h:4 h:4")
DESCRIPTORS = [
  op(
    "lstm",
    lambda x, h, c: flat(layers.lstm(x, H, initial_state=[h, c])),
    lstm,
    X,
    STATE,
    STATE,
    variables=weights("lstm", "lstm_gates:4"),
    unsplit=("lstm_gates",),
    together=MEETING,
  ),
  op(
    "gru_lengths",
    lambda x, h, n: flat(layers.gru(x, H, lengths=n, initial_state=h)),
    lambda x, h, n, *w: gru(x, h, *w, lengths=n),
    X,
    STATE,
    LENGTHS,
    variables=weights("gru", "gru_gates:3"),
    unsplit=("gru_gates",),
    together=MEETING,
  ),
  op(
    "simple_rnn_backwards",
    lambda x: flat(layers.simple_rnn(x, H, go_backwards=True)),
    lambda x, *w: simple(x, *w, backwards=True),
    X,
    variables=weights("simple_rnn", ""),
    together=MEETING,
  ),
]
