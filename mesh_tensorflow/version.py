"""The package's version, defined only here; `setup.py` reads it from this file."""

__version__ = "1.0.0.dev0"
