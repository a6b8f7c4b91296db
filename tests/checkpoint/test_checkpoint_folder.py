"""Nothing outside of a folder of checkpoints is written, renamed or deleted, whatever is in it."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import re
import shutil
import tempfile
import zlib

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.checkpoint import files, folder, verification
from tests.checkpoint.checkpoint_stores import assert_holds, fill, make_store

SMALL = {"w": ([("n", 3)], tf.float32, tf.float32)}
SUFFIXES = [
  ".index",
  ".data-00000-of-00001",
  ".manifest",
  ".meta",
  ".with-input-00000.txt",
]


def content_of(place: pathlib.Path) -> dict[str, tuple]:
  """All that is in a folder: content, or where a link points to; and how many names a file has."""
  found = {}
  for path in sorted(place.rglob("*")):
    name = str(path.relative_to(place))
    if path.is_symlink():
      found[name] = ("link", os.readlink(path))
    elif path.is_file():
      found[name] = ("file", path.read_bytes())
    else:
      found[name] = ("folder",)
  return found


@pytest.fixture(scope="module")
def saved(cpu_devices, tmp_path_factory):
  """A folder with two checkpoints of one variable, its store, and the values by step."""
  place = tmp_path_factory.mktemp("saved")
  store = make_store(cpu_devices, "1", SMALL)
  c = checkpoint.Checkpointer(str(place), store, asynchronous=False)
  values = {}
  for step in (1, 2):
    values[step] = fill(store, step)
    c.save(step)
  return place, store, values


def make_victim(place: pathlib.Path, saved: pathlib.Path) -> None:
  """A folder with a whole checkpoint 1000, one in a folder of it, and other files."""
  for where in (place, place / "sub"):
    where.mkdir()
    for suffix in SUFFIXES[:3]:
      shutil.copy(saved / f"model.ckpt-2{suffix}", where / f"model.ckpt-1000{suffix}")
    for suffix in SUFFIXES[3:]:
      (where / f"model.ckpt-1000{suffix}").write_text("precious")
  (place / "notes.txt").write_text("precious")


def write_state(place: pathlib.Path, entries: list[str], checksum: bool = False) -> None:
  """A state file that names checkpoints, the last as the newest."""
  quoted = [files._quoted(e) for e in entries]
  lines = [f"model_checkpoint_path: {quoted[-1]}"]
  lines += [f"all_model_checkpoint_paths: {q}" for q in quoted]
  content = ("\n".join(lines) + "\n").encode()
  head = b"# crc32 %08x\n" % zlib.crc32(content) if checksum else b""
  (place / "checkpoint").write_bytes(head + content)


# ------------------------------------------------------------------- what is inside


@pytest.mark.parametrize(
  ("path", "expected"),
  [
    ("RUN/model.ckpt-1", "model.ckpt-1"),
    ("RUN/./sub//../model.ckpt-1", "model.ckpt-1"),
    ("RUN/sub/model.ckpt-1", "sub/model.ckpt-1"),
    ("RUN/../run/model.ckpt-1", "model.ckpt-1"),
    ("LINK/model.ckpt-1", "model.ckpt-1"),
    ("RUN/inner/model.ckpt-1", "sub/model.ckpt-1"),  # A link that stays inside.
    ("RUN/file_out", "file_out"),  # A link of its own name; it may be deleted.
    ("RUN/a\nb", "a\nb"),
    ("RUN/~/x", "~/x"),
    ("RUN", None),
    ("RUN/", None),
    ("RUN/.", None),
    ("RUN/..", None),
    ("RUN/../victim/model.ckpt-1000", None),
    ("RUN/sub/../../victim/x", None),
    ("RUN/model.ckpt-1/../../x", None),
    ("RUN2/model.ckpt-1", None),
    ("RUN/out/model.ckpt-1000", None),
    ("RUN/out/sub/../model.ckpt-1000", None),
    ("RUN/loop/x", "loop/x"),  # Nothing can be opened there.
    ("RUN/x\0y", None),
    ("gs://bucket/x", None),
    ("/etc/passwd", None),
  ],
)
def test_what_is_inside(path, expected, tmp_path):
  run = tmp_path / "run"
  (run / "sub").mkdir(parents=True)
  (tmp_path / "victim").mkdir()
  (tmp_path / "link").symlink_to("run")
  (run / "inner").symlink_to("sub")
  (run / "out").symlink_to("../victim")
  (run / "file_out").symlink_to("../victim/x")
  (run / "loop").symlink_to("loop")
  path = path.replace("RUN", str(run)).replace("LINK", str(tmp_path / "link"))
  for directory in (str(run), f"{run}/", str(tmp_path / "link"), f"file://{run}"):
    assert folder.relative(directory, path) == expected
  if path.startswith("/"):
    assert folder.relative(str(run), f"file://{path}") == expected
  if expected is None:
    with pytest.raises(errors.StorageError, match=re.escape(f"not inside {run}")):
      folder.inside(str(run), path)
  assert folder.relative("/", "/x") == "x"


def test_what_is_inside_a_store():
  for directory in ("gs://b/run", "gs://b/run/"):
    assert folder.relative(directory, "gs://b/run/sub/x") == "sub/x"
    for path in ("gs://b/run", "gs://b/run/", "gs://b/run/../x", "gs://b/run2/x", "/b/run/x"):
      assert folder.relative(directory, path) is None
    assert folder.relative(directory, "gs://b/run//x") is None


# --------------------------------------------------------------------- state files

PARTS = [
  "..", ".", "", "victim", "run", "sub", "out", "deep", "~", "model.ckpt-1000", "model.ckpt-2",
  "model.ckpt-1", "notes.txt", 'quo"te', "new\nline", "zero\0byte", "*", "gs:",
]  # fmt: skip
RELATIVE = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map("/".join)
NAMES_OF_IT = ["../victim/model.ckpt-1000", "out/model.ckpt-1000", "TOP/victim/sub/model.ckpt-1000"]
ENTRIES = st.lists(
  st.one_of(
    RELATIVE,
    RELATIVE.map(lambda p: f"TOP/{p}"),
    RELATIVE.map(lambda p: f"file://TOP/{p}"),
    st.sampled_from([*NAMES_OF_IT, "model.ckpt-2", "TOP/run/model.ckpt-1"]),
  ),
  min_size=1,
  max_size=6,
)
LINKS = st.sets(
  st.sampled_from(
    [
      ("out", "../victim"),
      ("deep/out", "../../victim/sub"),
      (".unfinished-folder", "../victim"),
      (".unfinished-file", "../victim/notes.txt"),
      (".unfinished-checkpoint", "../victim/notes.txt"),
      (".unfinished-real/out", "../../victim"),
      ("model.ckpt-3.index", "../victim/model.ckpt-1000.index"),
      ("model.ckpt-3.data-00000-of-00001", "../victim/model.ckpt-1000.data-00000-of-00001"),
      ("model.ckpt-3.manifest", "../victim/model.ckpt-1000.manifest"),
      ("model.ckpt-5.with-x", "../victim/notes.txt"),
      ("model.ckpt-5.data-00000-of-00001", "../victim"),
      ("checkpoint", "../victim/notes.txt"),
    ]
  )
)
KINDS = st.sampled_from(["symbolic", "hard", "absolute"])


@given(ENTRIES, LINKS, KINDS, st.booleans(), st.sampled_from([None, 1, 2]))
@pytest.mark.slow
def test_a_victim_beside_the_folder_is_untouched(
  saved, entries, links, kind, has_state, max_to_keep
):
  """Whatever its state file and links say, and by whatever name the folder itself is called."""
  original, store, _ = saved
  with tempfile.TemporaryDirectory() as top_name:
    top = pathlib.Path(top_name)
    run, victim = top / "run", top / "victim"
    shutil.copytree(original, run)
    make_victim(victim, original)
    (top / "other name").symlink_to("run")
    if has_state:
      write_state(run, [e.replace("TOP", top_name) for e in entries])
    for name, target in sorted(links):
      path = run / name
      path.parent.mkdir(exist_ok=True)
      path.unlink(missing_ok=True)
      aim = (path.parent / target).resolve()
      if kind == "hard" and aim.is_file():
        os.link(aim, path)
      else:
        path.symlink_to(aim if kind == "absolute" else target)
    before, of_run = content_of(victim), content_of(run)
    for place in (run, top / "other name"):
      try:
        newest = checkpoint.latest_checkpoint(str(place))
      except errors.CheckpointError:
        newest = None
      assert newest is None or folder.relative(str(place), newest)
    assert content_of(run) == of_run  # Who reads changes nothing.
    for step, place in ((3, run), (4, top / "other name"), (5, run)):
      c = checkpoint.Checkpointer(str(place), store, max_to_keep=max_to_keep, asynchronous=False)
      values = fill(store, step)
      path = c.save(step, attachments={"x": lambda prefix: pathlib.Path(prefix).write_text("y")})
      assert content_of(victim) == before
      fill(store, 9)
      assert c.restore().path == path
      assert_holds(store, values)
    assert not [n for n in os.listdir(run) if n.startswith(".unfinished")]
    if max_to_keep == 1:
      assert not (run / "model.ckpt-4.index").exists()
    assert content_of(victim) == before


@pytest.mark.parametrize("newest", NAMES_OF_IT)
def test_a_checkpoint_of_elsewhere_is_refused_by_name(newest, saved, tmp_path, caplog):
  """It is not read either, but by who names it."""
  original, store, values = saved
  run, victim = tmp_path / "run", tmp_path / "victim"
  shutil.copytree(original, run)
  make_victim(victim, original)
  (run / "out").symlink_to("../victim")
  newest = newest.replace("TOP", str(tmp_path))
  write_state(run, ["model.ckpt-1", "../else/model.ckpt-3", newest])
  c = checkpoint.Checkpointer(str(run), store, asynchronous=False, max_to_keep=1)
  before = content_of(victim)
  assert c.latest() == str(run / "model.ckpt-1")
  assert c.restore().step == 1
  (record,) = caplog.records
  assert record.levelno == logging.WARNING
  assert f"{run}/checkpoint names '{run}/../else/model.ckpt-3', " in record.getMessage()
  assert f"{newest}', outside of {run}: nothing is read, written or deleted" in record.getMessage()
  assert c.restore(str(victim / "model.ckpt-1000")).step == 2
  assert_holds(store, values[2])
  c.save(7)
  state = (run / "checkpoint").read_text()
  assert "ckpt-7" in state and "1000" not in state
  assert content_of(victim) == before
  # Beginning anew without a word would be wrong, too.
  for path in run.glob("model.ckpt-*"):
    path.unlink()
  write_state(run, [newest])
  for look in (c.latest, c.restore, lambda: checkpoint.latest_checkpoint(str(run))):
    with pytest.raises(errors.DamagedCheckpointError, match=r"no checkpoint in .*ckpt-1000', out"):
      look()


def test_a_copied_folder_leaves_the_first_one_alone(saved, tmp_path):
  """State files of TensorFlow may have absolute paths: here of the folder it was copied from."""
  original, store, _ = saved
  first, second = tmp_path / "first", tmp_path / "second"
  shutil.copytree(original, first)
  write_state(first, [str(first / f"model.ckpt-{n}") for n in (1, 2)])
  shutil.copytree(first, second)
  before = content_of(first)
  c = checkpoint.Checkpointer(str(second), store, max_to_keep=1, asynchronous=False)
  assert c.latest() == str(second / "model.ckpt-2")
  c.save(3)
  assert content_of(first) == before
  # In its own folder absolute paths are as good as others.
  c = checkpoint.Checkpointer(str(first), store, max_to_keep=1, asynchronous=False)
  assert c.restore().path == str(first / "model.ckpt-2")
  c.save(3)
  assert checkpoint.all_checkpoints(str(first)) == [str(first / "model.ckpt-3")]


def test_a_folder_of_tensorflows_manager(tmp_path, cpu_devices):
  """Its checkpoints are counted; names with any characters are written as they are read."""
  weight = tf.train.Checkpoint(w=tf.Variable(1.0))
  name = 'my "best\\'
  manager = tf.train.CheckpointManager(weight, str(tmp_path), 3, checkpoint_name=name)
  theirs = [manager.save(), manager.save()]
  store = make_store(cpu_devices, "1", SMALL)
  c = checkpoint.Checkpointer(str(tmp_path), store, max_to_keep=2, asynchronous=False)
  c.save(5)
  assert tf.train.get_checkpoint_state(str(tmp_path)).all_model_checkpoint_paths == [
    theirs[1],
    str(tmp_path / "model.ckpt-5"),
  ]
  assert not os.path.exists(theirs[0] + ".index")
  c.save(6)
  assert not os.path.exists(theirs[1] + ".index")


def test_names_of_any_length_and_a_state_that_is_no_file(saved, tmp_path, caplog):
  original, store, _ = saved
  run = tmp_path / "run"
  shutil.copytree(original, run)
  c = checkpoint.Checkpointer(str(run), store, asynchronous=False)
  write_state(run, ["../" * 3000 + "x", "x" * 5000])
  assert c.latest() == str(run / "model.ckpt-2")
  assert len(caplog.records) == 2 and all(len(r.getMessage()) < 1500 for r in caplog.records)
  caplog.clear()
  (run / "checkpoint").unlink()
  (run / "checkpoint").mkdir()
  assert c.latest() == str(run / "model.ckpt-2")
  assert "checkpoint cannot be read" in caplog.text and "Is a directory" in caplog.text


def test_an_old_one_that_cannot_be_deleted(saved, tmp_path, monkeypatch, caplog):
  """The new one is written all the same."""
  original, store, _ = saved
  run = tmp_path / "run"
  shutil.copytree(original, run)

  def denied(path):
    raise tf.errors.PermissionDeniedError(None, None, "Operation not permitted")

  c = checkpoint.Checkpointer(str(run), store, max_to_keep=2, asynchronous=False)
  monkeypatch.setattr(tf.io.gfile, "remove", denied)
  c.save(3)
  assert "the old checkpoint" in caplog.text and "not permitted" in caplog.text
  assert c.restore().step == 3


def test_one_checkpoint_under_several_names(saved, tmp_path):
  """An alias of the newest is not an older one that goes."""
  original, store, _ = saved
  run = tmp_path / "run"
  shutil.copytree(original, run)
  aliases = ["./model.ckpt-2", "sub/../model.ckpt-2", str(run / "model.ckpt-2")]
  write_state(run, [*aliases, "model.ckpt-1", "model.ckpt-2"])
  c = checkpoint.Checkpointer(str(run), store, max_to_keep=2, asynchronous=False)
  c.save(2)
  assert [p[-1] for p in checkpoint.all_checkpoints(str(run))] == ["1", "2"]
  c.save(3)
  assert [p[-1] for p in checkpoint.all_checkpoints(str(run))] == ["2", "3"]


def test_folders_in_a_store(saved):
  """As gs://; TensorFlow's file system in memory has no links, and no parents to go to."""
  _, store, _ = saved
  run, victim = "ram://top/run", "ram://top/victim"
  for place in (run, victim):
    tf.io.gfile.makedirs(place)
    checkpoint.Checkpointer(place, store, asynchronous=False).save(1000)
  entries = [f"{victim}/model.ckpt-1000", "../victim/model.ckpt-1000", f"{run}/model.ckpt-1000"]
  text = "".join(f'all_model_checkpoint_paths: "{e}"\n' for e in entries)
  content = f'model_checkpoint_path: "{entries[-1]}"\n{text}'
  folder.write(run, f"{run}/checkpoint", content.encode())
  c = checkpoint.Checkpointer(run, store, max_to_keep=1, asynchronous=False)
  assert c.latest() == f"{run}/model.ckpt-1000"
  c.save(1001)
  assert [p[-4:] for p in checkpoint.all_checkpoints(run)] == ["1001"]
  assert checkpoint.verify(f"{victim}/model.ckpt-1000") == []


# ----------------------------------------------------------- manifests, attachments


@pytest.mark.parametrize("suffix", ["/../../victim/notes.txt", ".with-/../../victim/notes.txt", ""])
def test_a_manifest_that_lists_files_of_elsewhere(suffix, saved, tmp_path, monkeypatch):
  """They are not even opened."""
  original, store, _ = saved
  run, victim = tmp_path / "run", tmp_path / "victim"
  shutil.copytree(original, run)
  make_victim(victim, original)
  prefix = str(run / "model.ckpt-2")
  records, _ = verification.read_manifest(prefix)
  record = verification.measure(str(victim / "notes.txt"), suffix)
  verification.write_manifest(prefix, [*records, record])
  opened = []
  real = verification.measure
  monkeypatch.setattr(verification, "measure", lambda *a: opened.append(a) or real(*a))
  (damage,) = checkpoint.verify(prefix)
  assert not opened
  assert repr(f"model.ckpt-2{suffix}") in damage.what and "no file of the checkpoint" in damage.what
  assert checkpoint.latest_checkpoint(str(run)) == str(run / "model.ckpt-1")
  assert json.loads((run / "model.ckpt-2.manifest").read_text().split("\n", 1)[1])


@pytest.mark.parametrize("name", ["../../victim/x", "/x", "a/b", "", "x\0y"])
def test_names_of_attachments_are_parts_of_names(name, saved, tmp_path):
  _, store, _ = saved
  c = checkpoint.Checkpointer(str(tmp_path / "run"), store, asynchronous=False)
  with pytest.raises(errors.CheckpointError, match="an attachment cannot have the name"):
    c.save(1, attachments={name: lambda prefix: pathlib.Path(prefix).write_text("")})
  with pytest.raises(errors.CheckpointError, match="an attachment cannot have the name"):
    checkpoint.attachment("run/model.ckpt-1", name)
  assert not list(tmp_path.iterdir())


def test_attachments_in_a_folder_whose_name_is_a_pattern(saved, tmp_path):
  """What TensorFlow's glob would look for is another one."""
  _, store, _ = saved
  run = tmp_path / "lr[0.1]*"
  c = checkpoint.Checkpointer(str(run), store, asynchronous=False)
  path = c.save(
    1, attachments={"[x]": lambda prefix: pathlib.Path(prefix + ".txt").write_text("y")}
  )
  assert pathlib.Path(checkpoint.attachment(path, "[x]") + ".txt").read_text() == "y"
  assert ".with-[x]-00000.txt" in {r.suffix for r in verification.read_manifest(path)[0]}


# ------------------------------------------------------------------- the functions


def test_writing_replaces_links_and_names(tmp_path):
  run, victim = tmp_path / "run", tmp_path / "victim"
  run.mkdir()
  victim.mkdir()
  (victim / "x").write_text("precious")
  for name in ("symbolic", "dangling", "hard"):
    (run / "hard").hardlink_to(victim / "x") if name == "hard" else (run / name).symlink_to(
      victim / ("x" if name == "symbolic" else "new")
    )
    folder.write(str(run), str(run / name), b"mine")
    assert (run / name).read_text() == "mine" and not (run / name).is_symlink()
  folder.write(str(run), str(run / "sub" / "file"), b"mine")
  (run / "out").symlink_to(victim)
  for call in (
    lambda: folder.write(str(run), str(run / "out" / "x"), b"mine"),
    lambda: folder.write(str(run), str(run / "out" / "sub" / "x"), b"mine"),
    lambda: folder.make(str(run), str(run / "out")),
    lambda: folder.make(str(run), str(run / "out" / "sub")),
    lambda: folder.remove(str(run), str(run / "out" / "x")),
    lambda: folder.remove_tree(str(run), str(run / ".." / "victim")),
    lambda: folder.rename(str(run), str(run / "sub" / "file"), str(run / "out" / "y")),
    lambda: folder.rename(str(run), str(run / "out" / "x"), str(run / "y")),
  ):
    with pytest.raises(errors.StorageError, match=f"leads to {victim}|not inside"):
      call()
  folder.remove_if_possible(str(run), str(run / "out" / "x"))
  (run / "sub" / "out").symlink_to(victim)
  folder.remove_tree(str(run), str(run / "sub"))
  folder.remove_tree(str(run), str(run / "out"))
  assert not (run / "sub").exists() and not (run / "out").is_symlink()
  assert content_of(victim) == {"x": ("file", b"precious")}


def test_nothing_else_changes_files(repository):
  """A new call of TensorFlow's or Python's functions belongs into `folder`."""
  changes = re.compile(
    r"gfile\.(?:remove|rmtree|rename|copy)\b|os\.(?:remove|unlink|rename|replace|rmdir|truncate)\b"
    r"|shutil\.(?!disk_usage|which)\w+|\.unlink\(|\.rmtree\("
  )
  found = {}
  for package in ("mesh_tensorflow/checkpoint", "transformer"):
    for path in (repository / package).rglob("*.py"):
      count = len(changes.findall(path.read_text()))
      if count:
        found[str(path.relative_to(repository))] = count
  assert found.pop("mesh_tensorflow/checkpoint/folder.py") >= 4
  # What these change is in no folder of checkpoints: a folder of tokens that a command has made,
  # and the file of results that a user names, with what lies beside it.
  assert found.pop("transformer/data/tokenizing.py") == 4
  assert found.pop("transformer/generation/files.py") == 3
  # A vocabulary that was written there a moment ago.
  assert found.pop("transformer/data/vocabularies/named.py") == 1
  assert not found
