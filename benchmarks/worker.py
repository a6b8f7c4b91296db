"""One side of a benchmark in a process of its own: runs steps when it is told to.

Reads lines "<number of steps>" from standard input; answers each with the milliseconds of
every step, and at first with the time to the first step and with what it computed, as JSON:
the first losses of a training, or the mean log probability of what was decoded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from benchmarks import sizes, t5_sizes, unet_sizes

_WARM_UP = 10
_DECODING_WARM_UP = 2
_UNET_WARM_UP = 4


def main() -> None:
  """Builds the side, warms up, serves."""
  parser = argparse.ArgumentParser()
  parser.add_argument(
    "side", help="plain, torch, jax, mirrored, dtensor, ours, ours_t5, hf_t5, ct2_t5, or unet"
  )
  parser.add_argument(
    "size", choices=sorted([*sizes.SIZES, *t5_sizes.T5_SIZES, *unet_sizes.UNET_SIZES])
  )
  parser.add_argument("--mesh", default="")
  parser.add_argument("--implementation", default="placement")
  parser.add_argument("--sharding", default="", choices=("", "state", "all"))
  parser.add_argument("--precision", default="float32", help="of plain and ours")
  parser.add_argument("--stages", type=int, default=1, help="of ours")
  parser.add_argument("--microbatches", type=int, default=1, help="of ours")
  parser.add_argument("--compiler", default="", choices=("", "xla"), help="of ours_t5")
  args = parser.parse_args()
  # Answers go where nothing else is written.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)

  started = time.perf_counter()
  if args.side == "unet":
    from benchmarks import unet

    size = unet_sizes.UNET_SIZES[args.size]
    made = unet.make_step(size, args.mesh, args.implementation)
    step, first, values = _warmed_up(made, started, _UNET_WARM_UP)
  else:
    step, first, values = (_decoding if args.size in t5_sizes.T5_SIZES else _training)(args)
  _answer(answers, {"first_step_seconds": first, "losses": values})
  for line in sys.stdin:
    times = []
    for _ in range(int(line)):
      begin = time.perf_counter()
      step()
      times.append((time.perf_counter() - begin) * 1e3)
    _answer(answers, {"ms": times})


def _training(args: argparse.Namespace) -> tuple[Callable[[], Any], float, list[float]]:
  """A training step, the seconds until the first was done, and the losses of the warm-up."""
  size = sizes.SIZES[args.size]
  started = time.perf_counter()
  if args.side == "plain":
    from benchmarks import plain_tf

    step = plain_tf.make_step(size, 0, precision=args.precision)
  elif args.side == "torch":
    from benchmarks import torch_gpt

    step = torch_gpt.make_step(size, 0)
  elif args.side == "jax":
    from benchmarks import jax_gpt

    started = time.perf_counter()
    step = jax_gpt.make_step(size, 0, args.mesh)
  elif args.side in ("mirrored", "dtensor"):
    from benchmarks import strategies

    started = time.perf_counter()
    if args.side == "dtensor":
      step = strategies.make_dtensor_step(size, 0, args.mesh)
    else:
      step = strategies.make_mirrored_step(size, 0, args.mesh)
  else:
    from benchmarks import ours

    started = time.perf_counter()
    step = ours.make_step(
      size,
      0,
      args.mesh,
      args.implementation,
      args.sharding,
      args.precision,
      args.stages,
      args.microbatches,
    )
  tokens = sizes.random_tokens(size)
  return _warmed_up(lambda: step(tokens), started)


def _warmed_up(
  step: Callable[[], Any], started: float, steps: int = _WARM_UP
) -> tuple[Callable[[], Any], float, list[float]]:
  """The step, the seconds from `started` until the first was done, and the losses so far."""

  def run() -> float:
    return float(step())

  losses = [run()]
  first = time.perf_counter() - started
  losses += [run() for _ in range(steps - 1)]
  return run, first, losses


def _decoding(args: argparse.Namespace) -> tuple[Callable[[], Any], float, list[float]]:
  """Decoding a batch, the seconds until the first was done, and its log probability."""
  size = t5_sizes.T5_SIZES[args.size]
  inputs = t5_sizes.random_inputs(size)
  if args.side == "hf_t5":
    from benchmarks import hf_t5

    started = time.perf_counter()
    decoder = hf_t5.Decoder(size, 0)
  elif args.side == "ct2_t5":
    from benchmarks import ct2_t5

    started = time.perf_counter()
    decoder = ct2_t5.Decoder(size, 0, parts=int(args.mesh.removeprefix("batch:") or 1))
  else:
    from benchmarks import ours_t5

    started = time.perf_counter()
    decoder = ours_t5.Decoder(
      size, 0, args.mesh, args.implementation, jit_compile=args.compiler == "xla"
    )

  def run() -> Any:
    return decoder.decode(inputs)

  outputs = run()
  first = time.perf_counter() - started
  for _ in range(_DECODING_WARM_UP - 1):
    run()
  return run, first, [decoder.mean_log_prob(inputs, outputs)]


def _answer(stream: Any, value: Any) -> None:
  stream.write(json.dumps(value) + "\n")
  stream.flush()


if __name__ == "__main__":
  main()
