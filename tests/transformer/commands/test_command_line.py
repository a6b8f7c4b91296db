"""The command line of the trainer: help, version, and what a newcomer types wrongly."""

from __future__ import annotations

import os
import sys
import types

import pytest
from absl import flags
from absl.testing import flagsaver

import mesh_tensorflow as mtf
from mesh_tensorflow import errors, exit_codes, workers
from mesh_tensorflow.training import command
from mesh_tensorflow.transformer import launch
from mesh_tensorflow.transformer.commands import command_line
from mesh_tensorflow.transformer.commands import trainer as main_module

PROGRAM = "/somewhere/bin/mesh-transformer"


@pytest.fixture(autouse=True)
def flags_as_they_were():
  """absl's flags are one set for the process; other tests rely on their not being parsed."""
  parsed = flags.FLAGS.is_parsed()
  with flagsaver.flagsaver():
    yield
  if not parsed:
    flags.FLAGS.unparse_flags()


def ends(*arguments: str, program: str = PROGRAM) -> int:
  """The exit code of a command line that is not run."""
  with pytest.raises(SystemExit) as end:
    command_line.parse_flags([program, *arguments], "What it does.")
  return end.value.code


@pytest.mark.parametrize("asked", ["--help", "-help", "-h", "-?", "--helpshort", "--helpfull"])
def test_help(capsys, asked):
  """Every flag of the package, each with its text; not what is wrong besides."""
  assert ends("--nonsense", asked, "--gin_file=x") == 0
  out, err = capsys.readouterr()
  assert err == "" and out.startswith("What it does.") and "usage: mesh-transformer" in out
  for name, flag in flags.FLAGS._flags().items():
    module = flags.FLAGS.find_module_defining_flag(name)
    if module.startswith("mesh_tensorflow.") and flag.name == name:
      assert f"--{name}" in out or f"--[no]{name}" in out
      assert flag.help.split()[0] in out
  assert ("--verbosity" in out) == (asked == "--helpfull")


def test_help_begins_with_what_every_run_needs(capsys):
  ends("--help")
  out = capsys.readouterr().out
  assert out.index("  --model_dir") < out.index("  --gin_file\n") < out.index("  --gin_param\n")
  assert out.index("  --gin_param\n") < out.index("  --fold_xy")
  assert "repeat this option" not in out


def test_version(capsys):
  assert ends("--version") == 0
  out = capsys.readouterr().out
  assert f"mesh-tensorflow {mtf.__version__} from {os.path.dirname(mtf.__file__)}" in out
  assert "TensorFlow 2." in out and "Python 3." in out


def test_version_of_the_launcher(capsys):
  with pytest.raises(SystemExit) as end:
    launch.main(["--version"])
  assert end.value.code == 0 and mtf.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    ([], ["no flags are given", "a folder and gin files"]),
    (["--gin_fil=x"], ["Unknown command line flag 'gin_fil'", "gin_file"]),
    (["train", "--model_dir=x"], ["unknown arguments: train"]),
    (["--gin_param=run.train_steps", "=", "3"], ["unknown arguments: = 3", "quotes"]),
    (["--logical_cores_per_chip=many"], ["logical_cores_per_chip", "many"]),
    (["--", "--help"], ["unknown arguments: --help"]),
    (["--model_dir=x"], ["no --gin_file is given"]),
  ],
)
def test_wrong_command_lines_end_with_2(capsys, arguments, says):
  assert ends(*arguments) == 2
  out, err = capsys.readouterr()
  assert out == ""
  for text in (*says, "usage: mesh-transformer --model_dir=DIR", "--help lists the flags"):
    assert text in err


def test_usage_names_the_program_that_was_typed(capsys):
  assert ends(program="/a/site-packages/mesh_tensorflow/transformer/main.py") == 2
  assert "usage: python -m mesh_tensorflow.transformer.main --model" in capsys.readouterr().err


def test_right_command_line():
  arguments = [PROGRAM, "--model_dir=here", "--gin_param", "a.b = '--help me'"]
  assert command_line.parse_flags(arguments, "") == [PROGRAM]
  assert flags.FLAGS.model_dir == "here" and flags.FLAGS.gin_param == ["a.b = '--help me'"]


def test_a_module_may_say_it_all():
  """Without a gin file: a module that is imported may bind what it wants."""
  arguments = [PROGRAM, "--model_dir=here", "--module_import=mine"]
  assert command_line.parse_flags(arguments, "") == [PROGRAM]


@pytest.mark.parametrize("given", [None, ""])
def test_no_folder_by_default(given):
  assert main_module.FLAGS["model_dir"].default is None
  with pytest.raises(errors.ConfigError, match="--model_dir=DIR"):
    command_line.checked_model_dir(given)
  assert command_line.checked_model_dir("a") == "a"


def test_no_folder_is_told_before_anything_runs(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  flags.FLAGS([PROGRAM, "--gin_file=problems/stdlib_lm.gin"])
  assert main_module._as_worker([PROGRAM]) == 2
  assert "ConfigError: no folder is given" in capsys.readouterr().err
  assert list(tmp_path.iterdir()) == []


def test_plan_needs_no_folder(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  settings = ["num_layers = 1", "run.mode = 'plan'", "print_best_layouts.search = False"]
  settings = [f"--gin_param={s}" for s in settings]
  flags.FLAGS([PROGRAM, "--gin_file=problems/stdlib_lm.gin", *settings])
  assert main_module._as_worker([PROGRAM]) == 0
  assert "variables" in capsys.readouterr().out
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [row.code for row in exit_codes.TABLE])
def test_a_worker_leaves_the_others_if_they_end_as_well(code, monkeypatch):
  """When it is done or stopped they are, too; of an error they are to know as soon as possible."""
  left = []

  def end(code):
    raise SystemExit(code)

  two = workers.Cluster((("worker", 0, "a:1"), ("worker", 1, "a:2")))
  for module, name, value in [
    (workers, "cluster_from_environment", lambda: two),
    (workers, "leave", lambda finish, code: left.append(code)),
    (command.loss_watch, "start", lambda *_: None),
    (command.python_logging, "setLogRecordFactory", lambda _: None),
    (main_module, "_guarded", lambda *_: code),
    (command, "flush", lambda: None),
    (os, "_exit", end),
  ]:
    monkeypatch.setattr(module, name, value)
  if code:
    with pytest.raises(SystemExit) as e:
      main_module._as_worker([PROGRAM])
    assert e.value.code == code
  else:
    assert main_module._as_worker([PROGRAM]) == 0
  assert left == [code] * (code in (exit_codes.DONE, exit_codes.STOPPED))


# ----------------------------------------------------------------- modules of one's own


@pytest.fixture
def path_of_a_command(monkeypatch, tmp_path):
  """`sys.path` as an installed command has it: without the working folder, which is `tmp_path`."""
  monkeypatch.chdir(tmp_path)
  here = {"", ".", str(tmp_path)}
  monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in here])


def test_modules_of_the_working_folder(path_of_a_command, tmp_path):
  (tmp_path / "module_of_mine.py").write_text("answer = 42\n")
  with pytest.raises(errors.ConfigError, match="module_of_mine"):
    command_line.import_module("module_of_mine")
  command_line.find_modules_here()
  command_line.find_modules_here()
  assert sys.path.count(str(tmp_path)) == 1
  command_line.import_module("module_of_mine")
  assert sys.modules.pop("module_of_mine").answer == 42


def test_safe_path_is_honoured(path_of_a_command, tmp_path, monkeypatch):
  """Python's option -P keeps the working folder out."""
  monkeypatch.setattr(sys, "flags", types.SimpleNamespace(safe_path=True))
  command_line.find_modules_here()
  assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("name", ["module_that_is_not", "os.module_that_is_not", "gin.nothing"])
def test_modules_that_are_not_there(name):
  with pytest.raises(errors.ConfigError, match=f"--module_import={name}: there is no module"):
    command_line.import_module(name)


def test_errors_inside_a_module_are_its_own(path_of_a_command, tmp_path):
  (tmp_path / "module_that_needs.py").write_text("import module_that_is_not\n")
  command_line.find_modules_here()
  with pytest.raises(ModuleNotFoundError, match="module_that_is_not"):
    command_line.import_module("module_that_needs")


@pytest.mark.parametrize("verbosity", [0, 1])
def test_verbosity_shows_where_an_error_comes_from(run_forked, tmp_path, verbosity):
  words = [f"--model_dir={tmp_path / 'm'}", "--gin_file=none.gin", f"--verbosity={verbosity}"]
  run = run_forked(["-m", "mesh_tensorflow.transformer.main", *words], check=False)
  assert "none.gin" in run.stderr and run.returncode != 0
  assert ("Traceback" in run.stderr) == (verbosity == 1)
