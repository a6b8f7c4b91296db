"""Blocks of volumes in files of several kinds."""

from __future__ import annotations

import zlib

import h5py
import nibabel
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ArgumentError, DataError, LayoutError, ShapeError, SizeError
from mesh_tensorflow.experimental import volumes
from tests.operations.comparing import placement, simd

zarr = pytest.importorskip("zarr")  # Not for Python 3.10.

SIZES = (8, 6, 10)
VALUES = np.random.default_rng(0).integers(-500, 500, SIZES).astype(np.int16)


def _nifti(path, values=VALUES, scale=None):
  image = nibabel.Nifti1Image(values, np.eye(4))
  if scale:
    image.header.set_slope_inter(*scale)
  nibabel.save(image, path)


def _hdf5(path, values=VALUES):
  with h5py.File(path, "w") as f:
    f.create_dataset("scans/first", data=values, chunks=(4, 4, 4), compression="gzip")


def _zarr(path, values=VALUES):
  zarr.create_array(str(path), data=values, chunks=(4, 4, 4))


WRITERS = {
  "a.nii": _nifti,
  "a.nii.gz": _nifti,
  "a.h5": _hdf5,
  "a.zarr": _zarr,
  "a.npy": lambda path: np.save(path, VALUES),
}


@pytest.fixture(params=WRITERS)
def volume(request, tmp_path):
  path = tmp_path / request.param
  WRITERS[request.param](path)
  with volumes.open_volume(path) as opened:
    yield opened


def test_blocks(volume):
  assert volume.shape == SIZES and volume.dtype == np.int16
  np.testing.assert_array_equal(volume.read([0, 0, 0], SIZES), VALUES)
  block = volume.read([2, 1, 5], [3, 4, 2], np.float32)
  assert block.dtype == np.float32
  np.testing.assert_array_equal(block, VALUES[2:5, 1:5, 5:7])
  # Beyond all ends, and wholly outside.
  wide = volume.read([-1, 4, 8], [10, 3, 4], fill=7)
  np.testing.assert_array_equal(wide[1:9, :2, :2], VALUES[:, 4:, 8:])
  assert (wide[0] == 7).all() and (wide[9] == 7).all() and (wide[:, 2:] == 7).all()
  assert (volume.read([20, 0, 0], [2, 2, 2], fill=1) == 1).all()
  with pytest.raises(ShapeError, match="as many numbers"):
    volume.read([0, 0], [1, 1])


def test_blocks_that_are_read_a_few_planes_at_a_time(volume, monkeypatch):
  monkeypatch.setattr(volumes, "_AT_ONCE", 3 * 4 * 2)
  np.testing.assert_array_equal(volume.read([0, 1, 5], [8, 4, 2]), VALUES[:, 1:5, 5:7])


@pytest.mark.parametrize("implementation", [placement, simd])
def test_each_processor_gets_its_block_and_halo(volume, implementation):
  impl = implementation("h:c,d:r", "r:2,c:2")
  shape = mtf.Shape([("b", 1), *volumes.dimensions_of(volume, "dhw"), ("i", 1)])
  slices = volumes.read_slices(impl, shape, volume, halo={"d": 2, "w": 1})
  padded = np.pad(VALUES, [(2, 2), (0, 0), (1, 1)])
  for pnum, t in enumerate(slices):
    r, c = divmod(pnum, 2)
    want = padded[4 * r : 4 * r + 8, 3 * c : 3 * c + 3]
    np.testing.assert_array_equal(t[0, ..., 0], want)
  assert slices[0].dtype == tf.float32


def test_a_laid_out_volume_is_that_of_the_file(volume):
  impl = placement("h:c,d:r", "r:2,c:2")
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  shape = mtf.Shape(volumes.dimensions_of(volume, "dhw"))
  slices = volumes.read_slices(impl, shape, volume)
  x = mtf.import_laid_out_tensor(mesh, impl.LaidOutTensor(slices), shape)
  lowering = mtf.Lowering(graph, {mesh: impl})
  np.testing.assert_array_equal(lowering.export_to_tf_tensor(x), VALUES)
  np.testing.assert_array_equal(volumes.read_local_part(impl, shape, volume), VALUES)


def test_only_the_block_is_asked_for(monkeypatch, tmp_path):
  """Of a mesh of several workers, of which this process is one: its half, and no more."""
  _hdf5(tmp_path / "a.h5")
  volume = volumes.open_volume(tmp_path / "a.h5")
  impl = placement("d:r", "r:2")
  monkeypatch.setattr(type(impl), "local_part", lambda self, shape: ([4, 0, 0], [4, 6, 10]))
  asked = []
  part = volume._part
  monkeypatch.setattr(volume, "_part", lambda place: asked.append(place) or part(place))
  got = volumes.read_local_part(impl, "d:8 h:6 w:10", volume)
  np.testing.assert_array_equal(got, VALUES[4:])
  assert asked == [(slice(4, 8), slice(0, 6), slice(0, 10))]


def test_scaled_numbers_of_nifti(tmp_path):
  _nifti(tmp_path / "a.nii", scale=(0.5, 10.0))
  volume = volumes.open_volume(tmp_path / "a.nii")
  assert volume.dtype == np.float32
  # nibabel stores what, scaled, is the given.
  want = nibabel.load(tmp_path / "a.nii").get_fdata()
  np.testing.assert_allclose(volume.read([1, 0, 0], [2, 6, 10]), want[1:3], rtol=1e-6)


def test_one_of_several_arrays(tmp_path):
  path = tmp_path / "a.h5"
  _hdf5(path)
  with h5py.File(path, "a") as f:
    f["second"] = VALUES[:2]
  assert volumes.open_volume(path, "second").shape == (2, 6, 10)
  assert volumes.open_volume(path, "/scans/first").shape == SIZES
  with pytest.raises(DataError, match="scans/first, second"):
    volumes.open_volume(path)
  with pytest.raises(DataError, match="no array 'third'"):
    volumes.open_volume(path, "third")
  group = zarr.open_group(str(tmp_path / "g.zarr"), mode="w")
  group.create_array("x", data=VALUES)
  group.create_array("y", data=VALUES[:3])
  assert volumes.open_volume(tmp_path / "g.zarr", "y").shape == (3, 6, 10)
  with pytest.raises(DataError, match="x, y"):
    volumes.open_volume(tmp_path / "g.zarr")


def test_wrong_use_is_told(tmp_path):
  with pytest.raises(DataError, match="no file"):
    volumes.open_volume(tmp_path / "none.nii")
  (tmp_path / "a.dcm").touch()
  with pytest.raises(DataError, match="must end with one of .nii"):
    volumes.open_volume(tmp_path / "a.dcm")
  for name in ("a.nii", "a.h5", "a.npy"):
    (tmp_path / name).write_bytes(b"no volume")
    with pytest.raises(DataError, match="cannot be opened"):
      volumes.open_volume(tmp_path / name)
  _nifti(tmp_path / "a.nii")
  head = bytearray((tmp_path / "a.nii").read_bytes())
  head[70:72] = b"\xff\x7f"  # The code of the dtype.
  (tmp_path / "a.nii").write_bytes(head)
  with pytest.raises(DataError, match="cannot be opened as a volume: data code 32767"):
    volumes.open_volume(tmp_path / "a.nii")
  with pytest.raises(ArgumentError, match="name of a file"):
    volumes.open_volume(None)
  np.save(tmp_path / "scalar.npy", np.float32(3))
  assert volumes.open_volume(tmp_path / "scalar.npy").read([], []) == 3
  np.save(tmp_path / "b.npy", VALUES)
  volume = volumes.open_volume(tmp_path / "b.npy")
  impl = placement("d:r", "r:2")
  with pytest.raises(ShapeError, match="8, 6, 10"):
    volumes.read_slices(impl, "d:8 h:6 w:5", volume)
  with pytest.raises(ShapeError, match="of size 1"):
    volumes.read_slices(impl, "b:2 d:8 h:6 w:10", volume)
  with pytest.raises(SizeError, match="halo"):
    volumes.read_slices(impl, "d:8 h:6 w:10", volume, halo={"z": 1})
  with pytest.raises(SizeError, match="has none"):
    volumes.read_slices(impl, "b:1 d:8 h:6 w:10", volume, halo={"b": 1})
  for begin, sizes, dtype in (
    ([0, 0, 0], [1, 1, 1.5], None), (None, None, None), ([0] * 3, [1] * 3, "float99")
  ):  # fmt: skip
    with pytest.raises(ArgumentError, match="lists of integers"):
      volume.read(begin, sizes, dtype)
  with pytest.raises(LayoutError):
    volumes.read_slices(placement("h:r", "r:4"), "d:8 h:6 w:10", volume)
  with pytest.raises(ShapeError, match="as many names"):
    volumes.dimensions_of(volume, "dh")
  with pytest.raises(ArgumentError, match="list of names"):
    volumes.dimensions_of(volume, None)
  with pytest.raises(ArgumentError, match="name of an array"):
    volumes.open_volume(tmp_path / "b.npy", 3)


def test_damaged_files_are_told(tmp_path, monkeypatch):
  """What libraries raise of their own is a DataError of one line, with the file and the place."""

  def unpack(place):
    raise zlib.error("invalid distances set")

  _nifti(tmp_path / "a.nii")
  packed = volumes.open_volume(tmp_path / "a.nii")
  monkeypatch.setattr(packed, "_part", unpack)
  _hdf5(tmp_path / "a.h5")
  closed = volumes.open_volume(tmp_path / "a.h5")
  closed.close()
  _zarr(tmp_path / "a.zarr")
  for chunk in (tmp_path / "a.zarr" / "c").rglob("*"):
    if chunk.is_file():
      chunk.write_bytes(b"none")
  records = np.zeros(SIZES, [("R", "u1"), ("G", "u1"), ("B", "u1")])
  np.save(tmp_path / "a.npy", records)
  several = [
    packed, closed, volumes.open_volume(tmp_path / "a.zarr"),
    volumes.open_volume(tmp_path / "a.npy"),
  ]  # fmt: skip
  for volume in several:
    with pytest.raises(DataError, match=r"cannot be read at \[6:8, 4:6, 8:10\]") as e:
      volume.read([6, 4, 8], [2, 2, 2], np.float32)
    assert "\n" not in str(e.value)


def test_the_imaginary_part_is_not_lost_unseen(tmp_path):
  np.save(tmp_path / "a.npy", np.array([1 + 2j, 3]))
  volume = volumes.open_volume(tmp_path / "a.npy")
  np.testing.assert_array_equal(volume.read([0], [2], np.complex64), [1 + 2j, 3])
  with pytest.raises(ArgumentError, match="imaginary part"):
    volume.read([0], [2], np.float32)


MEMORY = """
import resource, sys
import h5py, nibabel, zarr
import numpy as np
from mesh_tensorflow.experimental import volumes

def peak():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

path, more = sys.argv[1], int(sys.argv[2])
volume = volumes.open_volume(path)
volume.read([0, 0, 0], [1, 1, 1])
before = peak()
n = volume.shape[0] // 4
block = volume.read([n - 2, *(m // 4 - 2 for m in volume.shape[1:])], [n + 4] * 3, np.float32)
grown, size = peak() - before, block.nbytes / 2**20
print(path.rsplit(".", 1)[1], volume.shape, f"block {size:.0f} MB, grown {grown:.0f} MB")
assert block.any() and grown < size + more, (path, size, grown)
"""


def _large(folder, n):
  """Volumes of n ** 3 numbers of two bytes; of their planes every 64th has numbers."""
  paths = [folder / name for name in ("a.npy", "a.nii", "a.h5", "a.zarr")]
  mapped = np.lib.format.open_memmap(paths[0], "w+", np.int16, (n, n, n))
  header = nibabel.Nifti1Header()
  header.set_data_dtype(np.int16)
  header.set_data_shape((n, n, n))
  header["vox_offset"], header["magic"] = 352, b"n+1"
  with open(paths[1], "wb") as f:
    f.write(header.binaryblock)
    f.truncate(352 + 2 * n**3)
  nifti = np.memmap(paths[1], np.int16, "r+", 352, (n, n, n), order="F")
  with h5py.File(paths[2], "w") as f:
    array = f.create_dataset("x", (n, n, n), np.int16, chunks=(64, 64, 64))
    stored = zarr.create_array(str(paths[3]), shape=(n, n, n), dtype=np.int16, chunks=(64, 64, 64))
    for i in range(0, n, 64):
      plane = np.full([n, n], i + 1, np.int16)
      for a in (mapped, array, stored):
        a[i] = plane
      nifti[:, :, i] = plane
  return paths


# A file of 108 MB, and one of 4 GB.
@pytest.mark.parametrize("n,more", [(384, 40), pytest.param(1280, 200, marks=pytest.mark.long)])
def test_memory_of_a_process_that_reads_a_block(n, more, tmp_path, run_forked):
  for path in _large(tmp_path, n):
    print(run_forked(["-c", MEMORY, path, str(more)], timeout=900).stdout)
