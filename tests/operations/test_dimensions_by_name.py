"""Functions whose annotation takes a dimension or its name take both."""

import inspect

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import DimensionError


def _annotated():
  """(function, parameter) of all whose annotation has a dimension and a str."""
  found = set()
  for package in (mtf.ops, mtf.layers, mtf.optimize, mtf.sparse):
    for name, fn in vars(package).items():
      if not inspect.isfunction(fn):
        continue
      for parameter in inspect.signature(fn).parameters.values():
        if "DimensionLike | str" in str(parameter.annotation).replace("ForwardRef", ""):
          found.add((name, parameter.name))
  return sorted(found)


def _operands():
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  rows, columns, batch = mtf.Dimension("i", 4), mtf.Dimension("j", 4), mtf.Dimension("length", 3)
  matrix = mtf.ones(mesh, [batch, rows, columns])
  return matrix, mtf.ones(mesh, [batch, rows])


def _recurrent(layer):
  return lambda **dims: layer(_operands()[0], mtf.Dimension("units", 2), **dims)


# By function: a call, and the dimensions that it takes.
CALLS = {
  "cholesky": (lambda **dims: mtf.cholesky(_operands()[0], **dims), ("i", "j")),
  "solve": (lambda **dims: mtf.solve(*_operands(), **dims), ("i", "j")),
  "triangular_solve": (lambda **dims: mtf.triangular_solve(*_operands(), **dims), ("i", "j")),
  "gru": (_recurrent(mtf.layers.gru), ("length",)),
  "lstm": (_recurrent(mtf.layers.lstm), ("length",)),
  "simple_rnn": (_recurrent(mtf.layers.simple_rnn), ("length",)),
}
SIZES = {"i": 4, "j": 4, "length": 3}


def test_each_that_says_so_is_called_here():
  assert {name for name, _ in _annotated()} == set(CALLS)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_dimension_and_its_name_are_the_same(name):
  call, names = CALLS[name]
  parameters = [p for of, p in _annotated() if of == name]
  parameters.sort(key=["row_dim", "column_dim", "length_dim"].index)
  by_name = call(**dict(zip(parameters, names, strict=True)))
  dims = [mtf.Dimension(n, SIZES[n]) for n in names]
  itself = call(**dict(zip(parameters, dims)))
  a, b = (y if isinstance(y, mtf.Tensor) else y[0] for y in (by_name, itself))
  assert a.shape == b.shape


@pytest.mark.parametrize("name", sorted(CALLS))
def test_name_that_is_not_there_is_told(name):
  call, names = CALLS[name]
  parameters = [p for of, p in _annotated() if of == name]
  with pytest.raises(DimensionError, match="there is no dimension 'none'"):
    call(**{p: "none" for p in parameters})
