"""Folders of tokens: texts that were encoded once, in files that are mapped into memory.

tokens.json           what is in the folder; written last, so that what has it is whole
train.bin             the ids of all documents, one after the other, an EOS behind each:
                      little-endian numbers of 16 or 32 bits, nothing else
train.documents.bin   where each document begins: little-endian numbers of 64 bits
validation.bin, validation.documents.bin   the same of the held-out documents
vocabulary            the vocabulary, if it was made from a name
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np

from mesh_tensorflow.errors import DataError
from mesh_tensorflow.training import input_shards
from mesh_transformer_cli import untrusted

METADATA = "tokens.json"
VOCABULARY = "vocabulary"
SPLITS = ("train", "validation")
FORMAT = 1
_DTYPES = ("uint16", "uint32")
# What the metadata file has; see `untrusted.expect`.
_FORM = {
  "dtype": str,
  "vocabulary": {"class": str, "size": int, "digest": (str, None), "kept": str},
  "tokens": dict.fromkeys(SPLITS, int),
  "documents": dict.fromkeys(SPLITS, int),
  "made_from": dict,
}


@dataclasses.dataclass(frozen=True)
class TokenFolder:
  """A folder of tokens.

  Attributes:
    path: of the folder.
    dtype: "uint16" or "uint32".
    vocabulary: a dict of `class`, `size` and `digest`, as `kept.describe` has them; and `kept`:
      what it can be had from: "bytes", "file" (in the folder) or "" (nothing).
    tokens: from split to the number of its tokens.
    documents: from split to the number of its documents.
    made_from: what the tokens were made from: settings and files.
  """

  path: str
  dtype: str
  vocabulary: dict[str, Any]
  tokens: dict[str, int]
  documents: dict[str, int]
  made_from: dict[str, Any]

  def to_json(self) -> bytes:
    """The content of the metadata file."""
    fields = {k: v for k, v in dataclasses.asdict(self).items() if k != "path"}
    return (json.dumps({"format": FORMAT, **fields}, indent=1, sort_keys=True) + "\n").encode()

  def map_tokens(self, split: str) -> np.ndarray:
    """The tokens of a split: an np.memmap; what is not looked at is not read.

    Raises:
      DataError: the split has none, or its file is missing or not what was written.
    """
    return self._map(tokens_file(split), self.dtype, self.tokens[split], split)

  def map_documents(self, split: str) -> np.ndarray:
    """Token offsets at which the documents of a split begin: an np.memmap of int64.

    Raises:
      DataError: as `map_tokens`.
    """
    begins = self._map(documents_file(split), "int64", self.documents[split], split)
    # Each has an EOS at least.
    if begins[0] != 0 or begins[-1] >= self.tokens[split] or (begins[1:] <= begins[:-1]).any():
      path = os.path.join(self.path, documents_file(split))
      raise DataError(
        f"{path} is damaged: documents must begin at 0, one behind the other, within the "
        f"{self.tokens[split]:,} tokens; tokenize again"
      )
    return begins

  def _map(self, name: str, dtype: str, count: int, split: str) -> np.ndarray:
    if not count:
      raise DataError(
        f"{self.path} has no {split} tokens: tokenize again, with another validation_fraction"
      )
    path = os.path.join(self.path, name)
    kind = np.dtype(dtype).newbyteorder("<")
    try:
      size = os.path.getsize(path)
      if size != count * kind.itemsize:
        raise DataError(
          f"{path} has {size} bytes, and {METADATA} says {count} tokens of {kind.itemsize}: remove "
          "the folder and tokenize again, or copy it again"
        )
      return np.memmap(path, kind, "r")
    except OSError as e:
      raise DataError(f"cannot read {path}: {e}") from e


def tokens_file(split: str) -> str:
  """The name of the file of the tokens of a split."""
  return f"{split}.bin"


def documents_file(split: str) -> str:
  """The name of the file that says where the documents of a split begin."""
  return f"{split}.documents.bin"


def is_token_folder(path: object) -> bool:
  """True if a path is a complete folder of tokens."""
  return isinstance(path, (str, os.PathLike)) and os.path.isfile(
    os.path.join(os.path.expanduser(path), METADATA)
  )


def read(path: str) -> TokenFolder:
  """Reads the metadata of a folder of tokens.

  Args:
    path: path of the folder; "~" is the home folder.

  Raises:
    DataError: it is not a folder of tokens, or is incomplete.
  """
  path = os.path.expanduser(os.fspath(path))
  file = os.path.join(path, METADATA)
  try:
    with open(file, "rb") as f:
      content = untrusted.parse(f.read())
    if untrusted.expect(content, {"format": object}).pop("format") != FORMAT:
      raise DataError(f"{file} is of another version of this package: tokenize again")
    found = TokenFolder(path=path, **untrusted.expect(content, _FORM))
    if found.dtype not in _DTYPES:
      raise ValueError(f"dtype must be {' or '.join(_DTYPES)}, got {found.dtype!r}")
    if min(*found.tokens.values(), *found.documents.values()) < 0:
      raise ValueError("there are fewer than 0 tokens or documents")
    input_shards.note([file, *(os.path.join(path, tokens_file(s)) for s in SPLITS)])
    return found
  except FileNotFoundError as e:
    what = "is a folder without" if os.path.isdir(path) else "does not exist, so there is no"
    raise DataError(
      f"{path} {what} {METADATA}: `mesh-transformer tokenize` makes such a folder, and writes "
      "that file last"
    ) from e
  except OSError as e:
    raise DataError(f"cannot read {file}: {e}") from e
  except (ValueError, TypeError, KeyError, AttributeError) as e:
    if isinstance(e, DataError):
      raise
    raise DataError(f"{file} is damaged: {e}; tokenize again") from e
