"""Functions that are made of one method and a row of words."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments import families


@dataclasses.dataclass(frozen=True)
class _Power(families.Family):
  exponent: int

  @property
  def words(self) -> Mapping[str, str]:
    return {"exponent": str(self.exponent)}

  @property
  def defaults(self) -> Mapping[str, Any]:
    return {"name": self.name}

  def of(self, x: float, factor: float = 1.0, name: str = "") -> tuple[float, str]:
    """Factor * x ** {exponent}.

    Args:
      x: of {{x}}.
    """
    return factor * x**self.exponent, name


cube = families.member(_Power("cube", 3).of)
fourth = families.member(_Power("fourth", 4).of)


def test_each_has_its_own_name_docstring_and_defaults():
  assert (cube.__name__, cube.__qualname__, cube.__module__) == ("cube", "cube", __name__)
  assert inspect.isfunction(cube)
  assert cube.__doc__ == "Factor * x ** 3.\n\nArgs:\n  x: of {x}."
  assert fourth.__doc__.startswith("Factor * x ** 4.")
  parameters = inspect.signature(fourth).parameters
  assert {n: p.default for n, p in parameters.items() if n != "x"} == {
    "factor": 1.0,
    "name": "fourth",
  }


def test_calls_are_those_of_the_method():
  assert cube(2.0) == (8.0, "cube")
  assert fourth(2.0, factor=0.5, name="own") == fourth(2.0, 0.5, "own") == (8.0, "own")


@pytest.mark.parametrize(
  ("call", "words"),
  [(lambda: cube(), "cube() missing a required argument: 'x'"),
   (lambda: cube(1.0, base=2), "cube() got an unexpected keyword argument 'base'")],
)  # fmt: skip
def test_wrong_calls_name_the_function(call, words):
  with pytest.raises(TypeError) as e:
    call()
  assert words in str(e.value)


@pytest.mark.parametrize("name", ["irfft3d", "conv3d_transpose_backprop_filter"])
def test_public_functions_have_no_words_left_to_fill_in(name):
  doc = getattr(mtf, name).__doc__
  assert "{" not in doc
  assert "Args:" in doc
