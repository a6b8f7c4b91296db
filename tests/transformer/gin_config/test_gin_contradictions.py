"""Overriding is legal; contradictions are errors that name both places."""

from __future__ import annotations

import pathlib
import re

import gin
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import gin_config, moe, utils  # noqa: F401


@pytest.fixture
def parse(tmp_path: pathlib.Path):
  """A function of files (name to text, or names of the package's), bindings, and what to check."""

  def parse_files(files, *bindings, run=False):
    names = []
    for name, text in files:
      names.append(name)
      if text is not None:
        (tmp_path / name).write_text(text)
    given = [n for n in names if not n.startswith("_")]
    gin_config.parse_gin(given, list(bindings), [str(tmp_path)])
    if run:
      gin_config.check_run()

  return parse_files


def package(*names: str) -> list[tuple[str, None]]:
  return [(f"{name}.gin", None) for name in names]


LEGAL = [
  ("models/lm_base", "models/tiny"),
  ("models/bi_w1", "models/bi_l12"),
  ("models/bi_base", "problems/multi30k"),
  ("problems/multi30k", "models/aiayn_base"),
  ("models/lm_base", "problems/lm1b"),
  ("problems/tinyshakespeare", "layouts/cpu_2x2"),
  ("models/mesh_ladder/lm_143m", "layouts/cpu_2x2"),
  ("models/bi_base", "transparent_attention"),
  ("models/bi_base", "learning_rate_schedules/constant", "layouts/single"),
  ("layouts/cpu_2x2", "problems/tinyshakespeare"),
]


@pytest.mark.parametrize("names", LEGAL)
def test_usual_command_lines_are_legal(parse, names):
  parse(package(*names))


CONTRADICTIONS = [
  (("layouts/2x2_mp", "layouts/4x4_dp"), "two layout files", "layouts/2x2_mp.gin:3",
   "layouts/4x4_dp.gin:3"),
  (("layouts/cpu_2x2", "8x8_dp_r4"), "two layout files", "layouts/cpu_2x2.gin:3", "8x8_dp_r4.gin"),
  (("models/bi_base", "models/lm_base"), "two model files", "models/bi_base.gin:3",
   "models/lm_base.gin:3"),
  (("models/aiayn_base", "models/aiayn_large"), "two model files", "models/aiayn_base.gin",
   "models/aiayn_large.gin"),
  (("models/mesh_ladder/lm_143m", "models/mesh_ladder/lm_218m"), "two model files",
   "lm_143m.gin", "lm_218m.gin"),
  (("models/bi_base", "problems/lm1b"), "model_type 'bitransformer'.*'lm'",
   "models/bi_base.gin:3", "problems/lm1b.gin"),
  (("problems/t2t_ende", "problems/t2t_enfr"), "two data set files", "problems/t2t_ende.gin",
   "problems/t2t_enfr.gin"),
  (("problems/tinyshakespeare", "problems/multi30k"), "two data set files",
   "problems/tinyshakespeare.gin", "problems/multi30k.gin"),
  (("learning_rate_schedules/constant", "learning_rate_schedules/slanted_triangular"),
   "two learning rate schedule files", "constant.gin:", "slanted_triangular.gin:"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "told", "first", "second"), CONTRADICTIONS)
def test_two_files_of_one_kind(parse, names, told, first, second):
  with pytest.raises(errors.ConfigError, match=told) as caught:
    parse(package(*names))
  assert first in str(caught.value) and second in str(caught.value)
  assert not gin.config_str()


def test_gin_param_settles_a_contradiction(parse):
  parse(package("models/bi_base", "problems/lm1b"), "run.model_type = 'lm'")
  assert gin.query_parameter("run.model_type") == "lm"


def test_operative_config_of_another_run_is_a_base(parse):
  run = "run.model_type = 'bitransformer'\nrun.train_dataset_fn = @dataset.text_lm_dataset\n"
  parse([("operative_config.gin", run), ("problems/lm1b.gin", None)])
  gin.clear_config()
  parse([("problems/lm1b.gin", None), ("operative_config-1.gin", run)])
  gin.clear_config()
  heading = f"# Parameters for run:\n# {'=' * 78}\n"
  parse([("problems/lm1b.gin", None), ("pretrained.gin", heading + run)])


@pytest.mark.parametrize(
  ("files", "told"),
  [
    ([("a.gin", "d_model = 1\nd_ff = 1\nd_model = 2\n")],
     r"a.gin:3: d_model = 2, but .*a.gin:1 of the same file binds it to 1"),
    ([("a.gin", "SelfAttention.num_heads = 1\ntransformer_layers.SelfAttention.num_heads = 2\n")],
     r"a.gin:2: .*a.gin:1"),
    ([("_b.gin", "d_model = 2\n"), ("a.gin", "d_model = 1\ninclude '_b.gin'\n")],
     r"a.gin:1: d_model = 1 has no effect: .*_b.gin:1.*include first"),
    ([("_b.gin", "d_model = 2\n"), ("_c.gin", "include '_b.gin'\nd_model = 3\n"),
      ("a.gin", "include '_c.gin'\ninclude '_b.gin'\n")],
     r"_b.gin:1: .* a second time .*set d_model back to 2, over 3 of .*_c.gin:2"),
    ([("b.gin", "d_model = 2\n"), ("c.gin", "d_model = 3\n"), ("a.gin", "include 'b.gin'\n")],
     r"b.gin:1: .* a second time .*back to 2, over 3 of .*c.gin:1"),
  ],
)  # fmt: skip
def test_file_against_itself(parse, files, told):
  with pytest.raises(errors.ConfigError, match=told):
    parse(files)


@pytest.mark.parametrize(
  "files",
  [
    [("a.gin", "d_model = 1\nd_model = 1\n")],
    [("a.gin", "encoder/SelfAttention.num_heads = 1\ndecoder/SelfAttention.num_heads = 2\n")],
    [("_b.gin", "d_model = 2\n"), ("a.gin", "include '_b.gin'\nd_model = 1\n")],
    [("_b.gin", "d_model = 2\n"), ("a.gin", "include '_b.gin'\ninclude '_b.gin'\nd_model = 1\n")],
    [("b.gin", "d_model = 2\n"), ("c.gin", "d_model = 3\n")],
    # A file of changes, not a layout.
    [("layouts/cpu_2x2.gin", None), ("b.gin", "run.mesh_shape = 'a:2'\nrun.train_steps = 3\n")],
  ],
)
def test_file_that_only_overrides(parse, files):
  parse(files)


def test_gin_params_override_each_other(parse):
  """Scripts append them."""
  parse([], "d_model = 1", "d_model = 2")
  assert gin.query_parameter("d_model/macro.value") == 2


SMALL = ("run.mesh_shape = ''", "run.layout_rules = ''")
LM = package("problems/tinyshakespeare")


@pytest.mark.parametrize(
  ("files", "bindings", "error", "told"),
  [
    (LM, ["run.mesh_shape = 'rows:2'", "run.layout_rules = 'd_ff:row'"], errors.LayoutError,
     "layout rule d_ff:row .--gin_param.*mesh rows:2 .--gin_param.*did you mean rows"),
    ([*LM, ("a.gin", "run.mesh_shape = 'rows:2'\n"), ("b.gin", "run.layout_rules = 'd_ff:cols'\n")],
     (), errors.LayoutError, "layout rule d_ff:cols .*b.gin:1.*mesh rows:2 .*a.gin:1"),
    (LM, ["run.mesh_shape = 'batch:two'"], errors.MeshError, "--gin_param.*batch:two"),
    (LM, ["run.sequence_length = 128"], errors.ShapeError,
     r"length=128 .--gin_param.*max_length=64 .problems/tinyshakespeare.gin:\d+"),
    (package("problems/multi30k"), ["run.sequence_length = {'inputs': 99, 'targets': 64}"],
     errors.ShapeError, r"inputs of length=99.*max_length=64 .problems/multi30k.gin:\d+"),
    (package("problems/multi30k"), ["encoder/Unitransformer.max_length = 32"], errors.ShapeError,
     "inputs of length=56.*max_length=32 .--gin_param"),
    (LM, ["run.mesh_shape = 'model:3'", "run.layout_rules = 'heads:model'"], errors.LayoutError,
     r"heads:4 .SelfAttention.num_heads, defaults.gin:\d+, %num_heads of problems/tinysh.*:\d+.*"
     "3 does not divide 4"),
    (LM, ["run.mesh_shape = 'model:3'", "run.layout_rules = 'd_ff:model'"], errors.LayoutError,
     "d_ff:512.*3 does not divide 512"),
    (LM, ["run.mesh_shape = 'model:3'", "run.layout_rules = 'd_model:model'"], errors.LayoutError,
     "d_model:128.*3 does not divide 128"),
    (LM, ["run.mesh_shape = 'batch:5'", "run.layout_rules = 'batch:batch'"], errors.LayoutError,
     "batch:12 .run.batch_size, problems/tinyshakespeare.gin.*5 does not divide 12"),
    (package("problems/tinyshakespeare", "8x8_dp_r4"), ["run.batch_size = 256"], errors.LayoutError,
     "outer_batch:1 .tpu_estimator_model_fn.outer_batch_size, default.*outer:4.*8x8_dp_r4.gin"),
    (package("models/lm_moe"), [*SMALL, "run.mesh_shape = 'a:3'", "run.layout_rules = 'experts:a'"],
     errors.LayoutError, "experts:32 .MoE1D.num_experts, models/lm_moe.gin"),
    (package("models/bi_moe"), [*SMALL, "run.model_type = 'lm'"], errors.ConfigError,
     r"models/bi_moe.gin:\d+ lists the layers of the encoder, but model_type 'lm' .--gin_param"),
    (package("models/lm_moe"), [*SMALL, "run.model_type = 'bitransformer'"], errors.ConfigError,
     r"models/lm_moe.gin:\d+ lists the layers without a scope, but model_type 'bitransformer'"),
    ([], [], errors.ConfigError,
     r"defaults.gin:\d+: utils.run.mesh_shape = @.*tpu_mesh_shape\(\) needs "
     r"utils.tpu_mesh_shape.tpu_topology.*layouts/cpu_1.gin"),
    (package("models/bi_base", "problems/t2t_ende", "layouts/single"), [], errors.ConfigError,
     r"problems/t2t_ende.gin:\d+.*needs .*data_dir, which nothing binds; bind it"),
    # A call in a call.
    ([], [*SMALL, "run.mesh_shape = @utils.tpu_mesh_shape()",
          "utils.tpu_mesh_shape.tpu_topology = '2x2'",
          "utils.tpu_mesh_shape.model_parallelism = @constant_learning_rate()"], errors.ConfigError,
     "tpu_mesh_shape.model_parallelism = @.* needs .*constant_learning_rate.learning_rate"),
    (LM, ["run.mode = 'infer'"], errors.ConfigError,
     "run.mode = 'infer' needs decode_from_file.input_filename, which nothing binds"),
  ],
)  # fmt: skip
def test_bindings_that_cannot_work_together(parse, files, bindings, error, told):
  with pytest.raises(error, match=told):
    parse(files, *bindings, run=True)


@pytest.mark.parametrize(
  ("names", "bindings"),
  [
    (("problems/tinyshakespeare",), ()),
    (("problems/tinyshakespeare", "layouts/cpu_2x2"), ()),
    (("problems/multi30k", "layouts/cpu_2x2"), ()),
    (("models/mesh_ladder/lm_4899m",), ("run.mode = 'plan'",)),
    (("models/mesh_ladder/nmt_2886m",), ("run.mode = 'plan'",)),
    # More mesh dimensions in the rules than the mesh has; positions that are not learned.
    (("problems/tinyshakespeare",), ("run.mesh_shape = 'batch:2'", "run.layout_rules = "
     "'ensemble:ensemble,batch:batch,d_ff:model'")),
    (("problems/tinyshakespeare",), ("run.sequence_length = 128",
     "Unitransformer.positional_embedding = False")),
    (("problems/tinyshakespeare", "8x8_dp_r4"), ("tpu_estimator_model_fn.outer_batch_size = 4",)),
    (("models/bi_moe", "models/tiny", "layouts/2x2_dp_mp"), ()),
    (("models/bi_base", "transparent_attention", "layouts/2x2_dp"), ()),
  ],
)  # fmt: skip
def test_bindings_that_work_together(parse, names, bindings):
  parse(package(*names), *bindings, run=True)


def test_mesh_dimension_in_vain_is_a_warning(parse, caplog):
  parse(LM, "run.mesh_shape = 'all:4'", "run.layout_rules = 'batch:batch'", run=True)
  (told,) = [r.getMessage() for r in caplog.records if r.name == "mesh_tensorflow"]
  assert "mesh dimension all:4 (--gin_param" in told and "no layout rule names it" in told


def test_every_error_names_two_places(parse):
  """Of the errors above: each names a file with a line, or --gin_param, at least twice."""
  for names, *_ in CONTRADICTIONS:
    with pytest.raises(errors.ConfigError) as caught:
      parse(package(*names))
    assert len(re.findall(r"\.gin:\d+", str(caught.value))) == 2
