"""Fourier transforms: values against NumPy, through real and imaginary parts."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from tests.conformance.framework import op
from tests.operations.descriptors_complex import in_numpy, of_parts

X, Y, Z = (mtf.Dimension(name, size) for name, size in (("x", 4), ("y", 8), ("z", 4)))
KX, KY, KZ = (mtf.Dimension(name, size) for name, size in (("kx", 4), ("ky", 8), ("kz", 4)))
XYZ = "x:4 y:8 z:4"
HALF = mtf.Dimension("kz", 3)


def _complex(name, build, reference, dims=XYZ, **kwargs):
  return op(name, of_parts(build), in_numpy(reference), dims, dims, **kwargs)


def _real(name, build, reference, dims=XYZ, **kwargs):
  def built(x):
    y = build(x)
    return [mtf.real(y), mtf.imag(y)]

  return op(name, built, lambda x: [reference(x).real, reference(x).imag], dims, **kwargs)


DESCRIPTORS = [
  _complex("fft", lambda z: mtf.fft(z, Y), lambda z: np.fft.fft(z, axis=1)),
  _complex("fft_alone", lambda z: mtf.fft(z), np.fft.fft, "y:8"),
  _complex("ifft", lambda z: mtf.ifft(z, X), lambda z: np.fft.ifft(z, axis=0)),
  _complex("fft2d_swapped", lambda z: mtf.fft2d(z, [Z, X], [KZ, KX]),
           lambda z: np.fft.fft2(z, axes=(0, 2))),
  _complex("ifft2d", lambda z: mtf.ifft2d(z, [X, Y]), lambda z: np.fft.ifft2(z, axes=(0, 1))),
  _complex("fft3d_renamed", lambda z: mtf.fft3d(z, [X, Y, Z], [KX, KY, KZ]), np.fft.fftn),
  _complex("fft3d_batch", lambda z: mtf.fft3d(z, [X, Y, Z]),
           lambda z: np.fft.fftn(z, axes=(0, 2, 3)), "x:4 n:2 y:8 z:4"),
  _complex("ifft3d", lambda z: mtf.ifft3d(z, None, [KX, KY, KZ]), np.fft.ifftn),
  _real("rfft", lambda x: mtf.rfft(x, Z, HALF), np.fft.rfft),
  _real("rfft_odd", lambda x: mtf.rfft(x), np.fft.rfft, "x:4 m:5"),
  _real("rfft2d", lambda x: mtf.rfft2d(x, [Y, Z], [KY, HALF]), np.fft.rfft2),
  _real("rfft3d_first", lambda x: mtf.rfft3d(x, [Y, Z, X], [KY, KZ, ("kx", 3)]),
        lambda x: np.fft.rfftn(x, axes=(1, 2, 0))),
  op("irfft", of_parts(lambda z: mtf.irfft(z, HALF, Z)), in_numpy(lambda z: np.fft.irfft(z, 4)),
     "x:4 kz:3", "x:4 kz:3"),
  op("irfft_odd", of_parts(lambda z: mtf.irfft(z, HALF, ("z", 5))),
     in_numpy(lambda z: np.fft.irfft(z, 5)), "x:4 kz:3", "x:4 kz:3"),
  op("irfft2d", of_parts(lambda z: mtf.irfft2d(z, None, [Y, Z])), in_numpy(np.fft.irfft2),
     "x:4 ky:8 kz:3", "x:4 ky:8 kz:3"),
  op("irfft3d", of_parts(lambda z: mtf.irfft3d(z, None, [X, Y, Z])),
     in_numpy(lambda z: np.fft.irfftn(z)), "kx:4 ky:8 kz:3", "kx:4 ky:8 kz:3"),
]  # fmt: skip
