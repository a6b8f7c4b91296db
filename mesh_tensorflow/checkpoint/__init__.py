"""Checkpoints of variable stores, slice by slice.

Files are TensorFlow's own V2 format: each variable is one tensor under its mtf name, with the
master dtype, written as the slices that the devices hold. So no whole variable is ever put
together, any layout restores what any other wrote, and `tf.train.load_checkpoint` reads it whole.
Next to the variables there is `global_step`, an int64 scalar.

When a mesh spans several workers, each has a `Checkpointer` of the same folder, which all must
see, and calls its methods at the same places of its program.

The files, each importing only from those below it:

    checkpointer     the face: saves and restores variables, keeps a folder in order
    shared_folder    whether all workers see the folder
    restoring, writer   one restore, one save
    snapshot         the values of a save, until they are written
    attachments      files of a program's own that are part of a checkpoint
    by_chief         what the chief alone reads or writes, told to all
    meeting          what workers that write one checkpoint tell each other
    keeping          which checkpoints stay, and room on the disk
    verification     whether the files are what was written
    reader           what is in them
    files            names, order, the state file
    folder           what is inside of a folder: all changes of files go through it
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
