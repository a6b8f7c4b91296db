"""What a user asks of the reports of a training."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.planning.machine import convert_to_machine


@dataclasses.dataclass(frozen=True)
class ReportSettings:
  """The settings of reports, as `run` has them; checked when it is made.

  Attributes:
    norms_every: steps between norms of gradients, parameters and updates, each of which then is
      a TensorBoard scalar; None: those of the lines of the report; 0: none are computed.
    peak_flops: what the utilization is a part of: FLOP/s of all devices together; or a machine, by
      the name of a shipped one or of a file of `mtf.planning.Machine`; None: it is measured when
      training begins, by products of matrices; 0: no utilization is told.
    profile_steps: (first, last) step of a TensorFlow profile, or such a text as "10:20"; None:
      no profile.

  Raises:
    ConfigError: one of them is something else.
  """

  norms_every: int | None = None
  peak_flops: float | str | None = None
  profile_steps: Any = None

  def __post_init__(self) -> None:
    every = self.norms_every
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
      raise ConfigError(
        f"run.norms_every = {every!r}: it must be a whole number of at least 0, or None"
      )
    peak = self.peak_flops
    if isinstance(peak, str):
      convert_to_machine(peak)
    elif peak is not None and (
      isinstance(peak, bool) or not isinstance(peak, (int, float)) or not peak >= 0
    ):
      raise ConfigError(
        f"run.peak_flops = {peak!r}: it must be a number of FLOP/s, the name of a machine or of "
        "its file, or None"
      )
    object.__setattr__(self, "profile_steps", _steps(self.profile_steps))


def _steps(given: Any) -> tuple[int, int] | None:
  """The steps of a profile, as numbers."""
  steps = given
  if isinstance(given, str):
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", given)
    steps = (int(match[1]), int(match[2])) if match else None
  if given is None:
    return None
  if (
    not isinstance(steps, (tuple, list))
    or len(steps) != 2
    or not all(isinstance(n, int) and not isinstance(n, bool) for n in steps)
    or not 0 <= steps[0] < steps[1]
  ):
    raise ConfigError(
      f"run.profile_steps = {given!r}: it must be two steps, the first before the last, such as "
      "(10, 20) or '10:20'"
    )
  return steps[0], steps[1]
