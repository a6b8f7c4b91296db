"""Whatever is in a file that people hand us: it is read, or refused by a typed error, in bounds."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from mesh_tensorflow.transformer.data.vocabularies.characters import CharacterVocabulary
from tests.environment import mutated_files


def test_a_few_of_each_reader():
  found, more = mutated_files.run(300, seed=1)
  assert len(found) > 40
  wrong = {name: dict(c) for name, c in found.items() if c["wrong"]}
  assert not wrong
  assert sum(c["typed"] for c in found.values()) > 100
  assert more < mutated_files.MOST_MEMORY


CONTENTS = {
  "brackets": b"[" * 100_000,
  "objects": b'{"a":' * 50_000,
  "huge": b'{"vocab_size": 1e999, "format": 1e999, "text": 1e999}\n',
  "kinds": b'{"data": 7, "cluster": 7, "text": 7, "tokens": 7, "format": 1, "files": 7}\n',
  "list": b"[{}, 7, null]\n",
  "no text": b"\xff\xfe\xff\0",
  "empty": b"",
  "first line": CharacterVocabulary._HEADER.encode(),
}


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
  folder = tmp_path_factory.mktemp("files")
  return [(r, folder / r.name / r.file) for r in mutated_files.make(folder)]


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_other_contents_of_each_reader(readers, content):
  wrong = {}
  for reader, path in readers:
    path.write_bytes(content)
    kind, what = mutated_files.outcome(reader, str(path))
    path.write_bytes(reader.content)
    if kind == "wrong":
      wrong[reader.name] = what
  assert not wrong


@pytest.mark.long
def test_fifty_thousand():
  command = [sys.executable, "-m", "tests.environment.mutated_files", "--count=50000"]
  environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=4 * 3600, env=environ, check=False
  )
  assert done.returncode == 0, done.stdout
  assert re.search(r"^all: right \d+  typed \d+  wrong 0$", done.stdout, re.MULTILINE)
