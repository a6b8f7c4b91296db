"""The descriptors of this folder, on drawn layouts and in further ways; see tests/conformance."""

from tests.conformance import suite


class TestDecoding(suite.Conformance):
  room = "decoding"
