"""Settings of the reports of a training."""

from __future__ import annotations

import dataclasses
from typing import Any

from mesh_settings.trainer import steps_to_profile
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
    steps = self.profile_steps
    if steps is not None:
      object.__setattr__(self, "profile_steps", steps_to_profile(steps))
      if self.profile_steps is None:
        raise ConfigError(
          f"run.profile_steps = {steps!r}: it must be two steps, the first before the last, such "
          "as (10, 20) or '10:20'"
        )
