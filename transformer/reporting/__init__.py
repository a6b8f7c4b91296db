"""Reports of a training, on the screen and in files: see docs/reporting.md."""
