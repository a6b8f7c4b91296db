"""Each of the common functions on drawn layouts, beside TensorFlow; and the table of the docs."""

from __future__ import annotations

import pathlib
import re

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import LayoutError, UnsupportedError
from tests.importing import common_functions, comparing, layouts
from tests.importing.common_functions import FUNCTIONS, X

LONG_IF_SEARCHED = ("test_values_and_gradients_on_a_drawn_layout",)
# At least one of each rule of `families/batched.py` and `families/lookups.py`; others are long.
OFTEN = """keras.layers.Discretization keras.layers.Hashing keras.layers.IntegerLookup
keras.layers.StringLookup keras.ops.slice keras.ops.slice_update tf.clip_by_global_norm
tf.ensure_shape tf.image.crop_and_resize tf.linalg.cholesky_solve tf.linalg.diag tf.linalg.eigh
tf.linalg.lstsq tf.linalg.qr tf.linalg.set_diag tf.linalg.slogdet tf.linalg.solve tf.linalg.svd
tf.linalg.tensor_diag tf.linalg.triangular_solve tf.linalg.tridiagonal_solve tf.math.segment_max
tf.math.unsorted_segment_prod tf.nn.max_pool_with_argmax
tf.quantization.fake_quant_with_min_max_vars
tf.quantization.fake_quant_with_min_max_vars_per_channel
tf.quantization.quantize_and_dequantize_v2 tf.reverse_sequence tf.sparse.segment_sum
tf.unique""".split()


@pytest.mark.parametrize(
  "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.long) for n in FUNCTIONS]
)
def test_values_and_gradients_on_a_drawn_layout(name: str, cpu_devices: list[str]) -> None:
  _check(name, list(FUNCTIONS).index(name), cpu_devices, simd=False)


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_drawn_layouts_of_both_implementations(name: str, cpu_devices: list[str]) -> None:
  for k in range(3):
    _check(name, 1000 * (k + 1) + list(FUNCTIONS).index(name), cpu_devices, simd=k == 2)


def _check(name: str, seed: int, devices: list[str], *, simd: bool) -> None:
  function = FUNCTIONS[name]
  imported = common_functions.imported_of(name)
  layout = layouts.drawn(imported, 2, 2, seed)
  while True:
    try:
      both = comparing.compare(
        function.fn, function.args, layout, devices[:4], imported=imported, simd=simd
      )
      break
    except LayoutError:  # Of x @ x^T both axes of one name are in one tensor.
      if not layout:
        raise
      layout = layout[:-1]
  assert both.difference <= function.tolerance, layout


def test_there_are_many() -> None:
  assert len(FUNCTIONS) > 170
  assert set(OFTEN) < set(FUNCTIONS)


@pytest.mark.long
def test_the_table_of_the_docs() -> None:
  docs = pathlib.Path(__file__).parents[2] / "docs" / "importing.md"
  found = common_functions.kinds()
  text = docs.read_text()
  ruled, whole = text.split("By rules, ")[1].split("computed whole on each device | operations")
  count, names = ruled.split(": ", 1)
  assert re.findall(r"`([\w.]+)`", names) == sorted(n for n, types in found.items() if not types)
  assert int(count) == sum(not types for types in found.values())
  rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", whole.split("\n\n")[0], re.M)
  expected = {n: ", ".join(types) for n, types in found.items() if types}
  assert dict(rows) == expected


def test_axes_of_examples_stay_split() -> None:
  """What one device gathers is what an example needs; nothing of the batch."""
  imported = common_functions.imported_of("tf.linalg.solve")
  batch, rows, columns, sides = imported.dimensions
  split = imported.dimensions
  assert [split[n].size for n in (batch, rows, columns, sides)] == [4, 6, 6, 8]
  (op,) = [op for op in imported.operations if op.type == "MatrixSolve"]
  assert {batch, sides} <= set(op.dimensions)


class TestTables:
  def test_one_that_may_be_written_to_is_refused(self) -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)

    def fn(x: tf.Tensor) -> tf.Tensor:
      y = table.lookup(x)
      y.set_shape(x.shape)
      return y

    with pytest.raises(UnsupportedError, match="may be written to.*StaticHashTable"):
      mtf.from_tensorflow(fn, [tf.TensorSpec([4], tf.int64)])

  def test_one_that_the_function_makes_is_refused(self) -> None:
    def fn(x: tf.Tensor) -> tf.Tensor:
      initializer = tf.lookup.KeyValueTensorInitializer(tf.range(3), tf.range(3))
      return tf.lookup.StaticHashTable(initializer, 7).lookup(x)

    with pytest.raises(UnsupportedError):
      mtf.from_tensorflow(fn, [tf.TensorSpec([4], tf.int32)])

  @pytest.mark.parametrize("back", [False, True])
  def test_texts(self, back: bool, cpu_devices: list[str]) -> None:
    """To numbers, and to texts, which an operation behind it counts the letters of."""
    keys, values = tf.constant(["0", "1", "3"]), tf.constant(["x", "yyy", "zz"])
    texts = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), "unknown")
    numbers = tf.lookup.StaticHashTable(
      tf.lookup.KeyValueTensorInitializer(keys, tf.constant([0.5, 1.5, 2.5])), -1.0
    )

    def fn(x: tf.Tensor) -> tf.Tensor:
      written = tf.strings.as_string(tf.cast(tf.abs(2 * x), tf.int32))
      found = tf.strings.length(texts.lookup(written)) if back else numbers.lookup(written)
      return tf.cast(found, tf.float32) * x

    imported = comparing.imported_of(fn, [X])
    assert not imported.fallbacks
    layout = layouts.by_hand(imported)
    both = comparing.compare(fn, [X], layout, cpu_devices[:4], imported=imported)
    assert both.difference < 1e-5

  def test_texts_by_number(self, cpu_devices: list[str]) -> None:
    """Texts are gathered whole."""
    names = tf.constant(["a", "bbb", "cc"])

    def fn(x: tf.Tensor) -> tf.Tensor:
      found = tf.gather(names, tf.cast(tf.abs(x), tf.int32) % 3)
      return tf.cast(tf.strings.length(found), tf.float32) * x

    imported = comparing.imported_of(fn, [X])
    layout = layouts.by_hand(imported)
    both = comparing.compare(fn, [X], layout, cpu_devices[:4], imported=imported)
    assert both.difference < 1e-5
