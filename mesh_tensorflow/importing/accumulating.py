"""Changes of variables: which of them only add to what is there.

Of a program that runs once for each part of a batch such changes can be added up, in any order, and
made once. Sums and counts of metrics are of this kind, moving averages are not.
"""

from __future__ import annotations

from mesh_tensorflow.importing.nested import variables_changed
from mesh_tensorflow.importing.nodes import Node, Program, VariableRecord, Wire

_ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_SAME = ("Identity", "ReadVariableOp")
_SUMS = ("AddV2", "Add", "Sub")


def changed_at_top(program: Program) -> dict[VariableRecord, bool]:
  """The variables that a program changes: True for those that only its own assignments change.

  Args:
    program: the program; False is for what loops, branches and functions in it change.
  """
  found = dict.fromkeys(sorted(variables_changed([program]), key=lambda v: v.path), True)
  for node in program.nodes:
    if node.type not in (*_ASSIGNS, *_SAME):
      found.update((w.variable, False) for w in node.inputs if w.variable in found)
  return found


def is_added_to(program: Program, variable: VariableRecord) -> bool:
  """True if a program does nothing to a variable but adding what does not depend on it.

  Args:
    program: the program.
    variable: one of `changed_at_top`.
  """
  depends: set[Wire] = set()  # On the variable.
  sums: set[Wire] = set()  # The variable and something that does not depend on it.
  for node in program.nodes:
    of_it = any(w.variable is variable for w in node.inputs)
    if of_it and node.type in _ASSIGNS:
      if not _adds(node, depends, sums):
        return False
    elif of_it and node.type == "ReadVariableOp":
      depends.update(node.outputs)
      sums.update(node.outputs)
    elif of_it:
      return False
    elif any(w in depends for w in node.inputs):
      if any(w.variable is not None for w in node.inputs) and node.type not in _SAME:
        return False  # Another variable gets it.
      depends.update(node.outputs)
      terms = [w for w in node.inputs if w in depends]
      plain = node.type in _SAME or (node.type in _SUMS and len(terms) == 1)
      if plain and terms[0] is node.inputs[0] and terms[0] in sums:
        sums.update(node.outputs)
      elif plain and node.type != "Sub" and terms[0] in sums:
        sums.update(node.outputs)
  return not any(w in depends for w in program.outputs)


def _adds(node: Node, depends: set[Wire], sums: set[Wire]) -> bool:
  value = node.inputs[1]
  return value in sums if node.type == "AssignVariableOp" else value not in depends
