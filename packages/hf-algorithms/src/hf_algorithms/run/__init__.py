"""A run from its first file to its summary; `loop` runs reinforcement learning, `supervised` the other recipes.

What lives here: wiring, iterations, files of the directory and its lock, evaluations, stops, restarts and the display.
What must not: arithmetic of an algorithm, which is in its recipe, and the format of commits, which is in `checkpoints`.
"""
