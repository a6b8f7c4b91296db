"""Functions of TensorFlow and models of Keras as programs on named dimensions.

    nodes        what a traced function is made of: wires, nodes, variables
    tracing      from a tf.function, tf.Module, Keras model or callable to a `Program` of nodes
    axes         which axes of which wires are one dimension
    naming       names of the dimensions, from variables' paths and from the user
    value        what is on a wire while a program is built: an mtf.Tensor and its axes
    rules        what operations mean: `Rule`, `Labelled`, `Slicewise`
    families     a file of rules for each kind of operations
    dynamic_shapes   shapes that only running tells: the error, and what stands in their place
    keyed_random     random numbers of a seed that is a tensor
    building     a program's nodes become mtf operations
    functions    what a graph calls; nested: programs inside of nodes
    replicating  operations without a rule, computed whole on each device
    drawing      what an imported function says of itself: tables, and a picture
    imported     `from_tensorflow`, and the `Imported` that it returns

To add an operation: read the docstring of `rules`, copy a class of `families/contraction.py`, and
list a new file in `families`.
"""
