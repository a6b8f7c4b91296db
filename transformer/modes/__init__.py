"""The modes of `run`: one file a mode, with its whole loop.

    run, job             settings, checked and resolved, and the mode that gets them; `@mode`
    make_estimator       the model on its devices, with its folder
    planned_steps        its programs for a mesh that is not there
    automatic_layout     what "auto" stands for: the layout searched, or that of the checkpoint
    chosen_checkpoints, input_fns, infer_datasets   what several modes use

To add a mode, copy `perplexity_eval.py` and name the file in the list below: `@mode` registers it
when it is imported.
"""

from mesh_tensorflow.transformer.modes import (
  average,
  dry_run,
  eval,
  export,
  infer,
  perplexity_eval,
  plan,
  score,
  search,
  train,
)
from mesh_tensorflow.transformer.modes.job import Job as Job
from mesh_tensorflow.transformer.modes.job import mode as mode
