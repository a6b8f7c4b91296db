"""Checkpoints of variable stores, slice by slice.

Files are TensorFlow's own V2 format: each variable is one tensor under its mtf name, with the
master dtype, written as the slices that the devices hold. So no whole variable is ever put
together, any layout restores what any other wrote, and `tf.train.load_checkpoint` reads it whole.
Next to the variables there is `global_step`, an int64 scalar.

When a mesh spans several workers, each has a `Checkpointer` of the same folder, which all must
see, and calls its methods at the same places of its program.

The files, each importing only from those after it: `checkpointer` (the face), `shared_folder`
(whether all workers see it), `copies` (the values of a save), `attachments`, `restoring` and
`writer` (one restore, one save), `meeting` (what workers tell each other), `mismatch` (words for a
checkpoint of another model), `snapshot` (values until they are written), `keeping` (which ones
stay, and room on the disk), `verification` (whether the files are what was written), `stored` and
`reader` (what is in them), `files` (names, folders, the state file), `folder` (what is inside of a
folder: all changes of files go through it).
"""

from mesh_tensorflow.checkpoint.attachments import attachment
from mesh_tensorflow.checkpoint.checkpointer import Checkpointer
from mesh_tensorflow.checkpoint.files import all_checkpoints, get_step_from_path
from mesh_tensorflow.checkpoint.keeping import Best
from mesh_tensorflow.checkpoint.reader import Values
from mesh_tensorflow.checkpoint.restoring import GLOBAL_STEP, Restored
from mesh_tensorflow.checkpoint.verification import describe, latest_checkpoint, resolve, verify
from mesh_tensorflow.errors import DamagedCheckpointError

__all__ = [
  "Best",
  "Checkpointer",
  "DamagedCheckpointError",
  "GLOBAL_STEP",
  "Restored",
  "Values",
  "all_checkpoints",
  "attachment",
  "describe",
  "get_step_from_path",
  "latest_checkpoint",
  "resolve",
  "verify",
]
