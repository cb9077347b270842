"""Preflight: everything that is read, planned and checked before a run starts a process.

What lives here: inputs of a run, its placement, its budgets, the walk over its calls, and checks of the machine.
What must not: anything that starts workers or writes into the directory of a run; that is in `run`.
"""
