"""From ids to texts as they grow; prompts of files; the screen; the settings."""

from __future__ import annotations

import io
import json

import gin
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.generation import files as prompts
from mesh_tensorflow.transformer.generation import settings
from mesh_tensorflow.transformer.generation.scheduler import Row
from mesh_tensorflow.transformer.generation.screen import Screen, output_file
from mesh_tensorflow.transformer.generation.texts import RowText
from mesh_tensorflow.transformer.model.unitransformer import Unitransformer
from mesh_tensorflow.transformer.vocabulary import ByteVocabulary

BYTES = ByteVocabulary()


def grown(text, pieces, stop=()):
  """What is sure after each piece of bytes, and at the end the text."""
  row = Row(0, BYTES.encode("To "), 100)
  made, sure = RowText(row, BYTES, stop), []
  for piece in pieces:
    row.new += BYTES.encode(piece)
    row.ended = made.update()
    sure.append(made.sure())
  row.ended = True
  made.update()
  assert made.sure() == text and made.whole() == "To " + text and made.whole(only_new=True) == text
  return sure


def test_a_character_is_shown_when_it_is_whole():
  data = "bé\n ".encode()
  assert grown("bé\n ", [data[:2], data[2:]]) == ["b", "bé\n "]
  # Bytes that never become a character are shown at the end.
  assert grown("b\ufffd", [b"b\xc3"]) == ["b"]


def test_stop_strings_cut_and_are_never_shown_in_part():
  stop = ("\n\n", "END")
  assert grown("be", ["be\n", "\nor"], stop) == ["be", "be"]
  assert grown("be ", ["be E", "N", "D."], stop) == ["be ", "be ", "be "]
  assert grown("be EN", ["be E", "N"], stop) == ["be ", "be "]
  # The first of several counts.
  assert grown("a", ["aEND\n\n"], stop) == ["a"]


def test_the_screen_shows_texts_in_their_order():
  out = io.StringIO()
  screen = Screen(["--- 1", None], ["To ", " x"], out)
  assert out.getvalue() == ""
  screen.update(1, "b", False)
  assert out.getvalue() == "--- 1\nTo "
  screen.update(0, "be\n", False)
  screen.update(1, "bc", True)
  assert out.getvalue() == "--- 1\nTo be\n"
  screen.update(0, "be\n!", True)
  assert out.getvalue() == "--- 1\nTo be\n!\n xbc\n"


def test_json_lines_keep_any_text(tmp_path):
  texts = ["  two\nlines ", "", "\t#", "é"]
  lines = [json.dumps(texts[0]), '{"prompt": ""}', json.dumps({"text": texts[2]}), '"é"']
  file = tmp_path / "in.jsonl"
  file.write_text("\n".join(lines) + "\n\n")
  assert prompts.read_prompts(str(file)) == texts
  (tmp_path / "in.txt").write_text("  a \n\nb\n")
  assert prompts.read_prompts(str(tmp_path / "in.txt")) == ["  a", "", "b"]
  line = prompts.result_line("out.jsonl", "a\n", 1, " b\n")
  assert (
    json.loads(line) == {"prompt": "a\n", "sample": 1, "text": " b\n"} and line.count("\n") == 1
  )
  assert prompts.result_line("out.txt", "a\n", 1, " b\nc") == " b c\n"
  assert prompts.text_entry("out.txt", "a\n", 1, " b\n\n") == " b\n\n\n---\n"


@pytest.mark.parametrize(
  ("line", "text"),
  [("{", "in.jsonl:2 is not JSON"), ("3", "in.jsonl:2: a line must be a text in quotes"),
   ('{"other": "a"}', "'prompt', 'inputs', 'text'"), ('{"text": 3}', "in.jsonl:2: a line must")],
)  # fmt: skip
def test_wrong_json_lines(tmp_path, line, text):
  (tmp_path / "in.jsonl").write_text(f'"a"\n{line}\n')
  with pytest.raises(errors.DataError, match=text):
    prompts.read_prompts(str(tmp_path / "in.jsonl"))


def test_an_output_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  with (
    pytest.raises(errors.StorageError, match=r"file name \(sample.output\)"),
    output_file(str(tmp_path / "file" / "out")),
  ):
    pass


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (dict(temperature=-1.0), "sample.temperature = -1.0: it must be a number of at least 0"),
    (dict(top_p=0.0), "sample.top_p = 0.0: it must be a number above 0 and at most 1, or None"),
    (dict(top_p=1.1), "sample.top_p = 1.1"),
    (dict(top_k=0), "sample.top_k = 0: it must be a whole number of at least 1"),
    (dict(min_p=2), "sample.min_p = 2"),
    (dict(repetition_penalty=0), "sample.repetition_penalty = 0: it must be a number above 0"),
    (dict(num_samples=0), "sample.num_samples = 0"),
    (dict(max_tokens=0), "sample.max_tokens = 0"),
    (dict(batch_size=0), "sample.batch_size = 0"),
    (dict(prompt=""), "sample.prompt is empty"),
    (dict(prompt=["a", ""]), "sample.prompt is empty"),
    (dict(prompt=[]), "sample.prompt is an empty list"),
    (dict(prompt=3), "sample.prompt = 3: it must be a text in quotes, or a list of such"),
    (dict(stop=[""]), "sample.stop has an empty text"),
    (dict(prompt="a", interactive=True), "exclude each other"),
  ],
)
def test_illegal_settings(arguments, text):
  with pytest.raises(errors.ConfigError, match=text):
    utils.sample(**arguments)


def test_language_models_draw_and_old_names_win(caplog):
  assert Unitransformer.sample_autoregressive  # Registers the name that is bound.
  how = settings.of_language_model(utils.sample())
  assert how.options.choice.temperature == settings.DEFAULT_TEMPERATURE > 0
  given = utils.sample(temperature=0.3, top_k=5, max_tokens=7, top_p=0.9)
  how = settings.of_language_model(given)
  assert (how.options.choice.temperature, how.options.choice.top_k, how.max_tokens) == (0.3, 5, 7)
  for name, value in dict(
    temperature=0.0, sampling_keep_top_k=-1, max_steps=9, stop_at_token=None, never_end=True,
    bos_id=2, remove_partial_sequences=True,
  ).items():  # fmt: skip
    gin.bind_parameter(f"Unitransformer.sample_autoregressive.{name}", value)
  how = settings.of_language_model(given)
  choice, options = how.options.choice, how.options
  assert (choice.temperature, choice.top_k, choice.top_p, how.max_tokens) == (0.0, 5, 0.9, 9)
  assert (options.eos_id, options.never_end, options.bos_id, how.only_new) == (None, True, 2, True)
  assert "sample.temperature (=0.3) is not used" in caplog.text


def test_encoder_decoders_keep_what_is_bound_for_them():
  assert settings.of_encoder_decoder(utils.sample(), True) == {}
  given = utils.sample(temperature=0.5, top_k=3, max_tokens=4)
  expected = {"temperature": 0.5, "sampling_keep_top_k": 3}
  assert settings.of_encoder_decoder(given, True) == {
    **expected, "beam_size": 1, "max_decode_length": 4
  }  # fmt: skip
  assert settings.of_encoder_decoder(given, False) == {**expected, "max_steps": 4}
  with pytest.raises(errors.ConfigError, match="sample.top_p is for models of type 'lm'"):
    settings.of_encoder_decoder(utils.sample(top_p=0.5), True)
