"""Programs of several meshes on two workers of four devices; run by test_meshes_of_workers.py.

Each worker prints one line of JSON: the results of the cases that its arguments name, and the words
of errors. With the arguments "drawn" and two mesh shapes it draws layouts instead.
"""

from __future__ import annotations

import json
import math
import sys
from unittest import mock

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from docs.tools.resharding import blocks
from mesh_tensorflow import workers
from mesh_tensorflow.running import lowering
from tests.running.drawn_reshards import drawn

X = np.arange(32, dtype=np.float32).reshape(8, 4) / 7
STEPS = 3
# Of a mesh its shape, its layout, and (worker, device) of each processor.
FIRST = [(0, 0), (0, 1)]
SECOND = [(1, 1), (1, 2)]
BOTH = [(0, 2), (0, 3), (1, 2), (1, 3)]
CASES = {
  "a mesh each": (("m:2", "x:m", FIRST), ("m:2", "y:m", SECOND)),
  "one device and four": (("", "", [(0, 0)]), ("m:2,n:2", "y:m,x:n", [(1, i) for i in range(4)])),
  "the second first, uneven": (("m:2", "x:m", SECOND), ("m:3", "x:m~", [(0, i) for i in range(3)])),
  "from one to both, replicas": (("m:2", "x:m", FIRST), ("m:2,n:2", "y:n", BOTH)),
  "both span the workers": (("m:2", "x:m", [(0, 0), (1, 1)]), ("m:2,n:2", "y:n", BOTH)),
}


def program(x):
  """Forward, backward, updates, random numbers, a loop through both meshes."""
  w = mtf.get_variable(x.mesh, "w", x.shape)
  h = mtf.reshard(mtf.square(x) * w, "b")
  v = mtf.get_variable(h.mesh, "v", h.shape)
  loss = mtf.reduce_sum(mtf.sin(h) * v)
  gradients = mtf.gradients([loss], [x, w, v])
  dropped = mtf.dropout(mtf.cast(h, tf.bfloat16), True, keep_prob=0.5)
  back = mtf.reshard(dropped, "a")
  signs = mtf.reshard(mtf.greater(h, 1.0), "a")
  n = mtf.constant(x.mesh, 0, dtype=tf.int32)

  def once_more(i, y):
    return i + 1, mtf.reshard(mtf.reshard(y, "b") * 1.5, "a") + 1.0

  _, y = mtf.while_loop(lambda i, y: mtf.less(i, 4), once_more, [n, x])
  for variable, gradient in zip((w, v), gradients[1:]):
    mtf.assign(variable.operation, variable - 0.1 * gradient)
  return [loss, *gradients, h, mtf.cast(back, tf.float32), signs, y]


def results(meshes, store):
  """What the program returns in each step, and the variables after the last."""
  f = mtf.function(meshes, [mtf.TensorSpec([("x", 8), ("y", 4)])])(program)
  returned = [[t.numpy().tolist() for t in f(X)] for _ in range(STEPS)]
  variables = {v.name: v.gathered().tolist() for v in store}

  @mtf.function(meshes, [mtf.TensorSpec([("x", 8), ("y", 4)])])
  def taped(x):
    return mtf.reduce_sum(mtf.sin(mtf.reshard(x * mtf.get_variable(x.mesh, "w", x.shape), "b")))

  x = tf.constant(X)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = taped(x)
  by_tape = tape.gradient(y, x).numpy().tolist()
  return {"returned": returned, "variables": variables, "by_tape": by_tape}


def on_workers(*meshes):
  store = mtf.VariableStore()
  impls = {}
  for name, (shape, layout, devices) in zip("ab", meshes):
    names = [f"/job:worker/replica:0/task:{w}/device:CPU:{i}" for w, i in devices]
    impls[name] = mtf.simd_mesh_impl.SimdMeshImpl(shape, layout, names, variable_store=store)
  return impls, store


def bytes_missing(worker, source, target, shape):
  """The least number of bytes that a worker must get, by NumPy."""
  whole = np.arange(shape.size).reshape(shape.to_integer_list)

  def own(impl):
    found = blocks(impl, whole, shape)
    return [x for p in impl.processors_of_workers[worker] for x in found[p].ravel()]

  return 4 * np.setdiff1d(own(target), own(source)).size


def of_drawn_layouts(source, target, across, every):
  """Checks values and gradients, there and back; what this worker gets.

  Args:
    source: shape of the mesh "a".
    target: shape of the mesh "b".
    across: whether each mesh has devices of both workers, or of one.
    every: see `drawn`.

  Returns:
    The number of tensors, the bytes received, and the least that there must be.
  """
  tensors = drawn(source, target, every)
  of = []
  for i, (shape, layout) in enumerate([(source, tensors.source), (target, tensors.target)]):
    numbers = range(mtf.convert_to_shape(shape).size)
    of.append((shape, layout, [(n % 2 if across else i, n) for n in numbers]))
  impls, _ = on_workers(*of)
  received, returning = 0, False
  receive, whole = tf.raw_ops.CollectiveBcastRecv, lowering.whole_everywhere

  def counted(**arguments):
    nonlocal received
    received += 0 if returning else math.prod(arguments["shape"]) * arguments["T"].size
    return receive(**arguments)

  def returned(*args):
    nonlocal returning
    returning = True
    try:
      return whole(*args)
    finally:
      returning = False

  with mock.patch.object(tf.raw_ops, "CollectiveBcastRecv", counted):
    with mock.patch.object(lowering, "whole_everywhere", returned):
      checked = tensors.check(impls)
  a, b = impls.values()
  me = workers.current().index
  least = sum(bytes_missing(me, *way, s) for s in tensors.shapes for way in ((a, b), (b, a)))
  return checked, received, least


def error_of(function, *args):
  try:
    function(*args)
  except mtf.errors.MeshError as e:
    return f"{type(e).__name__}: {e}"
  return "no error"


def all_drawn_layouts(source: str, target: str) -> None:
  """Every pair of layouts of two meshes: one in each worker, and both across the two."""
  workers.join(virtual_cpu_devices=8)
  found = {
    f"drawn{', across' if across else ''}": of_drawn_layouts(source, target, across, every=True)
    for across in (False, True)
  }
  print(json.dumps(found), flush=True)
  workers.leave()


def main(*cases: str) -> None:
  me = workers.join(virtual_cpu_devices=4).index
  found = {name: results(*on_workers(*CASES[name])) for name in cases}
  for across in (False, True):
    key = f"drawn{', across' if across else ''}"
    found[key] = of_drawn_layouts("s:2,t:2", "u:2,v:2", across, every=False)
  spec = [mtf.TensorSpec([("x", 8), ("y", 4)])]
  impls, store = on_workers(*CASES["a mesh each"])

  def different(x):
    return mtf.reshard(x * 2.0 if me else x + 1.0, "b")

  found["different programs"] = error_of(mtf.function(impls, spec)(different), X)
  own = mtf.PlacementMeshImpl("", "", ["CPU:0"], variable_store=store)
  mixed = mtf.function({"a": impls["a"], "b": own}, spec)(lambda x: mtf.reshard(x, "b"))
  found["with a mesh of its own"] = error_of(mixed, X)
  # The mesh of one worker alone is its own affair; another worker cannot run it.
  alone = mtf.function(impls["b"], spec)(lambda x: x + 1.0)
  found["alone"] = error_of(alone, X)
  graph = mtf.Graph()
  variable = mtf.get_variable(mtf.Mesh(graph, "a"), "u", [("x", 8)]).operation
  other = mtf.get_variable(mtf.Mesh(graph, "b"), "z", [("x", 8)]).operation
  mtf.Lowering(graph, {variable.mesh: impls["a"], other.mesh: impls["b"]})
  found["devices"] = [error_of(lambda v=v: v.master_device) for v in (variable, other)]
  print(json.dumps(found), flush=True)
  workers.leave()


if __name__ == "__main__":
  all_drawn_layouts(*sys.argv[2:]) if sys.argv[1] == "drawn" else main(*sys.argv[1:])
