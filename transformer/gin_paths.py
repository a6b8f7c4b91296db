"""Where the gin files of the package are: `mesh_tensorflow.transformer.gin_paths`."""

from mesh_tensorflow.transformer.gin_config.gin_paths import gin_dir

__all__ = ["gin_dir"]
