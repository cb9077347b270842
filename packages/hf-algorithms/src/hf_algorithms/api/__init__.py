"""Training from a program or a notebook, by functions that run what the commands run.

What lives here: `train` and its relatives, the rows and functions passed to them, and names of arguments in messages.
What must not: options of the command line, which are in `commands`, and the run itself, which is in `run`.
"""
