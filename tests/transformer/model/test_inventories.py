"""Names, shapes and initial values of the variables of whole models, as in TF1 checkpoints."""

import gin
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.gin_paths import gin_dir

D, F, HEADS, KV, VOCAB, LENGTH = 6, 10, 4, 3, 128, 9
SIZES = f"""
num_layers = 2
d_model = {D}
d_ff = {F}
num_heads = {HEADS}
d_kv = {KV}
Unitransformer.max_length = {LENGTH}
"""
MODEL, HK = ("d_model", D), ("heads", HEADS * KV)
EMBEDDING = [("vocab", VOCAB), MODEL]
POSITIONS = [("max_length", LENGTH), MODEL]
BUCKETS = [("heads", HEADS), ("buckets", 32)]
T5_1_0 = """
Unitransformer.positional_embedding = False
SelfAttention.relative_attention_type = "bias_shared"
LayerStack.dropout_rate = 0.1
LayerStack.norm_epsilon = 1e-6
"""
T5_1_1 = """
Unitransformer.positional_embedding = False
SelfAttention.relative_attention_type = "bias_shared"
DenseReluDense.activation = ["gelu", "linear"]
Unitransformer.shared_embedding_and_softmax_weights = False
"""


def build(model_type="bitransformer", bindings="", mode="train", config=SIZES, length=5):
  """The graph of a model of vocabulary 100, which is rounded up to 128."""
  gin.clear_config()
  gin.add_config_file_search_path(gin_dir())
  gin.parse_config_files_and_bindings(["defaults.gin"], [config, bindings])
  model = utils.build_model(model_type, 100, 100)
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  ids = mtf.zeros(mesh, [("batch", 2), ("length", length)], tf.int32)
  model.call_simple(ids, ids, compute_loss=True, mode=mode)
  return mesh.graph


def inventory(*args, **kwargs):
  variables = build(*args, **kwargs).all_variables
  assert all(v.master_dtype == tf.float32 for v in variables)
  return {v.full_name: [(d.name, d.size) for d in v.shape] for v in variables}


def attention(scope, q=(MODEL, HK), k=(MODEL, HK), v=(MODEL, HK), o=(HK, MODEL)):
  """The variables of an attention layer."""
  return {f"{scope}/{n}": list(s) for n, s in zip("qkvo", (q, k, v, o))}


def dense(scope, gated=False):
  """The variables of DenseReluDense."""
  first = ["wi_0", "wi_1"] if gated else ["wi"]
  return {f"{scope}/{n}/kernel": [MODEL, ("d_ff", F)] for n in first} | {
    f"{scope}/wo/kernel": [("d_ff", F), MODEL]
  }


def stack(scope, layers, norm="rms_norm", final="rms_norm", gated=False, **shapes):
  """The variables of two blocks of layers, by the layers' class names."""
  expected = {f"{scope}/{final}/scale": [MODEL]}
  for block in range(2):
    for n, layer in enumerate(layers):
      here = f"{scope}/block_{block:03d}/layer_{n:03d}"
      expected[f"{here}/{norm}/scale"] = [MODEL]
      if layer == "DenseReluDense":
        expected |= dense(f"{here}/{layer}", gated)
      else:
        expected |= attention(f"{here}/{layer}", **shapes)
  return expected


ENCODER = ["SelfAttention", "DenseReluDense"]
DECODER = ["SelfAttention", "EncDecAttention", "DenseReluDense"]


def bitransformer(**kwargs):
  return stack("encoder", ENCODER, **kwargs) | stack("decoder", DECODER, **kwargs)


def shared_bias(scopes=("encoder", "decoder")):
  name = "block_000/layer_000/SelfAttention/relative_attention_bias"
  return {f"{scope}/{name}": BUCKETS for scope in scopes}


EMBEDDINGS = {"shared/embedding": EMBEDDING, "shared/positional_embedding": POSITIONS}
TOKENS = {"shared/embedding": EMBEDDING}


def test_bitransformer():
  assert inventory() == bitransformer() | EMBEDDINGS


def test_variables_are_made_in_the_order_shared_encoder_decoder():
  scopes = [name.split("/")[0] for name in inventory()]
  assert list(dict.fromkeys(scopes)) == ["shared", "encoder", "decoder"]
  assert scopes == sorted(scopes, key=["shared", "encoder", "decoder"].index)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("recompute", [False, True])
def test_t5_1_0(mode, recompute):
  legacy = bitransformer(norm="layer_norm", final="final_layer_norm")
  bindings = T5_1_0 + f"LayerStack.recompute_grads = {recompute}"
  assert inventory(bindings=bindings, mode=mode) == legacy | shared_bias() | TOKENS


@pytest.mark.parametrize("recompute", [False, True])
def test_t5_1_1(recompute):
  expected = bitransformer(gated=True) | shared_bias() | TOKENS
  expected["decoder/logits/kernel"] = [MODEL, ("vocab", VOCAB)]
  bindings = T5_1_1 + f"LayerStack.recompute_grads = {recompute}"
  assert inventory(bindings=bindings) == expected


def test_language_model():
  expected = stack("transformer", ENCODER) | {
    "transformer/embedding": EMBEDDING,
    "transformer/positional_embedding": POSITIONS,
  }
  assert inventory("lm") == expected
  untied = inventory("lm", "Unitransformer.shared_embedding_and_softmax_weights = False")
  assert untied == expected | {"transformer/logits/kernel": [MODEL, ("vocab", VOCAB)]}
  del expected["transformer/positional_embedding"]
  assert inventory("lm", "Unitransformer.sinusoid_positional_embedding = True") == expected
  assert inventory("lm", "Unitransformer.positional_embedding = False") == expected


def test_relative_attention_types():
  own = {
    f"{scope}/block_{block:03d}/layer_000/SelfAttention/relative_attention_bias": BUCKETS
    for scope in ("encoder", "decoder")
    for block in range(2)
  }
  bindings = 'SelfAttention.relative_attention_type = "bias"'
  assert inventory(bindings=bindings) == bitransformer() | EMBEDDINGS | own
  contextual = {
    name.replace("_bias", "_ak/kernel"): [("heads", HEADS), ("d_kv", KV), ("buckets", 32)]
    for name in own
  }
  bindings = 'SelfAttention.relative_attention_type = "contextual"'
  assert inventory(bindings=bindings) == bitransformer() | EMBEDDINGS | contextual


@pytest.mark.parametrize("kind,blocks", [("bias", 2), ("bias_shared", 1)])
def test_relative_attention_of_the_decoder_to_the_encoder(kind, blocks):
  added = {
    f"decoder/block_{block:03d}/layer_001/EncDecAttention/enc_dec_relative_attention_bias": BUCKETS
    for block in range(blocks)
  }
  bindings = f"""
  EncDecAttention.relative_attention_type = "{kind}"
  relative_position_spans.num_sentinels = 2
  """
  assert inventory(bindings=bindings) == bitransformer() | EMBEDDINGS | added


def test_without_shared_embedding():
  own = {f"{s}/embedding": EMBEDDING for s in ("encoder", "decoder")}
  own |= {f"{s}/positional_embedding": POSITIONS for s in ("encoder", "decoder")}
  assert inventory(bindings="Bitransformer.shared_embedding = False") == bitransformer() | own


def test_without_block_scope():
  expected = EMBEDDINGS | {}
  for name, shape in bitransformer().items():
    scope, block, *rest = name.split("/")
    if block.startswith("block_"):
      count = {"encoder": 2, "decoder": 3}[scope]
      n = int(block[-3:]) * count + int(rest[0][-3:])
      name = "/".join([scope, f"layer_{n:03d}", *rest[1:]])
    expected[name] = shape
  assert inventory(bindings="make_layer_stack.block_scope = False") == expected


def test_bias_of_dense_layers():
  added = {}
  for name in bitransformer():
    if name.endswith("wi/kernel"):
      added[name.replace("kernel", "bias")] = [("d_ff", F)]
    if name.endswith("wo/kernel"):
      added[name.replace("kernel", "bias")] = [MODEL]
  expected = bitransformer() | EMBEDDINGS | added
  assert inventory(bindings="DenseReluDense.use_bias = True") == expected


@pytest.mark.parametrize(
  "bindings,shapes",
  [
    (
      "num_heads = 1",
      dict(zip("qkvo", ([MODEL, ("d_kv", KV)],) * 3 + ([("d_kv", KV), MODEL],))),
    ),
    ("SelfAttention.num_memory_heads = 1", dict.fromkeys("kv", [MODEL, ("d_kv", KV)])),
    ("SelfAttention.num_memory_heads = 2", dict.fromkeys("kv", [MODEL, ("heads", 2 * KV)])),
    (
      "SelfAttention.combine_dims = False",
      dict.fromkeys("qkv", [MODEL, ("heads", HEADS), ("d_kv", KV)])
      | {"o": [("heads", HEADS), ("d_kv", KV), MODEL]},
    ),
    (
      "SelfAttention.combine_dims = False\nSelfAttention.num_memory_heads = 2",
      dict.fromkeys("kv", [MODEL, ("heads", 2), ("d_kv", KV)])
      | {
        "q": [MODEL, ("heads", 2), ("query_heads", 2), ("d_kv", KV)],
        "o": [("heads", 2), ("query_heads", 2), ("d_kv", KV), MODEL],
      },
    ),
  ],
)
def test_shapes_of_attention(bindings, shapes):
  assert inventory(bindings=bindings) == bitransformer(**shapes) | EMBEDDINGS


def test_shared_keys_and_values():
  expected = EMBEDDINGS | {}
  for name, shape in bitransformer().items():
    scope, _, last = name.rpartition("/")
    if last == "k":
      expected[f"{scope}/kv"] = shape
    elif last != "v":
      expected[name] = shape
  assert inventory(bindings="SelfAttention.shared_kv = True") == expected


def test_ensemble():
  bindings = """
  Unitransformer.ensemble = 3
  SelfAttention.relative_attention_type = "bias_shared"
  """
  expected = bitransformer() | EMBEDDINGS | shared_bias()
  expected = {name: [("ensemble", 3), *shape] for name, shape in expected.items()}
  assert inventory(bindings=bindings) == expected


def test_student_and_teacher():
  bindings = """
  StudentTeacher.temperature = 2.0
  StudentTeacher.fraction_soft = 0.5
  student/decoder/make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.EncDecAttention,
    @transformer_layers.DenseReluDense]
  teacher/decoder/make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.EncDecAttention,
    @transformer_layers.DenseReluDense]
  """
  graph = build("bi_student_teacher", bindings)
  names = {v.full_name for v in graph.all_variables}
  both = bitransformer() | EMBEDDINGS
  global_step = {"global_step"}
  assert names == {f"{m}/{n}" for n in both for m in ("student", "teacher")} | global_step
  assert {v.full_name for v in graph.trainable_variables} == {f"student/{n}" for n in both}


def test_reversible_layers_have_the_names_of_others():
  bindings = """
  make_layer_stack.layer_stack_cls = @ReversibleLayerStack
  ReversibleLayerStack.sublayers_per_layer = [
    @sublayer_rms_norm, @sublayer_call_layer, @sublayer_dropout]
  SelfAttention.relative_attention_type = "bias_shared"
  LayerStack.recompute_grads = True
  """
  expected = bitransformer() | EMBEDDINGS | shared_bias()
  assert inventory(bindings=bindings) == expected
  assert inventory(bindings=bindings, mode="eval") == expected


def test_initial_values():
  """Distribution and standard deviation by the end of the name."""
  bindings = T5_1_1.replace("False", "True", 1) + "Bitransformer.shared_embedding = True"
  expected = {
    "embedding": (initializers.RandomNormal, 1.0),
    "q": (initializers.RandomNormal, (D * KV) ** -0.5),
    "k": (initializers.RandomNormal, D**-0.5),
    "v": (initializers.RandomNormal, D**-0.5),
    "o": (initializers.RandomNormal, (HEADS * KV) ** -0.5),
    "wi_0/kernel": (initializers.TruncatedNormal, D**-0.5),
    "wi_1/kernel": (initializers.TruncatedNormal, D**-0.5),
    "wo/kernel": (initializers.TruncatedNormal, F**-0.5),
    "logits/kernel": (initializers.TruncatedNormal, D**-0.5),
    "relative_attention_bias": (initializers.GlorotUniform, None),
    "scale": (initializers.Ones, None),
  }
  for v in build(bindings=bindings).all_variables:
    (end,) = [e for e in expected if v.full_name.endswith(("/" + e, "_" + e))]
    kind, stddev = expected[end]
    made = initializers.convert_to_initializer(v.initializer, tf.float32)
    assert type(made) is kind, (v.full_name, type(made))
    if stddev is not None:
      values = made.arguments(v.shape.to_integer_list)
      assert values["mean"] == 0.0
      assert abs(values["stddev"] - stddev) < 1e-6, (v.full_name, values)


def test_embeddings_that_cannot_be_shared():
  with pytest.raises(errors.ConfigError, match="model_dim of encoder encoder is d_model=8"):
    build(bindings="encoder/Unitransformer.d_model = 8")
