"""The command `mesh-tensorflow-port`: brings a program of the TF1 library to this one.

What can be rewritten without knowing what the program means is rewritten: variable scopes,
ModeKeys, dropout of release 0.1.18, imports of Estimator, the global step, calls that switch
TensorFlow 2 off. The rest is listed with its line and what takes its place, as in docs/porting.md.
The source is read as text and syntax tree; nothing of it, and no TensorFlow, is imported or run.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence

from mesh_transformer_cli import output

_WRONG = 2
_GUIDE = "docs/porting.md"

_MODES = {"TRAIN": "train", "EVAL": "eval", "PREDICT": "infer"}

# Statements that go: a program of TensorFlow 2 does not need them.
_DROPPED = {
  "tf.disable_v2_behavior",
  "tf.disable_eager_execution",
  "tf.enable_resource_variables",
  "tf.enable_v2_behavior",
  "tf.enable_eager_execution",
}

# Names of TensorFlow that are the same in TensorFlow 2: tf.compat.v1 is not needed for them.
_IN_BOTH = re.compile(
  r"tf\.(bool|b?float(16|32|64)|u?int(8|16|32|64)|string|complex(64|128)|DType|TensorShape|Tensor|as_dtype|cast|concat"
  r"|stack|unstack|reshape|transpose|identity|zeros|ones|zeros_like|ones_like|fill|constant|range|eye|tile|pad|gather"
  r"|equal|not_equal|less|greater|less_equal|greater_equal|logical_(and|or|not)|maximum|minimum|abs|square|sqrt|exp"
  r"|tanh|sin|cos|sigmoid|sign|round|pow|add|subtract|multiply|add_n|matmul|einsum|expand_dims|where|group|no_op"
  r"|control_dependencies|stop_gradient|convert_to_tensor|is_tensor|nest(\.\w+)*|math\.\w+|linalg\.\w+|signal\.\w+"
  r"|io\.gfile\.\w+|io\.decode_raw|data\.Dataset\.\w+|data\.Dataset|data\.TFRecordDataset|errors\.\w+|strings\.\w+"
  r"|distribute\.\w+|function|TensorSpec|name_scope)"
)

# Dotted name -> what to write instead; the longest beginning of a name counts.
_LISTED = {
  "tf.Session": "call a tf.function or an mtf.function; there are no sessions",
  "tf.InteractiveSession": "call a tf.function or an mtf.function; there are no sessions",
  "tf.placeholder": "an argument of the function: input_signature=[mtf.TensorSpec([...])]",
  "tf.global_variables_initializer": "nothing: the first lowering, or create_variables() of an "
  "mtf.function, makes the variables",
  "tf.local_variables_initializer": "nothing: there are no local variables",
  "tf.global_variables": "impl.variable_store.variables, or graph.all_variables",
  "tf.trainable_variables": "impl.variable_store.trainable_variables, or graph.trainable_variables",
  "tf.get_variable": "mtf.get_variable(mesh, name, shape); outside of the mesh a tf.Variable",
  "tf.get_collection": "there are no collections",
  "tf.add_to_collection": "there are no collections; scalars: mtf.scalar_summary(name, x)",
  "tf.train.Saver": "mesh_tensorflow.checkpoint.Checkpointer(dir, impl.variable_store): "
  "save(step), restore_or_none()",
  "tf.train.Scaffold": "a Python loop around the step",
  "tf.train.MonitoredTrainingSession": "a Python loop around the step, with a Checkpointer",
  "tf.train.CheckpointSaverHook": "Checkpointer.save(step) in the loop",
  "tf.train.SessionRunHook": "what it did, written into the loop",
  "tf.train.init_from_checkpoint": "Checkpointer.restore(path, ignore_missing=True)",
  "tf.train.get_global_step": "mtf.optimize.get_global_step(mesh) inside of the program",
  "tf.train.get_or_create_global_step": "mtf.optimize.get_global_step(mesh) inside of the program",
  "tf.train.create_global_step": "nothing: mtf.optimize.get_global_step(mesh) makes it",
  "tf.assign_add": "of the global step: mtf.optimize.count_global_step(graph), before the lowering "
  "(minimize counts it by itself); of others: mtf.assign_add, or variable.assign_add",
  "tf.assign": "mtf.assign(variable, value), or variable.assign(value)",
  "tf.train.exponential_decay": "tf.keras.optimizers.schedules.ExponentialDecay; in the program: "
  "mtf.cwise(schedule, [mtf.to_float(mtf.optimize.get_global_step(mesh))])",
  "tf.train.cosine_decay": "tf.keras.optimizers.schedules.CosineDecay; in the program: "
  "mtf.cwise(schedule, [mtf.to_float(mtf.optimize.get_global_step(mesh))])",
  "tf.train.polynomial_decay": "tf.keras.optimizers.schedules.PolynomialDecay; in the program: "
  "mtf.cwise(schedule, [mtf.to_float(mtf.optimize.get_global_step(mesh))])",
  "tf.estimator": "a Python loop around an mtf.function, with a Checkpointer",
  "tf.metrics": "tf.keras.metrics, on what the step returns",
  "tf.summary": "tf.summary of TensorFlow 2, on what the step returns; inside mtf.scalar_summary",
  "tf.logging": "Python's logging",
  "tf.gfile": "tf.io.gfile, whose names are small and have underscores (exists, listdir, makedirs)",
  "tf.flags": "absl.flags",
  "tf.app": "absl.app",
  "tf.contrib": "gone from TensorFlow; what it is for decides what takes its place",
  "tf.to_float": "tf.cast(x, tf.float32)",
  "tf.to_int32": "tf.cast(x, tf.int32)",
  "tf.Print": "tf.print",
  "tf.variable_scope": "mtf.variable_scope",
  "mtf.MtfRestoreHook": "Checkpointer.restore_or_none() before the loop",
  "mtf.MtfCheckpointSaverListener": "Checkpointer.save(step) in the loop",
  "mtf.utils.create_host_call": "return the scalars of the step, and write them with tf.summary",
  "mtf.utils.BalancedVariablePlacer": "nothing: slices live on their own devices",
  "mtf.tf_estimator": "a Python loop around an mtf.function, with a Checkpointer",
  "mtf.tf": "import tensorflow as tf",
  "mtf.six": "Python 3's own names",
  "mtf.xrange": "range",
  "mtf.np": "import numpy as np",
}
_METHODS = {
  "make_one_shot_iterator": "iterate over the dataset in the loop",
  "make_initializable_iterator": "iterate over the dataset in the loop",
  "copy_masters_to_slices": "nothing: slices are the only copy (the call is there and harmless)",
  "copy_slices_to_masters": "nothing: slices are the only copy (the call is there and harmless)",
}
# Modules of which `estimator`, or `v1`, may be imported.
_WITH_ESTIMATOR = (
  "tensorflow",
  "tensorflow.compat",
  "tensorflow.compat.v1",
  "tensorflow_estimator",
)
_OLD_IMPORTS = re.compile(
  r"(tensorflow\.python|tensorflow_estimator|tensorflow\.contrib|tensorflow\.compat\.v1\.)"
)


@dataclasses.dataclass(frozen=True, order=True)
class Note:
  """Something that a person must look at.

  Attributes:
    line: in the rewritten program.
    what: the name or call that stands there.
    advice: the replacement to use.
  """

  line: int
  what: str
  advice: str


@dataclasses.dataclass(frozen=True)
class Ported:
  """A program after the rewriting.

  Attributes:
    text: its source.
    changes: number of rewritten places.
    notes: notes on what is left to do, by line.
  """

  text: str
  changes: int
  notes: tuple[Note, ...]


def port(source: str) -> Ported:
  """Rewrites a program of the TF1 library.

  Args:
    source: its text.

  Raises:
    SyntaxError: it is not Python 3.
  """
  return _Program(source).ported()


class _Program:
  """The rewriting of one program.

  Args:
    source: its text.
  """

  def __init__(self, source: str):
    self._source = source.encode("utf-8")
    self._tree = ast.parse(source)
    lines = self._source.splitlines(keepends=True)
    self._starts = [0]
    for line in lines:
      self._starts.append(self._starts[-1] + len(line))
    self._edits: list[tuple[int, int, bytes]] = []
    self._notes: list[Note] = []
    self._aliases: dict[str, str] = {}
    self._handled: set[int] = set()  # `id`s of nodes that were rewritten or listed as a whole.
    self._find_aliases()

  def ported(self) -> Ported:
    if "mtf" in self._aliases.values() or self._imports("mesh_tensorflow"):
      self._imports_of_estimator()
      self._walk(self._tree, ())
      self._compat_imports()
    text, end = b"", 0
    for start, stop, new in sorted(self._edits):
      text += self._source[end:start] + new
      end = stop
    text += self._source[end:]
    notes = {dataclasses.replace(n, line=self._new_line(n.line)) for n in self._notes}
    return Ported(text.decode("utf-8"), len(self._edits), tuple(sorted(notes)))

  def _new_line(self, line: int) -> int:
    """The number of a line after the edits."""
    before = [e for e in self._edits if e[1] <= self._starts[line - 1]]
    return line + sum(
      new.count(b"\n") - self._source[start:stop].count(b"\n") for start, stop, new in before
    )

  # ------------------------------------------------------------------------ names

  def _find_aliases(self) -> None:
    """Records the names under which the program imports TensorFlow and the library."""
    for node in ast.walk(self._tree):
      if isinstance(node, ast.Import):
        for a in node.names:
          if a.name in ("tensorflow", "tensorflow.compat.v1", "tensorflow.compat.v2"):
            self._aliases[a.asname or "tensorflow"] = "tf"
          elif a.name == "mesh_tensorflow":
            self._aliases[a.asname or a.name] = "mtf"
      elif isinstance(node, ast.ImportFrom) and node.module in _WITH_ESTIMATOR:
        for a in node.names:
          if a.name in ("v1", "estimator"):
            self._aliases[a.asname or a.name] = "tf" if a.name == "v1" else "tf.estimator"

  def _imports(self, package: str) -> ast.stmt | None:
    for node in ast.walk(self._tree):
      names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
      if isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
      if any(n.split(".")[0] == package for n in names):
        assert isinstance(node, ast.stmt)
        return node
    return None

  def _dotted(self, node: ast.AST) -> str:
    """The name of an attribute of TensorFlow or of the library; "" for all else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
      parts.append(node.attr)
      node = node.value
    if not isinstance(node, ast.Name) or node.id not in self._aliases:
      return ""
    name = ".".join([self._aliases[node.id], *reversed(parts)])
    return name.replace("tf.compat.v1.", "tf.")

  def _mtf(self) -> str:
    """The program's name for the library, which it gets if it has none."""
    for name, package in self._aliases.items():
      if package == "mtf":
        return name
    first = self._imports("mesh_tensorflow")
    assert first is not None
    start = self._starts[first.lineno - 1]
    self._edits.append((start, start, b"import mesh_tensorflow as mtf\n"))
    self._aliases["mtf"] = "mtf"
    return "mtf"

  # ------------------------------------------------------------------------ edits

  def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = self._starts[node.lineno - 1] + node.col_offset
    return start, self._starts[node.end_lineno - 1] + node.end_col_offset

  def _replace(self, node: ast.expr | ast.stmt, text: str) -> None:
    self._edits.append((*self._span(node), text.encode("utf-8")))
    self._handled.update(id(n) for n in ast.walk(node))

  def _remove_line(self, node: ast.stmt, only: bool) -> None:
    """Removes a statement; one that is alone in its block becomes `pass`."""
    if only:
      self._replace(node, "pass")
      return
    start, stop = self._span(node)
    line = self._starts[node.lineno - 1]
    end = self._source.find(b"\n", stop)
    end = len(self._source) if end < 0 else end + 1
    rest = self._source[stop:end].strip()
    if self._source[line:start].strip() or rest and not rest.startswith(b"#"):
      self._replace(node, "None")  # Another statement stands on the line.
      return
    self._edits.append((line, end, b""))
    self._handled.update(id(n) for n in ast.walk(node))

  def _note(self, node: ast.AST, what: str, advice: str) -> None:
    self._notes.append(Note(getattr(node, "lineno", 1), what, advice))

  # ------------------------------------------------------------------------ the walk

  def _walk(self, node: ast.AST, meshes: tuple[str, ...]) -> None:
    """Rewrites and lists what is below a node.

    Args:
      node: of the syntax tree.
      meshes: names of meshes that are known there, the innermost last.
    """
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      meshes = (*meshes, *_meshes_of(node))
    if isinstance(node, ast.Call):
      self._call(node, meshes)
    if isinstance(node, ast.Attribute) and id(node) not in self._handled:
      self._attribute(node)
    for child in ast.iter_child_nodes(node):
      only = False
      if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
        if self._dotted(child.value.func) in _DROPPED:
          block = next(b for b in _blocks(node) if any(s is child for s in b))
          only = len(block) == 1 and not isinstance(node, ast.Module)
          self._remove_line(child, only)
          continue
      self._walk(child, meshes)

  def _call(self, node: ast.Call, meshes: tuple[str, ...]) -> None:
    name = self._dotted(node.func)
    if name in ("tf.variable_scope", "tf.get_variable_scope"):
      self._replace(node.func, f"{self._mtf()}.{name.removeprefix('tf.')}")
      self._scope_arguments(node)
    elif name == "mtf.dropout":
      self._dropout(node)
    elif name in ("tf.train.get_global_step", "tf.train.get_or_create_global_step") and meshes:
      self._replace(node, f"{self._mtf()}.optimize.get_global_step({meshes[-1]})")
      self._note(
        node,
        name,
        f"is now the mtf.Tensor mtf.optimize.get_global_step({meshes[-1]}), the step before this "
        "one: functions of TensorFlow are applied to it by mtf.cwise(fn, [mtf.to_float(step)])",
      )

  def _scope_arguments(self, node: ast.Call) -> None:
    for keyword in node.keywords:
      if keyword.arg == "reuse" and self._dotted(keyword.value) == "tf.AUTO_REUSE":
        self._replace(keyword.value, "None")
      elif keyword.arg in ("initializer", "regularizer", "partitioner", "caching_device", "dtype"):
        self._note(
          node,
          f"variable_scope({keyword.arg}=)",
          "give it to the layers or to mtf.get_variable: mtf.variable_scope takes a name and reuse",
        )

  def _dropout(self, node: ast.Call) -> None:
    """Gives a dropout of release 0.1.18 its is_training; it always dropped."""
    named = {k.arg for k in node.keywords}
    if (
      "is_training" in named or None in named or any(isinstance(a, ast.Starred) for a in node.args)
    ):
      return
    if len(node.args) >= 2 and not _is_number(node.args[1]):
      return  # A flag, as in later releases.
    for argument, name in zip(node.args[1:], ("keep_prob", "rate", "noise_shape", "name")):
      start, _ = self._span(argument)
      self._edits.append((start, start, f"{name}=".encode()))
    if not node.args:
      return
    _, stop = self._span(node.args[0])
    self._edits.append((stop, stop, b", is_training=True"))
    self._note(
      node,
      "mtf.dropout",
      "release 0.1.18 always dropped: in place of is_training=True give whether the program trains",
    )

  def _attribute(self, node: ast.Attribute) -> None:
    name = self._dotted(node)
    mode = re.fullmatch(r"(?:tf|mtf\.tf_)\.?estimator\.ModeKeys\.(\w+)", name)
    if mode and mode[1] in _MODES:
      self._replace(node, f'"{_MODES[mode[1]]}"')
      return
    if name == "tf.AUTO_REUSE":
      self._replace(node, "None")
      return
    for end in range(name.count(".") + 1, 0, -1):
      beginning = ".".join(name.split(".")[: end + 1])
      if beginning in _LISTED:
        self._note(node, name, _LISTED[beginning])
        self._handled.update(id(n) for n in ast.walk(node))
        return
    if not name and node.attr in _METHODS:
      self._note(node, f".{node.attr}", _METHODS[node.attr])

  # ------------------------------------------------------------------------ imports

  def _imports_of_estimator(self) -> None:
    """Imports of what is gone: removed where only ModeKeys were used, and listed else."""
    for parent in ast.walk(self._tree):
      for block in _blocks(parent):
        for node in block:
          if isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}."]
          elif isinstance(node, ast.Import):
            modules = [f"{a.name}." for a in node.names if a.name != "tensorflow.compat.v1"]
          else:
            continue
          gone = [m for m in modules if _OLD_IMPORTS.match(m)]
          if not gone and not _imports_estimator(node):
            continue
          names = {a.asname or a.name.split(".")[0] for a in node.names}
          used = [n for n in ast.walk(self._tree) if isinstance(n, ast.Name) and n.id in names]
          if _imports_estimator(node) and all(self._only_modes(n) for n in used):
            self._remove_line(node, only=len(block) == 1 and not isinstance(parent, ast.Module))
          else:
            what = ast.unparse(node)
            self._note(
              node, what, "is private to TensorFlow or gone from it; write with its public API"
            )

  def _only_modes(self, name: ast.Name) -> bool:
    """True if a name of the estimator module is used as in `name.ModeKeys.TRAIN`: now a string."""
    for node in ast.walk(self._tree):
      if isinstance(node, ast.Attribute) and node.attr in _MODES:
        if isinstance(node.value, ast.Attribute) and node.value.value is name:
          return node.value.attr == "ModeKeys"
    return False

  def _compat_imports(self) -> None:
    """tensorflow.compat.v1 becomes tensorflow where no name is used that only the one has."""
    used = {}
    for node in ast.walk(self._tree):
      if (
        isinstance(node, ast.Attribute) and id(node) not in self._handled or _is_listed(node, self)
      ):
        name = self._dotted(node)
        if name.startswith("tf.") and not _IN_BOTH.fullmatch(name):
          used[name] = node
    # For tf.a.b both tf.a and tf.a.b were found; only the full names count.
    left = [n for n in used if not any(m.startswith(f"{n}.") for m in used)]
    left = [n for n in left if not any(_IN_BOTH.fullmatch(m) for m in self._longer(n))]
    for node in ast.walk(self._tree):
      compat = None
      if isinstance(node, ast.Import) and len(node.names) == 1:
        if node.names[0].name == "tensorflow.compat.v1":
          compat = node.names[0].asname
      elif isinstance(node, ast.ImportFrom) and node.module == "tensorflow.compat":
        if len(node.names) == 1 and node.names[0].name == "v1":
          compat = node.names[0].asname or "v1"
      if compat is None:
        continue
      assert isinstance(node, ast.stmt)
      if not left:
        self._replace(node, f"import tensorflow as {compat}")
      else:
        shown = ", ".join(sorted(left)[:5]) + (", ..." if len(left) > 5 else "")
        self._note(
          node,
          "tensorflow.compat.v1",
          f"stays while these are used: {shown}; TensorFlow's own script tf_upgrade_v2 renames "
          "what it can",
        )

  def _longer(self, name: str) -> set[str]:
    """Names of the program that begin with a name, as tf.math.log with tf.math."""
    names = {self._dotted(n) for n in ast.walk(self._tree) if isinstance(n, ast.Attribute)}
    return {n for n in names if n.startswith(f"{name}.")}


def _is_listed(node: ast.AST, program: _Program) -> bool:
  """True if a name is in the list of notes, so is still in the program and not rewritten."""
  if not isinstance(node, ast.Attribute):
    return False
  name = program._dotted(node)
  return any(n.what == name for n in program._notes) and "global_step" not in name


def _imports_estimator(node: ast.stmt) -> bool:
  if isinstance(node, ast.ImportFrom):
    return (node.module or "").split(".")[0] == "tensorflow_estimator" or (
      node.module in ("tensorflow", "tensorflow.compat.v1")
      and [a.name for a in node.names] == ["estimator"]
    )
  return isinstance(node, ast.Import) and node.names[0].name in (
    "tensorflow_estimator",
    "tensorflow.estimator",
    "tensorflow.compat.v1.estimator",
  )


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
  """The lists of statements of a node: body, else, finally, and so on."""
  for _, value in ast.iter_fields(node):
    if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
      yield value


def _meshes_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
  """Names of meshes in a function: its parameters `mesh`, and what mtf.Mesh(...) is assigned to."""
  arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
  names = [a.arg for a in arguments if a.arg == "mesh"]
  for node in ast.walk(function):
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
      if isinstance(node.value.func, ast.Attribute) and node.value.func.attr == "Mesh":
        names += [t.id for t in node.targets if isinstance(t, ast.Name)]
  return names


def _is_number(node: ast.expr) -> bool:
  """True if an argument looks like a probability (or None for one) rather than a flag."""
  if isinstance(node, ast.Constant):
    return (
      node.value is None or isinstance(node.value, (int, float)) and node.value not in (True, False)
    )
  if isinstance(node, ast.BinOp):
    return True
  name = getattr(node, "attr", getattr(node, "id", ""))
  return bool(re.search(r"keep|prob|rate", name))


# ---------------------------------------------------------------------------- the command


def _files(paths: Sequence[str]) -> list[pathlib.Path]:
  found: list[pathlib.Path] = []
  for text in paths:
    path = pathlib.Path(text)
    if path.is_dir():
      found += sorted(path.rglob("*.py"))
    elif path.is_file():
      found.append(path)
    else:
      _refuse(f"there is no file or folder {text}")
  if not found:
    _refuse(f"there is no Python file in {', '.join(paths)}")
  return found


def _refuse(reason: str) -> None:
  print(f"mesh-tensorflow-port: {reason}", file=sys.stderr)
  sys.exit(_WRONG)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    "mesh-tensorflow-port",
    description="Rewrites what is mechanical in programs of the TF1 library mesh_tensorflow "
    "(variable scopes, ModeKeys, dropout of 0.1.18, imports of Estimator, the global step), and "
    "lists the rest with lines and what takes its place. Without --write differences are printed.",
  )
  parser.add_argument("paths", nargs="+", metavar="FILE", help="programs, or folders of them")
  parser.add_argument("--write", action="store_true", help="change the files")
  return parser


def main(argv: Sequence[str] | None = None) -> None:
  """The entry point."""
  with output.until_its_reader_ends():
    _port(_parser().parse_args(argv))


def _port(args: argparse.Namespace) -> None:
  changes = left = 0
  for path in _files(args.paths):
    try:
      with tokenize.open(path) as file:
        source = file.read()
      result = port(source)
    except (SyntaxError, UnicodeDecodeError, ValueError) as e:
      line = getattr(e, "lineno", None)
      where = path if line is None else f"{path}:{line}"
      print(f"{where}: not Python 3: {getattr(e, 'msg', e)}; run 2to3 first", file=sys.stderr)
      left += 1
      continue
    changes += result.changes
    left += len(result.notes)
    if result.text != source and not args.write:
      lines = difflib.unified_diff(
        source.splitlines(keepends=True),
        result.text.splitlines(keepends=True),
        str(path),
        f"{path} (ported)",
      )
      print("".join(lines), end="")
    elif result.text != source:
      path.write_text(result.text, encoding="utf-8")
    for note in result.notes:
      print(f"{path}:{note.line}: {note.what}: {note.advice}")
  done = "rewritten" if args.write else "to be rewritten (--write does it)"
  print(f"{changes} places {done}, {left} to look at; {_GUIDE} explains each")


if __name__ == "__main__":
  main()
