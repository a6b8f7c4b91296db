"""Functions of TensorFlow and models of Keras as programs on named dimensions.

    nodes        what a traced function is made of: wires, nodes, variables
    tracing      from a tf.function, tf.Module, Keras model or callable to a `Program` of nodes
    axes         which axes of which wires are one dimension
    naming       names of the dimensions, from variables' paths and from the user
    value        what is on a wire while a program is built: an mtf.Tensor and its axes
    rules        what operations mean: `Rule`, `Labelled`, `Slicewise`
    families     a file of rules for each kind of operations
    building     a program's nodes become mtf operations
    originals    names of a function's arguments and variables; own_names: without counters of Keras
    functions    what a graph calls
    models       a function for arguments of certain shapes: traced, followed, named
    tables       what an imported function says of itself; drawing: a picture of it
    imported     `from_tensorflow`, and the `Imported` that it returns

To add an operation: read the docstring of `rules`, copy a class of `families/contraction.py`, and
list a new file in `families`.
"""
