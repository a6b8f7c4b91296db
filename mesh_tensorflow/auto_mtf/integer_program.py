"""An integer program, as far as the search for a layout needs one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Variable:
  """A variable of 0 to `upper`."""

  name: str
  upper: int


@dataclasses.dataclass(frozen=True)
class Constraint:
  """lower <= sum of coefficients times variables <= upper; lower may be None."""

  terms: Mapping[str, int]
  lower: int | None
  upper: int

  def holds(self, values: Mapping[str, int]) -> bool:
    """True if an assignment satisfies the constraint; variables that it omits are 0.

    Args:
      values: by name of a variable.
    """
    total = sum(c * values.get(name, 0) for name, c in self.terms.items())
    return total <= self.upper and (self.lower is None or total >= self.lower)


@dataclasses.dataclass
class Objective:
  """Linear objective to minimize: coefficients of variables, by number of the variable."""

  vars: list[int] = dataclasses.field(default_factory=list)
  coeffs: list[int] = dataclasses.field(default_factory=list)
  scaling_factor: float = 1.0


@dataclasses.dataclass
class IntegerProgram:
  """Integer linear program; read like a model of OR-Tools."""

  variables: list[Variable] = dataclasses.field(default_factory=list)
  constraints: list[Constraint] = dataclasses.field(default_factory=list)
  objective: Objective = dataclasses.field(default_factory=Objective)

  def Proto(self) -> IntegerProgram:  # noqa: N802 - as OR-Tools has it
    """The program itself."""
    return self

  def add_variable(self, name: str, upper: int) -> None:
    """Adds a variable.

    Args:
      name: of the variable.
      upper: its greatest value.
    """
    self.variables.append(Variable(name, upper))

  def add_at_most(self, terms: Mapping[str, int], upper: int) -> None:
    """Adds: the sum is at most `upper`.

    Args:
      terms: coefficients by variable.
      upper: a number.
    """
    self.constraints.append(Constraint(dict(terms), None, upper))

  def add_equal(self, terms: Mapping[str, int], value: int) -> None:
    """Adds: the sum is `value`.

    Args:
      terms: coefficients by variable.
      value: a number.
    """
    self.constraints.append(Constraint(dict(terms), value, value))

  def minimize(self, terms: Mapping[str, int]) -> None:
    """Sets the objective to minimize.

    Args:
      terms: coefficients by variable.
    """
    pairs = [(i, terms[v.name]) for i, v in enumerate(self.variables) if v.name in terms]
    self.objective = Objective([i for i, _ in pairs], [c for _, c in pairs])


class Solution:
  """Values of the variables of a program; read like a solver of OR-Tools.

  Args:
    program: the program.
    values: by name of a variable; omitted ones are 0.

  Attributes:
    solution: the values, in the order of the variables.
  """

  def __init__(self, program: IntegerProgram, values: Mapping[str, int]):
    self._objective = program.objective
    self.solution = [values.get(v.name, 0) for v in program.variables]

  def ResponseProto(self) -> Solution:  # noqa: N802 - as OR-Tools has it
    """The solution itself."""
    return self

  def ObjectiveValue(self) -> float:  # noqa: N802 - as OR-Tools has it
    """Value of the objective."""
    pairs = zip(self._objective.vars, self._objective.coeffs)
    return float(sum(c * self.solution[i] for i, c in pairs))
