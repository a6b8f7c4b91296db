"""A vocabulary of characters: each of them comes back, and ids of none are left out."""

from __future__ import annotations

from mesh_tensorflow.transformer.vocabulary import CharacterVocabulary

CHARACTERS = "\n abcé中"


def test_each_character_comes_back():
  vocabulary = CharacterVocabulary(CHARACTERS)
  ids = vocabulary.encode(CHARACTERS)
  assert sorted(set(ids)) == list(range(min(ids), vocabulary.vocab_size))
  assert [vocabulary.decode([i]) for i in ids] == list(CHARACTERS)
  assert vocabulary.decode(ids) == CHARACTERS


def test_ids_of_no_character_are_left_out():
  vocabulary = CharacterVocabulary(CHARACTERS)
  first, last = vocabulary.encode("\n")[0], vocabulary.encode("中")[0]
  assert vocabulary.decode([first - 1, first, last, last + 1, 0, 10**6]) == "\n中"
