"""Random functions of 3 to 12 operations, imported on random layouts, beside TensorFlow.

`python -m tests.importing.random_functions --programs=500 --seed=3` prints how many gave the right
values and gradients, which gave wrong ones, and which ended in an error; `--only=17` runs program
17 of the seed, and says at which operation it goes wrong.

Each program is computed by TensorFlow on one device three times: as it is, and twice with noise of
a few units in the last place on the result of each operation. What the noise changes is what the
mesh may change, too; where it changes much (a maximum of two equal values, a matrix next to a
singular one), the program is left out.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.environment.virtual_devices import virtual_cpu_devices
from tests.importing import comparing, layouts
from tests.importing.random_operations import OPERATIONS, Draw, Unfit

MESHES = [
  "r:1", "r:2", "r:2", "r:3", "r:4", "r:2,c:2", "r:2,c:2", "r:2,c:4", "r:4,c:2", "r:6", "r:8",
  "r:2,c:2,s:2", "r:2,c:2,s:2", "r:2,c:3", "r:1,c:4",
]  # fmt: skip
SIZES = [1, 2, 2, 3, 4, 4, 4, 6, 8]
_LARGEST, _MOST_ELEMENTS, _NOISE = 50.0, 4096, 1e-6
# Seconds that a program may take.
_TIME_LIMIT = 180


@dataclasses.dataclass(frozen=True)
class Step:
  """An operation of a program.

  Attributes:
    name: in `OPERATIONS`.
    operands: numbers of values.
    run: the operation.
  """

  name: str
  operands: Sequence[int]
  run: Callable[..., Any]

  def __call__(self, values: Sequence[Any]) -> list[Any]:
    made = self.run(*[values[i] for i in self.operands])
    return list(made) if isinstance(made, (tuple, list)) else [made]


@dataclasses.dataclass
class Program:
  """A function of tensors.

  Attributes:
    arguments: their values.
    steps: its operations.
    variables: what it reads besides.
    outputs: the numbers of the values that it returns.
  """

  arguments: list[np.ndarray]
  steps: list[Step]
  variables: list[Any]
  outputs: list[int]

  def __call__(self, *xs: Any, noise: np.random.Generator | None = None) -> list[Any]:
    values = [_noisy(x, noise) for x in xs]
    for step in self.steps:
      values += [_noisy(y, noise) for y in step(values)]
    return [values[i] for i in self.outputs]

  def first(self, count: int) -> Program:
    """The first operations, which return what the last of them makes."""
    values = [tf.constant(x) for x in self.arguments]
    for step in self.steps[:count]:
      made = step(values)
      values += made
    outputs = list(range(len(values) - len(made), len(values)))
    return Program(self.arguments, self.steps[:count], self.variables, outputs)

  def __str__(self) -> str:
    values = [tf.constant(x) for x in self.arguments]
    lines = [f"  {i}: argument {list(v.shape)} {v.dtype.name}" for i, v in enumerate(values)]
    for step in self.steps:
      made = step(values)
      numbers = ", ".join(str(len(values) + k) for k in range(len(made)))
      values += made
      shapes = ", ".join(f"{list(y.shape)} {y.dtype.name}" for y in made)
      lines.append(f"  {numbers}: {step.name} of {list(step.operands)}: {shapes}")
    return "\n".join([*lines, f"  returns {self.outputs}"])


def _noisy(x: Any, noise: np.random.Generator | None) -> Any:
  if noise is None or x.dtype != tf.float32:
    return x
  return x * (1 + _NOISE * noise.normal(size=x.shape)).astype(np.float32)


def draw_program(seed: int, number: int) -> Program:
  """A program; the same for the same numbers."""
  rng = np.random.default_rng([seed, number])
  rank = lambda: int(rng.choice([1, 2, 2, 3, 3, 4, 4]))  # noqa: E731
  arguments = [
    rng.normal(size=[int(rng.choice(SIZES)) for _ in range(rank())]).astype(np.float32)
    for _ in range(rng.integers(1, 3))
  ]
  if rng.random() < 0.4:
    shape = [int(rng.choice(SIZES)) for _ in range(rng.integers(1, 3))]
    arguments.append(rng.integers(0, 5, shape).astype(np.int32))
  values: list[Any] = [tf.constant(x) for x in arguments]
  steps: list[Step] = []
  variables: list[Any] = []
  wanted = int(rng.integers(3, 13))
  names = list(OPERATIONS)
  for _ in range(wanted * 8):
    if len(steps) == wanted:
      break
    name = names[int(rng.integers(len(names)))]
    draw = Draw(rng, values, [])
    try:
      operands, run = OPERATIONS[name](draw)
    except Unfit:
      continue
    step = Step(name, operands, run)
    if (made := _tried(step, values)) is not None:
      steps.append(step)
      values += made
      variables += draw.variables
  used = {i for step in steps for i in step.operands}
  unused = [i for i in range(len(arguments), len(values)) if i not in used]
  outputs = unused[-3:] or [len(values) - 1]
  return Program(arguments, steps, variables, outputs)


def _tried(step: Step, values: Sequence[Any]) -> list[Any] | None:
  """What an operation gives; None if TensorFlow refuses it, or if it is of no use here."""
  try:
    with tf.GradientTape() as tape:
      floating = [v for v in values if v.dtype == tf.float32]
      tape.watch(floating)
      made = step(values)
      ys = [y for y in made if y.dtype == tf.float32]
      loss = [tf.reduce_sum(y * y) for y in ys]
    tape.gradient(loss, floating, unconnected_gradients=tf.UnconnectedGradients.ZERO)
  except Exception:  # noqa: BLE001 - whatever TensorFlow says
    return None
  for y in made:
    if y.dtype not in (tf.float32, tf.int32, tf.bool) or tf.size(y) > _MOST_ELEMENTS:
      return None
    if not 0 < tf.size(y) or len(y.shape) > 5:
      return None
    if y.dtype == tf.float32 and not tf.reduce_max(tf.abs(y)) < _LARGEST:  # NaN, too.
      return None
  return made


class Left(Exception):
  """Not a program to compare: ill-conditioned, or without a gradient in TensorFlow."""


def expected_of(program: Program) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Results and gradients by TensorFlow, and how far they may be away."""
  args, variables = program.arguments, program.variables
  try:
    expected = comparing.original(program, args, variables)
    rng = np.random.default_rng(0)
    noisy = [
      comparing.original(lambda *xs: program(*xs, noise=rng), args, variables) for _ in range(2)
    ]
  except Exception as e:  # noqa: BLE001 - whatever TensorFlow says
    raise Left(f"TensorFlow: {type(e).__name__}") from e
  tolerances = []
  for k, e in enumerate(expected):
    if not e.size:
      tolerances.append(np.zeros([]))
      continue
    if not np.all(np.isfinite(e)):
      raise Left("not finite")
    if e.dtype == bool:
      e = e.astype(np.int32)
    scale = max(float(np.max(np.abs(e))), 1.0)
    moved = max(float(np.max(np.abs(n[k].astype(np.float64) - e))) for n in noisy)
    if not moved < 3e-3 * scale:
      raise Left("ill-conditioned")
    tolerances.append(np.array(2e-5 * scale + 30 * moved))
  return expected, tolerances


def _traced(function: Any, args: Sequence[np.ndarray]) -> None:
  """Runs a program, traced: TensorFlow may not know all sizes then, as of a mask's result."""
  try:
    function(*[tf.constant(x) for x in args])
  except Exception as e:  # noqa: BLE001 - whatever TensorFlow says
    raise Left(f"TensorFlow, traced: {type(e).__name__}") from e


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What came of a program.

  Attributes:
    kind: "right", "wrong", "typed", "untyped", or "left out".
    text: the difference, or the error.
    where: mesh and layout.
  """

  kind: str
  text: str = ""
  where: str = ""


def run_program(program: Program, seed: Sequence[int], devices: Sequence[str]) -> Outcome:
  """Imports a program, and compares it on a drawn layout."""
  where = ""
  try:
    expected, tolerances = expected_of(program)
    rng = np.random.default_rng(seed)
    specs = [tf.TensorSpec(a.shape, a.dtype) for a in program.arguments]
    function = tf.function(program.__call__, autograph=False)
    _traced(function, program.arguments)
    imported = mtf.from_tensorflow(function, specs)
    shape = mtf.convert_to_shape(MESHES[int(rng.integers(len(MESHES)))])
    simd = bool(rng.random() < 0.1)
    kind = mtf.SimdMeshImpl if simd else mtf.PlacementMeshImpl
    mesh_devices = list(devices[: shape.size])
    impl = kind(shape, "", mesh_devices)
    auto = bool(rng.random() < 0.15)
    if auto:
      rules = _automatic(imported, program, impl)
    else:
      names = rng.permutation(list(imported.dimensions)).tolist()
      axes = [d.name for d in shape]
      wishes = [(str(n), str(rng.choice(axes))) for n in names][: int(rng.integers(1, 9))]
      rules = layouts.filled(imported, [], wishes, {d.name: d.size for d in shape})
    traced = simd or bool(rng.random() < 0.1)
    while True:
      where = f"{shape.to_string} {'simd' if simd else 'placement'} {'auto ' * auto}{rules}"
      impl = impl.with_layout(rules) if auto else kind(shape, rules, mesh_devices)
      try:
        given = comparing.on_mesh(imported, program.arguments, impl, traced=traced)
        break
      except mtf.LayoutError as e:
        # What is not on a wire (a constant, the other operand of x @ x) has to be split, too.
        if auto or not rules or "both split over" not in str(e):
          raise
        rules = rules[:-1]
    order = [v.variable.ref() for v in imported.variables if v.variable.dtype.is_floating]
    return _compared(program, expected, tolerances, given, order, where)
  except Left as e:
    return Outcome("left out", str(e))
  except mtf.MeshError as e:
    return Outcome("typed", f"{type(e).__name__}: {e}", where)
  except Exception as e:  # noqa: BLE001 - that is what is looked for
    return Outcome("untyped", f"{type(e).__name__}: {e}", where)


def _automatic(imported: mtf.Imported, program: Program, mesh_impl: Any) -> mtf.LayoutRules:
  try:
    return comparing.automatic(imported, program.arguments, mesh_impl, time_limit=2)
  except mtf.LayoutError as e:
    if "divides no dimension" in str(e):
      raise Left("auto: no dimension is divisible") from e
    raise


def _compared(
  program: Program,
  expected: Sequence[np.ndarray],
  tolerances: Sequence[np.ndarray],
  given: Sequence[np.ndarray],
  variables: Sequence[Any],
  where: str,
) -> Outcome:
  """Compares results, gradients of arguments, and those of the variables that are read."""
  n = len(expected) - len(program.variables)
  places = {v.ref(): n + k for k, v in enumerate(program.variables)}
  pairs = [*range(n), *(places[ref] for ref in variables)]
  if len(given) != len(pairs):
    return Outcome("wrong", f"{len(given)} tensors for {len(pairs)}", where)
  for g, k in zip(given, pairs):
    e, what = expected[k], f"result {k}" if k < len(program.outputs) else f"gradient {k}"
    if g.shape != e.shape or g.dtype != e.dtype:
      return Outcome("wrong", f"{what}: {g.shape} {g.dtype} for {e.shape} {e.dtype}", where)
    if not g.size:
      continue
    difference = float(np.max(np.abs(g.astype(np.float64) - e.astype(np.float64))))
    if not difference <= tolerances[k]:
      return Outcome("wrong", f"{what}: {difference:.3g} > {float(tolerances[k]):.3g}", where)
  return Outcome("right", where=where)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
  def end(*_: Any) -> None:
    raise TimeoutError(f"no end after {_TIME_LIMIT} s")

  before = signal.signal(signal.SIGALRM, end)
  signal.alarm(_TIME_LIMIT)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def run(seed: int, number: int, devices: Sequence[str]) -> tuple[Program, Outcome]:
  """Program `number` of a seed."""
  program = draw_program(seed, number)
  with _time_limit():
    return program, run_program(program, [seed, number, 1], devices)


def blamed(program: Program, seed: Sequence[int], devices: Sequence[str], kind: str) -> str:
  """The first operation with which a program ends as it does."""
  for count in range(1, len(program.steps) + 1):
    outcome = run_program(program.first(count), seed, devices)
    if outcome.kind == kind:
      return f"{program.steps[count - 1].name}, operation {count}: {outcome.text} ({outcome.where})"
  return "all together"


def main(arguments: Sequence[str]) -> int:
  """Runs programs, and prints what came of them; 1 if one is wrong, or ends in no typed error."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--programs", type=int, default=100)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--first", type=int, default=0, help="the number of the first program")
  parser.add_argument("--only", type=int, help="the number of the only program")
  flags = parser.parse_args(arguments)
  faulthandler.enable()
  devices = virtual_cpu_devices(8)
  counts: collections.Counter[str] = collections.Counter()
  operations: collections.Counter[str] = collections.Counter()
  start = time.monotonic()
  numbers = range(flags.first, flags.first + flags.programs)
  for number in [flags.only] if flags.only is not None else numbers:
    program, outcome = run(flags.seed, number, devices)
    counts[outcome.kind] += 1
    if outcome.kind != "left out":
      operations.update(step.name for step in program.steps)
    if outcome.kind in ("wrong", "untyped", "typed") or flags.only is not None:
      blame = blamed(program, [flags.seed, number, 1], devices, outcome.kind)
      text = outcome.text if flags.only is not None else outcome.text[:600]
      print(f"--- {number} {outcome.kind}: {text}\n  {outcome.where}\n  first: {blame[:700]}")
      print(program, flush=True)
  seconds = time.monotonic() - start
  print(
    f"seed {flags.seed}, {sum(counts.values())} programs, {sum(operations.values())} operations of "
    f"{len(operations)} kinds, {seconds:.0f} s: {dict(counts)}"
  )
  return 1 if counts["wrong"] or counts["untyped"] else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
