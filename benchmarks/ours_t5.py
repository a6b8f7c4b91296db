"""Our side of the decoding benchmark: `Bitransformer.decode` with a beam.

Alone, `python -m benchmarks.ours_t5 t5_half_1x1` prints where the time of a token goes.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
import time

import gin
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from benchmarks.t5_sizes import T5_SIZES, T5Size, initial_values, random_inputs
from mesh_tensorflow.examples import read_profile
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.gin_paths import gin_dir
from mesh_tensorflow.transformer.model import mesh_setup

LAYOUT = "batch:batch,d_ff:model,heads:model,vocab:model"


class Decoder:
  """An encoder-decoder with the weights of `initial_values`.

  Args:
    size: the model, and what it decodes.
    seed: of the weights.
    mesh: mesh shape, such as "batch:2,model:2"; "" is one device.
    implementation: "placement" or "simd".
    jit_compile: whether XLA compiles the program.
  """

  def __init__(
    self,
    size: T5Size,
    seed: int = 0,
    mesh: str = "",
    implementation: str = "placement",
    jit_compile: bool = False,
  ):
    devices = mesh_setup.find_devices(max(1, mtf.convert_to_shape(mesh).size))
    self._impl = mesh_setup.make_mesh_impl(
      mesh, LAYOUT if mesh else "", devices, implementation=implementation, seed=seed
    )
    self._size, self._model, self._jit_compile = size, _make_model(size), jit_compile
    inputs = [mtf.Dimension("batch", size.batch), mtf.Dimension("length", size.input_length)]
    outputs = [inputs[0], mtf.Dimension("length", size.output_length)]
    self._inputs_spec = mtf.TensorSpec(inputs, tf.int32, "inputs")
    self._outputs_spec = mtf.TensorSpec(outputs, tf.int32, "targets")
    self._compiled = tf.function(self._program(), autograph=False)
    self._compiled.get_concrete_function(
      tf.TensorSpec(self._inputs_spec.shape.to_integer_list, tf.int32)
    )
    for name, value in initial_values(size, seed).items():
      self._impl.variable_store[name].assign(value)

  def _program(self) -> mtf.Function:
    size = self._size

    @mtf.function(self._impl, [self._inputs_spec], jit_compile=self._jit_compile)
    def decode(inputs):
      return self._model.decode(
        inputs,
        beam_size=size.beam,
        alpha=0.0,
        decode_length_multiplier=0.0,
        decode_length_constant=size.output_length,
        max_decode_length=size.output_length,
      )

    return decode

  def decode(self, inputs: np.ndarray) -> np.ndarray:
    """Returns the best sequences, int32 [batch, output_length]."""
    return self._compiled(inputs).numpy()

  def mean_log_prob(self, inputs: np.ndarray, outputs: np.ndarray) -> float:
    """Returns the model's mean log probability of the tokens of given outputs."""

    @mtf.function(self._impl, [self._inputs_spec, self._outputs_spec])
    def log_prob(inputs, targets):
      ones = mtf.ones(targets.mesh, targets.shape, tf.int32)
      # No token is padding, not even token 0.
      logits, _ = self._model.call_simple(
        inputs, targets, compute_loss=False, mode="eval", decoder_sequence_id=ones
      )
      nats = mtf.layers.softmax_cross_entropy_with_logits(
        logits, targets, self._model.output_vocab_dim
      )
      return mtf.reduce_mean(nats) * -1.0

    return float(log_prob(inputs, outputs))


def _make_model(size: T5Size) -> utils.transformer_lib.Bitransformer:
  gin.clear_config()
  bindings = f"""
    num_layers = {size.layers}
    d_model = {size.d_model}
    d_ff = {size.d_ff}
    num_heads = {size.heads}
    d_kv = {size.d_kv}
    dropout_rate = 0.0
    Unitransformer.positional_embedding = False
    Unitransformer.vocab_divisor = 1
    SelfAttention.relative_attention_type = "bias_shared"
    SelfAttention.relative_attention_num_buckets = {size.buckets}
    EncDecAttention.relative_attention_type = None
    # No token ends a sequence: all have the same length.
    beam_search.beam_search.eos_id = -1
  """
  gin.parse_config_files_and_bindings([os.path.join(gin_dir(), "defaults.gin")], bindings)
  return utils.build_model("bitransformer", size.vocab, size.vocab)


def main() -> None:
  """Prints the processor time of a token, and the types of operations that take most of it."""
  parser = argparse.ArgumentParser(description=main.__doc__)
  parser.add_argument("size", choices=T5_SIZES, help="name of the model, and what it decodes")
  parser.add_argument("--jit_compile", action="store_true", help="let XLA compile the program")
  args = parser.parse_args()
  size = T5_SIZES[args.size]
  decoder, inputs = Decoder(size, jit_compile=args.jit_compile), random_inputs(size)
  decoder.decode(inputs)
  times = []
  for _ in range(20):
    began = time.process_time()
    decoder.decode(inputs)
    times.append(time.process_time() - began)
  with tempfile.TemporaryDirectory() as folder:
    with tf.profiler.experimental.Profile(folder):
      decoder.decode(inputs)
    _, by_type = read_profile.read(read_profile.find_profile(pathlib.Path(folder)))
  print(f"{min(times) / size.output_length * 1e3:.2f} ms of the processor for a token of each row")
  print(read_profile.table("types of operations", by_type, steps=size.output_length, rows=8))


if __name__ == "__main__":
  main()
