"""Builds and installs Mesh TensorFlow for TensorFlow 2.

Four folders of the repository make one import package:

    mesh_tensorflow/  ->  mesh_tensorflow
    transformer/      ->  mesh_tensorflow.transformer
    gin/              ->  mesh_tensorflow/transformer/gin   (data: *.gin, no Python)
    examples/         ->  mesh_tensorflow.examples

Beside it lie mesh_settings, where settings are declared, and mesh_transformer_cli, the front of the
command `mesh-transformer`, which answers before TensorFlow is imported.

A wheel lays them out as on the right. An editable install leaves the files where they are and maps
the names; so does the package itself where a clone is imported as it lies, installed or not
(`mesh_tensorflow/environment/source_tree.py`). In all cases `gin_dir()` of
`mesh_tensorflow.transformer.gin_paths` finds the gin files.
"""

import pathlib
import re
import shutil

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent


def long_description() -> str:
  readme = ROOT / "README.md"
  return readme.read_text(encoding="utf-8") if readme.exists() else ""


class BuildAnew(build_py):
  """Copies into an empty folder: that of an earlier build may hold modules that are gone since."""

  def run(self):
    if not self.editable_mode:
      shutil.rmtree(self.build_lib, ignore_errors=True)
    super().run()


def version() -> str:
  text = (ROOT / "mesh_tensorflow" / "version.py").read_text(encoding="utf-8")
  return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]


setup(
  name="mesh-tensorflow",
  version=version(),
  description="Named-dimension model parallelism for TensorFlow 2",
  long_description=long_description(),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  license_files=["LICENSE"],
  python_requires=">=3.10",
  packages=[
    *find_packages(include=["mesh_tensorflow", "mesh_tensorflow.*"]),
    "mesh_tensorflow.transformer",
    *(f"mesh_tensorflow.transformer.{name}" for name in find_packages("transformer")),
    "mesh_tensorflow.transformer.gin",
    "mesh_tensorflow.examples",
    "mesh_settings",
    "mesh_transformer_cli",
  ],
  package_dir={
    "mesh_tensorflow": "mesh_tensorflow",
    "mesh_tensorflow.transformer": "transformer",
    "mesh_tensorflow.transformer.gin": "gin",
    "mesh_tensorflow.examples": "examples",
  },
  package_data={
    "mesh_tensorflow": ["py.typed"],
    "mesh_tensorflow.planning": ["machines/*.json"],
    "mesh_tensorflow.transformer.gin": ["*.gin", "*/*.gin", "*/*/*.gin"],
  },
  include_package_data=False,
  cmdclass={"build_py": BuildAnew},
  zip_safe=False,
  install_requires=[
    # Brings absl-py, which flags and logging use. Where tensorflow-cpu or tensorflow-tpu takes its
    # place, which no requirement can say: --no-deps, see README.md.
    "tensorflow>=2.16,<2.22",
    "tensorflow-datasets",
    "numpy",
    "gin-config",
    "tqdm",  # Progress bars of training. tensorflow-datasets needs it too, so it adds no download.
  ],
  extras_require={
    "test": [
      "build",
      "hypothesis",
      "h5py",
      "matplotlib",
      "mypy==2.4.*",  # Another version may find other faults.
      "nibabel",
      "pyarrow",
      "pytest",
      "pytest-timeout",
      "pytest-xdist",
      "ruff==0.17.*",  # Another version may format and lint in another way.
      "safetensors",
      "sacrebleu",
      "sacremoses",
      "sentencepiece",
      "setuptools>=77",  # test_packaging.py builds a wheel without build isolation.
      "tiktoken",
      "zarr>=3; python_version >= '3.11'",  # As all releases from 3 on.
      "zstandard",
    ],
    # A CPU build of PyTorch (2.13.0+cpu) satisfies this, if installed beforehand.
    "bench": ["torch==2.13.0", "transformers>=5,<6", "ctranslate2", "jax"],
    "keras-hub": ["keras-hub>=0.32"],  # Backbones, in long tests of what imports models.
    "bert": ["safetensors"],  # Weights of Hugging Face's models; its tests also need "bench".
    "vocab": ["sentencepiece"],
    "tiktoken": ["tiktoken"],
    "seqio": ["seqio"],  # Tasks of T5.
    "parquet": ["pyarrow"],
    "zstd": ["zstandard"],
    "bleu": ["sacrebleu", "sacremoses"],
    "plot": ["matplotlib"],  # loss.png of a training.
    "tensorboard": ["tensorboard"],  # TensorFlow 2.21 does not bring it.
    "profile": ["xprof"],  # The time line of a profile, in TensorBoard.
    "volumes": [
      "h5py",
      "nibabel",
      "zarr>=3; python_version >= '3.11'",
    ],  # Blocks of NIfTI, HDF5 and Zarr files.
    "docs": ["mkdocs-material>=9.6,<10"],  # The site of `make docs`.
    # Extras of the archived package that others ask for: what the one brought is in
    # install_requires; OR-Tools, of the other, crashes in a process with TensorFlow 2.21.
    "transformer": [],
    "auto_mtf": [],
  },
  entry_points={
    "console_scripts": [
      "mesh-transformer=mesh_transformer_cli.front:main",
      "mesh-transformer-launch=mesh_tensorflow.transformer.launch:main",
      "mesh-tensorflow-port=mesh_transformer_cli.port:main",
    ],
  },
  classifiers=[
    "Development Status :: 4 - Beta",
    "Intended Audience :: Science/Research",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3 :: Only",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
  ],
  keywords="tensorflow model-parallelism spmd named-tensors transformer",
)
