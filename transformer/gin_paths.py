"""Location of the package's gin files: `mesh_tensorflow.transformer.gin_paths`."""

from mesh_tensorflow.transformer.gin_config.reader import gin_dir

__all__ = ["gin_dir"]
