"""The command `tokenize`."""

from __future__ import annotations

import argparse

from mesh_settings.rules import BELOW_ONE, COUNT, PATH, one_of
from mesh_transformer_cli import flags
from mesh_transformer_cli.flags import Flag, of_rule
from mesh_transformer_cli.parser import Command, Parser

FLAGS = (
  Flag(
    "--text",
    "The text: a file, a folder, or a pattern in quotes; plain, JSON lines, tables, Parquet; "
    "compressed or not.",
    of_rule(PATH),
    "PATH",
    passed=True,
    repeated=True,
  ),
  Flag("--output", "The folder of tokens; it is made.", of_rule(PATH), "DIR", passed=True),
  Flag(
    "--vocabulary",
    "bytes, characters, sentencepiece:8000 (learned from the text), sentencepiece:FILE or "
    "tiktoken:FILE. It is kept in the folder.",
    metavar="NAME",
    passed=True,
  ),
  Flag(
    "--validation_fraction",
    "This part of the documents is held out.",
    of_rule(BELOW_ONE),
    "X",
    passed=True,
  ),
  Flag(
    "--format",
    "text, jsonl, csv, tsv or parquet; by default by the suffix.",
    of_rule(one_of(["auto", "text", "jsonl", "csv", "tsv", "parquet"])),
    "KIND",
    passed=True,
  ),
  Flag(
    "--document",
    "What a document is in files of text: file, paragraph or line.",
    of_rule(one_of(["auto", "file", "paragraph", "line"])),
    "UNIT",
    passed=True,
  ),
  Flag(
    "--separator",
    r"In place of --document: what stands between documents; \n in it is a newline.",
    flags.some_text,
    passed=True,
  ),
  Flag("--field", "The field of the text, in records.", metavar="NAME", passed=True),
  Flag("--encoding", "Of the files, if it is not UTF-8.", metavar="NAME", passed=True),
  Flag(
    "--processes",
    "How many encode; by default one for each processor.",
    of_rule(COUNT),
    "N",
    passed=True,
  ),
)


def _run(values: argparse.Namespace, parser: Parser) -> list[str]:
  for name, meaning in (
    ("text", "which text: a file, a folder or a pattern"),
    ("output", "where the tokens go: a folder"),
    ("vocabulary", "what makes tokens of it: bytes, characters, sentencepiece:8000, ..."),
  ):
    if not getattr(values, name):
      parser.error(f"--{name} is needed, which says {meaning}")
  if values.document and values.separator:
    parser.error("--document and --separator: give one of them")
  return [a for f in FLAGS for a in f.arguments(getattr(values, f.dest))]


TOKENIZE = Command(
  "tokenize",
  "token files of a text, made once: for texts that take long to encode",
  "Encodes the documents of a text into a folder, by several processes; what is interrupted goes "
  "on. Training reads them from there, with nothing to encode and nothing held in memory.",
  FLAGS,
  _run,
  (
    ("run.train_dataset_fn", "@dataset.own_tokens reads the folder."),
    ("own_tokens.path", "The folder."),
  ),
  (
    "tokenize --text=books --output=tokens --vocabulary=sentencepiece:16000",
    'tokenize --text="web/*.jsonl.zst" --output=tokens --vocabulary=bytes --field=body',
  ),
  program="mesh_tensorflow.transformer.commands.tokenize",
)
