"""One side of a benchmark in a process of its own: runs steps when it is told to.

Reads lines "<number of steps>" from standard input; answers each with the milliseconds of
every step, and at first with the time to the first step and the first losses, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from benchmarks import sizes

_WARM_UP = 10


def main() -> None:
  """Builds the side, warms up, serves."""
  parser = argparse.ArgumentParser()
  parser.add_argument("side", help="plain, torch, or ours")
  parser.add_argument("size", choices=sorted(sizes.SIZES))
  parser.add_argument("--mesh", default="")
  parser.add_argument("--implementation", default="placement")
  args = parser.parse_args()
  size = sizes.SIZES[args.size]
  # Answers go where nothing else is written.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)

  started = time.perf_counter()
  if args.side == "plain":
    from benchmarks import plain_tf

    step = plain_tf.make_step(size, 0)
  elif args.side == "torch":
    from benchmarks import torch_gpt

    step = torch_gpt.make_step(size, 0)
  else:
    from benchmarks import ours

    imported = time.perf_counter()
    step = ours.make_step(size, 0, args.mesh, args.implementation)
    started = imported
  tokens = sizes.random_tokens(size)
  losses = [float(step(tokens))]
  first = time.perf_counter() - started
  losses += [float(step(tokens)) for _ in range(_WARM_UP - 1)]
  _answer(answers, {"first_step_seconds": first, "losses": losses})
  for line in sys.stdin:
    times = []
    for _ in range(int(line)):
      begin = time.perf_counter()
      float(step(tokens))
      times.append((time.perf_counter() - begin) * 1e3)
    _answer(answers, {"ms": times})


def _answer(stream, value) -> None:
  stream.write(json.dumps(value) + "\n")
  stream.flush()


if __name__ == "__main__":
  main()
