"""The operative configuration: what set each value, valid gin, and the same run when given back."""

from __future__ import annotations

import os
import re

import gin
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import gin_config, transformer, utils


def line_of(text: str, name: str) -> str:
  """The line that binds `name`; if the comment stands above, both."""
  lines = text.splitlines()
  (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{name} = ")]
  return f"{lines[at - 1]} {lines[at]}" if lines[at].endswith("\\") else lines[at]


def build(files, *bindings, folder="") -> str:
  """Parses, calls a few configurables, and returns the operative configuration."""
  gin_config.parse_gin(list(files), list(bindings), [str(folder)] if folder else [])
  utils.get_variable_dtype()
  transformer.make_layer_stack()
  return gin_config.operative_config_str()


def values(text: str) -> dict[str, str]:
  """Bindings and values without the comments, of the text as gin reads it."""
  gin.clear_config()
  gin.parse_config(text)
  found = gin.config_str(max_line_length=1000)
  return dict(line.split(" = ", 1) for line in found.splitlines() if re.match(r"[\w/.]+ = ", line))


@pytest.mark.parametrize(
  ("name", "told"),
  [
    ("d_ff", r"d_ff = 512  # problems/tinyshakespeare.gin:25, overrides defaults.gin:\d+"),
    ("num_layers", r"num_layers = 1  # --gin_param, overrides "
     r"problems/tinyshakespeare.gin:\d+, defaults.gin:\d+"),
    ("DenseReluDense.activation", "= 'relu'  # default"),
    ("LayerStack.norm_epsilon", r"= None  # defaults.gin:\d+"),
    ("SelfAttention.key_value_size", r"= %d_kv  # defaults.gin:\d+; d_kv = 32: "
     r"problems/tinyshakespeare.gin:\d+, overrides defaults.gin:\d+"),
    ("get_variable_dtype.master_dtype", r"# layouts/cpu_2x2.gin:6"),
    ("LayerStack.recompute_grads", "# set by Python code"),
    ("make_layer_stack.layers", r"# defaults.gin:\d+ make_layer_stack.layers = "),
    # Not used yet.
    ("run.mesh_shape", r"# layouts/cpu_2x2.gin:3, overrides problems/tinyshakespeare.gin:\d+, "
     r"defaults.gin:\d+"),
    ("run.learning_rate_schedule", r"# problems/tinyshakespeare.gin:\d+, overrides defaults.gin"),
    ("decoder/SelfAttention.num_heads", "= 7  # --gin_param"),
  ],
)  # fmt: skip
def test_what_set_a_value(name, told):
  gin.bind_parameter("LayerStack.recompute_grads", False)
  files = ("problems/tinyshakespeare.gin", "layouts/cpu_2x2.gin")
  text = build(files, "num_layers = 1", "decoder/SelfAttention.num_heads = 7")
  assert re.search(told, line_of(text, name)), line_of(text, name)


def test_places_are_right(repository):
  """Each place of the package's files is a line that says it."""
  text = build(["problems/tinyshakespeare.gin", "layouts/cpu_2x2.gin"])
  checked = 0
  for line in text.splitlines():
    found = re.match(r"(?:\w+/)*([\w.]+) = .*?# ([\w/]+\.gin):(\d+)", line)
    if found:
      name, file, number = found.groups()
      at = (repository / "gin" / file).read_text().splitlines()[int(number) - 1]
      assert name.split(".")[-1] in at.split("=")[0], line
      checked += 1
  assert checked > 30


def test_is_valid_gin_and_binds_the_same():
  files = ["problems/tinyshakespeare.gin", "layouts/cpu_2x2.gin"]
  text = build(files, "d_ff = 64", "text_file = 'a # b'")
  operative = gin.operative_config_str(max_line_length=1000)
  bound = values(text)
  for line in operative.splitlines():
    if re.match(r"[\w/.]+ = [^\\]", line):
      name, value = line.split(" = ", 1)
      assert bound[name] == value
  assert bound["text_file"] == "'a # b'"
  assert bound["run.train_steps"] == "2000"


def test_given_back_as_a_file_it_is_the_same(tmp_path):
  first = build(
    ["problems/tinyshakespeare.gin"], "d_ff = 64", "decoder/LayerStack.dropout_rate = 0.1"
  )
  (tmp_path / "operative_config.gin").write_text(first)
  gin.clear_config()
  second = build(["operative_config.gin"], folder=tmp_path)
  assert re.search(rf"d_ff = 64  # {tmp_path}/operative_config.gin:\d+, overrides", second)
  assert values(first) == values(second)


def test_nothing_of_an_earlier_configuration_is_told():
  build(["problems/tinyshakespeare.gin"])
  gin.clear_config()
  gin.bind_parameter("LayerStack.recompute_grads", True)
  text = build(["models/lm_base.gin"])
  assert "tinyshakespeare" not in text and "models/lm_base.gin:3" in text


def test_values_of_python_code_override(tmp_path):
  build(["models/lm_base.gin"])
  with gin.unlock_config():
    gin.bind_parameter("d_ff/macro.value", 96)
  transformer.make_layer_stack()
  text = gin_config.operative_config_str()
  assert "d_ff = 96  # set by Python code" in text
  assert "d_ff = 96: set by Python code" in line_of(text, "DenseReluDense.hidden_size")


def test_file_of_the_same_name_as_one_of_the_package(tmp_path, monkeypatch):
  (tmp_path / "models").mkdir()
  (tmp_path / "models" / "tiny.gin").write_text("d_ff = 40\n")
  monkeypatch.chdir(tmp_path)
  text = build(["models/tiny.gin"])
  assert f".{os.sep}models/tiny.gin:1" in line_of(text, "d_ff")


def test_dynamic_registration(tmp_path):
  """Names are those of the imports then: told as they are, and given back as they are."""
  (tmp_path / "a.gin").write_text(
    "from __gin__ import dynamic_registration\n"
    "from mesh_tensorflow.transformer import transformer\n"
    "transformer.LayerStack.sublayers_final = []\n"
  )
  text = build(["a.gin"], folder=tmp_path)
  assert re.search(r"LayerStack.sublayers_final = \[\]  # .*a.gin:3, overrides defaults.gin", text)
  (tmp_path / "operative_config.gin").write_text(text)
  gin.clear_config()
  assert "LayerStack.sublayers_final = []" in build(["operative_config.gin"], folder=tmp_path)


def test_binding_that_is_missing_late_is_told_in_our_words():
  gin_config.parse_gin(["models/lm_base.gin"], [])
  with pytest.raises(RuntimeError) as caught:
    utils.tpu_mesh_shape()
  error = gin_config.missing_binding(caught.value)
  assert isinstance(error, errors.ConfigError)
  assert 'tpu_mesh_shape needs tpu_topology, which nothing binds: --gin_param="' in str(error)
  assert gin_config.missing_binding(RuntimeError("anything else")) is None


def test_scopes_in_which_nothing_was_called(caplog):
  gin_config.parse_gin(
    ["models/bi_base.gin"],
    ["encodr/LayerStack.sublayers_final = []", "encoder/LayerStack.sublayers_initial = []"]
    + ["decoder/LocalSelfAttention.num_heads = 2"],
  )
  with gin.config_scope("encoder"):
    transformer.make_layer_stack()
  gin_config.warn_of_unused_scopes()
  (told,) = [r.getMessage() for r in caplog.records if r.name == "mesh_tensorflow"]
  assert "encodr/LayerStack.sublayers_final has no effect: this run called it in no scope, " in told
  assert told.endswith("'encoder', never in the scope 'encodr'; did you mean encoder?")


def test_program_writes_it_and_takes_it_back(tmp_path, run_forked):
  """Through the command line: train, then train again with nothing but the file that it wrote."""
  (tmp_path / "text.txt").write_text("All the world's a stage, and all the men players. " * 60)
  main = ["-m", "mesh_tensorflow.transformer.main"]
  small = ["num_layers = 1", "d_ff = 32", "d_model = 32", f"text_file = '{tmp_path}/text.txt'"]
  small += ["run.train_steps = 4", "run.iterations_per_loop = 2", "run.report_every = 1"]
  small += ["decoder/LayerStack.dropout_rate = 0.5"]
  first = run_forked(
    [*main, f"--model_dir={tmp_path}/a", "--gin_file=problems/tinyshakespeare.gin"]
    + [f"--gin_param={b}" for b in small],
    timeout=280,
  )
  assert "decoder/LayerStack.dropout_rate has no effect" in first.stderr
  written = tmp_path / "a" / "operative_config.gin"
  text = written.read_text()
  # Called while the program was traced: schedule, optimizer and data are in it.
  assert re.search(r"^linear_warmup.steps_or_fraction = 100  # problems/tiny", text, re.MULTILINE)
  assert "AdamWeightDecayOptimizer.beta_2 = 0.99  # problems/tinyshakespeare.gin:" in text
  assert re.search(r"^run.train_steps = 4  # --gin_param, overrides problems/", text, re.MULTILINE)
  again = run_forked([*main, f"--model_dir={tmp_path}/b", f"--gin_file={written}"], timeout=280)
  losses = [re.findall(r"loss (\d+\.\d+)", r.stdout) for r in (first, again)]
  assert len(losses[0]) >= 2 and losses[0] == losses[1]


def test_program_refuses_a_contradiction_before_it_does_anything(tmp_path, run_forked):
  result = run_forked(
    ["-m", "mesh_tensorflow.transformer.main", f"--model_dir={tmp_path}/m"]
    + ["--gin_file=problems/tinyshakespeare.gin", "--gin_param=run.sequence_length = 128"],
    timeout=120,
    check=False,
  )
  assert result.returncode == 2 and not (tmp_path / "m").exists()
  (line,) = result.stderr.strip().splitlines()
  assert line.startswith("ShapeError: gin: run.sequence_length has targets of length=128")
  assert "problems/tinyshakespeare.gin:29" in line


def test_help_tells_of_the_gin_flags(run_forked):
  result = run_forked(["-m", "mesh_tensorflow.transformer.main", "--help"], check=False)
  for flag in ("--gin_file", "--gin_param", "gin_location_prefix", "--model_dir"):
    assert flag in result.stdout
  assert "overrides" in result.stdout and "layouts/cpu_2x2.gin" in result.stdout
