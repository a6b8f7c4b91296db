"""Commands of docs/large_models.md: the first is refused for want of memory, the next trains."""

from __future__ import annotations

import json
import re
import shlex

import pytest

# What the machine has is said here; sizes are smaller, but for their proportions those of the page.
_MEMORY = """
from mesh_tensorflow.meshes import memory
memory.available_bytes = lambda: 24_000_000
"""
_SMALL = "--set num_layers=2 --set d_model=128 --set d_ff=512 --set num_heads=2 --set d_kv=64"
_TEXT = "To be, or not to be, that is the question.\n" * 200


@pytest.mark.subprocess
def test_the_commands(tmp_path, repository, run_forked):
  page = (repository / "docs" / "large_models.md").read_text()
  section = page.split('## From "does not fit" to "trains"')[1].split("\n## ")[0]
  commands = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
  assert len(commands) == 2
  (tmp_path / "input.txt").write_text(_TEXT)
  (tmp_path / "small_machine.py").write_text(_MEMORY)
  ended = []
  for command in commands:
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "mesh-transformer"
    more = [*shlex.split(_SMALL), "--module_import=small_machine"]
    done = run_forked(
      ["-m", "mesh_transformer_cli", *arguments, *more],
      cwd=str(tmp_path),
      env={"PYTHONPATH": str(tmp_path)},
      timeout=280,
      check=False,
    )
    ended.append((done.returncode, done.stderr))
  (refused, error), (trained, _) = ended
  assert refused == 2, error
  assert re.search(r"OutOfMemoryError: .* needs about .* 8 processor\(s\)", error), error
  assert "run.shard_state" in error
  assert trained == 0, ended[1][1]
  lines = (tmp_path / "large" / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
