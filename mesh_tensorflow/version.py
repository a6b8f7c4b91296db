"""The version of the package: the only place that says it. `setup.py` reads it from here."""

__version__ = "1.0.0.dev0"
