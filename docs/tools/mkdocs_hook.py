"""A hook of MkDocs: pages of the site that are not files of docs/, and links between the two.

The start page is README.md, so that it is written once; other texts of the root folder are pages,
too. The API reference is made from the docstrings (`reference.py`).
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from docs.tools import reference  # noqa: E402

# Texts of the root folder and their names in the site.
FROM_ROOT = {
  "README.md": "index.md",
  "CHANGELOG.md": "changelog.md",
  "SECURITY.md": "security.md",
  "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(\]\(|src=\"|href=\")([^)\s\"#]+)")
_made: dict[str, str] = {}


def root_pages() -> dict[str, str]:
  """The texts of the root folder that are there, with links as in the site."""
  return {
    name: as_page((ROOT / file).read_text(encoding="utf-8"))
    for file, name in FROM_ROOT.items()
    if (ROOT / file).is_file()
  }


def as_page(text: str) -> str:
  """A text of the root folder as one of docs/."""

  def replaced(link: re.Match[str]) -> str:
    target = link[2]
    return link[1] + FROM_ROOT.get(target, target.removeprefix("docs/"))

  return _LINK.sub(replaced, text)


def from_docs(text: str) -> str:
  """A page of docs/ whose links to the root folder lead to its pages here.

  What tests are told after a fence (tests/docs/test_docs.py) goes, but for the name of a file.
  """

  def replaced(link: re.Match[str]) -> str:
    target = link[2]
    return link[1] + FROM_ROOT.get(target.removeprefix("../"), target)

  text = re.sub(r"^```(?:python no-run|py)$", "```python", text, flags=re.MULTILINE)
  text = re.sub(r"^```python (\S+)$", r'```python title="\1"', text, flags=re.MULTILINE)
  return _LINK.sub(replaced, text)


def on_config(config: Any) -> Any:
  """Makes the pages, and adds the reference to the navigation."""
  _made.clear()
  pages = reference.pages()
  _made.update(root_pages())
  _made.update(pages)
  config.nav = [*config.nav, {"Reference": reference.navigation(list(pages))}]
  return config


def on_files(files: Any, config: Any) -> Any:
  """Gives the pages to MkDocs."""
  from mkdocs.structure.files import File  # Tests of the rest do without MkDocs.

  for path, text in _made.items():
    files.append(File.generated(config, path, content=text))
  return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
  """Leads links to the root folder to its pages."""
  return markdown if page.file.src_uri in _made else from_docs(markdown)
