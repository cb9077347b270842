"""Reasons for a plan, and its tables and pages: alternatives, bottlenecks, tolerances, and what renders them.

Here lives what reads a finished plan, an explanation or measured errors for people; no formula of a simulator and no
decision of the search does.
"""
