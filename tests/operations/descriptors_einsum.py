"""Einsum, matmul, transpose, and what is built on them."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)
AB, BC = "a:4 b:8", "b:8 c:12"
INTEGERS = T(AB, -9, 10, "int32")
UNION = "a:4 b:8 c:12"


def _einsum(equation):
  return lambda *xs: np.einsum(equation, *xs)


def _cumsum(axis, exclusive=False):
  return lambda x: np.cumsum(x, axis) - (x if exclusive else 0)


DESCRIPTORS = [
  op("einsum", lambda x, y: mtf.einsum([x, y], [A, C]), _einsum("ab,bc->ac"), AB, BC,
     together=UNION),
  op("einsum_default", lambda x, y: mtf.einsum([x, y]), _einsum("ab,bc->ac"), AB, BC,
     together=UNION),
  op("einsum_transposed", lambda x, y: mtf.einsum([x, y], [C, A]), _einsum("ab,bc->ca"), AB, BC,
     together=UNION),
  op("einsum_reduced_dims", lambda x, y: mtf.einsum([x, y], reduced_dims=[A]),
     _einsum("ab,bc->bc"), AB, BC, together=UNION),
  op("einsum_batch", lambda x, y: mtf.einsum([x, y], [A, B, C]), _einsum("abd,adc->abc"),
     "a:4 b:8 d:16", "a:4 d:16 c:12", together="a:4 b:8 d:16 c:12"),
  op("einsum_batch_mixed", lambda x, y: mtf.einsum([x, y], [B, C, A]), _einsum("bad,dca->bca"),
     "b:8 a:4 d:16", "d:16 c:12 a:4", together="a:4 b:8 d:16 c:12"),
  op("einsum_two_reduced", lambda x, y: mtf.einsum([x, y], [A]), _einsum("abd,bd->a"),
     "a:4 b:8 d:16", "b:8 d:16"),
  op("einsum_sum_one_sided", lambda x, y: mtf.einsum([x, y], [A]), _einsum("ab,bc->a"), AB, BC,
     together=UNION),
  op("einsum_one_input", lambda x: mtf.einsum([x], [B]), _einsum("ab->b"), AB),
  op("einsum_to_scalar", lambda x: mtf.einsum([x, x], []), lambda x: np.sum(x * x), AB),
  op("einsum_self_default", lambda x: mtf.einsum([x, x]), lambda x: np.sum(x * x), AB),
  op("einsum_elementwise", lambda x, y: mtf.einsum([x, y], [A, B]), _einsum("ab,ab->ab"), AB, AB),
  op("einsum_outer", lambda x, y: mtf.einsum([x, y], [A, B]), _einsum("a,b->ab"), "a:4", "b:8"),
  op("einsum_new_dim", lambda x, y: mtf.einsum([x, y], [C, A]),
     lambda x, y: np.repeat(np.einsum("ab,b->a", x, y)[None], 12, 0), AB, "b:8",
     gradient_together=UNION),
  op("einsum_three", lambda x, y, z: mtf.einsum([x, y, z], [A, C]), _einsum("ab,bc,c->ac"), AB, BC,
     "c:12", together=UNION),
  op("einsum_three_chain", lambda x, y, z: mtf.einsum([x, y, z], [A, mtf.Dimension("d", 16)]),
     _einsum("ab,bc,cd->ad"), AB, BC, "c:12 d:16", together="a:4 b:8 c:12 d:16"),
  op("einsum_scalar_factor", lambda x, y: mtf.einsum([x, y], [A, B]), lambda x, y: x * y, AB, ""),
  op("einsum_int", lambda x, y: mtf.einsum([x, y], [A, C]), _einsum("ab,bc->ac"), INTEGERS,
     T(BC, -9, 10, "int32"), together=UNION),
  op("attention_logits", lambda q, k: mtf.einsum([q, k], "n:4 h:2 q:8 m:8"),
     _einsum("nqhd,nmhd->nhqm"), "n:4 q:8 h:2 d:4", "n:4 m:8 h:2 d:4",
     together="n:4 q:8 h:2 d:4 m:8"),
  op("attention_output", lambda w, v: mtf.einsum([w, v], "n:4 q:8 h:2 d:4"),
     _einsum("nhqm,nmhd->nqhd"), "n:4 h:2 q:8 m:8", "n:4 m:8 h:2 d:4",
     together="n:4 q:8 h:2 d:4 m:8"),
  op("project_out", lambda x, w: mtf.einsum([x, w], "n:4 q:8 e:8"), _einsum("nqhd,hde->nqe"),
     "n:4 q:8 h:2 d:4", "h:2 d:4 e:8", together="n:4 q:8 h:2 d:4 e:8"),
  op("matmul", mtf.matmul, _einsum("ab,bc->ac"), AB, BC, together=UNION),
  op("matmul_output_shape", lambda x, y: mtf.matmul(x, y, output_shape=[C, A]),
     _einsum("ab,bc->ca"), AB, BC, together=UNION),
  op("transpose", lambda x: mtf.transpose(x, [B, A]), lambda x: x.T, AB),
  op("transpose_three", lambda x: mtf.transpose(x, "c:12 a:4 b:8"),
     lambda x: x.transpose(2, 0, 1), UNION),
  op("transpose_int", lambda x: mtf.transpose(x, [B, A]), lambda x: x.T, INTEGERS),
  op("transpose_bool", lambda x: mtf.transpose(x, [B, A]), lambda x: x.T, T(AB, dtype="bool")),
  op("pending_einsums_added",
     lambda x, y, z: mtf.einsum([x, y], [A, C]) + mtf.einsum([x, z], [A, C]),
     lambda x, y, z: x @ (y + z), AB, BC, BC, together=UNION),
  op("second_layer", lambda x, y, z: mtf.einsum([mtf.relu(mtf.einsum([x, y], [A, C])), z], [A, B]),
     lambda x, y, z: np.maximum(x @ y, 0) @ z, AB, BC, "c:12 b:8", together=UNION),
  op("cumsum", lambda x: mtf.cumsum(x, B), _cumsum(1), UNION),
  op("cumsum_first", lambda x: mtf.cumsum(x, A), _cumsum(0), AB),
  op("cumsum_exclusive", lambda x: mtf.cumsum(x, B, exclusive=True), _cumsum(1, True), AB),
  op("cumsum_int", lambda x: mtf.cumsum(x, B), _cumsum(1), INTEGERS),
]  # fmt: skip
