"""The other side of the decoding benchmark: Hugging Face's T5 in PyTorch."""

from __future__ import annotations

import os

import numpy as np

from benchmarks.t5_sizes import T5Size, initial_values

# Nothing is downloaded: configuration and weights are made here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("USE_TF", "0")

try:
  import torch
  from transformers import T5Config, T5ForConditionalGeneration
except ImportError:
  torch = None


class Decoder:
  """`T5ForConditionalGeneration` with the weights of `initial_values`.

  Args:
    size: the model, and what it decodes.
    seed: of the weights.

  Raises:
    ImportError: PyTorch or transformers are not installed.
  """

  def __init__(self, size: T5Size, seed: int = 0):
    if torch is None:
      raise ImportError("benchmarks.hf_t5 needs torch and transformers, which are not installed")
    config = T5Config(
      vocab_size=size.vocab,
      d_model=size.d_model,
      d_kv=size.d_kv,
      d_ff=size.d_ff,
      num_layers=size.layers,
      num_heads=size.heads,
      relative_attention_num_buckets=size.buckets,
      feed_forward_proj="relu",
      dropout_rate=0.0,
      decoder_start_token_id=0,
      # No token ends a sequence: all have the same length.
      eos_token_id=None,
    )
    config._attn_implementation = "sdpa"
    self._size = size
    self._model = T5ForConditionalGeneration(config).eval()
    self._set_values(initial_values(size, seed))

  def _set_values(self, values: dict[str, np.ndarray]) -> None:
    """Sets all weights; nn.Linear holds its matrix as [outputs, inputs]."""
    named = {_their_name(name): torch.from_numpy(_theirs(value)) for name, value in values.items()}
    state = self._model.state_dict()
    tied = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    if set(state) - tied != set(named):
      raise RuntimeError(f"other weights than ours: {sorted(set(state) ^ set(named))}")
    with torch.no_grad():
      for name, value in named.items():
        # The embedding is not a Linear: it is [vocab, d_model] on both sides.
        state[name].copy_(value.T if name == "shared.weight" else value)

  def decode(self, inputs: np.ndarray) -> np.ndarray:
    """Returns the best sequences, int32 [batch, output_length]."""
    ids = torch.from_numpy(inputs).long()
    with torch.inference_mode():
      outputs = self._model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=self._size.beam,
        do_sample=False,
        use_cache=True,
        max_new_tokens=self._size.output_length,
      )
    # The first is the input at position 0.
    return outputs[:, 1:].numpy().astype(np.int32)

  def mean_log_prob(self, inputs: np.ndarray, outputs: np.ndarray) -> float:
    """Returns the model's mean log probability of the tokens of given outputs."""
    with torch.inference_mode():
      result = self._model(
        input_ids=torch.from_numpy(inputs).long(), labels=torch.from_numpy(outputs).long()
      )
    return -float(result.loss)


def _their_name(name: str) -> str:
  """The PyTorch name of a weight of `initial_values`."""
  if name == "shared/embedding":
    return "shared.weight"
  stack, *rest = name.split("/")
  if rest == ["rms_norm", "scale"]:
    return f"{stack}.final_layer_norm.weight"
  block, layer, *inner = rest
  prefix = f"{stack}.block.{int(block[-3:])}.layer.{int(layer[-3:])}"
  if inner == ["rms_norm", "scale"]:
    return f"{prefix}.layer_norm.weight"
  return f"{prefix}.{inner[0]}.{inner[1]}.weight"


def _theirs(value: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(value.T)
