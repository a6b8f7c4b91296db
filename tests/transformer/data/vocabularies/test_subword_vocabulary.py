"""Subword vocabularies: SentencePiece models, and files of tensor2tensor."""

from __future__ import annotations

import functools
import gzip
import io
import re
import sys

import gin
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import subword_vocabulary as sv
from mesh_tensorflow.transformer import t2t_vocabulary
from mesh_tensorflow.transformer.data import text_readers

TEXT = [
  "the quick brown fox jumps over the lazy dog",
  "the dogs were quicker than the foxes; l'été était chaud",
  "a dog jumped over another quick dog",
] * 20


@pytest.fixture(scope="module")
def pieces():
  pytest.importorskip("sentencepiece")
  return sv.train_subword_vocabulary(TEXT, 44)


def test_conventions(pieces):
  assert pieces.vocab_size == 44
  ids = pieces.encode("the lazy dog")
  assert min(ids) > 2 and max(ids) < 44 and 1 < len(ids) < len("the lazy dog")
  assert pieces.encode("中") != [] and 2 in pieces.encode("中")
  assert pieces.decode([*ids, 1, 0, 0, 77]) == "the lazy dog"
  assert pieces.encode("") == []


def test_words_as_by_moses():
  pytest.importorskip("sacremoses")
  text = ["l'homme à l'arrière-plan, d'une femme.", "un homme et une femme (deux)."] * 20
  made = sv.train_subword_vocabulary(text, 60, model_type="bpe", moses_language="fr")
  # Words are the same pieces behind an elision and behind a blank.
  (homme,) = set(made.encode("homme")) & set(made.encode("l'homme"))
  assert made.encode("l'homme")[-1] == made.encode("un homme")[-1] == homme
  for line in text[:2]:
    assert made.decode(made.encode(line)) == line
    (again,) = made.sample([line], 0.5, [1])
    assert made.decode(again) == line
  assert made.encode("l’homme") == made.encode("l'homme")
  plain = sv.SentencePieceVocabulary(made.model)
  assert plain != made and plain.content() != made.content()
  assert plain.decode(made.encode(text[0])) == "l' homme à l' arrière-plan , d' une femme ."
  assert made == sv.SentencePieceVocabulary(made.model, moses_language="fr")
  assert made != sv.SentencePieceVocabulary(made.model, moses_language="en")
  with pytest.raises(errors.ConfigError, match="give no moses_language"):
    sv.train_subword_vocabulary(text, 60, exact=True, moses_language="fr")


@hypothesis.given(text=st.text(st.sampled_from("aé ,.'-()\"!?01%"), max_size=20))
@hypothesis.settings(deadline=None, max_examples=200)
def test_pieces_hold_the_words_of_moses(text):
  moses = pytest.importorskip("sacremoses")
  vocabulary = _bytes_of_words()
  words = moses.MosesTokenizer("fr").tokenize(text, escape=False)
  detokenized = moses.MosesDetokenizer("fr").detokenize(words, unescape=False)
  assert vocabulary.decode(vocabulary.encode(text)) == detokenized


@functools.cache
def _bytes_of_words():
  """A vocabulary that has bytes for what it knows no piece for."""
  line = 'l\'été est là - ou pas (non), "oui"!'
  return sv.train_subword_vocabulary([line] * 20, 280, byte_fallback=True, moses_language="fr")


def test_words_as_by_moses_from_files(tmp_path):
  pytest.importorskip("sacremoses")
  (tmp_path / "text").write_text("l'homme d'une femme, l'eau.\n" * 30)
  settings = dict(
    filename=str(tmp_path / "pieces"), train_files=str(tmp_path / "text"), vocab_size=18
  )
  made = sv.get_subword_vocabulary(**settings, moses_language="fr")
  assert made.decode(made.encode("l'eau d'une femme.")) == "l'eau d'une femme."
  assert sv.get_subword_vocabulary(**settings, moses_language="fr") == made
  assert sv.get_subword_vocabulary(**settings) != made


def test_unknown_parts_of_texts_are_told_and_texts_of_them_refused(pieces, tmp_path, caplog):
  vocabulary = sv.SentencePieceVocabulary(pieces.content().partition(b"\n")[2])
  for _ in range(2):
    vocabulary.encode("the 中 dog")
  assert caplog.text.count("become the unknown id 2: '中' in 'the 中 dog'") == 1
  for i in range(0x4E00, 0x4E00 + 50):
    vocabulary.encode(chr(i))
  assert len(caplog.records) == 20 and "no more of them are told" in caplog.text
  (tmp_path / "text").write_text("中 文\n" * 1000)
  settings = dict(train_files=str(tmp_path / "text"), document_unit="line")
  for mode in ("documents", "stream"):
    with pytest.raises(errors.DataError, match="% of .* tokens are unknown to the vocabulary"):
      text_readers.text_lm_dataset(8, vocabulary, mode=mode, **settings)
  (tmp_path / "pairs").write_text("the dog\t中 文\n" * 1000)
  with pytest.raises(errors.DataError, match="train split, targets: .*unknown to the vocabulary"):
    text_readers.parallel_text_dataset(8, vocabulary, files={"train": str(tmp_path / "pairs")})


def test_round_trip_in_python_and_tensorflow(pieces):
  for text in {*TEXT, "été", ""}:
    ids = pieces.encode(text)
    assert pieces.decode(ids) == text
    assert pieces.encode(text.encode()) == ids
    for run in (lambda f: f, tf.function):
      encoded = run(pieces.encode_tf)(tf.constant(text))
      assert encoded.dtype == tf.int32 and encoded.numpy().tolist() == ids
  rows = np.zeros([2, 1, 40], np.int32)
  for i in range(2):
    ids = pieces.encode(TEXT[i])[:39]
    rows[i, 0, : len(ids) + 1] = [*ids, 1]
  texts = tf.function(pieces.decode_tf)(rows)
  assert texts.shape == [2, 1]
  assert [t.decode() for t in texts.numpy()[:, 0]] == [pieces.decode(r[0]) for r in rows]
  in_dataset = tf.data.Dataset.from_tensors(TEXT[0]).map(pieces.encode_tf)
  assert in_dataset.element_spec == tf.TensorSpec([None], tf.int32)
  assert next(iter(in_dataset)).numpy().tolist() == pieces.encode(TEXT[0])


def test_training_is_reproducible_and_stored(pieces, tmp_path):
  assert sv.train_subword_vocabulary(iter(TEXT), 44) == pieces
  assert sv.train_subword_vocabulary([t.encode() for t in TEXT], 44) == pieces
  path = str(tmp_path / "new" / "folder" / "v.model")
  pieces.save(path)
  again = sv.SentencePieceVocabulary.load(path)
  assert again == pieces and hash(again) == hash(pieces)
  assert len(list((tmp_path / "new" / "folder").iterdir())) == 1
  more = sv.SentencePieceVocabulary.load(path, extra_ids=4)
  assert more.vocab_size == 48 and more != pieces
  assert more.decode([*more.encode("a dog"), 46]) == "a dog"


@pytest.mark.parametrize("kind", ["bpe", "char", "unigram"])
def test_kinds_of_models(kind):
  pytest.importorskip("sentencepiece")
  size = len(set("".join(TEXT)) | {"▁"} - {" "}) + 2 if kind == "char" else 43
  v = sv.train_subword_vocabulary(TEXT, size, model_type=kind)
  assert v.decode(v.encode(TEXT[1])) == TEXT[1]
  assert v.vocab_size == size


def test_bytes_stand_for_unknown_characters():
  pytest.importorskip("sentencepiece")
  v = sv.train_subword_vocabulary(TEXT, 320, byte_fallback=True, model_type="bpe")
  assert v.decode(v.encode("中 dog €")) == "中 dog €"


def test_factory_trains_once(tmp_path, capsys):
  pytest.importorskip("sentencepiece")
  (tmp_path / "a.txt").write_text("\n".join(TEXT[:30]))
  (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n".join(TEXT[30:]).encode()))
  gin.parse_config(
    f"""
    vocabulary.get_subword_vocabulary.filename = '{tmp_path}/v.model'
    vocabulary.get_subword_vocabulary.train_files = ['a.txt', 'b.txt.gz']
    vocabulary.get_subword_vocabulary.data_dir = '{tmp_path}'
    vocabulary.get_subword_vocabulary.vocab_size = 42
    """
  )
  first = sv.get_subword_vocabulary()
  assert "training a subword vocabulary of 42 pieces" in capsys.readouterr().out
  assert first == sv.get_subword_vocabulary()
  assert capsys.readouterr().out == ""
  assert sv.get_subword_vocabulary(train_files=None, extra_ids=3).vocab_size == 45
  with pytest.raises(errors.ConfigError, match="has 42 pieces, and vocab_size is 43"):
    sv.get_subword_vocabulary(vocab_size=43)
  from_call = sv.get_subword_vocabulary(
    filename=str(tmp_path / "w.model"), train_files=None, sentences=lambda: iter(TEXT)
  )
  assert from_call.decode(from_call.encode(TEXT[0])) == TEXT[0]


def test_wrong_input(pieces, tmp_path):
  missing = str(tmp_path / "none.model")
  with pytest.raises(errors.ConfigError, match="no vocabulary file .*none.model.*vocab_size"):
    sv.get_subword_vocabulary(missing)
  with pytest.raises(errors.DataError, match="there is no file .*none.txt"):
    sv.get_subword_vocabulary(missing, train_files=str(tmp_path / "none.txt"), vocab_size=50)
  with pytest.raises(errors.ConfigError, match="vocab_size 5000.*too high") as told:
    sv.train_subword_vocabulary(TEXT, 5000)
  most = re.search(r"get_subword_vocabulary.vocab_size = (\d+), or", str(told.value))
  assert most and sv.train_subword_vocabulary(TEXT, int(most[1])).vocab_size == int(most[1])
  with pytest.raises(errors.DataError, match="there is no text"):
    sv.train_subword_vocabulary(["", " \n"], 50)
  (tmp_path / "file").write_text("")
  with pytest.raises(errors.StorageError, match="cannot write the vocabulary file .*file/v.model"):
    pieces.save(str(tmp_path / "file" / "v.model"))
  (tmp_path / "folder.model").mkdir()
  with pytest.raises(errors.StorageError, match="cannot write the vocabulary file"):
    pieces.save(str(tmp_path / "folder.model"))
  assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.model"]
  damaged = tmp_path / "damaged.model"
  damaged.write_bytes(b"not a model")
  with pytest.raises(errors.DataError, match="damaged.model.*not a SentencePiece model"):
    sv.SentencePieceVocabulary.load(str(damaged))
  with pytest.raises(errors.ConfigError, match="extra_ids"):
    sv.SentencePieceVocabulary(pieces._model, extra_ids=-1)


def test_models_with_other_ids_are_refused():
  sentencepiece = pytest.importorskip("sentencepiece")
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXT), model_writer=model, vocab_size=43, minloglevel=2
  )
  with pytest.raises(errors.ConfigError, match=r"padding and EOS \(-1, 2\).*pad_id=0"):
    sv.SentencePieceVocabulary(model.getvalue())


def test_without_sentencepiece(monkeypatch):
  monkeypatch.setitem(sys.modules, "sentencepiece", None)
  with pytest.raises(errors.ConfigError, match="pip install sentencepiece.*byte"):
    sv.train_subword_vocabulary(TEXT, 44)


# ------------------------------------------------------------------- tensor2tensor's files


@pytest.fixture
def t2t(tmp_path):
  subtokens = ["<pad>_", "<EOS>_", "the_", "dog", "s_", "cat_", ", _", "'", "a", "_"]
  subtokens += list("\\u;0123456789") + list("bcdefghijklmnopqrstvwxyz ,.")
  lines = [f"'{s}'" for s in subtokens]
  lines[3] = '"dog"'
  (tmp_path / "v.subwords").write_text("\n".join(lines) + "\n")
  return t2t_vocabulary.get_t2t_vocabulary(str(tmp_path), "v.subwords")


def test_t2t_takes_the_longest_subtokens(t2t):
  assert t2t.vocab_size == 10 + 14 + 26
  # A blank between words is not a token; other separators are, with the blanks around them.
  assert t2t.encode("the dogs") == [2, 3, 4]
  comma = t2t.encode("the, dogs")
  assert comma[:1] == [2] and comma[1:2] == [6] and comma[2:] == [3, 4]
  assert t2t.encode("dog") == [3, 9]
  assert t2t.encode("") == []


def test_t2t_escapes_what_is_not_in_its_alphabet(t2t):
  escaped = t2t.encode("é")
  assert escaped == t2t.encode_tf(tf.constant("é")).numpy().tolist()
  by_hand = "\\" + str(ord("é")) + ";_"
  names = {s: i for i, s in enumerate(t2t._subtokens)}
  assert escaped == [names[c] for c in by_hand]
  assert t2t.decode(escaped) == "é"


@hypothesis.given(st.text(st.sampled_from("ab é,._\\u;0ßdog中\n "), max_size=20))
def test_t2t_round_trip(text):
  v = t2t_vocabulary.T2tVocabulary.__new__(t2t_vocabulary.T2tVocabulary)
  v._subtokens = ["<pad>_", "<EOS>_", "dog_", "\\u_", "_", *"\\u;0123456789", *"abdog .,"]
  v._ids = {s: i for i, s in enumerate(v._subtokens)}
  v._longest = 6
  v._alphabet = frozenset("".join(v._subtokens))
  v._token_ids = v._encode_token
  assert v.decode(v.encode(text)) == text


def test_t2t_wrong_files(tmp_path):
  with pytest.raises(errors.DataError, match="v.subwords"):
    t2t_vocabulary.get_t2t_vocabulary(str(tmp_path), "v.subwords")
  (tmp_path / "v.subwords").write_text("the\ndog\n")
  with pytest.raises(errors.DataError, match="not a subword vocabulary of tensor2tensor"):
    t2t_vocabulary.get_t2t_vocabulary(str(tmp_path), "v.subwords")
