"""Text to integer ids and back: one file a vocabulary; `vocabulary.py` has the old names.

    base     what all have in common
    kept     the vocabulary of a model is kept beside its checkpoints
    named    vocabularies by name: 'characters', 'sentencepiece:8000'

To add one, copy `characters.py` and name the file below: gin knows a vocabulary when its file is
imported.
"""

from mesh_tensorflow.transformer.data.vocabularies import (
  base,
  characters,
  subwords,
  t2t,
  tfds,
  tiktoken_bpe,
)
