"""Waves in a medium that is not uniform, and the adjoint that says what the medium must be.

u'' = c(x)^2 laplace(u), by finite differences of fourth order in space and second in time, on a
grid in two or three dimensions that a mesh of devices splits. Each device fetches two cells from
its neighbours in each step (`mtf.halo_exchange`), and all steps are one `mtf.while_loop`. The
adjoint runs a loop backwards in time: the scheme can be reversed, so the waves are computed again
and not kept, however many steps there are (Tarantola, Geophysics 49, 1984).

  python -m mesh_tensorflow.examples.wave
  python -m mesh_tensorflow.examples.wave --cells 32 --mesh_shape "x:2,y:2,z:2" --dimensions 3

docs/wave.md goes through it.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf
import tqdm

from mesh_tensorflow.examples import mesh_flags

# The second derivative, of fourth order: the weights of a cell, and of those one and two away.
CENTRE, NEAR, FAR = -5.0 / 2, 4.0 / 3, -1.0 / 12
HALO = 2
NAMES = ("x", "y", "z")


@dataclasses.dataclass(frozen=True)
class Grid:
  """A grid, cut into blocks; waves are reflected at its ends, beyond which the field is zero.

  Attributes:
    cells: of each side.
    blocks: for each dimension the number of blocks.
  """

  cells: int
  blocks: tuple[int, ...]

  def __post_init__(self):
    for name, n in zip(NAMES, self.blocks):
      if self.cells % n:
        raise mtf.ShapeError(
          f"wave: {self.cells} cells along {name} cannot be cut into {n} blocks; take a multiple "
          f"of {n}"
        )

  @property
  def block_dims(self) -> list[mtf.Dimension]:
    """The numbers of blocks: what the mesh splits."""
    return [mtf.Dimension(f"{name}_blocks", n) for name, n in zip(NAMES, self.blocks)]

  @property
  def cell_dims(self) -> list[mtf.Dimension]:
    """The cells of a block."""
    return [mtf.Dimension(name, self.cells // n) for name, n in zip(NAMES, self.blocks)]

  @property
  def shape(self) -> mtf.Shape:
    """A field: [x_blocks, x, y_blocks, y, ...], which is the order of its cells in the grid."""
    return mtf.Shape([d for pair in zip(self.block_dims, self.cell_dims) for d in pair])

  def layout(self, mesh_shape: str) -> str:
    """Each dimension split over one mesh axis."""
    axes = mesh_flags.axes_of(mesh_shape, len(self.blocks), "wave")
    pairs = zip(self.block_dims, axes)
    return ",".join(f"{d.name}:{axis.name}" for d, axis in pairs if axis.size > 1)

  def field(self, values: np.ndarray) -> np.ndarray:
    """Values on the grid, in the shape of a field."""
    return np.float32(values).reshape(self.shape.to_integer_list)

  def laplacian(self, u: mtf.Tensor) -> mtf.Tensor:
    """The sum of the second derivatives, in units of a cell: a symmetric matrix."""
    total = u * (CENTRE * len(self.blocks))
    for blocks, cells in zip(self.block_dims, self.cell_dims):
      wide = mtf.halo_exchange(u, blocks, cells, HALO)
      for offset, weight in ((-2, FAR), (-1, NEAR), (1, NEAR), (2, FAR)):
        total += mtf.slice(wide, HALO + offset, cells.size, cells.name) * weight
    return total


def forward(
  grid: Grid, now: mtf.Tensor, before: mtf.Tensor, speed: mtf.Tensor, steps: int
) -> list[mtf.Tensor]:
  """Steps of u(t + 1) = 2 u(t) - u(t - 1) + speed laplace(u(t)).

  Args:
    grid: a `Grid`.
    now: the field.
    before: the field one step before.
    speed: the square of cells that a wave goes in a step.
    steps: how many.

  Returns:
    The field afterwards, and one step before that.
  """

  def step(u, earlier, i):
    return [2.0 * u - earlier + speed * grid.laplacian(u), u, i + 1]

  first = mtf.zeros(now.mesh, [], tf.int32)
  u, earlier, _ = mtf.while_loop(
    lambda u, earlier, i: mtf.less(i, steps),
    step,
    [now, before, first],
    maximum_iterations=steps,
  )
  return [u, earlier]


def adjoint(
  grid: Grid,
  now: mtf.Tensor,
  before: mtf.Tensor,
  speed: mtf.Tensor,
  residual: mtf.Tensor,
  steps: int,
) -> list[mtf.Tensor]:
  """Gradients of a function of the last field, by a loop that goes back in time.

  With the multiplier l(t), from l(T) = residual: l(t) = 2 l(t + 1) - l(t + 2) + laplace(speed
  l(t + 1)); and beside it u(t - 1) from u(t) and u(t + 1), as nothing was kept. The gradient to the
  speed is the sum of l(t + 1) laplace(u(t)).

  Args:
    grid: a `Grid`.
    now: the last field.
    before: the field one step before.
    speed: as of `forward`.
    residual: the gradient to the last field.
    steps: how many steps led there.

  Returns:
    The gradients to the first field (which stood still: it was the field one step before, too) and
    to the speed; and the first field, computed back.
  """

  def step(later, u, l_later, l_now, gradient, i):
    bent = grid.laplacian(u)
    gradient += l_now * bent
    l_before = 2.0 * l_now - l_later + grid.laplacian(speed * l_now)
    return [u, 2.0 * u - later + speed * bent, l_now, l_before, gradient, i + 1]

  zero = mtf.zeros_like(residual)
  first = mtf.zeros(now.mesh, [], tf.int32)
  start, _, l_1, l_0, gradient, _ = mtf.while_loop(
    lambda *state: mtf.less(state[-1], steps),
    step,
    [now, before, zero, residual, zero, first],
    maximum_iterations=steps,
  )
  return [l_0 - l_1, gradient, start]


class Experiment:
  """A pulse in a medium on a mesh, compiled.

  Args:
    grid: a `Grid`.
    mesh_impl: the mesh, with `grid.layout` as its layout.
    steps: steps in time.
  """

  def __init__(self, grid: Grid, mesh_impl: mtf.MeshImpl, steps: int):
    field = mtf.TensorSpec(grid.shape, tf.float32)

    @mtf.function(mesh_impl, input_signature=[field] * 3)
    def run(now, before, speed):
      return forward(grid, now, before, speed, steps)

    @mtf.function(mesh_impl, input_signature=[field] * 4)
    def back(now, before, speed, residual):
      return adjoint(grid, now, before, speed, residual, steps)

    @mtf.function(mesh_impl, input_signature=[field] * 3)
    def kept(start, speed, target):
      """The same gradients by `mtf.gradients`, which keeps the field of each step."""
      now, _ = forward(grid, start, start, speed, steps)
      misfit = mtf.reduce_sum(mtf.square(now - target)) * 0.5
      return [misfit, *mtf.gradients([misfit], [start, speed])]

    self.run, self.back, self.kept = run, back, kept


def medium(grid: Grid, courant: float) -> np.ndarray:
  """Squares of cells a step: a lens in the middle, in which waves are slower."""
  axes = np.meshgrid(*[np.arange(grid.cells) / grid.cells - 0.5] * len(grid.blocks), indexing="ij")
  radius = np.sqrt(sum(a**2 for a in axes))
  return grid.field(courant**2 * (1.0 - 0.5 / (1.0 + np.exp((radius - 0.2) * 80))))


def pulse(grid: Grid) -> np.ndarray:
  """A bump near a corner."""
  axes = np.meshgrid(*[np.arange(grid.cells) / grid.cells] * len(grid.blocks), indexing="ij")
  square = sum((a - 0.25) ** 2 for a in axes)
  return grid.field(np.exp(-square / (2 * 0.03**2)))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
  """The command line."""
  parser = argparse.ArgumentParser(
    description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
  )
  parser.add_argument("--dimensions", type=int, default=2, choices=[2, 3], help="of space")
  parser.add_argument("--cells", type=int, default=96, help="of each side of the grid")
  parser.add_argument("--steps", type=int, default=2000, help="steps in time, of one loop")
  parser.add_argument("--courant", type=float, default=0.4, help="cells a wave goes in a step")
  parser.add_argument("--kept_steps", type=int, default=100,
                      help="steps whose adjoint is compared with mtf.gradients")  # fmt: skip
  parser.add_argument("--picture", default="", help="a file for waves and gradient")
  mesh_flags.add_mesh_flags(parser, "x:2,y:2")
  args = parser.parse_args(argv)
  # In d dimensions the scheme is stable up to sqrt(3 / d) / 2.
  limit = (3.0 / args.dimensions) ** 0.5 / 2
  if not 0 < args.courant <= limit:
    parser.error(f"--courant {args.courant} must be positive and at most {limit:.2f}, to be stable")
  if min(args.steps, args.kept_steps) < 1:
    parser.error("--steps and --kept_steps must be at least 1")
  return args


def main(argv: list[str] | None = None) -> dict[str, float]:
  """Runs there and back on the mesh and on one device, and compares; returns the numbers."""
  args = parse_args(argv)
  axes = mesh_flags.axes_of(args.mesh_shape, args.dimensions, "wave")
  grid = Grid(args.cells, tuple(axis.size for axis in axes))
  impl = mesh_flags.make_mesh_impl(
    args.mesh_shape, grid.layout(args.mesh_shape), args.implementation
  )
  start, speed = pulse(grid), medium(grid, args.courant)
  meshes = {"mesh": impl, "one device": mesh_flags.one_device()}
  long = {name: Experiment(grid, mesh_impl, args.steps) for name, mesh_impl in meshes.items()}
  seconds: dict[str, float] = {}

  def timed(what: str, fn: Any, *values: Any) -> list[np.ndarray]:
    begin = time.perf_counter()
    results = [t.numpy() for t in fn(*values)]
    seconds[what] = time.perf_counter() - begin
    return results

  found: dict[str, tuple[Any, ...]] = {}
  for name in tqdm.tqdm(meshes, desc="there and back"):
    last = timed(f"{name}, {args.steps} steps", long[name].run, start, start, speed)
    back = timed(f"{name}, {args.steps} steps back", long[name].back, *last, speed, last[0])
    found[name] = (last[0], *back)
  short = Experiment(grid, impl, args.kept_steps)
  last = timed("short", short.run, start, start, speed)
  by_hand = timed("short back", short.back, *last, speed, last[0])
  by_loop = timed("kept", short.kept, start, speed, np.zeros_like(start))
  report = {
    "difference of waves": _difference(found["mesh"][0], found["one device"][0]),
    "difference of gradients to the start": _difference(found["mesh"][1], found["one device"][1]),
    "difference of gradients to the medium": _difference(found["mesh"][2], found["one device"][2]),
    "start, computed back": _difference(found["mesh"][3], start),
    "difference to mtf.gradients, start": _difference(by_hand[0], by_loop[1]),
    "difference to mtf.gradients, medium": _difference(by_hand[1], by_loop[2]),
  }
  print(mtf.describe(long["mesh"].run))
  for name in list(seconds)[:4]:
    print(f"{name}: {seconds[name]:.1f} s")
  for name, value in report.items():
    print(f"{name}: {value:.1e}")
  if args.picture:
    draw(args.picture, grid, impl, start, speed, args.steps, found["mesh"][2])
    print(f"written: {args.picture}")
  return report


def _difference(a: np.ndarray, b: np.ndarray) -> float:
  """The largest, relative to the largest value."""
  return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def draw(
  path: str,
  grid: Grid,
  impl: mtf.MeshImpl,
  start: np.ndarray,
  speed: np.ndarray,
  steps: int,
  gradient: np.ndarray,
) -> None:
  """Draws the waves at three times, and the gradient to the medium; of a cube its middle."""
  import matplotlib.figure

  figure = matplotlib.figure.Figure(figsize=(12, 3.2), layout="constrained")
  axes = figure.subplots(1, 4)
  now = before = start
  part = Experiment(grid, impl, max(1, steps // 20))
  shown = []
  for _ in range(3):
    now, before = part.run(now, before, speed)
    shown.append((f"u after {(len(shown) + 1) * max(1, steps // 20)} steps", now.numpy()))
  shown.append((f"gradient to the medium, {steps} steps", gradient))
  for ax, (title, values) in zip(axes, shown):
    values = values.reshape([grid.cells] * len(grid.blocks))
    values = values if values.ndim == 2 else values[:, :, grid.cells // 2]
    limit = np.quantile(np.abs(values), 0.998)
    ax.imshow(values.T, cmap="RdBu_r", origin="lower", vmin=-limit, vmax=limit)
    ax.set_title(title, fontsize=10)
  figure.savefig(path)


if __name__ == "__main__":
  mesh_flags.run(main)
