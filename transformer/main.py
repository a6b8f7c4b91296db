r"""Trains, evaluates and samples from Transformers, as gin files say.

  python -m mesh_tensorflow.transformer.main --model_dir=DIR \
    --gin_file=problems/tinyshakespeare.gin --gin_param="run.train_steps = 2000"

defaults.gin is read first, then every --gin_file (from the working folder, or the package's own:
models/, layouts/, problems/, learning_rate_schedules/), then every --gin_param. The mode is
run.mode: train (default), eval, score_eval, perplexity_eval, infer, score_from_strings,
score_from_dataset, export_infer, export_score or plan.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import tensorflow as tf
from absl import app, flags, logging

from mesh_tensorflow.errors import MeshError
from mesh_tensorflow.transformer import gin_config, utils

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(gin_config)
flags.DEFINE_string("tpu_job_name", None, "Name of the TPU worker job.")
flags.DEFINE_string("model_dir", "/tmp/transformer_standalone", "Folder for checkpoints.")
flags.DEFINE_string("tpu", None, "A TPU to run on: local, a name or an address.")
flags.DEFINE_string("gcp_project", None, "Project of a TPU that is given by name.")
flags.DEFINE_string("tpu_zone", None, "Zone of a TPU that is given by name.")
flags.DEFINE_multi_string(
  "module_import", None, "Python module to import first, to register gin names (repeatable)."
)


def main(argv: Sequence[str]) -> None:
  """Runs what the flags and gin files say."""
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
  for module in FLAGS.module_import or []:
    importlib.import_module(module)
  gin_config.parse_gin_defaults_and_flags()
  gin_config.check_run()
  tf.io.gfile.makedirs(FLAGS.model_dir)
  write_command(FLAGS.model_dir, sys.argv)
  utils.run(
    tpu_job_name=FLAGS.tpu_job_name,
    tpu=FLAGS.tpu,
    gcp_project=FLAGS.gcp_project,
    tpu_zone=FLAGS.tpu_zone,
    model_dir=FLAGS.model_dir,
  )


def write_command(model_dir: str, argv: Sequence[str]) -> None:
  """Keeps the command line in `model_dir/command`, `command.1`, ..."""
  name, i = os.path.join(model_dir, "command"), 0
  while tf.io.gfile.exists(name):
    i += 1
    name = os.path.join(model_dir, f"command.{i}")
  with tf.io.gfile.GFile(name, "w") as f:
    f.write(" ".join(argv))


def _guarded(argv: Sequence[str]) -> int:
  """`main`, with the package's own errors as one line and exit code 1."""
  try:
    main(argv)
  except MeshError as e:
    if FLAGS.verbosity > 0:
      raise
    # Gin adds a line for each configurable that the error passed through.
    text = str(e).split("\n  In call to configurable")[0]
    print(f"{_class_name(e)}: {text}", file=sys.stderr)
    return 1
  except RuntimeError as e:
    missing = gin_config.missing_binding(e)
    if missing is None or FLAGS.verbosity > 0:
      raise
    print(f"{_class_name(missing)}: {missing}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("interrupted; the newest checkpoint is kept", file=sys.stderr)
    return 130
  return 0


def _class_name(error: MeshError) -> str:
  """The name of the error's class, without the proxy class that gin puts around it."""
  return next(c.__name__ for c in type(error).__mro__ if c.__module__ == MeshError.__module__)


def console_main() -> None:
  """The command `mesh-transformer`."""
  logging.set_verbosity(logging.WARNING)
  app.run(_guarded)


if __name__ == "__main__":
  console_main()
