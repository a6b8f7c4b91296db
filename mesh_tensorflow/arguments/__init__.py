"""Checks of arguments by the annotations of the function called.

    checking    reads the annotations, and makes of them a check in front of the function
    kinds       which kind each annotation stands for: those of Python, NumPy and TensorFlow
    declared    what else authors say of arguments: their ranges, and what they affect
    families    many public functions of one method, a row of a table each

Nothing here knows the language: rooms above register the kinds of their classes.
"""
