"""Matrices that no device holds: a product and a factor by panels, and a linear system.

The product C = A B of matrices that a mesh splits along rows and columns is done as SUMMA does it
(van de Geijn and Watts, 1997): a panel of columns of A goes along the rows of the mesh, a panel of
rows of B along its columns, each device adds their product to its block of C, and so on with the
next panel. No device ever holds more of A or B than its block and a panel.

The system is that of a Gaussian process, (K + s^2 I) x = y with K_ij = exp(-(t_i - t_j)^2 / 2 l^2):
each device makes its own block of K, and conjugate gradients (Hestenes and Stiefel, 1952) end when
the residual is small, in one `mtf.while_loop` whose length depends on the data. Its Cholesky factor
is made panel by panel, as ScaLAPACK does it (Choi et al., 1996).

  python -m mesh_tensorflow.examples.matrix
  python -m mesh_tensorflow.examples.matrix --size 1024 --mesh_shape "rows:2,cols:4"

docs/matrix.md goes through it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf
import tqdm

from mesh_tensorflow.examples import mesh_flags


def layout_of(mesh_shape: str) -> str:
  """Rows of all matrices over one mesh axis, columns over the other."""
  rows, cols = mesh_flags.axes_of(mesh_shape, 2, "matrix")
  split = [("i", rows), ("b_panels", rows), ("j", cols), ("a_panels", cols)]
  split += [("i_panels", rows), ("j_panels", cols)]
  return ",".join(f"{name}:{axis.name}" for name, axis in split if axis.size > 1)


def summa(a: mtf.Tensor, b: mtf.Tensor) -> mtf.Tensor:
  """The product of two matrices by panels.

  Args:
    a: [i, a_panels, width]: columns in panels, of which the mesh splits the number.
    b: [b_panels, width, j]: rows likewise.

  Returns:
    A `Tensor` [i, j]: the sum over panels and width.
  """
  i, a_panels, _ = a.shape.dims
  b_panels, _, j = b.shape.dims

  def add_panel(c, number):
    # Who has the panel sends it: a gather along a split dimension.
    ours = mtf.gather(a, number, a_panels)
    theirs = mtf.gather(b, number, b_panels)
    return [c + mtf.einsum([ours, theirs], output_shape=[i, j]), number + 1]

  zero = mtf.zeros(a.mesh, [], tf.int32)
  product, _ = mtf.while_loop(
    lambda c, number: mtf.less(number, a_panels.size),
    add_panel,
    [mtf.zeros(a.mesh, [i, j], a.dtype), zero],
    maximum_iterations=a_panels.size,
  )
  return product


def blocked_cholesky(matrix: mtf.Tensor) -> mtf.Tensor:
  """The lower triangular L with L L^T = matrix, panel by panel, from left to right.

  Each step factors a block of the diagonal on every device, solves for the rest of its panel, each
  device its own rows, and subtracts the product of the panel with itself from all that is left.
  It subtracts from the whole matrix, where a third would do: blocks lie on devices in order, so
  that devices of the first ones would wait anyway.

  Args:
    matrix: [i_panels, row, j_panels, column], symmetric and positive definite; the mesh splits the
      numbers of panels.

  Returns:
    A `Tensor` of this shape.
  """
  i_panels, row, j_panels, column = matrix.shape.dims
  mesh = matrix.mesh

  def factor_panel(left, factor, number):
    panel = mtf.gather(left, number, j_panels)
    block = mtf.cholesky(mtf.gather(panel, number, i_panels), row, column)
    # X with X block^T = panel: a system for each row of X, which its device solves.
    triangle = mtf.rename_dimension(block, row.name, "equation")
    wanted = mtf.rename_dimension(panel, column.name, "equation")
    below = mtf.triangular_solve(triangle, wanted, ("equation", row.size), column)
    behind = mtf.to_float(mtf.greater(mtf.range(mesh, i_panels, tf.int32), number))
    here = mtf.one_hot(number, i_panels)
    panel = below * behind + mtf.einsum([here, block], output_shape=panel.shape)
    # The same panel as rows, split as columns are.
    ours = mtf.rename_dimension(panel, column.name, "inner")
    theirs = mtf.rename_dimension(ours, i_panels.name, j_panels.name)
    theirs = mtf.rename_dimension(theirs, row.name, column.name)
    left -= mtf.einsum([ours, theirs], output_shape=matrix.shape)
    there = mtf.one_hot(number, j_panels)
    factor += mtf.einsum([panel, there], output_shape=matrix.shape)
    return [left, factor, number + 1]

  zero = mtf.zeros(mesh, [], tf.int32)
  _, factor, _ = mtf.while_loop(
    lambda left, factor, number: mtf.less(number, j_panels.size),
    factor_panel,
    [matrix, mtf.zeros_like(matrix), zero],
    maximum_iterations=j_panels.size,
  )
  return factor


def kernel(rows: mtf.Tensor, columns: mtf.Tensor, width: float, noise: float) -> mtf.Tensor:
  """K + s^2 I of points in time; each device makes its block.

  Args:
    rows: times [i].
    columns: the same times [j].
    width: l, the time over which the process changes.
    noise: s, of the observations.
  """
  (i,), (j,) = rows.shape, columns.shape
  covariance = mtf.exp(mtf.square(mtf.sub(rows, columns, output_shape=[i, j])) * (-0.5 / width**2))
  numbers = [mtf.range(rows.mesh, d, tf.int32) for d in (i, j)]
  return covariance + noise**2 * mtf.to_float(mtf.equal(*numbers, output_shape=[i, j]))


def conjugate_gradients(
  matrix: mtf.Tensor, rhs: mtf.Tensor, tolerance: float, most: int
) -> list[mtf.Tensor]:
  """Solves a system with a positive definite matrix that is split both ways.

  Args:
    matrix: [i, j].
    rhs: [i].
    tolerance: of the residual, relative to the right-hand side.
    most: steps at most.

  Returns:
    The solution [i]; for each step the size of the residual after it, relative ([steps], zeros
    behind the last); the number of steps.
  """
  i, j = matrix.shape.dims
  steps = mtf.Dimension("steps", most)

  def dot(x, y):
    return mtf.einsum([x, y], output_shape=[])

  def step(x, r, p, square, residuals, n):
    # A vector that is split as the columns are; the product is then split as the rows are.
    along = mtf.rename_dimension(p, i.name, j.name)
    q = mtf.einsum([matrix, along], output_shape=[i])
    alpha = square / dot(p, q)
    x, r = x + alpha * p, r - alpha * q
    after = dot(r, r)
    here = mtf.one_hot(n, steps)
    return [
      x,
      r,
      r + (after / square) * p,
      after,
      residuals + here * mtf.sqrt(after / first),
      n + 1,
    ]

  first = dot(rhs, rhs)
  mesh = rhs.mesh
  x, _, _, _, residuals, n = mtf.while_loop(
    lambda x, r, p, square, residuals, n: mtf.logical_and(
      mtf.greater(square, tolerance**2 * first), mtf.less(n, most)
    ),
    step,
    [mtf.zeros_like(rhs), rhs, rhs, first, mtf.zeros(mesh, [steps]), mtf.zeros(mesh, [], tf.int32)],
    maximum_iterations=most,
  )
  return [x, residuals, n]


class Matrices:
  """The programs on a mesh, compiled.

  Args:
    mesh_impl: the mesh, with `layout_of` as its layout.
    size: n: matrices are n x n.
    panels: number of panels; a multiple of both sizes of the mesh.
    most: steps of conjugate gradients at most.
    width: see `kernel`.
    noise: likewise.
    tolerance: see `conjugate_gradients`.
  """

  def __init__(
    self,
    mesh_impl: mtf.MeshImpl,
    size: int,
    panels: int,
    most: int = 200,
    width: float = 0.3,
    noise: float = 0.3,
    tolerance: float = 1e-5,
  ):
    if size % panels:
      raise mtf.ShapeError(f"matrix: {panels} panels do not divide the size {size}")
    i, j = mtf.Dimension("i", size), mtf.Dimension("j", size)
    thin = mtf.Dimension("width", size // panels)
    a_dims = [i, mtf.Dimension("a_panels", panels), thin]
    b_dims = [mtf.Dimension("b_panels", panels), thin, j]
    blocks = [
      mtf.Dimension("i_panels", panels),
      mtf.Dimension("row", thin.size),
      mtf.Dimension("j_panels", panels),
      mtf.Dimension("column", thin.size),
    ]

    @mtf.function(mesh_impl, [mtf.TensorSpec(d, tf.float32) for d in (a_dims, b_dims)])
    def product(a, b):
      return summa(a, b)

    @mtf.function(mesh_impl, [mtf.TensorSpec(d, tf.float32) for d in ([i], [i])])
    def fit(times, values):
      matrix = kernel(times, mtf.rename_dimension(times, "i", "j"), width, noise)
      return conjugate_gradients(matrix, values, tolerance, most)

    @mtf.function(mesh_impl, [mtf.TensorSpec([i], tf.float32)])
    def factor(times):
      matrix = kernel(times, mtf.rename_dimension(times, "i", "j"), width, noise)
      return blocked_cholesky(mtf.reshape(matrix, blocks))

    self._product, self.fit, self._factor = product, fit, factor
    self.size = size
    self.shapes = [mtf.Shape(a_dims).to_integer_list, mtf.Shape(b_dims).to_integer_list]

  def product(self, a: np.ndarray, b: np.ndarray) -> tf.Tensor:
    """The product of two matrices."""
    return self._product(*[m.reshape(s) for m, s in zip((a, b), self.shapes)])

  def factor(self, times: np.ndarray) -> np.ndarray:
    """The Cholesky factor of the process' matrix at some times."""
    return self._factor(times).numpy().reshape([self.size] * 2)

  def describe(self) -> str:
    """What the product costs."""
    return str(mtf.describe(self._product))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
  """The command line."""
  parser = argparse.ArgumentParser(
    description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
  )
  parser.add_argument("--size", type=int, default=512, help="n: matrices are n x n")
  parser.add_argument("--panels", type=int, default=8, help="panels of the product")
  parser.add_argument("--steps", type=int, default=200, help="of conjugate gradients, at most")
  parser.add_argument(
    "--width", type=float, default=0.3, help="time over which the process changes"
  )
  parser.add_argument("--noise", type=float, default=0.3, help="of the observations")
  parser.add_argument("--tolerance", type=float, default=1e-5, help="of the residual")
  parser.add_argument("--seed", type=int, default=0, help="of matrices and observations")
  parser.add_argument("--picture", default="", help="a file for the fit and the residuals")
  mesh_flags.add_mesh_flags(parser, "rows:2,cols:2")
  args = parser.parse_args(argv)
  for axis in mesh_flags.axes_of(args.mesh_shape, 2, "matrix"):
    if args.panels % axis.size or args.size % args.panels:
      parser.error(
        f"--panels {args.panels} must divide --size {args.size}, and be a multiple of the mesh "
        f"axis {axis.name}:{axis.size}"
      )
  return args


def main(argv: list[str] | None = None) -> dict[str, float]:
  """Multiplies and solves on the mesh, and compares with NumPy; returns what it prints."""
  args = parse_args(argv)
  impl = mesh_flags.make_mesh_impl(args.mesh_shape, layout_of(args.mesh_shape), args.implementation)
  rng = np.random.default_rng(args.seed)
  a, b = (rng.normal(size=[args.size] * 2).astype(np.float32) for _ in range(2))
  times = np.sort(rng.uniform(0, 10, args.size)).astype(np.float32)
  values = (np.sin(times) + 0.5 * np.sin(3 * times)).astype(np.float32)
  values += args.noise * rng.normal(size=args.size).astype(np.float32)
  settings = (args.size, args.panels, args.steps, args.width, args.noise, args.tolerance)
  found: dict[str, Any] = {}
  for name in tqdm.tqdm(("mesh", "one device"), desc="multiply and solve"):
    matrices = Matrices(impl if name == "mesh" else mesh_flags.one_device(), *settings)
    begin = time.perf_counter()
    product = matrices.product(a, b).numpy()
    fitted = [t.numpy() for t in matrices.fit(times, values)]
    factor = matrices.factor(times)
    found[name] = (matrices, product, *fitted, factor, time.perf_counter() - begin)
  matrices, product, x, residuals, steps, factor, seconds = found["mesh"]
  covariance = np.exp(-0.5 * (np.float64(times)[:, None] - times) ** 2 / args.width**2)
  system = covariance + args.noise**2 * np.eye(args.size)
  exact = np.linalg.solve(system, values)
  want = np.float64(a) @ b
  report = {
    "product, difference to float64": _difference(product, want),
    "product, difference to one device": _difference(product, found["one device"][1]),
    "solution, difference to float64": _difference(x, exact),
    "solution, difference to one device": _difference(x, found["one device"][2]),
    "factor times its transpose, difference to the matrix": _difference(
      np.float64(factor) @ factor.T, system
    ),
    "factor, difference to one device": _difference(factor, found["one device"][5]),
    "last residual": float(residuals[max(int(steps) - 1, 0)]),
    "steps": int(steps),
  }
  print(matrices.describe())
  print(f"{args.size} x {args.size} on {args.mesh_shape}: {seconds:.1f} s")
  for name, value in report.items():
    print(f"{name}: {value:.2g}")
  if args.picture:
    draw(args.picture, times, values, covariance @ x, residuals[: int(steps)])
    print(f"written: {args.picture}")
  return report


def _difference(a: np.ndarray, b: np.ndarray) -> float:
  """The largest, relative to the largest value."""
  return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def draw(
  path: str, times: np.ndarray, values: np.ndarray, fitted: np.ndarray, residuals: np.ndarray
) -> None:
  """Draws the observations with what the process makes of them, and the residuals."""
  import matplotlib.figure

  figure = matplotlib.figure.Figure(figsize=(9, 3.2), layout="constrained")
  left, right = figure.subplots(1, 2)
  left.plot(times, values, ".", markersize=2, label="observations")
  left.plot(times, fitted, label="K x: the mean of the process")
  left.set(xlabel="t")
  left.legend(loc="upper center", fontsize="small")
  right.semilogy(np.arange(1, len(residuals) + 1), residuals)
  right.set(title="conjugate gradients", xlabel="step", ylabel="residual / right-hand side")
  figure.savefig(path)


if __name__ == "__main__":
  mesh_flags.run(main)
