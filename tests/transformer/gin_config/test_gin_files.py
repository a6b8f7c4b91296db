"""Every gin file parses on top of defaults.gin, says what it is, and fits itself."""

from __future__ import annotations

import importlib
import pkgutil

import gin
import pytest
from gin import config_parser

import mesh_tensorflow
import mesh_tensorflow.transformer
from mesh_tensorflow.transformer import gin_config
from tests.conftest import ROOT

GIN = ROOT / "gin"
FILES = sorted(path.relative_to(GIN).as_posix() for path in GIN.rglob("*.gin"))
LAYOUTS = [name for name in FILES if name.startswith("layouts/")]

# The files that the TF1 library had, in its wheel or in its repository.
ORIGINAL_FILES = """
  defaults 8x8_dp_r4 transparent_attention
  layouts/16x16_m8 layouts/2x2_dp layouts/2x2_dp_mp layouts/2x2_mp layouts/4x4_dp layouts/8x16_m2
  layouts/8x16_m8 layouts/8x8_dp layouts/8x8_m4 layouts/8x8_mp layouts/single
  learning_rate_schedules/constant learning_rate_schedules/slanted_triangular
  models/aiayn_base models/aiayn_large models/bi_base models/bi_l12 models/bi_l12_w1
  models/bi_l12_w2 models/bi_l12_w3 models/bi_moe models/bi_w1 models/lm_base models/lm_moe
  models/lm_w1 models/tiny
  problems/lm1b problems/lm1b_untok problems/t2t_ende problems/t2t_enfr problems/t2t_lm1b
""".split()


# What the TF1 library registered: "module = names", with t: for mesh_tensorflow.transformer. and
# m: for mesh_tensorflow.
ORIGINAL_CONFIGURABLES = """
  Bitransformer = decode
  BitransformerFunnel = decode
  Unitransformer = sample_autoregressive
  m:beam_search = beam_search greedy_decode
  m:layers = VarianceScalingInitializer clip_activation_gradient unit_scaling_convention
  m:ops = rewrite_stack_variables
  m:optimize = AdafactorOptimizer AdafactorWithMultiLRSchedule AdamWeightDecayOptimizer
    AdamWithMultiLRSchedule MomentumOptimizer SgdOptimizer adafactor_decay_rate_pow
    compute_lr_for_step product_learning_rate
  m:simd_mesh_impl = SimdMeshImpl
  t:adaptive_softmax = AdaptiveSoftmaxVocabEmbedding adaptive_softmax_loss_fn
  t:dataset = make_text_line_dataset pack_dataset pack_or_pad packed_parallel_tsv_dataset
    pretokenized_t2t_dataset pretokenized_tfds_dataset sample_from_text_line_datasets
    simple_text_line_dataset untokenized_tfds_dataset
  t:evolved_transformer = DecoderAttentionLayer DecoderConvolutionalLayer
    EncoderConvolutionalLayer GatedLinearUnitLayer
  t:fixup_layers = DenseReluDenseFixup EncDecAttentionFixup SelfAttentionFixup
    sublayer_fixup_scale sublayer_fixup_shift
  t:funnel_transformer = BitransformerFunnel FunnelTransformerLayerStack
  t:heterogeneous_moe = HeterogeneousMoE1D
  t:learning_rate_schedules = constant constant_learning_rate learning_rate_schedule_noam
    linear_decay linear_decay_learning_rate linear_warmup product_learning_rate
    slanted_triangular truncated_rsqrt
  t:memory_layers = ProductKeyValueMemory
  t:moe = MoE1D
  t:t2t_vocabulary = get_t2t_vocabulary
  t:transformer = Bitransformer LayerStack ReversibleLayerStack StudentTeacher Unitransformer
    VocabEmbedding get_vocab_embedding_cls make_bi_student_teacher make_bitransformer
    make_layer_stack reduce_ensemble_logits reduce_ensemble_logits_mean_logit
    reduce_ensemble_logits_mean_prob reduce_ensemble_logits_select shift_targets
    sublayer_annealed_dropout sublayer_call_layer sublayer_clip_activation_gradient
    sublayer_dropout sublayer_legacy_dropout sublayer_legacy_final_rms_norm
    sublayer_legacy_rms_norm sublayer_mask_padding sublayer_residual sublayer_rezero
    sublayer_rms_norm sublayer_rms_norm_subsampled sublayer_scale_norm sublayer_true_layer_norm
  t:transformer_layers = BranchedEncDecAttention BranchedSelfAttention Conv1DLayer
    Conv1DLocalAttn DenseReluDense DynamicConv1DLocalAttn EncDecAttention ExpertsEncDecAttention
    ExpertsSelfAttention GeneralBilinearEncDecAttention GeneralBilinearSelfAttention
    LightweightConv1DLocalAttn LocalConvAttnBlock LocalSelfAttention ParallelLayer SelfAttention
    SeparableConv1DLayer Synthesizer TalkingHeadsEncDecAttention TalkingHeadsSelfAttention
    TransparentEncDecAttention enc_dec_attention enc_dec_attention_bias relative_position_spans
  t:universal_transformer = UTLayerStack
  t:utils = auto_train_steps clean_decodes compute_log_likelihoods decode decode_from_dataset
    decode_from_file flexible_ckpt_init_mapping get_checkpoint_iterator get_variable_dtype
    infer_model init_checkpoint_variable_mapping run save_scores save_scores_to_tfrecords
    score_from_dataset score_from_strings score_with_estimator score_with_estimator_lazy
    separate_vocabularies serialize_num_microbatches should_load_variable tpu_estimator_model_fn
    tpu_mesh_shape variable_filter_max_size
  t:vocab_embeddings = AdaptiveVocabEmbedding FactorizedVocabEmbedding Mixtape MixtureOfSoftmaxes
  t:vocabulary = get_tfds_vocabulary
"""

# The short forms that gin files use: each must mean one configurable.
SHORT_NAMES = """
  run make_layer_stack transformer.make_layer_stack LayerStack transformer.LayerStack Unitransformer
  DenseReluDense SelfAttention LocalSelfAttention TalkingHeadsSelfAttention MoE1D utils.run
  GeneralBilinearSelfAttention TransparentEncDecAttention transformer.sublayer_dropout
  transformer.sublayer_rms_norm transformer.sublayer_call_layer transformer.sublayer_residual
  utils.serialize_num_microbatches utils.tpu_mesh_shape utils.get_variable_dtype
  optimize.AdafactorOptimizer learning_rate_schedules.learning_rate_schedule_noam
  learning_rate_schedules.constant_learning_rate learning_rate_schedules.slanted_triangular
  learning_rate_schedules.product_learning_rate optimize.product_learning_rate
  dataset.pack_dataset dataset.untokenized_tfds_dataset dataset.pretokenized_tfds_dataset
  dataset.pretokenized_t2t_dataset t2t_vocabulary.get_t2t_vocabulary vocabulary.get_tfds_vocabulary
""".split()


def original_configurables() -> list[str]:
  whole = {"t:": "mesh_tensorflow.transformer.", "m:": "mesh_tensorflow."}
  found, module = [], ""
  tokens = ORIGINAL_CONFIGURABLES.split()
  for i, token in enumerate(tokens):
    if tokens[i + 1 : i + 2] == ["="]:
      module = whole.get(token[:2], "") + (token[2:] if token[:2] in whole else token)
    elif token != "=":
      found.append(f"{module}.{token}")
  return found


def parse(name: str) -> None:
  """Parses one file."""
  gin.add_config_file_search_path(str(GIN))  # For files that include others.
  gin.parse_config_file(str(GIN / name))


class _Literals(config_parser.ParserDelegate):
  """Reads references and macros as text, so that no configurable needs to exist."""

  def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> str:
    return f"@{scoped_configurable_name}" + ("()" if evaluate else "")

  def macro(self, macro_name: str) -> str:
    return f"%{macro_name}"


def bindings(name: str) -> dict[str, object]:
  """The bindings of one file as written: "scope/selector.argument" or "macro" to value."""
  result = {}
  for statement in config_parser.ConfigParser((GIN / name).read_text(), _Literals()):
    if isinstance(statement, config_parser.BindingStatement):
      target = ".".join(part for part in (statement.selector, statement.arg_name) if part)
      key = f"{statement.scope}/{target}" if statement.scope else target
      assert key not in result, f"{name} binds {key} twice"
      result[key] = statement.value
  return result


@pytest.mark.parametrize("name", FILES)
def test_parses_on_top_of_defaults(name: str):
  parse("defaults.gin")
  if name != "defaults.gin":
    parse(name)
  gin.finalize()


@pytest.mark.parametrize("name", FILES)
def test_binds_something_once_and_says_what_it_is(name: str):
  assert bindings(name)
  first = (GIN / name).read_text().splitlines()[0]
  assert first.startswith("# ") and len(first) > 10


def test_all_original_files_are_here():
  assert {f"{name}.gin" for name in ORIGINAL_FILES} <= set(FILES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_rules_use_axes_of_the_mesh(name: str):
  bound = bindings(name)
  axes = [item.split(":")[0] for item in bound["utils.run.mesh_shape"].split(",")]
  used = [item.split(":")[1] for item in bound["utils.run.layout_rules"].split(",") if item]
  assert set(used) <= set(axes)


def test_only_layouts_for_one_device_or_cpus_set_the_activation_dtype():
  dtype = "utils.get_variable_dtype.activation_dtype"
  assert bindings("defaults.gin")[dtype] == "bfloat16"
  changed = {name: bindings(name)[dtype] for name in LAYOUTS if dtype in bindings(name)}
  names = ("cpu_1", "cpu_2x2", "cpu_2x4", "single")
  assert changed == {f"layouts/{name}.gin": "float32" for name in names}


def test_lm1b_binds_the_vocabulary_where_it_is_registered():
  # The TF1 library's file named a module that has no such function, and did not parse.
  bound = bindings("problems/lm1b.gin")
  assert bound["vocabulary.get_tfds_vocabulary.dataset_name"] == "%dataset_name"
  assert "dataset.get_tfds_vocabulary.dataset_name" not in bound


@pytest.mark.parametrize("name", FILES)
def test_every_selector_exists_and_no_macro_is_misspelt(name: str, caplog):
  """Read as the trainer reads it: with every name checked, alone on top of defaults.gin."""
  gin_config.parse_gin([] if name == "defaults.gin" else [name], [])
  assert not [r for r in caplog.records if r.name == "mesh_tensorflow"]
  assert gin.config_is_locked()


@pytest.fixture(scope="module")
def all_modules() -> None:
  for package in (mesh_tensorflow, mesh_tensorflow.transformer):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
      if not module.name.endswith(".main"):  # Defines flags.
        importlib.import_module(module.name)


def test_all_original_configurables_are_registered(all_modules):
  names = original_configurables()
  assert len(names) == len(set(names)) == 137
  for name in names:
    assert gin.config.ConfigurableReference(name, False).configurable.selector == name


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_short_name_is_not_ambiguous(all_modules, name: str):
  selector = gin.config.ConfigurableReference(name, False).configurable.selector
  assert selector.startswith("mesh_tensorflow.") and selector.endswith(f".{name}")
