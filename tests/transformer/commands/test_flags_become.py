"""Each flag of each command, from outside: what its program is given, and which values are legal.

The entry point of `mesh-transformer` is run; what it starts is not.
"""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from mesh_transformer_cli import front

# The beginning of a right command line of each, and what its program is given for it.
BASES = {
  "tokenize": (
    ["--text=t", "--output=o", "--vocabulary=bytes"],
    ["--output=o", "--text=t", "--vocabulary=bytes"],
  ),
  "train": (["--config=a.gin"], ["--gin_file=a.gin", "run.mode = 'train'"]),
  "plan": (["--config=a.gin"], ["--gin_file=a.gin", "run.mode = 'plan'"]),
  "eval": (
    ["--config=a.gin"],
    ["--gin_file=a.gin", "run.dataset_split = 'validation'", "run.mode = 'eval'"],
  ),
  "infer": (
    ["--config=a.gin", "--prompt=x"],
    ["--gin_file=a.gin", "run.mode = 'infer'", "sample.prompt = 'x'"],
  ),
  "score": (
    ["--config=a.gin", "--targets=lines.txt"],
    [
      "--gin_file=a.gin", "run.mode = 'score_from_strings'", "score_from_strings.inputs = None",
      "score_from_strings.score_postprocess_fn = @save_scores",
      "score_from_strings.targets = 'lines.txt'",
    ],
  ),
  "export": (["--config=a.gin"], ["--gin_file=a.gin", "run.mode = 'export_infer'"]),
}  # fmt: skip
TRAINER, TOKENIZER = (
  "mesh_tensorflow.transformer.main", "mesh_tensorflow.transformer.commands.tokenize",
)  # fmt: skip

# Flags of all commands that gin configures, and those that most of them have.
FURTHER = """
--gin_param=a.b = 1        | a.b = 1
--gin_location_prefix=x,y  | --gin_location_prefix=x,y
--module_import=m          | --module_import=m
--allow_config_change      | --allow_config_change
--verbosity=1              | --verbosity=1
--tpu=local                | --tpu=local
--tpu_job_name=j           | --tpu_job_name=j
--tpu_zone=z               | --tpu_zone=z
--gcp_project=p            | --gcp_project=p
"""
_CONFIG = """
--config=b.gin             | --gin_file=b.gin
--gin_file=b.gin           | --gin_file=b.gin
--set=d_ff=8               | --set=d_ff=8
--model_dir=m              | --model_dir=m
--batch_size=3             | run.batch_size = 3
--precision=bfloat16       | run.precision = 'bfloat16'
--pipeline_stages=2        | run.pipeline_stages = 2
"""
_MESH = """
--mesh=batch:2             | run.mesh_shape = 'batch:2'
--mesh=                    | run.mesh_shape = ''
--layout=batch:batch       | run.layout_rules = 'batch:batch'
"""
_CHECKPOINTS = """
--checkpoint=7             | run.eval_checkpoint_step = 7
--checkpoint=7,9           | run.eval_checkpoint_step = [7, 9]
--checkpoint=newest        | run.eval_checkpoint_step = -1
--checkpoint=best          | run.eval_checkpoint_step = 'best'
--checkpoint=all           | run.eval_checkpoint_step = 'all'
--checkpoint=new           | run.eval_checkpoint_step = 'new'
"""
# What a flag adds; after "-" what is no longer there.
BECOME = {
  "tokenize": """
--text=u                   | --text=u
--validation_fraction=0.25 | --validation_fraction=0.25
--format=jsonl             | --format=jsonl
--document=line            | --document=line
--separator=x\\ty          | --separator=x\ty
--field=body               | --field=body
--encoding=latin-1         | --encoding=latin-1
--processes=2              | --processes=2
""",
  "train": _CONFIG + _MESH + FURTHER + """
--dry_run                  | run.mode = 'dry_run' - run.mode = 'train'
--steps=5                  | run.train_steps = 5
--data=t.txt               | --set=data=t.txt
--vocabulary=bytes         | --set=vocabulary=bytes
--optimizer=AdamW          | --set=optimizer=AdamW
--learning_rate=0.5        | --set=learning_rate=0.5
--eval_every=4             | run.eval_every_steps = 4
--save_every=4             | run.save_checkpoints_steps = 4
--report_every=4           | run.report_every = 4
--seed=4                   | run.seed = 4
--init_checkpoint=c        | run.init_checkpoint = 'c'
""",
  "plan": _CONFIG + _MESH + FURTHER + """
--devices=4   | run.num_devices = 4, run.mesh_shape = 'auto', run.layout_rules = 'auto'
--machine=m                | choose_layout.machine = 'm'
--write=w                  | write_layout.path = 'w', run.mode = 'search' - run.mode = 'plan'
--vocab_size=9             | make_steps.vocab_size = 9
""",
  "eval": _CONFIG + _MESH + FURTHER + _CHECKPOINTS + """
--split=s                  | run.dataset_split = 's' - run.dataset_split = 'validation'
--by=texts                 |
--by=loss                  | run.mode = 'perplexity_eval' - run.mode = 'eval'
--by=scores                | run.mode = 'score_eval' - run.mode = 'eval'
--batches=3                | run.perplexity_eval_steps = 3
--batches=all              | run.perplexity_eval_steps = None
""",
  "infer": _CONFIG + _MESH + FURTHER + _CHECKPOINTS + """
--prompt=y                 | sample.prompt = ['x', 'y'] - sample.prompt = 'x'
--temperature=0.5          | sample.temperature = 0.5
--top_k=3                  | sample.top_k = 3
--top_p=0.5                | sample.top_p = 0.5
--min_p=0.5                | sample.min_p = 0.5
--repetition_penalty=1.5   | sample.repetition_penalty = 1.5
--seed=3                   | sample.seed = 3
--num_samples=3            | sample.num_samples = 3
--max_tokens=3             | sample.max_tokens = 3
--stop=e                   | sample.stop = 'e'
--stop=\\n\\t\\\\         | sample.stop = '\\n\\t\\\\'
--output=o                 | sample.output = 'o'
--beam_size=3              | Bitransformer.decode.beam_size = 3
""",
  "score": _CONFIG + _MESH + FURTHER + _CHECKPOINTS + """
--inputs=lines.txt  | score_from_strings.inputs = 'lines.txt' - score_from_strings.inputs = None
--split=s                  |
--output=o                 | save_scores.scores_filename = 'o'
""",
  "export": _CONFIG + FURTHER + """
--output=o                 | run.export_path = 'o'
--scores                   | run.mode = 'export_score' - run.mode = 'export_infer'
--checkpoint=7             | run.export_checkpoint_step = 7
--checkpoint=newest        | run.export_checkpoint_step = -1
--checkpoint=best          | run.export_checkpoint_step = 'best'
""",
}  # fmt: skip
_TRIED = [
  (command, *map(str.strip, line.split(" |")))
  for command, rows in BECOME.items()
  for line in filter(None, rows.splitlines())
]


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "lines.txt").write_text("To be\n")
  (tmp_path / "folder").mkdir()


@pytest.fixture
def start(monkeypatch):
  """A function that runs a command line; returns the program that is started, and its arguments."""

  def run(*words: str) -> tuple[str, list[str]]:
    started = []
    monkeypatch.setattr(sys, "argv", ["/usr/bin/mesh-transformer", *words])
    monkeypatch.setattr(
      runpy, "run_module", lambda name, run_name: started.append((name, run_name, *sys.argv))
    )
    front.main()
    [(module, run_name, program, *arguments)] = started
    assert (run_name, program) == ("__main__", "mesh-transformer")
    return module, [a.removeprefix("--gin_param=") for a in arguments]

  return run


def refused(capsys, start, *words: str) -> str:
  with pytest.raises(SystemExit) as end:
    start(*words)
  out, err = capsys.readouterr()
  assert end.value.code == 2 and out == "" and len(err.splitlines()) == 1
  return err


def _parts(text: str) -> list[str]:
  return [t for t in re.split(r", (?=\w+\.)", text.strip()) if t]


@pytest.mark.parametrize("command", sorted(BASES))
def test_base(start, command):
  words, expected = BASES[command]
  module, given = start(command, *words)
  assert module == (TOKENIZER if command == "tokenize" else TRAINER)
  assert sorted(given) == sorted(expected)


@pytest.mark.parametrize(("command", "flag", "expected"), _TRIED)
def test_flag(start, command, flag, expected):
  """With `=`, as two words, and with dashes in its name."""
  words, base = BASES[command]
  more, _, less = expected.partition(" - ")
  name, equals, value = flag.partition("=")
  dashed = name[:2] + name[2:].replace("_", "-")
  for spelled in ([flag], [name, value] if equals else [dashed], [f"{dashed}{equals}{value}"]):
    _, given = start(command, *words, *spelled)
    assert sorted(given) == sorted([b for b in base if b not in _parts(less)] + _parts(more))


def test_flags_that_replace_others(start):
  _, given = start("infer", "--config=a.gin", "--interactive")
  assert sorted(given) == ["--gin_file=a.gin", "run.mode = 'infer'", "sample.interactive = True"]
  _, given = start("infer", "--config=a.gin", "--input=lines.txt", "--output=o")
  assert sorted(given) == [
    "--gin_file=a.gin", "decode_from_file.input_filename = 'lines.txt'",
    "decode_from_file.output_filename = 'o'", "run.mode = 'infer'",
  ]  # fmt: skip
  _, given = start("score", "--config=a.gin", "--dataset", "--split=s")
  assert sorted(given) == [
    "--gin_file=a.gin", "run.dataset_split = 's'", "run.mode = 'score_from_dataset'",
    "score_from_dataset.score_postprocess_fn = @save_scores",
  ]  # fmt: skip
  _, given = start("plan", "--config=a.gin", "--devices=4", "--mesh=x:4")
  assert "run.mesh_shape = 'x:4'" in given and "run.layout_rules = 'auto'" in given
  assert "run.mesh_shape = 'auto'" not in given
  _, given = start("plan", "--config=a.gin", "--devices=4", "--layout=x:y")
  assert "run.mesh_shape = 'auto'" in given and "run.layout_rules = 'auto'" not in given


def test_the_last_of_two_counts_and_repeatable_ones_keep_their_order(start):
  _, given = start("train", "--config=b.gin", "--config=a.gin", "--steps=3", "--steps=4")
  assert given[:2] == ["--gin_file=b.gin", "--gin_file=a.gin"]
  assert [g for g in given if "train_steps" in g] == ["run.train_steps = 4"]
  _, given = start("train", "--module_import=m", "--set", "b=1", "--set", "a=2")
  assert [g for g in given if g.startswith("--set")] == ["--set=b=1", "--set=a=2"]


# Flag: values that are refused, and those at the edge that are not.
EDGES = {
  "train": "--steps -1 x 1.5 / 0; --batch_size 0 x / 1; --learning_rate -0.1 x nan / 0 2;"
  "--eval_every -1 / 0; --save_every -1 / 0; --report_every 0 / 1; --seed -1 / 0;"
  "--verbosity -4 x / -3",
  "plan": "--devices 0 / 1; --vocab_size 0 / 1; --batch_size 0 / 1",
  "eval": "--batches 0 some / 1 all; --by text / texts; --checkpoint -2 x 1,x 3,-1 / 0 1,2;"
  "--batch_size 0 / 1",
  "infer": "--temperature -0.1 x nan inf / 0; --top_k 0 / 1; --top_p 0 1.1 -1 / 0.1 1;"
  "--min_p -0.1 1.1 / 0 1; --repetition_penalty 0 -1 inf / 0.1 2; --seed -1 / 0;"
  "--num_samples 0 / 1; --max_tokens 0 / 1; --beam_size 0 / 1; --checkpoint -2 / 0",
  "score": "--inputs none folder / lines.txt; --targets none folder / lines.txt gs://x;"
  "--batch_size 0 / 1",
  "export": "--checkpoint 1,2 all new -2 / 0; --batch_size 0 / 1",
  "tokenize": "--validation_fraction 1 -0.1 x / 0 0.9; --processes 0 / 1; --format xml / auto;"
  "--document word / file paragraph auto",
}
_EDGES = [
  (command, name, *(values.split() for values in rest.split(" / ")))
  for command, rows in EDGES.items()
  for name, _, rest in (row.strip().partition(" ") for row in rows.split(";"))
]


@pytest.mark.parametrize(("command", "flag", "illegal", "legal"), _EDGES)
def test_edges(capsys, start, command, flag, illegal, legal):
  words = BASES[command][0]
  for value in legal:
    start(command, *words, f"{flag}={value}")
  for value in illegal:
    err = refused(capsys, start, command, *words, f"{flag}={value}")
    assert err.startswith(f"mesh-transformer {command}: {flag}: ") and value in err


@pytest.mark.parametrize("command", ["train", "plan", "eval", "infer", "score", "export"])
def test_help_has_what_all_commands_have_in_a_part_of_its_own(capsys, start, command):
  with pytest.raises(SystemExit) as end:
    start(command, "--help")
  assert end.value.code == 0
  out = capsys.readouterr().out
  examples = out.split("\nexamples:\n")[1].splitlines()
  first = [line for line in examples if not line.startswith("      ")]
  assert len(first) == 2
  assert all(line.startswith(f"  mesh-transformer {command} ") for line in first)
  own, further = out.split("flags of all commands that gin configures:\n")
  names = [row.split("|")[0].split("=")[0].strip() for row in FURTHER.strip().splitlines()]
  assert re.findall(r"^  (--\w+)", further.split("gin names (")[0], re.MULTILINE) == names
  flags = re.findall(r"^  (--\w+)", own, re.MULTILINE)
  given = [row[1].partition("=")[0] for row in _TRIED if row[0] == command]
  unseen = {"--prompt", "--interactive", "--input", "--targets", "--dataset"}
  assert set(flags) - unseen == set(given) - set(names) - unseen - {"--gin_file"}
  for flag in ("--config", "--set", "--gin_param", "--module_import", "--prompt", "--stop"):
    if flag in flags + names:
      row = re.split(r"\n  (?=--)", own + further)
      assert any(r.strip().startswith(flag) and "Repeatable." in r for r in row)


PLACEHOLDERS = {
  "FILE": "--config --gin_file --input --targets --inputs --write",
  "NAME=VALUE": "--set",
  '"NAME = VALUE"': "--gin_param",
  "DIR": "--model_dir",
  "DIRS": "--gin_location_prefix",
  "PATH": "--data --init_checkpoint --text",
  "N": "--steps --batch_size --save_every --eval_every --report_every --seed --devices --top_k"
  " --num_samples --max_tokens --beam_size --verbosity --vocab_size --processes",
  "N|all": "--batches",
  "X": "--learning_rate --temperature --top_p --min_p --repetition_penalty --validation_fraction",
  "STEP": "--checkpoint",
  "TEXT": "--prompt --stop --tpu --tpu_zone --gcp_project --tpu_job_name",
  "SHAPE": "--mesh",
  "RULES": "--layout",
  "MODULE": "--module_import",
  "": "--dry_run --interactive --dataset --scores --allow_config_change",
}


@pytest.mark.parametrize("command", sorted(BASES))
def test_placeholders_in_the_help(capsys, start, command):
  of_flag = {flag: kind for kind, flags in PLACEHOLDERS.items() for flag in flags.split()}
  with pytest.raises(SystemExit):
    start(command, "--help")
  seen = re.findall(
    r'^  (--\w+)(?:, --\w+)*(?: ("[^"]*"|\S+))?(?:  |$)', capsys.readouterr().out, re.M
  )
  known = [(flag, kind) for flag, kind in seen if flag in of_flag]
  assert len(known) >= 3 and all(of_flag[flag] == kind for flag, kind in known)


def test_empty_values(capsys, start):
  for words in (["train", "--config="], ["train", "--config=a", "--init_checkpoint="],
                ["infer", "--config=a", "--prompt="],
                ["infer", "--config=a", "--prompt=x", "--stop="],
                ["export", "--config=a", "--output="]):  # fmt: skip
    assert " is empty" in refused(capsys, start, *words)
  for words in (["--set", "a"], ["--set", "=3"], ["--gin_param", "a"]):
    err = refused(capsys, start, "train", "--config=a", *words)
    assert "NAME=VALUE" in err or "is no binding" in err
