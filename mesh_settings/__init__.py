"""Settings, each declared once as a field of a frozen dataclass; nothing here imports TensorFlow.

    rules      constraints on values, in words and as a function: one vocabulary for gin and flags
    records    `setting(...)`, and what follows from a record: signature, docstring, checks, flags
    trainer    `TrainerSettings`: of every training loop
    run        `RunSettings`: of the Transformer's `run`, which has those of the trainer, too
    sample     `SampleSettings`: of text that a trained model writes
    hints      what was meant, for errors about names

To add a setting, add a field. Its gin name, its flag (if it has one), the check of its value, its
line in `--help`, in docs/settings.md and in docstrings, and what a resume compares come from there;
what it does is up to who reads it. The command line (`mesh_transformer_cli`) and the package both
stand on this.
"""
