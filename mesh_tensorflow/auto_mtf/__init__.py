"""The TF1 library's search for the layout that needs least memory, under its names.

It chooses a layout by the peak of the sizes of all tensors, and by nothing else: an objective for
the branch and bound of `planning`. `mtf.auto_layout` predicts time, and keeps to a limit of memory.
From below:

    graph_interface    a graph by names: operations, tensors, sizes, what is alive when
    valid_layouts      what a layout may split
    memory_estimator   both, for a graph and a mesh shape
    scheduler          an order of operations that needs little memory
    print_cp_model_solution, layout_optimizer   an integer program, and the search that solves it
    api                `layout` and `layout_and_mesh_shape`
"""

from mesh_tensorflow.auto_mtf import (
  api,
  graph_interface,
  layout_optimizer,
  memory_estimator,
  print_cp_model_solution,
  scheduler,
  valid_layouts,
)
from mesh_tensorflow.auto_mtf.api import layout, layout_and_mesh_shape

__all__ = [
  "api",
  "graph_interface",
  "layout",
  "layout_and_mesh_shape",
  "layout_optimizer",
  "memory_estimator",
  "print_cp_model_solution",
  "scheduler",
  "valid_layouts",
]
