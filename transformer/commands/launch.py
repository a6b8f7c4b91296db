"""Starts several worker processes of the trainer on this machine, as a cluster would.

  python -m mesh_tensorflow.transformer.launch --workers=2 -- --model_dir=... --gin_file=...

What stands after `--` goes to every worker's `mesh_tensorflow.transformer.main`, or, if it begins
with a command (train, eval, ...), to its `mesh-transformer`. The devices of the
mesh are shared by the workers: a mesh of 4 processors and 2 workers means 2 virtual CPU devices (or
GPUs) each. The output of worker 0 is shown as it is, that of the others with their numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mesh_tensorflow.transformer.commands import command_line
from mesh_tensorflow.workers.launching import launch

# The program that knows commands: the front of the one that knows flags.
_COMMANDS = "mesh_transformer_cli"


def main(arguments: Sequence[str] | None = None) -> int:
  """Parses the command line and launches."""
  parser = argparse.ArgumentParser(
    prog="mesh-transformer-launch",
    description="Starts several workers of the Transformer trainer on this machine.",
    epilog="for example: %(prog)s --workers=2 -- --model_dir=my_model \\\n"
    "    --gin_file=problems/stdlib_lm.gin --gin_file=layouts/cpu_2x2.gin",
    # The texts, that of --version among them, keep their lines.
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--version", action="version", version=command_line.version())
  parser.add_argument("--workers", type=int, required=True, help="number of worker processes")
  parser.add_argument(
    "--restarts",
    type=int,
    default=0,
    help="start all again so often when one fails, where that can help: after a lost worker or a "
    "crash, not after an error of the settings, the numbers, the disk or the data",
  )
  parser.add_argument(
    "--share_network",
    action="store_true",
    help="workers use this machine's network, where data or models come over it; their ports are "
    "then open to whoever reaches this machine. Else they have a network of their own",
  )
  parser.add_argument(
    "trainer",
    nargs="*",
    help="flags of every worker's trainer, or a command with its flags, after --",
  )
  args = parser.parse_args(arguments)
  if args.workers < 1:
    parser.error(f"--workers={args.workers}: at least one worker is needed")
  if args.restarts < 0:
    parser.error(f"--restarts={args.restarts} is negative")
  is_command = bool(args.trainer) and not args.trainer[0].startswith("-")
  program = _COMMANDS if is_command else "mesh_tensorflow.transformer.main"
  command = [sys.executable, "-m", program, *args.trainer]
  return launch(command, args.workers, args.restarts, share_network=args.share_network)
