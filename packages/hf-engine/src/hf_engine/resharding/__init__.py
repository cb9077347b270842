"""Resharding: the arithmetic of boxes, layouts, plans and rounds, and the steps that move their bytes.

What lives here: `boxes`, `layouts`, `plan` and `rounds`, which are pure; `execute` and `streaming`, which move bytes.
What must not: a backend, a library's model, and rules about when weights move, which are in `hybrid_engine`.
"""
