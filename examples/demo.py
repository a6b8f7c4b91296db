"""Trains a small language model on a 2x2 mesh of virtual CPU devices, and lets it write.

The text is the source code of Python's standard library. Everything is set by the gin files
problems/stdlib_lm.gin and layouts/cpu_2x2.gin; `make demo` runs this program. Its
checkpoints are in a folder of the working directory: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from mesh_tensorflow import exit_codes
from mesh_tensorflow.errors import MeshError
from mesh_tensorflow.training import progress
from mesh_tensorflow.transformer import gin_config, gin_paths, utils
from mesh_tensorflow.transformer.data import stdlib_text, text_io

FOLDER = "mesh_tensorflow_demo"
PROMPTS = ["def ", "class ", "    return ", "import "]


def main() -> None:
  """Trains, evaluates, samples."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument(
    "--model_dir",
    default=FOLDER,
    help="folder for checkpoints; training goes on there (%(default)s)",
  )
  parser.add_argument("--steps", type=int, help="training steps (default: those of the gin file)")
  parser.add_argument("--eval_files", type=int, help="held-out files to evaluate on (default: all)")
  parser.add_argument("--layout", default="layouts/cpu_2x2.gin", help="gin file of mesh and layout")
  parser.add_argument("--implementation", default="auto", help="auto, placement or simd")
  args = parser.parse_args()
  model_dir = args.model_dir

  bindings = ["run.report_every = 200", f"run.mesh_implementation = '{args.implementation}'"]
  if args.steps:
    bindings.append(f"run.train_steps = {args.steps}")
  if args.eval_files:
    bindings.append(f"held_out/dataset.python_stdlib_files.max_files = {args.eval_files}")
  gin_config.parse_gin(["problems/stdlib_lm.gin", args.layout], bindings)

  held_out = stdlib_text.python_stdlib_files("validation", max_files=args.eval_files)
  train = stdlib_text.python_stdlib_files("train")
  size = sum(os.path.getsize(p) for p in train)
  print(
    f"Text: {len(train)} source files of Python's standard library ({size / 1e6:.1f} MB); "
    f"{len(held_out)} more are held out.\n"
    f"Folder: {os.path.abspath(model_dir)}; delete it to begin anew.",
    flush=True,
  )
  utils.run(
    None, None, None, None, model_dir, train_model_fn=lambda *a, **k: _run(held_out, *a, **k)
  )
  print(
    f"""
What to try next
  {progress.tensorboard_command(model_dir)}
  mesh-transformer --model_dir=DIR --gin_file=problems/stdlib_lm.gin \\
      --gin_file=layouts/cpu_2x4.gin                 the same model on 8 virtual devices
  python -m mesh_tensorflow.examples.demo --model_dir {model_dir} --steps 4000
                                                     goes on from the checkpoint
  {os.path.join(gin_paths.gin_dir(), "problems", "stdlib_lm.gin")}
                                                     every setting of this run"""
  )


def _run(
  held_out: list[str],
  estimator,
  vocabulary,
  sequence_length,
  batch_size,
  dataset_fn,
  *rest,
  **kwargs,
) -> None:
  """Trains with `utils.train_model`, then shows what was learned."""
  started = time.perf_counter()
  utils.train_model(estimator, vocabulary, sequence_length, batch_size, dataset_fn, *rest, **kwargs)
  print(f"trained in {time.perf_counter() - started:.0f} s, start-up included", flush=True)
  dataset = dataset_fn(
    sequence_length=sequence_length,
    vocabulary=vocabulary,
    dataset_split="validation",
    context_tokens=sequence_length["targets"] // 2,
  )
  metrics = estimator.evaluate(dataset, what="held-out files")
  print(
    f"held-out files: {metrics['bits_per_token']:.3f} bits per byte "
    f"(gzip -9 needs {stdlib_text.gzip_bits_per_byte(held_out):.3f})",
    flush=True,
  )
  rows = [list(vocabulary.encode(p)) for p in PROMPTS]
  samples = estimator.sample(
    rows, sequence_length["targets"], batch_size=len(rows), temperature=0.7
  )
  for row in samples:
    print("-" * 40)
    print(vocabulary.decode(text_io.strip_ids(row)))
  print("-" * 40)


if __name__ == "__main__":
  try:
    main()
  except MeshError as e:
    print(f"{type(e).__name__}: {e}", file=sys.stderr)
    sys.exit(exit_codes.of_error(e))
  except KeyboardInterrupt as e:
    print("interrupted; the newest checkpoint is kept", file=sys.stderr)
    sys.exit(exit_codes.of_error(e))
