"""Programs that are given a mesh which does not fit them: one line, and no traceback."""

from __future__ import annotations

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.examples import mesh_flags


def test_a_mesh_that_does_not_fit_is_one_line(run_forked, repository, tmp_path):
  program = [str(repository / "examples" / "nbody.py"), "--mesh_shape=a:2,b:2,c:2"]
  result = run_forked(program, cwd=tmp_path, check=False)
  assert result.returncode == 1
  assert "Traceback" not in result.stderr
  assert result.stderr.splitlines()[-1].startswith("MeshShapeError: nbody: the mesh a:2,b:2,c:2")


def test_other_errors_are_shown_as_they_are():
  def wrong():
    raise mtf.LayoutError("no such axis")

  with pytest.raises(SystemExit) as e:
    mesh_flags.run(wrong)
  assert e.value.code == "LayoutError: no such axis"
  with pytest.raises(ZeroDivisionError):
    mesh_flags.run(lambda: 1 // 0)


def test_every_program_with_a_mesh_says_it_in_a_line(repository):
  told = ("mesh_flags.run(main)", "except mtf.MeshError as e:")
  for path in sorted((repository / "examples").glob("*.py")):
    text = path.read_text()
    if "--mesh_shape" in text or "mesh_flags.add_mesh_flags" in text:
      last = text.split('if __name__ == "__main__":')[-1]
      assert any(word in last for word in told), path.name
