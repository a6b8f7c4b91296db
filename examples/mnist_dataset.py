"""MNIST as `tf.data`: from IDX files, or, where there are none, digits drawn here.

Both give (image, label): 784 floats from 0 to 1, row by row, and an int32 from 0 to 9.
"""

from __future__ import annotations

import gzip
import os
import zlib

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf

SIZE = 28
FILES = {
  "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
  "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_IMAGES_MAGIC, _LABELS_MAGIC = 2051, 2049

# Digits of 5 x 7 dots.
_GLYPHS = (
  "01110 10001 10011 10101 11001 10001 01110",
  "00100 01100 00100 00100 00100 00100 01110",
  "01110 10001 00001 00010 00100 01000 11111",
  "11110 00001 00001 01110 00001 00001 11110",
  "00010 00110 01010 10010 11111 00010 00010",
  "11111 10000 11110 00001 00001 10001 01110",
  "00110 01000 10000 11110 10001 10001 01110",
  "11111 00001 00010 00100 01000 01000 01000",
  "01110 10001 10001 01110 10001 10001 01110",
  "01110 10001 10001 01111 00001 00010 01100",
)


def load(data_dir: str, split: str, made_examples: int) -> tuple[np.ndarray, np.ndarray, str]:
  """Images and labels of a split.

  Args:
    data_dir: folder of the four IDX files, as they are or with the suffix `.gz`. If there is
      none of them, digits are drawn instead.
    split: "train" or "test".
    made_examples: how many digits to draw then.

  Returns:
    Float images [n, 784], int32 labels [n], and where they are from, as a text.

  Raises:
    mtf.DataError: a file is damaged, or only some of the files are there.
  """
  names = [name for pair in FILES.values() for name in pair]
  missing = [name for name in names if _find(data_dir, name) is None]
  if len(missing) == len(names):
    images, labels = draw_digits(made_examples, seed=list(FILES).index(split))
    return images, labels, f"{made_examples} digits drawn by this program"
  if missing:
    raise mtf.DataError(
      f"{data_dir} has some of the MNIST files, but not {', '.join(missing)} (each may have the "
      "suffix .gz)"
    )
  image_name, label_name = FILES[split]
  images = read_images(_find(data_dir, image_name))
  labels = read_labels(_find(data_dir, label_name))
  if len(images) != len(labels):
    raise mtf.DataError(
      f"{data_dir}: {len(images)} images in {image_name}, but {len(labels)} labels in {label_name}"
    )
  return images, labels, f"{len(images)} images of {data_dir}"


def dataset(images: np.ndarray, labels: np.ndarray) -> tf.data.Dataset:
  """The examples, one by one and in order."""
  return tf.data.Dataset.from_tensor_slices((images, labels))


def _find(data_dir: str, name: str) -> str | None:
  paths = [os.path.join(data_dir, name + suffix) for suffix in ("", ".gz")]
  return next((p for p in paths if os.path.exists(p)), None)


def read_images(path: str) -> np.ndarray:
  """Images of an IDX file: float32 [n, 784] from 0 to 1.

  Raises:
    mtf.DataError: it is no such file, or it is damaged.
  """
  sizes, values = _read_idx(path, _IMAGES_MAGIC, rank=3)
  if sizes[1:] != [SIZE, SIZE]:
    raise mtf.DataError(f"{path}: images of {sizes[1]} x {sizes[2]}, expected {SIZE} x {SIZE}")
  return values.reshape(sizes[0], SIZE * SIZE).astype(np.float32) / 255.0


def read_labels(path: str) -> np.ndarray:
  """Labels of an IDX file: int32 [n] from 0 to 9.

  Raises:
    mtf.DataError: it is no such file, or it is damaged.
  """
  _, values = _read_idx(path, _LABELS_MAGIC, rank=1)
  if values.size and values.max() > 9:
    raise mtf.DataError(f"{path}: label {values.max()} at {values.argmax()}, expected 0 to 9")
  return values.astype(np.int32)


def _read_idx(path: str, magic: int, rank: int) -> tuple[list[int], np.ndarray]:
  """Sizes and bytes: the file has a magic number, the sizes (big-endian), and then the bytes."""
  try:
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as f:
      data = f.read()
  except (OSError, EOFError, zlib.error) as e:
    raise mtf.DataError(f"{path} cannot be read: {e}; fetch it again") from e
  header = 4 * (1 + rank)
  found, *sizes = (int(n) for n in np.frombuffer(data[:header].ljust(header, b"\0"), ">u4"))
  if found != magic:
    raise mtf.DataError(f"{path} begins with the number {found}, expected {magic}: another file?")
  expected = header + int(np.prod(sizes))
  if len(data) != expected:
    raise mtf.DataError(
      f"{path} has {len(data)} bytes, but {expected} for the sizes {sizes} that it states: it is "
      "damaged, fetch it again"
    )
  return sizes, np.frombuffer(data[header:], np.uint8)


def draw_digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Draws digits of random place, size, slant, weight and noise; the same for a seed.

  Args:
    count: how many.
    seed: of the random numbers.

  Returns:
    float32 [count, 784] from 0 to 1, and int32 [count].
  """
  rng = np.random.default_rng(seed)
  glyphs = np.array([[list(map(int, row)) for row in g.split()] for g in _GLYPHS], np.float32)
  glyphs = np.pad(glyphs, [(0, 0), (1, 1), (1, 1)])  # Dots beyond the edge are white.
  labels = rng.integers(0, 10, count).astype(np.int32)

  def between(low: float, high: float) -> np.ndarray:
    return rng.uniform(low, high, [count, 1, 1]).astype(np.float32)

  # For each pixel its place in dots: from the middle, turned, slanted, scaled, moved.
  y, x = np.meshgrid(*[np.arange(SIZE, dtype=np.float32) - (SIZE - 1) / 2] * 2, indexing="ij")
  angle, slant = between(-0.2, 0.2), between(-0.2, 0.2)
  x, y = x - between(-3, 3), y - between(-3, 3)
  x, y = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
  row = y / between(2.3, 3.2) + 4.0
  column = (x + slant * y) / between(2.3, 3.2) + 3.0
  row, column = np.clip(row, 0, 7.999), np.clip(column, 0, 5.999)
  r, c = row.astype(int), column.astype(int)
  down, right = row - r, column - c
  which = labels[:, None, None]
  ink = (1 - down) * ((1 - right) * glyphs[which, r, c] + right * glyphs[which, r, c + 1])
  ink += down * ((1 - right) * glyphs[which, r + 1, c] + right * glyphs[which, r + 1, c + 1])
  ink = np.clip((ink - between(0.25, 0.45)) * between(2.0, 4.0), 0, 1)
  ink += rng.normal(0, 0.1, ink.shape).astype(np.float32)
  return np.clip(ink, 0, 1).reshape(count, SIZE * SIZE).astype(np.float32), labels
