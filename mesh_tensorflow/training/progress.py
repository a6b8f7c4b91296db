"""Progress of a long run: a progress bar, one line per report, the lines at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import logging
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import tqdm

from mesh_tensorflow.training import model_files, reported
from mesh_tensorflow.training.divergence import DivergenceWatch
from mesh_tensorflow.training.model_files import METRICS, EventFile, MetricsFile
from mesh_tensorflow.training.model_files import write_scalars as write_scalars
from mesh_tensorflow.training.profiling import StepsProfile
from mesh_tensorflow.training.reported import ReportSteps

_Element = TypeVar("_Element")


def duration(seconds: float) -> str:
  """A number of seconds: "42 s", "5 min 10 s", "3 h 20 min"."""
  seconds = int(round(seconds))
  if seconds < 100:
    return f"{seconds} s"
  minutes, seconds = divmod(seconds, 60)
  if minutes < 100:
    return f"{minutes} min {seconds} s"
  hours, minutes = divmod(minutes, 60)
  return f"{hours} h {minutes} min"


_INSTALL = "pip install tensorboard"


def tensorboard_command(model_dir: str) -> str:
  """The command of TensorBoard that works here; with what installs TensorBoard, if it is not there.

  Args:
    model_dir: the folder of the model.
  """
  flags = f"--logdir {shlex.quote(model_dir)}"
  if shutil.which("tensorboard"):
    return f"tensorboard {flags}"
  if importlib.util.find_spec("tensorboard") is not None:
    return f"python -m tensorboard.main {flags}"
  return f"{_INSTALL} && tensorboard {flags}"


_COMMAND = "mesh-transformer"
_CLI = "mesh_transformer_cli"
_MODULE = "mesh_tensorflow.transformer.main"
# Folders of the programs that `python -m` runs.
_OURS = re.compile(r"transformer(_cli)?$")
_STEPS = "run.train_steps"
# What else `--set` calls it.
_STEPS_NAMES = {_STEPS, f"utils.{_STEPS}", "train_steps", "steps"}


def next_commands(argv: Sequence[str], model_dir: str, last_step: int) -> list[tuple[str, str]]:
  """Commands that go on with a model.

  Args:
    argv: of this process.
    model_dir: the folder of the model.
    last_step: the step at which its training ended.

  Returns:
    (what it does, command); none if the process is another program than the trainer.
  """
  program = os.path.basename(argv[0]) if argv else ""
  if program == _COMMAND:
    command = start = _COMMAND
  elif program in ("main.py", "__main__.py") and _OURS.search(os.path.dirname(argv[0])):
    command, start = f"python -m {_CLI}", f"python -m {_MODULE}"
  else:
    return []
  # `--set` overrides all others; it takes the place of what said how long to train.
  given = " ".join(_quoted(a) for a in argv[1:] if not _says_steps(a))
  return [
    ("sample", f'{command} infer --model_dir={_quoted(model_dir)} --prompt="..."'),
    ("train on", f"{start} {given} --set={_STEPS}={2 * last_step}"),
  ]


def _says_steps(argument: str) -> bool:
  """True if a command-line argument sets the step at which training ends."""
  flag, _, binding = argument.partition("=")
  return flag.lstrip("-") in ("gin_param", "set") and (
    binding.partition("=")[0].strip() in _STEPS_NAMES
  )


def _quoted(argument: str) -> str:
  """As a shell takes it: in double quotes if it has single ones, as bindings of texts have."""
  if "'" in argument and not set(argument) & set('"$`\\!'):
    return f'"{argument}"'
  return shlex.quote(argument)


@dataclasses.dataclass
class LossSummary:
  """The losses of a run, without one Python object for each step.

  Attributes:
    first: the first that is finite; None before.
    last: the last that is finite.
    best: the least of a single step.
    best_step: number of steps done then.
  """

  first: float | None = None
  last: float | None = None
  best: float = math.inf
  best_step: int = 0

  def add(self, before: int, losses: np.ndarray) -> None:
    """Takes the losses of a call.

    Args:
      before: number of steps done before it.
      losses: float [n].
    """
    places = np.flatnonzero(np.isfinite(losses))
    if not len(places):
      return
    if self.first is None:
      self.first = float(losses[places[0]])
    self.last = float(losses[places[-1]])
    least = int(places[np.argmin(losses[places])])
    if losses[least] < self.best:
      self.best, self.best_step = float(losses[least]), before + least + 1


def end_summary(
  first_step: int,
  step: int,
  seconds: float,
  losses: LossSummary,
  facts: Mapping[str, str],
  commands: Sequence[tuple[str, str]],
) -> str:
  """The text.

  Args:
    first_step: number of steps done when the run began.
    step: number of steps done when it ended.
    seconds: its time, all included.
    losses: its losses.
    facts: further lines, by what they are of.
    commands: what to type next: (what it does, command).
  """
  done = step - first_step
  rows = [("done", f"{done} steps, up to step {step}, in {duration(seconds)}, start-up included")]
  if losses.first is not None:
    rows.append(
      (
        "loss",
        f"{losses.first:.4f} at first, {losses.last:.4f} at last; the best of one step was "
        f"{losses.best:.4f}, step {losses.best_step}",
      )
    )
  rows += [*facts.items(), *commands]
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


_LOG = logging.getLogger("mesh_tensorflow")


@dataclasses.dataclass
class Rates:
  """Constants that convert step times to rates (tokens/s, FLOP/s, utilization).

  Attributes:
    tokens: number of tokens in a step, or of what else the speed is told in.
    flops: FLOPs of a step; 0: unknown.
    peak_flops: peak FLOP/s of all devices together; 0: unknown.
    memory: returns bytes in use by name of the metric; called for each report.
    unit: what the speed is told in.
  """

  tokens: int
  flops: int = 0
  peak_flops: float = 0.0
  memory: Callable[[], Mapping[str, int]] = dict
  unit: str = "tokens"
  _said: bool = dataclasses.field(default=False, init=False, repr=False)

  def of(self, steps_per_second: float) -> dict[str, float]:
    """Rates by name of the metric; an implausible utilization, above 1, is left out."""
    found = {f"{self.unit}_per_second": steps_per_second * self.tokens}
    if self.flops and self.peak_flops:
      used = steps_per_second * self.flops / self.peak_flops
      if used <= 1:
        found["flops_utilization"] = used
      else:
        self._say_wrong_peak(used)
    return found

  def _say_wrong_peak(self, used: float) -> None:
    """Says, once, that a figure above 1 is left out: the devices compute more than their peak."""
    if not self._said:
      self._said = True
      _LOG.warning(
        "flops_utilization is left out: it would be %.2f of a peak of %.3g FLOP/s; bind "
        "run.peak_flops to what the devices can compute, or to 0",
        *(used, self.peak_flops),
      )


class TrainingProgress:
  """Reports a training run.

  On a terminal a progress bar shows loss, speed and time left; the first step, every
  `report_every` steps, and the last step a line with the same facts stays on the screen. Elsewhere
  only the lines are written. Each line is also an object of `metrics.jsonl`, and TensorBoard
  scalars.

  Args:
    first_step: step at which the run starts.
    last_step: step at which it ends.
    tokens_per_step: tokens in a batch, or as many of another unit.
    report_every: steps between lines.
    summary_dir: folder for TensorBoard files and metrics, or None.
    quiet: writes nothing but these files.
    steps: the schedule of reported steps; None: as the arguments before give it.
    watch: warns of divergence; None: no warnings.
    profile_steps: (first, last) step of a TensorFlow profile; None: none.
    unit: what the speed is told in.

  Attributes:
    rates: the constants of the rates, to be completed when the program is built.
    facts: further lines of the summary at the end: texts by label.
  """

  def __init__(
    self,
    first_step: int,
    last_step: int,
    tokens_per_step: int,
    report_every: int = 100,
    summary_dir: str | None = None,
    quiet: bool = False,
    *,
    steps: ReportSteps | None = None,
    watch: DivergenceWatch | None = None,
    profile_steps: tuple[int, int] | None = None,
    unit: str = "tokens",
  ):
    self._steps = steps or ReportSteps(first_step, last_step, report_every)
    self._first_step = self._step = first_step
    self._last_step = last_step
    self._quiet = quiet
    self._watch = watch
    self._folder = summary_dir
    self._events = EventFile(summary_dir)
    self._metrics = MetricsFile(summary_dir, first_step)
    self._profile = StepsProfile(profile_steps, summary_dir, self.line)
    self.rates = Rates(tokens_per_step, unit=unit)
    self.facts: dict[str, str] = {}
    self._evaluated: dict[str, tuple[float, int]] = {}
    self._bar = tqdm.tqdm(
      total=last_step,
      initial=first_step,
      unit="step",
      dynamic_ncols=True,
      disable=quiet or not sys.stderr.isatty(),
      smoothing=0.1,
    )
    self._losses = LossSummary()
    self._window: list[np.ndarray] = []
    self._skipped = 0
    self._started = self._call_started = self._window_started = time.perf_counter()
    self._start: dict[str, float] = {}
    self._waited = 0.0  # Seconds for input, since the last line.
    self._window_step = first_step

  @property
  def shows_bar(self) -> bool:
    """True if a progress bar is shown, so that it needs updates."""
    return not self._bar.disable

  @property
  def records(self) -> bool:
    """True if metrics are written to disk."""
    return self._folder is not None

  def before_call(self, step: int) -> None:
    """To be called before a call of the program.

    Args:
      step: number of steps done.
    """
    self._profile.before_call(step)

  def update(
    self,
    step: int,
    losses: Sequence[float] | np.ndarray,
    learning_rate: Callable[[int], float | None] | float | None = None,
    *,
    bad: Sequence[float] = (),
    values: Mapping[str, np.ndarray] | None = None,
  ) -> None:
    """Records the steps of one call, up to `step`.

    Args:
      step: number of steps done.
      losses: the losses since the last call, in nats per position.
      learning_rate: of the last step, or a function of the number of a step, from 0.
      bad: for each step, how many elements were not finite, if such steps are skipped.
      values: by name what else each step returned, as many numbers as losses.
    """
    if not len(losses):
      return
    now = time.perf_counter()
    self._profile.after_call(step)
    profiling = time.perf_counter() - now
    found = np.asarray(losses, np.float32)
    before = step - len(found)
    numbers = np.arange(before + 1, step + 1)
    self._events.write_steps("loss", numbers, found)
    self._write_norms(numbers, values or {})
    self._losses.add(before, found)
    skipped = np.asarray([*bad, *[0.0] * (len(found) - len(bad))]) > 0
    self._bar.set_postfix_str(f"loss {found[-1]:.4f}", refresh=False)
    self._bar.update(step - self._step)
    at = before
    for line in self._steps.between(before, step):
      self._window.append(found[at - before : line - before])
      # Of a call only its time is known: its steps take the same.
      seconds = self._call_started + (now - self._call_started) * (line - before) / len(found)
      rate = learning_rate(line - 1) if callable(learning_rate) else learning_rate
      extra = {name: float(v[line - before - 1]) for name, v in (values or {}).items()}
      self._skipped += int(np.sum(skipped[at - before : line - before]))
      self._report(line, seconds, rate, extra)
      at = line
    self._window.append(found[at - before :])
    self._skipped += int(np.sum(skipped[at - before :]))
    self._window_started += profiling  # To end a profile and to read it is no step's time.
    self._step = step
    self._call_started = time.perf_counter()

  def _write_norms(self, numbers: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
    """Writes norms of all steps that computed them, which may be more than are reported."""
    if self._steps.norms_every:
      for name in (reported.GRADIENT_NORM, reported.PARAMETER_NORM, reported.UPDATE_NORM):
        if name in values:
          places = np.flatnonzero(values[name])  # A norm of 0 was not asked for.
          self._events.write_steps(name, numbers[places], values[name][places])

  def _report(
    self, step: int, now: float, learning_rate: float | None, extra: Mapping[str, float]
  ) -> None:
    """A line, an object of the metrics and scalars of a step.

    Args:
      step: number of steps done.
      now: when it was done.
      learning_rate: of the step.
      extra: what the step returned besides.
    """
    # Steps that were skipped have no loss: with one NaN the mean of the line would be NaN.
    window = np.concatenate(self._window) if self._window else np.zeros([0], np.float32)
    window = window[np.isfinite(window)]
    loss = float(np.mean(window, dtype=np.float64)) if len(window) else math.nan
    seconds = max(now - self._window_started, 1e-9)
    told: dict[str, float] = {} if learning_rate is None else {"learning_rate": learning_rate}
    told |= extra
    skipped = f"  {self._skipped} step(s) skipped" if self._skipped else ""
    head = f"step {step:>7}/{self._last_step}  loss {loss:.4f}  "
    if step == self._first_step + 1 and step < self._last_step:
      # TensorFlow optimizes the program in its first step: its speed says nothing of the others.
      parts = ", ".join(f"{name} {duration(n)}" for name, n in self._start.items())
      after = duration(now - self._started) + (f" ({parts})" if parts else "")
      self.line(f"{head}the first step is done, after {after}{skipped}")
    else:
      rate = max(step - self._window_step, 1) / seconds
      told |= self.rates.of(rate) | {"input_wait": self._waited}
      left = duration((self._last_step - step) / rate)
      unit = self.rates.unit
      self.line(f"{head}{told[f'{unit}_per_second']:,.0f} {unit}/s  {left} left{skipped}")
    told |= self.rates.memory()
    self._events.write(step, told)
    self._events.flush()
    self._metrics.write(step, {"loss": loss, **told})
    if self._watch is not None:
      norm = extra.get(reported.GRADIENT_NORM)
      if norm is not None and self._skipped and not math.isfinite(norm):
        norm = None  # Of a step that was skipped: the line has told so.
      for text in self._watch.look(step, loss, learning_rate, norm):
        _LOG.warning("%s", text)
    self._window, self._waited = [], 0.0
    self._window_started, self._window_step = now, step

  @contextlib.contextmanager
  def starting(self, name: str) -> Iterator[None]:
    """Context that is a part of the start, whose seconds are told with the first step.

    Args:
      name: what takes the time.
    """
    began = time.perf_counter()
    yield
    self._start[name] = self._start.get(name, 0.0) + time.perf_counter() - began

  def inputs(self, name: str, elements: Iterable[_Element]) -> Iterator[_Element]:
    """Yields inputs; waiting for the first is a part of the start, for others it is reported.

    Args:
      name: what takes the time.
      elements: the inputs of calls of the program.
    """
    iterator = iter(elements)
    with self.starting(name):
      found = list(itertools.islice(iterator, 1))
    while found:
      yield found[0]
      began = time.perf_counter()
      found = list(itertools.islice(iterator, 1))
      self._waited += time.perf_counter() - began

  def restart_clock(self) -> None:
    """Restarts the clock, so that tracing, evaluation or a checkpoint do not count in the speed."""
    now = time.perf_counter()
    # Steps that are done and not reported yet keep the time that they took.
    self._window_started += now - self._call_started
    self._call_started = now

  def line(self, text: str) -> None:
    """Writes a line that stays."""
    if not self._quiet:
      if self._bar.disable:
        print(text, flush=True)
      else:
        self._bar.write(text)

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """Writes TensorBoard scalars, and an object of the metrics; of losses the summary tells."""
    for name in [n for n in values if n.startswith("eval/") and n.endswith("loss")]:
      best = min(self._evaluated.get(name, (math.inf, 0)), (values[name], step))
      self._evaluated[name] = best
      label = name.replace("/", " ")
      self.facts[label] = f"{values[name]:.4f} at last; the best was {best[0]:.4f}, step {best[1]}"
    self._events.write(step, values)
    self._events.flush()
    self._metrics.write(step, values)

  def summarize(self, checkpoint: str | None) -> None:
    """Writes the summary at the end of a run.

    Args:
      checkpoint: the newest one; None: nothing was saved.
    """
    facts = dict(self.facts)
    commands: list[tuple[str, str]] = []
    if checkpoint is not None:
      facts["checkpoint"] = checkpoint
    if self._folder and not self._quiet:
      facts["metrics"] = os.path.join(self._folder, METRICS)
      facts["losses"] = self._picture() or facts["metrics"]
      facts["scalars"] = tensorboard_command(self._folder)
      commands = next_commands(sys.argv, self._folder, self._step)
    seconds = time.perf_counter() - self._started
    self.line(end_summary(self._first_step, self._step, seconds, self._losses, facts, commands))

  def _picture(self) -> str | None:
    if not model_files.can_draw():
      return model_files.HINT
    return model_files.draw_losses(self._folder or "")

  def close(self) -> None:
    """Ends the bar, a profile and the files."""
    self._profile.close(self._step)
    self._bar.close()
    self._events.close()
