"""The example that draws text and tasks for a tiny BERT from docstrings."""

from __future__ import annotations

import pytest
from absl.testing import flagsaver

from mesh_tensorflow.bert import run_classifier, run_squad
from mesh_tensorflow.examples import bert_docstrings


@pytest.mark.slow
def test_files_are_those_of_the_programs(tmp_path):
  bert_docstrings.main([f"--output_dir={tmp_path}"])
  texts = {name: (tmp_path / f"{name}.txt").read_text() for name in ("train", "eval")}
  train, evaluated = (text.split("\n\n") for text in texts.values())
  assert len(train) > 200 and not set(train) & set(evaluated)
  processor = run_classifier.ColaProcessor()
  examples = processor.get_dev_examples(str(tmp_path / "cola"))
  lines = " ".join(texts["eval"].split())
  for example in examples:
    assert (example.text_a in lines) == (example.label == "1")
  assert len(processor.get_train_examples(str(tmp_path / "cola"))) == 4000
  with flagsaver.flagsaver(version_2_with_negative=True):
    asked = run_squad.read_squad_examples(str(tmp_path / "squad_train.json"), True)
  # None was left out because its answer is not where it is said to be.
  assert len(asked) == 2000
  missing = sum(e.is_impossible for e in asked)
  assert 500 < missing < 700
