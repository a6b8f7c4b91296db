"""Text to WordPieces, by the published rules."""

from __future__ import annotations

import pytest
from absl.testing import flagsaver

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import tokenization

UNCASED = [
  ("Hello!how  Are yoU?  ", ["hello", "!", "how", "are", "you", "?"]),
  ("H\u00e9llo na\u00efve \u00c5ngstr\u00f6m", ["hello", "naive", "angstrom"]),
  ("ah\u535a\u63a8zz", ["ah", "\u535a", "\u63a8", "zz"]),
  # Hiragana and Hangul are no ideographs; Hangul is taken apart into letters.
  ("\u3042\u3044 \ud55c", ["\u3042\u3044", "\u1112\u1161\u11ab"]),
  ("a\u00a0b\u3000c\td\r\ne", ["a", "b", "c", "d", "e"]),
  ("a\u200bb\x00c\ufffdd\x07e", ["abcde"]),
  ("[CLS] don't $5.0 e-x", ["[", "cls", "]", "don", "'", "t", "$", "5", ".", "0", "e", "-", "x"]),
  ("\u00bfqu\u00e9?\u2014s\u00ed\u2026", ["\u00bf", "que", "?", "\u2014", "si", "\u2026"]),
  ("x^2 `y` ~z \u20ac5", ["x", "^", "2", "`", "y", "`", "~", "z", "\u20ac5"]),
  ("\u0130\u0307", ["i"]),
  ("\U00020000\uf900", ["\U00020000", "\u8c48"]),
  ("", []),
  (" \n", []),
]


@pytest.mark.parametrize(("text", "words"), UNCASED)
def test_words(text, words):
  assert tokenization.BasicTokenizer().tokenize(text) == words


def test_words_with_case():
  tokenizer = tokenization.BasicTokenizer(do_lower_case=False)
  assert tokenizer.tokenize(" \tH\u00e9Llo!how \n Are yoU? ") == [
    "H\u00e9Llo", "!", "how", "Are", "yoU", "?",
  ]  # fmt: skip


VOCAB = ["[UNK]", "[CLS]", "[SEP]", "want", "##want", "##ed", "wa", "un", "runn", "##ing", ","]


@pytest.mark.parametrize(
  ("text", "pieces"),
  [
    ("", []),
    ("unwanted running", ["un", "##want", "##ed", "runn", "##ing"]),
    ("unwantedX running", ["[UNK]", "runn", "##ing"]),
    ("wanted", ["want", "##ed"]),
    ("wa", ["wa"]),
    # The longest piece is taken, also where a shorter one would have led to an end.
    ("waed wan", ["wa", "##ed", "[UNK]"]),
  ],
)
def test_pieces(text, pieces):
  assert tokenization.WordpieceTokenizer(set(VOCAB)).tokenize(text) == pieces


def test_a_word_that_is_too_long():
  tokenizer = tokenization.WordpieceTokenizer({"a", "##a"}, unk_token="?")
  assert tokenizer.tokenize("a" * 200) == ["a"] + ["##a"] * 199
  assert tokenizer.tokenize("a" * 201) == ["?"]
  short = tokenization.WordpieceTokenizer({"a", "##a"}, max_input_chars_per_word=2)
  assert short.tokenize("aa aaa") == ["a", "##a", "[UNK]"]


@pytest.fixture
def vocab_file(tmp_path):
  (tmp_path / "vocab.txt").write_text("\n".join(VOCAB) + "\n", encoding="utf-8")
  return tmp_path / "vocab.txt"


def test_full(vocab_file):
  tokenizer = tokenization.FullTokenizer(vocab_file)
  tokens = tokenizer.tokenize("UNwant\u00e9d,running")
  assert tokens == ["un", "##want", "##ed", ",", "runn", "##ing"]
  ids = tokenizer.convert_tokens_to_ids(tokens)
  assert ids == [7, 4, 5, 10, 8, 9]
  assert tokenizer.convert_ids_to_tokens(ids) == tokens
  with pytest.raises(KeyError):
    tokenizer.convert_tokens_to_ids(["absent"])


def test_vocabulary_lines(tmp_path):
  file = tmp_path / "vocab.txt"
  # An empty line is a token; one that is there again shifts those behind it; U+2028 ends no line.
  file.write_bytes("a \n\nb\na\nc\u2028d\ne".encode())
  assert dict(tokenization.load_vocab(file)) == {"a": 0, "": 1, "b": 2, "c\u2028d": 3, "e": 4}
  with pytest.raises(mtf.ConfigError, match="there is no such file"):
    tokenization.load_vocab(tmp_path / "none.txt")


def test_unused_tokens(tmp_path):
  file = tmp_path / "vocab.txt"
  file.write_text("[UNK]\n[unused7]\n[\nunused\n##7\n]\n")
  tokenizer = tokenization.FullTokenizer(file)
  apart = ["[", "unused", "##7", "]"]
  assert tokenizer.tokenize("[unused7]") == apart
  with flagsaver.flagsaver(preserve_unused_tokens=True):
    assert tokenizer.tokenize("[unused7] [unused7]x") == ["[unused7]", *apart, "[UNK]"]
    assert not tokenization.preserve_token("[unused8]", tokenizer.vocab)
    assert not tokenization.preserve_token("unused", tokenizer.vocab)


def test_unicode():
  assert tokenization.convert_to_unicode(b"a\xffb\xc3\xa9") == "ab\u00e9"
  assert tokenization.printable_text("x") == "x"
  with pytest.raises(ValueError, match="str or bytes"):
    tokenization.convert_to_unicode(3)
  assert tokenization.whitespace_tokenize("  a \n b ") == ["a", "b"]


@pytest.mark.parametrize(
  ("lower", "path", "legal"),
  [
    (True, "x/uncased_L-12_H-768_A-12/bert_model.ckpt", True),
    (False, "uncased_L-12_H-768_A-12/bert_model.ckpt", False),
    (True, "/m/cased_L-24_H-1024_A-16/bert_model.ckpt", False),
    (False, "/m/cased_L-24_H-1024_A-16/bert_model.ckpt", True),
    (False, "/m/mine/bert_model.ckpt", True),
    (False, "uncased_L-12_H-768_A-12/model.ckpt", True),
    (False, None, True),
  ],
)
def test_case_of_a_checkpoint(lower, path, legal):
  if legal:
    tokenization.validate_case_matches_checkpoint(lower, path)
  else:
    with pytest.raises(ValueError, match=f"--do_lower_case={not lower}"):
      tokenization.validate_case_matches_checkpoint(lower, path)
