"""An integer program with its solution, as text."""

from __future__ import annotations

from typing import Any


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
