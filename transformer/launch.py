"""Several trainers: `python -m mesh_tensorflow.transformer.launch`; see `commands.launch`."""

import sys

from mesh_tensorflow.transformer.commands.launch import main
from mesh_tensorflow.workers.launching import launch

__all__ = ["launch", "main"]

if __name__ == "__main__":
  sys.exit(main())
