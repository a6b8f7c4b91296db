"""The BERT model: variables, values, layouts, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import bert, checkpoint_names, convert
from tests.bert import models, numpy_bert

V2 = {
  "position_signal": "relative_attention_bias",
  "residual_structure": "direct",
  "use_bias": False,
  "initializer_range": None,
  "num_blocks": 1,
  "block_layers": "attention,moe,feedforward,attention",
  "moe_num_experts": 4,
  "moe_intermediate_size": 16,
}


def test_values_are_those_of_the_formulas(cpu_devices):
  config = models.config()
  impl = models.one_device(cpu_devices)
  run = models.function(impl, config)
  batch = models.batch()
  run(*batch.values())
  models.scatter(impl.variable_store)
  found = [x.numpy() for x in run(*batch.values())]
  values = models.by_google(impl.variable_store, config.vocab_size)
  wanted = numpy_bert.forward(
    values,
    config,
    batch["input_ids"],
    batch["input_mask"],
    batch["segment_ids"],
    batch["masked_lm_positions"],
  )
  found[2], padding = np.split(found[2], [config.vocab_size], axis=-1)
  for a, b in zip(found, wanted):
    np.testing.assert_allclose(a, b, atol=2e-5)
  # The loss, over a vocabulary of which 28 WordPieces only fill up.
  mlm = np.concatenate([found[2], padding], -1).astype(np.float64)
  assert found[4] == pytest.approx(numpy_bert.loss(mlm, found[3], batch), rel=1e-5)


def test_gradients_are_those_of_the_formulas(cpu_devices):
  """Along a drawn direction of each variable: differences of the loss in float64."""
  config = models.config(vocab_size=128, num_blocks=1)
  impl, batch, names = models.one_device(cpu_devices), models.batch(), []

  @mtf.function(impl, models.specs())
  def gradients(ids, mask, types, positions, label_ids, weights, labels):
    model = bert.BertModel(config, False, ids, mask, types)
    loss = model.get_masked_lm_output(positions, label_ids, weights)[0]
    loss += model.get_next_sentence_output(labels)[0]
    variables = ids.graph.trainable_variables
    names[:] = [v.name for v in variables]
    return mtf.gradients([loss], [v.value for v in variables])

  gradients(*batch.values())
  models.scatter(impl.variable_store)
  found = gradients(*batch.values())
  values = models.by_google(impl.variable_store, config.vocab_size)
  inputs = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions")

  def loss(google, change):
    changed = {**values, google: values[google].astype(np.float64) + change}
    *_, mlm, nsp = numpy_bert.forward(changed, config, *(batch[name] for name in inputs))
    return numpy_bert.loss(mlm, nsp, batch)

  rng = np.random.default_rng(3)
  assert len(names) == len(values)
  for name, gradient in zip(names, found):
    google = checkpoint_names.google_name(name)
    gradient = checkpoint_names.to_google(name, gradient.numpy(), config.vocab_size)
    step = 1e-5 * rng.normal(size=gradient.shape)
    slope = (loss(google, step) - loss(google, -step)) / 2e-5
    np.testing.assert_allclose(
      np.sum(gradient * step) * 1e5, slope, rtol=1e-3, atol=1e-4, err_msg=name
    )


@pytest.mark.parametrize(
  "settings",
  [
    pytest.param(
      {
        "num_blocks": 1,
        "block_layers": "attention,feedforward,moe",
        "moe_num_experts": 4,
        "moe_intermediate_size": 8,
      },
      id="original",
      marks=pytest.mark.slow,
    ),
    pytest.param(V2, id="second version", marks=pytest.mark.long),
  ],
)
def test_the_layout_changes_no_loss(cpu_devices, settings, request):
  config = models.config(**settings)
  batch = list(models.batch().values())
  losses = []
  four = cpu_devices[:4]
  impls = [
    models.one_device(cpu_devices),
    mtf.SimdMeshImpl("rows:2,cols:2", models.LAYOUT, four),
  ]
  if request.node.get_closest_marker("long"):
    impls.append(mtf.PlacementMeshImpl("rows:2,cols:2", models.LAYOUT, four))
  for impl in impls:
    run = models.function(impl, config, learning_rate=0.01)
    losses.append([float(run(*batch, seed=step)) for step in range(3)])
  assert losses[0][2] < losses[0][0]
  np.testing.assert_allclose(losses[1:], losses[:1] * (len(losses) - 1), rtol=1e-5)


NAMES = {
  "bert/embeddings/word_embeddings": [128, 16],
  "bert/embeddings/token_type_embeddings": [2, 16],
  "bert/embeddings/position_embeddings": [12, 16],
  "bert/embeddings/layer_norm/scale": [16],
  "bert/embeddings/layer_norm/bias": [16],
  "bert/pooler/dense/kernel": [16, 16],
  "bert/pooler/dense_1/bias": [16],
  "cls/predictions/transform/dense/kernel": [16, 16],
  "cls/predictions/transform/dense_1/bias": [16],
  "cls/predictions/transform/layer_norm/scale": [16],
  "cls/predictions/transform/layer_norm/bias": [16],
  "cls/predictions/output_bias": [128],
  "cls/seq_relationship/kernel": [16, 2],
  "cls/seq_relationship/bias": [2],
}
OF_BLOCK = {
  "attention/query/kernel": [16, 2, 8],
  "attention/query/bias": [2, 8],
  "attention/key/kernel": [16, 2, 8],
  "attention/key/bias": [2, 8],
  "attention/value/kernel": [16, 2, 8],
  "attention/value/bias": [2, 8],
  "attention/output/kernel": [2, 8, 16],
  "attention/output/bias": [16],
  "attention/layer_norm/scale": [16],
  "attention/layer_norm/bias": [16],
  "feedforward/dense_1/kernel": [16, 32],
  "feedforward/dense_1/bias": [32],
  "feedforward/dense_2/kernel": [32, 16],
  "feedforward/dense_2/bias": [16],
  "feedforward/layer_norm/scale": [16],
  "feedforward/layer_norm/bias": [16],
}


def test_names_of_variables():
  wanted = dict(NAMES)
  for block in range(2):
    wanted.update({f"bert/encoder/block_{block}/{k}": v for k, v in OF_BLOCK.items()})
  assert convert.variable_shapes(models.config()) == wanted


def test_names_of_variables_of_the_second_version():
  block = "bert/encoder/block_0"
  norms = [f"{block}/{x}/layer_norm" for x in ("attention", "moe", "feedforward", "attention_1")]
  norms += ["bert/layer_norm", "bert/embeddings/layer_norm", "cls/predictions/transform/layer_norm"]
  attention = {k.split("/", 1)[1]: v for k, v in OF_BLOCK.items() if "attention" in k}
  wanted = {
    "bert/embeddings/word_embeddings": [128, 16],
    "bert/embeddings/token_type_embeddings": [2, 16],
    "bert/encoder/relative_attention_bias": [2, 32],
    f"{block}/moe/top_2_gating/kernel": [16, 4],
    f"{block}/moe/wi/kernel": [4, 16, 16],
    f"{block}/moe/wo/kernel": [4, 16, 16],
    f"{block}/feedforward/dense_1/kernel": [16, 32],
    f"{block}/feedforward/dense_2/kernel": [32, 16],
    "bert/pooler/dense/kernel": [16, 16],
    "cls/predictions/transform/dense/kernel": [16, 16],
    "cls/predictions/output_bias": [128],
    "cls/seq_relationship/kernel": [16, 2],
    **{f"{norm}/scale": [16] for norm in norms},
  }
  for name in ("attention", "attention_1"):
    of_one = {f"{block}/{name}/{k}": v for k, v in attention.items() if k.endswith("kernel")}
    wanted.update(of_one)
  assert convert.variable_shapes(models.config(**V2)) == wanted


def _graph(config, is_training=False, sizes=(2, 4), **kwargs):
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  ids = mtf.zeros(mesh, mtf.Shape(list(zip(("batch", "seq"), sizes))), tf.int32)
  return graph, bert.BertModel(config, is_training, ids, **kwargs)


def test_dropout_of_attention_probabilities_never_happens():
  kinds = []
  for prob in (0.0, 0.5):
    graph, _ = _graph(models.config(attention_probs_dropout_prob=prob), True)
    kinds.append([type(op).__name__ for op in graph.operations])
  assert kinds[0] == kinds[1]
  without, _ = _graph(models.config(layer_output_dropout_prob=0.0), True)
  assert len(without.operations) < len(kinds[0])
  # Evaluation has no dropout, whatever the configuration says, and leaves that as it was.
  config = models.config()
  graph, model = _graph(config)
  assert len(graph.operations) == len(without.operations)
  assert (config.layer_output_dropout_prob, model.config.layer_output_dropout_prob) == (0.1, 0.0)


def test_a_second_model_has_a_scope_of_its_own():
  graph, model = _graph(models.config(num_blocks=1))
  bert.BertModel(models.config(num_blocks=1), False, model.input_ids)
  bert.BertModel(models.config(num_blocks=1), False, model.input_ids, scope="other")
  scopes = {v.full_name.split("/")[0] for v in graph.all_variables}
  assert scopes == {"bert", "bert_1", "other"}


def test_accessors():
  graph, model = _graph(models.config())
  assert model.get_extra_loss() == 0
  assert [x.shape.to_integer_list for x in model.get_all_encoder_layers()] == [[2, 4, 16]] * 2
  assert model.get_all_encoder_layers()[-1] is model.get_sequence_output()
  assert model.get_pooled_output().shape == mtf.Shape([("batch", 2), ("hidden", 16)])
  assert model.get_embedding_table().shape == mtf.Shape([("vocab", 128), ("hidden", 16)])
  assert model.get_word_embedding_output().shape == model.get_embedding_output().shape
  assert model.softmax_heads_dims == model.num_heads_dim == mtf.Dimension("num_heads", 2)
  with pytest.raises(ValueError, match="attention_key_head_size"):
    _ = model.key_dim


def test_relative_position_buckets(cpu_devices):
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  positions = mtf.range(mesh, mtf.Dimension("x", 301), tf.int32) - 150
  both = [bert._relative_position_bucket(positions, b) for b in (True, False)]
  lowering = mtf.Lowering(graph, {mesh: models.one_device(cpu_devices)})
  found = [lowering.export_to_tf_tensor(b).numpy() for b in both]
  ends = {0: 0, 7: 7, 8: 8, 11: 8, 12: 9, 15: 9, 16: 10, 22: 10, 23: 11, 31: 11, 32: 12, 45: 12}
  ends |= {46: 13, 63: 13, 64: 14, 90: 14, 91: 15, 150: 15}
  for distance, bucket in ends.items():
    assert found[0][150 - distance] == bucket
    assert found[0][150 + distance] == bucket + 16 * (distance > 0)
  ends = {0: 0, 15: 15, 18: 16, 19: 17, 23: 18, 24: 19, 30: 20, 31: 21, 39: 22, 40: 23, 51: 24}
  ends |= {52: 25, 66: 26, 67: 27, 86: 28, 87: 29, 112: 30, 113: 31, 150: 31}
  for distance, bucket in ends.items():
    assert found[1][150 - distance] == bucket
  assert not found[1][150:].any()


@pytest.mark.parametrize(
  ("settings", "kwargs", "message"),
  [
    ({}, {"sizes": (4,)}, "two dimensions, batch and seq"),
    ({}, {"sizes": (2, 13)}, "length 13 .*max_position_embeddings is 12"),
    ({"attention_num_heads": 3}, {}, r"d_model \(=16\) is no multiple of attention_num_heads"),
    ({"block_layers": "attention,dense"}, {}, "'dense'; use attention, feedforward, moe"),
    ({"feedforward_intermediate_act": "swish"}, {}, "unsupported activation 'swish'"),
    ({"vocab_size": None}, {}, "vocab_size is not set"),
  ],
)
def test_refused(settings, kwargs, message):
  with pytest.raises(ValueError, match=message):
    _graph(models.config(**settings), **kwargs)


def test_inputs_of_another_kind():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  ids = mtf.zeros(mesh, mtf.Shape([("batch", 2), ("seq", 4)]), tf.int32)
  short = mtf.zeros(mesh, mtf.Shape([("batch", 2), ("seq", 3)]), tf.int32)
  with pytest.raises(mtf.ArgumentError, match="input_ids must be an mtf.Tensor"):
    bert.BertModel(models.config(), False, tf.zeros([2, 4], tf.int32))
  with pytest.raises(mtf.ShapeError, match="input_mask must have the shape of input_ids"):
    bert.BertModel(models.config(), False, ids, short)
  with pytest.raises(mtf.ShapeError, match="token_type_ids"):
    bert.BertModel(models.config(), False, ids, ids, short)
  # One tensor for all three is legal.
  bert.BertModel(models.config(), False, ids, ids, ids)


def test_indivisible_heads_are_refused_before_anything_is_made(cpu_devices):
  impl = mtf.PlacementMeshImpl("cols:3", "num_heads:cols", cpu_devices[:3])
  with pytest.raises(mtf.LayoutError, match="num_heads"):
    models.function(impl, models.config())(*models.batch().values())
  assert not len(impl.variable_store)


def test_activations():
  given = [lambda x: x, None, "", "linear", "Gelu", "RELU", "tanh"]
  found = [bert.get_activation(a) for a in given]
  assert found == [given[0], None, None, None, mtf.gelu, mtf.relu, mtf.tanh]


def test_config_by_the_names_of_the_original(tmp_path):
  original = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 99,
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.3,
    "vocab_size": 7,
    "something_else": 1,
    "block_layers": ["attention"],
  }
  file = tmp_path / "config.json"
  file.write_text(json.dumps(original))
  config = bert.BertConfig.from_json_file(file)
  assert (config.d_model, config.num_blocks, config.attention_num_heads) == (64, 3, 4)
  assert (config.feedforward_intermediate_size, config.feedforward_intermediate_act) == (99, "relu")
  assert (config.layer_output_dropout_prob, config.something_else) == (0.3, 1)
  assert bert.BertConfig.from_dict(config.to_dict()).to_json_string() == config.to_json_string()
  assert config.to_json_string().endswith("}\n")
  assert json.loads(config.to_json_string())["block_layers"] == ["attention"]
  assert bert.BertConfig(7, block_layers="moe,attention").block_layers == ["moe", "attention"]


def test_config_refuses(tmp_path):
  with pytest.raises(ValueError, match="position_signal is 'sinusoid'; use one of embedding"):
    bert.BertConfig(7, position_signal="sinusoid")
  with pytest.raises(ValueError, match="residual_structure"):
    bert.BertConfig(7, residual_structure="none")
  with pytest.raises(mtf.ConfigError, match="there is no such file"):
    bert.BertConfig.from_json_file(tmp_path / "none.json")
  (tmp_path / "list.json").write_text("[1]")
  with pytest.raises(mtf.ConfigError, match="it must be an object, got list"):
    bert.BertConfig.from_json_file(tmp_path / "list.json")
