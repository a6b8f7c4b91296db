"""Vocabularies: text to integer ids and back.

Conventions of all of them: id 0 is padding and id 1 ends a sequence (EOS). `encode` adds no EOS.
Anything with `vocab_size`, `encode`, `decode`, `encode_tf` (and `decode_tf`, if there is one) can
stand in for a `Vocabulary`.
"""

from mesh_tensorflow.transformer.data.vocabularies.base import (
  EOS_ID,
  PAD_ID,
  ByteVocabulary,
  Vocabulary,
  get_byte_vocabulary,
)
from mesh_tensorflow.transformer.data.vocabularies.characters import (
  CharacterVocabulary,
  get_character_vocabulary,
)
from mesh_tensorflow.transformer.data.vocabularies.named import named_vocabulary
from mesh_tensorflow.transformer.data.vocabularies.tfds import TFDSVocabulary, get_tfds_vocabulary
from mesh_tensorflow.transformer.data.vocabularies.tiktoken_bpe import (
  TiktokenVocabulary,
  get_tiktoken_vocabulary,
)

__all__ = [
  "EOS_ID",
  "PAD_ID",
  "ByteVocabulary",
  "CharacterVocabulary",
  "TFDSVocabulary",
  "TiktokenVocabulary",
  "Vocabulary",
  "get_byte_vocabulary",
  "get_character_vocabulary",
  "get_tfds_vocabulary",
  "get_tiktoken_vocabulary",
  "named_vocabulary",
]
