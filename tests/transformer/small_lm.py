"""A tiny language model of characters, through `utils.run` in the process of a test."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import gin

from mesh_tensorflow.transformer import gin_config, utils

TEXT = "To be, or not to be, that is the question.\nWhether 'tis nobler in the mind\n" * 40
SMALL = [
  *("num_layers = 1", "d_model = 16", "d_ff = 16", "num_heads = 2", "d_kv = 8"),
  *("run.sequence_length = {'inputs': 24, 'targets': 24}", "Unitransformer.max_length = 24"),
  *("run.batch_size = ('sequences_per_batch', 4)", "run.train_steps = 2"),
]
# A binding: a step is traced in less time, where it does not matter what a layer computes.
WITHOUT_ATTENTION = "make_layer_stack.layers = [@transformer_layers.DenseReluDense]"
EVAL = ("run.mode = 'eval'", "run.dataset_split = 'validation'")


def run(folder: pathlib.Path, *bindings: str, text: str | None = None, **arguments: Any) -> Any:
  """`utils.run` of problems/tinyshakespeare.gin, made small, in `folder`.

  Args:
    folder: gets `model`, the folder of checkpoints; and `text.txt`.
    *bindings: gin bindings.
    text: of the training; None: the file stays as it is, or is not there.
    **arguments: of `utils.run`.
  """
  file = folder / "text.txt"
  if text is not None:
    file.write_text(text)
  gin.clear_config()
  gin_config.parse_gin(
    ["problems/tinyshakespeare.gin"], [f"text_file = '{file}'", *SMALL, *bindings]
  )
  return utils.run(None, None, None, None, str(folder / "model"), **arguments)


def infer(folder: pathlib.Path, prompts: list[str], *bindings: str, step: int = 2) -> list[str]:
  """What the mode "infer" writes for each prompt."""
  (folder / "prompts.txt").write_text("".join(p + "\n" for p in prompts))
  out = folder / "out"
  run(
    folder,
    "run.mode = 'infer'",
    f"decode_from_file.input_filename = '{folder}/prompts.txt'",
    f"decode_from_file.output_filename = '{out}'",
    *bindings,
  )
  return (folder / f"{out.name}-{step}").read_text().split("\n")[:-1]


def config_files(folder: pathlib.Path) -> list[str]:
  """The records of configurations in the folder of checkpoints."""
  return sorted(n for n in os.listdir(folder / "model") if ".with-config-" in n)
