"""SavedModels say what the mode "infer" writes: language models and encoder-decoders."""

from __future__ import annotations

import gin
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import gin_config, utils, vocabulary
from mesh_tensorflow.transformer.generation import saved_model
from tests.transformer import small_lm
from tests.transformer.small_lm import TEXT

PROMPTS = ["To be", "", "  or not ", "W", "that is the question", "To be, or not to be, th"]


def served(path: str, texts: list[str]) -> list[str]:
  """The outputs of a SavedModel, as the mode "infer" writes lines."""
  serve = tf.saved_model.load(path).signatures["serving_default"]
  outputs = serve(inputs=tf.constant(texts, tf.string))["outputs"]
  return [s.decode().replace("\n", " ") for s in outputs.numpy()]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
  """A folder with a language model; its text is gone."""
  folder = tmp_path_factory.mktemp("lm")
  small_lm.run(folder, "run.train_steps = 60", "run.learning_rate_schedule = 0.01", text=TEXT)
  (folder / "text.txt").unlink()
  yield folder
  gin.clear_config()


def exported(folder, *bindings: str) -> str:
  return small_lm.run(
    folder, "run.mode = 'export_infer'", f"run.export_path = '{folder}/out'", *bindings
  )


@pytest.fixture(scope="module")
def greedy(language_model):
  """Its SavedModel."""
  return exported(language_model)


@pytest.mark.slow
def test_a_language_model_continues_as_infer_does(language_model, greedy):
  """With the lengths of the problem's file, and without its text."""
  lines = small_lm.infer(language_model, PROMPTS, "sample.temperature = 0.0", step=60)
  assert served(greedy, PROMPTS) == lines
  assert served(greedy, PROMPTS[:1]) == lines[:1]
  assert served(greedy, []) == []
  assert [line.startswith(p.rstrip()) for line, p in zip(lines, PROMPTS)] == [True] * len(PROMPTS)


@pytest.mark.long  # The same two programs again, which draw.
def test_it_chooses_among_the_tokens_that_infer_chooses_among(language_model):
  # Of 1 token each draw is the likeliest one; what else they draw, a server need not repeat.
  how = [f"Unitransformer.sample_autoregressive.{b}" for b in
         ("temperature = 1.0", "sampling_keep_top_k = 1")]  # fmt: skip
  lines = small_lm.infer(language_model, PROMPTS, *how, step=60)
  assert served(exported(language_model, *how), PROMPTS) == lines


@pytest.mark.slow
def test_a_prompt_without_room_is_refused_by_both(language_model, greedy):
  with pytest.raises(errors.DataError, match="has 24 ids, .*sequences of 24; shorten it\n"):
    small_lm.infer(language_model, ["T" * 24], step=60)
  with pytest.raises(tf.errors.InvalidArgumentError, match="leaves no room in sequences of"):
    served(greedy, ["To", "T" * 24])
  # The trainer's own predictions, too, keep to the positions that the model has.
  estimator = _estimator(language_model)
  ids = np.zeros([1, 24], np.int32)
  ids[0, :2] = estimator.vocabulary.encode("To")
  (row,) = estimator.predict(lambda: tf.data.Dataset.from_tensors({"inputs": ids}))
  whole = served(greedy, ["To"])[0]
  assert whole.startswith("To" + estimator.vocabulary.decode(row["outputs"]).replace("\n", " "))


def _estimator(folder):
  gin.clear_config()
  gin_config.parse_gin(
    ["problems/tinyshakespeare.gin"], [f"text_file = '{folder}/none'", *small_lm.SMALL]
  )
  kept = vocabulary.CharacterVocabulary.load(str(folder / "model" / "vocabularies" / "characters"))
  return utils.get_estimator(
    "lm", kept, "", "", str(folder / "model"), 4, {"inputs": 24, "targets": 24}, True, None, None,
    100, None, None, None, None, None, None, 10, None,
  )  # fmt: skip


@pytest.mark.slow
def test_scores_of_a_language_model_have_no_end_of_sequence(language_model):
  texts = ["To be", "or not to be ", "x"]
  path = small_lm.run(
    language_model, "run.mode = 'export_score'", f"run.export_path = '{language_model}/score'"
  )
  exported = tf.saved_model.load(path).signatures["serving_default"](targets=tf.constant(texts))
  expected, _ = small_lm.run(
    language_model, "run.mode = 'score_from_strings'", "score_from_strings.inputs = None",
    f"score_from_strings.targets = {texts}",
    "score_from_strings.score_postprocess_fn = @save_scores",
  )  # fmt: skip
  np.testing.assert_allclose(exported["scores"], expected, rtol=1e-5)


PAIRS = [("one two", "un deux"), ("three", "trois"), ("dog", "chien"), ("red cat", "chat rouge")]


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
  """A function that runs a small encoder-decoder of bytes, which has been trained."""
  folder = tmp_path_factory.mktemp("translator")
  (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS))

  def run(*bindings: str):
    gin.clear_config()
    gin_config.parse_gin(
      ["problems/multi30k.gin"],
      [
        *("num_layers = 1", "d_model = 32", "d_ff = 32", "num_heads = 2", "d_kv = 16"),
        *("run.vocabulary = @vocabulary.get_byte_vocabulary()", "run.train_steps = 40"),
        f"files = {{'train': '{folder}/pairs.tsv', 'test': '{folder}/pairs.tsv'}}",
        *("data_dir = ''", "run.batch_size = 3", "import mesh_tensorflow.transformer.vocabulary"),
        *("run.sequence_length = {'inputs': 16, 'targets': 20}", "Unitransformer.max_length = 20"),
        *bindings,
      ],
    )
    return utils.run(None, None, None, None, str(folder / "model"))

  run()
  (folder / "pairs.tsv").unlink()
  run.folder = folder
  yield run
  gin.clear_config()


@pytest.mark.slow
def test_an_encoder_decoder_says_what_infer_says(translator):
  """Inputs of all lengths: too long ones are cut, and end as shorter ones do."""
  texts = [
    "one two",
    "",
    "\u3000 dog\u00a0",
    "x" * 15,
    "a long sentence of thirty bytes",
    "red cat",
  ]
  path = translator("run.mode = 'export_infer'", f"run.export_path = '{translator.folder}/out'")
  (translator.folder / "in").write_text("".join(t + "\n" for t in texts))
  translator(
    "run.mode = 'infer'", f"decode_from_file.input_filename = '{translator.folder}/in'",
    f"decode_from_file.output_filename = '{translator.folder}/lines'",
  )  # fmt: skip
  assert served(path, texts) == (translator.folder / "lines-40").read_text().split("\n")[:-1]
  ids = tf.saved_model.load(path).signatures["serving_default"](inputs=tf.constant(texts))
  assert ids["inputs_ids"].numpy()[4, -1] == 1  # The end of sequence of one that was cut.


class InPython(vocabulary.ByteVocabulary):
  """Encodes in Python."""

  def encode_tf(self, s):
    return tf.numpy_function(lambda s: self.encode_array(s), [s], tf.int32)


@pytest.mark.parametrize(
  "kind,row,expected",
  [
    ("prompt", [5, 6], [5, 6, 0, 0]),
    ("prompt", [5, 6, 0, 7], [5, 6, 0, 0]),
    ("input", [5, 6], [5, 6, 1, 0]),
    ("input", [5, 6, 1, 0, 0], [5, 6, 1, 0]),
    ("input", [5, 6, 7, 8, 9, 1], [5, 6, 7, 1]),
    ("input", [], [1, 0, 0, 0]),
    ("target", [5, 6, 7, 8, 9, 1], [5, 6, 7, 8]),
    ("text", [5, 6, 7, 8, 9], [5, 6, 7, 8]),
    ("text", [-5, 6], [-5, 6, 0, 0]),
  ],
)
def test_rows_of_ids(kind, row, expected):
  """What the signature of a vocabulary in Python makes of ids, with or without their end."""
  encoder = saved_model.TextEncoder("inputs", InPython(), 4, kind)
  assert encoder.spec.dtype == tf.int32
  assert encoder(tf.constant([row], tf.int32)).numpy().tolist() == [expected]
