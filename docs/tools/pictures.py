"""The pictures of docs/pictures, drawn by the package: `python -m docs.tools.pictures` writes them.

Each is `mtf.describe(program).save_picture(path, tensor)`, as a user calls it, so it shows what a
mesh really does. A test draws them again and compares their texts.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import mesh_tensorflow as mtf

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "pictures"

# Name of a file -> the program, the mesh, the layout, the name of the tensor in the program.
Program = Callable[[mtf.Mesh], None]


def dense(mesh: mtf.Mesh) -> None:
  """y = x w, the program of the README."""
  batch, io, hidden = [mtf.Dimension(*d) for d in [("batch", 8), ("io", 4), ("hidden", 16)]]
  x = mtf.import_tf_tensor(mesh, [[1.0] * 4] * 8, [batch, io], name="x")
  w = mtf.get_variable(mesh, "w", [io, hidden])
  mtf.einsum([x, w], output_shape=[batch, hidden], name="y")


def attention(mesh: mtf.Mesh) -> None:
  """The weights of attention: [batch, heads, length, memory_length]."""
  dims = [("batch", 16), ("heads", 4), ("length", 64), ("memory_length", 64)]
  logits = mtf.random_normal(mesh, [mtf.Dimension(*d) for d in dims], name="logits")
  mtf.softmax(logits, logits.shape[3], name="weights")


def experts(mesh: mtf.Mesh) -> None:
  """The weights of eight experts."""
  dims = [("experts", 8), ("d_model", 64), ("d_ff", 256)]
  w = mtf.get_variable(mesh, "experts/wi", [mtf.Dimension(*d) for d in dims])
  mtf.reduce_sum(w, name="sum")


def image(mesh: mtf.Mesh) -> None:
  """An image cut into blocks, as examples/mnist.py does."""
  dims = [("batch", 8), ("row_blocks", 4), ("col_blocks", 4), ("rows", 7), ("cols", 7)]
  mtf.random_uniform(mesh, [mtf.Dimension(*d) for d in dims], name="image")


PICTURES: dict[str, tuple[Program, str, str, str]] = {
  "x": (dense, "rows:2,cols:2", "batch:rows,hidden:cols", "x"),
  "w": (dense, "rows:2,cols:2", "batch:rows,hidden:cols", "w"),
  "y": (dense, "rows:2,cols:2", "batch:rows,hidden:cols", "y"),
  "y_data_parallel": (dense, "all:4", "batch:all", "y"),
  "w_model_parallel": (dense, "all:4", "hidden:all", "w"),
  "attention": (attention, "batch:4,model:4", "batch:batch,heads:model", "weights"),
  "experts": (experts, "batch:4,model:2", "batch:batch,experts:batch,d_ff:model", "experts/wi"),
  "image": (image, "r:2,c:2", "row_blocks:r,col_blocks:c", "image"),
}


def draw(folder: pathlib.Path) -> None:
  """Draws all pictures into a folder."""
  import matplotlib

  # Text as text: it can be searched, and compared. The names inside are the same in each drawing.
  settings = {"svg.fonttype": "none", "svg.hashsalt": "mesh_tensorflow"}
  for name, (program, mesh_shape, layout, tensor) in PICTURES.items():
    graph = mtf.Graph()
    program(mtf.Mesh(graph, "mesh"))
    report = mtf.describe(graph, layout, mesh_shape)
    with matplotlib.rc_context(settings):
      report.save_picture(str(folder / f"{name}.svg"), tensor)


if __name__ == "__main__":
  FOLDER.mkdir(exist_ok=True)
  draw(FOLDER)
  print(f"written: {len(PICTURES)} pictures in {FOLDER}")
