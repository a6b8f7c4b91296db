"""Vocabularies belong to the checkpoints: today's text and files do not change trained models."""

from __future__ import annotations

import hashlib
import json
import shutil

import gin
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import subword_vocabulary, t2t_vocabulary, vocabulary
from mesh_tensorflow.transformer.data.vocabularies import kept
from tests.transformer import small_lm
from tests.transformer.small_lm import EVAL, TEXT, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A folder with a model of characters and its text; tests do not write there."""
  folder = tmp_path_factory.mktemp("trained")
  run(folder, text=TEXT)
  yield folder
  gin.clear_config()


@pytest.fixture
def copied(trained, tmp_path):
  shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
  return tmp_path


@pytest.fixture
def model_dir(tmp_path):
  """A folder that has a checkpoint, so far as vocabularies go."""
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "model.ckpt-1.index").write_text("")
  return tmp_path / "model"


def loss(folder, *bindings) -> float:
  return run(folder, *EVAL, *bindings)["validation"]["loss"]


def test_two_new_characters_in_the_text_change_nothing(copied, caplog):
  """They sort in front of most others, so that every id would be another one."""
  text = (copied / "text.txt").read_text()
  before = loss(copied)
  (copied / "text.txt").write_text("#\u0007" + text)
  assert loss(copied) == pytest.approx(before, abs=0.01)
  assert "'\\x07#', the first at character 0; they are left out, 2 time(s)" in caplog.text
  # Training goes on with the same ids, too.
  losses = run(copied, "run.train_steps = 3")
  assert len(losses) == 1 and losses[0] < 6
  record = json.loads((copied / "model" / small_lm.config_files(copied)[-1]).read_text())
  assert record["vocabulary"][0]["size"] == len(set(text)) + 2


def test_another_alphabet_is_refused(copied):
  (copied / "text.txt").write_text("Быть или не быть, вот в чём вопрос. " * 100)
  with pytest.raises(errors.DataError, match=r"text.txt: .*not among the .* of the vocabulary"):
    run(copied, "run.train_steps = 3")
  with pytest.raises(errors.DataError, match=r"\(.* of 3,600 characters\)"):
    loss(copied)


def test_nothing_but_training_needs_its_text(copied):
  """Lines of prompts, other texts, scores and SavedModels."""
  (copied / "text.txt").unlink()
  (copied / "other.txt").write_text("Whether to be, or not\n" * 20)
  assert small_lm.infer(copied, ["To be"])[0].startswith("To be")
  other = f"dataset.text_lm_dataset.validation_files = '{copied}/other.txt'"
  assert loss(copied, other, "dataset.text_lm_dataset.validation_fraction = None") > 0
  scores, _ = run(
    copied, "run.mode = 'score_from_strings'", "score_from_strings.inputs = None",
    "score_from_strings.targets = ['be']", "score_from_strings.score_postprocess_fn = @save_scores",
  )  # fmt: skip
  assert scores[0] < 0
  assert run(copied, "run.mode = 'export_score'", f"run.export_path = '{copied}/exported'")
  with pytest.raises(errors.DataError, match="there is no file .*text.txt"):
    run(copied, "run.train_steps = 3")


def test_without_checkpoints_it_is_made_anew(tmp_path):
  """A first training that failed leaves nothing that a second one would be held to."""
  with pytest.raises(errors.MeshShapeError):
    run(tmp_path, "run.mesh_shape = 'all:1000'", text=TEXT)
  run(tmp_path, text="hello world, what now?\n" * 50)
  kept_file = tmp_path / "model" / "vocabularies" / "characters"
  assert vocabulary.CharacterVocabulary.load(str(kept_file)).characters == "\n ,?adehlnortw"


def test_only_training_writes(model_dir, tmp_path):
  (tmp_path / "text").write_text("abc")
  with kept.kept_in(str(model_dir), may_write=False):
    assert vocabulary.get_character_vocabulary(str(tmp_path / "text")).characters == "abc"
  assert not (model_dir / kept.FOLDER).exists()
  with kept.kept_in(None):
    assert vocabulary.get_character_vocabulary(str(tmp_path / "text")).characters == "abc"


def _characters(path) -> vocabulary.CharacterVocabulary:
  return vocabulary.get_character_vocabulary(str(path))


def _characters_of_file(folder, letters):
  vocabulary.CharacterVocabulary(letters).save(str(folder / "v"))
  return lambda: _characters(folder / "v")


def _t2t(folder, letters):
  subtokens = ["<pad>", "<EOS>", *letters, *"\\_u;0123456789"]
  (folder / "v").write_text("".join(f"'{s}_'\n" if s in letters else f"'{s}'\n" for s in subtokens))
  return lambda: t2t_vocabulary.get_t2t_vocabulary(str(folder), "v")


def _subwords(folder, letters):
  pytest.importorskip("sentencepiece")
  text = [" ".join(letters[i:] + letters[:i]) for i in range(len(letters))] * 9
  subword_vocabulary.train_subword_vocabulary(text, 10, model_type="char").save(str(folder / "v"))
  return lambda: subword_vocabulary.get_subword_vocabulary(str(folder / "v"))


@pytest.mark.parametrize("make", [_characters_of_file, _t2t, _subwords])
def test_a_vocabulary_file_that_changed_is_refused(model_dir, tmp_path, caplog, make):
  """Of the same size; its loss does no harm."""

  def get(**options):
    with kept.kept_in(str(model_dir), **options):
      return read()

  read = make(tmp_path, "abcdef")
  first = kept.describe(get())
  assert first == kept.describe(read())
  read = make(tmp_path, "abcdxy")
  with pytest.raises(errors.ConfigError, match=f"vocabulary file {tmp_path}/v has changed .*kept"):
    get()
  assert kept.describe(get(allow_change=True, may_write=False)) == kept.describe(read()) != first
  assert "has changed" in caplog.text
  (tmp_path / "v").unlink()
  assert kept.describe(get()) == first
  # Allowed in training, today's is that of the checkpoints to come.
  read = make(tmp_path, "abcdxy")
  second = kept.describe(get(allow_change=True))
  assert kept.describe(get()) == second
  assert len(json.loads((model_dir / kept.FOLDER / "index.json").read_text())) == 1


def test_a_vocabulary_trained_on_the_spot_is_kept(model_dir, tmp_path):
  pytest.importorskip("sentencepiece")
  (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
  arguments = dict(train_files=str(tmp_path / "text"), vocab_size=31)

  def get(**more):
    with kept.kept_in(str(model_dir)):
      return subword_vocabulary.get_subword_vocabulary(str(tmp_path / "v"), **{**arguments, **more})

  first = get()
  (tmp_path / "v").unlink()
  (tmp_path / "text").write_text("another text of other words\n" * 20)
  assert get() == first
  (tmp_path / "text").unlink()
  assert get(extra_ids=3).vocab_size == 34 and not (tmp_path / "v").exists()
  with pytest.raises(errors.ConfigError, match="vocab_size is 40"):
    get(vocab_size=40)


def test_each_scope_has_its_own(model_dir, tmp_path):
  """Inputs and targets; where a text has been moved to another place, it is known by its scope."""
  for name in ("a", "b"):
    (tmp_path / name).write_text(name * 3)

  def get(*names):
    with kept.kept_in(str(model_dir)):
      found = []
      for scope, name in zip(("inputs", "targets"), names):
        with gin.config_scope(scope):
          found.append(_characters(tmp_path / name).characters)
      return found

  assert get("a", "b") == ["a", "b"]
  (tmp_path / "moved").write_text("xyz")
  assert get("moved", "b") == ["a", "b"]


def test_several_in_one_scope_are_told_apart_by_what_they_are_made_from(model_dir, tmp_path):
  for name in ("a", "b", "c"):
    (tmp_path / name).write_text(name)
  with kept.kept_in(str(model_dir)):
    assert [_characters(tmp_path / n).characters for n in "abab"] == ["a", "b", "a", "b"]
  (tmp_path / "a").write_text("A")
  with kept.kept_in(str(model_dir)):
    assert [_characters(tmp_path / n).characters for n in "ba"] == ["b", "a"]
    assert _characters(tmp_path / "c").characters == "c"  # A new one.
  with kept.kept_in(str(model_dir)):
    with pytest.raises(errors.ConfigError, match="keeps 3 vocabularies of characters"):
      _characters(tmp_path / "gone")


@pytest.mark.parametrize("file,text", [("characters", "is not what"), ("index.json", "be read")])
def test_damage_is_told(model_dir, tmp_path, file, text):
  (tmp_path / "text").write_text("abc")
  with kept.kept_in(str(model_dir)):
    _characters(tmp_path / "text")
  with open(model_dir / kept.FOLDER / file, "a") as f:
    f.write("x")
  with pytest.raises(errors.DataError, match=f"{file}.*{text}"):
    with kept.kept_in(str(model_dir)):
      _characters(tmp_path / "text")


def test_an_index_that_leads_out_of_the_folder_is_refused(model_dir, tmp_path):
  vocabulary.CharacterVocabulary("abc").save(str(tmp_path / "v"))
  with kept.kept_in(str(model_dir)):
    _characters(tmp_path / "v")
  index = model_dir / kept.FOLDER / "index.json"
  index.write_text(index.read_text().replace('"characters",\n  "digest', '"../../v",\n  "digest'))
  assert "../../v" in index.read_text()
  vocabulary.CharacterVocabulary("xyz").save(str(tmp_path / "v"))
  with pytest.raises(errors.DataError, match="index.json.*'../../v' is not the name of a file"):
    with kept.kept_in(str(model_dir), allow_change=True):
      _characters(tmp_path / "v")


class Foreign:
  """A vocabulary of another library."""

  vocab_size = 3

  def __init__(self, texts):
    self._texts = texts

  def decode(self, ids):
    return "".join(self._texts[i] for i in ids)


def test_vocabularies_of_other_libraries_are_compared_by_their_ids():
  first, again, other = (kept.describe(Foreign(t)) for t in (["", "", "a"], ["", "", "a"], "xyz"))
  assert first == again != other
  unknown = kept.describe(Foreign([]))
  assert unknown == {"class": "Foreign", "size": 3, "digest": None}
  own = vocabulary.CharacterVocabulary("ab")
  assert kept.describe(own)["digest"] == hashlib.sha256(b"ab").hexdigest()
  described = [kept.describe(vocabulary.ByteVocabulary(n))["digest"] for n in (0, 0, 1)]
  assert described[0] == described[1] != described[2]
