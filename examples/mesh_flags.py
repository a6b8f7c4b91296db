"""The flags by which the programs of this folder make their mesh."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import mesh_tensorflow as mtf

KINDS = {"placement": mtf.PlacementMeshImpl, "simd": mtf.SimdMeshImpl}


def add_mesh_flags(parser: argparse.ArgumentParser, mesh_shape: str) -> None:
  """Adds --mesh_shape and --implementation.

  Args:
    parser: a parser of the command line.
    mesh_shape: the default.
  """
  mesh = parser.add_argument_group("the mesh")
  mesh.add_argument("--mesh_shape", default=mesh_shape, help="names and sizes of the mesh axes")
  mesh.add_argument(
    "--implementation",
    default="simd",
    choices=list(KINDS),
    help="one program that every device runs, or one graph for all devices",
  )


def make_mesh_impl(mesh_shape: str, layout: str, implementation: str = "simd") -> mtf.MeshImpl:
  """A mesh of virtual CPU devices.

  Args:
    mesh_shape: "rows:2,cols:2", say.
    layout: the layout rules.
    implementation: "simd" or "placement".
  """
  shape = mtf.convert_to_shape(mesh_shape)
  return KINDS[implementation](shape, layout, mtf.virtual_cpu_devices(shape.size))


def one_device() -> mtf.MeshImpl:
  """A single device, to compare with."""
  return make_mesh_impl("one:1", "", "placement")


def axes_of(mesh_shape: str, number: int, program: str) -> list[mtf.Dimension]:
  """The mesh axes, with axes of size 1 in place of those that are missing.

  Args:
    mesh_shape: of the flag.
    number: how many axes the program splits over.
    program: its name, for the message.

  Raises:
    MeshShapeError: there are more axes.
  """
  axes = mtf.convert_to_shape(mesh_shape).dims
  if len(axes) > number:
    raise mtf.MeshShapeError(
      f"{program}: the mesh {mesh_shape} has {len(axes)} axes; the program splits over {number}"
    )
  return axes + [mtf.Dimension(f"none_{i}", 1) for i in range(len(axes), number)]


def run(main: Callable[[], Any]) -> None:
  """Runs a program; a mesh or sizes that do not fit are one line, and the exit code is 1.

  Args:
    main: the program.
  """
  try:
    main()
  except mtf.MeshError as e:
    sys.exit(f"{type(e).__name__}: {e}")
