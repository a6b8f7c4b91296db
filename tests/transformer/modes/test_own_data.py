"""Own files through the trainer: names of vocabularies, tokens, resumption, the held-out part."""

from __future__ import annotations

import shutil

import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer.data import tokenizing
from tests.transformer import small_lm
from tests.transformer.small_lm import EVAL, TEXT

OWN = (
  "run.vocabulary = 'characters'",
  "run.train_dataset_fn = @dataset.own_text",
  "own_text.document = 'line'",
  "own_text.validation_fraction = 0.5",
)
STEPS = ("run.train_steps = 4",)
TOTAL = ("run.total_run_steps = 4",)  # Of the learning rate.


@pytest.mark.slow
def test_tokens_train_as_their_text_does_and_training_goes_on(tmp_path):
  lines = "\n".join(f"{i} {line}" for i, line in enumerate(TEXT.split("\n")))
  (tmp_path / "text").mkdir()
  (tmp_path / "text" / "own.txt").write_text(lines)
  own = (*OWN, f"own_text.path = '{tmp_path}/text'")
  losses = small_lm.run(tmp_path, *own, *STEPS)
  assert len(losses) == 4 and losses[0] != losses[1]
  evaluated = small_lm.run(tmp_path, *own, *EVAL)["validation"]["loss"]
  # The same of tokens, with an interruption, without the text.
  tokens = str(tmp_path / "tokens")
  tokenizing.tokenize(
    str(tmp_path / "text"), tokens, "characters",
    document="line", validation_fraction=0.5, progress=False,
  )  # fmt: skip
  shutil.rmtree(tmp_path / "text")
  again = tmp_path / "again"
  again.mkdir()
  mapped = (
    "run.train_dataset_fn = @dataset.own_tokens",
    f"own_tokens.path = '{tokens}'",
    f"run.vocabulary = 'tokens:{tokens}'",
  )
  first = small_lm.run(again, *mapped, *TOTAL)
  rest = small_lm.run(again, *mapped, *STEPS)
  assert [*first, *rest] == losses
  assert small_lm.run(again, *mapped, *EVAL)["validation"]["loss"] == evaluated
  # A trained model has its vocabulary: text is not needed, and not trained from another.
  assert len(small_lm.infer(tmp_path, ["To be"], "run.vocabulary = 'characters'", step=4)) == 1


@pytest.mark.parametrize(
  "bindings, error",
  [
    (("run.vocabulary = 'charakters'",), "did you mean|a name such as 'bytes'"),
    (("run.train_dataset_fn = @dataset.own_text", "own_text.path = 'none.txt'",
      "run.vocabulary = 'characters'"), "there is no file 'none.txt'"),
    (("run.train_dataset_fn = @dataset.own_text", "run.vocabulary = 'characters'"),
     "own_text.path"),
    (("run.vocabulary = 'tokens:none'",), "none does not exist, so there is no tokens.json"),
  ],
)  # fmt: skip
def test_wrong_names_and_paths(tmp_path, bindings, error):
  with pytest.raises(errors.MeshError, match=error) as e:
    small_lm.run(tmp_path, *bindings, text=TEXT)
  # What gin adds are lines of their own, which the command leaves out.
  assert "\n" not in str(e.value).split("\n  In call to")[0]
