"""A checkpoint knows the model that it belongs to, and is refused by another one."""

from __future__ import annotations

import json
import shutil

import gin
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import gin_config, utils, vocabulary
from mesh_tensorflow.transformer.gin_config import bindings as gin_names
from mesh_tensorflow.transformer.gin_config import checks, model_config
from tests.kinds import kept
from tests.transformer import small_lm
from tests.transformer import worker_processes as program
from tests.transformer.small_lm import EVAL, TEXT, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A folder with a model of two steps; tests do not write there."""
  folder = tmp_path_factory.mktemp("trained")
  run(folder, text=TEXT)
  yield folder
  gin.clear_config()


@pytest.fixture
def copied(trained, tmp_path):
  """A copy of it, to train on."""
  shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
  return tmp_path


# All of these have variables of the same names and shapes.
_OTHER_MODELS = {
  "heads": (
    ["num_heads = 1", "d_kv = 16"],
    r"key_value_size was 8, now 16 \(.*d_kv = 16: --gin_param\); SelfAttention.num_heads was 2",
  ),
  "activation": (
    ["DenseReluDense.activation = 'gelu'"],
    r"DenseReluDense.activation was 'relu', now 'gelu' \(--gin_param\)",
  ),
  "norm": (["sublayer_rms_norm.epsilon = 0.1"], "sublayer_rms_norm.epsilon was 1e-06, now 0.1"),
  "order": (
    [
      "LayerStack.sublayers_per_layer = [@transformer.sublayer_call_layer, "
      "@transformer.sublayer_rms_norm, @transformer.sublayer_residual]"
    ],
    "sublayers_per_layer was .*sublayer_rms_norm.*, now .*sublayer_call_layer",
  ),
  "a class that is a default": (
    [
      "make_layer_stack.layer_stack_cls = @transformer.ReversibleLayerStack",
      "ReversibleLayerStack.sublayers_per_layer = [@transformer.sublayer_rms_norm, "
      "@transformer.sublayer_call_layer]",
    ],
    "make_layer_stack.layer_stack_cls was '@transformer.LayerStack'",
  ),
  "input attention": (["Unitransformer.input_full_attention = True"], "was False, now True"),
  "model type": (["run.model_type = 'aligned'"], "model_type was 'lm', now 'aligned'"),
}


# A bound number, the order of a list, and what a mode decides.
@pytest.mark.parametrize("name", kept(list(_OTHER_MODELS), ["heads", "order", "model type"]))
def test_another_model_of_the_same_shapes_is_refused(trained, name):
  bindings, text = _OTHER_MODELS[name]
  mode = EVAL
  if name == "model type":  # It has other data.
    mode = ("run.mode = 'export_infer'", f"run.export_path = '{trained}/exported'")
    bindings = [*bindings, "run.sequence_length = 12"]
  with pytest.raises(errors.ConfigError, match=f"model.ckpt-2 is of another model: .*{text}"):
    run(trained, *mode, *bindings)


def test_where_shapes_differ_too_it_is_no_use_to_allow_it(trained):
  with pytest.raises(
    errors.ConfigError, match="d_model was 16, now 32 .*; or, use another model_d"
  ):
    run(trained, *EVAL, "d_model = 32")


def _in_mode(folder, mode):
  return {
    "infer": ("decode_from_file.input_filename = '{}'", "decode_from_file.output_filename = 'o'"),
    "export_infer": ("run.export_path = '{}/exported'",),
    "export_score": ("run.export_path = '{}/exported'",),
    "score_from_strings": (
      "score_from_strings.inputs = None", "score_from_strings.targets = ['be']",
      "score_from_strings.score_postprocess_fn = @save_scores",
    ),
    "perplexity_eval": EVAL[1:],
  }[mode]  # fmt: skip


@pytest.mark.parametrize(
  "mode", ["infer", "export_infer", "export_score", "score_from_strings", "perplexity_eval"]
)
def test_every_mode_refuses_it(trained, mode):
  (trained / "prompts").write_text("To\n")
  more = [b.format(trained / "prompts") for b in _in_mode(trained, mode)]
  with pytest.raises(errors.ConfigError, match=r"activation was 'relu'.*allow_config_change"):
    run(trained, f"run.mode = '{mode}'", *more, "DenseReluDense.activation = 'gelu'")


def test_a_resume_refuses_it_and_leaves_all_as_it_was(copied, capsys, caplog):
  names = ("operative_config.gin", "checkpoint", *small_lm.config_files(copied))
  before = {n: (copied / "model" / n).read_bytes() for n in names}
  other = ("num_heads = 1", "d_kv = 16", "run.train_steps = 3")
  capsys.readouterr()
  with pytest.raises(errors.ConfigError, match="num_heads was 2, now 1"):
    run(copied, *other)
  assert "one device" not in capsys.readouterr().out
  assert {n: (copied / "model" / n).read_bytes() for n in names} == before
  # Allowed, it is told, and the next checkpoint is of the new model.
  assert len(run(copied, *other, allow_config_change=True)) == 1
  assert "num_heads was 2, now 1" in caplog.text
  with pytest.raises(errors.ConfigError, match="num_heads was 1, now 2"):
    run(copied, *EVAL)
  caplog.clear()
  run(copied, *EVAL, "num_heads = 1", "d_kv = 16")
  assert "another model" not in caplog.text


@pytest.mark.slow
def test_what_does_not_decide_the_model_may_change(copied, capsys, caplog):
  """Losses, dropout, schedule, sizes of batches, layout, dtypes, and how a value is written."""
  run(
    copied,
    "run.train_steps = 3",
    "dropout_rate = 0.5",
    "Unitransformer.label_smoothing = 0.1",
    "Unitransformer.z_loss = 0.0",
    "SelfAttention.z_loss_coeff = 0.1",
    "LayerStack.recompute_grads = True",
    "LayerStack.sublayers_initial = []",
    "VarianceScalingInitializer.scale = 3.0",
    "run.learning_rate_schedule = 0.1",
    "run.batch_size = 8",
    "run.mesh_shape = 'all:2'",
    "run.layout_rules = 'batch:all'",
    "run.mesh_implementation = 'placement'",
    "utils.get_variable_dtype.activation_dtype = 'bfloat16'",
    # The same value, otherwise.
    "SelfAttention.num_heads = 2",
    "make_layer_stack.layers = (@transformer_layers.SelfAttention, @DenseReluDense)",
  )
  assert "activation_dtype was 'float32', now 'bfloat16'" in capsys.readouterr().out
  assert "another model" not in caplog.text


def test_the_record_goes_with_its_checkpoint(copied):
  assert small_lm.config_files(copied) == ["model.ckpt-2.with-config-00000.json"]
  run(copied, "run.train_steps = 3", "run.keep_checkpoint_max = 1")
  assert small_lm.config_files(copied) == ["model.ckpt-3.with-config-00000.json"]
  record = json.loads((copied / "model" / small_lm.config_files(copied)[0]).read_text())
  assert set(record) == {"format", "found", "model", "precision", "training", "other", "vocabulary"}
  layers = "mesh_tensorflow.transformer.transformer_layers"
  assert record["model"][f"{layers}.SelfAttention.num_heads"] == 2
  # A default that nothing binds.
  assert record["model"][f"{layers}.SelfAttention.relative_attention_num_buckets"] == 32
  assert f"{layers}.SelfAttention.dropout_rate" in record["training"]


def _record(folder) -> model_config.ModelConfig:
  """What was built last, as if a checkpoint of it were `folder/model.ckpt-1`."""
  config = model_config.capture("lm", None, gin_dtypes())
  config.write(str(folder / "model.ckpt-1.with-config-00000"))
  return config


def gin_dtypes():
  return utils.get_variable_dtype("float32", "float32", "float32")


def test_defaults_that_changed_and_parameters_that_were_added(trained, tmp_path):
  """What a newer version of this package finds in a checkpoint of an older one."""
  fold = "fold_scaling_into_initializer"
  run(trained, *EVAL, f"SelfAttention.{fold} = False", allow_config_change=True)
  now = _record(tmp_path)
  path = str(tmp_path / "model.ckpt-1")
  assert model_config.compare(path, now) == []
  file = tmp_path / "model.ckpt-1.with-config-00000.json"
  record = json.loads(file.read_text())
  attention = "mesh_tensorflow.transformer.transformer_layers.SelfAttention"
  record["model"][f"{attention}.num_memory_heads"] = 4
  file.write_text(json.dumps(record))
  with pytest.raises(errors.ConfigError, match=r"num_memory_heads was 4, now 0 \(default"):
    model_config.compare(path, now)
  del record["model"][f"{attention}.num_memory_heads"]  # It did not exist: now it is the default.
  record["model"][f"{attention}.no_such_parameter"] = 1  # It does not exist any more.
  del record["model"]["mesh_tensorflow.transformer.transformer_layers.DenseReluDense.use_bias"]
  file.write_text(json.dumps(record))
  assert model_config.compare(path, now) == []
  del record["model"][f"{attention}.{fold}"]  # It did not exist, and is no default now.
  file.write_text(json.dumps(record))
  with pytest.raises(errors.ConfigError, match=f"{fold} was its default, now False"):
    model_config.compare(path, now)
  file.write_text("{}")
  assert ["no record" in line for line in model_config.compare(path, now)] == [True]
  assert model_config.compare_with_initial(path, now) == []


def test_old_checkpoints_are_told_and_taken(copied, capsys):
  """Those of older versions have no record: its file, and the manifest, which lists it, go."""
  for name in [*small_lm.config_files(copied), "model.ckpt-2.manifest"]:
    (copied / "model" / name).unlink()
  assert run(copied, *EVAL, "num_heads = 1", "d_kv = 16")
  assert "model.ckpt-2 has no record of its configuration" in capsys.readouterr().out


def test_a_warm_start_of_another_model_is_one_line(trained, tmp_path, capsys):
  start = f"run.init_checkpoint = '{trained}/model/model.ckpt-2'"
  run(tmp_path, start, "run.train_steps = 3", "DenseReluDense.activation = 'gelu'", text=TEXT)
  said = capsys.readouterr().out
  assert said.count("is of another model") == 1 and "activation was 'relu', now 'gelu'" in said


def test_another_vocabulary_is_refused_in_programs_too(trained):
  """Of the same size, and without the folder of kept vocabularies."""
  gin.clear_config()
  gin_config.parse_gin(
    ["problems/tinyshakespeare.gin"], [f"text_file = '{trained}/text.txt'", *small_lm.SMALL]
  )
  known = vocabulary.get_character_vocabulary()

  def estimator(of):
    return utils.get_estimator(
      "lm", of, "", "", str(trained / "model"), 4, {"inputs": 24, "targets": 24}, True, None, None,
      100, None, None, None, None, None, None, 10, None,
    )  # fmt: skip

  estimator(known).restore_for_inference()
  other = vocabulary.CharacterVocabulary(known.characters.replace("T", "Z"))
  with pytest.raises(errors.ConfigError, match="the vocabulary was CharacterVocabulary of .* ids"):
    estimator(other).restore_for_inference()


@pytest.mark.long
@pytest.mark.subprocess
def test_all_workers_hear_of_it(tmp_path):
  """Of two, the one that reads the record and the other; the text of their training is gone."""
  model = tmp_path / "model"
  trained = program.trainer_arguments(model, "run.train_steps = 2")
  bindings = [a.removeprefix("--gin_param=") for a in trained if a.startswith("--gin_param=")]
  gin_config.parse_gin(["problems/tinyshakespeare.gin"], bindings)
  utils.run(None, None, None, None, str(model))
  (tmp_path / "text.txt").write_text(program.TEXT[:-1] + "#!\n")
  other = ("DenseReluDense.activation = 'gelu'", *program.on_mesh("batch:2", "batch:batch"))
  with program.processes(tmp_path, 2, program.trainer_arguments(model, *other)) as group:
    assert group.wait() == [2, 2], group.text(0) + group.text(1)
  for worker in range(2):
    assert "DenseReluDense.activation was 'relu', now 'gelu'" in group.text(worker)
    assert "2 character(s) of the text are not among" in group.text(worker)


@gin.configurable(module="my_layers")
def my_activation(x, slope=2.0):
  return x * slope


def test_own_configurables_count_if_the_model_refers_to_them(tmp_path):
  """Also through each other; what only the data refers to does not."""
  gin.parse_config("""
    import mesh_tensorflow.transformer.transformer_layers
    DenseReluDense.activation = @my_activation
    my_layers.my_activation.slope = 3.0
  """)
  values = {
    ("", "mesh_tensorflow.transformer.transformer_layers.DenseReluDense", "activation"): (
      gin_names.Reference("my_activation", False, "", "my_layers.my_activation")
    ),
    ("", "my_layers.my_activation", "slope"): 3.0,
    ("", "my_data.read", "files"): "a",
  }
  assert "my_layers.my_activation" in model_config._of_model(values)
  assert "my_data.read" not in model_config._of_model(values)


def test_every_configurable_of_the_package_is_in_its_place():
  """Whoever adds one decides what a change of it does to checkpoints: nothing, or another model."""
  modules = {
    selector.rpartition(".")[0]
    for name in gin_names._registered_names()
    for selector in gin_names.whole_selectors(name)
    if checks.is_of_package(selector) and checks.whole_effect(selector) == "model"
  }
  known = (
    "adaptive_softmax evolved_transformer fixup_layers funnel_transformer heterogeneous_moe "
    "memory_layers moe transformer transformer_layers universal_transformer vocab_embeddings"
  ).split()
  allowed = {f"mesh_tensorflow.transformer.{m}" for m in known} | {"mesh_tensorflow.layers"}
  allowed.add("mesh_tensorflow.transformer.gin_config.bindings")  # By a test of registration.
  assert modules - allowed == set()
