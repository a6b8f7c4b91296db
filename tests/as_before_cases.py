"""The commands that `tests/as_before.py` compares: chains of them, by name.

They are told from outside: command lines, gin files, signals. No chain knows a module that is not a
program, and none imports the package.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from tests.as_before import Run

CHAINS: dict[str, Callable[[Run], None]] = {}


def chain(name: str) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
  """Decorator that adds a chain."""

  def add(function: Callable[[Run], None]) -> Callable[[Run], None]:
    CHAINS[name] = function
    return function

  return add


# ----------------------------------------------------------------------------- small settings

TEXT = "".join(
  f"{who}: To be or not to be, that is question {n}:\nWhether 'tis nobler in the mind to {what}\n\n"
  for n, (who, what) in enumerate(
    [("HAMLET", "suffer"), ("OPHELIA", "dream"), ("HORATIO", "sleep"), ("ROMEO", "love")] * 20
  )
)
SIZES = {
  "d_model": 16, "d_ff": 32, "layers": 1, "heads": 2, "d_kv": 8, "length": 32, "batch": 8,
}  # fmt: skip
MESHES = {
  "one": [],
  "placement": ["run.mesh_implementation = 'placement'"],
  "simd": ["run.mesh_implementation = 'simd'"],
}
TWO_BY_TWO = ["--mesh=batch:2,model:2", "--layout=batch:batch,d_ff:model,heads:model,vocab:model"]


def sets(**values: object) -> list[str]:
  """Short settings, as flags."""
  return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def params(*bindings: str) -> list[str]:
  """Bindings of gin, as flags."""
  return [f"--gin_param={b}" for b in bindings]


def small(run: Run, *more: str) -> list[str]:
  """Flags of a small language model of a text."""
  if not (run.folder / "text.txt").exists():
    run.write("text.txt", TEXT)
  return ["--config=problems/own_text.gin", *sets(data="text.txt", **SIZES), *more]


TRAINED = ["--steps=6", "--report_every=2", "--save_every=3", "--eval_every=3"]


# ----------------------------------------------------------------------------- help, typos


@chain("help")
def _help(run: Run) -> None:
  for words in (
    [], ["--help"], ["-h"], ["help"], ["-?"], ["--helpshort"], ["--version"], ["--helpfull"],
    ["help", "train"], ["help", "trian"], ["trian"], ["evals"], ["x.gin"], ["nonsense"], ["Train"],
    ["--stepz=3"], ["--gin_fil=x"], ["--model_dir=x"], ["--gin_param=run.train_steps", "=", "3"],
    ["--", "--help"], ["--gin_file=none.gin"], ["--gin_file=none.gin", "train"],
    ["--logical_cores_per_chip=many"], ["--verbosity=x"], ["--module_import=none", "--set", "a=1"],
  ):  # fmt: skip
    run.cli(f"mesh-transformer {shlex.join(words)}", *words)
  for words in ([], ["--help"], ["--version"], ["--nonsense"], ["train"]):
    run.trainer(f"trainer {shlex.join(words)}", *words)
  launch = ["-m", "mesh_tensorflow.transformer.launch"]
  for words in (
    [], ["--help"], ["--version"], ["--workers=0", "--", "--help"], ["--workers=x"],
    ["--workers=2", "--restarts=-1", "--", "train"], ["--workers=1", "--", "trian"],
  ):  # fmt: skip
    run(f"launch {shlex.join(words)}", *launch, *words)


COMMANDS = ("init", "tokenize", "train", "plan", "eval", "infer", "score", "export")
# By the placeholder in the help: texts that a flag may refuse or pass on.
_VALUES = {
  "N": ["0", "1", "-1", "-4", "x", "1.5", ""],
  "N|all": ["0", "1", "all", "x", "-1"],
  "X": ["0", "1", "-1", "2", "x", "nan", "inf", "1e-3"],
  "STEP": ["newest", "best", "all", "new", "5", "1,2", "-3", "x", ""],
  "FILE": ["none", ".", "text.txt", ""],
  "PATH": ["none", ".", "text.txt", ""],
  "DIR": ["none", ".", "text.txt", ""],
  "NAME=VALUE": ["a", "=3", "a=", "a=1", "run.nothing=1", ""],
  '"NAME = VALUE"': ["a", "a = ", "a = 1", "run.train_steps = 1", ""],
  "texts|scores|loss": ["texts", "scores", "loss", "text", ""],
  "KIND": ["auto", "text", "bytes", "sentencepiece:x", "sentencepiece:9", "parquet", "x", ""],
  "UNIT": ["auto", "file", "line", "word", ""],
}
_OTHER = ["x", "", "a b"]
# Flags of the same kind in most of the commands: their values are tried in `train` alone.
_SHARED = {
  "config", "set", "gin_param", "gin_location_prefix", "module_import", "verbosity", "tpu",
  "tpu_job_name", "tpu_zone", "gcp_project", "mesh", "layout",
}  # fmt: skip


def _flags_of_help(text: str) -> Iterator[tuple[str, str]]:
  """Flags and placeholders in a help; the placeholder of a switch is ""."""
  kinds = "|".join(map(re.escape, _VALUES)) + "|[A-Z]{2,}"
  for match in re.finditer(rf"^  (--\w+)(?:, --\w+)*(?: ({kinds})(?= |$))?", text, re.MULTILINE):
    yield match[1], match[2] or ""


def _flags_of(command: str) -> Callable[[Run], None]:
  def flags(run: Run) -> None:
    run.write("text.txt", TEXT)
    listed = run.cli("help", command, "--help", by_old=True).out
    run.cli("help, now", command, "--help")
    run.cli("no flags", command)
    # All that is right so far ends with a gin file that is not there.
    base = [] if command in ("init", "tokenize") else ["--config=none.gin"]
    run.cli("only a gin file", command, *base)
    for words in (["x"], ["x", "y"], ["x.gin"], ["a=3"], ["-x"], ["--nonsense=1"], ["---"]):
      run.cli(f"unexpected {shlex.join(words)}", command, *base, *words)
    for flag, kind in dict.fromkeys(_flags_of_help(listed)):
      run.cli(f"{flag} at the end", command, *base, flag)
      run.cli(f"{flag}, misspelled", command, *base, f"{flag[:-1]}=1")
      if not kind:
        run.cli(f"{flag} with a value", command, *base, f"{flag}=x")
        continue
      dashed = flag[:2] + flag[2:].replace("_", "-")
      values = _VALUES.get(kind, _OTHER)
      if flag[2:] in _SHARED and command != "train":
        values = values[-1:]
      for value in values:
        run.cli(f"{flag}={value!r}", command, *base, f"{flag}={value}")
      if dashed != flag or len(values) > 1:
        run.cli(f"{dashed}, twice", command, *base, dashed, values[-1], f"{flag}={values[0]}")

  return flags


for _command in COMMANDS:
  chain(f"flags of {_command}")(_flags_of(_command))


@chain("flags that exclude or need each other")
def _together(run: Run) -> None:
  run.write("lines.txt", "To be\n")
  none = "--config=none.gin"
  for words in (
    ["infer", none, "--prompt=a", "--interactive"], ["infer", none, "--input=lines.txt"],
    ["infer", none, "--interactive", "--input=lines.txt", "--output=o"], ["infer", "--prompt=a"],
    ["infer", "--model_dir=none", "--prompt=a"], ["infer", "--model_dir=.", "--prompt=a"],
    ["score", none, "--dataset", "--targets=lines.txt"], ["score", "--model_dir=."],
    ["score", "--model_dir=.", "--targets=lines.txt"], ["score", none, "--dataset", "--inputs=x"],
    ["export"], ["export", "--model_dir=none"], ["eval"], ["eval", "--model_dir=."],
    ["tokenize", "--text=lines.txt"], ["tokenize", "--text=lines.txt", "--output=o"],
    ["tokenize", "--text=a", "--output=o", "--vocabulary=bytes", "--document=line",
    "--separator=x"],
    ["train"], ["train", "--module_import=none"], ["train", "--set", "steps=3"], ["plan"],
    ["plan", "--module_import=none"], ["init"], ["train", "--help", "--nonsense"],
    ["train", none, "--steps", "-1"], ["train", none, "--prompt=a"], ["eval", none, "--prompt=a"],
  ):  # fmt: skip
    run.cli(shlex.join(words), *words)


# ----------------------------------------------------------------------------- gin


def _gin_files(run: Run, folder: str) -> list[str]:
  root = run.old.root / "gin"
  return sorted(p.relative_to(root).as_posix() for p in (root / folder).rglob("*.gin"))


_TINY = [
  "d_model = 16", "d_ff = 32", "num_heads = 4", "d_kv = 4", "make_steps.vocab_size = 64",
  "run.sequence_length = {'inputs': 16, 'targets': 16}", "Unitransformer.max_length = 16",
  "run.batch_size = 8",
  "serialize_num_microbatches.tokens_per_microbatch_per_replica = None",
]  # fmt: skip
_NO_SEARCH = "print_best_layouts.search = False"


@chain("gin files of models")
def _models(run: Run) -> None:
  for name in _gin_files(run, "models"):
    layers = [] if "tiny" in name else ["num_layers = 2"]
    words = [f"--config={name}", "--config=layouts/cpu_1.gin"]
    run.cli(f"plan {name}", "plan", *words, *params(*_TINY, *layers, _NO_SEARCH))


@chain("gin files of models, as they are")
def _whole_models(run: Run) -> None:
  for name in _gin_files(run, "models"):
    if any(
      word in name for word in ("mesh_ladder/lm_143m", "mesh_ladder/nmt_155m", "tiny", "base")
    ):
      words = [f"--config={name}", "--config=layouts/cpu_2x2.gin", "--vocab_size=1000"]
      more = params("num_layers = 2", "run.batch_size = 8", _NO_SEARCH)
      run.cli(f"plan {name} on 2x2", "plan", *words, *more)


@chain("gin files of layouts")
def _layouts(run: Run) -> None:
  for name in [*_gin_files(run, "layouts"), "8x8_dp_r4.gin"]:
    sizes = ["num_layers = 1", "num_heads = 128", "d_kv = 2", "d_ff = 256", "d_model = 8"]
    sizes += ["run.batch_size = 512", "MoE1D.num_experts = 128", "make_steps.vocab_size = 256"]
    sizes += ["tpu_estimator_model_fn.outer_batch_size = 4"] * ("r4" in name)
    words = ["--config=models/lm_base.gin", f"--config={name}"]
    run.cli(f"plan {name}", "plan", *words, *params(*_TINY, *sizes, _NO_SEARCH))
    run.cli(f"dry run {name}", "train", "--dry_run", *small(run, f"--config={name}"))


@chain("gin files of schedules and optimizers")
def _schedules(run: Run) -> None:
  of_optimizers = _gin_files(run, "optimizers")
  for i, name in enumerate([*_gin_files(run, "learning_rate_schedules"), *of_optimizers]):
    other = "learning_rate_schedules/cosine.gin" if name in of_optimizers else of_optimizers[i % 3]
    words = small(run, f"--config={other}", f"--config={name}")
    run.cli(name, "train", f"--model_dir=m{i}", *words, "--steps=4", "--report_every=1")


# Without it a data set that is not there is looked for in the network, again and again.
_NO_NETWORK = """
import requests
def refuse(*args, **kwargs):
  raise requests.exceptions.ConnectionError("there is no network")
requests.Session.send = refuse
"""


@chain("gin files of problems")
def _problems(run: Run) -> None:
  run.write("no_network.py", _NO_NETWORK)
  run.write("text.txt", TEXT)
  run.write("input.txt", TEXT)
  english = [f"a {a} {b} sees the {c}" for a in ("red", "big") for b in ("cat", "dog")
             for c in ("house", "tree")] * 4  # fmt: skip
  french = [" ".join(reversed(line.split())) for line in english]
  for name in ("train", "val", "test_2016_flickr"):
    for suffix, lines in (("en", english), ("fr", french)):
      data = gzip.compress("".join(f"{x}\n" for x in lines).encode(), mtime=0)
      run.write(f"multi30k/{name}.{suffix}.gz", data)
  sizes = [s for s in _TINY if "vocab_size" not in s] + ["num_layers = 1"]
  more = {
    "problems/multi30k.gin": ["vocabulary.get_subword_vocabulary.vocab_size = 60"],
    "problems/own_text.gin": ["data = 'text.txt'"],
  }
  for name in _gin_files(run, "problems"):
    local = ["tfds_data_dir = 'none'"] if "wmt14" in name else []
    words = [f"--config={name}", "--config=layouts/cpu_1.gin"]
    if "wmt14" in name:
      words += ["--config=models/aiayn_base.gin", "--module_import=no_network"]
    bindings = params(*sizes, *local, *more.get(name, []))
    run.cli(f"plan {name}", "plan", *words, *bindings, *params(_NO_SEARCH))
    run.cli(f"dry run {name}", "train", "--dry_run", *words, *bindings)
    for left in (
      ["t2t_vocabulary.get_t2t_vocabulary.data_dir = 'none'"],
      ["pretokenized_tfds_dataset.tfds_data_dir = 'none'"],
    ):
      if any(n in name for n in ("t2t_", "lm1b")):
        run.cli(f"dry run {name} {left}", "train", "--dry_run", *words, *bindings, *params(*left))
  words = ["--config=problems/multi30k.gin", *params(*sizes, *more["problems/multi30k.gin"])]
  run.cli("train multi30k", "train", "--model_dir=m", *words, "--steps=4", "--report_every=2")
  run.cli("eval multi30k", "eval", "--model_dir=m", "--split=test_2016_flickr")
  run.cli("defaults alone", "train", "--config=defaults.gin", "--dry_run")
  run.cli("transparent", "plan", "--config=models/bi_base.gin",
          "--config=transparent_attention.gin",
          "--config=layouts/cpu_1.gin", *params(*_TINY, _NO_SEARCH))  # fmt: skip


@chain("gin files of the TF1 library")
def _old_gin(run: Run) -> None:
  """Full names, operative configurations of T5, and settings that are no longer there."""
  run.write("text.txt", TEXT)
  run.write("old.gin", """
import mesh_tensorflow.optimize
import mesh_tensorflow.transformer.dataset
import mesh_tensorflow.transformer.learning_rate_schedules
import mesh_tensorflow.transformer.transformer
import mesh_tensorflow.transformer.transformer_layers
import mesh_tensorflow.transformer.utils
# Macros:
d_ff = 32
d_kv = 8
d_model = 16
num_heads = 2
num_layers = 1
AdafactorOptimizer.beta1 = 0.0
AdafactorOptimizer.clipping_threshold = 1.0
AdafactorOptimizer.decay_rate = None
AdafactorOptimizer.epsilon1 = 1e-30
AdafactorOptimizer.epsilon2 = 0.001
AdafactorOptimizer.factored = True
AdafactorOptimizer.min_dim_size_to_factor = 128
AdafactorOptimizer.multiply_by_parameter_scale = True
Bitransformer.shared_embedding = True
decoder/EncDecAttention.relative_attention_type = None
learning_rate_schedule_noam.linear_decay_fraction = 0.0
learning_rate_schedule_noam.multiplier = 1.0
learning_rate_schedule_noam.offset = 0
learning_rate_schedule_noam.warmup_steps = 10
run.autostack = True
run.batch_size = ('tokens_per_batch', 128)
run.model_type = 'lm'
run.perplexity_eval_steps = 10
run.sequence_length = {'inputs': 16, 'targets': 16}
run.vocabulary = 'bytes'
run.train_dataset_fn = @dataset.own_text
dataset.own_text.path = 'text.txt'
utils.run.mesh_shape = ''
utils.run.layout_rules = ''
utils.tpu_mesh_shape.tpu_topology = '2x2'
""")  # fmt: skip
  run.trainer("dry run", "--gin_file=old.gin", *params("run.mode = 'dry_run'"))
  run.trainer("train", "--gin_file=old.gin", "--model_dir=m", *params("run.train_steps = 2"))
  for i, line in enumerate((
    "run.nothing = 3", "no_such_function.x = 3", "run.mode = @nothing",
    "AdafactorOptimizer.bata1 = 0",
    "utils.run.mesh_shpe = ''", "run.iterations_per_loop = 0", "import no_such_module",
    "import mesh_tensorflow.transformer.zzz", "run.train_steps = ", "include 'none.gin'",
    "run.tpu_job_name = 'x'", "run.ensemble_inputs = 0", "run.eval_dataset_fn = @dataset.own_text",
    "tpu_estimator_model_fn.tpu_summaries = True", "run.dataset_split = 3", "a.b.c.d = 1",
    "mesh_eval_dataset_fn.num_eval_examples = 3", "utils.run.optimizer = @AdamOptimizer",
    "get_default_vocabulary.x = 1", "pack_dataset.use_custom_ops = True",
    "run.skip_seen_data = True",
    "tokens_per_microbatch_per_replica = None", "MeshTensorFlow.x = 1", "num_layers = '3'",
    "run.train_dataset_fn = @t5.models.mesh_transformer.mesh_train_dataset_fn",
    "d_model = %nothing",
    "run.sequence_length = {'inputs': 16}", "run.batch_size = ('tokens_per_batch', 'x')",
    "run.batch_size = ('sequences', 3)", "run.learning_rate_schedule = @nothing",
    "run.learning_rate_schedule = [@learning_rate_schedules.linear_warmup, 'x']",
    "run.layout_rules = 'batch:nothing'", "run.layout_rules = 'batch'", "run.mesh_shape = 'batch'",
    "run.mesh_shape = 'batch:x'", "run.mesh_shape = 'batch:0'", "run.mesh_shape = 'batch:3'",
    "run.layout_rules = 'btch:batch'", "run.model_type = 'ml'", "run.mode = 'trian'",
    "SelfAttention.num_heads = 0", "SelfAttention.dropout_rate = 1.5",
    "DenseReluDense.activation = 'rleu'",
    "Unitransformer.positional_embedding = 3", "run.vocabulary = 'byte'", "run.vocabulary = 3",
    "get_variable_dtype.activation_dtype = 'float31'", "run.optimizer = 'Adam'",
    "run.optimizer = 3",
    "encoder/SelfAttention.num_heads = 4", "decoder/SelfAttention.num_heads = 3",
    "make_layer_stack.layers = []", "make_layer_stack.layers = 3",
    "DenseReluDense.hidden_size = 3.0",
    "LayerStack.sublayers_final = [@nothing]", "run.init_checkpoint = 'none'", "x = 1\nx = 2",
  )):  # fmt: skip
    words = ["--gin_file=old.gin", f"--gin_param={line}"]
    run.trainer(f"{i}: {line}", *words, *params("run.mode = 'dry_run'"))
    if i % 4 == 0:
      run.write(f"own{i}.gin", f"{line}\n")
      words = ["--gin_file=old.gin", f"--gin_file=own{i}.gin"]
      run.trainer(f"{i}: {line}, in a file", *words, *params("run.mode = 'dry_run'"))
  run.trainer("seen from elsewhere", "--gin_file=some.gin", "--gin_location_prefix=x,y")
  run.write("places/some.gin", "include 'old.gin'\nd_ff = 64\n")
  words = ["--gin_file=some.gin", "--gin_location_prefix=x,places"]
  run.trainer("by a prefix", *words, *params("run.mode = 'dry_run'"))


@chain("short settings")
def _short(run: Run) -> None:
  words = small(run)
  for i, assigned in enumerate((
    ["model=lm"], ["model=ml"], ["layers=2"], ["layers=x"], ["heads=4"], ["heads=3"],
    ["dropout=0.5"],
    ["dropout=2"], ["length=16"], ["vocabulary=bytes"], ["vocabulary=nothing"], ["batch=4"],
    ["batch=x"], ["optimizer=AdamW"], ["optimizer=Adam"], ["optimizer=adafactor"], ["lr=0.5"],
    ["lr=x"], ["learning_rate=-1"], ["schedule=cosine"], ["schedule=cos"], ["schedule=linear_decay",
    "lr=2"],
    ["mesh=batch:2", "layout=batch:batch"], ["mesh=batch:2", "layout=bach:batch"], ["mesh=x"],
    ["checkpoint=3"], ["prompt=x"], ["temperature=2"], ["top_k=0"], ["num_samples=2"], ["stop=a,b"],
    ["d_model=8", "d_model=24"], ["d_modle=8"], ["run.seed=3"], ["run.sed=3"], ["seed=3"],
    ["sed=3"],
    ["save_checkpoints_steps=4"], ["decoder/SelfAttention.num_heads=4"], ["data=none.txt"],
    ["own_text.document=line"], ["own_text.document=word"], ["run.seeds={'data': 3}"], ["=3"],
    ["a"],
    ["run.train_steps=%nothing"], ["run.optimizer=@AdamWOptimizer"], ["nonfinite=skip"],
    ["nonfinite=s"],
  )):  # fmt: skip
    given = [word for a in assigned for word in ("--set", a)]
    name = f"{i}: {' '.join(assigned)}"
    run.cli(name, "train", "--dry_run", *words, *given)
    if i % 4 == 0:
      steps = [] if "train_steps" in name else ["--steps=0"]
      run.cli(f"{name}, written", "train", f"--model_dir=m{i}", *words, *given, *steps)


_ODD = ("'x'", "-1", "0", "1.5", "True", "(1, 2)", "None")


def _settings_from(start: int, parts: int) -> Callable[[Run], None]:
  def settings(run: Run) -> None:
    """Each setting of the operative configuration, with values of all kinds."""
    words = small(run)
    run.cli("reads", "train", "--model_dir=m", *words, "--steps=2", by_old=True)
    text = (run.folder / "m" / "operative_config.gin").read_text()
    names = re.findall(r"^([\w./]+) = ", text, re.MULTILINE)
    for i, name in enumerate(names):
      if i % parts != start or name in ("run.mode", "run.mesh_shape"):
        continue
      values = _ODD if name.startswith("run.") else _ODD[:2] + _ODD[2 + i % 5 : 3 + i % 5]
      for value in values:
        bound = f"{name} = {value}"
        run.cli(bound, "train", "--dry_run", *words, *params(bound))

  return settings


for _i in range(4):
  chain(f"every setting, part {_i}")(_settings_from(_i, 4))


# ----------------------------------------------------------------------------- training


def _uses(run: Run, folder: str, prefix: str = "", steps: str = "6") -> None:
  """What the other commands make of a trained language model."""
  run.write("lines.txt", "To be\nROMEO: To\nWhether 'tis\n")
  run.write("after.txt", ", or not\nbe\n nobler\n")
  model = f"--model_dir={folder}"
  words = [f"--output={prefix}cont.txt", "--max_tokens=5", "--temperature=0"]
  for name, *flags in (
    ("eval", "eval"),
    ("eval by loss", "eval", "--by=loss", "--batches=2", "--split=train"),
    ("eval of a step", "eval", f"--checkpoint={steps}", "--batches=all"),
    ("eval of all", "eval", "--checkpoint=all", "--batch_size=4"),
    ("eval of best", "eval", "--checkpoint=best"),
    ("eval of no step", "eval", "--checkpoint=5"),
    ("eval of texts", "eval", "--by=texts"),
    ("eval of scores", "eval", "--by=scores"),
    ("eval, small batch", "eval", "--batch_size=1", "--batches=1"),
    ("infer", "infer", "--prompt=To be", "--max_tokens=6"),
    ("infer, several", "infer", "--prompt=To", r"--prompt=a\nb", "--num_samples=2",
     "--max_tokens=4",
     "--seed=5", "--temperature=0.7", "--top_k=5", "--top_p=0.9", "--min_p=0.01"),
    ("infer, stop", "infer", "--prompt=To", "--stop=e", "--stop= ", "--max_tokens=9", "--seed=1",
     "--repetition_penalty=1.5"),
    ("infer of a file", "infer", "--input=lines.txt", *words),
    ("infer into a file", "infer", "--prompt=To", f"--output={prefix}o.txt", "--max_tokens=3"),
    ("infer, other characters", "infer", "--prompt=\u00e9\u4e00", "--max_tokens=3"),
    ("infer, long prompt", "infer", f"--prompt={'To be ' * 20}", "--max_tokens=3"),
    ("infer, beams", "infer", "--prompt=To", "--beam_size=2", "--max_tokens=3"),
    ("infer of best", "infer", "--prompt=To", "--checkpoint=best", "--max_tokens=3"),
    ("infer of no step", "infer", "--prompt=To", "--checkpoint=77"),
    ("score", "score", "--targets=lines.txt"),
    ("score into files", "score", "--targets=lines.txt", f"--output={prefix}s"),
    ("score pairs", "score", "--inputs=lines.txt", "--targets=after.txt", f"--output={prefix}p"),
    ("score uneven", "score", "--inputs=lines.txt", "--targets=text.txt"),
    ("score a data set", "score", "--dataset"),
    ("score all", "score", "--targets=lines.txt", "--checkpoint=all"),
    ("export", "export", f"--output={prefix}e"),
    ("export scores", "export", f"--output={prefix}es", "--scores", "--batch_size=2"),
    ("export of a step", "export", f"--output={prefix}e3", "--checkpoint=3"),
    ("export of no step", "export", f"--output={prefix}e4", "--checkpoint=4"),
    ("export nowhere", "export"),
  ):  # fmt: skip
    run.cli(f"{prefix}{name}", flags[0], model, *flags[1:])
  talk = "To be\n\nRO\n"
  words = ["--max_tokens=4", "--temperature=0"]
  run.cli(f"{prefix}interactive", "infer", model, "--interactive", *words, stdin=talk)
  for name, text in (("e", "['To be', 'RO']"), ("es", None)):
    _call_exported(run, f"{prefix}call of {name}", f"{prefix}{name}", text)


_LOADER = """
import glob, sys
import tensorflow as tf
path = glob.glob(sys.argv[1] + "/*")[0]
model = tf.saved_model.load(path)
for name, f in sorted(model.signatures.items()):
  print(name, sorted((k, v.dtype.name, str(v.shape)) for k, v in
                     f.structured_input_signature[1].items()), sorted(f.structured_outputs))
  given = {}
  for k, v in f.structured_input_signature[1].items():
    rows = v.shape[0] or 2
    given[k] = tf.constant((["To be", "RO"] * rows)[:rows]) if v.dtype == tf.string else (
      tf.ones([d or 2 for d in v.shape], v.dtype))
  for k, v in sorted(f(**given).items()):
    print(k, v.dtype.name, v.shape, [round(x, 4) if isinstance(x, float) else x
                                     for x in v.numpy().ravel().tolist()])
"""


def _call_exported(run: Run, case: str, folder: str, text: str | None) -> None:
  del text
  run(case, "-c", _LOADER, folder, server="bare")


@chain("train on one device")
def _train_one(run: Run) -> None:
  words = small(run)
  run.cli("train", "train", "--model_dir=m", *words, *TRAINED, *params("run.profile_steps = '3:4'"))
  run.cli("again", "train", "--model_dir=m", *words, *TRAINED)
  run.copy("m", "m2")
  run.cli("on", "train", "--model_dir=m", *words, *TRAINED, "--steps=10")
  run.cli("on, of its folder", "train", "--model_dir=m2", "--config=m2/operative_config.gin",
          "--set", "steps=9")  # fmt: skip
  run.cli("another model", "train", "--model_dir=m", *words, "--steps=12", "--set", "d_ff=64")
  run.cli("another vocabulary", "train", "--model_dir=m", *words, "--steps=12",
          "--vocabulary=bytes")  # fmt: skip
  run.cli("another, allowed", "train", "--model_dir=m2", *words, "--steps=12", "--set",
          "dropout=0.3", "--allow_config_change")  # fmt: skip
  run.cli("another model, allowed", "train", "--model_dir=m2", *words, "--steps=14", "--set",
          "d_ff=64", "--allow_config_change")  # fmt: skip
  run.cli("another optimizer", "train", "--model_dir=m", *words, "--steps=11", "--optimizer=SGD")
  run.cli("other data and seed", "train", "--model_dir=m", *words, "--steps=12", "--seed=4")
  run.write("text.txt", TEXT[::-1])
  run.cli("other text", "train", "--model_dir=m", *words, "--steps=13")
  run.write("text.txt", TEXT)
  _uses(run, "m", steps="13")


@chain("train on a mesh, placement")
def _train_placement(run: Run) -> None:
  _train_mesh(run, "placement")


@chain("train on a mesh, simd")
def _train_simd(run: Run) -> None:
  _train_mesh(run, "simd")


def _train_mesh(run: Run, kind: str) -> None:
  words = [*small(run), *TWO_BY_TWO, *params(f"run.mesh_implementation = '{kind}'")]
  more = params(
    "run.ema_decay = 0.9", "run.max_grad_norm = 1.0", "run.norms_every = 1",
    "run.gradient_accumulation_steps = 2", "run.iterations_per_loop = 2",
  )  # fmt: skip
  run.cli("train", "train", "--model_dir=m", *words, *TRAINED, *more)
  run.cli("on", "train", "--model_dir=m", *words, *TRAINED, *more, "--steps=9")
  run.cli("on one device", "train", "--model_dir=m", *small(run), "--steps=11", *more)
  run.cli("without an average", "train", "--model_dir=m", *words, "--steps=12")
  for name, flags in (
    ("eval", ["eval"]), ("infer", ["infer", "--prompt=To", "--max_tokens=4"]),
    ("eval of the average", ["eval", *params("run.use_ema = True"), "--checkpoint=9"]),
    ("export", ["export", "--output=e"]), ("score", ["score", "--targets=text.txt"]),
    ("infer on one", ["infer", "--prompt=To", "--max_tokens=4", "--mesh=", "--layout="]),
  ):  # fmt: skip
    run.cli(name, flags[0], "--model_dir=m", *flags[1:])
  run.cli("a layout that does not divide", "train", "--model_dir=n", *words, "--set", "heads=3")
  run.cli("a batch that does not divide", "train", "--model_dir=n", *words, "--set", "batch=3")
  run.cli("auto", "train", "--model_dir=a", *small(run), "--mesh=auto", "--layout=auto",
          "--steps=2",
          *params("run.num_devices = 2"))  # fmt: skip
  run.cli("auto layout", "train", "--model_dir=b", *small(run), "--mesh=batch:2,model:2",
          "--layout=auto", "--steps=2")  # fmt: skip


@chain("ways of training")
def _ways(run: Run) -> None:
  words = small(run)
  for name, flags in (
    ("accumulation", params("run.gradient_accumulation_steps = 4")),
    ("accumulation that does not divide", params("run.gradient_accumulation_steps = 3")),
    ("microbatches", params("serialize_num_microbatches.tokens_per_microbatch_per_replica = 64")),
    ("early stopping", ["--steps=40", "--eval_every=2", "--learning_rate=0",
                        *params("run.early_stopping_patience = 2")]),
    ("early stopping, delta", ["--steps=40", "--eval_every=2", *params(
      "run.early_stopping_patience = 1", "run.early_stopping_min_delta = 0.5")]),
    ("early stopping without evaluations", params("run.early_stopping_patience = 2")),
    ("nan", ["--set", "schedule=constant", "--learning_rate=1e30", "--optimizer=Sgd"]),
    ("nan, skipped", ["--set", "schedule=constant", "--learning_rate=1e30", "--optimizer=Sgd",
                      *params("run.nonfinite = 'skip'")]),
    ("norms", params("run.norms_every = 1")),
    ("no norms", params("run.norms_every = 0")),
    ("peak", params("run.peak_flops = 1e12")),
    ("no peak", params("run.peak_flops = 0")),
    ("kept", ["--save_every=1", *params("run.keep_checkpoint_max = 2")]),
    ("kept all", ["--save_every=2", *params("run.keep_checkpoint_max = None")]),
    ("not the best", ["--eval_every=2", "--save_every=3", *params("run.keep_best = False",
                                                                "run.keep_checkpoint_max = 1")]),
    ("the best", ["--eval_every=2", "--save_every=1", *params("run.keep_checkpoint_max = 1")]),
    ("short evaluations", ["--eval_every=3", *params("run.eval_steps = 1")]),
    ("average", ["--eval_every=3", *params("run.ema_decay = 0.5", "run.use_ema = True")]),
    ("no average", params("run.use_ema = True")),
    ("filter", params("run.variable_filter = '.*DenseReluDense.*'")),
    ("filter of nothing", params("run.variable_filter = 'nothing'")),
    ("total steps", params("run.total_run_steps = 100")),
    ("iterations", params("run.iterations_per_loop = 1")),
    ("no checkpoints between", ["--save_every=0"]),
    ("input pipeline", ["--save_every=2", *params("run.checkpoint_input_pipeline = True")]),
    ("seen data", ["--save_every=2", *params("run.skip_seen_data = True")]),
    ("seeds", params("run.seeds = {'weights': 1, 'data': 2, 'dropout': 3}")),
    ("seeds of nothing", params("run.seeds = {'wieghts': 1}")),
    ("profile", params("run.profile_steps = (2, 3)")),
    ("profile backwards", params("run.profile_steps = (3, 2)")),
    ("recomputation", params("LayerStack.recompute_grads = True")),
    ("clipping", params("run.max_grad_norm = 0.01")),
    ("steps that are a function", params("run.train_steps = @utils.auto_train_steps",
                                         "auto_train_steps.train_tokens = 1024")),
    ("bfloat16", params("get_variable_dtype.activation_dtype = 'bfloat16'")),
    ("verbosity", ["--verbosity=1"]),
    ("verbose", ["--verbosity=0"]),
    ("ensemble", params("Unitransformer.ensemble = 2", "run.ensemble_inputs = 2")),
    ("summaries", params("tpu_estimator_model_fn.tpu_summaries = True")),
    ("model info", params("tpu_estimator_model_fn.model_info_file = 'info.txt'")),
    ("moe", [*params("make_layer_stack.layers = [@transformer_layers.SelfAttention, @moe.MoE1D]",
                     "MoE1D.num_experts = 2", "MoE1D.hidden_size = 16"),
             "--module_import=mesh_tensorflow.transformer.moe"]),
  ):  # fmt: skip
    folder = re.sub(r"\W", "_", name)
    fewer = [] if "--steps=40" in flags else ["--steps=5"]
    given = [*fewer, "--report_every=2", *flags]
    run.cli(name, "train", f"--model_dir={folder}", *words, *given)
    if name in ("input pipeline", "seen data", "early stopping", "nan, skipped", "ensemble"):
      run.cli(f"{name}, on", "train", f"--model_dir={folder}", *words, *given, "--steps=8")


@chain("starts from checkpoints")
def _init_checkpoint(run: Run) -> None:
  words = small(run)
  run.cli("first", "train", "--model_dir=m", *words, *TRAINED)
  for name, flags in (
    ("of a folder", ["--init_checkpoint=m"]), ("of a checkpoint",
    ["--init_checkpoint=m/model.ckpt-3"]),
    ("of none", ["--init_checkpoint=none"]), ("of no step", ["--init_checkpoint=m/model.ckpt-4"]),
    ("another model", ["--init_checkpoint=m", "--set", "d_ff=64"]),
    ("more layers", ["--init_checkpoint=m", "--set", "layers=2"]),
    ("another vocabulary", ["--init_checkpoint=m", "--vocabulary=bytes"]),
    ("another optimizer", ["--init_checkpoint=m", "--optimizer=Adafactor"]),
    ("part of it", ["--init_checkpoint=m", *params(
      "tpu_estimator_model_fn.init_variable_filter = '.*DenseReluDense.*'")]),
    ("on a mesh", ["--init_checkpoint=m", *TWO_BY_TWO]),
  ):  # fmt: skip
    folder = re.sub(r"\W", "_", name)
    run.cli(name, "train", f"--model_dir={folder}", *words, "--steps=2", *flags)
  run.cli(
    "not again", "train", "--model_dir=m", *words, "--steps=8", "--init_checkpoint=of_a_folder"
  )


@chain("damaged folders")
def _damage(run: Run) -> None:
  words = [*small(run), *TRAINED]
  run.cli("first", "train", "--model_dir=m", *words)
  on = ["--steps=8"]

  def damaged(name: str, file: str, data: bytes | None) -> None:
    folder = run.copy("m", re.sub(r"\W", "_", name))
    path = run.folder / folder / file
    if data is None:
      path.unlink()
    else:
      path.write_bytes(data)
    run.cli(name, "train", f"--model_dir={folder}", *words, *on)
    run.cli(f"{name}, eval", "eval", f"--model_dir={folder}", *words[:1], "--set", "data=text.txt",
            *sets(**SIZES))  # fmt: skip

  data = (run.folder / "m" / "model.ckpt-6.data-00000-of-00001").read_bytes()
  changed = bytes([data[0] ^ 1]) + data[1:]
  damaged("changed data", "model.ckpt-6.data-00000-of-00001", changed)
  damaged("cut data", "model.ckpt-6.data-00000-of-00001", data[:100])
  damaged("no data", "model.ckpt-6.data-00000-of-00001", None)
  damaged("no index", "model.ckpt-6.index", None)
  damaged("no list", "checkpoint", None)
  damaged("odd list", "checkpoint", b"nonsense")
  damaged("no manifest", "manifest.json", None)
  damaged("odd manifest", "manifest.json", b"{")
  damaged("odd metrics", "metrics.jsonl", b'{"step": 3, "loss": 1.0}\n{"st')
  damaged("no metrics", "metrics.jsonl", None)
  damaged("no operative configuration", "operative_config.gin", None)
  damaged("odd operative configuration", "operative_config.gin", b"a.b = \n")
  damaged("no vocabulary", "vocabularies/index.json", None)
  damaged("odd vocabulary", "vocabularies/characters", b"\xff\xfe")
  run.write("file", "x")
  run.cli("a file for a folder", "train", "--model_dir=file", *words)
  run.cli("a folder below a file", "train", "--model_dir=file/x", *words)
  run.cli("eval of a damaged step", "eval", "--model_dir=changed_data", "--checkpoint=6")


@chain("commands of the trainer")
def _modes(run: Run) -> None:
  """The modes by gin alone, of an encoder-decoder."""
  pairs = ["one two\tun deux", "three\ttrois", "dog\tchien", "red cat\tchat rouge", "blue\tbleu"]
  run.write("pairs.tsv", "".join(f"{p}\n" for p in pairs))
  run.write("inputs.txt", "one two\nthree\nred dog\n")
  run.write("targets.txt", "un deux\ntrois\nchien rouge\n")
  run.write("pairs.gin", """
import mesh_tensorflow.optimize
import mesh_tensorflow.transformer.bleu
import mesh_tensorflow.transformer.dataset
import mesh_tensorflow.transformer.vocabulary
files = {'train': 'pairs.tsv', 'validation': 'pairs.tsv'}
run.vocabulary = @vocabulary.get_byte_vocabulary()
run.train_dataset_fn = @dataset.parallel_text_dataset
dataset.parallel_text_dataset.files = %files
run.eval_dataset_fn = @dataset.parallel_text_eval_datasets
dataset.parallel_text_eval_datasets.files = %files
dataset.parallel_text_eval_datasets.metric_fns = [@bleu.bleu]
num_layers = 1
d_model = 16
d_ff = 32
num_heads = 2
d_kv = 8
dropout_rate = 0.0
run.model_type = 'bitransformer'
run.sequence_length = {'inputs': 16, 'targets': 20}
Unitransformer.max_length = 40
run.batch_size = 4
run.train_steps = 6
run.save_checkpoints_steps = 3
run.learning_rate_schedule = 0.01
run.mesh_shape = ''
run.layout_rules = ''
get_variable_dtype.master_dtype = 'float32'
get_variable_dtype.activation_dtype = 'float32'
score_from_dataset.score_dataset_fn = @dataset.parallel_text_eval_datasets
decode_from_file.input_filename = 'inputs.txt'
decode_from_file.output_filename = 'outputs.txt'
score_from_strings.inputs = 'inputs.txt'
score_from_strings.targets = 'targets.txt'
""")  # fmt: skip
  words = ["--gin_file=pairs.gin", "--model_dir=m"]
  run.trainer("train", *words)
  run.trainer("train, evaluated", "--gin_file=pairs.gin", "--model_dir=v", *params(
    "run.eval_every_steps = 3", "run.report_every = 3"))  # fmt: skip
  split = "run.dataset_split = 'validation'"
  for mode in (
    "eval", "score_eval", "perplexity_eval", "infer", "score_from_strings", "score_from_dataset",
    "export_infer", "export_score", "export", "plan", "search", "dry_run", "nothing", "",
  ):  # fmt: skip
    own = [f"run.mode = '{mode}'", split, "run.export_path = 'exported'"]
    own += ["print_best_layouts.search = False"] if mode == "plan" else []
    run.trainer(f"run.mode = {mode!r}", *words, *params(*own))
  for name, *own in (
    ("evals of all", "run.mode = 'eval'", split, "run.eval_checkpoint_step = 'all'"),
    ("evals of some", "run.mode = 'perplexity_eval'", split, "run.eval_checkpoint_step = [3, 6]"),
    ("evals of none", "run.mode = 'perplexity_eval'", split, "run.eval_checkpoint_step = 5"),
    ("eval without texts", "run.mode = 'eval'", split, "run.output_eval_examples = False"),
    ("eval elsewhere", "run.mode = 'eval'", split, "run.eval_summary_dir = 'elsewhere'"),
    ("eval, suffix", "run.mode = 'eval'", split, "run.eval_dir_suffix = 'x'"),
    ("eval of no split", "run.mode = 'eval'", "run.dataset_split = 'test'"),
    ("eval of no lengths", "run.mode = 'eval'", split, "run.sequence_length = None"),
    ("train of no lengths", "run.sequence_length = None"),
    ("scores kept", "run.mode = 'score_from_strings'", "save_scores.scores_filename = 's'",
     "score_from_strings.score_postprocess_fn = @save_scores"),
    ("scores kept, with texts", "run.mode = 'score_from_dataset'", split,
     "save_scores.scores_filename = 't'", "save_scores.save_example_text = True",
     "score_from_dataset.score_postprocess_fn = @save_scores"),
    ("scores without ends", "run.mode = 'score_from_strings'", "save_scores.scores_filename = 'u'",
     "score_from_strings.score_postprocess_fn = @save_scores",
     "score_from_strings.score_eos = False"),
    ("beams", "run.mode = 'infer'", "Bitransformer.decode.beam_size = 3",
     "Bitransformer.decode.alpha = 0.6"),
    ("no beams", "run.mode = 'infer'", "Bitransformer.decode.beam_size = 0"),
    ("repeats", "run.mode = 'infer'", "decode_from_file.repeats = 2"),
    ("no input", "run.mode = 'infer'", "decode_from_file.input_filename = 'none.txt'"),
    ("data sets", "run.mode = 'infer'", "infer_model.decode_fn = @decode_from_dataset",
     "decode_from_dataset.infer_dataset_fn = @dataset.parallel_text_eval_datasets"),
    ("no vocabulary", "run.vocabulary = None"),
    ("no data", "run.train_dataset_fn = None"),
    ("no data to evaluate", "run.mode = 'eval'", "run.eval_dataset_fn = None"),
    ("delimited model", "run.model_type = 'delimited_lm'", "run.train_steps = 8"),
    ("another type of model", "run.model_type = 'lm'", "run.train_steps = 8"),
  ):  # fmt: skip
    run.trainer(name, *words, *params(*own))
  for mode in (
    "delimited_lm",
    "lm",
    "aligned",
    "bi_teacher_student",
    "prefix_lm",
    "bi_student_teacher",
  ):
    words = ["--gin_file=pairs.gin", f"--model_dir={mode}"]
    run.trainer(f"train a {mode}", *words, *params(f"run.model_type = '{mode}'"))


@chain("python -m mesh_tensorflow.transformer.launch")
def _launch(run: Run) -> None:
  words = [*small(run), "--steps=4", "--report_every=2", "--mesh=batch:2", "--layout=batch:batch"]
  launch = ["-m", "mesh_tensorflow.transformer.launch", "--workers=2", "--", "train"]
  run("two workers", *launch, "--model_dir=m", *words, loosely=True)
  run.cli("eval of their model", "eval", "--model_dir=m", "--mesh=", "--layout=")
  run("refused", *launch, "--model_dir=n", *words, "--set", "batch=3", loosely=True)


@chain("written before")
def _before(run: Run) -> None:
  """What OLD trained, in the hands of both."""
  words = [*small(run), *TRAINED]
  more = params("run.ema_decay = 0.9", "run.profile_steps = '3:4'")
  run.cli("train", "train", "--model_dir=m", *words, *more, by_old=True)
  run.copy("m", "other")
  run.copy("m", "third")
  run.cli("on", "train", "--model_dir=m", *words, *more, "--steps=9")
  run.cli("on a mesh", "train", "--model_dir=other", *words, *more, *TWO_BY_TWO, "--steps=9")
  run.cli(
    "another model", "train", "--model_dir=third", *words, *more, "--steps=9", "--set", "d_ff=8"
  )
  run.cli("of its folder", "train", "--model_dir=third", "--config=third/operative_config.gin",
          "--steps=9")  # fmt: skip
  run.cli("start from it", "train", "--model_dir=n", *words, "--init_checkpoint=m")
  run.cli("train on 2x2", "train", "--model_dir=s", *words, *TWO_BY_TWO, *params(
    "run.mesh_implementation = 'simd'"), by_old=True)  # fmt: skip
  run.cli("on from 2x2", "train", "--model_dir=s", *words, "--steps=9")
  run.cli("train, then by OLD", "train", "--model_dir=new", *words)
  run.cli("by OLD", "train", "--model_dir=new", *words, "--steps=9", by_old=True)
  _uses(run, "third", steps="9")


# ----------------------------------------------------------------------------- other commands


@chain("init and tokenize")
def _init(run: Run) -> None:
  run.write("text.txt", TEXT)
  run.write("rows.jsonl", "".join(f'{{"n": {i}, "body": "row {i} {TEXT[:90]!r}"}}\n'.replace("'",
  "")
                                  for i in range(30)))  # fmt: skip
  for name, words in (
    ("text", ["i", "--text=text.txt"]), ("again", ["i", "--text=text.txt"]),
    ("force", ["i", "--text=text.txt", "--force"]), ("bytes", ["j", "--text=text.txt",
    "--vocabulary=bytes"]),
    ("records", ["k", "--text=rows.jsonl"]), ("field", ["l", "--text=rows.jsonl", "--field=body"]),
    ("no field", ["o", "--text=rows.jsonl", "--field=nothing"]), ("no text", ["p"]),
    ("encoding", ["q", "--text=text.txt", "--encoding=latin-1"]), ("none", ["q", "--text=none"]),
    ("no encoding", ["r", "--text=text.txt", "--encoding=latin-77"]), ("no folder",
    ["--text=text.txt"]),
  ):  # fmt: skip
    run.cli(f"init {name}", "init", *words)
  for name, words in (
    ("bytes", ["--vocabulary=bytes"]), ("characters", ["--vocabulary=characters"]),
    ("lines", ["--vocabulary=bytes", "--document=line", "--processes=1"]),
    ("separator", ["--vocabulary=bytes", r"--separator=\n\n", "--validation_fraction=0.2"]),
    ("unknown", ["--vocabulary=x"]), ("fraction", ["--vocabulary=bytes",
    "--validation_fraction=1"]),
    ("sentencepiece", ["--vocabulary=sentencepiece:60"]), ("encoding", ["--vocabulary=bytes",
    "--encoding=x"]),
  ):  # fmt: skip
    folder = f"t_{name}"
    run.cli(f"tokenize {name}", "tokenize", "--text=text.txt", f"--output={folder}", *words)
  run.cli("tokenize again", "tokenize", "--text=text.txt", "--output=t_bytes", "--vocabulary=bytes")
  run.cli("tokenize otherwise", "tokenize", "--text=text.txt", "--output=t_bytes",
          "--vocabulary=characters")  # fmt: skip
  run.cli("tokenize records", "tokenize", "--text=rows.jsonl", "--output=t_rows", "--field=body",
          "--vocabulary=bytes")  # fmt: skip
  run.cli("tokenize no field", "tokenize", "--text=rows.jsonl", "--output=t_no", "--field=x",
          "--vocabulary=bytes")  # fmt: skip
  words = [w for w in small(run) if w != "data=text.txt"]
  tokens = params("run.train_dataset_fn = @dataset.own_tokens", "own_tokens.path = 't_separator'")
  words = ["--config=problems/own_text.gin", *sets(**SIZES), *tokens]
  run.cli(
    "train of tokens", "train", "--model_dir=m", *words, "--set", "vocabulary=bytes", *TRAINED
  )
  run.cli("train of init", "train", "--config=i/train.gin", "--steps=2")
  run.cli("infer of init", "infer", "--config=i/train.gin", "--prompt=To", "--max_tokens=4")
  run.cli("eval of init", "eval", "--config=i/train.gin")


@chain("plan")
def _plan(run: Run) -> None:
  words = small(run)
  for name, flags in (
    ("alone", []), ("devices", ["--devices=4"]), ("mesh", TWO_BY_TWO), ("write",
    ["--write=best.gin", "--devices=2"]),
    ("machine", ["--machine=tpu_v3"]), ("no machine", ["--machine=nothing"]),
    ("devices and mesh", ["--devices=4", "--mesh=batch:4"]), ("batch", ["--batch_size=16"]),
    ("vocabulary", ["--vocab_size=77"]), ("auto", ["--mesh=batch:2,model:2", "--layout=auto"]),
    ("too many", ["--mesh=batch:3"]), ("no rule", ["--mesh=batch:2", "--layout=batch:model"]),
    ("model_dir", ["--model_dir=m"]), ("optimizer", ["--set", "optimizer=Adafactor"]),
  ):  # fmt: skip
    run.cli(name, "plan", *words, *flags)
  run.cli("of the written", "plan", *words, "--config=best.gin", *params(_NO_SEARCH))


_OLD_PROGRAM = """
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf

def model_fn(features, labels, mode, params):
  global_step = tf.train.get_global_step()
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "my_mesh")
  with tf.variable_scope("main"):
    x = mtf.import_tf_tensor(mesh, features, mtf.Shape([mtf.Dimension("batch", 4)]))
    x = mtf.dropout(x, 0.9)
  if mode == tf.estimator.ModeKeys.TRAIN:
    return tf.estimator.EstimatorSpec(mode, loss=x)
tf.disable_v2_behavior()
tf.app.run()
"""


@chain("port")
def _port(run: Run) -> None:
  run.write("program.py", _OLD_PROGRAM)
  run.write("two.py", "print 'x'\n")
  port = ["-m", "mesh_transformer_cli.port"]
  for words in (["program.py"], ["two.py"], ["none.py"], [], ["--help"], ["."], ["program.py",
  "--write"],
                ["program.py"], ["--nonsense"]):  # fmt: skip
    run(f"port {len(run.outcomes)} {shlex.join(words)}", *port, *words)


# ----------------------------------------------------------------------------- BERT

_WORDS = "the a red blue dog cat sees hears runs near house tree quickly slowly it".split()
BERT = (
  "make_vocab",
  "create_pretraining_data",
  "run_pretraining",
  "run_classifier",
  "run_squad",
  "convert",
)


def _bert(run: Run, case: str, program: str, *words: str, **options: object) -> None:
  module = f"mesh_tensorflow.bert.{program}"
  run(case, "-m", module, *words, server="bare", **options)  # type: ignore[arg-type]


def _bert_data(run: Run, by_old: bool = True) -> None:
  rng = random.Random(0)
  paragraphs = [
    [" ".join(rng.choices(_WORDS, k=rng.randint(3, 8))) for _ in range(8)] for _ in range(8)
  ]
  run.write("text.txt", "\n\n".join("\n".join(p) for p in paragraphs) + "\n")
  _bert(run, "vocabulary", "make_vocab", "--input_file=text.txt", "--output_file=vocab.txt",
        "--vocab_size=60", by_old=by_old)  # fmt: skip
  for name in ("train", "eval"):
    _bert(run, f"records, {name}", "create_pretraining_data", "--input_file=text.txt",
          "--dupe_factor=2",
          f"--output_file={name}.tfrecord", "--max_predictions_per_seq=3", "--max_seq_length=16",
          "--vocab_file=vocab.txt", by_old=by_old)  # fmt: skip
  run.write("config.json", json.dumps({
    "vocab_size": 60, "d_model": 16, "num_blocks": 1, "attention_num_heads": 2,
    "type_vocab_size": 2,
    "feedforward_intermediate_size": 32, "max_position_embeddings": 32, "initializer_range": 0.25,
  }))  # fmt: skip


_BERT_SHARED = [
  "--bert_config_file=config.json", "--layout=batch:batch,vocab:model,num_heads:model",
  "--mesh_shape=model:2", "--train_batch_size=4", "--learning_rate=1e-3", "--max_seq_length=16",
]  # fmt: skip
_PRETRAINING = [
  *_BERT_SHARED, "--input_train_files=train.tfrecord", "--input_eval_files=eval.tfrecord",
  "--max_predictions_per_seq=3", "--num_train_steps=4", "--num_warmup_steps=2",
  "--max_eval_steps=2",
  "--steps_per_eval=2", "--eval_batch_size=4",
]  # fmt: skip


@chain("bert, help and flags")
def _bert_flags(run: Run) -> None:
  for program in BERT:
    for words in (["--help"], ["--helpfull"], ["--helpshort"], [], ["--nonsense=1"], ["x"]):
      _bert(run, f"{program} {shlex.join(words)}", program, *words)
  _bert_data(run, by_old=False)
  for flag in (
    "--mode=test", "--mode=train", "--mode=eval", "--max_seq_length=64", "--max_seq_length=12",
    "--max_seq_length=x", "--input_train_files=none", "--bert_config_file=none.json",
    "--bert_config_file=text.txt", "--train_batch_size=0", "--train_batch_size=3",
    "--layout=vocab:modle",
    "--mesh_shape=auto", "--mesh_shape=batch:x", "--mesh_shape=batch:2", "--learning_rate=x",
    "--optimizer=sgd", "--optimizer=adafactor", "--init_checkpoint=none", "--init_checkpoint=.",
    "--mesh_implementation=x", "--mesh_implementation=simd", "--num_train_steps=0",
    "--num_train_steps=-1",
    "--num_warmup_steps=0", "--num_warmup_steps=9", "--iterations_per_loop=0",
    "--iterations_per_loop=1",
    "--save_checkpoints_steps=0", "--save_checkpoints_steps=1", "--eval_batch_size=0",
    "--max_eval_steps=0",
    "--steps_per_eval=0", "--steps_per_eval=1", "--use_tpu", "--noclip_gradients",
    "--random_seed=3",
    "--max_predictions_per_seq=4", "--output_dir=", "--layout=auto", "--tpu_name=x", "--unknown=3",
  ):  # fmt: skip
    folder = re.sub(r"\W", "_", flag)
    _bert(
      run, f"pretraining {flag}", "run_pretraining", *_PRETRAINING, f"--output_dir={folder}", flag
    )
  for program, flag in (
    ("make_vocab", "--vocab_size=3"), ("make_vocab", "--input_file=none"), ("make_vocab",
    "--min_count=0"),
    ("make_vocab", "--nodo_lower_case"), ("create_pretraining_data", "--masked_lm_prob=2"),
    ("create_pretraining_data", "--short_seq_prob=0.5"), ("create_pretraining_data",
    "--random_seed=1"),
    ("create_pretraining_data", "--do_whole_word_mask"), ("create_pretraining_data",
    "--dupe_factor=0"),
    ("create_pretraining_data", "--max_seq_length=4"), ("create_pretraining_data",
    "--vocab_file=none"),
  ):  # fmt: skip
    words = ["--input_file=text.txt", "--output_file=o", "--vocab_size=60"]
    words = words if program == "make_vocab" else [*words[:2], "--vocab_file=vocab.txt"]
    _bert(run, f"{program} {flag}", program, *words, flag)
  for program in ("run_classifier", "run_squad"):
    words = [*_BERT_SHARED, "--vocab_file=vocab.txt", "--output_dir=out"]
    for flag in ("--do_train", "--do_predict", "--task_name=sst", "--vocab_file=none", "--do_eval",
                 "--version_2_with_negative", "--train_file=none"):  # fmt: skip
      _bert(run, f"{program} {flag}", program, *words, flag)


@chain("bert, pretraining")
def _bert_pretraining(run: Run) -> None:
  _bert_data(run)
  _bert(run, "train and eval", "run_pretraining", *_PRETRAINING, "--output_dir=m")
  _bert(run, "on", "run_pretraining", *_PRETRAINING, "--output_dir=m", "--num_train_steps=6")
  alone = ["--mesh_shape=all:1", "--layout="]
  _bert(run, "train", "run_pretraining", *_PRETRAINING, *alone, "--output_dir=o", "--mode=train",
        "--save_checkpoints_steps=2")  # fmt: skip
  _bert(run, "eval", "run_pretraining", *_PRETRAINING, *alone, "--output_dir=o", "--mode=eval")
  _bert(run, "start from it", "run_pretraining", *_PRETRAINING, "--output_dir=p",
        "--init_checkpoint=m",
        "--mesh_shape=batch:2,model:2")  # fmt: skip
  _bert(run, "by OLD", "run_pretraining", *_PRETRAINING, "--output_dir=q", by_old=True)
  _bert(
    run, "on from OLD", "run_pretraining", *_PRETRAINING, "--output_dir=q", "--num_train_steps=6"
  )
  config = json.loads((run.folder / "config.json").read_text())
  run.write("wide.json", json.dumps({**config, "d_model": 32}))
  _bert(run, "another model", "run_pretraining", *_PRETRAINING, "--output_dir=m",
        "--num_train_steps=8",
        "--bert_config_file=wide.json")  # fmt: skip
  for words in (
    ["m", "google", "config.json"],
    ["m", "hf", "config.json"],
    ["m", "torch"],
    ["none", "google"],
  ):
    _bert(run, f"convert {shlex.join(words)}", "convert", *words)
    given = [f"--{n}={w}" for n, w in zip(("input", "to", "bert_config_file"), words)]
    _bert(run, f"convert {shlex.join(given)}", "convert", *given, "--output=c")


@chain("bert, fine-tuning")
def _bert_tuning(run: Run) -> None:
  _bert_data(run)
  _bert(run, "pretrained", "run_pretraining", *_PRETRAINING, "--output_dir=m", by_old=True)
  rng = random.Random(1)
  texts = [" ".join(rng.choices(_WORDS, k=6)) for _ in range(14)]
  rows = "".join(f"x\t{i % 2}\t\t{text}\n" for i, text in enumerate(texts))
  for name in ("train", "dev"):
    run.write(f"data/{name}.tsv", rows)
  run.write("data/test.tsv", "i\ttext\n" + "".join(f"0\t{text}\n" for text in texts))
  words = [*_BERT_SHARED, "--vocab_file=vocab.txt", "--init_checkpoint=m", "--mesh_shape=batch:2",
           "--eval_batch_size=4", "--predict_batch_size=4"]  # fmt: skip
  cola = [*words, "--task_name=CoLA", "--data_dir=data"]
  everything = ["--do_train", "--do_eval", "--do_predict", "--num_train_epochs=2.0"]
  _bert(run, "classifier", "run_classifier", *cola, *everything, "--output_dir=c")
  _bert(run, "classifier, on", "run_classifier", *cola, *everything, "--output_dir=c",
        "--num_train_epochs=3.0")  # fmt: skip
  _bert(run, "classifier, eval", "run_classifier", *cola, "--do_eval", "--output_dir=c")
  _bert(run, "classifier, other task", "run_classifier", *words, "--task_name=mrpc",
        "--data_dir=data",
        "--do_eval", "--output_dir=d")  # fmt: skip
  paragraphs = []
  for i in range(8):
    chosen = rng.sample(_WORDS[:-1], 6)
    context, at = " ".join(chosen), rng.randrange(6)
    answer = {"text": chosen[at], "answer_start": context.index(chosen[at])}
    qa = {"id": str(i), "question": chosen[at], "answers": [answer], "is_impossible": False}
    none = {"id": f"n{i}", "question": "it", "answers": [], "is_impossible": True}
    paragraphs.append({"context": context, "qas": [qa, none]})
  run.write("squad.json", json.dumps({"data": [{"paragraphs": paragraphs}]}))
  squad = [*words, "--train_file=squad.json", "--predict_file=squad.json", "--max_query_length=4",
           "--mesh_shape=model:2", "--do_predict"]  # fmt: skip
  with_negative = ["--version_2_with_negative", "--do_train", "--num_train_epochs=1.0"]
  _bert(run, "squad", "run_squad", *squad, *with_negative, "--output_dir=s")
  _bert(run, "squad, predict", "run_squad", *squad, "--output_dir=s")
  _bert(
    run,
    "squad, on",
    "run_squad",
    *squad,
    *with_negative,
    "--output_dir=s",
    "--num_train_epochs=2.0",
  )
  _bert(run, "squad, no query", "run_squad", *squad, "--output_dir=s", "--max_query_length=20")


# ----------------------------------------------------------------------------- the U-Net

_WRITES_SCANS = """
import sys
import numpy as np
import tensorflow as tf
for seed in range(3):
  rng = np.random.default_rng(seed)
  place = np.stack(np.meshgrid(*[np.arange(8)] * 3, indexing="ij"), -1)
  r = np.linalg.norm(place - rng.uniform(3, 5, 3), axis=-1)
  label = ((r < 3).astype("f") + (r < 1.6)).astype("f")
  image = (0.5 + 0.2 * label + 0.02 * rng.normal(size=label.shape)).astype("f")
  np.save(f"image{seed}.npy", image)
  np.save(f"label{seed}.npy", label)
from mesh_tensorflow.experimental import offline_data_aug
for i in range(3):
  image, label = np.load(f"image{i}.npy"), np.load(f"label{i}.npy")
  offline_data_aug.save_to_tfrecord(image, label, None, i, ".", "scan")
"""
_UNET = [
  "--nouse_tpu", "--mesh_shape=rows:2,columns:2", "--train_file_pattern=*.tfrecords",
  "--layout=image_nx_block:rows,image_ny_block:columns", "--eval_file_pattern=*.tfrecords",
  "--ct_resolution=8", "--image_nx_block=2", "--image_ny_block=2", "--batch_size_train=2",
  "--batch_size_eval=2", "--n_base_filters=2", "--network_depth=2", "--n_conv_per_block=1",
  "--mtf_dtype=float32", "--dropout_keep_p=0.8", "--n_dataset_processes=1",
  "--n_dataset_read_interleave=1", "--num_train_iterations_per_loop=3", "--num_training_loops=2",
  "--num_eval_iterations_per_loop=2", "--save_checkpoints_steps=2",
]  # fmt: skip


def _unet(run: Run, case: str, *words: str, **options: object) -> None:
  module = "mesh_tensorflow.experimental.model_executor"
  run(case, "-m", module, *words, server="bare", **options)  # type: ignore[arg-type]


@chain("unet")
def _unet_chain(run: Run) -> None:
  # The order of scans, and what is done to them, are drawn without a seed: nothing but names and
  # shapes of what is trained can be compared.
  run("scans", "-c", _WRITES_SCANS, server="bare", by_old=True)
  for words in (["--help"], ["--helpfull"], ["--nonsense=1"], ["x"], []):
    _unet(run, f"program {shlex.join(words)}", *words)
  for program in ("offline_data_aug", "unet"):
    for words in (["--help"], []):
      run(f"{program} {shlex.join(words)}", "-m", f"mesh_tensorflow.experimental.{program}", *words,
          server="bare")  # fmt: skip
  folders = ["--checkpoint_dir=m", "--pred_output_dir=p", "--verbosity=0"]
  _unet(run, "train and eval", *_UNET, *folders, loosely=True)
  _unet(run, "on", *_UNET, *folders, "--num_training_loops=1", loosely=True)
  _unet(run, "eval", *_UNET, *folders, "--num_train_iterations_per_loop=0",
        "--num_training_loops=1",
        loosely=True)  # fmt: skip
  _unet(run, "train", *_UNET, "--checkpoint_dir=n", "--num_eval_iterations_per_loop=0",
        "--summary_dir=s", loosely=True)  # fmt: skip
  _unet(run, "nothing written", *_UNET, "--num_training_loops=1", loosely=True)
  _unet(run, "no summaries", *_UNET, "--num_training_loops=1", "--nowrite_summary",
        "--checkpoint_dir=w",
        loosely=True)  # fmt: skip
  slices = ["--sampled_2d_slices", "--image_c=3", "--batch_size_eval=6"]
  _unet(run, "slices", *_UNET, *slices, "--checkpoint_dir=d", loosely=True)
  _unet(run, "one device", *_UNET, "--mesh_shape=rows:1", "--layout=", "--checkpoint_dir=m",
        "--num_training_loops=1", loosely=True)  # fmt: skip
  _unet(run, "another model", *_UNET, "--checkpoint_dir=m", "--n_base_filters=4")
  for flag in (
    "--use_tpu", "--mesh_shape=rows:3", "--mesh_shape=x", "--layout=image_nx_block:nothing",
    "--layout=nothing:rows", "--train_file_pattern=", "--train_file_pattern=none",
    "--image_nx_block=3",
    "--network_depth=4", "--mtf_dtype=float31", "--mtf_dtype=bfloat16", "--batch_size_train=0",
    "--dropout_keep_p=x", "--lr=x", "--lr=0", "--n_base_filters=0", "--ct_resolution=16",
    "--eval_file_pattern=none", "--nowith_batch_norm", "--label_c=2", "--image_translate_ratio=0.1",
  ):  # fmt: skip
    _unet(run, flag, *_UNET, "--num_training_loops=1", "--num_train_iterations_per_loop=1", flag,
          loosely=flag.startswith(("--no", "--mtf_dtype=b", "--lr=0", "--image_tr")))  # fmt: skip


# ----------------------------------------------------------------------------- signals

_LONG = ["--steps=100000", "--report_every=50", "--save_every=100000"]


def _is_said(word: str) -> Callable[[str], bool]:
  return lambda text: word in text


@chain("signals")
def _signals(run: Run) -> None:
  words = [*small(run), *_LONG]
  training = _is_said("tokens/s")
  for name, number in (("SIGTERM", signal.SIGTERM), ("SIGINT", signal.SIGINT)):
    folder = f"--model_dir={name}"
    run.cli(f"train, {name}", "train", folder, *words, stop=training, number=number, loosely=True)
  run.cli("train on a mesh, SIGTERM", "train", "--model_dir=s", *words, *TWO_BY_TWO, *params(
    "run.mesh_implementation = 'simd'"), stop=training, loosely=True)  # fmt: skip
  run.cli("before training, SIGTERM", "train", "--model_dir=b", *words,
          stop=_is_said("is built"), loosely=True)  # fmt: skip
  run.cli("SIGKILL", "train", "--model_dir=k", *words, "--save_every=20", stop=training,
          number=signal.SIGKILL, loosely=True)  # fmt: skip
  run.cli(
    "interactive, end of input", "infer", "--model_dir=SIGTERM", "--interactive", loosely=True
  )


@chain("signals, bert")
def _signals_bert(run: Run) -> None:
  _bert_data(run)
  words = [*_PRETRAINING, "--output_dir=m", "--mode=train", "--num_train_steps=100000",
           "--save_checkpoints_steps=50", "--iterations_per_loop=10"]  # fmt: skip
  for number in (signal.SIGTERM, signal.SIGINT):
    saved = lambda _: any((run.folder / "m").glob("model.ckpt-*.index"))  # noqa: E731
    _bert(run, f"pretraining, {number.name}", "run_pretraining", *words, stop=saved, number=number,
          loosely=True)  # fmt: skip
    for path in (run.folder / "m").glob("*"):
      path.unlink()


@chain("signals, unet")
def _signals_unet(run: Run) -> None:
  run("scans", "-c", _WRITES_SCANS, server="bare", by_old=True)
  saved = lambda _: any((run.folder / "m").glob("model.ckpt-*.index"))  # noqa: E731
  words = [*_UNET, "--num_train_iterations_per_loop=100000", "--checkpoint_dir=m"]
  _unet(run, "SIGTERM", *words, stop=saved, loosely=True)
