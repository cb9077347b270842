"""A run from its first file to its summary; `loop` runs reinforcement learning, `supervised` the other recipes.

What lives here: wiring, iterations, evaluations, stops, restarts, the summary and the display.
What must not: arithmetic of an algorithm, which is in its recipe, the format of commits, which is in `checkpoints`, and
writing of files, which is in `run_directory`.
"""
