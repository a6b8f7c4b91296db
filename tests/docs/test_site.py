"""The documentation site: every public name on a page, every page in the navigation.

MkDocs is needed for the last test only, which builds the site, as `make docs` does.
"""

from __future__ import annotations

import inspect
import json
import pathlib
import re
import sys

import pytest

import mesh_tensorflow as mtf
from docs.tools import (
  docstrings,
  drawings,
  mkdocs_hook,
  notebook,
  pictures,
  reference,
  resharding,
  settings,
  signatures,
)
from mesh_tensorflow import transformer
from tests.conftest import ROOT
from tests.house import floors

DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)#\s]+)(?:#([^)\s]+))?\)")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
  return reference.pages()


def anchors(page: str) -> set[str]:
  return set(re.findall(r"\{#(\S+)\}", page)) | set(re.findall(r'<a id="([^"]+)">', page))


def test_every_public_name_has_a_place(pages):
  places = {anchor for page in pages.values() for anchor in anchors(page)}
  names = reference.all_names()
  assert [n.anchor for n in names if n.anchor not in places] == []
  assert len(names) > 500
  wanted = {"mesh_tensorflow.einsum", "mesh_tensorflow.layers.dense", "mesh_tensorflow.describe"}
  wanted |= {"mesh_tensorflow.transformer.utils.run", "mesh_tensorflow.checkpoint.Checkpointer"}
  assert wanted <= places


def test_public_names_are_those_that_programs_see():
  mine = {n.name for n in reference.all_names() if n.module == reference.PACKAGE}
  of_mtf = {
    name
    for name, value in vars(mtf).items()
    if not name.startswith("_") and not inspect.ismodule(value) and callable(value)
  }
  assert of_mtf <= mine
  modules = reference.public_modules()
  assert {f"mesh_tensorflow.transformer.{name}" for name in transformer.__all__} <= set(modules)


def test_every_name_is_in_the_index_and_its_link_leads_there(pages):
  index = pages["reference/index.md"]
  for name in reference.all_names():
    assert f"#{name.anchor})" in index, name
  for target, anchor in LINK.findall(index):
    assert not anchor or anchor in anchors(pages[f"reference/{target}"]), (target, anchor)


def test_signatures_and_texts_are_for_readers(pages):
  for path, page in pages.items():
    assert " at 0x" not in page, path
    assert "<function" not in page and "<class" not in page, path


def test_every_configurable_is_on_the_gin_page(pages):
  configurables = reference.configurables()
  assert len(configurables) > 100
  for c in configurables:
    assert f"- `{c.name}(" in pages["reference/gin.md"], c


def test_settings_are_those_of_the_program():
  """Else: python -m docs.tools.settings."""
  assert settings.PAGE.read_text() == settings.page()


@pytest.mark.long
def test_what_resharding_sends_is_current():
  """Else: python -m docs.tools.resharding."""
  assert resharding.table() in (DOCS / "pipelines.md").read_text()


def test_every_parameter_of_run_has_a_meaning_and_a_default():
  rows = re.findall(r"^\| `run\.(\w+)` \| (.+?) \| (.+) \|$", settings.PAGE.read_text(), re.M)
  parameters = inspect.signature(transformer.utils.run).parameters
  given_by_flags = {"tpu_job_name", "tpu", "gcp_project", "tpu_zone", "model_dir"}
  assert {name for name, _, _ in rows} == set(parameters) - given_by_flags


def _nav() -> list[str]:
  """The pages of mkdocs.yml; its navigation is a list of lines "Title: page.md"."""
  text = (DOCS.parent / "mkdocs.yml").read_text()
  return re.findall(r"- [^:\n]+: (\S+\.md)$", text.split("\nnav:\n")[1], re.M)


def test_every_page_is_in_the_navigation(pages):
  nav = _nav()
  written = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}
  assert sorted(nav) == sorted(written | set(mkdocs_hook.root_pages()))
  in_reference = re.findall(r"reference/[\w.-]+\.md", str(reference.navigation(list(pages))))
  assert sorted(in_reference) == sorted(pages)


def test_links_between_pages_lead_somewhere(pages):
  known = set(_nav()) | set(pages)
  texts = {p: mkdocs_hook.from_docs((DOCS / p).read_text()) for p in _nav() if (DOCS / p).exists()}
  for page, text in {**texts, **mkdocs_hook.root_pages()}.items():
    for target, _ in LINK.findall(re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
      if "://" not in target:
        assert target in known or (DOCS / target).is_file(), (page, target)


def _texts(svg: pathlib.Path) -> list[str]:
  return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


def test_pictures_are_what_the_package_draws(tmp_path):
  """Else: python -m docs.tools.pictures."""
  pytest.importorskip("matplotlib", reason="pictures of layouts need matplotlib")
  pictures.draw(tmp_path)
  for name in pictures.PICTURES:
    drawn, kept = _texts(tmp_path / f"{name}.svg"), _texts(pictures.FOLDER / f"{name}.svg")
    assert drawn == kept and any("device" in text for text in drawn), name


def test_every_picture_is_shown_and_there():
  shown = "".join(p.read_text() for p in [*DOCS.glob("*.md"), DOCS.parent / "README.md"])
  for name in pictures.PICTURES:
    assert f"pictures/{name}.svg" in shown and (pictures.FOLDER / f"{name}.svg").is_file()
  assert set(re.findall(r"pictures/(\w+)\.svg", shown)) == set(pictures.PICTURES)


def test_drawings_are_current_and_shown(tmp_path):
  """Else: python -m docs.tools.drawings."""
  drawings.draw(tmp_path)
  shown = "".join(p.read_text() for p in [*DOCS.glob("*.md"), DOCS.parent / "CONTRIBUTING.md"])
  for drawn in sorted(tmp_path.iterdir()):
    assert drawn.read_text() == (drawings.FOLDER / drawn.name).read_text(), drawn.name
    assert f"drawings/{drawn.name})" in shown
  kept = {p.name for p in drawings.FOLDER.iterdir()}
  # Those of imported models are drawn by tools of their own.
  assert kept == {f"{name}.svg" for name in (*drawings.DRAWINGS, "imported", "keras")}


def test_a_drawing_has_every_room_on_its_floor():
  drawn = drawings.rooms().svg()
  rooms = [
    room for of_package in floors.FLOORS.values() for row in of_package for room in row.split()
  ]
  assert len(rooms) > 50
  for room in rooms:
    assert drawn.count(f">{room}</text>") == rooms.count(room), room


def example(x: int, *, fn=len, values=(1, "a"), name: str | None = None) -> int:
  """Adds <something>.

  More of it, in `a <b>`.

  Args:
    x: a number,
      of two lines.
    fn: what is called.

  Returns:
    A number.

  Raises:
    ValueError: never.
  """


def test_docstrings_and_signatures():
  assert docstrings.summary(example.__doc__) == "Adds <something>."
  assert docstrings.arguments(example) == {"x": "a number, of two lines.", "fn": "what is called."}
  text = docstrings.markdown(example.__doc__)
  assert text.startswith("Adds &lt;something>.\n\nMore of it, in `a <b>`.\n")
  assert "**Arguments**\n\n- `x`: a number, of two lines.\n- `fn`: what" in text
  assert "**Returns**\n\nA number.\n" in text and "- `ValueError`: never." in text
  assert signatures.signature_text("example", example).splitlines() == [
    "example(x: int, *, fn=len, values=(1, 'a'), name: str | None = None) -> int"
  ]


@pytest.mark.long
@pytest.mark.subprocess
def test_the_site_builds_without_a_warning(run_subprocess, tmp_path, repository):
  pytest.importorskip("mkdocs", reason="the site needs the extra docs: pip install '.[docs]'")
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
  built = run_subprocess([*command[1:], "--site-dir", tmp_path / "site"], cwd=repository)
  assert "WARNING -" not in built.stderr
  for page in ("index.html", "settings.html", "reference/elementwise.html", "pictures/y.svg"):
    assert (tmp_path / "site" / page).is_file(), page


@pytest.mark.parametrize("name", notebook.PAGES)
def test_the_notebook_is_that_of_the_page(name):
  """`python -m docs.tools.notebook` writes it anew."""
  page, written = notebook.PAGES[name].read_text(), notebook.NOTEBOOKS[name].read_text()
  assert written == notebook.notebook(page)
  cells = json.loads(written)["cells"]
  assert {c["cell_type"] for c in cells} == {"markdown", "code"}
  code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
  assert code == re.findall(r"^```python\n(.*?)\n```$", page, re.M | re.S)


def test_search_needs_neither_a_server_nor_the_net():
  """The plugin that puts the index into a script would fetch from the net what runs the search."""
  text = (DOCS.parent / "mkdocs.yml").read_text()
  assert "\n  - offline" in text
  assert (
    DOCS / re.search(r"polyfills: \[(\S+iframe-worker\S*|iframe-worker\S*)\]", text)[1]
  ).is_file()
