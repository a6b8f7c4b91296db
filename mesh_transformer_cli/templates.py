"""Files that `mesh-transformer init` writes: a gin file with comments, and a README."""

from __future__ import annotations

import dataclasses
import os
import shlex
from typing import Any

from mesh_transformer_cli import measuring
from mesh_transformer_cli.measuring import Text

# A few words that a language model of any text can go on with.
_PROMPT = "The "


@dataclasses.dataclass(frozen=True)
class Written:
  """Values that both templates are filled with.

  Attributes:
    folder: of the files.
    text: the text.
    vocabulary: its kind.
    encoding: encoding of the text.
    validation: the part that is held out.
  """

  folder: str
  text: Text
  vocabulary: str
  encoding: str
  validation: float

  @property
  def config(self) -> str:
    """The gin file, as it is typed."""
    return shlex.quote(os.path.join(self.folder, measuring.GIN))


def described(text: Text) -> str:
  """A text, in a line."""
  about = "" if text.whole else "about "
  where = text.path if len(text.files) == 1 else f"{text.path} ({len(text.files):,} files)"
  return f"{where}: {about}{text.characters:,} characters"


def gin_file(w: Written, sizes: Any) -> str:
  """The gin file; `sizes` is of `init`."""
  text = w.text
  own_text = [f"own_text.path = {text.path!r}"]
  if text.field is not None:
    own_text.append(f"own_text.field = {text.field!r}")
  if w.encoding != "utf-8":
    own_text.append(f"text_encoding.encoding = {w.encoding!r}")
  return f"""\
# {described(text)}.
# Written by `mesh-transformer init`; every line may be changed. What each setting does, and all
# others: docs/settings.md. --set NAME=VALUE changes one line for one run: --set d_model=256
import mesh_tensorflow.optimize
import mesh_tensorflow.transformer.dataset
import mesh_tensorflow.transformer.learning_rate_schedules
import mesh_tensorflow.transformer.transformer_layers
import mesh_tensorflow.transformer.vocabulary

# ---- The text. Absolute paths, so that commands work in any folder; if it moves, change them.
run.train_dataset_fn = @dataset.own_text
{chr(10).join(own_text)}
# This part is held out, chosen by a hash of the documents (of one long one, its end): the run says
# the loss on it now and then, `mesh-transformer eval` at any time.
own_text.validation_fraction = {sizes.validation}
# 'documents' keeps the model from looking from one document into the next: for short ones.
own_text.mode = 'stream'

# ---- The vocabulary: 'characters', 'bytes', or pieces of words, 'sentencepiece:8000', which are
# learned from the text when training begins, and kept with the model.
run.vocabulary = {w.vocabulary!r}

# ---- The folder of checkpoints, reports and settings of the run. Another model needs another one.
run.model_dir = {os.path.join(os.path.abspath(w.folder), measuring.MODEL)!r}

# ---- The model: a decoder with rotary positions, SwiGLU, and query-key norm.
run.model_type = 'lm'
num_layers = {sizes.layers}
d_model = {sizes.d_model}
d_ff = {sizes.d_ff}
num_heads = {sizes.heads}
d_kv = {sizes.d_model // sizes.heads}
dropout_rate = {sizes.dropout}
make_layer_stack.layers = [@GroupedQueryAttention, @DenseReluDense]
GroupedQueryAttention.rotary = @Rotary()
GroupedQueryAttention.query_key_norm = True
Unitransformer.positional_embedding = False
# All tokens are about equally likely at first.
Unitransformer.logits_init_scale = 0.3
DenseReluDense.activation = ['swish', 'linear']

# ---- The training: so many steps, of so many sequences, of so many tokens.
run.train_steps = {sizes.steps}
run.batch_size = {sizes.batch}
run.sequence_length = {sizes.length}
Unitransformer.max_length = {sizes.length}
run.eval_every_steps = {sizes.steps // 10}
run.save_checkpoints_steps = {sizes.steps // 5}
run.optimizer = @AdamWOptimizer
# The rate rises over the first steps, and falls along a cosine.
run.learning_rate_schedule = @cosine_decay
cosine_decay.peak = {sizes.learning_rate}
cosine_decay.warmup = {max(sizes.steps // 20, 20)}

# ---- One device and float32. For a mesh of four: --config=layouts/cpu_2x2.gin behind this file, or
# mesh_shape = 'batch:2,model:2', layout_rules = 'batch:batch,d_ff:model,heads:model,vocab:model'.
run.mesh_shape = ''
run.layout_rules = ''
get_variable_dtype.master_dtype = 'float32'
get_variable_dtype.activation_dtype = 'float32'
utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = None
"""


def readme(w: Written, sizes: Any) -> str:
  """The README; `sizes` is of `init`."""
  exported = shlex.quote(os.path.join(w.folder, "exported"))
  rows = [
    ("look before training: parameters, memory, an example", "train", "--dry_run"),
    (f"train, {sizes.steps:,} steps; again: go on from the newest checkpoint", "train", ""),
    ("train longer", "train", f"--steps={2 * sizes.steps}"),
    ("the loss on the held-out part", "eval", ""),
    ("let it write", "infer", f"--prompt={shlex.quote(_PROMPT)}"),
    ("prompts from the keyboard", "infer", "--interactive"),
    ("a SavedModel, which runs without this package", "export", f"--output={exported}"),
  ]
  table = "\n".join(
    f"| {what} | `mesh-transformer {command} --config={w.config} {more}`".rstrip("` ") + "` |"
    for what, command, more in rows
  )
  return f"""\
# A language model of a text

{described(w.text)}.
Written by `mesh-transformer init`. The settings, each with a comment, are in `{measuring.GIN}`.

| to | type |
|---|---|
{table}

Ctrl-C saves, and the same command goes on. Checkpoints and reports are in `{measuring.MODEL}/`.
`--set d_model=256`, say, changes a setting for a run: another model needs another folder,
`--model_dir=DIR`. `mesh-transformer COMMAND --help` lists what there is.
"""
