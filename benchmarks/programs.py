"""Training steps of four programs, on any mesh and layout, with a batch for each.

bench    the language model of `sizes.BENCH`
moe      the same, every second feed-forward layer a mixture of 8 experts
seq2seq  the encoder-decoder of gin/problems/multi30k.gin, 8 pairs in a batch
mnist    the convolutions of examples/mnist.py, on images in 4 x 4 blocks, 24 in a batch
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import gin
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from benchmarks import ours
from benchmarks.sizes import SIZES, Size
from mesh_tensorflow.examples import mnist
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.gin_paths import gin_dir
from mesh_tensorflow.transformer.model import mesh_setup

_PAIRS, _INPUT_LENGTH, _TARGET_LENGTH, _SUBWORDS = 8, 56, 64, 6000
_IMAGES, _HIDDEN = 24, 512


@dataclasses.dataclass(frozen=True)
class Program:
  """A training step, of which layouts can be tried.

  Attributes:
    make: takes mesh shape, "placement" or "simd", and layout; returns the step, whose first result
      is the loss.
    batch: the arguments of the step.
  """

  make: Callable[[str, str, str], mtf.Function]
  batch: Callable[[], list[tf.Tensor]]


def _language_model(size: Size) -> Program:
  def make(mesh: str, implementation: str, layout: str) -> mtf.Function:
    return ours.make_function(size, 0, mesh, implementation, layout)

  return Program(make, lambda: language_batch(size))


def language_batch(size: Size) -> list[tf.Tensor]:
  """Tokens, learning rate and step of a language model.

  Args:
    size: the model and the batch.
  """
  return [_tokens(size.vocab, size.batch, size.length), *_rate_and_step()]


def _tokens(vocab: int, *shape: int) -> tf.Tensor:
  return tf.constant(np.random.default_rng(0).integers(1, vocab, shape), tf.int32)


def _rate_and_step() -> list[tf.Tensor]:
  return [tf.constant(1e-3), tf.constant(0, tf.int64)]


def _seq2seq(mesh: str, implementation: str, layout: str) -> mtf.Function:
  gin.clear_config()
  files = [os.path.join(gin_dir(), name) for name in ("defaults.gin", "problems/multi30k.gin")]
  gin.parse_config_files_and_bindings(files, ["dropout_rate = 0.0"])
  model = utils.build_model("bitransformer", _SUBWORDS, _SUBWORDS, layout, mesh)
  devices = mesh_setup.find_devices(max(1, mtf.convert_to_shape(mesh).size))
  impl = mesh_setup.make_mesh_impl(mesh, layout, devices, implementation=implementation, seed=0)
  lengths = {"inputs": _INPUT_LENGTH, "targets": _TARGET_LENGTH}
  steps = utils.ModelSteps(model, impl, "bitransformer", _PAIRS, lengths)
  return steps.train_step(["inputs", "targets"], mtf.optimize.AdafactorOptimizer)


def _pairs() -> list[tf.Tensor]:
  inputs = _tokens(_SUBWORDS, _PAIRS, _INPUT_LENGTH)
  return [inputs, _tokens(_SUBWORDS, _PAIRS, _TARGET_LENGTH), *_rate_and_step()]


def _mnist(mesh: str, implementation: str, layout: str) -> mtf.Function:
  devices = mesh_setup.find_devices(max(1, mtf.convert_to_shape(mesh).size))
  impl = mesh_setup.make_mesh_impl(mesh, layout, devices, implementation=implementation, seed=0)
  shape = mnist.image_shape(_IMAGES)

  @mtf.function(impl, [mtf.TensorSpec(shape), mtf.TensorSpec(shape[:1], tf.int32)])
  def train_step(images: mtf.Tensor, labels: mtf.Tensor) -> mtf.Tensor:
    loss = mtf.reduce_mean(mnist.network(images, labels, _HIDDEN)[1])
    mtf.optimize.AdafactorOptimizer().minimize(loss)
    return loss

  return train_step


def _images() -> list[tf.Tensor]:
  rng = np.random.default_rng(0)
  images = rng.random(mnist.image_shape(_IMAGES).to_integer_list)
  return [tf.constant(images, tf.float32), tf.constant(rng.integers(0, 10, _IMAGES), tf.int32)]


PROGRAMS = {
  "bench": _language_model(SIZES["bench"]),
  "small": _language_model(SIZES["small"]),
  "moe": _language_model(SIZES["moe"]),
  "seq2seq": Program(_seq2seq, _pairs),
  "mnist": Program(_mnist, _images),
}
