"""Makes a worker of the trainer die or hang at a given place; for --module_import.

MTF_FAULT="<signal> <worker> <place> [<step>]", such as "SIGSTOP 1 write 4".
"""

from __future__ import annotations

import os
import signal
import sys
import time

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint import writer
from mesh_tensorflow.training.progress import TrainingProgress
from mesh_tensorflow.transformer.commands import trainer
from mesh_tensorflow.transformer.model.model_steps import ModelSteps
from mesh_tensorflow.transformer.modes import perplexity_eval
from mesh_tensorflow.workers import joining


def _install(number: signal.Signals, place: str, step: int) -> None:
  """Patches what the program calls at a place."""

  def fault():
    print(f"fault: {number.name} at {place}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), number)
    time.sleep(1.0)  # It may take a moment.

  def patch(owner, name, when=lambda args: True, after=False):
    call = getattr(owner, name)

    def with_fault(*args, **kwargs):
      if not after and when(args):
        fault()
      result = call(*args, **kwargs)
      if after and when(args):
        fault()
      return result

    setattr(owner, name, with_fault)

  if place == "before join":
    patch(joining, "meet")
  elif place == "after join":
    patch(workers, "join", after=True)
  elif place == "trace":
    patch(ModelSteps, "logits_and_loss")
  elif place == "step":
    patch(TrainingProgress, "update", lambda args: args[1] >= step)
  elif place == "write":
    patch(writer.Job, "_write_parts", lambda args: args[0].step >= step)
  elif place == "eval":
    patch(perplexity_eval, "perplexity_eval")
  elif place == "end":
    patch(trainer, "run", after=True)
  else:
    raise ValueError(place)


_NUMBER, _WORKER, _PLACE = os.environ["MTF_FAULT"].split(" ", 2)
if workers.cluster_from_environment().index == int(_WORKER):
  _PLACE, _, _STEP = _PLACE.partition("/")
  _install(signal.Signals[_NUMBER], _PLACE, int(_STEP or 0))
