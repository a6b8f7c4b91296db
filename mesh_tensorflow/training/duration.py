"""Human-readable durations."""

from __future__ import annotations


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
