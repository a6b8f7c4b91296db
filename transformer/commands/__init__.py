"""The programs of the command line: the trainer, and what starts several of its processes."""
