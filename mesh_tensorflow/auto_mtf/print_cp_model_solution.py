"""An integer program with its solution, as text; both are read like those of OR-Tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple


class Variable(NamedTuple):
  """A variable of 0 to `upper`."""

  name: str
  upper: int


class Constraint(NamedTuple):
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
  """Integer linear program."""

  variables: list[Variable] = dataclasses.field(default_factory=list)
  constraints: list[Constraint] = dataclasses.field(default_factory=list)
  objective: Objective = dataclasses.field(default_factory=Objective)

  def Proto(self) -> IntegerProgram:  # noqa: N802 - as OR-Tools has it
    """The program itself."""
    return self

  def add(self, terms: Mapping[str, int], upper: int, lower: int | None = None) -> None:
    """Adds a constraint: the sum of coefficients times variables is at most `upper`.

    Args:
      terms: coefficients by variable.
      upper: a number.
      lower: what the sum is at least; None for any.
    """
    self.constraints.append(Constraint(dict(terms), lower, upper))

  def minimize(self, terms: Mapping[str, int]) -> None:
    """Sets the objective to minimize.

    Args:
      terms: coefficients by variable.
    """
    pairs = [(i, terms[v.name]) for i, v in enumerate(self.variables) if v.name in terms]
    self.objective = Objective([i for i, _ in pairs], [c for _, c in pairs])


class Solution:
  """Values of the variables of a program.

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


def print_solution(model: Any, solver: Any) -> None:
  """Prints the value of every named variable, the objective, and its value.

  Args:
    model: an `IntegerProgram`, or a `CpModel` of OR-Tools.
    solver: a `Solution` of it, or the `CpSolver` that solved it.
  """
  proto = model.Proto()
  names = [v.name for v in proto.variables]
  for name, value in zip(names, solver.ResponseProto().solution):
    if name:
      print(f"  {name} = {value}")
  objective = proto.objective
  # To maximize is to minimize the negative: the model has the coefficients so.
  sign = -1 if objective.scaling_factor < 0 else 1
  terms = ""
  for index, coefficient in sorted(zip(objective.vars, objective.coeffs)):
    c = sign * coefficient
    if names[index]:
      terms += f" {'-' if c < 0 else '+'} {abs(c)} * {names[index]}"
  if terms.startswith(" +"):
    terms = " " + terms[2:]
  print(("Maximize:" if sign < 0 else "Minimize:") + terms)
  print(f"Objective value: {solver.ObjectiveValue()}")
  print()
