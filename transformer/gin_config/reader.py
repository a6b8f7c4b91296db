"""Reads gin files ahead of gin: finds them, records all bindings, and checks every name."""

from __future__ import annotations

import ast
import bisect
import dataclasses
import importlib
import importlib.util
import io
import logging
import os
import re
import tokenize
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gin
import tensorflow as tf
from gin import config_parser

from mesh_settings import hints
from mesh_tensorflow import errors
from mesh_tensorflow.environment import untrusted_files
from mesh_tensorflow.errors import ConfigError, MeshError
from mesh_tensorflow.transformer.gin_config import bindings as gin_names
from mesh_tensorflow.transformer.gin_config.bindings import (
  MACRO,
  Macro,
  Place,
  Reference,
  Setting,
  Settings,
  UnknownNameError,
)
from mesh_transformer_cli import untrusted

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def gin_dir() -> str:
  """The folder that holds `defaults.gin`, `models/`, `layouts/` and the other gin files.

  A wheel has it inside the package (`mesh_tensorflow/transformer/gin`); an editable install uses
  the folder of the repository, which stands next to `transformer/`.

  Returns:
    An absolute path, made for `gin.add_config_file_search_path`.

  Raises:
    errors.ConfigError: `defaults.gin` is in neither place.
  """
  candidates = [os.path.join(_PACKAGE, "gin"), os.path.join(os.path.dirname(_PACKAGE), "gin")]
  for folder in candidates:
    if os.path.isfile(os.path.join(folder, "defaults.gin")):
      return folder
  raise errors.ConfigError(
    "the gin files of mesh_tensorflow are missing: no defaults.gin in "
    f"{candidates[0]} (installed wheel) nor in {candidates[1]} (editable install); "
    "reinstall the package"
  )


_OURS = "mesh_tensorflow.transformer.data.seqio_tasks"
_MODULE = "t5.models.mesh_transformer"
_HERE = (
  *("mesh_train_dataset_fn", "mesh_eval_dataset_fn", "mesh_inference_dataset_fn"),
  *("get_vocabulary", "tsv_dataset_fn"),
)
# Names that T5 itself does not read any more, and skips.
_DEPRECATED = frozenset(
  "configurable_vocabulary get_default_spm_path get_sentencepiece_model_path maybe_print_dataset "
  "num_parallel_calls SentencePieceVocabulary train_model Vocabulary".split()
)
# Its preprocessors for unsupervised training, which tasks of the package t5 use.
_PREPROCESSORS = frozenset(
  "denoise drop_noise_tokens drop_nonnoise_tokens iid_noise_mask noise_span_to_sentinel "
  "noise_span_to_unique_sentinel noise_token_to_random_token "
  "noise_token_to_random_token_or_sentinel noise_token_to_sentinel "
  "nonnoise_span_to_unique_sentinel permute_noise_tokens random_prefix_noise_mask "
  "random_spans_helper random_spans_noise_mask random_spans_targets_length "
  "random_spans_tokens_length reduce_concat_tokens regular_noise_mask select_random_chunk "
  "split_tokens split_tokens_to_inputs_length split_tokens_to_targets_length unsupervised".split()
)
_MODULES = frozenset(
  "mesh_transformer preprocessors sentencepiece_vocabulary t5 utils vocabularies".split()
)


def is_import_of_t5(module: str) -> bool:
  """True if a module belongs to the package t5."""
  return f"{module}.".startswith("t5.")


def import_t5(module: str) -> str | None:
  """Imports what stands for a module of t5: here, or in the package t5 if that is installed.

  Args:
    module: its name.

  Returns:
    None, or why there is nothing to import.
  """
  if f"{module}.".startswith("t5.models."):
    _load()
    return None
  if importlib.util.find_spec("t5") is None:
    return "the package t5 is not installed"
  try:
    importlib.import_module(module)
  except Exception as e:  # noqa: BLE001 - parts of it need TensorFlow 1.
    return f"{type(e).__name__}: {' '.join(str(e).split())}"
  return None


def register(selector: str) -> None:
  """Lets gin know the functions of `t5.models.mesh_transformer`, if a name is of one of them."""
  module, _, last = selector.rpartition(".")
  if last in _HERE and f".{_MODULE}".endswith(f".{module}" if module else ""):
    _load()


def is_left_out(selector: str) -> bool:
  """True if a name belongs to a part of T5 that this package leaves out."""
  module, _, last = selector.rpartition(".")
  if last not in _DEPRECATED | _PREPROCESSORS or gin_names.whole_selectors(selector):
    return False
  return not module or module.split(".")[0] == "t5" or module.split(".")[-1] in _MODULES


def _load() -> None:
  # T5's own may be there, loaded by somebody else.
  if not gin_names.whole_selectors(f"{_MODULE}.{_HERE[0]}"):
    importlib.import_module(_OURS)


PARAM = "--gin_param"
SET = "--set"
COMMAND_LINE = (PARAM, SET)

_LOG = logging.getLogger("mesh_tensorflow")

# A name that a file of the TF1 library (problems/lm1b.gin) has wrong, so that it did not parse.
_MISNAMED = (re.compile(r"\bdataset\.(?=get_tfds_vocabulary\b)"), "vocabulary.")


class TextDelegate(config_parser.ParserDelegate):  # type: ignore[misc] # gin has no types.
  """Gin parser delegate that returns references and macros unresolved, by name."""

  def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
    return Reference(scoped_configurable_name, evaluate)

  def macro(self, macro_name: str) -> Macro:
    return Macro(macro_name)


@dataclasses.dataclass(frozen=True)
class Binding:
  """A binding that gin is to be given.

  Attributes:
    key: scope, whole selector, argument.
    value: with `Reference`s and `Macro`s, by the names in the text.
  """

  key: tuple[str, str, str]
  value: Any

  def bind(self, skip_unknown: bool | Sequence[str]) -> None:
    """Binds it.

    Args:
      skip_unknown: see `gin_config.parse_gin_defaults_and_flags`.
    """
    delegate = gin.config.ParserDelegate(skip_unknown)

    def of_gin(value: object) -> Any:
      if isinstance(value, Reference):
        return delegate.configurable_reference(value.name, value.evaluate)
      return delegate.macro(value.name) if isinstance(value, Macro) else value

    gin.bind_parameter(self.key, gin_names.mapped(self.value, of_gin))


class NamedText(io.StringIO):
  """A text buffer with a file name, which gin parses like that file."""

  def __init__(self, text: str, name: str | None):
    super().__init__(text)
    self.name = name


class Reader:
  """Reads files and bindings in the order in which gin applies them.

  After reading, `settings` holds all bindings and `statements` what gin is to be given, in order.
  So gin neither searches for files nor parses them again, but for texts with dynamic registration,
  in which it alone knows what a name means.

  Args:
    folders: where to look for files; "" is the working folder.
    skip_unknown: see `gin_config.parse_gin_defaults_and_flags`.
  """

  def __init__(self, folders: Sequence[str], skip_unknown: bool | Sequence[str] = False):
    self.settings = Settings()
    self.statements: list[Binding | NamedText] = []
    self.paths: list[str] = []
    self.left_out: list[tuple[Place, str]] = []  # Settings of T5 that nothing here reads.
    self._folders = list(folders)
    self._skip_unknown = skip_unknown
    self._of_runs: set[str] = set()
    self._level = -1

  def read_file(self, name: str) -> None:
    """Reads a file that was given, with those that it includes.

    Raises:
      ConfigError: it is missing, or something in it is wrong.
    """
    self._level += 1
    self._read(self._find(name, hints.as_written("--gin_file")), ())

  def read_bindings(self, bindings: Sequence[str], given: Place | None = None) -> None:
    """Reads bindings as given by `--gin_param`, after all files.

    Args:
      bindings: the texts.
      given: what the bindings stand for, where somebody gave them in another form.
    """
    self._level += 1
    text = "\n".join(bindings)
    # All bindings are one text to gin: from a line of it the binding is found again.
    starts, line = [], 1
    for binding in bindings:
      starts.append(line)
      line += binding.count("\n") + 1

    def place(at: int) -> Place:
      if given is not None:
        return given
      i = max(0, min(bisect.bisect_right(starts, at), len(bindings)) - 1)
      return Place(PARAM, text=bindings[i].strip())

    shown = PARAM if given is None else given.source
    self._statements(text, shown, (shown,), place)

  def _read(self, path: str, around: tuple[str, ...]) -> None:
    shown = _shown(path)
    if shown in around:
      chain = " includes ".join((*around[around.index(shown) :], shown))
      raise ConfigError(f"gin: {chain}: a file cannot include itself")
    self.paths.append(path)
    try:
      text = untrusted_files.read_bytes(path).decode()
    except (OSError, ValueError, tf.errors.OpError) as e:
      raise ConfigError(f"gin file {path} cannot be read: {e}") from e
    if _is_operative_config(shown, text):
      self._of_runs.add(shown)
    self._statements(text, shown, (*around, shown), lambda at: Place(shown, at))

  def _statements(
    self, text: str, shown: str, files: tuple[str, ...], place: Callable[[int], Place]
  ) -> None:
    """Yields the statements of a file or of all `--gin_param`s."""
    text = _MISNAMED[0].sub(_MISNAMED[1], text)
    lines = list(io.StringIO(text))
    given_to_gin = 0
    dynamic = False
    imports: set[int] = set()

    def give_to_gin(until: int) -> None:
      """Gives the lines since the last call, if names in them are those of the text's imports."""
      if dynamic:
        # Empty lines in front keep the line numbers.
        before = [line if i in imports else "\n" for i, line in enumerate(lines[:given_to_gin])]
        part = "".join([*before, *lines[given_to_gin:until]])
        self.statements.append(NamedText(part, None if shown in COMMAND_LINE else shown))

    with _syntax_errors(place):
      parser = config_parser.ConfigParser(NamedText(text, shown), TextDelegate())
    while True:
      with _syntax_errors(place):
        statement = parser.parse_statement()
      if statement is None:
        break
      at = statement.location.line_num
      if untrusted.is_deep(getattr(statement, "value", None)):
        raise ConfigError(f"gin: {place(at)}: {_TOO_DEEP}")
      _check_text(statement, place(at))
      if isinstance(statement, config_parser.IncludeStatement):
        give_to_gin(at - 1)
        self._read(self._find(statement.filename, f"{place(at)} (include)"), files)
        given_to_gin = max(at, parser.current_token.start[0] - 1)
      elif isinstance(statement, config_parser.ImportStatement):
        if statement.module == "__gin__.dynamic_registration" and not dynamic:
          dynamic, given_to_gin = True, at - 1
        if is_import_of_t5(statement.module):
          self._import_t5(statement.module, place(at))
          lines[at - 1] = "\n"  # It is done; gin itself would look for T5.
        else:
          imports.add(at - 1)
          if self._import(statement, place(at)) and not dynamic:
            self.statements.append(NamedText(statement.format(), None))
      elif isinstance(statement, config_parser.BlockDeclaration):
        pass  # Its bindings follow, each with the name of the block.
      else:
        self._bind(statement, place(at), files, dynamic)
    give_to_gin(len(lines))

  def _bind(
    self,
    statement: config_parser.BindingStatement,
    place: Place,
    files: tuple[str, ...],
    dynamic: bool,
  ) -> None:
    """Records a binding, but for one of T5's that nothing here reads."""
    scope, selector, argument = statement.scope, statement.selector, statement.arg_name
    name = ".".join(part for part in (selector, argument) if part)
    name = f"{scope}/{name}" if scope else name
    if not argument:
      scope = f"{scope}/{selector}" if scope else selector
      selector, argument = MACRO
    register(selector)
    for reference in gin_names.parts_of(statement.value, Reference):
      register(reference.name.split("/")[-1])
    if self._is_left_out(selector, statement.value) and not dynamic:
      self.left_out.append((place, name))
      return
    try:
      selector = gin_names.resolve_binding(scope, selector, argument, place)
    except UnknownNameError as e:
      # With dynamic registration a name is registered when gin itself meets it.
      if dynamic or self._may_skip(selector):
        return
      raise ConfigError(str(e)) from None
    value = gin_names.mapped(statement.value, lambda v: self._resolved(v, place, dynamic))
    of_a_run = not self._of_runs.isdisjoint(files)
    self.settings.add(
      Setting(scope, selector, argument, value, place, self._level, files, name, of_a_run)
    )
    if not dynamic:
      self.statements.append(Binding((scope, selector, argument), statement.value))

  def _is_left_out(self, selector: str, value: object) -> bool:
    """True if a binding belongs to an omitted part of T5, or its value refers to one."""
    if self._skip_unknown is True:
      return False
    references = [r.name.split("/")[-1] for r in gin_names.parts_of(value, Reference)]
    return any(map(is_left_out, [selector, *references]))

  def _import_t5(self, module: str, place: Place) -> None:
    missing = import_t5(module)
    if missing:
      _LOG.warning("gin: %s: import of %s is left out: %s", place, module, missing)

  def _resolved(self, value: object, place: Place, dynamic: bool) -> Any:
    if not isinstance(value, Reference):
      return value
    try:
      return gin_names.resolve_reference(value, place)
    except UnknownNameError as e:
      if dynamic or self._may_skip(value.name.split("/")[-1]):
        return value
      raise ConfigError(str(e)) from None

  def _may_skip(self, selector: str) -> bool:
    if isinstance(self._skip_unknown, (list, tuple, set)):
      return selector in self._skip_unknown
    return bool(self._skip_unknown)

  def _import(self, statement: config_parser.ImportStatement, place: Place) -> bool:
    """Imports a module; returns False if there is nothing for gin to import."""
    if statement.module.startswith("__gin__."):
      return False
    try:
      importlib.import_module(statement.module)
    except ModuleNotFoundError as e:
      # The module itself is missing, or one that it needs.
      if self._skip_unknown:
        return False
      missing = e.name or statement.module
      what = f"there is no module {missing!r}"
      if missing != statement.module and not statement.module.startswith(f"{missing}."):
        what = f"{statement.module} needs the module {missing!r}, which is not installed"
      raise ConfigError(f"gin: {place}: {what}{_similar_modules(missing)}") from e
    except Exception as e:  # noqa: BLE001 - whatever the module raises.
      if not self._skip_unknown:
        kind = "" if isinstance(e, ImportError) else f"{type(e).__name__}: "
        raise ConfigError(
          f"gin: {place}: import of {statement.module} failed: {kind}{' '.join(str(e).split())}"
        ) from e
      return False
    return True

  def _find(self, name: str, asked_by: str) -> str:
    """The path of a file that is asked for by name."""
    path = self._path(name, asked_by, self._folders)
    if path is None:
      # Another library may have told gin of folders of its own.
      others = [f for f in _folders_of_gin() if f not in self._folders]
      path = self._path(name, asked_by, others)
      self._folders += others
    if path is None:
      raise self._not_found(name, asked_by)
    return path

  def _path(self, name: str, asked_by: str, folders: Sequence[str]) -> str | None:
    for folder in folders:
      path = os.path.join(folder, name)
      if tf.io.gfile.isdir(path):
        raise ConfigError(f"{asked_by} {name} is a folder; give one of the files in it")
      if tf.io.gfile.exists(path):
        return path
      if os.path.isabs(name) or "://" in name:
        return None
    return None

  def _not_found(self, name: str, asked_by: str) -> ConfigError:
    known = sorted(
      os.path.relpath(os.path.join(d, f), gin_dir()).replace(os.sep, "/")
      for d, _, names in os.walk(gin_dir())
      for f in names
      if f.endswith(".gin")
    )
    close = [k for k in known if os.path.basename(k) == os.path.basename(name)]
    hint = hints.hint(close) or hints.did_you_mean(name, known)
    looked = ", ".join(f or "the working folder" for f in dict.fromkeys(self._folders))
    if os.path.isabs(name) or "://" in name:
      looked = os.path.dirname(name)
    return ConfigError(f"{asked_by}: gin file {name!r} was not found in {looked}{hint}")


def _is_operative_config(name: str, text: str) -> bool:
  """True if a file is an operative config that gin has written, by its name or its headings."""
  return os.path.basename(name).startswith("operative_config") or (
    "# Parameters for " in text and f"# {'=' * 40}" in text
  )


def _check_text(statement: Any, place: Place) -> None:
  """Raises for unpaired UTF-16 surrogates in texts and file names of a statement."""
  told = [getattr(statement, "filename", None), getattr(statement, "value", None)]
  for text in gin_names.parts_of(told, str):
    if any("\ud800" <= c <= "\udfff" for c in text):
      raise ConfigError(
        f"gin: {place}: {gin_names.short(text)} has half a pair of UTF-16 by itself (such as"
        " \\ud800), which is no text"
      )


_TOO_DEEP = f"brackets are more than {untrusted.DEEPEST} deep within each other"


class _syntax_errors:
  """Turns the parser's errors into `ConfigError`s with their place."""

  def __init__(self, place: Callable[[int], Place]):
    self._place = place

  def __enter__(self) -> None:
    return None

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: types.TracebackType | None,
  ) -> Literal[False]:
    if isinstance(error, SyntaxError):
      text, line, content = error.msg, error.lineno or 1, (error.text or "").strip()
    elif isinstance(error, tokenize.TokenError):
      text, (line, *_) = error.args
      content = "a bracket or a string is not closed" if "EOF" in text else ""
    elif isinstance(error, (RecursionError, MemoryError)):
      raise ConfigError(f"gin: {self._place(1)}: {_TOO_DEEP}") from None
    elif isinstance(error, (ValueError, OverflowError)) and not isinstance(error, MeshError):
      raise ConfigError(f"gin: {self._place(1)}: no value of gin can be read: {error}") from error
    else:
      return False
    # Gin's value parser names the token; a word alone is a string without its quotes, mostly.
    token = re.search(r"Failed to parse token '(.*)'", text)
    if token and token.group(1).isidentifier():
      content += f" (a text is written in quotes: '{token.group(1)}')"
    text = " ".join(text.split("\n")[-1].split()) if token else " ".join(text.split())
    raise ConfigError(f"gin: {self._place(line)}: {text.rstrip('.')}: {content}") from error


def _shown(path: str) -> str:
  """Display form of a path; the package's own gin files are relative to its gin folder."""
  ours = os.path.join(gin_dir(), "")
  if os.path.abspath(path).startswith(ours) and "://" not in path:
    return os.path.relpath(path, ours).replace(os.sep, "/")
  if not os.path.isabs(path) and os.path.exists(os.path.join(gin_dir(), path)):
    return os.path.join(".", path)
  return path


def _folders_of_gin() -> list[str]:
  """The folders that gin searches, taken from its error about a missing file."""
  root = logging.getLogger()
  root.addFilter(_is_no_search_message)
  try:
    gin.parse_config_file("no such folder/no such file.gin")
  except OSError as e:
    told = re.search(r"Searched config paths: (\[.*\])", str(e))
    return ast.literal_eval(told.group(1)) if told else []
  finally:
    root.removeFilter(_is_no_search_message)
  return []


def _is_no_search_message(record: logging.LogRecord) -> bool:
  """Log filter: drops gin's errors about each searched folder that lacks a file."""
  return not str(record.msg).startswith(("Path not found", "system_path_file_exists"))


def _similar_modules(name: str) -> str:
  """Modules beside a missing one whose names resemble it."""
  folder, _, last = name.rpartition(".")
  try:
    paths = list(getattr(importlib.import_module(folder), "__path__", [])) if folder else []
  except ImportError:
    return ""
  found = [f.removesuffix(".py") for p in paths if os.path.isdir(p) for f in os.listdir(p)]
  hint = gin_names.did_you_mean(last, found)
  return hint.replace("did you mean ", f"did you mean {folder}.") if hint else ""
