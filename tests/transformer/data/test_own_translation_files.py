"""The gin file that docs/translation.md shows for files of one's own works."""

from __future__ import annotations

import re

import gin

from mesh_tensorflow.transformer import dataset, gin_config, subword_vocabulary


def test_files_of_ones_own(tmp_path, repository, monkeypatch):
  page = (repository / "docs" / "translation.md").read_text()
  blocks = re.findall(r"^```gin\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
  (block,) = [b for b in blocks if "data_dir = 'mine'" in b]
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.gin").write_text(block)
  (tmp_path / "mine").mkdir()
  lines = [f"een twee {i} drie vier {i * 7}" for i in range(60)]
  for name in ("train.de", "train.nl"):
    (tmp_path / "mine" / name).write_text("\n".join(lines) + "\n")
  (tmp_path / "mine" / "validation.tsv").write_text("een 1\ttwee 2\n")
  gin_config.parse_gin(
    ["problems/multi30k.gin", "mine.gin"], ["vocabulary.get_subword_vocabulary.vocab_size = 60"]
  )
  pieces = subword_vocabulary.get_subword_vocabulary()
  assert (tmp_path / "mine" / "pieces.model").exists()
  lengths = {"inputs": 56, "targets": 64}
  row = next(iter(dataset.parallel_text_dataset(sequence_length=lengths, vocabulary=pieces)))
  assert "een twee" in pieces.decode([int(i) for i in row["inputs"] if i > 1])
  (held_out,) = dataset.parallel_text_eval_datasets(sequence_length=lengths, vocabulary=pieces)
  (pair,) = held_out.dataset_fn()
  assert pair["targets_pretokenized"] == b"twee 2"
  gin.clear_config()
