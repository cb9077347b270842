"""Reasons for a plan, and its tables and pages: alternatives, bottlenecks, tolerances, and what renders them.

What lives here: the presentation of finished plans, explanations and measured errors to people. What must not: formulas
of simulators, and decisions of the search.
"""
