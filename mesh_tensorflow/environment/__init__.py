"""Python, TensorFlow and the process that the package is in: start, quiet, devices, exit codes."""
