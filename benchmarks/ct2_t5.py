"""Another side of the decoding benchmark: CTranslate2, which has no framework below it."""

from __future__ import annotations

import tempfile

import numpy as np

from benchmarks.t5_sizes import T5Size, initial_values

try:
  import ctranslate2
  from ctranslate2.converters.utils import fuse_linear
  from ctranslate2.specs import common_spec
except ImportError:
  ctranslate2 = None

# The end of a sequence, which is never chosen before the last position: all have the same length.
_END = 1


class Decoder:
  """A translator in float32 with the weights of `initial_values`.

  Args:
    size: the model, and what it decodes.
    seed: of the weights.
    parts: number of parts of the batch, each of which a thread decodes by itself; 1: all threads
      do the whole of it.

  Raises:
    ImportError: CTranslate2 is not installed.
  """

  def __init__(self, size: T5Size, seed: int = 0, parts: int = 1):
    if ctranslate2 is None:
      raise ImportError("benchmarks.ct2_t5 needs ctranslate2, which is not installed")
    self._size, self._parts = size, parts
    threads = {"inter_threads": parts, "intra_threads": 1} if parts > 1 else {}
    with tempfile.TemporaryDirectory() as folder:
      _specification(size, initial_values(size, seed)).save(folder)
      self._translator = ctranslate2.Translator(folder, compute_type="float32", **threads)

  def decode(self, inputs: np.ndarray) -> np.ndarray:
    """Returns the best sequences, int32 [batch, output_length]."""
    results = self._translator.translate_batch(
      [[str(token) for token in row] for row in inputs],
      beam_size=self._size.beam,
      length_penalty=0.0,
      max_decoding_length=self._size.output_length,
      min_decoding_length=self._size.output_length,
      max_batch_size=self._size.batch // self._parts if self._parts > 1 else 0,
    )
    return np.array([[int(token) for token in r.hypotheses[0]] for r in results], np.int32)

  def mean_log_prob(self, inputs: np.ndarray, outputs: np.ndarray) -> float:
    """Returns the model's mean log probability of the tokens of given outputs."""
    texts = [[[str(token) for token in row] for row in ids] for ids in (inputs, outputs)]
    scores = self._translator.score_batch(*texts)
    # The last is that of the end.
    return float(np.mean([s.log_probs[: self._size.output_length] for s in scores]))


def _specification(
  size: T5Size, values: dict[str, np.ndarray]
) -> ctranslate2.specs.TransformerSpec:
  """The model, with its weights; CTranslate2 holds matrices as [outputs, inputs]."""
  spec = ctranslate2.specs.TransformerSpec.from_config(
    size.layers,
    size.heads,
    pre_norm=True,
    activation=common_spec.Activation.RELU,
    relative_attention_bias=True,
    rms_norm=True,
  )
  _set_stack(spec.encoder, "encoder", values)
  _set_stack(spec.decoder, "decoder", values)
  embedding = values["shared/embedding"]
  spec.encoder.embeddings[0].weight = embedding
  spec.decoder.embeddings.weight = embedding
  spec.decoder.projection.weight = embedding
  spec.decoder.scale_outputs = size.d_model**-0.5
  tokens = [str(token) for token in range(size.vocab)]
  spec.register_source_vocabulary(tokens)
  spec.register_target_vocabulary(tokens)
  spec.config.bos_token = spec.config.unk_token = spec.config.decoder_start_token = "0"
  spec.config.eos_token = str(_END)
  spec.validate()
  spec.optimize()
  return spec


def _set_stack(spec: object, stack: str, values: dict[str, np.ndarray]) -> None:
  spec.scale_embeddings = False
  spec.layer_norm.gamma = values[f"{stack}/rms_norm/scale"]
  # The first layer's is shared by all.
  bias = f"{stack}/block_000/layer_000/SelfAttention/relative_attention_bias"
  for block, layer in enumerate(spec.layer):
    scope = f"{stack}/block_{block:03d}"
    _set_attention(layer.self_attention, f"{scope}/layer_000", "SelfAttention", values)
    layer.self_attention.relative_attention_bias = np.ascontiguousarray(values[bias].T)
    layer.self_attention.relative_attention_max_distance = np.int32(128)
    if stack == "decoder":
      _set_attention(layer.attention, f"{scope}/layer_001", "EncDecAttention", values)
    scope = f"{scope}/layer_{2 if stack == 'decoder' else 1:03d}"
    layer.ffn.layer_norm.gamma = values[f"{scope}/rms_norm/scale"]
    layer.ffn.linear_0.weight = _transposed(values[f"{scope}/DenseReluDense/wi/kernel"])
    layer.ffn.linear_1.weight = _transposed(values[f"{scope}/DenseReluDense/wo/kernel"])


def _set_attention(spec: object, scope: str, kind: str, values: dict[str, np.ndarray]) -> None:
  spec.queries_scale = np.float32(1)
  spec.layer_norm.gamma = values[f"{scope}/rms_norm/scale"]
  products = []
  for name in "qkv":
    products.append(common_spec.LinearSpec())
    products[-1].weight = _transposed(values[f"{scope}/{kind}/{name}"])
  # What has the same input is one product.
  groups = [products] if kind == "SelfAttention" else [products[:1], products[1:]]
  for linear, group in zip(spec.linear, groups):
    fuse_linear(linear, group)
  spec.linear[-1].weight = _transposed(values[f"{scope}/{kind}/o"])


def _transposed(value: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(value.T)
