"""What functions accept: checks of arguments by the annotations of the function called."""
