"""The front of the command `mesh-transformer`: what answers before TensorFlow is imported.

Whatever is imported from `mesh_tensorflow` imports TensorFlow first, on purpose (the package has to
be there before anybody else's import of it), and that takes 3 to 7 seconds. A help text and the
answer to a wrong flag shall not wait for it. So what says them lies outside of the package: it
imports the standard library alone, and knows the trainer by its name and its flags only.

    front    which command is meant; starts the trainer with its flags
    table    all commands: flags, the gin names they bind, examples
    flags    what a flag is, and its kinds of values
    parser   parses the flags of one command; help, and errors in one line
    model_flags   those that all commands share which gin configures
    init, measuring, templates   `mesh-transformer init`

Nothing is lost by it: each command is a shorter way to write a command line of the trainer,
`mesh_tensorflow.transformer.commands.trainer`, which knows flags and gin bindings and no commands.
"""
