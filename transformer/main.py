"""The trainer: `python -m mesh_tensorflow.transformer.main`; see `commands.trainer`."""

from absl import flags

from mesh_tensorflow.transformer.commands import trainer
from mesh_tensorflow.transformer.commands.trainer import console_main, main, write_command

# A program that imports this module as a library finds the trainer's flags here.
for _flag in flags.FLAGS.flags_by_module_dict()[trainer.__name__]:
  flags.FLAGS.register_flag_by_module(__name__, _flag)

__all__ = ["console_main", "main", "write_command"]

if __name__ == "__main__":
  console_main()
