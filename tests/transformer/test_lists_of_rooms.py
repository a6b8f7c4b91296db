"""What gin or `run` finds by name is in the list of its room: a forgotten file would be unknown."""

from __future__ import annotations

import ast

import pytest

# By which decorators a room registers what others find by name.
ROOMS = {
  "data": {"configurable"},
  "data/vocabularies": {"configurable"},
  "model/layers": {"configurable"},
  "modes": {"mode"},
}
# Files whose functions gin knows, and that no reader can do without; and one that is loaded when a
# gin file has a name of T5; and layers that a gin file imports, as of the archived package.
BROUGHT_ALONG = {
  "data": {"packing", "text_io", "seqio_tasks"},
  "model/layers": {"fixup", "fixup_attention"},
}


def registers(text: str, decorators: set[str]) -> bool:
  """Whether a module registers something by one of these decorators."""
  for node in ast.walk(ast.parse(text)):
    for decorator in getattr(node, "decorator_list", []):
      call = decorator.func if isinstance(decorator, ast.Call) else decorator
      if getattr(call, "attr", getattr(call, "id", None)) in decorators:
        return True
  return False


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_that_registers_is_listed(room, repository):
  folder = repository / "transformer" / room
  package = f"mesh_tensorflow.transformer.{room.replace('/', '.')}"
  listed = {
    alias.name
    for node in ast.parse((folder / "__init__.py").read_text()).body
    if isinstance(node, ast.ImportFrom) and node.module == package
    for alias in node.names
  }
  files = {p.stem: p.read_text() for p in folder.glob("*.py") if p.stem != "__init__"}
  registering = {name for name, text in files.items() if registers(text, ROOMS[room])}
  missing = registering - listed - BROUGHT_ALONG.get(room, set())
  assert not missing, f"name them in transformer/{room}/__init__.py: {sorted(missing)}"
  assert len(listed) >= 5 and listed <= set(files)
