"""Evaluation: responses of a model to rows, and the metrics that metric functions make of them.

What lives here: `generate` and `evaluate` for any model, sets of rows, validation of a recipe, and their intervals.
What must not: when a run evaluates, which is in `run`, and how functions are called, which is in `rewards`.
"""
