"""Files of results: what counts is on the disk, and goes on."""

from __future__ import annotations

import json
import signal

import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer.generation.files import ResumableFile, stopped_by_signals

WORK = {"texts": ["a", "b"], "seed": 0}


def names(folder):
  return sorted(p.name for p in folder.iterdir())


def test_lines_count_when_they_are_written(tmp_path):
  path = tmp_path / "new" / "out"
  file = ResumableFile(str(path), WORK)
  assert (file.done, file.resumed) == (0, 0)
  file.append(["one\n", "two\n"])
  assert names(path.parent) == ["out.progress", "out.unfinished"]
  # As if it was killed behind the text of the next lines: they do not count yet.
  with open(f"{path}.unfinished", "ab") as f:
    f.write(b"thr")
  again = ResumableFile(str(path), WORK)
  assert (again.done, again.resumed, again.lines) == (2, 2, ["one", "two"])
  again.append(["three\n"])
  again.finish()
  assert path.read_text() == "one\ntwo\nthree\n" and names(path.parent) == ["out"]
  assert again.lines == ["one", "two", "three"]
  # What is whole is not gone on with.
  assert ResumableFile(str(path), WORK).done == 0


@pytest.mark.parametrize("damage", ["shorter", "no_progress", "not_json", "other_count"])
def test_what_does_not_fit_begins_anew(tmp_path, damage):
  path = tmp_path / "out"
  ResumableFile(str(path), WORK).append(["one\n", "two\n"])
  progress = tmp_path / "out.progress"
  if damage == "shorter":
    (tmp_path / "out.unfinished").write_text("one\n")
  elif damage == "no_progress":
    progress.unlink()
  elif damage == "not_json":
    progress.write_text("{")
  else:
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"done": 1}))
  file = ResumableFile(str(path), WORK)
  assert file.done == 0 and (tmp_path / "out.unfinished").read_bytes() == b""


def test_other_work_begins_anew(tmp_path):
  ResumableFile(str(tmp_path / "out"), WORK).append(["one\n"])
  assert ResumableFile(str(tmp_path / "out"), WORK | {"seed": 1}).done == 0


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(errors.StorageError, match="cannot write out in the folder .*file"):
    ResumableFile(str(tmp_path / "file" / "out"), WORK)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_become_errors_that_say_what_is_kept(number, ctrl_c):
  before = signal.getsignal(number)
  with (
    pytest.raises(errors.StoppedError, match=f"stopped by {number.name}; all of it"),
    stopped_by_signals(lambda: "all of it"),
  ):
    # In this thread, and handled before it returns; `os.kill` may be given to another one.
    signal.raise_signal(number)
  assert signal.getsignal(number) is before
