"""Drawn convolutions on drawn meshes, against TensorFlow's on one device."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import LayoutError
from tests.operations.comparing import run, simd

MESHES = ("r:2", "r:3", "r:4", "r:2,c:2", "r:2,c:2,e:2", "r:8", "r:3,c:2")
SPACE = ("d", "h", "w")
BATCH = 12  # Each axis of the meshes that may split it divides it.


@dataclasses.dataclass
class Geometry:
  """A convolution and where it is split; `groups` is a number, or "depthwise"."""

  image: list[int]
  kernel: list[int]
  strides: list[int]
  dilations: list[int]
  padding: str | list[tuple[int, int]]
  groups: int | str
  channels: int
  features: int
  transposed: bool
  mesh: str
  layout: str

  @property
  def names(self):
    return SPACE[-len(self.image) :]


def draw(rng):
  """A geometry: filters of even sizes too, and often a halo that is wider than a block.

  Of those that must be refused three of four are drawn again.
  """
  while True:
    g = _draw(rng)
    if cause(g) is None or rng.random() < 0.25:
      return g


def _draw(rng):
  rank = int(rng.integers(1, 4))
  mesh = mtf.convert_to_shape(str(rng.choice(MESHES)))
  names = SPACE[-rank:]
  transposed = bool(rng.random() < 0.3)
  groups = [1, 1, 2, "depthwise"][rng.integers(4)]
  # At least one axis of the mesh splits space; the others split space, channels or the batch.
  first, *rest = rng.permutation(mesh.dimension_names)
  split = {str(rng.choice(names)): str(first)}
  # The filter of a transposed convolution has one group's part of the channels made, by their
  # name: too few to be split.
  others = ["b", "o"] if transposed and groups != 1 else ["b", "i", "o"]
  for axis in rest:
    name = str(rng.choice([*names, *names, *others]))
    split.setdefault(name, str(axis))
  parts = [mesh.get_dim_by_name(split[n]).size if n in split else 1 for n in names]
  kernel = [int(k) for k in rng.integers(1, 6 if rank < 3 else 4, rank)]
  strides = [int(s) for s in rng.choice([1, 1, 2, 3], rank)]
  dilations = [int(d) for d in rng.choice([1, 1, 1, 2, 3], rank)]
  padding = rng.choice(["SAME", "VALID", "pairs"], p=[0.5, 0.25, 0.25])
  if padding == "pairs":
    padding = [tuple(int(n) for n in rng.integers(0, 4, 2)) for _ in range(rank)]
  else:
    padding = str(padding)
  image = []
  for a, p in enumerate(parts):
    one = padding if isinstance(padding, str) else [padding[a]]
    # Several sizes are tried for one whose output can be split, too; the last is taken anyway.
    for _ in range(12):
      n = p * int(rng.integers(1, 6))
      made = _made(n, kernel[a], strides[a], dilations[a], one, transposed)
      if made > 0 and made % p == 0:
        break
    image.append(n)
  channels = int(rng.choice([6, 12])) if groups != 1 or "i" in split else int(rng.integers(1, 4))
  layout = ",".join(f"{d}:{m}" for d, m in split.items())
  return Geometry(
    image, kernel, strides, dilations, padding, groups, channels, 12, transposed, mesh_text(mesh),
    layout,
  )  # fmt: skip


def made_sizes(g):
  """The spatial sizes of the output; below 1 where nothing is left."""
  return [
    _made(*v, g.padding if isinstance(g.padding, str) else [g.padding[a]], g.transposed)
    for a, v in enumerate(zip(g.image, g.kernel, g.strides, g.dilations))
  ]


def parts_of(g):
  """By name of a split dimension, in how many blocks."""
  mesh = mtf.convert_to_shape(g.mesh)
  pairs = mtf.convert_to_layout_rules(g.layout).pairs
  return {name: mesh.get_dim_by_name(axis).size for name, axis in pairs}


def cause(g):
  """Why a geometry must be refused: a key of `CAUSES`; None if it must be computed."""
  sizes, parts = made_sizes(g), parts_of(g)
  if min(sizes) < 1:
    return "nothing left"
  if any(n % parts.get(name, 1) for name, n in zip(g.names, sizes)):
    return "not divisible"
  return None


CAUSES = {
  "nothing left": "nothing is left of the image",
  "not divisible": "the axis of the mesh does not divide the output's size",
}


def traits(g):
  """What is hard about a geometry, of that which is split."""
  found = set()
  sizes, parts = made_sizes(g), parts_of(g)
  # A transposed convolution is the gradient of one from its output to its input.
  images, features = (sizes, g.image) if g.transposed else (g.image, sizes)
  for a, name in enumerate(g.names):
    n = parts.get(name, 1)
    if n == 1:
      continue
    block, here = images[a] // n, features[a] // n
    reach = (g.kernel[a] - 1) * g.dilations[a] + 1
    before = _zeros(g, images)[a][0]
    begins = [i * here * g.strides[a] - before for i in range(n)]
    stretch = (here - 1) * g.strides[a] + reach
    halos = [max(i * block - b, b + stretch - (i + 1) * block) for i, b in enumerate(begins)]
    found |= {"halo"} if max(halos) > 0 else set()
    found |= {"wide"} if max(halos) > block else set()
    found |= {"unaligned"} if here * g.strides[a] != block else set()
  return found


def mesh_text(mesh):
  return ",".join(f"{d.name}:{d.size}" for d in mesh)


def _made(n, kernel, stride, dilation, padding, transposed):
  reach = (kernel - 1) * dilation + 1
  if padding == "SAME":
    return n * stride if transposed else -(-n // stride)
  before, after = (0, 0) if padding == "VALID" else padding[0]
  if transposed:
    if padding == "VALID":
      return n * stride + max(reach - stride, 0)
    return (n - 1) * stride + reach - before - after
  return (n + before + after - reach) // stride + 1


def _zeros(g, image):
  """The zeros that go around an image of these spatial sizes, from the rules of TensorFlow."""
  if g.padding == "VALID":
    return [(0, 0)] * len(image)
  if g.padding != "SAME":
    return g.padding
  zeros = []
  for n, k, s, d in zip(image, g.kernel, g.strides, g.dilations):
    total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
    zeros.append((total // 2, total - total // 2))
  return zeros


def _tf_convolution(g, image, kernel, groups):
  """TensorFlow's convolution of one rank, in float64, dilations by zeros in the filter."""
  rank = len(g.image)
  for axis, d in enumerate(g.dilations):
    first, *rest = tf.split(kernel, kernel.shape[axis], axis)
    between = [tf.zeros_like(first)] * (d - 1)
    kernel = tf.concat([first, *(t for part in rest for t in [*between, part])], axis)
  image = tf.pad(image, [(0, 0), *_zeros(g, image.shape[1 : rank + 1]), (0, 0)])
  convolve = {1: tf.nn.conv1d, 2: tf.nn.conv2d, 3: tf.nn.conv3d}[rank]
  strides = g.strides[0] if rank == 1 else [1, *g.strides, 1]
  parts = zip(tf.split(image, groups, -1), tf.split(kernel, groups, -1))
  return tf.concat([convolve(x, w, strides, "VALID") for x, w in parts], -1)


def _expected(g, x, kernel, groups, dy):
  """Output and gradients, as TensorFlow has them; of a transposed one by its definition."""
  x, kernel, dy = (tf.constant(a, tf.float64) for a in (x, kernel, dy))
  if not g.transposed:
    with tf.GradientTape() as tape:
      tape.watch([x, kernel])
      y = _tf_convolution(g, x, kernel, groups)
    return [y, *tape.gradient(y, [x, kernel], dy)]
  image = tf.zeros_like(dy)
  with tf.GradientTape() as outer:
    outer.watch([x, kernel])
    with tf.GradientTape() as tape:
      tape.watch(image)
      features = _tf_convolution(g, image, kernel, groups)
    y = tape.gradient(features, image, x)
  return [y, *outer.gradient(y, [x, kernel], dy)]


def check(g, seed, *, with_simd=False):
  """Compares values and gradients; what cannot be must be refused by a typed error.

  Returns:
    `cause` of the geometry.
  """
  rng = np.random.default_rng(seed)
  rank = len(g.image)
  groups = g.channels if g.groups == "depthwise" else g.groups
  inner = g.channels // groups
  x = rng.normal(size=[BATCH, *g.image, g.features if g.transposed else g.channels]).astype("f")
  kernel = rng.normal(size=[*g.kernel, inner, g.features]).astype("f")
  sizes, why = made_sizes(g), cause(g)
  if why == "nothing left":
    _check_nothing_left(g, x, kernel, groups)
    return why
  dy = rng.normal(size=[BATCH, *sizes, g.channels if g.transposed else g.features]).astype("f")
  ins, outs = ("o", "i") if g.transposed else ("i", "o")
  shape = [("b", BATCH), *zip(g.names, g.image), (ins, x.shape[-1])]
  # The part of the channels in a filter of groups is not the channels: it gets a name of its own.
  kernel_shape = [
    *((f"f{n}", k) for n, k in zip(g.names, g.kernel)),
    ("i" if groups == 1 else ("i" if g.transposed else "part"), inner),
    ("o", g.features),
  ]

  def build(m):
    X = mtf.import_tf_tensor(m, x, mtf.Shape([mtf.Dimension(*d) for d in shape]))
    K = mtf.import_tf_tensor(m, kernel, mtf.Shape([mtf.Dimension(*d) for d in kernel_shape]))
    y = mtf.convolution(
      X, K, g.strides, g.padding, g.dilations, groups=groups, transposed=g.transposed
    )
    assert y.shape.dimension_names == ["b", *g.names, outs]
    D = mtf.import_tf_tensor(m, dy, y.shape)
    return [y, *mtf.gradients([y], [X, K], [D])]

  try:
    got = run(build, g.layout, g.mesh)
    if with_simd:
      got += run(build, impl=simd(g.layout, g.mesh), in_function=True)
  except LayoutError as e:
    assert why == "not divisible", f"{e}: {g}"
    return why
  assert why is None, f"taken, though {CAUSES[why]}: {g}"
  want = _expected(g, x, kernel, groups, dy)
  for a, b in zip(got, want * 2):
    scale = max(1.0, float(np.abs(b).max()))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * scale, err_msg=str(g))
  assert rank == a.ndim - 2
  return None


def _check_nothing_left(g, x, kernel, groups):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  ins = "o" if g.transposed else "i"
  x = mtf.import_tf_tensor(mesh, x, [("b", BATCH), *zip(g.names, g.image), (ins, x.shape[-1])])
  names = [*(f"f{n}" for n in g.names), "i" if groups == 1 or g.transposed else "part", "o"]
  kernel = mtf.import_tf_tensor(mesh, kernel, list(zip(names, kernel.shape)))
  try:
    mtf.convolution(
      x, kernel, g.strides, g.padding, g.dilations, groups=groups, transposed=g.transposed
    )
  except mtf.ShapeError:
    return
  raise AssertionError(f"nothing is left of the image, but it was taken: {g}")


def check_drawn(first, last, simd_every=0):
  """Checks the drawn geometries of these seeds.

  Returns:
    A counter: of None (equal), of the keys of `CAUSES`, and, of those that were equal, of `traits`.
  """
  counts = collections.Counter()
  for seed in range(first, last):
    with_simd = bool(simd_every) and seed % simd_every == 0
    g = draw(np.random.default_rng(seed))
    try:
      why = check(g, seed, with_simd=with_simd)
    except Exception as e:
      raise AssertionError(f"seed {seed}: {g}") from e
    counts[why] += 1
    if why is None:
      counts.update(traits(g))
  return counts
