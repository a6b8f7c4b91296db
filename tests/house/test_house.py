"""The order of the house: floors, circles, files of names. The checks are in `floors.py`."""

from __future__ import annotations

import pytest

from tests.house import floors


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
  return floors.sources()


def test_imports_lead_downward(texts):
  found = floors.problems(texts, floors.FLOORS)
  assert not found, "\n".join(found)


@pytest.mark.slow
def test_there_is_something_to_check(texts):
  imports = [i for text in texts.values() for i in floors.imports_of(text, texts)]
  assert len(texts) > 300 and len(imports) > 1500
  assert {floors.package_of(i.of) for i in imports} == set(floors.FOLDERS)
  assert floors.room_of("mesh_tensorflow.layers.dense") == ("mesh_tensorflow", "layers")
  assert floors.room_of("mesh_tensorflow") == ("mesh_tensorflow", "__init__")
  assert floors.room_of("mesh_tensorflow.transformer") == (
    "mesh_tensorflow.transformer",
    "__init__",
  )


@pytest.mark.parametrize("package", floors.FOLDERS)
def test_files_beside_the_rooms_are_names(package, texts):
  beside = {}
  for module, text in texts.items():
    name = module.removeprefix(f"{package}.")
    if "." not in name and name not in floors.ROOMS_OF_ONE_FILE[package]:
      beside[name] = text
  assert "vocabulary" in beside or {"utils", "tpu_mesh", "initializers"} <= set(beside)
  for name, text in beside.items():
    assert floors.more_than_names(text) == [], name


def test_rooms_list_files_that_are_there(texts):
  both = dict(texts)
  for room in ("mesh_settings", "mesh_transformer_cli"):
    for path in (floors.ROOT / room).glob("*.py"):
      both[f"{room}.{path.stem}"] = path.read_text(encoding="utf-8")
  assert floors.listed_but_gone(both) == []
  listing = [m for m, text in both.items() if m.endswith(".__init__") and floors.listed_files(text)]
  assert len(listing) > 15 and "mesh_settings.__init__" in listing


# The checks themselves, on a small floors.

FLOORS = {"mesh_tensorflow": ["errors", "graph nodes", "library", "__init__"]}
SOUND = {
  "mesh_tensorflow.__init__": "from mesh_tensorflow import library\n",
  "mesh_tensorflow.errors": "import os\n",
  "mesh_tensorflow.graph.__init__": "",
  "mesh_tensorflow.graph.base": "from mesh_tensorflow.errors import E\n",
  "mesh_tensorflow.graph.more": "from mesh_tensorflow.graph import base\n",
  "mesh_tensorflow.nodes.__init__": "import mesh_tensorflow.errors\n",
  "mesh_tensorflow.library.__init__": "from mesh_tensorflow.nodes import Node\n",
}


def test_a_sound_house():
  assert floors.problems(SOUND, FLOORS) == []


@pytest.mark.parametrize(
  ("module", "text", "said"),
  [
    (  # Up.
      "mesh_tensorflow.graph.base",
      "x = 1\nfrom mesh_tensorflow import library\n",
      ["graph.base:2: imports mesh_tensorflow.library.__init__, which is on floor 3"],
    ),
    (  # Sideways.
      "mesh_tensorflow.graph.base",
      "import mesh_tensorflow.nodes\n",
      ["imports mesh_tensorflow.nodes.__init__, which is on floor 2, not below graph"],
    ),
    (  # The face, by its short name.
      "mesh_tensorflow.graph.base",
      "import mesh_tensorflow as mtf\n",
      ["imports mesh_tensorflow.__init__, which is on floor 4, not below graph"],
    ),
    (  # A circle of files within a room.
      "mesh_tensorflow.graph.base",
      "from mesh_tensorflow.graph.more import x\n",
      [
        "a circle of files: mesh_tensorflow.graph.base -> mesh_tensorflow.graph.more"
        " -> mesh_tensorflow.graph.base"
      ],
    ),
    (  # Deferred, to dodge a circle: both are told.
      "mesh_tensorflow.graph.base",
      "class A:\n  def f(self):\n    from mesh_tensorflow.graph import more\n",
      ["base:3: imports mesh_tensorflow.graph.more in or under a function", "a circle of files"],
    ),
    (
      "mesh_tensorflow.library.__init__",
      "import importlib\nf = lambda: importlib.import_module('mesh_tensorflow.errors')\n",
      ["imports mesh_tensorflow.errors in or under a function"],
    ),
    (
      "mesh_tensorflow.library.__init__",
      "import typing\nif typing.TYPE_CHECKING:\n  from mesh_tensorflow.errors import E\n",
      ["imports mesh_tensorflow.errors in or under a TYPE_CHECKING"],
    ),
    (
      "mesh_tensorflow.graph.more",
      "from . import base\n",
      ["mesh_tensorflow.graph.more:1: a relative import"],
    ),
    ("mesh_tensorflow.attic", "", ["mesh_tensorflow: the room attic is on no floor"]),
    (
      "mesh_tensorflow.library.__init__",
      "import mesh_tensorflow.gone\n",
      ["imports mesh_tensorflow.gone.__init__, which is no module"],
    ),
  ],
  ids=[
    "up",
    "sideways",
    "face",
    "circle",
    "function",
    "name",
    "typing",
    "relative",
    "room",
    "gone",
  ],
)
def test_what_is_wrong_is_told(module, text, said):
  found = floors.problems({**SOUND, module: text}, FLOORS)
  for part in said:
    assert any(part in problem for problem in found), (part, found)
  assert len(found) == len(said), found


def test_a_room_that_is_gone_and_one_that_stands_twice():
  more = {"mesh_tensorflow": [*FLOORS["mesh_tensorflow"], "attic"]}
  assert floors.problems(SOUND, more) == ["mesh_tensorflow: there is no room attic"]
  with pytest.raises(ValueError, match="room graph of mesh_tensorflow twice"):
    floors.floor_numbers({"mesh_tensorflow": ["graph", "graph"]})


def test_transformer_stands_on_the_rest():
  both = {**FLOORS, "mesh_tensorflow.transformer": ["models __init__"]}
  texts = {
    **SOUND,
    "mesh_tensorflow.transformer.__init__": "",
    "mesh_tensorflow.transformer.models.__init__": "import mesh_tensorflow as mtf\n",
  }
  assert floors.problems(texts, both) == []
  texts["mesh_tensorflow.library.__init__"] = "from mesh_tensorflow.transformer import models\n"
  assert any("which is on floor 5, not below library" in p for p in floors.problems(texts, both))


def test_what_a_room_lists():
  room = '''"""A room: of files.

      base        what all have; more: the rest
      one, two    others of them
                  and more of these

  three   is not there: it is gone
  """
'''
  assert floors.listed_files(room) == ["base", "one", "two", "three", "more"]
  assert floors.listed_files("x = 1\n") == []
  names = ("base", "more", "one", "two.__init__")
  texts = {
    "mesh_tensorflow.room.__init__": room,
    **{f"mesh_tensorflow.room.{n}": "" for n in names},
  }
  assert floors.listed_but_gone(texts) == ["mesh_tensorflow.room: there is no three"]


def test_circles():
  assert floors.circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
  assert floors.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"]]
  assert floors.circles({"a": {"a"}}) == [["a", "a"]]


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ('"""Doc."""\nfrom a import b\n__all__ = ["b"]\nc = b.d\n', []),
    ("import a\n__getattr__ = a.attribute_hook(__name__)\n", []),
    ("import a\nx = a.f()\n", ["line 2: x = a.f()"]),
    ("def f():\n  pass\n", ["line 1: def f():"]),
  ],
)
def test_more_than_names(text, found):
  assert floors.more_than_names(text) == found
