"""Writes notebooks in examples/ from pages of docs/: texts and blocks of a page are its cells.

python -m docs.tools.notebook
"""

from __future__ import annotations

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# By the names of notebooks, without their endings.
PAGES = {name: ROOT / "docs" / f"{name}.md" for name in ("own_loop", "keras_tour")}
NOTEBOOKS = {name: ROOT / "examples" / f"{name}.ipynb" for name in PAGES}
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Pages beside the notebook's folder, as seen from there.
_LINK = re.compile(r"\]\(([a-z_]+\.md)")


def notebook(page: str) -> str:
  """A notebook, as JSON: Python blocks are code cells, what they print is left out."""
  cells = []
  position = 0
  for block in [*_BLOCK.finditer(page), None]:
    text = page[position : block.start() if block else len(page)].strip()
    if text:
      text = _LINK.sub(r"](../docs/\1", text)
      cells.append({"cell_type": "markdown", "metadata": {}, "source": text})
    if block and block[1] == "python":
      code = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
      cells.append({**code, "source": block[2].strip()})
    position = block.end() if block else len(page)
  for i, cell in enumerate(cells):
    cell["id"] = f"cell-{i}"
    cell["source"] = str(cell["source"]).splitlines(keepends=True)
  kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
  metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
  whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
  return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
  for name, page in PAGES.items():
    NOTEBOOKS[name].write_text(notebook(page.read_text()))
