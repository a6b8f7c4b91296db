"""The house: which room of the package lies on which floor, and what may import what.

A room is a folder of the package, or a file that lies beside the folders; a floor is a line of
rooms. A file may import from its own room, where no circle of files is allowed, and from rooms on
lower floors. What a lower room needs from a higher one is handed to it (`operators.provide`,
`attach_planner`, `arguments.kinds.register`), never imported. `problems` tells what breaks that;
docs/tools/drawings.py draws `FLOORS`. A new room is a word in a line here.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "mesh_tensorflow"
TRANSFORMER = f"{PACKAGE}.transformer"
FOLDERS = {PACKAGE: "mesh_tensorflow", TRANSFORMER: "transformer"}

# The lowest floor first, as a house is built. `transformer` stands on all of `mesh_tensorflow`.
FLOORS = {
  PACKAGE: [
    "errors version",
    "arguments exit_codes removed_names",
    "environment program",
    "numerics workers",
    "meshes",
    "operations",
    "running decoding",
    "ops checkpoint",
    "layers planning importing",
    "optimize auto_mtf keras",
    "training",
    "beam_search initializers ops_with_redefined_builtins placement_mesh_impl simd_mesh_impl"
    " experimental sparse test_utils tpu_mesh tpu_variables utils",
    "__init__",
  ],
  TRANSFORMER: [
    "data learning_rate_schedules",
    "model",
    "gin_config vocab_embeddings",
    "generation",
    "training",
    "modes",
    "commands",
    "adaptive_softmax attention bleu dataset evolved_transformer fixup_layers funnel_transformer"
    " gin_paths heterogeneous_moe memory_layers moe subword_vocabulary t2t_vocabulary"
    " transformer transformer_layers universal_transformer utils vocabulary",
    "main launch __init__",
    # A room of the other package that stands on this one: a word with a dot is a whole name.
    "mesh_tensorflow.bert",
  ],
}  # fmt: skip

# Files beside the rooms that are more than names for what lies in a room.
ROOMS_OF_ONE_FILE = {
  PACKAGE: ("__init__", "errors", "exit_codes", "ops", "removed_names", "version"),
  # Programs that are started by these names; and a table and flags that are looked up in utils.
  TRANSFORMER: (
    "adaptive_softmax",
    "launch",
    "learning_rate_schedules",
    "main",
    "utils",
    "vocab_embeddings",
  ),
}


@dataclasses.dataclass(frozen=True)
class Import:
  """An import of a module of the package.

  Attributes:
    of: the module that is imported.
    line: where.
    where: "module", or why it does not stand at the top: "function" or "TYPE_CHECKING".
  """

  of: str
  line: int
  where: str


def sources(root: pathlib.Path = ROOT) -> dict[str, str]:
  """The text of each module of the package, by its full name; packages as `name.__init__`."""
  found = {}
  for package, folder in FOLDERS.items():
    for path in sorted((root / folder).rglob("*.py")):
      parts = path.relative_to(root / folder).with_suffix("").parts
      found[".".join((package, *parts))] = path.read_text(encoding="utf-8")
  return found


def package_of(module: str) -> str:
  """The one of the two packages that a module lies in."""
  return TRANSFORMER if f"{module}.".startswith(f"{TRANSFORMER}.") else PACKAGE


def room_of(module: str) -> tuple[str, str]:
  """The package and the room of a module, which may be given as of `sources` or as imported."""
  package = package_of(module)
  parts = module.removeprefix(package).strip(".").split(".")
  return package, parts[0] or "__init__"


def imports_of(text: str, modules: Iterable[str]) -> Iterator[Import]:
  """The imports of modules of the package in a file.

  Args:
    text: the file.
    modules: names of all modules as of `sources`: `from a import b` imports the module `a.b` if
      there is one, else `a`.
  """
  known = set(modules)

  def full(name: str) -> str:
    return name if name in known else f"{name}.__init__"

  def visit(node: ast.AST, where: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
      names = [full(a.name) for a in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
      inner = [full(f"{node.module}.{a.name}") for a in node.names]
      names = [name if name in known else full(str(node.module)) for name in inner]
    else:
      names = [full(name) for name in _imported_by_name(node)]
    if where == "TYPE_CHECKING" and late and _exports_again(node):
      names = []
    for name in names:
      if f"{name}.".startswith(f"{PACKAGE}."):
        yield Import(name, node.lineno, where)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
      where = "function"
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
      where = "TYPE_CHECKING"
    for child in ast.iter_child_nodes(node):
      yield from visit(child, where)

  # Packages that `removed_names.attribute_hook` imports when they are asked for first.
  late = "attribute_hook(__name__, late=" in text
  return visit(ast.parse(text), "module")


def _exports_again(node: ast.AST) -> bool:
  """Whether it is `from package import name as name`: of a type checker's face, a late package."""
  return isinstance(node, ast.ImportFrom) and all(a.asname == a.name for a in node.names)


def _imported_by_name(node: ast.AST) -> list[str]:
  """What `importlib.import_module` and `__import__` are given as a constant."""
  if not isinstance(node, ast.Call) or not node.args:
    return []
  called = ast.unparse(node.func).split(".")[-1]
  first = node.args[0]
  if called not in ("import_module", "__import__") or not isinstance(first, ast.Constant):
    return []
  return [first.value]


def floor_numbers(floors: Mapping[str, list[str]]) -> dict[tuple[str, str], int]:
  """The floor of each room, counted through both packages from 1."""
  found: dict[tuple[str, str], int] = {}
  number = 0
  for package, rows in floors.items():
    for row in rows:
      number += 1
      for word in row.split():
        room = room_named(package, word)
        if room in found:
          raise ValueError(f"FLOORS has the room {room[1]} of {room[0]} twice")
        found[room] = number
  return found


def room_named(package: str, word: str) -> tuple[str, str]:
  """The package and the room of a word in a line of `FLOORS`."""
  other, _, room = word.rpartition(".")
  return other or package, room


def problems(texts: Mapping[str, str], floors: Mapping[str, list[str]]) -> list[str]:
  """What is against the order of the house, one line for each place.

  Args:
    texts: module name -> text, as of `sources`.
    floors: as `FLOORS`.
  """
  found = []
  numbers = floor_numbers(floors)
  inhabited = {room_of(module) for module in texts}
  found += [f"{p}: the room {r} is on no floor" for p, r in sorted(inhabited - set(numbers))]
  found += [f"{p}: there is no room {r}" for p, r in sorted(set(numbers) - inhabited)]
  graph: dict[str, set[str]] = {module: set() for module in texts}
  for module, text in texts.items():
    here = room_of(module)
    for line in relative_imports(text):
      found.append(f"{module}:{line}: a relative import; write the whole name")
    for imported in imports_of(text, texts):
      place = f"{module}:{imported.line}: imports {imported.of}"
      there = room_of(imported.of)
      if imported.of not in texts:
        found.append(f"{place}, which is no module")
        continue
      graph[module].add(imported.of)
      if imported.where != "module":
        found.append(f"{place} in or under a {imported.where}")
      if here != there and numbers.get(there, 0) >= numbers.get(here, len(numbers)):
        found.append(f"{place}, which is on floor {numbers.get(there)}, not below {here[1]}")
  found += [f"a circle of files: {' -> '.join(circle)}" for circle in circles(graph)]
  return found


def relative_imports(text: str) -> list[int]:
  """The lines of imports such as `from . import x`."""
  nodes = ast.walk(ast.parse(text))
  return [n.lineno for n in nodes if isinstance(n, ast.ImportFrom) and n.level]


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
  """A way around for each circle that a search in depth meets, its first name again at its end."""
  found: list[list[str]] = []
  done: set[str] = set()

  def visit(node: str, way: list[str]) -> None:
    if node in way:
      found.append([*way[way.index(node) :], node])
    elif node not in done:
      for target in sorted(graph.get(node, ())):
        visit(target, [*way, node])
      done.add(node)

  for node in sorted(graph):
    visit(node, [])
  return found


def more_than_names(text: str) -> list[str]:
  """What a file holds besides imports, `__all__`, and other names for what it imported."""
  found = []
  for node in ast.parse(text).body:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
      continue
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
      continue  # The docstring.
    if isinstance(node, ast.Assign):
      if isinstance(node.value, (ast.Name, ast.Attribute, ast.List)):
        continue
      if "attribute_hook(__name__)" in ast.unparse(node.value):
        continue  # Explains names that are gone.
    found.append(f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}")
  return found


# In a docstring of a room: names of files, and behind two blanks or more what is in them. Behind a
# semicolon another one may be named, with a colon.
_LISTED = re.compile(r"^ *(\w+(?:, \w+)*)  +\S", re.M)
_LISTED_TOO = re.compile(r"^ *\w+(?:, \w+)*  +\S.*; (\w+): ", re.M)


def listed_files(text: str) -> list[str]:
  """The files and folders of its room that the docstring of an `__init__.py` lists.

  Args:
    text: the `__init__.py`.
  """
  doc = ast.get_docstring(ast.parse(text)) or ""
  names = [name for line in _LISTED.findall(doc) for name in line.split(", ")]
  return names + _LISTED_TOO.findall(doc)


def listed_but_gone(texts: Mapping[str, str]) -> list[str]:
  """Names that docstrings of rooms list and that are neither a file nor a folder of the room.

  Args:
    texts: module name -> text, as of `sources`.
  """
  found = []
  for module, text in texts.items():
    room = module.removesuffix(".__init__")
    if room != module:
      for name in listed_files(text):
        if not {f"{room}.{name}", f"{room}.{name}.__init__"} & set(texts):
          found.append(f"{room}: there is no {name}")
  return found
