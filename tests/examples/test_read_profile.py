"""examples/read_profile.py on a profile made by hand; docs/performance.md runs it on a real one."""

from __future__ import annotations

import pytest

from mesh_tensorflow.examples import read_profile

PICOSECONDS = 1_000_000_000  # In a millisecond.


def varint(n: int) -> bytes:
  out = b""
  while n > 127:
    out, n = out + bytes([n & 127 | 128]), n >> 7
  return out + bytes([n])


def field(number: int, value: int | bytes) -> bytes:
  if isinstance(value, int):
    return varint(number << 3) + varint(value)
  return varint(number << 3 | 2) + varint(len(value)) + value


def profile(events: list[tuple[str, int]]) -> bytes:
  """An XSpace of one plane with two lines; events of a name and a time in milliseconds."""
  names = sorted({name for name, _ in events})
  plane = field(2, b"/host:CPU")
  for i, name in enumerate(names, 1):
    plane += field(4, field(1, i) + field(2, field(1, i) + field(2, name.encode())))
  for part in (events[::2], events[1::2]):
    line = field(2, b"thread")
    for name, ms in part:
      # Field 4 is of 8 bytes, which the reader passes over.
      other = varint(4 << 3 | 1) + bytes(8)
      line += field(4, field(1, names.index(name) + 1) + other + field(3, ms * PICOSECONDS))
    plane += field(3, line)
  return field(1, plane) + field(2, b"an error")


EVENTS = [
  ("in/einsum/MatMul:MatMul", 30),
  ("out/einsum/MatMul:MatMul", 20),
  ("in/einsum/MatMul:MatMul", 10),
  ("relu/Relu:Relu", 4),
  ("ExecutorState::Process", 500),
  ("PartitionedCall:PartitionedCall", 300),
  ("loop/while:While", 200),
]


def test_operations_are_summed_and_those_that_call_others_left_out(tmp_path):
  path = tmp_path / "plugins" / "a.xplane.pb"
  path.parent.mkdir()
  path.write_bytes(profile(EVENTS))
  assert read_profile.find_profile(tmp_path) == read_profile.find_profile(path) == path
  by_name, by_type = read_profile.read(path)
  told = [(e.name, e.count, round(e.seconds * 1000, 6)) for e in by_name]
  assert told == [("in/einsum/MatMul", 2, 40), ("out/einsum/MatMul", 1, 20), ("relu/Relu", 1, 4)]
  assert [(e.name, e.count) for e in by_type] == [("MatMul", 3), ("Relu", 1)]


def test_the_table_is_of_one_step(tmp_path, capsys):
  (tmp_path / "a.xplane.pb").write_bytes(profile(EVENTS))
  read_profile.main([str(tmp_path), "--steps", "2", "--rows", "1"])
  first, row, empty, second, kind = capsys.readouterr().out.splitlines()
  assert "operations: 32.00 ms in each step" in first and empty == ""
  assert row.split() == ["20.000", "ms", "62.5%", "1", "x", "in/einsum/MatMul"]
  assert second.startswith("types") and kind.split()[-1] == "MatMul"


def test_a_folder_without_a_profile_and_files_that_are_none(tmp_path):
  with pytest.raises(SystemExit, match="no profile"):
    read_profile.main([str(tmp_path)])
  whole = profile(EVENTS)
  for content in (b"# A text, and no profile.\n", whole[: len(whole) // 2], b"\x0a"):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(SystemExit, match="is no profile"):
      read_profile.main([str(tmp_path / "other")])
