"""Files of all kinds that people hand us, and random changes of them.

`python -m tests.environment.mutated_files --count=50000` reads that many, and prints for each
reader how many were read, how many refused by a typed error, how many were something else, and how
much more memory than for the undamaged files it took.
"""

from __future__ import annotations

import argparse
import bz2
import collections
import dataclasses
import functools
import gzip
import hashlib
import itertools
import json
import logging
import lzma
import os
import pathlib
import random
import resource
import signal
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.bert import convert as bert_convert
from mesh_tensorflow.bert import records as bert_records
from mesh_tensorflow.bert import squad_data, tokenization
from mesh_tensorflow.bert.config import BertConfig
from mesh_tensorflow.bert.initial_weights import Weights
from mesh_tensorflow.checkpoint import restoring
from mesh_tensorflow.experimental import volumes
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.planning.machine import Machine, shipped_machines
from mesh_tensorflow.program.dimensions import convert_to_shape
from mesh_tensorflow.training import manifest, model_files
from mesh_tensorflow.transformer import gin_config
from mesh_tensorflow.transformer.data import tokenizing
from mesh_tensorflow.transformer.data.files import documents, records, text_files, token_folder
from mesh_tensorflow.transformer.data.stream_readers import pretokenized_tfrecord_dataset
from mesh_tensorflow.transformer.data.vocabularies import kept
from mesh_tensorflow.transformer.data.vocabularies.characters import CharacterVocabulary
from mesh_tensorflow.transformer.data.vocabularies.subwords import (
  SentencePieceVocabulary,
  train_subword_vocabulary,
)
from mesh_tensorflow.transformer.data.vocabularies.t2t import T2tVocabulary
from mesh_tensorflow.transformer.data.vocabularies.tiktoken_bpe import TiktokenVocabulary
from mesh_tensorflow.transformer.generation import files as prompts
from mesh_tensorflow.transformer.gin_config import model_config
from mesh_tensorflow.workers.cluster import cluster_from_environment
from mesh_transformer_cli import measuring

TYPED = (errors.MeshError, measuring.TextError)
MOST_MEMORY = 200e6
_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Reader:
  """Something that reads a file.

  Attributes:
    name: of it.
    file: the name of the file; more of the folder may be needed.
    content: of the undamaged file.
    read: reads it, given its path; the result is looked at.
    pack: compresses; what is within is changed, too.
    slow: whether it takes much longer than others (a data set of TensorFlow is made each time): it
      reads a tenth as many.
  """

  name: str
  file: str
  content: bytes
  read: Callable[[str], Any]
  pack: Callable[[bytes], bytes] | None = None
  slow: bool = False


# ------------------------------------------------------------------------------- readers

_RECORDS = b"".join(
  json.dumps({"text": f"text {i} \u00e9", "n": [i, {}]}).encode() + b"\n" for i in range(20)
)
_TABLE = b"text,n\n" + b"".join(b'"a ""%d""\nb",%d\n' % (i, i) for i in range(20))
_GIN = b"""# A file.
import mesh_tensorflow.transformer.utils
include 'models/lm_base.gin'
N = 3
run.batch_size = ('tokens_per_batch', 64)
run.mode = "train"
scope/run.save_checkpoints_steps = %N
run.sequence_length = {'inputs': 16, 'targets': 16}
"""
_TF_CONFIG = {
  "cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"]},
  "task": {"type": "worker", "index": 1},
}
_QUESTION = {"id": "q", "question": "Who?", "answers": [{"text": "two", "answer_start": 4}]}
_SQUAD = {"data": [{"paragraphs": [{"context": "one two three", "qas": [_QUESTION]}]}]}
_HUGGING_FACE = {
  "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_act": "gelu",
  "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 50, "id2label": {"0": "a"},
  "layer_norm_eps": 1e-12,
}  # fmt: skip


def _documents(path: str, **form: Any) -> int:
  return sum(len(t) for texts in documents.documents(path, documents.Form(**form)) for t in texts)


def _tf_config(path: str) -> Any:
  text = pathlib.Path(path).read_bytes().decode("utf-8", "surrogateescape")
  return cluster_from_environment({"TF_CONFIG": text})


def _volume(path: str) -> Any:
  volume = volumes.open_volume(path)
  try:
    return volume.read([0] * len(volume.shape), [min(n, 2) for n in volume.shape])
  finally:
    volume.close()


def _tokens(path: str) -> Any:
  tokens = token_folder.read(os.path.dirname(path))
  begins = np.diff(tokens.map_documents("train"), append=tokens.tokens["train"])
  found = tokens.map_tokens("train")
  assert begins.sum() == len(found) and begins.min() > 0
  return int(found[: 1 << 10].astype(np.int64).sum())


def _kept(path: str) -> Any:
  model_dir = os.path.dirname(os.path.dirname(path))
  arguments = {"filename": "x", "n": [1]}
  with kept.kept_in(model_dir, may_write=False):
    return kept.kept(
      "characters", arguments, make=lambda: CharacterVocabulary("b"),
      load=CharacterVocabulary.load, save=CharacterVocabulary.save, source=lambda: None,
    ).characters  # fmt: skip


def _checkpoint(path: str) -> Any:
  folder = os.path.dirname(path)
  newest = checkpoint.latest_checkpoint(folder)
  assert newest == restoring.newest_good(folder)
  assert newest in (os.path.join(folder, "model.ckpt-1"), os.path.join(folder, "model.ckpt-2"))
  value = tf.train.load_variable(newest, "w")
  assert float(value.sum()) == 6.0 * int(newest[-1])
  return newest


def _gin(path: str) -> Any:
  gin.clear_config()
  with gin.unlock_config():
    gin_config.parse_gin([path], [])
  gin.clear_config()


def _measure(path: str) -> Any:
  return measuring.measure(path, [path], "utf-8", None).characters


def _write_volume(path: pathlib.Path, array: np.ndarray) -> None:
  if path.suffix == ".h5":
    import h5py

    with h5py.File(path, "w") as file:
      file.create_dataset("a", data=array, chunks=(1, 3, 4), compression="gzip")
    return
  import nibabel

  nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)


_BERT = BertConfig(
  50, d_model=8, num_blocks=1, attention_num_heads=2, feedforward_intermediate_size=8,
  max_position_embeddings=4,
)  # fmt: skip


def _write_bert(folder: pathlib.Path, kind: str) -> None:
  folder.mkdir()
  shapes = bert_convert.variable_shapes(_BERT)
  ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
  bert_convert.write_checkpoint(str(folder / "ours"), ones)
  google = bert_convert.to_google(Weights(str(folder / "ours")), _BERT)
  if kind == "hf":
    bert_convert.write_hugging_face(str(folder), google, _BERT)
  else:
    bert_convert.write_checkpoint(str(folder / "bert_model.ckpt"), google)


def _weights(path: str) -> Any:
  weights = Weights(path.partition(".index")[0].partition(".data-")[0])
  google = bert_convert.to_google(weights, _BERT)
  return sum(float(v.sum()) for v in bert_convert.from_google(google, _BERT, path).values())


def _packed_ids(path: str, skip_damaged: bool) -> Any:
  dataset = pretokenized_tfrecord_dataset(
    path, False, True, False, None, {"inputs": 8, "targets": 8}, skip_damaged=skip_damaged
  )
  return [int(x["targets"].numpy().sum()) for x in records.reading(dataset)]


def _bert_examples(path: str) -> Any:
  features = {"targets": ([3], tf.int64)}
  bert_records.check_first(path, features, "its sizes")
  batches = bert_records.input_fn([path], features, False, drop_remainder=False)({"batch_size": 2})
  return sum(int(x["targets"].numpy().sum()) for x in records.reading(batches))


def _lines(path: str) -> Any:
  lines = text_files.text_line_dataset(path).map(tf.strings.length).batch(1 << 14)
  return sum(int(tf.reduce_sum(n)) for n in records.reading(lines))


def _record(then: Callable[[str], Any]) -> Callable[[str], Any]:
  def read(path: str) -> Any:
    found = then(os.path.join(os.path.dirname(path), "model.ckpt-2"))
    return found and [found[k] for k in sorted(found)]

  return read


def _write_checkpoints(folder: pathlib.Path) -> None:
  store = VariableStore(seed=0)
  mesh = PlacementMeshImpl("", "", ["CPU:0"], variable_store=store)
  (w,) = (
    store.get(mesh, "w", convert_to_shape([("a", 6)]), master_dtype=tf.float32,
              slice_dtype=tf.float32),
  )  # fmt: skip
  saver = checkpoint.Checkpointer(str(folder), store, asynchronous=False)
  for step in (1, 2):
    w.assign(tf.fill([6], float(step)))
    saver.save(step)


def make(folder: pathlib.Path) -> list[Reader]:
  """All readers; files that only others of the folder are needed with are written.

  Args:
    folder: an empty one; the file of each is written into a folder of its name within.
  """
  found: list[Reader] = []

  def add(
    name: str,
    file: str,
    content: Any,
    read: Callable[[str], Any],
    pack: Any = None,
    slow: bool = False,
  ) -> None:
    if not isinstance(content, bytes):
      content = json.dumps(content).encode()
    found.append(Reader(name, file, pack(content) if pack else content, read, pack, slow))
    (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / name / file).write_bytes(found[-1].content)

  add("prompts", "a.jsonl", _RECORDS, prompts.read_prompts)
  add("prompts of text", "a.txt", b"one\n\ntwo \xc3\xa9\n" * 5, prompts.read_prompts)
  add("JSON lines", "a.jsonl", _RECORDS, lambda p: _documents(p, format="jsonl", fields=("text",)))
  add("CSV", "a.csv", _TABLE, lambda p: _documents(p, format="csv", fields=("text",)))
  add(
    "TSV", "a.tsv", _TABLE.replace(b",", b"\t"), lambda p: _documents(p, format="tsv", fields=(0,))
  )
  add("init", "a.jsonl", _RECORDS, _measure)
  add("init of CSV", "a.csv", _TABLE, _measure)
  packs: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": _zstd(),
  }  # fmt: skip
  for suffix, pack in packs.items():
    add(f"lines{suffix}", f"a.txt{suffix}", _RECORDS, lambda p: _documents(p, unit="line"), pack)
    add(f"text{suffix}", f"a.txt{suffix}", _RECORDS, text_files.read_text_file, pack)
    if suffix != ".zst":
      add(f"init{suffix}", f"a.jsonl{suffix}", _RECORDS, _measure, pack)
  parquet = folder / "a.parquet"
  pyarrow, writer = documents.parquet_modules()
  writer.write_table(pyarrow.table({"text": [f"text {i}" for i in range(50)]}), parquet)
  add("Parquet", "a.parquet", parquet.read_bytes(), lambda p: _documents(p, format="parquet"))
  machine = Machine.load(shipped_machines()[0]).to_dict()
  add("machine", "m.json", machine, Machine.load)
  characters = folder / "characters.txt"
  CharacterVocabulary('ab\u00e9\n"').save(str(characters))
  content = characters.read_bytes()
  add("characters", "v", content, lambda p: CharacterVocabulary.load(p).encode("ab"))
  tiktoken = folder / "tiktoken.txt"
  TiktokenVocabulary({bytes([i]): i for i in range(256)}, r"\w+|\W").save(str(tiktoken))
  add("tiktoken", "v", tiktoken.read_bytes(),
      lambda p: (v := TiktokenVocabulary.load(p)).decode(v.encode("ab c")))  # fmt: skip
  t2t = b"'<pad>'\n'<EOS>'\n'a_'\n'b_'\n" + b"".join(b"'%c'\n" % c for c in b"abc_\\u;0123456789")
  add("subwords of t2t", "v", t2t, lambda p: T2tVocabulary(p).vocab_size)
  add("WordPieces", "vocab.txt", b"[PAD]\n[UNK]\na\n##b\n",
      lambda p: tokenization.FullTokenizer(p).tokenize("ab"))  # fmt: skip
  add("BERT", "bert_config.json", {**BertConfig(50).to_dict()}, BertConfig.from_json_file)
  add("BERT of Google", "c.json", {"hidden_size": 16, "vocab_size": 9}, BertConfig.from_json_file)
  add("BERT of Hugging Face", "config.json", _HUGGING_FACE, BertConfig.from_json_file)
  add("SQuAD", "train.json", _SQUAD, lambda p: squad_data.read_examples(p, True, False))
  add("TF_CONFIG", "c.json", _TF_CONFIG, _tf_config)
  array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
  np.save(folder / "a.npy", array)
  add("npy", "a.npy", (folder / "a.npy").read_bytes(), _volume)
  for file in ("a.nii", "a.nii.gz", "a.h5"):
    _write_volume(folder / file, array)
    add(file[2:], file, (folder / file).read_bytes(), _volume)
  _write_bert(folder / "safetensors", "hf")
  for name, file in (
    ("safetensors", "model.safetensors"),
    ("BERT's index", "bert_model.ckpt.index"),
    ("BERT's variables", "bert_model.ckpt.data-00000-of-00001"),
  ):
    if name != "safetensors":
      _write_bert(folder / name, "google")
    add(name, file, (folder / name / file).read_bytes(), _weights)
  model = train_subword_vocabulary(["one two three"] * 9, 13).model
  add("SentencePiece", "v", model,
      lambda p: (v := SentencePieceVocabulary.load(p)).decode(v.encode("two one")))  # fmt: skip
  examples = [{"targets": [7 + i, 8, 1], "inputs": [3, 1]} for i in range(9)]
  with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as writer:
    for e in examples:
      writer.write(bert_records.example(e))
  content = (folder / "a.tfrecord").read_bytes()
  add("TFRecords", "a.tfrecord", content, lambda p: _packed_ids(p, False), slow=True)
  add("TFRecords cut", "a.tfrecord", content, lambda p: _packed_ids(p, True), slow=True)
  add("BERT's TFRecords", "a.tfrecord", content, _bert_examples, slow=True)
  add("lines of data sets", "a.txt", _RECORDS, _lines, slow=True)
  add("lines of data sets.gz", "a.txt.gz", _RECORDS, _lines, gzip.compress, slow=True)
  add("gin", "a.gin", _GIN, _gin)
  lines = b"".join(b'{"step": %d, "loss": 1.5}\n' % i for i in range(20))
  add("metrics", model_files.METRICS, lines, lambda p: model_files.read_metrics(os.path.dirname(p)))
  texts = folder / "texts.txt"
  texts.write_bytes(b"one two three\nfour\n" * 40)
  for name, file in (("tokens", "tokens.json"), ("documents", "train.documents.bin")):
    tokenizing.tokenize(str(texts), str(folder / name), "bytes", document="line", progress=False)
    add(name, file, (folder / name / file).read_bytes(), _tokens)
  suffixes = ("manifest", "index", "data-00000-of-00001")
  for name in ("kept", "record of settings", "record of a run", "state", *suffixes):
    _write_checkpoints(folder / name)
  for suffix in suffixes:
    file = f"model.ckpt-2.{suffix}"
    add(suffix, file, (folder / suffix / file).read_bytes(), _checkpoint)
  state = (folder / "state" / "checkpoint").read_bytes()
  add("state", "checkpoint", state, _checkpoint)
  vocabulary = folder / "kept" / "vocabularies" / "characters"
  vocabulary.parent.mkdir()
  CharacterVocabulary("abc").save(str(vocabulary))
  entry = {
    "kind": "characters", "scope": "", "arguments": {"filename": "x", "n": [1]},
    "file": "characters", "digest": _sha256(vocabulary.read_bytes()),
  }  # fmt: skip
  add("kept", "vocabularies/index.json", [entry], _kept)
  described = {"class": "A", "size": 3, "digest": None}
  settings = {"format": 1, "model": {"a.b": 1}, "precision": {}, "training": {}, "other": {}}
  add("record of settings", "model.ckpt-2.with-config-00000.json",
      {**settings, "vocabulary": [described]}, _record(model_config._read))  # fmt: skip
  run = {"format": 1, "data": [{"path": "a", "bytes": 3}], "seeds": {"weights": 1}}
  add("record of a run", "model.ckpt-2.with-run-00000.json", run, _record(manifest._read))
  return found


def _sha256(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()


def _zstd() -> Callable[[bytes], bytes]:
  import zstandard

  return zstandard.compress


# ----------------------------------------------------------------------------- mutations

_PIECES = [
  b"[" * 100_000, b'{"a":' * 50_000, b"(" * 100_000, b"1e999", b"-1e999", b"9" * 5000, b"9" * 300,
  b"NaN", b"-1", b"0", b"null", b"true", b'""', b"[]", b"{}", b"[7]", b'{"a": 7}', b"7", b"1.5",
  b"\xff\xfe", b"\xef\xbb\xbf", b"\0", b"\n", b'"\\ud800"', b'"', b",", b"\\", b"\r", b"\x85",
  "\u2028".encode(), b"18446744073709551616", b"%", b"@", b"../../x", b" " * 10_000, b"a" * 5000,
]  # fmt: skip
_VALUES = [
  None, True, 0, -1, 7, 1.5, 2**63, 10**400, "", "a", "\u00e9\0", "x" * 3000, [], {}, [7], [[]],
  {"a": 7}, [None], [{}],
]  # fmt: skip


_BOMBS = [b"a", b"\n", b"a b\n", b",", b"[", b'{"text": ""}\n']


@functools.cache
def _packed(pack: Callable[[bytes], bytes], piece: bytes) -> bytes:
  return pack(piece * ((1 << 22) // len(piece)))


def mutated(reader: Reader, draw: random.Random) -> bytes:
  """The content of the file, changed in one to three places."""
  content = reader.content
  if reader.pack and draw.random() < 0.4:
    # What is within; or a whole that becomes far larger than it is.
    inner = _RECORDS
    if draw.random() < 0.05:
      begin = draw.choice([b"", b"text\n", b'{"text": "', b'"'])
      piece = draw.choice(_BOMBS)
      # Many small documents are work, and nothing else.
      if b"\n" in piece and reader.slow:
        return reader.pack(begin + piece * (1 << 18))
      return reader.pack(begin) + _packed(reader.pack, piece) * (1 if b"\n" in piece else 16)
    return reader.pack(_changed(inner, draw))
  for _ in range(draw.choice([1, 1, 1, 2, 3])):
    content = _changed(content, draw)
  if reader.name == "manifest" and draw.random() < 0.7:
    # With a head that belongs to it.
    body = content.partition(b"\n")[2]
    head = {
      "format": draw.choice([1, 1, 1, 2]),
      "bytes": len(body),
      "crc32": f"{zlib.crc32(body):08x}",
    }
    content = json.dumps(head).encode() + b"\n" + body
  return content


def _changed(content: bytes, draw: random.Random) -> bytes:
  size = len(content)
  at = draw.randrange(size + 1)
  end = min(size, at + draw.choice([0, 1, 1, 4, 16, size]))
  kind = draw.randrange(8)
  if kind == 0 and size:
    data = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8])):
      data[draw.randrange(size)] ^= 1 << draw.randrange(8)
    return bytes(data)
  if kind == 1:
    return content[:at]
  if kind == 2:
    return content[:at] + draw.randbytes(draw.choice([1, 4, 64])) + content[at:]
  if kind == 3:
    return content[:at] + content[at:end] * draw.choice([0, 2, 50]) + content[end:]
  if kind == 4:
    return content[:at] + draw.choice(_PIECES) + content[end:]
  if kind in (5, 6):
    return _with_another_value(content, draw)
  # One number or word is another.
  words = [m for m in content.split() if len(m) < 40] or [b""]
  return content.replace(draw.choice(words), draw.choice(_PIECES), 1)


def _with_another_value(content: bytes, draw: random.Random) -> bytes:
  """Another value at a random place, if the content, or a line of it, is JSON."""
  lines = content.split(b"\n")
  number = draw.randrange(len(lines))
  for text, put in (
    (content, lambda x: x),
    (lines[number], lambda x: b"\n".join([*lines[:number], x, *lines[number + 1 :]])),
    (b"\n".join(lines[1:]), lambda x: lines[0] + b"\n" + x),
  ):
    try:
      value = json.loads(text)
    except (ValueError, RecursionError):
      continue
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
      node = stack.pop()
      keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
      for key in keys:
        places.append((node, key))
        stack.append(node[key])
    new = draw.choice(_VALUES)
    if not places or draw.random() < 0.05:
      return put(json.dumps(new).encode())
    node, key = draw.choice(places)
    if draw.random() < 0.2:
      del node[key]
    else:
      node[key] = new
    return put(json.dumps(value).encode())
  return content[:-1]


# ------------------------------------------------------------------------------- running


class _TooLongError(BaseException):
  """A file is not read in time."""


def outcome(reader: Reader, path: str) -> tuple[str, str]:
  """ "right", "typed" or "wrong", and what was raised."""

  def stop(*_: Any) -> None:
    raise _TooLongError(f"more than {_SECONDS} s")

  before = signal.signal(signal.SIGALRM, stop)
  signal.setitimer(signal.ITIMER_REAL, _SECONDS)
  try:
    reader.read(path)
    return "right", ""
  except TYPED as e:
    if len(str(e)) > 1000:
      return "wrong", f"a message of {len(str(e))} characters"
    return "typed", str(e)
  except KeyboardInterrupt:
    raise
  except BaseException as e:  # noqa: BLE001 - whatever it is, it is to be told.
    place = traceback.extract_tb(e.__traceback__)[-1]
    own = [f for f in traceback.extract_tb(e.__traceback__) if "site-packages" not in f.filename]
    where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else str(place)
    return "wrong", f"{type(e).__name__} at {where}: {str(e)[:120]}"
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _peak() -> float:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def run(count: int, seed: int, only: str = "", keep: str = "") -> tuple[Any, float]:
  """Reads mutated files.

  Args:
    count: how many, of all readers together.
    seed: of what is drawn.
    only: part of the names of readers.
    keep: a folder for the files that are not right.

  Returns:
    By reader a Counter of outcomes, with what was wrong; and how far the peak of memory rose above
    that of the undamaged files, in bytes.
  """
  logging.disable(logging.CRITICAL)
  found: dict[str, collections.Counter[str]] = {}
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    readers = [r for r in make(folder) if only in r.name]
    for reader in readers:
      path = folder / reader.name / reader.file
      for _ in range(3):
        undamaged = outcome(reader, str(path))
      if undamaged[0] != "right":
        raise AssertionError(f"{reader.name}: {undamaged}")
      found[reader.name] = collections.Counter()
    before = _peak()
    turns = [r for turn in range(10) for r in readers if turn == 0 or not r.slow]
    for i, reader in zip(range(count), itertools.cycle(turns)):
      path = folder / reader.name / reader.file
      content = mutated(reader, random.Random(f"{seed} {i}"))
      path.write_bytes(content)
      last = _peak()
      kind, what = outcome(reader, str(path))
      found[reader.name][kind] += 1
      if _peak() > last + 20e6:
        found[reader.name]["MB more"] += int((_peak() - last) / 1e6)
      if kind == "wrong":
        found[reader.name][f"  {what}"] += 1
        if keep:
          pathlib.Path(keep, f"{reader.name} {i}").write_bytes(content)
      path.write_bytes(reader.content)
    after = _peak()
  logging.disable(logging.NOTSET)
  return found, after - before


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--count", type=int, default=50_000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--only", default="")
  parser.add_argument("--keep", default="")
  arguments = parser.parse_args()
  found, more = run(arguments.count, arguments.seed, arguments.only, arguments.keep)
  total: collections.Counter[str] = collections.Counter()
  for name, counts in found.items():
    kinds = {k: counts[k] for k in ("right", "typed", "wrong", "MB more")}
    print(f"{name:22}", "  ".join(f"{k} {n}" for k, n in kinds.items()))
    for what in sorted(k for k in counts if k.startswith("  ")):
      print(f"    {counts[what]} x {what.strip()}")
    total.update(kinds)
  print("all:", "  ".join(f"{k} {total[k]}" for k in ("right", "typed", "wrong")))
  print(f"peak of memory: {more / 1e6:.0f} MB above that of the undamaged files")
  sys.exit(bool(total["wrong"] or more > MOST_MEMORY))


if __name__ == "__main__":
  main()
