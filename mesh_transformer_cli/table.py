"""The commands: what each does, its flags, the names that gin binds, examples."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from mesh_settings.rules import COUNT, NOT_BELOW_ZERO, PATH, at_least, one_of
from mesh_settings.run import RunSettings
from mesh_settings.sample import SampleSettings
from mesh_transformer_cli import flags, model_flags
from mesh_transformer_cli.flags import Flag
from mesh_transformer_cli.init import INIT
from mesh_transformer_cli.model_flags import CONFIG, FURTHER, MODEL_DIR, TRAINED_DIR
from mesh_transformer_cli.parser import Command, Parser
from mesh_transformer_cli.tokenize_flags import TOKENIZE


def _of_run(command: str) -> Iterator[Flag]:
  return flags.of_settings(RunSettings, "run", command)


_CHECKPOINTS = Flag(
  "--checkpoint",
  "Which checkpoints: newest, best, all, new (each as it appears), a step, or steps with commas "
  "between.",
  flags.checkpoint(several=True),
  "STEP",
  gin="run.eval_checkpoint_step",
)
_SPLIT = Flag("--split", "Split of the data. By default validation.", metavar="NAME")


# ------------------------------------------------------------------ train, plan


def _train(values: argparse.Namespace, parser: Parser) -> list[str]:
  if not (values.config or values.module_import):
    parser.error(
      "no --config is given, which says what to train, on which text and mesh: one of the package, "
      "such as --config=problems/stdlib_lm.gin, or yours, which mesh-transformer init writes"
    )
  mode = "dry_run" if values.dry_run else "train"
  return model_flags.trainer_arguments(values, parser.command.flags, f"run.mode = {mode!r}")


TRAIN = Command(
  "train",
  "trains a model, from its newest checkpoint on",
  "Trains the model that gin files describe, and goes on from the newest checkpoint in its folder "
  "if there is one, on any mesh. Ctrl-C and SIGTERM save and end; the same command goes on.",
  (
    *CONFIG,
    MODEL_DIR,
    Flag(
      "--dry_run",
      "Build and count the model, read one batch, show examples of it as text; train nothing, "
      "write nothing.",
      None,
    ),
    Flag(
      "--data",
      "Text of your own: a file, a folder, a pattern.",
      flags.of_rule(PATH),
      "PATH",
      short="data",
    ),
    Flag(
      "--vocabulary",
      "bytes, characters, sentencepiece:8000 (learned from the text), sentencepiece:FILE or "
      "tiktoken:FILE.",
      short="vocabulary",
    ),
    Flag("--optimizer", "Name of an optimizer.", metavar="NAME", short="optimizer"),
    Flag(
      "--learning_rate",
      "The highest learning rate; the schedule around it stays.",
      flags.of_rule(NOT_BELOW_ZERO),
      "X",
      short="learning_rate",
    ),
    *_of_run("train"),
    *FURTHER,
  ),
  _train,
  (
    ("run.train_dataset_fn", "What reads the text: @dataset.text_lm_dataset, ..."),
    ("run.sequence_length", "Tokens in a sequence."),
    ("run.learning_rate_schedule", "A schedule, a number, or a list: their product."),
    ("run.keep_checkpoint_max", "How many checkpoints are kept."),
    ("run.iterations_per_loop", "Steps in one call of the compiled program."),
    ("run.nonfinite", "'stop' or 'skip': what a NaN does."),
    ("num_layers, d_model, d_ff, num_heads, d_kv", "Sizes of the model, in most gin files."),
  ),
  (
    "train --config=problems/stdlib_lm.gin --model_dir=my_model --steps=2000",
    "train --config=my_model/train.gin --set d_model=256 --dry_run",
  ),
)


def _plan(values: argparse.Namespace, parser: Parser) -> list[str]:
  if not (values.config or values.module_import):
    parser.error(
      "no --config is given, which says what to plan; such as --config=models/lm_base.gin"
    )
  bindings = [f"run.mode = {'search' if values.write else 'plan'!r}"]
  if values.devices is not None:
    # The given number of devices, in any shape unless one is given.
    bindings += [] if values.mesh is not None else ["run.mesh_shape = 'auto'"]
    bindings += [] if values.layout is not None else ["run.layout_rules = 'auto'"]
  return model_flags.trainer_arguments(values, parser.command.flags, *bindings)


PLAN = Command(
  "plan",
  "what training needs on each device of a mesh, before anything is allocated",
  "Prints parameters, memory and FLOPs of each device, and the bytes that each operation of a "
  "training step moves over each dimension of the mesh, from shapes alone: the devices need not be "
  "there. Then the best layouts, with the time of a step that is predicted for each.",
  (
    *CONFIG,
    *_of_run("plan"),
    Flag("--machine", "The machine to plan for.", metavar="NAME", gin="choose_layout.machine"),
    Flag(
      "--write",
      "Only search, and write the best layout as a gin file, for --config.",
      flags.of_rule(PATH),
      "FILE",
      gin="write_layout.path",
    ),
    Flag(
      "--vocab_size",
      "Number of ids, where no vocabulary is bound.",
      flags.of_rule(COUNT),
      "N",
      gin="make_steps.vocab_size",
    ),
    MODEL_DIR,
    *FURTHER,
  ),
  _plan,
  (
    ("run.sequence_length", "Tokens in a sequence."),
    ("run.optimizer", "Its slots are memory, too."),
    ("run.model_type", "'lm', 'bitransformer', ..."),
  ),
  (
    "plan --config=problems/stdlib_lm.gin --config=layouts/cpu_2x4.gin",
    "plan --config=models/mesh_ladder/lm_1275m.gin --mesh=batch:8,model:16 \\\n--vocab_size=32000",
  ),
)


# ------------------------------------------------------------------ what trained models do

_EVAL_MODES = {"texts": "eval", "scores": "score_eval", "loss": "perplexity_eval"}


def _eval(values: argparse.Namespace, parser: Parser) -> list[str]:
  return model_flags.of_trained_model(
    values,
    parser,
    f"run.mode = {_EVAL_MODES[values.by or 'texts']!r}",
    f"run.dataset_split = {values.split or 'validation'!r}",
  )


EVAL = Command(
  "eval",
  "how good a trained model is on held-out data",
  "Decodes the data sets of run.eval_dataset_fn that have metrics, and compares the texts; without "
  "such a data set, the loss, accuracy and bits per token of a split of the training data.",
  (
    TRAINED_DIR,
    *CONFIG,
    _SPLIT,
    _CHECKPOINTS,
    Flag(
      "--by",
      "texts: decode and compare; scores: log-likelihoods of the targets; loss: teacher-forced. By "
      "default texts, or the loss where no data set has metrics.",
      flags.of_rule(one_of(tuple(_EVAL_MODES))),
      "|".join(_EVAL_MODES),
    ),
    Flag(
      "--batches",
      "How many batches the loss is the mean of, or all.",
      flags.of_rule(COUNT, none="all"),
      "N|all",
      gin="run.perplexity_eval_steps",
    ),
    *_of_run("eval"),
    *FURTHER,
  ),
  _eval,
  (
    ("run.eval_dataset_fn", "The data sets, with their metrics."),
    ("run.eval_summary_dir", "Folder for scalars and texts."),
    ("run.output_eval_examples", "Whether texts are written."),
  ),
  (
    "eval --model_dir=my_model",
    "eval --model_dir=my_model --checkpoint=all --by=loss --batches=200",
  ),
)


_SAMPLE = (
  Flag(
    "--prompt",
    r"Text to go on with; \n in it is a newline.",
    flags.some_text,
    gin="sample.prompt",
    repeated=True,
  ),
  *flags.of_settings(SampleSettings, "sample", "infer"),
  Flag(
    "--stop",
    r"A sample ends before this text; \n in it is a newline.",
    flags.some_text,
    gin="sample.stop",
    repeated=True,
  ),
)


def _infer(values: argparse.Namespace, parser: Parser) -> list[str]:
  ways = [n for n in ("prompt", "interactive", "input") if getattr(values, n)]
  if len(ways) > 1:
    parser.error(f"--{ways[0]} and --{ways[1]}: give one of them")
  bound = [*(values.gin_param or ()), *(values.set or ())]
  if not ways and not values.config and not any("." in b.partition("=")[0] for b in bound):
    parser.error(
      "nothing is given to go on with: add --prompt=TEXT, --interactive, or --input=FILE with "
      "--output=FILE"
    )
  if values.input and not values.output:
    parser.error(f"--input={values.input} needs --output=FILE, where the results go")
  bindings = ["run.mode = 'infer'"]
  if values.input:
    bindings.append(f"decode_from_file.input_filename = {values.input!r}")
    bindings.append(f"decode_from_file.output_filename = {values.output!r}")
  elif values.output:
    bindings.append(f"sample.output = {values.output!r}")
  return model_flags.of_trained_model(values, parser, *bindings)


INFER = Command(
  "infer",
  "text from a trained model: prompts, a conversation, a file of inputs",
  "Goes on with prompts (a language model), or makes outputs of inputs (an encoder-decoder, such "
  "as a translator). Prompts come from --prompt, the terminal (--interactive) or the lines of a "
  "file.",
  (
    TRAINED_DIR,
    *CONFIG,
    *_SAMPLE,
    Flag("--input", "File of inputs, one a line.", flags.file, "FILE"),
    Flag("--output", "File for the results.", flags.of_rule(PATH), "FILE"),
    Flag(
      "--beam_size",
      "Of an encoder-decoder: beams; 1 is greedy.",
      flags.of_rule(COUNT),
      "N",
      gin="Bitransformer.decode.beam_size",
    ),
    _CHECKPOINTS,
    *_of_run("infer"),
    *FURTHER,
  ),
  _infer,
  (
    ("infer_model.decode_fn", "What decodes: @decode_from_file, @decode_from_dataset, yours."),
    ("Bitransformer.decode.alpha", "Length penalty of beam search."),
  ),
  (
    'infer --model_dir=my_model --prompt="ROMEO:" --num_samples=3 --temperature=0.8',
    "infer --model_dir=my_model --input=prompts.txt --output=continued.txt",
  ),
)


def _score(values: argparse.Namespace, parser: Parser) -> list[str]:
  if values.dataset and (values.targets or values.inputs):
    parser.error("--dataset scores run.eval_dataset_fn's data sets, --targets a file: give one")
  if not (values.dataset or values.targets or values.config):
    parser.error("nothing is given to score: add --targets=FILE, a text a line, or --dataset")
  mode = "score_from_dataset" if values.dataset else "score_from_strings"
  bindings = [f"run.mode = {mode!r}", f"{mode}.score_postprocess_fn = @save_scores"]
  if values.dataset:
    bindings.append(f"run.dataset_split = {values.split or 'validation'!r}")
  elif values.targets:
    bindings.append(f"score_from_strings.targets = {values.targets!r}")
    bindings.append(f"score_from_strings.inputs = {values.inputs!r}")
  return model_flags.of_trained_model(values, parser, *bindings)


SCORE = Command(
  "score",
  "how probable a trained model finds given texts",
  "Log-likelihoods, in nats, of the lines of a file, each perhaps after the line of another file; "
  "or of the targets of data sets. Without --output the first ones are shown.",
  (
    TRAINED_DIR,
    *CONFIG,
    Flag("--targets", "File of texts to score, one a line.", flags.file, "FILE"),
    Flag(
      "--inputs",
      "File of what stands before them (a language model), or what they are made of (an "
      "encoder-decoder).",
      flags.file,
      "FILE",
    ),
    Flag("--dataset", "Score the data sets of score_from_dataset.score_dataset_fn.", None),
    _SPLIT,
    Flag(
      "--output",
      "First part of the files' names: .scores, .targets, .lengths, .inputs.",
      flags.of_rule(PATH),
      "PREFIX",
      gin="save_scores.scores_filename",
    ),
    _CHECKPOINTS,
    *_of_run("score"),
    *FURTHER,
  ),
  _score,
  (
    ("score_from_strings.score_eos", "Whether the end of a target counts."),
    ("score_from_dataset.score_dataset_fn", "The data sets."),
    ("save_scores.save_example_text", "Whether texts are written, too."),
  ),
  (
    "score --model_dir=my_model --targets=lines.txt",
    "score --model_dir=my_model --inputs=source.en --targets=target.fr --output=scored",
  ),
)


def _export(values: argparse.Namespace, parser: Parser) -> list[str]:
  mode = "export_score" if values.scores else "export_infer"
  return model_flags.of_trained_model(values, parser, f"run.mode = {mode!r}")


EXPORT = Command(
  "export",
  "a SavedModel of a trained model",
  "Writes a SavedModel, which TensorFlow Serving and tf.saved_model.load run without this package: "
  "texts in, texts out, or with --scores texts in, log-likelihoods out.",
  (
    TRAINED_DIR,
    *CONFIG,
    *_of_run("export"),
    Flag("--scores", "Export what scores given targets.", None),
    Flag(
      "--checkpoint",
      "Which checkpoint: newest, best or a step.",
      flags.checkpoint(several=False),
      "STEP",
      gin="run.export_checkpoint_step",
    ),
    *FURTHER,
  ),
  _export,
  (("run.sequence_length", "Tokens of a row."),),
  (
    "export --model_dir=my_model --output=exported",
    "export --model_dir=my_model --output=scorer --scores --checkpoint=2000",
  ),
)


_LAST = 5  # As many as a training keeps by default.


def _average(values: argparse.Namespace, parser: Parser) -> list[str]:
  if not values.output:
    parser.error("--output=DIR is needed, the new folder for the average")
  bindings = [] if values.last is not None else [f"run.average_checkpoints = {_LAST}"]
  return model_flags.of_trained_model(values, parser, "run.mode = 'average'", *bindings)


AVERAGE = Command(
  "average",
  "the mean of the weights of the last checkpoints, as a model of its own",
  "Averages the weights of the last checkpoints of a training, which often makes a better model "
  "than the last one alone. It becomes a new folder, with the configuration and the vocabularies, "
  "which eval, infer, score and export take, and a training as --init_checkpoint. The training's "
  "own folder stays as it is.",
  (
    TRAINED_DIR,
    *CONFIG,
    Flag(
      "--output",
      "The folder of the average; it is made.",
      flags.of_rule(PATH),
      "DIR",
      gin="run.export_path",
    ),
    Flag(
      "--last",
      f"How many checkpoints, the last ones; by default {_LAST}.",
      flags.of_rule(at_least(2)),
      "N",
      gin="run.average_checkpoints",
    ),
    Flag(
      "--checkpoint",
      "The last one of them: newest, best or a step.",
      flags.checkpoint(several=False),
      "STEP",
      gin="run.export_checkpoint_step",
    ),
    *_of_run("average"),
    *FURTHER,
  ),
  _average,
  (
    ("run.use_ema", "Average the moving averages of the weights (run.ema_decay)."),
    ("run.keep_checkpoint_max", "How many a training keeps; it must be --last at least."),
  ),
  (
    "average --model_dir=my_model --output=averaged",
    "average --model_dir=my_model --output=averaged --last=10 --checkpoint=2000",
  ),
)


COMMANDS = {c.name: c for c in (INIT, TOKENIZE, TRAIN, PLAN, EVAL, INFER, SCORE, AVERAGE, EXPORT)}
