"""Text that a model writes.

From the settings to where it goes:

    settings           what `sample.*` of gin says, and old names for the same
    prompts            prompts of files: lines, or JSON lines
    rows               rows continued together: places filled again, windows that slide
    texts              from ids to text as it comes; stop strings
    continued_texts    both: many texts of a file, or a few that are followed
    screen             texts on the screen while they are written
    resumable          a file of results that a run which was interrupted goes on with
"""
