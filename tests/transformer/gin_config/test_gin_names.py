"""Wrong names, syntax and files: one error with the place and the nearest legal names."""

from __future__ import annotations

import logging
import pathlib

import gin
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import gin_config, utils  # noqa: F401
from mesh_tensorflow.transformer.gin_config import bindings as gin_names


def parse(folder: pathlib.Path, text: str, *bindings: str, **options) -> None:
  """Parses `text` as a file a.gin of `folder`, then bindings."""
  (folder / "a.gin").write_text(text)
  gin_config.parse_gin(["a.gin"], list(bindings), [str(folder)], **options)


@pytest.mark.parametrize(
  ("line", "told"),
  [
    ("rum.train_steps = 3", "nothing configurable is called 'rum'; did you mean run"),
    ("SelfAtention.num_heads = 3", "'SelfAtention'; did you mean SelfAttention"),
    ("dataset.get_tiktoken_vocabulary.path = 'a'", "mean vocabulary.get_tiktoken_vocabulary"),
    ("Bitransformer.decdoe.beam_size = 4", "mean Bitransformer.decode"),
    ("run.train_stepz = 3", "run has no parameter 'train_stepz'; did you mean train_steps"),
    ("DenseReluDense.hiden = 3", "mean hidden_size.* \\(it has hidden_size, dropout_rate"),
    ("product_learning_rate.factors = []", "is ambiguous; write learning_rate_schedules.product_le"
     "arning_rate or optimize.product_learning_rate"),
    ("tpu_estimator_model_fn.predict_fn = None", "cannot be bound: its caller always gives it"),
    ("run.optimizer = @AdafactorOptimiser", "did you mean AdafactorOptimizer"),
    ("run.learning_rate_schedule = [@linear_warmpu, 0.1]", "did you mean linear_warmup"),
    ("run.optimizer = @product_learning_rate", "is ambiguous"),
    ("rum:\n  train_steps = 3", "did you mean run"),
    ("Unitransformer.d_model = %d_modle", "no macro 'd_modle' is bound; .* mean d_model"),
    ("import mesh_tensorflow.transformer.moo", "no module 'mesh_tensorflow.transformer.moo'; did "
     "you mean mesh_tensorflow.transformer.moe"),
    ("import no_such_thing", "there is no module 'no_such_thing'"),
    ("include 'models/lm_bas.gin'", "'models/lm_bas.gin' was not found.*mean models/lm_base.gin"),
    ("include 'models/\\ud800.gin'", "half a pair of UTF-16"),
    ("text_file = ['a', {'b': '\\udfff'}]", "half a pair of UTF-16"),
    ("run.mode = train", "a text is written in quotes: 'train'"),
    ("run.batch_size = (3", "not closed|EOF"),
    ("run.batch_size 3", "expected ':' or '='.*run.batch_size 3"),
  ],
)  # fmt: skip
def test_wrong_line_in_a_file(tmp_path, line, told):
  # The place is a block's binding, not its head; an open bracket is seen at the end of the file.
  with pytest.raises(errors.ConfigError, match=told) as caught:
    parse(tmp_path, f"# A comment.\nnum_layers = 2\n{line}\n")
  assert any(f"{tmp_path}/a.gin:{n}" in str(caught.value) for n in (3, 4))
  assert "\n" not in str(caught.value)
  assert not gin.config_str(), "something was bound before the error was found"


def test_wrong_gin_param_is_quoted():
  wrong = "run.train_stepz = 3"
  with pytest.raises(errors.ConfigError, match=f"gin: --gin_param '{wrong}': run has no parameter"):
    gin_config.parse_gin([], ["d_model = 8", wrong, "d_ff = 8"])


def test_error_in_an_included_file_names_that_file(tmp_path):
  (tmp_path / "b.gin").write_text("d_ff = 1\n\nrun.stepz = 1\n")
  with pytest.raises(errors.ConfigError, match=rf"{tmp_path}/b.gin:3: run has no parameter"):
    parse(tmp_path, "include 'b.gin'\n")


def test_missing_file_lists_where_it_was_looked_for(tmp_path, caplog):
  with pytest.raises(errors.ConfigError) as caught:
    gin_config.parse_gin(["models/lm_bse.gin"], [], [str(tmp_path)])
  text = str(caught.value)
  assert "--gin_file" in text and "did you mean models/lm_base.gin" in text
  assert "the working folder" in text and str(tmp_path) in text
  assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_same_name_in_another_folder_is_suggested():
  with pytest.raises(errors.ConfigError, match="did you mean layouts/cpu_2x2.gin"):
    gin_config.parse_gin(["cpu_2x2.gin"], [])


def test_folder_is_no_file(tmp_path):
  with pytest.raises(errors.ConfigError, match="is a folder"):
    gin_config.parse_gin(["models"], [])


def test_folder_that_another_library_told_gin_is_searched(tmp_path):
  (tmp_path / "elsewhere.gin").write_text("d_model = 24\n")
  gin.add_config_file_search_path(str(tmp_path))
  gin_config.parse_gin(["elsewhere.gin"], [])
  assert gin.query_parameter("d_model/macro.value") == 24


def test_a_file_cannot_include_itself(tmp_path):
  (tmp_path / "b.gin").write_text("include 'a.gin'\n")
  with pytest.raises(errors.ConfigError, match="a.gin includes .*b.gin includes .*a.gin"):
    parse(tmp_path, "include 'b.gin'\n")


def test_order_of_includes_files_and_bindings(tmp_path):
  """What gin itself would bind: an include is as if its text stood there."""
  (tmp_path / "b.gin").write_text("d_model = 2\nd_ff = 2\nd_kv = 2\nnum_heads = 2\n")
  (tmp_path / "c.gin").write_text("d_kv = 4")
  (tmp_path / "a.gin").write_text(
    "num_layers = 3\ninclude 'b.gin'  # Sizes.\nd_ff = 3\n\nSelfAttention:\n  dropout_rate = 0.3\n"
  )
  gin_config.parse_gin(["a.gin", "c.gin"], ["num_heads = 5"], [str(tmp_path)])
  names = ("d_model", "d_ff", "d_kv", "num_heads", "num_layers")
  values = [gin.query_parameter(f"{n}/macro.value") for n in names]
  assert values == [2, 3, 4, 5, 3]
  assert gin.query_parameter("SelfAttention.dropout_rate") == 0.3


def test_unknown_names_can_be_skipped(tmp_path):
  text = "import no_such_module\nnothing.x = 1\nother.y = @unknown\nd_model = 7\n"
  parse(tmp_path, text, skip_unknown=True)
  assert gin.query_parameter("d_model/macro.value") == 7
  gin.clear_config()
  parse(tmp_path, "nothing.x = 1\n", skip_unknown=["nothing"])
  gin.clear_config()
  with pytest.raises(errors.ConfigError, match="'other'"):
    parse(tmp_path, "nothing.x = 1\nother.y = 2\n", skip_unknown=["nothing"])


def test_dynamic_registration(tmp_path):
  parse(
    tmp_path,
    "from __gin__ import dynamic_registration\n"
    "from mesh_tensorflow.transformer import learning_rate_schedules\n"
    "from mesh_tensorflow.transformer.gin_config import bindings\n"
    "learning_rate_schedules.linear_warmup.steps_or_fraction = 5\n"
    "bindings.did_you_mean.cutoff = 0.5\n",
  )
  assert gin.query_parameter("linear_warmup.steps_or_fraction") == 5


@pytest.mark.parametrize("line", ["rum.train_steps = 3", "run.optimizer = @Adafactor"])
def test_other_imports_are_no_dynamic_registration(tmp_path, line):
  """Below them, too, a name must be known, and is told with its place and the nearest ones."""
  text = f"import mesh_tensorflow.transformer.transformer_layers\n{line}\n"
  with pytest.raises(errors.ConfigError, match=r"gin: .*a\.gin:2: .*did you mean"):
    parse(tmp_path, text)


def test_dynamic_registration_around_an_include(tmp_path):
  """Names of the imports above hold below it; gin's own errors have the right line, too."""
  (tmp_path / "b.gin").write_text("d_model = 24\n")
  head = (
    "from __gin__ import dynamic_registration\n"
    "from mesh_tensorflow.transformer import learning_rate_schedules as schedules\n\n"
    "include 'b.gin'\n"
  )
  parse(tmp_path, f"{head}schedules.linear_warmup.steps_or_fraction = 5\n")
  assert gin.query_parameter("linear_warmup.steps_or_fraction") == 5
  gin.clear_config()
  with pytest.raises(errors.ConfigError, match=r"linear_warmpu.*a.gin\", line 5"):
    parse(tmp_path, f"{head}schedules.linear_warmpu.steps_or_fraction = 5\n")


def test_constants_are_no_unknown_macros(tmp_path):
  parse(tmp_path, "run.mesh_shape = %gin.REQUIRED\n", "run.mesh_shape = ''")
  gin.clear_config()
  with pytest.raises(errors.ConfigError, match="not subsequently overridden"):
    parse(tmp_path, "run.mesh_shape = %gin.REQUIRED\n")


def test_macro_that_nothing_uses_is_a_warning(tmp_path, caplog):
  parse(tmp_path, "d_modle = 64\n", "num_head = 2")
  told = [r.getMessage() for r in caplog.records if r.name == "mesh_tensorflow"]
  assert f"gin: {tmp_path}/a.gin:1: no value uses the macro d_modle; did you mean d_model?" in told
  assert any("--gin_param 'num_head = 2'" in t and "num_heads" in t for t in told)
  assert len(told) == 2


def test_suggestions_need_no_private_list():
  """Every suggested name resolves, and names that resemble nothing get none."""
  found = gin_names.similar_names("SelfAttentionn")
  assert found and all(gin.get_configurable(f"{_whole(n)}") for n in found)
  assert gin_names.similar_names("zzzzqqqq") == []


def _whole(name: str) -> str:
  reference = gin_names.Reference(name, False)
  return gin_names.resolve_reference(reference, gin_names.Place("")).selector


@pytest.mark.parametrize(
  ("binding", "hint"),
  [
    ("rnu.train_steps = 1", "did you mean run?"),
    ("run.trainsteps = 1", "did you mean train_steps"),
    ("run.lr = 1", "or learning_rate_schedule?"),
    ("run.optimizer = @Adam", "AdamWOptimizer or AdamWeightDecayOptimizer"),
    ("run.optimizer = @optimize.Adam", "optimize.AdamWeightDecayOptimizer"),
    ("selfattention.num_heads = 4", "did you mean SelfAttention"),
    ("SELF_ATTENTION.num_heads = 4", "did you mean"),
    ("SelfAttention.n_heads = 4", "did you mean num_heads"),
    ("Unitransformer.dmodel = 4", "did you mean d_model?"),
    (
      "run.vocabulary = @vocabulary.get_byte_vocab()",
      "did you mean vocabulary.get_byte_vocabulary",
    ),
    ("run.model_type = 'bitransfomer'", "did you mean bitransformer?"),
    ("run.mode = 'evaluate'", "did you mean eval"),
    ("run.layout_rules = 'batch:bacth'", "did you mean batch?"),
  ],
)
def test_every_wrong_name_has_a_hint(binding, hint):
  with pytest.raises(errors.MeshError) as e:
    gin_config.parse_gin(["problems/stdlib_lm.gin"], ["run.mesh_shape = 'batch:2'", binding])
    gin_config.check_run()
  assert hint in str(e.value)


def test_a_mesh_dimension_that_no_rule_names_has_a_hint(caplog):
  bindings = ["run.mesh_shape = 'bacth:2'", "run.layout_rules = 'batch:batch'"]
  gin_config.parse_gin(["problems/stdlib_lm.gin"], bindings)
  gin_config.check_run()
  assert "splits nothing" in caplog.text and "did you mean batch?" in caplog.text
