"""The commands of `mesh-transformer`: help, wrong command lines, and what the trainer is given."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from absl import flags as absl_flags

import mesh_tensorflow.transformer.main  # noqa: F401 - defines the flags of the trainer.
from mesh_settings import hints
from mesh_settings.run import MODES
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.transformer.commands import launch, tokenize, trainer
from mesh_tensorflow.transformer.gin_config import assignments
from mesh_tensorflow.transformer.gin_config import bindings as gin_names
from mesh_tensorflow.transformer.gin_config.bindings import Place
from mesh_transformer_cli import front, table
from mesh_transformer_cli.parser import Parser
from tests.conftest import ROOT

PROGRAM = "mesh-transformer"
MODEL_COMMANDS = ("eval", "infer", "score", "average", "export")


def given(*arguments: str) -> list[str] | None:
  """What the trainer is given for a command line."""
  module, words = front.command_line(PROGRAM, arguments)
  assert module == front.TRAINER
  return words


def ends(*arguments: str) -> int:
  """The exit code of a command line that is not run."""
  with pytest.raises(SystemExit) as end:
    given(*arguments)
  return end.value.code


@pytest.fixture
def model_dir(tmp_path):
  """The folder of a training, so far as the front looks at it."""
  (tmp_path / "operative_config.gin").write_text("")
  (tmp_path / "lines.txt").write_text("To be\n")
  return tmp_path


# ----------------------------------------------------------------- help


@pytest.mark.parametrize("asked", ["--help", "-h", "-?", "help"])
def test_overview_lists_all_commands_on_one_screen(capsys, asked):
  assert ends(asked) == 0
  out, err = capsys.readouterr()
  assert err == "" and len(out.splitlines()) <= 32
  assert max(map(len, out.splitlines())) <= 100
  for command in table.COMMANDS.values():
    assert f"\n  {command.name} " in out and command.summary in out


@pytest.mark.parametrize("name", sorted(table.COMMANDS))
def test_help_of_each_command(capsys, name):
  """Every flag with its meaning and what gin calls it, and two examples; whatever else is wrong."""
  assert ends(name, "--nonsense", "--help") == 0
  out, err = capsys.readouterr()
  assert err == "" and out.startswith(f"usage: {PROGRAM} {name}")
  command = table.COMMANDS[name]
  words = " ".join(out.split())
  for flag in command.flags:
    assert f"  {flag.name}" in out and " ".join(flag.help.split()) in words
    assert f"[{flag.gin}]" in words or not flag.gin
  for gin_name, meaning in command.gin:
    assert gin_name in out and " ".join(meaning.split()) in words
  assert len(command.examples) == 2
  for example in command.examples:
    assert f"  {PROGRAM} {name} " in out and example.splitlines()[0] in out
  assert max(map(len, out.splitlines())) <= 100
  assert ends("help", name) == 0 and capsys.readouterr().out == out


@pytest.mark.parametrize("name", sorted(table.COMMANDS))
def test_examples_are_right(name):
  """All but the files and folders that they name."""
  parser = Parser(PROGRAM, table.COMMANDS[name])
  for flag in table.COMMANDS[name].flags:
    assert flag.name.startswith("--")
  for example in table.COMMANDS[name].examples:
    first, *words = example.replace('"', "").split()
    assert first == name
    for word in words:
      if word.startswith("--"):
        assert word.partition("=")[0] in parser.names(), example


@pytest.mark.subprocess
@pytest.mark.parametrize("arguments", [["--help"], ["infer", "--help"], ["train", "--stepz=3"]])
def test_nothing_heavy_is_imported(run_subprocess, arguments):
  program = f"""
import sys
from mesh_transformer_cli import front
sys.argv[1:] = {arguments!r}
try:
  front.main()
except SystemExit as e:
  print("code", e.code)
heavy = [m for m in ("tensorflow", "numpy", "absl", "gin", "mesh_tensorflow") if m in sys.modules]
print("heavy", heavy)
"""
  out = run_subprocess(program).stdout
  assert f"code {2 if '--stepz=3' in arguments else 0}" in out and "heavy []" in out


@pytest.mark.subprocess
@pytest.mark.parametrize("module", ["mesh_transformer_cli", "mesh_transformer_cli.port"])
def test_a_reader_that_ends_is_no_error(module):
  """Like `| head -1`."""
  words = ["--help"] if module == "mesh_transformer_cli" else [str(ROOT / "tests")]
  reading, writing = os.pipe()
  os.close(reading)
  command = [sys.executable, "-m", module, *words]
  done = subprocess.run(
    command, stdout=writing, stderr=subprocess.PIPE, cwd=ROOT, timeout=60, check=False
  )
  os.close(writing)
  assert (done.returncode, done.stderr) == (141, b"")


# ----------------------------------------------------------------- what the trainer is given


def test_a_line_without_a_command_is_the_trainer_s_own():
  old = ["--gin_file=a.gin", "--model_dir", "m", "--gin_param", "run.mode = 'eval'"]
  assert given(*old) == old
  assert given("--version") == ["--version"] and given("--helpfull") == ["--helpfull"]
  assert given("--gin_file=a", "--", "--help") == ["--gin_file=a", "--", "--help"]


def test_train():
  files = ["--config=a.gin", "--gin-file", "b.gin"]
  assert given("train", *files, "--steps=7", "--set", "d_ff=8") == [
    "--gin_file=a.gin",
    "--gin_file=b.gin",
    "--set=d_ff=8",
    "--gin_param=run.train_steps = 7",
    "--gin_param=run.mode = 'train'",
  ]
  words = given("train", "--config=a.gin", "--dry_run", "--mesh=", "--learning_rate=1e-3")
  assert "--gin_param=run.mode = 'dry_run'" in words
  assert "--gin_param=run.mesh_shape = ''" in words and "--set=learning_rate=0.001" in words


def test_plan():
  words = given("plan", "--config=a.gin", "--mesh=x:8")
  assert words[-1] == "--gin_param=run.mode = 'plan'"
  words = given("plan", "--config=a.gin", "--devices=8", "--write=best.gin")
  for bound in ("run.mode = 'search'", "run.mesh_shape = 'auto'", "run.layout_rules = 'auto'"):
    assert f"--gin_param={bound}" in words
  assert "--gin_param=run.num_devices = 8" in words
  assert "--gin_param=write_layout.path = 'best.gin'" in words
  words = given("plan", "--config=a.gin", "--devices=8", "--mesh=all:8")
  assert "--gin_param=run.mesh_shape = 'all:8'" in words
  assert "--gin_param=run.mesh_shape = 'auto'" not in words


def test_flags_of_the_trainer_are_passed_on():
  words = ["--module_import=mine", "--allow_config_change", "--verbosity=1", "--tpu=local"]
  given_words = given("train", "--gin_param=a.b = 'x=y'", *words)
  assert {*words, "--gin_param=a.b = 'x=y'"} <= set(given_words)


def test_the_mode_of_the_command_may_be_said():
  for word in ("--gin_param=run.mode = 'train'", "--set=run.mode=train", '--set=run.mode="train"'):
    assert word in given("train", "--config=a.gin", word)


def test_each_mode_is_named_where_modes_are_listed():
  settings = (ROOT / "docs" / "settings.md").read_text()
  (row,) = [line for line in settings.splitlines() if line.startswith("| `run.mode` |")]
  for text in (trainer.__doc__, row):
    assert not [mode for mode in MODES if mode not in text]


def test_infer(model_dir):
  folder = f"--model_dir={model_dir}"
  words = given("infer", folder, r"--prompt=To be,\n'or", "--prompt", "x", r"--stop=\n\\n")
  assert words[0] == f"--gin_file={model_dir}/operative_config.gin"
  assert r"""--gin_param=sample.prompt = ["To be,\n'or", 'x']""" in words
  assert r"--gin_param=sample.stop = '\n\\n'" in words
  assert "--gin_param=run.mode = 'infer'" in words
  numbers = ["--temperature=0", "--top_p=0.9", "--top_k=5", "--checkpoint=newest"]
  words = given("infer", folder, "--interactive", *numbers)
  for bound in ("interactive = True", "temperature = 0.0", "top_p = 0.9", "top_k = 5"):
    assert f"--gin_param=sample.{bound}" in words
  assert "--gin_param=run.eval_checkpoint_step = -1" in words
  file = str(model_dir / "lines.txt")
  words = given("infer", folder, f"--input={file}", "--output=o")
  assert f"--gin_param=decode_from_file.input_filename = {file!r}" in words


def test_eval_score_export(model_dir):
  folder = f"--model_dir={model_dir}"
  words = given("eval", folder, "--batches=all", "--checkpoint=4,8", "--by=loss")
  for bound in (
    "perplexity_eval_steps = None", "eval_checkpoint_step = [4, 8]", "mode = 'perplexity_eval'",
    "dataset_split = 'validation'",
  ):  # fmt: skip
    assert f"--gin_param=run.{bound}" in words
  file = str(model_dir / "lines.txt")
  words = given("score", folder, f"--targets={file}")
  assert "--gin_param=score_from_strings.inputs = None" in words
  assert "--gin_param=run.mode = 'score_from_strings'" in words
  assert "--gin_param=run.mode = 'export_score'" in given("export", folder, "--scores")
  words = given("average", folder, "--output=new", "--checkpoint=best")
  for bound in ("mode = 'average'", "export_path = 'new'", "average_checkpoints = 5"):
    assert f"--gin_param=run.{bound}" in words
  assert "--gin_param=run.export_checkpoint_step = 'best'" in words
  words = given("average", folder, "--output=new", "--last=10")
  assert [w for w in words if "average_checkpoints" in w] == [
    "--gin_param=run.average_checkpoints = 10"
  ]
  # A gin file that is given says it all; and some keep files elsewhere.
  for name in MODEL_COMMANDS:
    needed = {"infer": ["--prompt=x"], "score": ["--dataset"], "average": ["--output=new"]}
    more = needed.get(name, [])
    assert "--gin_file=a.gin" == given(name, "--config=a.gin", *more)[0]
    words = given(name, "--model_dir=gs://a/b", *more)
    assert words[0] == "--gin_file=gs://a/b/operative_config.gin"


def every_flag():
  return [(c, f) for c in table.COMMANDS.values() for f in c.flags]


def test_what_flags_become_is_known_to_the_trainer():
  """Names that gin binds, flags that are passed on, short names of --set."""
  for command, flag in every_flag():
    if flag.gin:
      selector, _, argument = flag.gin.rpartition(".")
      assert gin_names.resolve_binding("", selector, argument, Place(command.name))
    if flag.passed and command.program == front.TRAINER:
      name = (flag.aliases or (flag.name,))[0].lstrip("-")
      assert name in absl_flags.FLAGS, flag
    assert not flag.short or flag.short in assignments.SHORT
  for command in table.COMMANDS.values():
    for names, _ in command.gin:
      for name in names.split(", "):
        selector, _, argument = name.rpartition(".")
        if selector:
          assert gin_names.resolve_binding("", selector, argument, Place(command.name))


def test_tokenize(monkeypatch, tmp_path, capsys):
  """Its flags are those that its program takes, and become the arguments of the function."""
  given_to, text = [], str(tmp_path)
  monkeypatch.setattr(tokenize.tokenizing, "tokenize", lambda *a, **k: given_to.append((a, k)))
  monkeypatch.setattr(tokenize.tokenizing, "summary", lambda tokens: "what came of it")
  needed = [f"--text={text}", "--output=o", "--vocabulary=bytes"]
  module, words = front.command_line(PROGRAM, ["tokenize", *needed])
  assert module == tokenize.__name__ and tokenize.main(words) == 0
  assert given_to.pop() == ((text, "o", "bytes"), {})
  more = {"validation_fraction": "0.25", "format": "text", "separator": r"\n--\n", "field": "f"}
  more |= {"encoding": "latin-1", "processes": "2"}
  options = [f"--{name}={value}" for name, value in more.items()]
  _, words = front.command_line(PROGRAM, ["tokenize", *needed, "--text=b", *options])
  assert tokenize.main(words) == 0
  separator = {"separator": r"\n--\n".replace(r"\n", "\n"), "validation_fraction": 0.25}
  assert given_to.pop() == (([text, "b"], "o", "bytes"), {**more, **separator, "processes": 2})
  _, words = front.command_line(PROGRAM, ["tokenize", *needed, "--document=line"])
  assert tokenize.main(words) == 0 and given_to.pop()[1] == {"document": "line"}
  assert {f.dest for f in table.COMMANDS["tokenize"].flags} <= {
    "text", "output", "vocabulary", "document", *more
  }  # fmt: skip
  capsys.readouterr()

  def refuse(*args, **kwargs):
    raise DataError("there is no file")

  monkeypatch.setattr(tokenize.tokenizing, "tokenize", refuse)
  assert tokenize.main(needed) == 2
  assert capsys.readouterr().err == "DataError: there is no file\n"


def test_the_trainer_runs_in_this_process_with_the_flags(monkeypatch):
  started = []

  def run_module(name, run_name):
    started.append((name, run_name, sys.argv[:]))
    # Errors about the file name the flag that was given.
    assert hints.as_written("--gin_file") == "--config"

  monkeypatch.setattr(sys, "argv", ["/bin/mesh-transformer", "plan", "--config=a.gin"])
  monkeypatch.setattr(front.runpy, "run_module", run_module)
  front.main()
  assert started == [
    (front.TRAINER, "__main__",
     [PROGRAM, "--gin_file=a.gin", "--gin_param=run.mode = 'plan'"]),
  ]  # fmt: skip
  assert hints.as_written("--gin_file") == "--gin_file"


def test_the_launcher_takes_commands(monkeypatch):
  started = []
  monkeypatch.setattr(
    launch, "launch", lambda command, *_, **options: started.append((command, options))
  )
  launch.main(["--workers=2", "--", "train", "--config=a.gin"])
  launch.main(["--workers=2", "--share_network", "--", "--gin_file=a.gin"])
  assert [(c[1:], o) for c, o in started] == [
    (["-m", "mesh_transformer_cli", "train", "--config=a.gin"], {"share_network": False}),
    (["-m", front.TRAINER, "--gin_file=a.gin"], {"share_network": True}),
  ]


# ----------------------------------------------------------------- what is wrong


def told_in_the_docs() -> list[tuple[str, str]]:
  """What docs/commands.md says is typed and told, but for what the trainer tells."""
  rows = re.findall(
    r"^\| `mesh-transformer ([^`]+)` \| (.+) \|$", (ROOT / "docs" / "commands.md").read_text(), re.M
  )
  return [(typed, told) for typed, told in rows if "optimizer" not in typed]


@pytest.mark.parametrize(("typed", "told"), told_in_the_docs())
def test_what_the_docs_say_is_told(capsys, tmp_path, monkeypatch, typed, told):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "latin.txt").write_bytes(b"x" * 512 + b"\xe9")
  (tmp_path / "empty").mkdir()
  (tmp_path / "m").mkdir()
  (tmp_path / "m" / "operative_config.gin").write_text("")
  if typed.startswith("init"):
    (tmp_path / "m" / "operative_config.gin").unlink()
  assert ends(*shlex.split(typed)) == 2
  assert told in capsys.readouterr().err


def test_the_docs_say_much():
  assert len(told_in_the_docs()) >= 6


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    ([], "no command is given: init, tokenize, train"),
    (["trian"], "there is no command 'trian'; did you mean train?"),
    (["frobnicate"], "the commands are init, tokenize"),
    (["my.gin"], "train --config=my.gin"),
    (["train"], "no --config is given"),
    (["plan"], "no --config is given"),
    (["train", "--stepz=3", "--config=a"], "there is no flag --stepz; did you mean --steps?"),
    (["train", "--steps=many", "--config=a"], "--steps: 'many' is no whole number of at least 0"),
    (["train", "--config=a", "--batch_size=0"], "--batch_size: '0' is no whole number"),
    (["train", "--config"], "--config, --gin_file|--config/--gin_file needs a value"),
    (["train", "--config=a", "--dry_run=yes"], "--dry_run takes no value"),
    (["train", "--config=a", "--learning_rate=-1"], "no number of at least 0"),
    (["train", "--config=a", "--set", "d_model"], "not of the form NAME=VALUE"),
    (["train", "--config=a", "--gin_param=run.train_steps", "=", "3"], "stands in quotes"),
    (["train", "--config=a", "--set=run.mode=eval"], "this command is run.mode = 'train'; leave"),
    (["plan", "--config=a", "--gin_param=run.mode = 'train'"], "this command is run.mode = 'plan'"),
    (["train", "a.gin"], "a gin file is given as --config=a.gin"),
    (["train", "d_model=3", "--config=a"], "given as --set d_model=3"),
    (["train", "--config="], "the path is empty"),
    (["eval"], "no model is given: add --model_dir=DIR"),
    (["eval", "--model_dir={nowhere}"], "is no folder"),
    (["eval", "--model_dir={empty}"], "has no operative_config.gin"),
    (["eval", "--model_dir={model}", "--by=taste"], "none of texts, scores, loss"),
    (["eval", "--model_dir={model}", "--batches=0"], 'at least 1, or "all"'),
    (["eval", "--model_dir={model}", "--checkpoint=last"], "none of a step, several"),
    (["infer", "--model_dir={model}"], "add --prompt=TEXT, --interactive, or --input=FILE"),
    (["infer", "--model_dir={model}", "--promt=To be"], "no flag --promt; did you mean --prompt?"),
    (["infer", "--model_dir={model}", "--prompt="], "--prompt: the text is empty"),
    (["infer", "--model_dir={model}", "--prompt", "-x"], "--prompt=-VALUE"),
    (["infer", "--model_dir={model}", "--prompt=x", "--interactive"], "give one of them"),
    (["infer", "--model_dir={model}", "--input={nowhere}"], "there is no file"),
    (["infer", "--model_dir={model}", "--input={model}"], "is a folder; give one file"),
    (["infer", "--model_dir={model}", "--input={lines}"], "needs --output=FILE"),
    (["infer", "--model_dir={model}", "--temperature=-1"], "no number of at least 0"),
    (["infer", "--model_dir={model}", "--temperature=inf"], "no number of at least 0"),
    (["infer", "--model_dir={model}", "--top_p=1.5"], "above 0 and at most 1"),
    (["infer", "--model_dir={model}", "--top_p=0"], "above 0 and at most 1"),
    (["infer", "--model_dir={model}", "--top_k=0"], "no whole number of at least 1"),
    (["infer", "--model_dir={model}", "--min_p=2"], "no number from 0 to 1"),
    (["infer", "--model_dir={model}", "--repetition_penalty=0"], "no number above 0"),
    (["infer", "--model_dir={model}", "--prompt=a\udcffb"], "not of the terminal's encoding"),
    (["tokenize", "--text=a", "--output=b"], "--vocabulary is needed, which says what makes"),
    (["tokenize", "--text=a", "--vocabulary=bytes"], "--output is needed, which says where"),
    (["tokenize", "--output=a", "--vocabulary=bytes"], "--text is needed, which says which"),
    (["tokenize", "--validation_fraction=1"], "'1' is no number from 0 to below 1"),
    (["tokenize", "--format=pdf"], "none of auto, text, jsonl"),
    (["score", "--model_dir={model}"], "add --targets=FILE"),
    (["score", "--model_dir={model}", "--targets={lines}", "--dataset"], "give one"),
    (["export", "--model_dir={model}", "--checkpoint=1,2"], "none of a step, newest, best"),
    (["average", "--model_dir={model}"], "--output=DIR is needed"),
    (["average", "--model_dir={model}", "--output=a", "--last=1"], "--last: '1' is no whole"),
  ],
)  # fmt: skip
def test_wrong_command_lines_are_one_line_and_end_with_2(capsys, model_dir, arguments, says):
  (model_dir / "empty").mkdir()
  places = {"nowhere": "nowhere", "empty": "empty", "model": "", "lines": "lines.txt"}
  for name, place in places.items():
    arguments = [a.replace(f"{{{name}}}", str(model_dir / place)) for a in arguments]
  assert ends(*arguments) == 2
  out, err = capsys.readouterr()
  assert out == "" and len(err.splitlines()) == 1, err
  assert any(text in err for text in says.split("|")), err
  assert "--help" in err and err.startswith(PROGRAM)
