"""A periodic box of particles and its gravity, in blocks: what `nbody` computes.

See `nbody` for what is simulated, and docs/nbody.md.
"""

from __future__ import annotations

import dataclasses
import math

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf

from mesh_tensorflow.examples import mesh_flags

AXIS = mtf.Dimension("axis", 3)


@dataclasses.dataclass(frozen=True)
class Box:
  """The periodic box, and how it is cut into blocks.

  A block and its particles are on one device. Particles keep to the block that they began in, so
  tensors have fixed shapes and none is lost: one that crosses an edge is painted into the halo of
  its block, and `mtf.halo_reduce` brings that to the owner. What moves is fields, not particles;
  how far particles get decides how wide halos are (`lost` counts those that got farther).

  Attributes:
    cells: n, of each side.
    x_blocks: number of blocks along x.
    y_blocks: number of blocks along y.
    halo: cells that a particle may be away from its block.
  """

  cells: int = 32
  x_blocks: int = 2
  y_blocks: int = 2
  halo: int = 4

  def __post_init__(self):
    for name, blocks in (("x", self.x_blocks), ("y", self.y_blocks)):
      if self.cells % blocks:
        raise mtf.ShapeError(
          f"nbody: {self.cells} cells along {name} cannot be cut into {blocks} blocks; take a "
          f"multiple of {blocks}"
        )
    if self.cells % 2 or self.cells < 4 or self.halo < 1:
      raise mtf.ShapeError(
        f"nbody: the number of cells must be even and at least 4, and a halo at least 1; got "
        f"{self.cells} and {self.halo}"
      )

  @property
  def field(self) -> mtf.Shape:
    """A field: [x, y, z]."""
    return mtf.Shape([(name, self.cells) for name in ("x", "y", "z")])

  @property
  def spectrum(self) -> mtf.Shape:
    """Half its spectrum: [kx, ky, kz]."""
    return mtf.Shape([("kx", self.cells), ("ky", self.cells), ("kz", self.cells // 2 + 1)])

  @property
  def blocks(self) -> list[mtf.Dimension]:
    """The numbers of blocks: what the mesh splits."""
    return [mtf.Dimension("x_blocks", self.x_blocks), mtf.Dimension("y_blocks", self.y_blocks)]

  @property
  def in_block(self) -> list[mtf.Dimension]:
    """The cells of a block."""
    return [
      mtf.Dimension("x_cells", self.cells // self.x_blocks),
      mtf.Dimension("y_cells", self.cells // self.y_blocks),
    ]

  @property
  def padded(self) -> list[mtf.Dimension]:
    """The cells of a block with its halos."""
    return [mtf.Dimension(d.name, d.size + 2 * self.halo) for d in self.in_block]

  @property
  def flat(self) -> mtf.Dimension:
    """The same and z, as one dimension, which particles index."""
    x, y = self.padded
    return mtf.Dimension("flat", x.size * y.size * self.cells)

  @property
  def particles(self) -> mtf.Shape:
    """Positions or momenta: [axis, x_blocks, y_blocks, particles], one for each cell."""
    x, y = self.in_block
    return mtf.Shape([AXIS, *self.blocks, ("particles", x.size * y.size * self.cells)])

  def layout(self, mesh_shape: str) -> str:
    """Fields and particles split along x and y, spectra along ky and kx."""
    rows, cols = mesh_flags.axes_of(mesh_shape, 2, "nbody")
    split = [("x_blocks", rows), ("x", rows), ("ky", rows)]
    split += [("y_blocks", cols), ("y", cols), ("kx", cols)]
    return ",".join(f"{dim}:{axis.name}" for dim, axis in split if axis.size > 1)

  # ---------------------------------------------------------------- fields and blocks

  def to_blocks(self, field: mtf.Tensor) -> mtf.Tensor:
    """[..., x, y, z] -> [..., x_blocks, y_blocks, x_cells, y_cells, z]; nothing moves."""
    more, z = field.shape.dims[:-3], field.shape[-1]
    (nx, ny), (cx, cy) = self.blocks, self.in_block
    cut = mtf.reshape(field, [*more, nx, cx, ny, cy, z])
    return mtf.transpose(cut, [*more, nx, ny, cx, cy, z])

  def from_blocks(self, blocks: mtf.Tensor) -> mtf.Tensor:
    """The way back, of a field without other dimensions."""
    (nx, ny), (cx, cy) = self.blocks, self.in_block
    return mtf.reshape(mtf.transpose(blocks, [nx, cx, ny, cy, self.field[2]]), self.field)

  def paint(self, index: mtf.Tensor, weight: mtf.Tensor) -> mtf.Tensor:
    """The density contrast of particles, from the cells that they lie in (`cloud`)."""
    (nx, ny), (hx, hy) = self.blocks, self.padded
    painted = mtf.scatter_add(weight, index, self.flat, [nx, ny, self.flat])
    blocks = mtf.reshape(painted, [nx, ny, hx, hy, self.field[2]])
    blocks = mtf.halo_reduce(blocks, nx, hx, self.halo, wrap=True)
    blocks = mtf.halo_reduce(blocks, ny, hy, self.halo, wrap=True)
    return self.from_blocks(blocks) - 1.0

  def read(self, fields: mtf.Tensor, index: mtf.Tensor, weight: mtf.Tensor) -> mtf.Tensor:
    """Fields [axis, x, y, z] at the particles: the adjoint of `paint`."""
    (nx, ny), (cx, cy) = self.blocks, self.in_block
    blocks = mtf.halo_exchange(self.to_blocks(fields), nx, cx, self.halo, wrap=True)
    blocks = mtf.halo_exchange(blocks, ny, cy, self.halo, wrap=True)
    rows = mtf.reshape(blocks, [AXIS, nx, ny, self.flat])
    return mtf.einsum([mtf.gather(rows, index, self.flat), weight], output_shape=self.particles)

  def cloud(self, positions: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """The eight cells that a particle, a cube of the size of a cell, lies in.

    Args:
      positions: in cells, from the first of each particle's block.

    Returns:
      (index, weight, lost): [corner, x_blocks, y_blocks, particles] each, places in `flat` and
      parts of the particle; and the number of particles that are beyond the halo.
    """
    x, y, z = mtf.unstack(positions, AXIS)
    (hx, hy), n = self.padded, self.cells
    low = [mtf.cast(mtf.slicewise(tf.floor, [v], splittable_dims=v.shape.dims, grad_function=0),
                    tf.int32) for v in (x, y, z)]  # fmt: skip
    part = [v - mtf.cast(i, tf.float32) for v, i in zip((x, y, z), low)]
    ix, iy, iz = low[0] + self.halo, low[1] + self.halo, low[2]
    inside = mtf.ones_like(x)
    for i, size in ((ix, hx.size), (iy, hy.size)):
      inside *= mtf.to_float(mtf.greater_equal(i, 0)) * mtf.to_float(mtf.less(i, size - 1))
    index, weight = [], []
    for corner in np.ndindex(2, 2, 2):
      cx, cy, cz = (i + c for i, c in zip((ix, iy, iz), corner))
      index.append((cx * hy.size + cy) * n + mtf.mod(cz, n))
      parts = [p if c else 1.0 - p for p, c in zip(part, corner)]
      weight.append(parts[0] * parts[1] * parts[2])
    lost = mtf.reduce_sum(1.0 - inside)
    return mtf.stack(index, "corner"), mtf.stack(weight, "corner"), lost

  # ---------------------------------------------------------------- gravity

  def wave_numbers(self) -> list[np.ndarray]:
    """2 pi m / n of each dimension of the spectrum."""
    n = self.cells
    full = 2 * np.pi * np.fft.fftfreq(n)
    return [full, full, 2 * np.pi * np.fft.rfftfreq(n)]

  def square_of_k(self, mesh: mtf.Mesh) -> mtf.Tensor:
    """|k|^2 of each mode."""
    terms = [
      mtf.import_tf_tensor(mesh, np.float32(k**2), [d])
      for k, d in zip(self.wave_numbers(), self.spectrum)
    ]
    return mtf.add(mtf.add(terms[0], terms[1]), terms[2], output_shape=self.spectrum)

  def inverse_gradient(self, spectrum: mtf.Tensor) -> mtf.Tensor:
    """The field u [axis, x, y, z] with -div u = the field of the spectrum, and no curl.

    In Fourier space u = i k delta / k^2: the displacement that makes a density contrast, and
    (times 3 / 2a) the gravity of one.
    """
    k2 = self.square_of_k(spectrum.mesh)
    inverse = mtf.where(mtf.greater(k2, 0.0), mtf.reciprocal(mtf.maximum(k2, 1e-9)), 0.0)
    spectrum = spectrum * mtf.cast(inverse, tf.complex64) * 1j
    components = []
    for k, d in zip(self.wave_numbers(), self.spectrum):
      # The derivative at the highest frequency, which stands for +n/2 and -n/2, is none.
      k = np.where(np.isclose(np.abs(k), np.pi), 0.0, k)
      components.append(spectrum * mtf.import_tf_tensor(spectrum.mesh, np.complex64(k), [d]))
    return mtf.irfft3d(mtf.stack(components, AXIS.name), self.spectrum.dims, self.field.dims)

  def force(self, positions: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Gravity at each particle for a = 1, without the factor 3/2; and how many were lost."""
    index, weight, lost = self.cloud(positions)
    spectrum = mtf.rfft3d(self.paint(index, weight), None, self.spectrum.dims)
    return self.read(self.inverse_gradient(spectrum), index, weight), lost

  # ---------------------------------------------------------------- time

  def begin(self, noise: mtf.Tensor, a: float) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Positions and momenta at a small scale factor, from white noise (Zel'dovich, 1970).

    Args:
      noise: a field of standard normal numbers.
      a: the scale factor.
    """
    k2 = self.square_of_k(noise.mesh)
    # Power falls as 1/k at large scales, and smoothly to none at a few cells.
    amplitude = mtf.where(
      mtf.greater(k2, 0.0),
      2.5 * mtf.exp(-k2) * mtf.exp(-0.25 * mtf.log(mtf.maximum(k2, 1e-9))),
      0.0,
    )
    spectrum = mtf.rfft3d(noise, None, self.spectrum.dims) * mtf.cast(amplitude, tf.complex64)
    moved = mtf.reshape(self.to_blocks(self.inverse_gradient(spectrum)), self.particles)
    return self.lattice(noise.mesh) + a * moved, a**1.5 * moved

  def lattice(self, mesh: mtf.Mesh) -> mtf.Tensor:
    """Positions of particles at rest: a cell each, from the first of its block."""
    x, y = self.in_block
    grid = np.stack(np.meshgrid(*[np.arange(s) for s in (x.size, y.size, self.cells)],
                                indexing="ij"))  # fmt: skip
    at = mtf.import_tf_tensor(mesh, np.float32(grid).reshape(3, -1), [AXIS, self.particles[3]])
    return mtf.broadcast(at, self.particles)

  def evolve(
    self, positions: mtf.Tensor, momenta: mtf.Tensor, a: mtf.Tensor, da: float, steps: int
  ) -> list[mtf.Tensor]:
    """Steps of leapfrog in the scale factor (Quinn et al., 1997), in one loop.

    With F = sqrt(a): dp / da = F g / a, dx / da = F p / a^2.

    Args:
      positions: of the particles, in cells.
      momenta: of the particles.
      a: the scale factor they are at, a scalar.
      da: how much it grows in a step.
      steps: how many.

    Returns:
      Positions, momenta and scale factor, and how many particles were beyond their halos, summed
      over the steps.
    """

    def kick(p: mtf.Tensor, force: mtf.Tensor, a: mtf.Tensor) -> mtf.Tensor:
      return p + force * (mtf.rsqrt(a) * (1.5 * da / 2))

    def step(x, p, force, a, lost, i):
      p = kick(p, force, a)
      middle = mtf.rsqrt(a + da / 2)
      x = x + p * (middle * middle * middle * da)
      force, more = self.force(x)
      return [x, kick(p, force, a + da), force, a + da, lost + more, i + 1]

    def remembered(*state):
      # Of each step only the state is kept for the backward pass, not what made it.
      return mtf.recompute_grad(lambda *v: tuple(step(*v, state[-1])[:-1]), list(state[:-1]))

    force, lost = self.force(positions)
    zero = mtf.zeros(positions.mesh, [], tf.int32)
    x, p, _, a, lost, _ = mtf.while_loop(
      lambda *state: mtf.less(state[-1], steps),
      lambda *state: [*remembered(*state), state[-1] + 1],
      [positions, momenta, force, a, lost, zero],
      maximum_iterations=steps,
    )
    return [x, p, a, lost]

  def density(self, positions: mtf.Tensor) -> mtf.Tensor:
    """The density contrast: density / mean - 1."""
    index, weight, _ = self.cloud(positions)
    return self.paint(index, weight)

  def power(self, density: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
    """The power spectrum: mean |delta_k|^2 of the modes of each |k|, in bins of 2 pi / n.

    Returns:
      (power, modes): [bins] each.
    """
    n = self.cells
    bins = mtf.Dimension("bins", n // 2)
    spectrum = mtf.rfft3d(density, None, self.spectrum.dims)
    size = mtf.sqrt(self.square_of_k(density.mesh)) * (n / (2 * math.pi))
    where = mtf.to_int32(size + 0.5)
    # Frequencies between the first and the last stand for their negatives, too.
    twice = np.float32([1.0] + [2.0] * (n // 2 - 1) + [1.0])
    count = mtf.broadcast(
      mtf.import_tf_tensor(density.mesh, twice, [self.spectrum[2]]), self.spectrum
    )
    squares = mtf.square(mtf.abs(spectrum)) * (1.0 / n**3)
    modes = mtf.segment_sum(count, where, bins)
    return mtf.segment_sum(squares * count, where, bins) / mtf.maximum(modes, 1.0), modes
