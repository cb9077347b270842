"""The commands of `hybridflow`, one module each; `hf_algorithms.cli` puts them together.

What lives here: options and output of a command, its exit code, and what only a command does, such as `doctor`.
What must not: anything that a run or a function of `hf_algorithms` does. Commands call those.
"""
