"""Training from a program or a notebook, by functions that run what the commands run.

What lives here: `train` and its relatives, and what a notebook needs. `passed_inputs` reads the rows and functions that
they, `generate` and `evaluate` are passed.
What must not: options of the command line, which are in `commands`, and the run itself, which is in `run`.
"""
